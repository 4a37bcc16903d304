//! Which share of uses would hit, from what is known of the routing.

use super::Range;
use hotpin_controllers::ModelShape;
use hotpin_controllers::config::PinConfig;
use hotpin_controllers::trace::{Phase, Trace};
use serde::Serialize;
use std::collections::BTreeSet;

/// Tokens of a trace that fill the cache and are not counted: a quarter of it, or so many.
const MOST_WARM_TOKENS: usize = 256;

/// Where a hit ratio comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A recorded session, replayed.
    Trace,
    /// Counts of an earlier run, taken to be independent from token to token.
    Profile,
    /// Nothing: as if every expert were used alike.
    Nothing,
}

/// What is known of a model's routing.
#[derive(Debug)]
pub enum Evidence {
    /// A recorded session.
    Trace(Box<Trace>),
    /// Counts by expert, and the tokens that they were counted over.
    Profile(Vec<f32>, u64),
    /// Nothing.
    Nothing,
}

impl Evidence {
    /// Its kind.
    #[must_use]
    pub fn source(&self) -> Source {
        match self {
            Self::Trace(_) => Source::Trace,
            Self::Profile(..) => Source::Profile,
            Self::Nothing => Source::Nothing,
        }
    }

    /// Counts by expert, for a policy to start from.
    #[must_use]
    pub fn counts(&self) -> Option<Vec<f32>> {
        match self {
            Self::Trace(trace) => {
                let mut counts = vec![0.0; trace.header.shape.total_experts()];
                for &id in decoded(trace).flatten() {
                    counts[id as usize] += 1.0;
                }
                Some(counts)
            }
            Self::Profile(counts, _) => Some(counts.clone()),
            Self::Nothing => None,
        }
    }

    fn tokens(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        match self {
            Self::Trace(trace) => decoded(trace).count() as f64,
            Self::Profile(_, tokens) => *tokens as f64,
            Self::Nothing => 0.0,
        }
    }

    /// Hits of a cache of `capacity_bytes`: at worst those of LRU, at best those of a replacement that
    /// knows the future (trace), or the fixed set that is used most (profile). Without any knowledge
    /// only the worst is known, that of even routing.
    #[must_use]
    pub fn hit_ratio(&self, shape: &ModelShape, capacity_bytes: u64) -> Option<Range> {
        if shape.total_experts() == 0 {
            return None;
        }
        match self {
            Self::Trace(trace) => replay(trace, capacity_bytes),
            Self::Profile(counts, _) => independent(shape, counts, capacity_bytes),
            Self::Nothing => {
                let even = vec![1.0; shape.total_experts()];
                independent(shape, &even, capacity_bytes)
            }
        }
    }

    /// Whether the counts are spread no wider than chance spreads those of an even router, or so little
    /// wider that no law would pin on it. Without counts it is not known, and then not so.
    #[must_use]
    pub fn is_uniform(&self, shape: &ModelShape, config: &PinConfig) -> bool {
        let (Some(counts), tokens) = (self.counts(), self.tokens()) else {
            return false;
        };
        if tokens < config.gate_tokens {
            return false;
        }
        let (mut chi_squared, mut freedom, mut variance, mut layers) = (0.0, 0.0, 0.0, 0.0);
        for layer in 0..shape.layers() {
            let first = shape.id(layer, 0).index();
            let experts = shape.experts_in(layer);
            let own = &counts[first..first + experts as usize];
            let (n, p) = (
                f64::from(experts),
                f64::from(shape.top_k_in(layer)) / f64::from(experts),
            );
            if p >= 1.0 {
                continue;
            }
            let mean = own.iter().map(|&c| f64::from(c)).sum::<f64>() / n;
            let squares: f64 = own.iter().map(|&c| (f64::from(c) - mean).powi(2)).sum();
            let noise = p * (1.0 - p) * tokens;
            chi_squared += squares / noise * (n - 1.0) / n;
            freedom += n - 1.0;
            variance += (squares / n - noise).max(0.0) / (tokens * p).powi(2);
            layers += 1.0;
        }
        if layers == 0.0 {
            return true;
        }
        let z = (chi_squared - freedom) / f64::sqrt(2.0 * freedom);
        let variation = f64::sqrt(variance / layers);
        z <= config.gate_on_z || variation <= config.gate_min_variation
    }
}

