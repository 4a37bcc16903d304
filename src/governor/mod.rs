//! The loop: each tick reads the sensors and the plant, lets the policy decide, and acts on the
//! store. On its own thread; the engine never waits for it.

mod act;
mod journal;
mod observe;

pub use journal::{Entry, Journal, JournalError, JournalFile};

use crate::plant::{Counters, Totals};
use crate::sensors::{Roots, Sensors};
use crate::store::ExpertStore;
use act::Acted;
use hdrhistogram::Histogram;
use hotpin_controllers::{Decision, ModelShape, Moment, Policy};
use observe::Plant;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Settings of the loop.
#[derive(Debug, Clone)]
pub struct GovernorOptions {
    /// Time between ticks.
    pub tick: Duration,
    /// Roots of /proc and /sys.
    pub roots: Roots,
    /// Bytes of dense weights that are locked.
    pub dense_locked_bytes: u64,
    /// Locked runs of an expert: how many slices it has, each of which may split a mapping.
    pub slices_per_expert: usize,
}

/// Everything the governor regulates and reads.
#[derive(Debug, Clone)]
pub struct Regulated {
    /// The store that it acts on.
    pub store: Arc<dyn ExpertStore>,
    /// The engine's counters.
    pub counters: Arc<Counters>,
    /// The model's shape.
    pub shape: ModelShape,
}

/// The last tick, for whoever asks.
#[derive(Debug, Clone, Default)]
pub struct Status {
    /// Ticks so far.
    pub ticks: u64,
    /// The decision.
    pub decision: Decision,
    /// Bytes pinned after it.
    pub pinned_bytes: u64,
    /// Bytes in transit after it.
    pub transit_bytes: u64,
    /// Engine totals at that moment.
    pub totals: Totals,
    /// Lock calls that failed, in all.
    pub lock_errors: u64,
    /// Why the loop ended, when it did before it was asked to.
    pub failed: Option<String>,
}

#[derive(Debug)]
struct Shared {
    stop: Mutex<bool>,
    wake: Condvar,
    status: Mutex<Status>,
    journal: Mutex<Journal>,
    tick_ns: Mutex<Histogram<u64>>,
}

/// A running governor. Stopping (or dropping) it joins the thread; pins stay until the store goes.
#[derive(Debug)]
pub struct Governor {
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What goes round the loop, on the governor's thread.
struct Loop {
    options: GovernorOptions,
    regulated: Regulated,
    policy: Box<dyn Policy>,
    sensors: Sensors,
    plant: Plant,
    decision: Decision,
    started: Instant,
    shared: Arc<Shared>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Governor {
    /// Makes the first decision and carries it out (the profile is pinned when this returns), then
    /// starts the loop. `progress` is told bytes pinned and bytes planned.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(
        options: GovernorOptions,
        regulated: Regulated,
        policy: Box<dyn Policy>,
        journal: Journal,
        progress: &mut dyn FnMut(u64, u64),
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            stop: Mutex::new(false),
            wake: Condvar::new(),
            status: Mutex::new(Status::default()),
            journal: Mutex::new(journal),
            tick_ns: Mutex::new(new_histogram()),
        });
        let started = Instant::now();
        let mut looped = Loop {
            sensors: Sensors::open(&options.roots, Moment { ns: 0 }),
            plant: Plant::new(&regulated.shape),
            decision: Decision::default(),
            shared: Arc::clone(&shared),
            options,
            regulated,
            policy,
            started,
        };
        let thread = if looped.guarded_tick(Some(progress)) {
            let builder = std::thread::Builder::new().name("hotpin-governor".into());
            Some(builder.spawn(move || looped.run())?)
        } else {
            None
        };
        Ok(Self { shared, thread })
    }

    /// The last tick.
    #[must_use]
    pub fn status(&self) -> Status {
        lock(&self.shared.status).clone()
    }

    /// The most recent journal entries, oldest first.
    #[must_use]
    pub fn recent(&self, most: usize) -> Vec<Entry> {
        lock(&self.shared.journal).recent(most)
    }

    /// A copy of the histogram of tick times, ns.
    #[must_use]
    pub fn tick_times(&self) -> Histogram<u64> {
        lock(&self.shared.tick_ns).clone()
    }

    /// Ends the loop and waits for its thread.
    pub fn stop(&mut self) {
        *lock(&self.shared.stop) = true;
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in the loop is caught inside and reported in the status.
            let _ = thread.join();
        }
        lock(&self.shared.journal).flush();
    }
}

impl Drop for Governor {
    fn drop(&mut self) {
        self.stop();
    }
}

#[expect(
    clippy::expect_used,
    reason = "the bounds are constants that the crate accepts"
)]
fn new_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1_000, 60_000_000_000, 2).expect("1 us to 60 s at 2 digits")
}

impl Loop {
    fn run(mut self) {
        let mut due = Instant::now() + self.options.tick;
        loop {
            if self.wait_until(due) {
                return;
            }
            if !self.guarded_tick(None) {
                return;
            }
            // A tick that took too long, or a suspended machine, is not caught up with.
            due = (due + self.options.tick).max(Instant::now());
        }
    }

    /// One tick; false when it panicked, and with it the loop has to end.
    fn guarded_tick(&mut self, progress: Option<&mut dyn FnMut(u64, u64)>) -> bool {
        if catch_unwind(AssertUnwindSafe(|| self.tick(progress))).is_ok() {
            return true;
        }
        // Without control, locked memory must not outlive the reason for it.
        self.regulated.store.unlock_all();
        let why = "the governor's tick panicked; everything was unlocked and the session goes on without control";
        tracing::error!("{why}");
        lock(&self.shared.status).failed = Some(why.to_owned());
        false
    }

    /// Waits for the next tick; true when it is time to stop.
    fn wait_until(&self, due: Instant) -> bool {
        let mut stop = lock(&self.shared.stop);
        loop {
            if *stop {
                return true;
            }
            let now = Instant::now();
            if now >= due {
                return false;
            }
            stop = self
                .shared
                .wake
                .wait_timeout(stop, due - now)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn tick(&mut self, progress: Option<&mut dyn FnMut(u64, u64)>) {
        let began = Instant::now();
        let now = Moment {
            ns: nanos(began.duration_since(self.started)),
        };
        let sample = self.sensors.sample(now);
        self.plant.read(&self.regulated);
        let observation = self
            .plant
            .observation(&sample, &self.options, &self.regulated.shape);
        self.policy.tick(&observation, &mut self.decision);
        let decided_ns = nanos(began.elapsed());
        let first = progress.is_some();
        let acted = act::carry_out(
            self.regulated.store.as_ref(),
            &self.regulated.shape,
            &self.decision,
            self.policy.ranks(),
            &self.plant,
            progress,
        );
        self.report(now, &sample, &acted);
        if !first {
            // The tick's own time: what it decides, without the lock calls that carry it out, which
            // depend on how much is locked and are in the journal.
            let _ = lock(&self.shared.tick_ns).record(decided_ns.max(1_000));
        }
    }

    fn report(&mut self, now: Moment, sample: &crate::sensors::Sample, acted: &Acted) {
        let entry = Entry::new(
            now,
            &self.decision,
            sample,
            acted,
            &self.plant,
            &self.regulated.shape,
        );
        lock(&self.shared.journal).push(entry);
        let mut status = lock(&self.shared.status);
        status.ticks += 1;
        status.decision.clone_from(&self.decision);
        status.pinned_bytes = acted.pinned_bytes;
        status.transit_bytes = acted.transit_bytes;
        status.totals = self.plant.totals();
        status.lock_errors += u64::from(acted.lock_errors);
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
