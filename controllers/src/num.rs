//! Conversions between counts, bytes and real numbers, each saturating and none panicking.

/// Bytes from a real number: NaN and negatives are 0, too large is `u64::MAX`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "float-to-int `as` saturates, which is what is wanted"
)]
pub(crate) fn to_bytes(value: f64) -> u64 {
    value as u64
}

/// A count of things from a real number, saturating like [`to_bytes`].
pub(crate) fn to_count(value: f64) -> usize {
    usize::try_from(to_bytes(value)).unwrap_or(usize::MAX)
}

/// Single precision, for per-expert arrays.
#[expect(
    clippy::cast_possible_truncation,
    reason = "rounding is wanted, overflow gives infinity"
)]
pub(crate) fn narrow(value: f64) -> f32 {
    value as f32
}

/// An index below [`crate::ModelShape::MAX_EXPERTS`] as `u32`.
pub(crate) fn to_u32(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// Share of the way that a first-order filter with this time constant goes in `dt_s`.
pub(crate) fn filter_share(dt_s: f64, time_constant_s: f64) -> f64 {
    if time_constant_s <= 0.0 {
        1.0
    } else {
        1.0 - (-dt_s / time_constant_s).exp()
    }
}
