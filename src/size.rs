//! Sizes in text: `2GiB`, `2500MB`, `40%`.
#![forbid(unsafe_code)]

/// Why a size was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// There is no number, or it is not a plain decimal one.
    #[error(
        "'{text}' is not a size; write bytes, or a number with MiB, GiB, MB, GB and so on, as in 2GiB or 2500MB"
    )]
    Number {
        /// What was given.
        text: String,
    },
    /// A unit that could mean two things, or none.
    #[error("the unit '{unit}' in '{text}' is not known; write {unit_hint}")]
    Unit {
        /// What was given.
        text: String,
        /// The unit in it.
        unit: String,
        /// What it could be.
        unit_hint: &'static str,
    },
    /// More than 64 bits of bytes.
    #[error("'{text}' is more than {} bytes", u64::MAX)]
    TooLarge {
        /// What was given.
        text: String,
    },
    /// A share of something unknown.
    #[error("'{text}' is a share, but the whole is not known here; write bytes, as in 2GiB")]
    NoTotal {
        /// What was given.
        text: String,
    },
    /// A share above the whole.
    #[error("'{text}' is more than 100%")]
    AboveWhole {
        /// What was given.
        text: String,
    },
}

/// Digits after the point that are read; more would be fractions of a byte in any unit.
const MAX_FRACTION_DIGITS: usize = 9;
const ONE: u128 = 1_000_000_000;

/// Reads a size in bytes.
///
/// Accepts plain bytes, `B`, decimal units (`kB` = 10^3 to `EB`), binary ones (`KiB` = 2^10 to
/// `EiB`), in any case, with decimals (`1.5GiB`, rounded down to a byte), and shares (`40%`) of
/// `total_bytes`. A bare `K`, `M` or `G` is refused, since it has two meanings.
///
/// # Errors
/// When the text is none of these, is above 2^64, or is a share and `total_bytes` is `None`.
pub fn parse_size(text: &str, total_bytes: Option<u64>) -> Result<u64, SizeError> {
    let owned = || text.to_owned();
    let trimmed = text.trim();
    let split = trimmed
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(trimmed.len());
    let (number, unit) = (&trimmed[..split], trimmed[split..].trim());
    let billionths = parse_billionths(number).ok_or_else(|| SizeError::Number { text: owned() })?;
    if unit == "%" {
        let total = total_bytes.ok_or_else(|| SizeError::NoTotal { text: owned() })?;
        if billionths > 100 * ONE {
            return Err(SizeError::AboveWhole { text: owned() });
        }
        // Both factors are small: 2^37 x 2^64.
        let share = billionths * u128::from(total) / (100 * ONE);
        return u64::try_from(share).map_err(|_| SizeError::TooLarge { text: owned() });
    }
    let bytes = billionths
        .checked_mul(unit_bytes(unit).map_err(|unit_hint| SizeError::Unit {
            text: owned(),
            unit: unit.to_owned(),
            unit_hint,
        })?)
        .map(|product| product / ONE);
    bytes
        .and_then(|n| u64::try_from(n).ok())
        .ok_or_else(|| SizeError::TooLarge { text: owned() })
}

/// A decimal number in billionths; `None` when it is not one or has too many digits.
fn parse_billionths(number: &str) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.len() > MAX_FRACTION_DIGITS {
        return None;
    }
    let whole: u128 = whole.parse().ok()?;
    let fraction: u128 = format!("{fraction:0<MAX_FRACTION_DIGITS$}").parse().ok()?;
    whole.checked_mul(ONE)?.checked_add(fraction)
}

fn unit_bytes(unit: &str) -> Result<u128, &'static str> {
    Ok(match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "pb" => 1_000_000_000_000_000,
        "eb" => 1_000_000_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        "pib" => 1 << 50,
        "eib" => 1 << 60,
        "k" => return Err("kB (1000 bytes) or KiB (1024 bytes)"),
        "m" => return Err("MB (10^6 bytes) or MiB (2^20 bytes)"),
        "g" => return Err("GB (10^9 bytes) or GiB (2^30 bytes)"),
        "t" => return Err("TB (10^12 bytes) or TiB (2^40 bytes)"),
        _ => return Err("B, kB, MB, GB, TB, KiB, MiB, GiB, TiB or %"),
    })
}

