//! Threads that others wait for: they run soon after they wake up, although the processors are busy.

use nix::errno::Errno;

/// Nice value of an urgent thread, where the system grants it.
const NICE: i32 = -10;

/// Time slice of an urgent thread, nanoseconds: the least that Linux grants. From 6.12 on a thread with a
/// shorter slice takes the place of one with a longer one when it wakes up; before, this changes nothing.
const SLICE_NS: u64 = 100_000;

/// The calling thread, for calls that also take others.
const SELF: libc::id_t = 0;

/// What a thread was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Urgency {
    /// More weight than others have. It takes `CAP_SYS_NICE` or `RLIMIT_NICE`.
    pub weight: bool,
    /// A short slice.
    pub slice: bool,
}

/// Has the calling thread run soon after it wakes up, as far as the system grants it. A thread that already has
/// a better nice value, or that is under another policy than the usual one, keeps what it has.
pub fn hurry() -> Urgency {
    // SAFETY: no preconditions.
    if unsafe { libc::sched_getscheduler(0) } != libc::SCHED_OTHER {
        return Urgency {
            weight: false,
            slice: false,
        };
    }
    Urgency {
        weight: nice() <= NICE || set_nice(NICE).is_ok(),
        slice: set_slice(SLICE_NS).is_ok(),
    }
}

/// Nice value of the calling thread; on Linux each has its own.
fn nice() -> i32 {
    // SAFETY: no preconditions.
    unsafe { libc::getpriority(libc::PRIO_PROCESS, SELF) }
}

fn set_nice(nice: i32) -> Result<(), Errno> {
    // SAFETY: no preconditions.
    let done = unsafe { libc::setpriority(libc::PRIO_PROCESS, SELF, nice) };
    Errno::result(done).map(drop)
}

/// The kernel's structure, version 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

/// Bytes of [`Attributes`].
const SIZE: u32 = 48;
const _: () = assert!(size_of::<Attributes>() == 48);

/// Time slice of the calling thread under the usual policy; its nice value stays.
fn set_slice(slice_ns: u64) -> Result<(), Errno> {
    let wanted = Attributes {
        size: SIZE,
        policy: libc::SCHED_OTHER.unsigned_abs(),
        flags: 0,
        nice: nice(),
        priority: 0,
        runtime_ns: slice_ns,
        deadline_ns: 0,
        period_ns: 0,
    };
    // SAFETY: the kernel reads a structure that says how large it is.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, SELF, &raw const wanted, 0) };
    Errno::result(done).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_a_thread<T: Send>(body: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| scope.spawn(body).join().unwrap())
    }

    #[test]
    fn what_was_granted_is_what_the_thread_has() {
        on_a_thread(|| {
            let before = nice();
            let granted = hurry();
            let expected = if granted.weight {
                before.min(NICE)
            } else {
                before
            };
            assert_eq!(nice(), expected);
            assert!(granted.slice, "any thread may have a shorter slice");
            assert_eq!(hurry(), granted, "once more changes nothing");
            assert_eq!(nice(), expected);
        });
    }

    /// The other threads of the process keep what they have.
    #[test]
    fn only_the_calling_thread_is_hurried() {
        on_a_thread(|| {
            let before = nice();
            on_a_thread(hurry);
            assert_eq!(nice(), before);
        });
    }

    #[test]
    fn a_thread_that_runs_when_nobody_else_does_stays_so() {
        on_a_thread(|| {
            let idle = libc::sched_param { sched_priority: 0 };
            // SAFETY: the structure outlives the call.
            let set = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const idle) };
            assert_eq!(set, 0);
            let granted = hurry();
            assert!(!granted.weight && !granted.slice);
            // SAFETY: no preconditions.
            assert_eq!(unsafe { libc::sched_getscheduler(0) }, libc::SCHED_IDLE);
        });
    }
}
