//! Replay: hit ratios of cache policies over a recorded routing trace.
//!
//! Each token of the decode phase accesses its routed experts layer by layer in slot order. One cache
//! holds experts of all layers, or each layer has one of its own. All policies but `static` start
//! with an empty cache.

mod belady;
mod classic;
mod decay;
mod lists;
mod lru;
mod policy;
mod ranked;

pub use policy::ReplayPolicy;

use crate::capacity::{Capacity, CapacityError};
use classic::{Arc, Cache, S3Fifo, Slru, TinyLfu};
use hotpin_controllers::ModelShape;
use hotpin_controllers::trace::{Phase, Trace};
use serde::Serialize;
use std::ops::Range;

/// Why a replay was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ReplayError {
    /// A policy name that does not exist.
    #[error(
        "no replay policy is called {given:?}; there are static, lru, lfu-decay, slru, w-tinylfu, arc, s3-fifo, adaptive and belady"
    )]
    UnknownPolicy {
        /// What was given.
        given: String,
    },
    /// A capacity that the model does not admit.
    #[error(transparent)]
    Capacity(#[from] CapacityError),
    /// There is nothing to replay.
    #[error("the trace holds no decoded token, or none in the part asked for")]
    Empty,
    /// Positions are 32-bit numbers.
    #[error("{accesses} accesses are more than a replay can number, {}", u32::MAX - 1)]
    TooLong {
        /// Accesses of the trace.
        accesses: usize,
    },
}

/// Which prompts of a trace are replayed, so that what is chosen on one half is judged on the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Part {
    /// All of them.
    #[default]
    All,
    /// The first, third and so on (indices 0, 2, ...).
    Even,
    /// The second, fourth and so on (indices 1, 3, ...).
    Odd,
}

/// How experts are divided among caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Pooling {
    /// One cache for all.
    #[default]
    Global,
    /// One for each layer, as large as its share of the experts.
    PerLayer,
}

/// What a policy did with a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Tally {
    /// Accesses that found their expert.
    pub hits: u64,
    /// Experts that took the place of another.
    pub replaced: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.replaced += other.replaced;
    }
}

/// What one policy made of the trace at one capacity.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplayResult {
    /// The policy.
    pub policy: ReplayPolicy,
    /// Experts that the cache held.
    pub capacity_experts: usize,
    /// Accesses that found their expert.
    pub hits: u64,
    /// All accesses.
    pub accesses: u64,
    /// `hits / accesses`.
    pub hit_ratio: f64,
    /// (policy - LRU) / (Belady - LRU); `None` when those two are equal.
    pub gap_closed: Option<f64>,
    /// Bytes read for misses, per token; in experts when the trace does not know their size.
    pub read_bytes_per_token: f64,
    /// Experts per token that took the place of another.
    pub replaced_per_token: f64,
}

/// The decoded tokens of a trace, ready to be replayed.
#[derive(Clone, Debug)]
pub struct Replay {
    shape: ModelShape,
    routed: Vec<u32>,
    slots: usize,
    experts: usize,
}

/// Tokens from which `static` takes its experts, unless told otherwise: a tenth of the trace.
pub const DEFAULT_PROFILE_SHARE: usize = 10;

impl Replay {
    /// Takes the decoded tokens of a part of a trace. A trace without prompts is one prompt.
    ///
    /// # Errors
    /// When there are none or too many.
    pub fn new(trace: &Trace, part: Part) -> Result<Self, ReplayError> {
        let shape = &trace.header.shape;
        let mut routed = Vec::with_capacity(trace.routed().len());
        let mut prompts = 0usize;
        for token in 0..trace.tokens() {
            let begun = &trace.prompts()[prompts..];
            prompts += begun.iter().take_while(|(at, _)| *at <= token).count();
            let odd = prompts.saturating_sub(1) % 2 == 1;
            let wanted = match part {
                Part::All => true,
                Part::Even => !odd,
                Part::Odd => odd,
            };
            if wanted && trace.phase(token) == Phase::Decode {
                routed.extend_from_slice(trace.token(token));
            }
        }
        let accesses = routed.len();
        if accesses == 0 {
            return Err(ReplayError::Empty);
        }
        if u32::try_from(accesses).is_ok_and(|n| n < u32::MAX) {
            Ok(Self {
                slots: shape.routed_per_token() as usize,
                experts: shape.total_experts(),
                shape: shape.clone(),
                routed,
            })
        } else {
            Err(ReplayError::TooLong { accesses })
        }
    }

