//! Which processor each compute thread is on. ggml's threads wait for each other at every node of a graph, spinning.
//! On a busy machine the kernel may leave two of them on one processor for seconds, since it sees as many busy
//! threads on each; then a node takes a time slice. So where there are as many compute threads as processors, each
//! gets one of its own. Where there are fewer, the kernel has room to do better than a fixed place.

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Length of ggml's masks, as many as it has threads at most.
const MOST: usize = 512;

const THIS_THREAD: Pid = Pid::from_raw(0);

/// The processors that this thread may run on; `None` where that cannot be read.
pub(super) fn permitted() -> Option<CpuSet> {
    sched_getaffinity(THIS_THREAD).ok()
}

/// A processor for each compute thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Processors {
    all: CpuSet,
    /// The one of the thread that decodes: ggml places it last.
    last: CpuSet,
}

impl Processors {
    /// One for each of `threads`; `None` where `all` are more or fewer than so many.
    pub(super) fn for_each(threads: u32, all: CpuSet) -> Option<Self> {
        let mut numbers = numbers(&all);
        let last_number = numbers.next_back()?;
        if numbers.count() + 1 != threads as usize || threads < 2 || last_number >= MOST {
            return None;
        }
        let mut last = CpuSet::new();
        last.set(last_number).ok()?;
        Some(Self { all, last })
    }

    /// ggml's mask of all of them.
    pub(super) fn mask(&self) -> [bool; MOST] {
        let mut mask = [false; MOST];
        for number in numbers(&self.all) {
            mask[number] = true;
        }
        mask
    }

    /// Keeps this thread on the one that is left for it while it computes. Where it may run on others than
    /// these, it stays as it is.
    pub(super) fn stay(&self) -> Option<Stay> {
        let before = permitted()?;
        if before == self.all {
            // Where the kernel refuses, as after a change of cpuset, it goes on wherever it is.
            let _ = sched_setaffinity(THIS_THREAD, &self.last);
        }
        Some(Stay {
            before,
            here: self.last,
        })
    }

    /// Lets this thread run on all of them, whatever a call did to it.
    pub(super) fn release(&self) {
        let _ = sched_setaffinity(THIS_THREAD, &self.all);
    }
}

/// Ends with the thread free to run anywhere it might before, unless somebody has moved it meanwhile. ggml as
/// well may have placed it: it does when it goes on with threads that paused.
#[derive(Debug)]
pub(super) struct Stay {
    before: CpuSet,
    here: CpuSet,
}

impl Drop for Stay {
    fn drop(&mut self) {
        let Some(now) = permitted() else {
            return;
        };
        if now == self.before {
            return;
        }
        // The kernel moves a thread that may no longer be where it was; a user moves one that might have stayed.
        let by_user = now != self.here && sched_setaffinity(THIS_THREAD, &self.here).is_ok();
        let to = if by_user { &now } else { &self.before };
        let _ = sched_setaffinity(THIS_THREAD, to);
    }
}

fn numbers(set: &CpuSet) -> impl DoubleEndedIterator<Item = usize> + '_ {
    (0..CpuSet::count()).filter(|&number| set.is_set(number).unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_a_thread(body: impl FnOnce() + Send + 'static) {
        std::thread::spawn(body).join().unwrap();
    }

    fn one(number: usize) -> CpuSet {
        let mut set = CpuSet::new();
        set.set(number).unwrap();
        set
    }

    /// All processors, their numbers, and a place for as many threads; nothing where there is one only.
    fn placed() -> Option<(CpuSet, Vec<usize>, Processors)> {
        let all = permitted().unwrap();
        let numbers: Vec<usize> = numbers(&all).collect();
        let count = u32::try_from(numbers.len()).unwrap();
        let processors = Processors::for_each(count, all);
        if processors.is_none() {
            eprintln!("SKIPPED: one processor");
        }
        Some((all, numbers, processors?))
    }

    #[test]
    fn each_thread_gets_one_where_there_are_as_many() {
        in_a_thread(|| {
            let Some((all, numbers, processors)) = placed() else {
                return;
            };
            let mask = processors.mask();
            let allowed = mask.iter().filter(|&&allowed| allowed).count();
            assert_eq!(allowed, numbers.len());
            let stay = processors.stay();
            assert_eq!(permitted(), Some(one(*numbers.last().unwrap())));
            drop(stay);
            assert_eq!(permitted(), Some(all));
            let count = u32::try_from(numbers.len()).unwrap();
            for other in [0, 1, count + 1] {
                assert!(Processors::for_each(other, all).is_none(), "{other}");
            }
        });
    }

    #[test]
    fn a_thread_that_was_moved_before_is_left_where_it_is() {
        in_a_thread(|| {
            let Some((_, numbers, processors)) = placed() else {
                return;
            };
            let elsewhere = one(numbers[0]);
            sched_setaffinity(THIS_THREAD, &elsewhere).unwrap();
            let stay = processors.stay();
            assert_eq!(permitted(), Some(elsewhere));
            // ggml, when threads go on that paused.
            sched_setaffinity(THIS_THREAD, &processors.last).unwrap();
            drop(stay);
            assert_eq!(permitted(), Some(elsewhere));
        });
    }

    #[test]
    fn a_thread_that_is_moved_while_it_computes_is_not_moved_back() {
        in_a_thread(|| {
            let Some((_, numbers, processors)) = placed() else {
                return;
            };
            let elsewhere = one(numbers[0]);
            let stay = processors.stay();
            sched_setaffinity(THIS_THREAD, &elsewhere).unwrap();
            drop(stay);
            assert_eq!(permitted(), Some(elsewhere));
        });
    }

    #[test]
    fn a_thread_whose_processor_has_gone_gets_back_what_is_left() {
        in_a_thread(|| {
            let Some((all, numbers, processors)) = placed() else {
                return;
            };
            let mut stay = processors.stay().unwrap();
            stay.here = one(CpuSet::count() - 1);
            // Where the kernel puts it.
            sched_setaffinity(THIS_THREAD, &one(numbers[0])).unwrap();
            drop(stay);
            assert_eq!(permitted(), Some(all));
        });
    }
}
