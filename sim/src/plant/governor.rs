//! The tick: observe, decide, act, record.
//!
//! As in the live governor, carrying out a decision includes the reads of what is to be locked, and
//! a tick that falls into that time is skipped.

use super::engine::Engine;
use super::memory::Memory;
use super::report::{Report, TickRecord, Totals};
use super::{Scenario, Sensor, to_bytes};
use hotpin_controllers::{
    Action, CgroupMemory, Decision, Faults, Held, HostMemory, LockLimits, Moment, Observation,
    Policy, Pressure,
};
use std::collections::VecDeque;

/// Where the sensors' clock starts, seconds, so that a jump back stays above zero.
const CLOCK_START_S: f64 = 100_000.0;

/// Major faults in one tick above which the books on transit are compared with the kernel.
const AUDIT_FAULTS: u64 = 64;
/// Faults a miss that need no explanation.
const FAULTS_A_MISS: u64 = 8;

/// The governor's state.
#[derive(Debug)]
pub(super) struct Governor<'a> {
    scenario: &'a Scenario,
    decision: Decision,
    records: Vec<TickRecord>,
    /// Ticks that came due, skipped ones included.
    due: u64,
    /// Bytes held when the present tick began.
    held_before_bytes: u64,
    /// Bytes that could not be locked in this tick.
    shortfall_bytes: u64,
    /// What the sensors of memory said in the last ticks, newest last.
    said: VecDeque<Said>,
    last: Totals,
}

impl<'a> Governor<'a> {
    pub fn new(scenario: &'a Scenario) -> Self {
        Self {
            scenario,
            decision: Decision::default(),
            records: Vec::new(),
            due: 0,
            held_before_bytes: 0,
            shortfall_bytes: 0,
            said: VecDeque::new(),
            last: Totals::default(),
        }
    }

    /// The first tick: what it pins, and what transit begins with, is read before the first token, in
    /// no virtual time.
    pub fn start(&mut self, policy: &mut dyn Policy, engine: &mut Engine<'_>) {
        self.tick(policy, engine, 0.0);
        engine.pins.read(f64::INFINITY, &mut engine.store);
        engine.store.warm();
        // The memory of all this was used before the first token.
        engine.store.fresh_bytes();
        self.due = 1;
    }

    /// Runs the ticks that came due while the engine advanced.
    pub fn catch_up(&mut self, policy: &mut dyn Policy, engine: &mut Engine<'_>) {
        loop {
            let at_s = self.due as f64 * self.scenario.tick_s;
            if at_s > engine.now_s || at_s >= self.scenario.duration_s {
                return;
            }
            self.due += 1;
            self.held_before_bytes = engine.store.pinned_bytes() + engine.store.cached_bytes();
            engine.memory.others_bytes = self.scenario.others.at(at_s);
            engine
                .memory
                .reclaim(&self.scenario.machine, &mut engine.store);
            if engine.pins.is_empty() {
                self.tick(policy, engine, at_s);
            } else {
                self.record(engine, at_s, None);
            }
        }
    }

    pub fn report(self, policy: &'static str, engine: &Engine<'_>) -> Report {
        Report::new(self.scenario, policy, self.records, Totals::of(engine))
    }

    fn tick(&mut self, policy: &mut dyn Policy, engine: &mut Engine<'_>, at_s: f64) {
        let mut decision = std::mem::take(&mut self.decision);
        self.said.push_back(Said::now(self.scenario, engine));
        let kept = self.scenario.disturbances.delay_ticks + 1;
        while self.said.len() > kept {
            self.said.pop_front();
        }
        let said = self.said.front().copied().unwrap_or_default();
        let observation = self.observe(engine, &said, at_s);
        policy.tick(&observation, &mut decision);
        let locked_bytes = self.act(policy.ranks(), engine, &decision, at_s);
        self.record(engine, at_s, Some((&decision, locked_bytes)));
        self.decision = decision;
    }

    /// Carries a decision out; returns the bytes ordered locked.
    fn act(
        &mut self,
        ranks: &[f32],
        engine: &mut Engine<'_>,
        decision: &Decision,
        at_s: f64,
    ) -> u64 {
        engine.store.publish_ranks(ranks);
        engine.store.set_capacity(decision.capacity_bytes);
        let bytes_of = |actions: &[Action]| -> u64 {
            let experts = actions.iter().map(|action| action.expert);
            experts.map(|expert| engine.store.bytes(expert)).sum()
        };
        let (unpin_bytes, pin_bytes) = (bytes_of(&decision.unpin), bytes_of(&decision.pin));
        for action in &decision.unpin {
            engine.store.unpin(action.expert);
        }
        self.shortfall_bytes = 0;
        if self.scenario.disturbances.locks_fail(at_s) {
            self.shortfall_bytes = pin_bytes;
        } else {
            for action in &decision.pin {
                engine.pins.push(action.expert);
            }
        }
        let machine = &self.scenario.machine;
        if !self.records.is_empty() {
            engine.owe(
                unpin_bytes as f64 * machine.unlock_s_per_byte
                    + pin_bytes as f64 * machine.lock_s_per_byte,
            );
        }
        // What is resident is locked at once.
        engine.pins.read(0.0, &mut engine.store);
        let now = Totals::of(engine);
        let faults = now.major_faults - self.last.major_faults;
        if faults > AUDIT_FAULTS + FAULTS_A_MISS * (now.misses - self.last.misses) {
            engine.store.audit();
        }
        pin_bytes
    }

