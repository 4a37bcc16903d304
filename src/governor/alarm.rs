//! Between ticks: another program may take all of a small reserve before the next one is due.

use std::time::{Duration, Instant};

/// As fast as memory is taken by whoever takes it, bytes a second, with room to spare.
const FASTEST_BYTES_PER_S: u64 = 4 << 30;
/// Looking costs some tens of microseconds; more often than this it would be felt.
const LEAST: Duration = Duration::from_millis(4);
/// Part of a tick that lies between two ticks at least, however short memory is.
const LEAST_SHARE: u32 = 10;

/// What to do after a look at memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A tick, at once.
    Tick,
    /// Another look, after so long.
    Look(Duration),
}

/// A reserve of which a quarter has gone calls for a tick.
pub(super) fn floor_bytes(reserve_bytes: u64) -> u64 {
    reserve_bytes - reserve_bytes / 4
}

/// What of `beyond_bytes`, available beyond the reserves, may be taken until the next look: half, since others
/// take memory as well. No bound where nothing is known.
pub(super) fn may_take_bytes(beyond_bytes: Option<u64>) -> u64 {
    beyond_bytes.map_or(u64::MAX, |bytes| bytes / 2)
}

/// Judges what is available beyond the floors of all reserves; `None` where that is unknown. Ticks are
/// `tick` apart.
pub(super) fn judge(beyond_bytes: Option<u64>, tick: Duration) -> Next {
    match beyond_bytes {
        None => Next::Look(tick),
        Some(0) => Next::Tick,
        Some(bytes) => {
            let ms = bytes.saturating_mul(1000) / FASTEST_BYTES_PER_S;
            Next::Look(Duration::from_millis(ms).max(LEAST).min(tick))
        }
    }
}

/// Looks at memory now and then while a tick goes on.
#[derive(Debug)]
pub(super) struct Lookout {
    last: Instant,
}

impl Lookout {
    /// Nothing is looked at in the first milliseconds.
    pub(super) fn new() -> Self {
        Self {
            last: Instant::now(),
        }
    }

    /// Whether `beyond_bytes`, what is available beyond the floors of all reserves, has gone. It is not
    /// asked more often than looking is worth.
    pub(super) fn is_short(&mut self, beyond_bytes: impl FnOnce() -> Option<u64>) -> bool {
        if self.last.elapsed() < LEAST {
            return false;
        }
        self.last = Instant::now();
        beyond_bytes() == Some(0)
    }
}

/// The time between two ticks at least.
pub(super) fn least_apart(tick: Duration) -> Duration {
    (tick / LEAST_SHARE).max(LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(100);

    #[test]
    fn the_less_is_left_the_sooner_it_is_looked_at() {
        let after = |bytes| judge(Some(bytes), TICK);
        assert_eq!(after(0), Next::Tick);
        assert_eq!(after(1), Next::Look(LEAST));
        assert_eq!(after(64 << 20), Next::Look(Duration::from_millis(15)));
        assert_eq!(after(1 << 40), Next::Look(TICK));
        assert_eq!(judge(None, TICK), Next::Look(TICK), "nothing to look at");
        assert_eq!(judge(Some(u64::MAX), LEAST), Next::Look(LEAST));
    }

    #[test]
    fn half_of_what_is_left_may_be_taken_and_nothing_of_a_reserve() {
        assert_eq!(may_take_bytes(Some(0)), 0);
        assert_eq!(may_take_bytes(Some(64 << 20)), 32 << 20);
        assert_eq!(may_take_bytes(None), u64::MAX);
    }

    #[test]
    fn a_lookout_asks_no_more_often_than_it_is_worth() {
        let mut lookout = Lookout::new();
        assert!(!lookout.is_short(|| unreachable!("it was looked at just now")));
        lookout.last -= 2 * LEAST;
        assert!(lookout.is_short(|| Some(0)));
        lookout.last -= 2 * LEAST;
        assert!(!lookout.is_short(|| Some(1)));
        lookout.last -= 2 * LEAST;
        assert!(!lookout.is_short(|| None), "unknown is no alarm");
    }

    #[test]
    fn a_quarter_of_a_reserve_may_go_unnoticed() {
        assert_eq!(floor_bytes(64 << 20), 48 << 20);
        assert_eq!(floor_bytes(0), 0);
        assert_eq!(least_apart(TICK), Duration::from_millis(10));
        assert_eq!(least_apart(Duration::from_millis(10)), LEAST);
    }
}
