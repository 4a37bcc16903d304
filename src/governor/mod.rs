//! The loop: each tick reads the sensors and the plant, lets the policy decide, and acts on the
//! store. On its own thread; the engine never waits for it.

mod act;
mod ahead;
mod alarm;
mod dense;
mod journal;
mod journal_file;
mod monitor;
mod observe;
mod outcomes;
mod report;
mod rounds;
mod suspend;
mod tier;
mod vram;
mod watchdog;

pub use dense::DenseWeights;
pub use journal::{Change, Entry, Journal};
pub use journal_file::{JournalError, JournalFile};
pub use monitor::{Event, Fate, Monitor, Page, Standing};
pub use suspend::Suspended;
pub use tier::{VramChange, VramEntry, VramPoint};
pub use vram::VramPart;

use crate::plant::{Counters, Totals};
use crate::sensors::{DegradedReason, DegradedSet, Roots, Sensors};
use crate::store::ExpertStore;
use crate::trace::Recording;
use hdrhistogram::Histogram;
use hotpin_controllers::{Decision, ModelShape, Moment, Policy, Reason};
use monitor::{Experts, Orders};
use observe::Plant;
use rounds::Loop;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use vram::Vram;
use watchdog::UnderWay;

/// How long a tick may take before it counts as stuck. Ticks lock as much as a disk reads in some of
/// their times; this is far beyond, also on a slow disk.
pub const STUCK_AFTER: Duration = Duration::from_secs(30);

/// What becomes of a session whose governor fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum OnFailure {
    /// It goes on without control; after a panic everything is unlocked.
    #[default]
    GoOn,
    /// It ends with an error.
    Stop,
}

/// When a session begins to decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fill {
    /// When the first decision has been carried out: what a profile names is then in memory.
    #[default]
    Before,
    /// At once. What the first decision would pin is read meanwhile, best first, between ticks and behind
    /// the engine's own reads, and pinned as it comes.
    Beside,
}

/// Settings of the loop.
#[derive(Debug, Clone)]
pub struct GovernorOptions {
    /// Time between ticks.
    pub tick: Duration,
    /// Roots of /proc and /sys.
    pub roots: Roots,
    /// The dense weights.
    pub dense: DenseWeights,
    /// Locked runs of an expert: how many slices it has, each of which may split a mapping.
    pub slices_per_expert: usize,
    /// Where ticks are recorded.
    pub recording: Option<Recording>,
    /// What becomes of the session when the loop fails.
    pub on_failure: OnFailure,
    /// When the session begins.
    pub fill: Fill,
    /// How long a tick may take before it counts as stuck.
    pub stuck_after: Duration,
    /// What of the session is in a device's memory.
    pub vram: Option<VramPart>,
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
    /// The same by errno.
    pub lock_errnos: BTreeMap<String, u64>,
    /// Experts pinned and unpinned, in all, by reason.
    pub swaps: BTreeMap<(Swap, Reason), u64>,
    /// Times that drift was detected.
    pub drift_events: u64,
    /// Major faults of the process since the governor started; `None` where they cannot be read.
    pub major_faults: Option<u64>,
    /// Time that tasks stalled on memory since then, microseconds (PSI `some`); `None` without PSI.
    pub pressure_stall_us: Option<u64>,
    /// The tick as the journal would write it.
    pub entry: Option<Entry>,
    /// Whether the pinned set is frozen.
    pub paused: bool,
    /// The ceiling on capacity that was set while the governor ran, when one was.
    pub limit: Option<Option<u64>>,
    /// Why the loop ended, when it did before it was asked to.
    pub failed: Option<String>,
    /// What the watchdog says of a tick that does not end, while it does not.
    pub stuck: Option<String>,
    /// What the sensors cannot tell.
    pub degraded: Vec<DegradedReason>,
    /// Changes of the pool in the device's memory.
    pub vram_changes: u64,
    /// What pools of other sizes would do, smallest first.
    pub vram_curve: Vec<VramPoint>,
}

/// What was done to an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Swap {
    /// It was pinned.
    Pinned,
    /// It was unpinned.
    Unpinned,
}

impl Swap {
    /// The label used in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Pinned => "pinned",
            Self::Unpinned => "unpinned",
        }
    }
}

#[derive(Debug)]
pub(super) struct Shared {
    stop: Mutex<bool>,
    wake: Condvar,
    status: Mutex<Status>,
    journal: Mutex<Journal>,
    tick_ns: Mutex<Histogram<u64>>,
    experts: Mutex<Experts>,
    orders: Mutex<Orders>,
    ticks: tokio::sync::watch::Sender<u64>,
    under_way: UnderWay,
    /// The store that is acted on; whoever wants to read it holds it for that time only.
    store: Mutex<Weak<dyn ExpertStore>>,
}

