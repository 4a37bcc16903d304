//! Persistent compute threads. Without an attached pool ggml makes and joins threads for every
//! piece of graph that the tap cuts.

use super::processors::{Processors, Stay, permitted};
use super::{EngineError, Poll};
use llama_cpp_sys_4 as sys;
use nix::sched::CpuSet;
use std::ptr::NonNull;

/// Spin level of the quiet pool: about 2 ms, the time between two pieces of a decode graph. Sleeping
/// at once costs a wake-up for every piece, spinning for long takes the core that reads need.
const BRIEF_SPIN_LEVEL: u32 = 1;

/// One ggml thread pool, freed on drop.
#[derive(Debug)]
pub(super) struct ThreadPool {
    raw: NonNull<sys::ggml_threadpool>,
}

impl ThreadPool {
    /// `spin_level` is ggml's `poll`, 0 to 100; `None` keeps ggml's default.
    fn new(
        threads: u32,
        spin_level: Option<u32>,
        processors: Option<&Processors>,
    ) -> Result<Self, EngineError> {
        let fail = || EngineError::Threads { threads };
        let count = i32::try_from(threads)
            .ok()
            .filter(|&n| n > 0)
            .ok_or_else(fail)?;
        // SAFETY: no preconditions.
        let mut params = unsafe { sys::ggml_threadpool_params_default(count) };
        if let Some(level) = spin_level {
            params.poll = level;
        }
        if let Some(processors) = processors {
            params.cpumask = processors.mask();
            params.strict_cpu = true;
        }
        // SAFETY: `params` is a fully initialised struct that ggml copies.
        let raw = unsafe { sys::ggml_threadpool_new(&raw mut params) };
        if let Some(processors) = processors {
            // ggml takes the calling thread for the one that will compute.
            processors.release();
        }
        NonNull::new(raw).map(|raw| Self { raw }).ok_or_else(fail)
    }

    pub(super) fn as_ptr(&self) -> *mut sys::ggml_threadpool {
        self.raw.as_ptr()
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        // SAFETY: the session drops its context before its pools, so nothing uses the pool.
        unsafe { sys::ggml_threadpool_free(self.raw.as_ptr()) };
    }
}

/// The pools of one session and which of them is in use.
#[derive(Debug)]
pub(super) struct ThreadPools {
    spinning: Option<ThreadPool>,
    quiet: Option<ThreadPool>,
    threads: u32,
    /// The processors that this thread might run on when the pools were made.
    permitted: Option<CpuSet>,
    processors: Option<Processors>,
}

impl ThreadPools {
    pub(super) fn new(threads: u32, poll: Poll) -> Result<Self, EngineError> {
        let permitted = permitted();
        let processors = permitted.and_then(|all| Processors::for_each(threads, all));
        let pool = |spin_level| ThreadPool::new(threads, spin_level, processors.as_ref());
        let spinning = match poll {
            Poll::Spin | Poll::Follow => Some(pool(None)?),
            Poll::Quiet => None,
        };
        let quiet = match poll {
            Poll::Quiet | Poll::Follow => Some(pool(Some(BRIEF_SPIN_LEVEL))?),
            Poll::Spin => None,
        };
        Ok(Self {
            spinning,
            quiet,
            threads,
            permitted,
            processors,
        })
    }

    /// Whether the pools' threads are, or could be, where those that would be made now were not: this thread may
    /// run on other processors than it might, by a user's word or a change of cpuset.
    pub(super) fn are_misplaced(&mut self) -> bool {
        let now = permitted();
        if now == self.permitted {
            return false;
        }
        self.permitted = now;
        let anew = now.and_then(|all| Processors::for_each(self.threads, all));
        self.processors.is_some() || anew.is_some()
    }

    /// Keeps the thread that decodes off the other threads' processors, until what is returned goes.
    pub(super) fn stay(&self) -> Option<Stay> {
        self.processors.as_ref().and_then(Processors::stay)
    }

    /// The pool for a token that does or does not stream experts; the only one when there is one.
    pub(super) fn pick(&self, streams: bool) -> Option<&ThreadPool> {
        let (first, second) = if streams {
            (&self.quiet, &self.spinning)
        } else {
            (&self.spinning, &self.quiet)
        };
        first.as_ref().or(second.as_ref())
    }
}
