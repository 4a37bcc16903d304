//! Between the HTTP side and the engine's thread: a bounded queue of jobs.

use super::job::Job;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Jobs that wait for a sequence. The engine's thread takes, everybody else offers.
#[derive(Debug)]
pub struct Queue {
    most: usize,
    inner: Mutex<Inner>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    jobs: VecDeque<Job>,
    closed: bool,
    end: Option<End>,
}

/// How the engine's thread is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// When what runs has finished.
    Drained,
    /// At once.
    Now,
}

/// Why a job was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// As many wait as may.
    Full {
        /// How many wait.
        waiting: usize,
    },
    /// The server is shutting down.
    Closed,
}

impl Queue {
    /// A queue in which at most `most` jobs wait.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            most,
            inner: Mutex::default(),
            wake: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a job, or says why not.
    ///
    /// # Errors
    /// `Refusal`: the queue is full or closed.
    pub fn offer(&self, job: Job) -> Result<(), Refusal> {
        let mut inner = self.lock();
        if inner.closed {
            return Err(Refusal::Closed);
        }
        // Those whose readers have gone hold no place.
        inner.jobs.retain(|job| !job.gone.is_set());
        if inner.jobs.len() >= self.most {
            return Err(Refusal::Full {
                waiting: inner.jobs.len(),
            });
        }
        inner.jobs.push_back(job);
        self.wake.notify_one();
        Ok(())
    }

    /// Drops the jobs whose readers have gone; true when there is a place now.
    pub fn make_room(&self) -> bool {
        let mut inner = self.lock();
        inner.jobs.retain(|job| !job.gone.is_set());
        inner.jobs.len() < self.most
    }

    /// The next job, without waiting.
    pub fn take(&self) -> Option<Job> {
        self.lock().jobs.pop_front()
    }

    /// The same for `time` at most.
    pub fn wait_for(&self, time: Duration) {
        let inner = self.lock();
        if inner.jobs.is_empty() && inner.end.is_none() {
            let _ = self.wake.wait_timeout(inner, time);
        }
    }

    /// Waits until there is a job or it is time to end.
    pub fn wait(&self) {
        let mut inner = self.lock();
        while inner.jobs.is_empty() && inner.end.is_none() {
            inner = self
                .wake
                .wait_timeout(inner, Duration::from_secs(3600))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Takes no more jobs and tells the engine's thread how to end. A later, stricter word wins.
    pub fn close(&self, end: End) {
        let mut inner = self.lock();
        inner.closed = true;
        if inner.end != Some(End::Now) {
            inner.end = Some(end);
        }
        self.wake.notify_one();
    }

    /// How to end, once it is time to.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        self.lock().end
    }

    /// Jobs that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.lock().jobs.len()
    }
}
