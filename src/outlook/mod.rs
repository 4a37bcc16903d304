//! `hotpin plan`: what a model would do in so much memory, before anything of it is loaded.
//!
//! What would be pinned is what the policy itself decides for a group of that size. The rest is a
//! range: hits between those of an LRU cache and those of the best replacement there is, time between
//! waiting for every read and hiding all reading behind computing.
#![forbid(unsafe_code)]

mod hits;
mod rates;
mod report;

pub use hits::{Evidence, Source};
pub use rates::{Rates, RatesError};

use crate::model::{Demand, Fit, Judgement, Memory, ModelMap};
use hotpin_controllers::{
    AdaptiveConfig, BuildError, CgroupMemory, Decision, Held, LockLimits, Moment, Observation,
    PolicyKind, Residence, build,
};
use serde::Serialize;

/// From the worse to the better.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Range {
    /// The worse end.
    pub low: f64,
    /// The better end.
    pub high: f64,
}

/// What to do with this model in this memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Advice {
    /// Everything fits: lock it all.
    Fits,
    /// Keeping the hot experts pays.
    ControlPays,
    /// Routing is as even as chance: whichever experts are kept, the same share of uses hits.
    Uniform,
    /// A dense model has nothing to choose.
    Dense,
    /// Not even the experts of one token fit beside the dense weights.
    BelowTokenCycle,
}

/// The report of `hotpin plan`. What is not known is `None` (null).
#[derive(Clone, Debug, Serialize)]
pub struct Outlook {
    /// The model's file.
    pub model: String,
    /// The memory that was asked about, bytes.
    pub memory_bytes: u64,
    /// What to do.
    pub advice: Advice,
    /// How model and memory go together.
    pub fit: Judgement,
    /// Memory below which every token waits for the disk: dense weights, buffers, the reserve and one
    /// token cycle.
    pub crawls_below_bytes: u64,
    /// Budget for experts, bytes.
    pub capacity_bytes: u64,
    /// What of it would be locked at the start, bytes.
    pub pinned_bytes: u64,
    /// Experts that would be locked at the start.
    pub pinned_experts: usize,
    /// Experts in all.
    pub total_experts: usize,
    /// What may be locked, dense weights included, bytes, where that is less than there is room for.
    pub lock_limit_bytes: Option<u64>,
    /// Expected hit ratio.
    pub hit_ratio: Option<Range>,
    /// What the hit ratio was taken from.
    pub from: Source,
    /// Expected speed, tokens per second.
    pub tok_s: Option<Range>,
}

impl Outlook {
    /// Looks ahead to `map` in `memory`, of which `memlock_bytes` may be locked, `None` for all. `rates` are this
    /// machine's.
    ///
    /// # Errors
    /// When the policy refuses the counts of a profile.
    pub fn new(
        map: &ModelMap,
        memory: Memory,
        memlock_bytes: Option<u64>,
        evidence: &Evidence,
        rates: Option<&Rates>,
    ) -> Result<Self, BuildError> {
        let config = AdaptiveConfig::default();
        let demand = Demand::of(map);
        // Beside the dense weights the engine needs its buffers.
        let buffers = rates.map_or(0, |rates| rates.buffer_bytes(map.dense_bytes()));
        let left = Memory {
            available_bytes: memory.available_bytes.saturating_sub(buffers),
            ..memory
        };
        let fit = Judgement::new(demand, left);
        let decision = first_decision(map, left, memlock_bytes, evidence, &config)?;
        let capacity_bytes = if map.is_moe() {
            decision.capacity_bytes
        } else {
            0
        };
        let pinned = decision.pin.iter().map(|a| map.shape().bytes(a.expert));
        let hit_ratio = evidence.hit_ratio(map.shape(), capacity_bytes);
        let tok_s = rates
            .zip(hit_ratio)
            .map(|(rates, hits)| rates.tok_s(map.token_cycle_bytes(), hits));
        Ok(Self {
            model: map.path().display().to_string(),
            memory_bytes: memory.available_bytes,
            advice: advise(fit.verdict, evidence.is_uniform(map.shape(), &config.pins)),
            crawls_below_bytes: demand
                .dense_bytes
                .saturating_add(demand.token_cycle_bytes)
                .saturating_add(memory.reserve_bytes)
                .saturating_add(buffers),
            capacity_bytes,
            pinned_bytes: pinned.sum(),
            pinned_experts: decision.pin.len(),
            total_experts: map.shape().total_experts(),
            lock_limit_bytes: memlock_bytes.filter(|&bytes| {
                map.is_moe() && bytes < demand.dense_bytes.saturating_add(capacity_bytes)
            }),
            hit_ratio,
            from: evidence.source(),
            tok_s,
            fit,
        })
    }
}

fn advise(fit: Fit, uniform: bool) -> Advice {
    match fit {
        Fit::Dense => Advice::Dense,
        Fit::All => Advice::Fits,
        Fit::BelowDense | Fit::BelowTokenCycle => Advice::BelowTokenCycle,
        Fit::Control if uniform => Advice::Uniform,
        Fit::Control => Advice::ControlPays,
    }
}

/// What the policy decides in its first tick in a group of that size, in which nothing else is yet.
fn first_decision(
    map: &ModelMap,
    memory: Memory,
    memlock_bytes: Option<u64>,
    evidence: &Evidence,
    config: &AdaptiveConfig,
) -> Result<Decision, BuildError> {
    let mut config = config.clone();
    config.capacity.cgroup_reserve_bytes = memory.reserve_bytes;
    let shape = map.shape();
    let mut decision = Decision::default();
    if !map.is_moe() {
        return Ok(decision);
    }
    let counts = evidence.counts();
    let mut policy = build(PolicyKind::Adaptive, shape, &config, counts.as_deref())?;
    let residence = vec![Residence::Absent; shape.total_experts()];
    let observation = Observation {
        now: Moment::default(),
        host: None,
        cgroup: Some(CgroupMemory {
            limit_bytes: memory.available_bytes,
            available_bytes: memory.available_bytes.saturating_sub(map.dense_bytes()),
        }),
        pressure: None,
        locks: LockLimits {
            memlock_bytes,
            locked_elsewhere_bytes: map.dense_bytes(),
            map_budget_bytes: None,
        },
        faults: None,
        engine: None,
        stall_known: false,
        decode_counts: None,
        prefill_counts: None,
        residence: &residence,
        covered: None,
        held: Held::default(),
    };
    policy.tick(&observation, &mut decision);
    Ok(decision)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_follows_fit_and_only_then_routing() {
        for uniform in [false, true] {
            assert_eq!(advise(Fit::All, uniform), Advice::Fits);
            assert_eq!(advise(Fit::Dense, uniform), Advice::Dense);
            assert_eq!(advise(Fit::BelowDense, uniform), Advice::BelowTokenCycle);
            assert_eq!(
                advise(Fit::BelowTokenCycle, uniform),
                Advice::BelowTokenCycle
            );
        }
        assert_eq!(advise(Fit::Control, false), Advice::ControlPays);
        assert_eq!(advise(Fit::Control, true), Advice::Uniform);
    }
}
