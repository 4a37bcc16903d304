//! Replay: hit ratios of cache policies over a recorded routing trace.
//!
//! One cache holds experts of all layers. Each token of the decode phase accesses its routed
//! experts layer by layer in slot order, one after the other. All policies but `static` start with
//! an empty cache.

mod belady;
mod decay;
mod lru;

use crate::capacity::{Capacity, CapacityError};
use hotpin_controllers::trace::{Phase, Trace};
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// The policies that replay knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReplayPolicy {
    /// The most frequent experts of the first tokens, resident from the start and never changed.
    Static,
    /// Evict what was used least recently.
    Lru,
    /// Evict the lowest of two decayed rates; a miss enters only when it is above the victim.
    LfuDecay,
    /// The optimum: evict what is used last, or do not admit (Belady 1966, with bypass).
    Belady,
}

impl ReplayPolicy {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::Static, Self::Lru, Self::LfuDecay, Self::Belady];

    /// The name on the command line.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Lru => "lru",
            Self::LfuDecay => "lfu-decay",
            Self::Belady => "belady",
        }
    }
}

impl fmt::Display for ReplayPolicy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.label())
    }
}

/// Why a replay was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ReplayError {
    /// A policy name that does not exist.
    #[error("no replay policy is called {given:?}; there are static, lru, lfu-decay and belady")]
    UnknownPolicy {
        /// What was given.
        given: String,
    },
    /// A capacity that the model does not admit.
    #[error(transparent)]
    Capacity(#[from] CapacityError),
    /// There is nothing to replay.
    #[error("the trace holds no decoded token")]
    Empty,
    /// Positions are 32-bit numbers.
    #[error("{accesses} accesses are more than a replay can number, {}", u32::MAX - 1)]
    TooLong {
        /// Accesses of the trace.
        accesses: usize,
    },
}

impl FromStr for ReplayPolicy {
    type Err = ReplayError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.label() == text)
            .ok_or_else(|| ReplayError::UnknownPolicy {
                given: text.to_owned(),
            })
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
}

/// The decoded tokens of a trace, ready to be replayed.
#[derive(Clone, Debug)]
pub struct Replay {
    routed: Vec<u32>,
    slots: usize,
    experts: usize,
    next_use: Vec<u32>,
}

/// Tokens from which `static` takes its experts, unless told otherwise: a tenth of the trace.
pub const DEFAULT_PROFILE_SHARE: usize = 10;

impl Replay {
    /// Takes the decoded tokens of a trace.
    ///
    /// # Errors
    /// When there are none or too many.
    pub fn new(trace: &Trace) -> Result<Self, ReplayError> {
        let shape = &trace.header.shape;
        let mut routed = Vec::with_capacity(trace.routed().len());
        for token in 0..trace.tokens() {
            if trace.phase(token) == Phase::Decode {
                routed.extend_from_slice(trace.token(token));
            }
        }
        let accesses = routed.len();
        if accesses == 0 {
            return Err(ReplayError::Empty);
        }
        if u32::try_from(accesses).is_ok_and(|n| n < u32::MAX) {
            let experts = shape.total_experts();
            Ok(Self {
                next_use: belady::next_use(&routed, experts),
                slots: shape.routed_per_token() as usize,
                experts,
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

    /// Experts of the model.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Hits of one policy with a cache of `capacity` experts, which must not be 0. `static` takes
    /// the experts of the first `profile_tokens` tokens.
    #[must_use]
    pub fn hits(&self, policy: ReplayPolicy, capacity: usize, profile_tokens: usize) -> u64 {
        match policy {
            ReplayPolicy::Static => self.static_hits(capacity, profile_tokens),
            ReplayPolicy::Lru => lru::hits(&self.routed, self.experts, capacity),
            ReplayPolicy::LfuDecay => decay::hits(&self.routed, self.slots, self.experts, capacity),
            ReplayPolicy::Belady => {
                belady::hits(&self.routed, &self.next_use, self.experts, capacity)
            }
        }
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
        profile_tokens: usize,
    ) -> Result<Vec<ReplayResult>, ReplayError> {
        let mut results = Vec::new();
        for capacity in capacities {
            let capacity_experts = capacity.experts(self.experts)?;
            let hits = |policy| self.hits(policy, capacity_experts, profile_tokens);
            let (lru, belady) = (hits(ReplayPolicy::Lru), hits(ReplayPolicy::Belady));
            for &policy in policies {
                let hits = match policy {
                    ReplayPolicy::Lru => lru,
                    ReplayPolicy::Belady => belady,
                    ReplayPolicy::Static | ReplayPolicy::LfuDecay => hits(policy),
                };
                let gap = belady as f64 - lru as f64;
                results.push(ReplayResult {
                    policy,
                    capacity_experts,
                    hits,
                    accesses: self.routed.len() as u64,
                    hit_ratio: hits as f64 / self.routed.len() as f64,
                    gap_closed: (gap > 0.0).then(|| (hits as f64 - lru as f64) / gap),
                });
            }
        }
        Ok(results)
    }

    fn static_hits(&self, capacity: usize, profile_tokens: usize) -> u64 {
        let profiled = profile_tokens
            .saturating_mul(self.slots)
            .min(self.routed.len());
        let mut counts = vec![0u64; self.experts];
        for &id in &self.routed[..profiled] {
            counts[id as usize] += 1;
        }
        let mut order: Vec<usize> = (0..self.experts).collect();
        order.sort_by_key(|&id| std::cmp::Reverse(counts[id]));
        let mut pinned = vec![false; self.experts];
        for &id in order.iter().take(capacity) {
            pinned[id] = true;
        }
        self.routed
            .iter()
            .map(|&id| u64::from(pinned[id as usize]))
            .sum()
    }
}

#[cfg(test)]
mod tests;
