//! Sizes as people write them: `2GiB`, `2500MB`, `40%`.
#![forbid(unsafe_code)]

/// Why a size was refused.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a size: write for example 2GiB, 2500MB or 40%")]
pub struct SizeError(String);

/// Parses a size in bytes; `40%` is that part of `whole_bytes`.
///
/// # Errors
/// [`SizeError`] when the text is not a size.
pub fn parse_size(text: &str, whole_bytes: u64) -> Result<u64, SizeError> {
    let refused = || SizeError(text.to_owned());
    let split = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let number: u64 = digits.parse().map_err(|_| refused())?;
    let factor = match unit.trim() {
        "" | "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "%" if number <= 100 => return Ok(whole_bytes / 100 * number),
        _ => return Err(refused()),
    };
    number.checked_mul(factor).ok_or_else(refused)
}