    /// Decoded tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.routed.len() / self.slots
    }

    /// The routed experts, token by token.
    pub fn routed_tokens(&self) -> impl Iterator<Item = &[u32]> {
        self.routed.chunks_exact(self.slots)
    }

    /// The model.
    #[must_use]
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// One policy with a cache of `capacity` experts, which must not be 0. `static` takes the experts
    /// of the first `profile_tokens` tokens.
    #[must_use]
    pub fn tally(
        &self,
        policy: ReplayPolicy,
        capacity: usize,
        pooling: Pooling,
        profile_tokens: usize,
    ) -> Tally {
        let pools = self.pools(capacity, pooling);
        if policy == ReplayPolicy::Adaptive {
            return ranked::run(&self.routed, &self.shape, &pools);
        }
        let mut tally = Tally::default();
        for (experts, capacity) in pools.iter().filter(|(_, capacity)| *capacity > 0) {
            if pools.len() == 1 {
                tally += self.pool(policy, &self.routed, self.slots, *capacity, profile_tokens);
            } else {
                let (routed, slots) = self.accesses_of(experts);
                tally += self.pool(policy, &routed, slots, *capacity, profile_tokens);
            }
        }
        tally
    }

    fn pool(
        &self,
        policy: ReplayPolicy,
        routed: &[u32],
        slots: usize,
        capacity: usize,
        profile_tokens: usize,
    ) -> Tally {
        let experts = self.experts;
        match policy {
            ReplayPolicy::Static => Tally {
                hits: static_hits(routed, experts, capacity, profile_tokens * slots),
                replaced: 0,
            },
            ReplayPolicy::Lru => lru::run(routed, experts, capacity),
            ReplayPolicy::LfuDecay => decay::run(routed, slots, experts, capacity),
            ReplayPolicy::Slru => play(Slru::new(experts, capacity), routed, experts, capacity),
            ReplayPolicy::WTinylfu => {
                play(TinyLfu::new(experts, capacity), routed, experts, capacity)
            }
            ReplayPolicy::Arc => play(Arc::new(experts, capacity), routed, experts, capacity),
            ReplayPolicy::S3Fifo => play(S3Fifo::new(experts, capacity), routed, experts, capacity),
            ReplayPolicy::Adaptive => ranked::run(routed, &self.shape, &[(0..experts, capacity)]),
            ReplayPolicy::Belady => {
                let next_use = belady::next_use(routed, experts);
                belady::run(routed, &next_use, experts, capacity)
            }
        }
    }

    /// The caches: which experts each is for, and how many it holds. What does not divide evenly goes
    /// to the first layers.
    fn pools(&self, capacity: usize, pooling: Pooling) -> Vec<(Range<usize>, usize)> {
        if pooling == Pooling::Global {
            return vec![(0..self.experts, capacity)];
        }
        let mut pools: Vec<_> = (0..self.shape.layers())
            .map(|layer| {
                let first = self.shape.id(layer, 0).index();
                let experts = self.shape.experts_in(layer) as usize;
                (first..first + experts, capacity * experts / self.experts)
            })
            .collect();
        let given: usize = pools.iter().map(|(_, capacity)| capacity).sum();
        for (_, capacity) in pools.iter_mut().take(capacity - given) {
            *capacity += 1;
        }
        pools
    }

    /// The accesses to some experts, and how many a token makes.
    fn accesses_of(&self, experts: &Range<usize>) -> (Vec<u32>, usize) {
        let inside = |id: &u32| experts.contains(&(*id as usize));
        let routed: Vec<u32> = self.routed.iter().copied().filter(inside).collect();
        let slots = routed.len() / self.tokens().max(1);
        (routed, slots)
    }

    /// Runs the policies at the capacities, capacity by capacity. LRU and Belady are run in any
    /// case, since the gap is measured between them.
    ///
    /// # Errors
    /// When the model does not admit a capacity.
    pub fn run(
        &self,
        policies: &[ReplayPolicy],
        capacities: &[Capacity],
        pooling: Pooling,
        profile_tokens: usize,
    ) -> Result<Vec<ReplayResult>, ReplayError> {
        let mut results = Vec::new();
        for capacity in capacities {
            let capacity_experts = capacity.experts(&self.shape)?;
            let tally = |policy| self.tally(policy, capacity_experts, pooling, profile_tokens);
            let (lru, belady) = (tally(ReplayPolicy::Lru), tally(ReplayPolicy::Belady));
            for &policy in policies {
                let tally = match policy {
                    ReplayPolicy::Lru => lru,
                    ReplayPolicy::Belady => belady,
                    _ => tally(policy),
                };
                results.push(self.result(policy, capacity_experts, tally, lru, belady));
            }
        }
        Ok(results)
    }

    fn result(
        &self,
        policy: ReplayPolicy,
        capacity_experts: usize,
        tally: Tally,
        lru: Tally,
        belady: Tally,
    ) -> ReplayResult {
        let accesses = self.routed.len() as u64;
        let tokens = self.tokens() as f64;
        let gap = belady.hits as f64 - lru.hits as f64;
        let experts = self.experts as f64;
        let mean_bytes = self.shape.total_bytes() as f64 / experts;
        ReplayResult {
            policy,
            capacity_experts,
            hits: tally.hits,
            accesses,
            hit_ratio: tally.hits as f64 / accesses as f64,
            gap_closed: (gap > 0.0).then(|| (tally.hits as f64 - lru.hits as f64) / gap),
            read_bytes_per_token: (accesses - tally.hits) as f64 * mean_bytes / tokens,
            replaced_per_token: tally.replaced as f64 / tokens,
        }
    }
}

/// Plays accesses to a cache that admits every miss.
fn play(mut cache: impl Cache, routed: &[u32], experts: usize, capacity: usize) -> Tally {
    let hits = routed.iter().map(|&id| u64::from(cache.access(id))).sum();
    let mut seen = vec![false; experts];
    for &id in routed {
        seen[id as usize] = true;
    }
    let filled = seen.into_iter().filter(|&seen| seen).count().min(capacity);
    Tally {
        hits,
        replaced: (routed.len() as u64 - hits).saturating_sub(filled as u64),
    }
}

fn static_hits(routed: &[u32], experts: usize, capacity: usize, profiled: usize) -> u64 {
    let mut counts = vec![0u64; experts];
    for &id in routed.iter().take(profiled) {
        counts[id as usize] += 1;
    }
    let mut order: Vec<usize> = (0..experts).collect();
    order.sort_by_key(|&id| std::cmp::Reverse(counts[id]));
    let mut pinned = vec![false; experts];
    for &id in order.iter().take(capacity) {
        pinned[id] = true;
    }
    routed
        .iter()
        .map(|&id| u64::from(pinned[id as usize]))
        .sum()
}

#[cfg(test)]
mod tests;
