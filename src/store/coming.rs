//! Waiting for pages that were asked for, and no longer for those that do not come: a sector that cannot be read,
//! a file system that ignores the advice to read, a group that loses pages as fast as it reads them.

use super::{LeaveOff, StoreError};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long somebody is waited for of whom nothing comes, all looks together: it must not keep the others from being
/// locked.
const MOST_WAIT: Duration = Duration::from_secs(5);

/// How long after the last of them was given up all are waited for again. Counted from the last, so that everybody
/// else has had their turn by then.
const LEFT_ALONE: Duration = Duration::from_secs(60);

/// How often it is asked whether pages have come.
const STEP: Duration = Duration::from_micros(250);

/// What came of waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Came {
    /// Everything is there.
    Here,
    /// It was left off; the reads go on.
    UnderWay,
    /// It was waited for long enough, now or before.
    Never,
}

/// How somebody was waited for so far.
#[derive(Debug)]
struct Late {
    /// The fewest pages that were missing at any look.
    missing: usize,
    /// Time spent waiting since.
    waited: Duration,
}

/// Those whose pages are waited for, one at a time.
#[derive(Debug)]
pub(super) struct Coming<Who> {
    late: BTreeMap<Who, Late>,
    /// When one was given up last.
    gave_up: Option<Instant>,
    most_wait: Duration,
    left_alone: Duration,
}

impl<Who: Copy + Ord> Coming<Who> {
    pub(super) fn new() -> Self {
        Self::with(MOST_WAIT, LEFT_ALONE)
    }

    fn with(most_wait: Duration, left_alone: Duration) -> Self {
        Self {
            late: BTreeMap::new(),
            gave_up: None,
            most_wait,
            left_alone,
        }
    }

    /// Asks for pages and waits until none is `missing`, unless that is left off. Who was given up is neither asked
    /// for nor waited for again until the others have had their turn, and is there when it came late.
    ///
    /// # Errors
    /// When they cannot be asked for.
    pub(super) fn come(
        &mut self,
        who: Who,
        ask: impl FnOnce() -> Result<(), StoreError>,
        mut missing: impl FnMut() -> usize,
        leave_off: LeaveOff<'_>,
    ) -> Result<Came, StoreError> {
        if self
            .gave_up
            .is_some_and(|at| at.elapsed() > self.left_alone)
        {
            self.late.clear();
            self.gave_up = None;
        }
        let is_given_up = |late: &Late| late.waited > self.most_wait;
        let given_up = self.late.get(&who).is_some_and(is_given_up);
        if !given_up {
            ask()?;
        }
        loop {
            let left = missing();
            if left == 0 {
                self.late.remove(&who);
                return Ok(Came::Here);
            }
            if given_up {
                return Ok(Came::Never);
            }
            let late = self.late.entry(who).or_insert(Late {
                missing: left,
                waited: Duration::ZERO,
            });
            if left < late.missing {
                // However slowly, it comes.
                late.missing = left;
                late.waited = Duration::ZERO;
            }
            if late.waited > self.most_wait {
                self.gave_up = Some(Instant::now());
                return Ok(Came::Never);
            }
            if leave_off() {
                return Ok(Came::UnderWay);
            }
            let slept = Instant::now();
            std::thread::sleep(STEP);
            late.waited += slept.elapsed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const WAIT: Duration = Duration::from_millis(20);
    const ALONE: Duration = Duration::from_millis(60);

    /// One tick that lasts `tick`: `wanted` in order, as long as there is time. Nothing comes of odd numbers. Says
    /// whom it was that came, and who was asked for.
    fn tick(coming: &mut Coming<u32>, wanted: &[u32], tick: Duration) -> (Vec<u32>, Vec<u32>) {
        let began = Instant::now();
        let mut is_late = || began.elapsed() > tick;
        let (mut came, mut asked) = (Vec::new(), Vec::new());
        for &who in wanted {
            if is_late() {
                break;
            }
            let mut ask = || {
                asked.push(who);
                Ok(())
            };
            let missing = || (who % 2) as usize;
            if coming.come(who, &mut ask, missing, &mut is_late).unwrap() == Came::Here {
                came.push(who);
            }
        }
        (came, asked)
    }

    #[test]
    fn who_never_comes_is_left_alone_until_all_others_have_had_their_turn() {
        let mut coming = Coming::with(WAIT, ALONE);
        let wanted = [1, 3, 2, 4];
        let mut ticks = 0;
        // Ticks are shorter than what is waited for one of them.
        while tick(&mut coming, &wanted, WAIT / 4).0.is_empty() {
            ticks += 1;
            assert!(ticks < 1000, "the others never have their turn");
        }
        assert!(ticks >= 4, "two of them were waited for: {ticks}");
        for _ in 0..3 {
            let (came, asked) = tick(&mut coming, &wanted, WAIT / 4);
            assert_eq!((came, asked), (vec![2, 4], vec![2, 4]));
        }
        std::thread::sleep(ALONE);
        assert_eq!(tick(&mut coming, &wanted, WAIT / 4).1, [1]);
    }

    #[test]
    fn what_comes_slowly_is_not_given_up_and_what_comes_late_is_there() {
        let mut coming = Coming::with(WAIT, ALONE);
        let began = Instant::now();
        // A page comes in half of the time that is waited for one.
        let pages = 6;
        let slowly = || {
            let come = began.elapsed().as_nanos() / (WAIT.as_nanos() / 2);
            pages - usize::try_from(come).unwrap().min(pages)
        };
        let came = coming.come(0, || Ok(()), slowly, &mut || false).unwrap();
        assert_eq!(came, Came::Here);
        assert!(began.elapsed() >= 3 * WAIT);
        let left = Cell::new(1);
        let mut come = || {
            let ask = || Ok(());
            coming.come(1, ask, || left.get(), &mut || false).unwrap()
        };
        assert_eq!(come(), Came::Never);
        assert_eq!(come(), Came::Never);
        left.set(0);
        assert_eq!(come(), Came::Here);
        left.set(1);
        let began = Instant::now();
        assert_eq!(come(), Came::Never);
        assert!(began.elapsed() >= WAIT, "it is waited for anew");
    }

    #[test]
    fn time_in_which_nobody_waited_does_not_count() {
        let mut coming = Coming::with(WAIT, ALONE);
        let mut look = || coming.come(1, || Ok(()), || 1, &mut || true).unwrap();
        assert_eq!(look(), Came::UnderWay);
        std::thread::sleep(2 * WAIT);
        assert_eq!(look(), Came::UnderWay);
    }
}
