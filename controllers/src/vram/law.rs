//! The law: how many bytes of VRAM experts get, and how they are arranged.
//!
//! Every change makes a context anew at least, so the law changes little: it yields at once where
//! others need the memory, grows slowly and only where that pays, and leaves an arrangement for a
//! faster one when it has been so for a while and the change is paid back in time.

mod arrange;
mod size;

use super::decision::{
    Arrangement, Change, ChangeKind, Expected, VramCeiling, VramDecision, VramRule,
};
use super::layout::PoolLayout;
use super::memory::{Failures, Memory, Room};
use super::observe::VramObservation;
use super::pace::Pace;
use super::times::Times;
use crate::config::VramConfig;
use crate::sense::{Sense, Step};

/// What was ordered and is not there yet.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Order {
    arrangement: Arrangement,
    rule: VramRule,
    urgent: bool,
}

/// A trial of the processor.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Trial {
    /// Tokens that the estimate rested on before.
    tokens_before: f64,
}

/// Decides once a tick. Equal observations give equal decisions.
#[derive(Clone, Debug)]
pub struct VramLaw {
    layout: PoolLayout,
    config: VramConfig,
    full_bytes: u64,
    least_bytes: u64,
    bank_bytes: u64,
    sense: Sense,
    memory: Memory,
    failures: Failures,
    times: Times,
    pace: Pace,
    order: Option<Order>,
    trial: Option<Trial>,
    applied: Option<Arrangement>,
    started: bool,
}

/// What a tick is decided from.
#[derive(Clone, Copy, Debug)]
struct Now<'a> {
    step: Step,
    observation: &'a VramObservation<'a>,
    room: Room,
    /// Lowest ceiling that must be kept to, for pools and for whole layers, bytes. A size that failed is none:
    /// it bounds what is tried, not what works.
    hard: Sizes,
    /// What may be grown to, value apart; sizes that failed count.
    calm: Sizes,
    /// What is worth having as a pool.
    value_bytes: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sizes {
    pool_bytes: u64,
    static_bytes: u64,
}

/// A choice and its rule; what is applied stays where there is no other.
type Choice = (Arrangement, VramRule);

impl VramLaw {
    /// A law for one model on its devices.
    #[must_use]
    pub fn new(layout: PoolLayout, config: VramConfig) -> Self {
        let mut law = Self {
            full_bytes: 0,
            least_bytes: 0,
            bank_bytes: 0,
            sense: Sense::default(),
            memory: Memory::default(),
            failures: Failures::new(&config),
            times: Times::new(&config),
            pace: Pace::new(&config),
            order: None,
            trial: None,
            applied: None,
            started: false,
            layout,
            config,
        };
        law.measure_layout();
        law
    }

    /// Takes over other settings; what was measured stays.
    pub fn reconfigure(&mut self, config: &VramConfig) {
        self.config = VramConfig {
            limit_bytes: self.config.limit_bytes,
            ..config.clone()
        };
        self.times.reconfigure(config);
        self.pace.reconfigure(config);
    }

    /// The user's own ceiling from the next tick on, bytes; 0 leaves all experts to the processor.
    pub const fn limit(&mut self, bytes: Option<u64>) {
        self.config.limit_bytes = bytes;
    }

    /// Splits of the devices with which the next context divides its pool; see
    /// [`PoolLayout::split`].
    pub fn split(&mut self, splits: &[f64]) {
        self.layout.split(splits);
        self.measure_layout();
    }

    fn measure_layout(&mut self) {
        self.full_bytes = self.layout.full_bytes();
        self.least_bytes = self.layout.least_bytes();
        self.bank_bytes = self.layout.largest_bytes();
    }

    /// Decides one tick. The first call, before there is a context, says what to begin with, from free
    /// memory alone; `applied` is then [`Arrangement::Cpu`].
    pub fn tick(&mut self, observation: &VramObservation<'_>, out: &mut VramDecision) {
        let step = self.sense.step(observation.now);
        self.follow(step, observation);
        let room = self
            .memory
            .read(step, &self.layout, &self.config, observation);
        if let Some(figures) = observation.figures {
            let share = self.static_share(observation.applied);
            let link = observation.link_bytes_per_s;
            self.times.update(step, figures, link, share);
        }
        let now = self.look(step, observation, room);
        let chosen = self.decide(&now);
        self.report(&now, chosen, out);
    }

    /// Notes what became of the last order.
    fn follow(&mut self, step: Step, observation: &VramObservation<'_>) {
        let now_s = step.now_s;
        self.failures
            .update(now_s, observation.failed, &self.config);
        if observation.failed.is_some() {
            self.order = None;
            self.trial = None;
        }
        let before = self.applied.replace(observation.applied);
        if before.is_some_and(|before| before != observation.applied) {
            let grown = before.map_or(0, Arrangement::bytes) < observation.applied.bytes();
            self.pace.changed(now_s, grown);
        }
        if self
            .order
            .is_some_and(|order| order.arrangement == observation.applied)
        {
            self.order = None;
        }
    }