/// A running governor. Stopping (or dropping) it joins the thread; pins stay until the store goes.
#[derive(Debug)]
pub struct Governor {
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<Option<Loop>>>,
    watchdog: Option<std::thread::JoinHandle<()>>,
}

/// What goes round the loop whatever store it acts on.
pub(super) struct Ongoing {
    options: GovernorOptions,
    policy: Box<dyn Policy>,
    sensors: Sensors,
    plant: Plant,
    decision: Decision,
    started: Instant,
    shared: Arc<Shared>,
    first_faults: Option<u64>,
    first_stall_us: Option<u64>,
    degraded: DegradedSet,
    vram: Option<Vram>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Governor {
    /// Makes the first decision and carries it out, then starts the loop. With [`Fill::Before`] the profile is
    /// pinned when this returns, and `progress` is told bytes pinned and bytes planned.
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
            experts: Mutex::new(Experts::new(regulated.shape.total_experts())),
            orders: Mutex::default(),
            ticks: tokio::sync::watch::Sender::new(0),
            under_way: UnderWay::default(),
            store: Mutex::new(Arc::downgrade(&regulated.store)),
        });
        let mut looped = Loop::new(
            Ongoing {
                sensors: Sensors::open(&options.roots, Moment { ns: 0 }),
                plant: Plant::new(&regulated.shape),
                decision: Decision::default(),
                started: Instant::now(),
                shared: Arc::clone(&shared),
                first_faults: None,
                first_stall_us: None,
                degraded: DegradedSet::default(),
                vram: options.vram.clone().map(Vram::new),
                options,
                policy,
            },
            regulated,
        );
        if looped.begin(progress) {
            return Self::launch(looped);
        }
        Ok(Self {
            shared,
            thread: None,
            watchdog: None,
        })
    }

    /// Starts the threads.
    fn launch(looped: Loop) -> std::io::Result<Self> {
        let shared = Arc::clone(&looped.ongoing.shared);
        let mut governor = Self {
            shared: Arc::clone(&shared),
            thread: None,
            watchdog: None,
        };
        let regulated = looped.regulated.clone();
        let options = &looped.ongoing.options;
        let (limit, on_failure) = (options.stuck_after, options.on_failure);
        governor.thread = Some(spawn("hotpin-governor", move || looped.run())?);
        let watch = move || watchdog::watch(&shared, &regulated, limit, on_failure);
        governor.watchdog = Some(spawn("hotpin-watchdog", watch)?);
        Ok(governor)
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

    /// A handle for watching and steering the loop.
    #[must_use]
    pub fn monitor(&self) -> Monitor {
        Monitor(Arc::clone(&self.shared))
    }

    /// A copy of the histogram of tick times, ns.
    #[must_use]
    pub fn tick_times(&self) -> Histogram<u64> {
        lock(&self.shared.tick_ns).clone()
    }

    /// Ends the loop and waits for its threads. A loop that is stuck cannot be waited for, and what it
    /// holds cannot be taken apart: then the program ends here.
    pub fn stop(&mut self) {
        let _ = self.end();
    }

    /// The same; returns what went round, unless it had ended before.
    fn end(&mut self) -> Option<Loop> {
        *lock(&self.shared.stop) = true;
        self.shared.wake.notify_all();
        if let Some(watchdog) = self.watchdog.take() {
            let _ = watchdog.join();
        }
        let mut looped = None;
        if let Some(thread) = self.thread.take() {
            let is_stuck = lock(&self.shared.status).stuck.is_some();
            let patience = if is_stuck { PATIENCE } else { STUCK_AFTER };
            if !ends_within(&thread, patience) {
                tracing::error!("the governor's work does not end; the program ends without it");
                // The log may be written by another thread.
                std::thread::sleep(PATIENCE_STEP * 10);
                std::process::exit(1);
            }
            // A panic in the loop is caught inside and reported in the status.
            looped = thread.join().ok().flatten();
        }
        lock(&self.shared.journal).flush();
        looped
    }
}

/// How long a stuck tick is waited for at the end.
const PATIENCE: Duration = Duration::from_secs(5);
const PATIENCE_STEP: Duration = Duration::from_millis(20);

fn ends_within<T>(thread: &std::thread::JoinHandle<T>, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    while !thread.is_finished() && Instant::now() < until {
        std::thread::sleep(PATIENCE_STEP);
    }
    thread.is_finished()
}

fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<T>> {
    std::thread::Builder::new().name(name.into()).spawn(body)
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

impl Shared {
    /// Waits until `due`; true when it is time to stop.
    fn stops_before(&self, due: Instant) -> bool {
        let mut stop = lock(&self.stop);
        loop {
            if *stop {
                return true;
            }
            let now = Instant::now();
            if now >= due {
                return false;
            }
            stop = self
                .wake
                .wait_timeout(stop, due - now)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn stops_within(&self, time: Duration) -> bool {
        self.stops_before(Instant::now() + time)
    }
}