/// Bytes for people: whole below 1 KiB, else three or more digits with a binary unit.
#[must_use]
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    // The unit is chosen so that the rounded figure stays below 1024.
    let mut shift = 10u32;
    let mut unit = 0;
    while unit + 1 < UNITS.len() && (u128::from(bytes) * 10 + (5 << shift)) >> shift >= 10_240 {
        shift += 10;
        unit += 1;
    }
    let scaled = |factor: u128| (u128::from(bytes) * factor + (1 << (shift - 1))) >> shift;
    let (whole, tenths, hundredths) = (scaled(1), scaled(10), scaled(100));
    if hundredths < 1000 {
        format!(
            "{}.{:02} {}",
            hundredths / 100,
            hundredths % 100,
            UNITS[unit]
        )
    } else if tenths < 1000 {
        format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
    } else {
        format!("{whole} {}", UNITS[unit])
    }
}

/// Bytes of RAM, for sizes given in percent; `None` where /proc does not tell.
#[must_use]
pub fn total_ram_bytes() -> Option<u64> {
    use procfs::Current;
    procfs::Meminfo::current().ok().map(|m| m.mem_total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes() {
        let total = Some(1000);
        let cases: &[(&str, u64)] = &[
            ("0", 0),
            ("123", 123),
            ("123B", 123),
            ("2GiB", 2 << 30),
            ("2500MB", 2_500_000_000),
            (" 2500 MB ", 2_500_000_000),
            ("1.5gib", 3 << 29),
            ("0.1kB", 100),
            ("40%", 400),
            ("33.3%", 333),
            ("100%", 1000),
            ("16777215TiB", 16_777_215 << 40),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse_size(text, total), Ok(*bytes), "{text}");
        }
        assert_eq!(parse_size("100%", Some(u64::MAX)), Ok(u64::MAX));
    }

    #[test]
    fn refusals_say_why() {
        let cases = [
            ("", "is not a size"),
            ("GiB", "is not a size"),
            ("-1", "is not a size"),
            ("1.", "is not a size"),
            (".5GB", "is not a size"),
            ("1.2.3GB", "is not a size"),
            ("0.0000000001GB", "is not a size"),
            ("2G", "GB (10^9 bytes) or GiB"),
            ("2 bananas", "'bananas'"),
            ("2GiBs", "'GiBs'"),
            ("1e3", "'e3'"),
            ("18446744073709551616", "more than 18446744073709551615"),
            ("99999999PiB", "more than"),
            (
                "9999999999999999999999999999999999999999999",
                "is not a size",
            ),
            ("101%", "more than 100%"),
        ];
        for (text, words) in cases {
            let error = parse_size(text, Some(5)).expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
        assert!(matches!(
            parse_size("40%", None),
            Err(SizeError::NoTotal { .. })
        ));
    }

    #[test]
    fn bytes_for_people() {
        let cases: &[(u64, &str)] = &[
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (10 << 20, "10.0 MiB"),
            (940_032, "918 KiB"),
            ((1 << 20) - 1, "1.00 MiB"),
            (2_500_000_000, "2.33 GiB"),
            (1 << 30, "1.00 GiB"),
            (u64::MAX, "16.0 EiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(format_bytes(*bytes), *text);
        }
    }

    proptest! {
        #[test]
        fn any_text_is_answered(text in ".{0,24}", total in any::<Option<u64>>()) {
            let _ = parse_size(&text, total);
        }

        #[test]
        fn formatted_sizes_read_back_within_one_percent(bytes in 0..u64::MAX / 2) {
            let back = parse_size(&format_bytes(bytes), None).unwrap_or(u64::MAX);
            prop_assert!(back.abs_diff(bytes) <= bytes / 100, "{bytes} -> {back}");
        }

        #[test]
        fn shares_never_exceed_the_whole(share in 0u32..=100, total: u64) {
            let bytes = parse_size(&format!("{share}%"), Some(total)).unwrap();
            prop_assert!(bytes <= total);
        }
    }
}