    fn look<'a>(&self, step: Step, observation: &'a VramObservation<'a>, room: Room) -> Now<'a> {
        let cap = |memory: Option<u64>, most: u64| {
            let bounds = [
                Some(most),
                self.config.limit_bytes,
                self.memory_or_none(memory),
            ];
            bounds.into_iter().flatten().min().unwrap_or(0)
        };
        let most = self.full_bytes.min(self.bank_bytes);
        let host_bytes = self.layout.host_bytes();
        let hard = Sizes {
            pool_bytes: cap(room.pool_bytes, most),
            static_bytes: cap(room.static_bytes, host_bytes),
        };
        let calm = Sizes {
            pool_bytes: self.failures.bound(cap(room.calm_pool_bytes, most)),
            static_bytes: self.failures.bound(cap(room.calm_static_bytes, host_bytes)),
        };
        let mut now = Now {
            step,
            observation,
            room,
            hard,
            calm,
            value_bytes: None,
        };
        now.value_bytes = self.value_bytes(&now);
        now
    }

    /// Where no device can be read, only what the user gave may be had.
    fn memory_or_none(&self, memory: Option<u64>) -> Option<u64> {
        match (memory, self.config.limit_bytes) {
            (None, None) => Some(0),
            (memory, _) => memory,
        }
    }

    /// The rules, in their order.
    fn decide(&mut self, now: &Now<'_>) -> (Choice, bool) {
        let applied = now.observation.applied;
        if let Some(yielded) = self.yields(now) {
            self.pace.yielded(now.step.now_s);
            self.trial = None;
            return (self.give_order(applied, yielded, true), true);
        }
        if let Some(order) = self.order {
            if self.still_fits(now, order) {
                return ((order.arrangement, order.rule), order.urgent);
            }
            self.order = None;
            self.trial = None;
        }
        let choice = if self.started {
            self.choose(now)
        } else {
            self.started = true;
            self.start(now)
        };
        (self.give_order(applied, choice, false), false)
    }

    fn give_order(&mut self, applied: Arrangement, choice: Choice, urgent: bool) -> Choice {
        let (arrangement, rule) = choice;
        self.order = (arrangement != applied).then_some(Order {
            arrangement,
            rule,
            urgent,
        });
        choice
    }

    fn most_of(&self, sizes: Sizes, arrangement: Arrangement) -> u64 {
        match arrangement {
            Arrangement::Static { .. } => sizes.static_bytes,
            Arrangement::Reload { .. } | Arrangement::Cpu => sizes.pool_bytes,
        }
    }

    fn still_fits(&self, now: &Now<'_>, order: Order) -> bool {
        let bytes = order.arrangement.bytes();
        bytes <= now.observation.applied.bytes()
            || bytes
                <= self
                    .failures
                    .bound(self.most_of(now.hard, order.arrangement))
    }

    fn report(&self, now: &Now<'_>, chosen: (Choice, bool), out: &mut VramDecision) {
        let ((arrangement, rule), urgent) = chosen;
        let applied = now.observation.applied;
        let ceilings = [
            Some(self.full_bytes),
            self.config.limit_bytes,
            (self.bank_bytes < self.full_bytes).then_some(self.bank_bytes),
            self.memory_or_none(now.room.pool_bytes),
            self.failures.ceiling_bytes(),
            now.value_bytes,
        ];
        let (binding, capacity_bytes) = VramCeiling::ALL
            .into_iter()
            .zip(ceilings)
            .filter_map(|(ceiling, bytes)| bytes.map(|bytes| (ceiling, bytes)))
            .min_by_key(|&(ceiling, bytes)| (bytes, ceiling))
            .unwrap_or((VramCeiling::Model, 0));
        let compared = self.compared(now);
        let settled = self.pace.may_leave(now.step.now_s);
        *out = VramDecision {
            arrangement,
            change: applied.change_to(arrangement).map(|kind| Change {
                kind,
                urgent,
                both_fit: self.both_fit(now, arrangement, kind),
            }),
            rule,
            capacity_bytes,
            binding,
            ceilings,
            expected: Expected {
                present_ns: compared.present_ns,
                reload_ns: compared.pool.and_then(|(_, ns)| ns),
                static_ns: compared.placed.and_then(|(_, ns)| ns),
                cpu_ns: self.times.all_cpu(),
            },
            cover: arrangement == applied && applied != Arrangement::Cpu && settled,
        };
    }

    /// Whether the new fits beside the old; what is not known does not fit.
    fn both_fit(&self, now: &Now<'_>, to: Arrangement, kind: ChangeKind) -> bool {
        let costs = now.observation.costs;
        let besides = match kind {
            ChangeKind::Recreate => costs.context_bytes,
            ChangeKind::Reload => costs
                .context_bytes
                .zip(costs.dense_bytes)
                .map(|(context, dense)| context.saturating_add(dense)),
        };
        let experts: u64 = self.layout.device_bytes(to).iter().sum();
        besides.is_some_and(|bytes| bytes.saturating_add(experts) <= now.room.free_bytes)
    }
}
