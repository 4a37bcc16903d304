//! How fast others take memory, and what has to be given up before they have taken it.

use crate::num::to_bytes;

/// Rates are taken over this time at least, seconds: when memory is short, ticks come every few milliseconds, and
/// over those a rate is noise.
const LEAST_WINDOW_S: f64 = 0.05;
/// Part of a reserve that may be asked for ahead without an answer: small changes are what a reserve is for.
const SLACK: f64 = 1.0 / 16.0;

/// The rate at which one kind of memory, the host's or a cgroup's, goes to others: the lesser one of two windows in
/// a row, since what has been taken at once says nothing of what comes next, and noise seldom goes one way twice.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Demand {
    /// What was free when the present window began.
    began_with_bytes: Option<u64>,
    elapsed_s: f64,
    /// Rates of the last two windows, bytes per second, the latest first.
    rates: [f64; 2],
}

impl Demand {
    /// Takes over what is available beside our own locked bytes, `elapsed_s` after the last time, and returns what
    /// others will take in the next `lead_s` beyond the slack of a reserve; at most that reserve.
    pub fn ahead_bytes(
        &mut self,
        free_bytes: Option<u64>,
        elapsed_s: f64,
        lead_s: f64,
        reserve_bytes: u64,
    ) -> u64 {
        let (Some(free), Some(before)) = (free_bytes, self.began_with_bytes) else {
            *self = Self {
                began_with_bytes: free_bytes,
                ..Self::default()
            };
            return 0;
        };
        self.elapsed_s += elapsed_s;
        if self.elapsed_s >= LEAST_WINDOW_S {
            let taken_bytes = before.saturating_sub(free) as f64;
            self.rates = [taken_bytes / self.elapsed_s, self.rates[0]];
            self.began_with_bytes = Some(free);
            self.elapsed_s = 0.0;
        }
        let bytes_per_s = self.rates[0].min(self.rates[1]);
        let reserve = reserve_bytes as f64;
        to_bytes((bytes_per_s * lead_s - reserve * SLACK).clamp(0.0, reserve))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    /// Looks `ticks` times, `tick_ms` apart, while somebody takes `mib_per_s`; the answer to the last look.
    fn taken(demand: &mut Demand, mib_per_s: u64, ticks: u64, tick_ms: u32) -> u64 {
        let start = demand.began_with_bytes.unwrap_or(1000 * GIB);
        let looks = (0..=ticks).map(|tick| {
            let free = start - mib_per_s * MIB * u64::from(tick_ms) * tick / 1000;
            demand.ahead_bytes(Some(free), f64::from(tick_ms) / 1000.0, 0.25, GIB)
        });
        looks.last().unwrap_or(0)
    }

    #[test]
    fn who_takes_fast_is_given_ahead_and_who_takes_slowly_is_not() {
        for tick_ms in [10, 50, 100] {
            let ahead = taken(&mut Demand::default(), 2048, 30, tick_ms);
            // A quarter of a second less the slack.
            assert!((447..=448).contains(&(ahead >> 20)), "{ahead}");
            assert_eq!(taken(&mut Demand::default(), 255, 30, tick_ms), 0);
            assert_eq!(taken(&mut Demand::default(), 40 << 10, 30, tick_ms), GIB);
        }
    }

    #[test]
    fn what_was_taken_at_once_says_nothing_of_what_comes_next() {
        let mut demand = Demand::default();
        assert_eq!(taken(&mut demand, 0, 5, 100), 0);
        let left = demand.began_with_bytes.unwrap_or_default() - 5 * GIB;
        for _ in 0..3 {
            assert_eq!(demand.ahead_bytes(Some(left), 0.1, 0.25, GIB), 0);
        }
    }

    #[test]
    fn it_ends_with_the_first_window_in_which_nothing_is_taken() {
        let mut demand = Demand::default();
        assert!(taken(&mut demand, 2048, 10, 100) > 0);
        assert_eq!(taken(&mut demand, 0, 1, 100), 0);
    }

    #[test]
    fn memory_that_comes_back_and_sensors_that_go_are_no_demand() {
        let mut demand = Demand::default();
        assert!(taken(&mut demand, 2048, 10, 100) > 0);
        assert_eq!(demand.ahead_bytes(None, 0.1, 0.25, GIB), 0);
        for free in [GIB, 9 * GIB, 10 * GIB] {
            assert_eq!(demand.ahead_bytes(Some(free), 0.1, 0.25, GIB), 0);
        }
        assert_eq!(
            demand.ahead_bytes(Some(0), 0.0, 0.25, GIB),
            0,
            "no time has passed"
        );
    }
}