/// Routed experts of every decoded token.
fn decoded(trace: &Trace) -> impl Iterator<Item = &[u32]> {
    (0..trace.tokens())
        .filter(|&token| trace.phase(token) == Phase::Decode)
        .map(|token| trace.token(token))
}

/// Replays the decoded tokens through LRU and through the replacement that knows the future.
fn replay(trace: &Trace, capacity_bytes: u64) -> Option<Range> {
    let tokens: Vec<&[u32]> = decoded(trace).collect();
    let warm: usize = tokens[..(tokens.len() / 4).min(MOST_WARM_TOKENS)]
        .iter()
        .map(|token| token.len())
        .sum();
    let uses: Vec<u32> = tokens.into_iter().flatten().copied().collect();
    if uses.len() <= warm {
        return None;
    }
    let shape = &trace.header.shape;
    let bytes = |id: u32| shape.bytes(hotpin_controllers::ExpertId(id));
    // Position of the next use of the same expert, counted from the end: later is smaller.
    let mut worth = vec![0; uses.len()];
    let mut next = vec![0; shape.total_experts()];
    for (at, &id) in uses.iter().enumerate().rev() {
        worth[at] = next[id as usize];
        next[id as usize] = uses.len() - at;
    }
    let cache = |rank: &dyn Fn(usize) -> usize| {
        hits_of(
            &uses,
            warm,
            capacity_bytes,
            &bytes,
            shape.total_experts(),
            rank,
        )
    };
    Some(Range {
        low: cache(&|at| at),
        high: cache(&|at| worth[at]),
    })
}

