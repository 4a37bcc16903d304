//! One tier of memory for experts before a slower one, kept by one of the real policies.
//!
//! What is pinned and what is in transit have the meaning that they have in RAM: pins are the
//! policy's choice, transit is what misses brought in, ranked by the policy until it is evicted.

use crate::plant::{Access, Keeper, PinQueue, Store, to_bytes};
use hotpin_controllers::{
    AdaptiveConfig, BuildError, Decision, EngineTotals, ExpertId, LockLimits, ModelShape, Moment,
    Observation, Policy, PolicyKind, build,
};

/// Share of the feeding bandwidth that pins may take.
const CHURN_SHARE: f64 = 0.25;

/// A tier.
pub(super) struct Tier {
    pub store: Store,
    /// Pins that the policy ordered and that are still being read.
    pub pins: PinQueue,
    policy: Box<dyn Policy>,
    decision: Decision,
    counts: Vec<u32>,
    totals: EngineTotals,
    /// Experts that a faster tier has for certain.
    pub covered: Option<Vec<bool>>,
    tick_s: f64,
    next_tick_s: f64,
}

impl std::fmt::Debug for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tier")
            .field("policy", &self.policy.name())
            .field("totals", &self.totals)
            .finish_non_exhaustive()
    }
}

/// What a tier is to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct TierPlan<'a> {
    pub kind: PolicyKind,
    pub capacity_bytes: f64,
    /// Bandwidth of the slower tier's reads.
    pub feed_bytes_per_s: f64,
    pub profile: Option<&'a [f32]>,
    pub tick_s: f64,
    pub config: &'a AdaptiveConfig,
}

impl Tier {
    pub fn new(shape: &ModelShape, plan: &TierPlan<'_>) -> Result<Self, BuildError> {
        let mut config = plan.config.clone();
        config.capacity.limit_bytes = Some(to_bytes(plan.capacity_bytes));
        config.value.read_bytes_per_s = to_bytes(plan.feed_bytes_per_s).max(1);
        let churn_bytes = to_bytes(plan.feed_bytes_per_s * CHURN_SHARE).max(1);
        config.targeting.churn_bytes_per_s = churn_bytes;
        config.targeting.churn_burst_bytes = churn_bytes;
        let mut tier = Self {
            store: Store::new(shape, Keeper::Store, None),
            pins: PinQueue::default(),
            policy: build(plan.kind, shape, &config, plan.profile)?,
            decision: Decision::default(),
            counts: vec![0; shape.total_experts()],
            totals: EngineTotals::default(),
            covered: None,
            tick_s: plan.tick_s,
            next_tick_s: 0.0,
        };
        tier.advance(0.0, 0.0);
        tier.pins.read(f64::INFINITY, &mut tier.store);
        Ok(tier)
    }

    /// Counts a routing. `insert` makes a missing expert resident, as its bytes are then on the way.
    /// True when it was resident.
    pub fn route(&mut self, id: ExpertId, rows: u32, insert: bool) -> bool {
        let count = &mut self.counts[id.index()];
        *count = count.wrapping_add(rows);
        let resident = self.store.is_resident(id);
        if insert || resident {
            let access = self.store.access(id);
            debug_assert_eq!(access == Access::Hit, resident);
        }
        if resident {
            self.totals.hits += 1;
        } else {
            self.totals.misses += 1;
            self.totals.fetch_bytes += self.store.bytes(id);
        }
        resident
    }

    /// Books the time that the engine waited for this tier's misses.
    pub fn waited(&mut self, s: f64) {
        self.totals.stall_ns += to_bytes(s * 1e9);
    }

    /// Books decoded tokens and their time.
    pub fn decoded(&mut self, tokens: u32, s: f64) {
        self.totals.decode_tokens += u64::from(tokens);
        self.totals.decode_ns += to_bytes(s * 1e9);
    }

    /// Gives the policy's pins the bandwidth left over up to now, and the policy its tick.
    pub fn advance(&mut self, now_s: f64, idle_bytes: f64) {
        self.pins.read(idle_bytes, &mut self.store);
        if now_s < self.next_tick_s {
            return;
        }
        // As in the live governor, ticks that fall into a long step are skipped.
        self.next_tick_s = now_s + self.tick_s;
        if !self.pins.is_empty() {
            return;
        }
        let mut decision = std::mem::take(&mut self.decision);
        let observation = Observation {
            now: Moment {
                ns: to_bytes(now_s * 1e9),
            },
            host: None,
            cgroup: None,
            pressure: None,
            locks: LockLimits {
                memlock_bytes: None,
                locked_elsewhere_bytes: 0,
                map_budget_bytes: None,
            },
            faults: None,
            engine: Some(self.totals),
            stall_known: true,
            decode_counts: Some(&self.counts),
            prefill_counts: None,
            residence: self.store.residence(),
            covered: self.covered.as_deref(),
            held: self.store.held(),
        };
        self.policy.tick(&observation, &mut decision);
        self.store.publish_ranks(self.policy.ranks());
        self.store.set_capacity(decision.capacity_bytes);
        for action in &decision.unpin {
            self.store.unpin(action.expert);
        }
        for action in &decision.pin {
            self.pins.push(action.expert);
        }
        self.pins.read(0.0, &mut self.store);
        self.decision = decision;
    }
}
