//! Durations as counters keep them.

use std::time::Duration;

/// Nanoseconds, saturating after 584 years.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