    /// What the policy is told.
    fn observe<'e>(&self, engine: &'e Engine<'_>, said: &Said, at_s: f64) -> Observation<'e> {
        let disturbances = &self.scenario.disturbances;
        let sees = |sensor| !disturbances.is_blind(sensor, at_s);
        let clock_s = CLOCK_START_S + at_s + disturbances.clock_s(at_s);
        let engine_seen = sees(Sensor::Engine);
        Observation {
            now: Moment {
                ns: to_bytes(clock_s.max(0.0) * 1e9),
            },
            host: Some(said.host).filter(|_| sees(Sensor::Host)),
            cgroup: said.cgroup,
            pressure: Some(said.pressure).filter(|_| sees(Sensor::Pressure)),
            locks: LockLimits {
                memlock_bytes: None,
                locked_elsewhere_bytes: self.scenario.machine.dense_bytes,
                map_budget_bytes: None,
            },
            faults: Some(Faults {
                major: engine.major_faults,
            }),
            engine: Some(engine.totals).filter(|_| engine_seen),
            stall_known: true,
            decode_counts: Some(engine.decode_counts.as_slice()).filter(|_| engine_seen),
            prefill_counts: Some(engine.prefill_counts.as_slice()).filter(|_| engine_seen),
            residence: engine.store.residence(),
            covered: None,
            held: Held {
                lock_shortfall_bytes: self.shortfall_bytes,
                ..engine.store.held()
            },
        }
    }

    fn record(&mut self, engine: &Engine<'_>, at_s: f64, decided: Option<(&Decision, u64)>) {
        let now = Totals::of(engine);
        let since = now.since(&self.last);
        let before = self.records.last().cloned().unwrap_or_default();
        let mut record = TickRecord {
            at_s,
            decided: decided.is_some(),
            held_before_bytes: self.held_before_bytes,
            capacity_before_bytes: before.capacity_bytes,
            others_bytes: engine.memory.others_bytes,
            true_ceiling_bytes: self.scenario.true_ceiling_bytes(at_s),
            pinned_bytes: engine.store.pinned_bytes(),
            transit_bytes: engine.store.transit_bytes(),
            shortage_bytes: engine.memory.shortage_bytes,
            tokens: since.tokens,
            hits: since.hits,
            accesses: since.accesses,
            stall_s: since.stall_s,
            pressure_s: since.pressure_s,
            major_faults: since.major_faults,
            locked_bytes: 0,
            unlocked_bytes: 0,
            drift: false,
            ..before
        };
        if let Some((decision, locked_bytes)) = decided {
            record.capacity_bytes = decision.capacity_bytes;
            record.pin_budget_bytes = decision.pin_budget_bytes;
            record.binding = Some(decision.binding);
            record.pin_limit = Some(decision.pin_limit);
            record.pressure_cause = decision.pressure_cause;
            record.locked_bytes = locked_bytes;
            let unlocked = decision
                .unpin
                .iter()
                .map(|action| engine.store.bytes(action.expert));
            record.unlocked_bytes = unlocked.sum();
            record.drift = decision.drift;
            if self.records.is_empty() {
                record.capacity_before_bytes = decision.capacity_bytes;
            }
        }
        self.last = now;
        self.records.push(record);
    }
}

/// What the sensors of memory say.
#[derive(Clone, Copy, Debug)]
struct Said {
    host: HostMemory,
    cgroup: Option<CgroupMemory>,
    pressure: Pressure,
}

impl Default for Said {
    fn default() -> Self {
        Self {
            host: HostMemory {
                total_bytes: 0,
                available_bytes: 0,
            },
            cgroup: None,
            pressure: Pressure::default(),
        }
    }
}

impl Said {
    fn now(scenario: &Scenario, engine: &Engine<'_>) -> Self {
        let machine = &scenario.machine;
        let memory: &Memory = &engine.memory;
        let pinned_bytes = engine.store.pinned_bytes();
        Self {
            host: HostMemory {
                total_bytes: machine.host_bytes,
                available_bytes: memory.host_available_bytes(machine, pinned_bytes),
            },
            cgroup: machine.cgroup_bytes.map(|limit_bytes| CgroupMemory {
                limit_bytes,
                available_bytes: Memory::cgroup_available_bytes(machine, limit_bytes, pinned_bytes),
            }),
            pressure: Pressure {
                some_total_us: to_bytes(memory.stall_s * 1e6),
                full_total_us: 0,
                direct_reclaim_pages: Some(memory.direct_reclaim_pages),
                psi_absent: false,
            },
        }
    }
}
