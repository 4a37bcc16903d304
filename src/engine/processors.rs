//! Which processor each compute thread is on. ggml's threads wait for each other at every node of a graph, spinning.
//! On a busy machine the kernel may leave two of them on one processor for seconds, since it sees as many busy
//! threads on each; then a node takes a time slice. So where there are as many compute threads as processors, each
//! gets one of its own. Where there are fewer, the kernel has room to do better than a fixed place.

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Length of ggml's masks, as many as it has threads at most.
const MOST: usize = 512;

const THIS_THREAD: Pid = Pid::from_raw(0);

/// A processor for each compute thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Processors {
    all: CpuSet,
    /// The one of the thread that decodes: ggml places it last.
    last: CpuSet,
}

impl Processors {
    /// One for each of `threads`; `None` where this thread may use more or less than so many.
    pub(super) fn for_each(threads: u32) -> Option<Self> {
        let all = sched_getaffinity(THIS_THREAD).ok()?;
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

    /// Keeps this thread on the one that is left for it while it computes.
    pub(super) fn stay(&self) -> Stay {
        // Where the kernel refuses, as after a change of cpuset, it goes on wherever it is.
        let moved = sched_setaffinity(THIS_THREAD, &self.last).is_ok();
        Stay(moved.then_some(self.all))
    }

    /// Lets this thread run on all of them, whatever a call did to it.
    pub(super) fn release(&self) {
        let _ = sched_setaffinity(THIS_THREAD, &self.all);
    }
}

/// Ends with the thread free to run anywhere it might before.
#[derive(Debug)]
pub(super) struct Stay(Option<CpuSet>);

impl Drop for Stay {
    fn drop(&mut self) {
        if let Some(all) = &self.0 {
            let _ = sched_setaffinity(THIS_THREAD, all);
        }
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

    #[test]
    fn each_thread_gets_one_where_there_are_as_many() {
        in_a_thread(|| {
            let all = sched_getaffinity(THIS_THREAD).unwrap();
            let count = u32::try_from(numbers(&all).count()).unwrap();
            if count < 2 {
                eprintln!("SKIPPED: one processor");
                return;
            }
            let processors = Processors::for_each(count).unwrap();
            let mask = processors.mask();
            assert_eq!(
                mask.iter().filter(|&&allowed| allowed).count(),
                count as usize
            );
            let stay = processors.stay();
            let here: Vec<_> = numbers(&sched_getaffinity(THIS_THREAD).unwrap()).collect();
            assert_eq!(here, [numbers(&all).next_back().unwrap()]);
            drop(stay);
            assert_eq!(sched_getaffinity(THIS_THREAD).unwrap(), all);
            for other in [0, 1, count + 1] {
                assert!(Processors::for_each(other).is_none(), "{other}");
            }
        });
    }
}
