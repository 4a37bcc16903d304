//! Watches the loop from a thread of its own: a tick, or work between ticks, that does not end is named.

use super::{OnFailure, Regulated, Shared, lock};
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// How often a tick is looked at within the time that it may take. A machine that slept, or a process
/// that was stopped, lets no looks happen meanwhile, so that such a pause is no alarm.
pub(super) const LOOKS: u32 = 10;

/// Which tick, or work between ticks, is under way.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    /// Its number from 1 on; 0 while the loop waits.
    number: AtomicU64,
    begun: AtomicU64,
}

impl UnderWay {
    pub(super) fn begin(&self) {
        let number = self.begun.fetch_add(1, Relaxed) + 1;
        self.number.store(number, Relaxed);
    }

    pub(super) fn end(&self) {
        self.number.store(0, Relaxed);
    }
}

/// What a look told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum News {
    /// One and the same tick has been under way for too many looks.
    Stuck,
    /// It has ended.
    Over,
}

/// What was seen so far.
#[derive(Debug, Default)]
struct Looks {
    number: u64,
    same: u32,
}

impl Looks {
    /// Takes in which tick is under way now.
    fn look(&mut self, number: u64) -> Option<News> {
        if number != 0 && number == self.number {
            self.same = self.same.saturating_add(1);
            return (self.same == LOOKS).then_some(News::Stuck);
        }
        let was_stuck = self.same >= LOOKS;
        (self.number, self.same) = (number, 0);
        was_stuck.then_some(News::Over)
    }
}

/// Watches until the loop is told to stop.
pub(super) fn watch(
    shared: &Shared,
    regulated: &Regulated,
    limit: Duration,
    on_failure: OnFailure,
) {
    let mut looks = Looks::default();
    while !shared.stops_within(limit / LOOKS) {
        match looks.look(shared.under_way.number.load(Relaxed)) {
            None => {}
            Some(News::Stuck) => {
                let why = format!(
                    "a tick of the governor has not ended for {:.1} s; until it does nothing is regulated, \
                     and what is locked stays locked",
                    limit.as_secs_f64()
                );
                tracing::error!("{why}");
                if on_failure == OnFailure::Stop {
                    regulated.counters.halt(why.clone());
                }
                lock(&shared.status).stuck = Some(why);
            }
            Some(News::Over) => {
                tracing::warn!("the tick that did not end has ended; control goes on");
                lock(&shared.status).stuck = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_tick_that_is_seen_again_and_again_is_stuck() {
        let mut looks = Looks::default();
        // Each look finds another tick, or none.
        for number in [0, 1, 0, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] {
            assert_eq!(looks.look(number), None);
        }
        assert_eq!(looks.look(5), None);
        for _ in 1..LOOKS {
            assert_eq!(looks.look(5), None, "long, and not yet too long");
        }
        assert_eq!(looks.look(5), Some(News::Stuck));
        assert_eq!(looks.look(5), None, "it is said once");
        assert_eq!(looks.look(0), Some(News::Over));
        assert_eq!(looks.look(0), None);
        for _ in 0..LOOKS {
            looks.look(6);
        }
        assert_eq!(looks.look(6), Some(News::Stuck));
        assert_eq!(looks.look(7), Some(News::Over), "the next one came at once");
    }
}
