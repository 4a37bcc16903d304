//! What goes round: waits and looks at memory, then a tick.

use super::ahead::Ahead;
use super::monitor::Orders;
use super::vram::Vram;
use super::{DenseWeights, Fill, OnFailure, Ongoing, Regulated, act, alarm, lock};
use crate::engine::hurry;
use crate::sensors::Available;
use crate::store::program;
use crate::time::nanos;
use hotpin_controllers::{ExpertId, Moment, Reason, Residence};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// What goes round the loop, on the governor's thread.
pub(super) struct Loop {
    pub(super) ongoing: Ongoing,
    pub(super) regulated: Regulated,
    pub(super) residence: Vec<Residence>,
    ahead: Ahead,
    /// When more than the floors of the reserves was last seen to be available.
    enough: Instant,
    /// Between two ticks at least. While memory stays short and there is nothing to give it grows.
    apart: Duration,
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

impl Loop {
    /// A loop that nothing waits in yet.
    pub(super) fn new(ongoing: Ongoing, regulated: Regulated) -> Self {
        Self {
            residence: vec![Residence::Absent; regulated.shape.total_experts()],
            ahead: Ahead::default(),
            enough: Instant::now(),
            apart: alarm::least_apart(ongoing.options.tick),
            ongoing,
            regulated,
        }
    }

    /// Goes round until it is told to stop; `None` after a panic.
    pub(super) fn run(mut self) -> Option<Self> {
        // Whoever needs memory may take all of a reserve while this thread waits for a processor.
        let granted = hurry();
        tracing::debug!("the governor's thread is {granted:?}");
        let mut due = Instant::now() + self.ongoing.options.tick;
        loop {
            let Some(when) = self.guarded(|this| this.next_tick(due))? else {
                return Some(self);
            };
            self.guarded(|this| this.tick(None))?;
            // A tick that took too long, or a suspended machine, is not caught up with.
            due = (when + self.ongoing.options.tick).max(Instant::now());
        }
    }

    /// The first tick, on the caller's thread; false when it panicked, and there is no loop then.
    pub(super) fn begin(&mut self, progress: &mut dyn FnMut(u64, u64)) -> bool {
        self.guarded(|this| this.tick(Some(progress))).is_some()
    }

    /// Waits for the next tick, which comes at `due`, or before when memory runs short. Returns when it
    /// came; `None` when it is time to stop.
    fn next_tick(&mut self, due: Instant) -> Option<Instant> {
        let tick = self.ongoing.options.tick;
        let mut look = Instant::now() + self.apart;
        loop {
            let wake = look.min(due);
            let shared = &self.ongoing.shared;
            shared.under_way.begin();
            let goes_on = self.ahead.work(self.regulated.store.as_ref(), wake, shared);
            shared.under_way.end();
            if !goes_on || shared.stops_before(wake) {
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
                    self.apart = alarm::least_apart(tick);
                    self.enough = Instant::now();
                    look = self.enough + after;
                }
            }
        }
    }

    fn holds_nothing(&self) -> bool {
        let held = self.regulated.store.held();
        let beside = self.ongoing.options.dense.locked_with_program_bytes();
        held.pinned_bytes + held.transit_bytes + beside == 0
    }

    /// What the loop does at a time; `None` when it panicked, and with it the loop has to end.
    fn guarded<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let outcome = catch_unwind(AssertUnwindSafe(|| work(self)));
        self.ongoing.shared.under_way.end();
        if let Ok(done) = outcome {
            return Some(done);
        }
        // Without control, locked memory must not outlive the reason for it.
        self.regulated.store.unlock_all();
        program::set_locked(false);
        let why = match self.ongoing.options.on_failure {
            OnFailure::GoOn => {
                "the governor panicked; everything was unlocked and the session goes on without control"
            }
            OnFailure::Stop => {
                "the governor panicked; everything was unlocked and the session ends"
            }
        };
        tracing::error!("{why}");
        if self.ongoing.options.on_failure == OnFailure::Stop {
            self.regulated.counters.halt(why.to_owned());
        }
        lock(&self.ongoing.shared.status).failed = Some(why.to_owned());
        // Whoever waits for a tick is told that there will be none.
        self.ongoing.shared.ticks.send_modify(|_| ());
        None
    }

    fn tick(&mut self, progress: Option<&mut dyn FnMut(u64, u64)>) {
        self.ongoing.shared.under_way.begin();
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
            self.apart = alarm::least_apart(self.ongoing.options.tick);
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
            self.ahead.forget();
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
            let pins = self.ongoing.decision.pin.drain(..);
            self.ahead = Ahead::new(pins, self.ongoing.policy.ranks());
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
        acted.pinned.append(&mut self.ahead.pinned);
        if let Some(at) = acted.given_back.filter(|_| was_short) {
            let yielded = at.saturating_duration_since(self.enough);
            tracing::debug!(
                "memory ran short; what others need was given back after {yielded:.1?}"
            );
            acted.yielded = Some(yielded);
            self.apart = alarm::least_apart(tick);
        } else if was_short {
            // Nobody waits for what is not there to be given, and soon there will be no more of it.
            self.enough = began;
            self.apart = (2 * self.apart).min(tick);
        }
        self.report(now, &sample, &acted, orders.paused);
        if timed {
            // The tick's own time: what it decides, without the lock calls that carry it out, which
            // depend on how much is locked and are in the journal.
            let _ = lock(&self.ongoing.shared.tick_ns).record(decided_ns.max(1_000));
        }
    }
}
