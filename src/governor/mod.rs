//! The loop: each tick reads the sensors and the plant, lets the policy decide, and acts on the
//! store. On its own thread; the engine never waits for it.

mod act;
mod alarm;
mod dense;
mod journal;
mod monitor;
mod observe;
mod outcomes;
mod suspend;
mod tier;
mod vram;
mod watchdog;

pub use dense::DenseWeights;
pub use journal::{Change, Entry, Journal, JournalError, JournalFile};
pub use monitor::{Event, Fate, Monitor, Page, Standing};
pub use suspend::Suspended;
pub use tier::{VramChange, VramEntry, VramPoint};
pub use vram::VramPart;

use crate::engine::hurry;
use crate::plant::{Counters, Totals};
use crate::sensors::{Available, DegradedReason, DegradedSet, Roots, Sensors};
use crate::store::{ExpertStore, Warmed};
use crate::time::nanos;
use crate::trace::Recording;
use act::Acted;
use hdrhistogram::Histogram;
use hotpin_controllers::{
    Action, Decision, ExpertId, ModelShape, Moment, Policy, Reason, Residence,
};
use monitor::{Experts, Orders};
use observe::Plant;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
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
struct Shared {
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

/// An expert to read when there is time.
enum Wanted {
    /// To be pinned as well.
    Pin(Action),
    /// For transit.
    Warm(ExpertId),
}

/// What goes round the loop whatever store it acts on.
struct Ongoing {
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

/// What goes round the loop, on the governor's thread.
struct Loop {
    ongoing: Ongoing,
    regulated: Regulated,
    residence: Vec<Residence>,
    /// What is still to be read because the first decision wanted it, and pinned where it said so.
    wanted: std::vec::IntoIter<Wanted>,
    /// Of that, what was pinned since the last tick.
    early: Vec<Action>,
    /// When more than the floors of the reserves was last seen to be available.
    enough: Instant,
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
        if looped.guarded_tick(Some(progress)) {
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
            if lock(&self.shared.status).stuck.is_some() && !ends_within(&thread, PATIENCE) {
                tracing::error!("the governor's tick does not end; the program ends without it");
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

/// Lets the store take what it may until the next look. Returns what is available beyond the part of the reserves
/// that must be there between ticks, bytes.
fn allow(regulated: &Regulated, dense: &DenseWeights, available: Available) -> Option<u64> {
    let reserves = [dense.host_reserve_bytes, dense.cgroup_reserve_bytes];
    let beyond = available.beyond(reserves);
    let beyond = beyond.map(|bytes| bytes.saturating_sub(dense.claim_bytes()));
    regulated.store.allow_fresh(alarm::may_take_bytes(beyond));
    available.beyond(reserves.map(alarm::floor_bytes))
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

impl Loop {
    /// A loop that nothing waits in yet.
    fn new(ongoing: Ongoing, regulated: Regulated) -> Self {
        Self {
            residence: vec![Residence::Absent; regulated.shape.total_experts()],
            wanted: Vec::new().into_iter(),
            early: Vec::new(),
            enough: Instant::now(),
            ongoing,
            regulated,
        }
    }

    /// Goes round until it is told to stop; `None` after a tick that panicked.
    fn run(mut self) -> Option<Self> {
        // Whoever needs memory may take all of a reserve while this thread waits for a processor.
        let granted = hurry();
        tracing::debug!("the governor's thread is {granted:?}");
        let mut due = Instant::now() + self.ongoing.options.tick;
        loop {
            let Some(when) = self.next_tick(due) else {
                return Some(self);
            };
            due = when;
            if !self.guarded_tick(None) {
                return None;
            }
            // A tick that took too long, or a suspended machine, is not caught up with.
            due = (due + self.ongoing.options.tick).max(Instant::now());
        }
    }

    /// Waits for the next tick, which comes at `due`, or before when memory runs short. Returns when it
    /// came; `None` when it is time to stop.
    fn next_tick(&mut self, due: Instant) -> Option<Instant> {
        let tick = self.ongoing.options.tick;
        let mut look = Instant::now() + alarm::least_apart(tick);
        loop {
            let wake = look.min(due);
            if !self.get_ahead(wake) || self.ongoing.shared.stops_before(wake) {
                return None;
            }
            if look >= due {
                return Some(due);
            }
            // What nobody holds cannot be given back.
            if self.holds_nothing() {
                look = due;
                continue;
            }
            let available = self.ongoing.sensors.available();
            match alarm::judge(
                allow(&self.regulated, &self.ongoing.options.dense, available),
                tick,
            ) {
                alarm::Next::Tick => return Some(Instant::now()),
                alarm::Next::Look(after) => {
                    self.enough = Instant::now();
                    look = self.enough + after;
                }
            }
        }
    }

    /// Reads what is still wanted from the start and makes memory ready, a little at a time, until it is time to
    /// wake up. False when it is time to stop.
    fn get_ahead(&mut self, wake: Instant) -> bool {
        while Instant::now() < wake {
            if self.ongoing.shared.stops_before(Instant::now()) {
                return false;
            }
            let store = &self.regulated.store;
            let mut is_due = || Instant::now() >= wake;
            let warmed = match self.wanted.as_slice().first() {
                Some(Wanted::Warm(id)) => store.warm_unless(*id, &mut is_due),
                Some(Wanted::Pin(action)) => {
                    let warmed = store.warm_unless(action.expert, &mut is_due);
                    let pins = warmed == Warmed::Done;
                    // What cannot be locked now is told by the tick that tries again.
                    match pins.then(|| store.pin_unless(action.expert, &mut is_due)) {
                        Some(Ok(true)) => self.early.push(*action),
                        Some(Ok(false)) if is_due() => break,
                        _ => {}
                    }
                    warmed
                }
                None if store.prepare() => continue,
                None => break,
            };
            match warmed {
                Warmed::Done => drop(self.wanted.next()),
                Warmed::UnderWay => break,
                Warmed::NoRoom => self.wanted = Vec::new().into_iter(),
            }
        }
        true
    }

    fn holds_nothing(&self) -> bool {
        let held = self.regulated.store.held();
        held.pinned_bytes + held.transit_bytes == 0 && self.ongoing.options.dense.locked_bytes == 0
    }

    /// One tick; false when it panicked, and with it the loop has to end.
    fn guarded_tick(&mut self, progress: Option<&mut dyn FnMut(u64, u64)>) -> bool {
        self.ongoing.shared.under_way.begin();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.tick(progress)));
        self.ongoing.shared.under_way.end();
        if outcome.is_ok() {
            return true;
        }
        // Without control, locked memory must not outlive the reason for it.
        self.regulated.store.unlock_all();
        let why = match self.ongoing.options.on_failure {
            OnFailure::GoOn => {
                "the governor's tick panicked; everything was unlocked and the session goes on without control"
            }
            OnFailure::Stop => {
                "the governor's tick panicked; everything was unlocked and the session ends"
            }
        };
        tracing::error!("{why}");
        if self.ongoing.options.on_failure == OnFailure::Stop {
            self.regulated.counters.halt(why.to_owned());
        }
        lock(&self.ongoing.shared.status).failed = Some(why.to_owned());
        // Whoever waits for a tick is told that there will be none.
        self.ongoing.shared.ticks.send_modify(|_| ());
        false
    }

    fn tick(&mut self, progress: Option<&mut dyn FnMut(u64, u64)>) {
        let began = Instant::now();
        let now = Moment {
            ns: nanos(began.duration_since(self.ongoing.started)),
        };
        let orders = {
            let mut orders = lock(&self.ongoing.shared.orders);
            let standing = Orders {
                paused: orders.paused,
                ..Orders::default()
            };
            std::mem::replace(&mut *orders, standing)
        };
        if let Some(control) = &orders.control {
            self.ongoing.policy.reconfigure(control);
            if let Some(vram) = &mut self.ongoing.vram {
                vram.reconfigure(&control.get().vram);
            }
        }
        if let Some(limit) = orders.limit {
            self.ongoing.policy.limit_capacity(limit);
            lock(&self.ongoing.shared.status).limit = Some(limit);
        }
        let sample = self.ongoing.sensors.sample(now);
        let was_short = allow(
            &self.regulated,
            &self.ongoing.options.dense,
            sample.available(),
        ) == Some(0);
        if !was_short {
            self.enough = began;
        }
        self.note_degraded(sample.degraded);
        self.ongoing.plant.read(&self.regulated);
        let change = self.ongoing.plant.change();
        if let Some(vram) = &mut self.ongoing.vram {
            let idle = change.decode_tokens == 0 && change.prefill_tokens == 0;
            vram.tick(now, &sample, idle);
        }
        let covered = self.ongoing.vram.as_ref().and_then(Vram::covered);
        let observation = self.ongoing.plant.observation(
            &sample,
            &self.ongoing.options,
            &self.regulated.shape,
            covered,
        );
        self.ongoing
            .policy
            .tick(&observation, &mut self.ongoing.decision);
        if orders.paused {
            self.wanted = Vec::new().into_iter();
            self.ongoing.decision.pin.clear();
            self.ongoing
                .decision
                .unpin
                .retain(|action| action.reason == Reason::Shrink);
        }
        let mut first = progress;
        if first.is_some() && self.ongoing.options.fill == Fill::Beside {
            let planned: Vec<ExpertId> =
                self.ongoing.decision.pin.iter().map(|a| a.expert).collect();
            self.regulated.store.clear_loaded(&planned);
            let pins = self.ongoing.decision.pin.drain(..).map(Wanted::Pin);
            // What is there by then is passed over.
            let others = act::best_first(self.ongoing.policy.ranks())
                .into_iter()
                .map(Wanted::Warm);
            self.wanted = pins.chain(others).collect::<Vec<_>>().into_iter();
            first = None;
        }
        let decided_ns = nanos(began.elapsed());
        let pinned_bytes = self.regulated.store.held().pinned_bytes;
        let timed = first.is_none();
        let (sensors, mut lookout) = (&mut self.ongoing.sensors, alarm::Lookout::new());
        let (regulated, tick) = (&self.regulated, self.ongoing.options.tick);
        let (mut reading_since, mut stopped) = (None, false);
        let mut must_stop = |dense: &DenseWeights| {
            // However slowly reading goes on a busy machine, the next tick is not far.
            let since: Instant = *reading_since.get_or_insert_with(Instant::now);
            let is_late = timed && since.elapsed() > tick;
            let mut is_short = || lookout.is_short(|| allow(regulated, dense, sensors.available()));
            stopped = stopped || is_late || is_short();
            stopped
        };
        let dense = &mut self.ongoing.options.dense;
        if let Some(lock) =
            dense.change(&sample, self.ongoing.decision.capacity_bytes, pinned_bytes)
        {
            let store = regulated.store.as_ref();
            if !lock || store.warm_dense(&mut || must_stop(dense)) {
                dense.set(store, lock);
            }
        }
        if let Some(recording) = &self.ongoing.options.recording {
            recording.tick(&observation, &self.ongoing.decision);
        }
        let mut acted = act::carry_out(
            self.regulated.store.as_ref(),
            &self.regulated.shape,
            &self.ongoing.decision,
            self.ongoing.policy.ranks(),
            &self.ongoing.plant,
            first,
            &mut || must_stop(dense),
        );
        acted.pinned.append(&mut self.early);
        if let Some(at) = acted.given_back.filter(|_| was_short) {
            let yielded = at.saturating_duration_since(self.enough);
            tracing::debug!(
                "memory ran short; what others need was given back after {yielded:.1?}"
            );
            acted.yielded = Some(yielded);
        } else if was_short {
            // Nobody waits for what is not there to be given.
            self.enough = began;
        }
        self.report(now, &sample, &acted, orders.paused);
        if timed {
            // The tick's own time: what it decides, without the lock calls that carry it out, which
            // depend on how much is locked and are in the journal.
            let _ = lock(&self.ongoing.shared.tick_ns).record(decided_ns.max(1_000));
        }
    }

    /// Says what the sensors can no longer tell, once, and keeps it in the status.
    fn note_degraded(&mut self, now: DegradedSet) {
        if now == self.ongoing.degraded {
            return;
        }
        let reasons = self.ongoing.sensors.degraded();
        let news = now.since(self.ongoing.degraded);
        for DegradedReason { state, reason } in &reasons {
            if news.contains(*state) {
                tracing::warn!("{}: {} ({reason})", state.name(), state.meaning());
            }
        }
        self.ongoing.degraded = now;
        lock(&self.ongoing.shared.status).degraded = reasons;
    }

    fn report(
        &mut self,
        now: Moment,
        sample: &crate::sensors::Sample,
        acted: &Acted,
        paused: bool,
    ) {
        let entry = Entry::new(
            now,
            &self.ongoing.decision,
            sample,
            acted,
            &self.ongoing.plant,
            &self.regulated.shape,
            self.ongoing.vram.as_ref().map(Vram::entry),
        );
        self.regulated.store.residence_into(&mut self.residence);
        lock(&self.ongoing.shared.experts).update(
            entry.t_s,
            &self.residence,
            self.ongoing.policy.scores(),
            &acted.pinned,
            &acted.unpinned,
        );
        lock(&self.ongoing.shared.journal).push(entry.clone());
        let mut status = lock(&self.ongoing.shared.status);
        status.ticks += 1;
        status.paused = paused;
        status.entry = Some(entry);
        if let Some(vram) = &self.ongoing.vram {
            status.vram_changes = vram.changed();
            status.vram_curve = vram.curve();
        }
        status.drift_events += u64::from(self.ongoing.decision.drift);
        if let Some(faults) = sample.faults {
            let first = *self.ongoing.first_faults.get_or_insert(faults.major);
            status.major_faults = Some(faults.major.saturating_sub(first));
        }
        if let Some(pressure) = sample.pressure.filter(|pressure| !pressure.psi_absent) {
            let first = *self
                .ongoing
                .first_stall_us
                .get_or_insert(pressure.some_total_us);
            status.pressure_stall_us = Some(pressure.some_total_us.saturating_sub(first));
        }
        for (swap, actions) in [
            (Swap::Pinned, &acted.pinned),
            (Swap::Unpinned, &acted.unpinned),
        ] {
            for action in actions {
                *status.swaps.entry((swap, action.reason)).or_default() += 1;
            }
        }
        for errno in &acted.errnos {
            *status.lock_errnos.entry(errno.clone()).or_default() += 1;
        }
        status.decision.clone_from(&self.ongoing.decision);
        status.pinned_bytes = acted.pinned_bytes;
        status.transit_bytes = acted.transit_bytes;
        status.totals = self.ongoing.plant.totals();
        status.lock_errors += u64::from(acted.lock_errors);
        let ticks = status.ticks;
        drop(status);
        self.ongoing.shared.ticks.send_replace(ticks);
    }
}
