//! Durations as counters keep them.

use std::time::Duration;

/// Nanoseconds, saturating after 584 years.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Nanoseconds as milliseconds, for reports.
#[expect(clippy::cast_precision_loss, reason = "times far below 2^53 ns")]
pub(crate) fn millis(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// Nanoseconds as seconds, for reports.
#[expect(clippy::cast_precision_loss, reason = "times far below 2^53 ns")]
pub(crate) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