/// Share of uses after `warm` that find their expert in a cache which evicts what ranks lowest. `rank` is
/// asked at each use.
fn hits_of(
    uses: &[u32],
    warm: usize,
    capacity_bytes: u64,
    bytes: &dyn Fn(u32) -> u64,
    experts: usize,
    rank: &dyn Fn(usize) -> usize,
) -> f64 {
    let mut place: Vec<Option<usize>> = vec![None; experts];
    let mut order: BTreeSet<(usize, u32)> = BTreeSet::new();
    let (mut held, mut hits) = (0_u64, 0_usize);
    for (at, &id) in uses.iter().enumerate() {
        match place[id as usize].take() {
            Some(old) => {
                order.remove(&(old, id));
                hits += usize::from(at >= warm);
            }
            None => held += bytes(id),
        }
        let now = rank(at);
        place[id as usize] = Some(now);
        order.insert((now, id));
        while held > capacity_bytes
            && let Some((_, gone)) = order.pop_first()
        {
            place[gone as usize] = None;
            held -= bytes(gone);
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let ratio = hits as f64 / (uses.len() - warm) as f64;
    ratio
}

/// Independent uses with the counts' probabilities: LRU by its characteristic time (Che, Tung and Wang
/// 2002), and the set that is used most.
#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
fn independent(shape: &ModelShape, counts: &[f32], capacity_bytes: u64) -> Option<Range> {
    // Uses a token, and bytes, of each expert.
    let mut experts = Vec::with_capacity(counts.len());
    for layer in 0..shape.layers() {
        let first = shape.id(layer, 0).index();
        let own = &counts[first..first + shape.experts_in(layer) as usize];
        let sum: f64 = own.iter().map(|&c| f64::from(c)).sum();
        if sum <= 0.0 {
            return None;
        }
        let top_k = f64::from(shape.top_k_in(layer));
        let bytes = shape.layer_expert_bytes(layer) as f64;
        experts.extend(
            own.iter()
                .map(|&c| ((f64::from(c) / sum * top_k).min(1.0), bytes)),
        );
    }
    let capacity = capacity_bytes as f64;
    let uses: f64 = experts.iter().map(|(rate, _)| rate).sum();
    let mut best: Vec<(f64, f64)> = experts.clone();
    best.sort_by(|a, b| (b.0 / b.1).total_cmp(&(a.0 / a.1)));
    let (mut left, mut high) = (capacity, 0.0);
    for (rate, bytes) in best {
        let share = (left / bytes).clamp(0.0, 1.0);
        high += rate * share;
        left -= bytes * share;
    }
    let low = if capacity_bytes < shape.token_cycle_bytes() {
        // The least recently used expert is always the one that comes next.
        0.0
    } else {
        let time = characteristic_time(&experts, capacity);
        let found = experts.iter().map(|(rate, _)| rate * kept(*rate, time));
        found.sum::<f64>() / uses
    };
    Some(Range {
        low: low.min(high / uses),
        high: high / uses,
    })
}

/// Part of the time that an expert used at this rate is kept, where what was not used for `time` goes.
fn kept(rate: f64, time: f64) -> f64 {
    1.0 - (-rate * time).exp()
}

/// The time after which an unused expert goes, so that the cache is just full. Tokens.
fn characteristic_time(experts: &[(f64, f64)], capacity: f64) -> f64 {
    let held = |time: f64| -> f64 {
        experts
            .iter()
            .map(|(rate, bytes)| bytes * kept(*rate, time))
            .sum()
    };
    let (mut short, mut long) = (0.0, 1e9);
    for _ in 0..100 {
        let middle = (short + long) / 2.0;
        if held(middle) < capacity {
            short = middle;
        } else {
            long = middle;
        }
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two layers of four experts of 10 bytes, top-1.
    fn shape() -> ModelShape {
        ModelShape::new(vec![4, 4], vec![10, 10], vec![1, 1]).unwrap()
    }

    #[test]
    fn even_routing_hits_by_the_share_that_is_kept() {
        let range = Evidence::Nothing.hit_ratio(&shape(), 40).unwrap();
        assert!((range.high - 0.5).abs() < 1e-9, "{range:?}");
        assert!((range.low - 0.5).abs() < 0.01, "{range:?}");
        let all = Evidence::Nothing.hit_ratio(&shape(), 80).unwrap();
        assert!(all.low > 0.999 && all.high > 0.999, "{all:?}");
        let below = Evidence::Nothing.hit_ratio(&shape(), 19).unwrap();
        assert_eq!(below.low, 0.0, "below a token cycle");
    }

    #[test]
    fn a_skewed_profile_hits_more_than_its_share() {
        let counts = vec![90.0, 5.0, 3.0, 2.0, 85.0, 5.0, 5.0, 5.0];
        let profile = Evidence::Profile(counts, 100);
        let range = profile.hit_ratio(&shape(), 20).unwrap();
        assert!((range.high - 0.875).abs() < 1e-9, "{range:?}");
        assert!(range.low > 0.5 && range.low < range.high, "{range:?}");
        assert!(!profile.is_uniform(&shape(), &PinConfig::default()));
    }

    #[test]
    fn chance_alone_is_no_skew() {
        let even = Evidence::Profile(vec![26.0, 24.0, 25.0, 25.0, 22.0, 27.0, 26.0, 25.0], 100);
        assert!(even.is_uniform(&shape(), &PinConfig::default()));
        assert!(!Evidence::Nothing.is_uniform(&shape(), &PinConfig::default()));
    }

    #[test]
    fn the_two_caches_do_what_they_are_called() {
        // A cycle of three through room for two: LRU never hits, the best does.
        let uses = [0, 1, 2, 0, 1, 2, 0, 1, 2];
        let bytes = |_| 10;
        assert_eq!(hits_of(&uses, 0, 20, &bytes, 3, &|at| at), 0.0);
        let mut next = [0; 3];
        let mut worth = [0; 9];
        for at in (0..9).rev() {
            worth[at] = next[uses[at] as usize];
            next[uses[at] as usize] = 9 - at;
        }
        let best = hits_of(&uses, 0, 20, &bytes, 3, &|at| worth[at]);
        assert!(best > 0.3, "{best}");
        assert_eq!(hits_of(&uses, 3, 30, &bytes, 3, &|at| at), 1.0);
    }
}
