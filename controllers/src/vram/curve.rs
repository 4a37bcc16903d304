//! The miss-ratio curve: what pools of other sizes would do with the same batches.
//!
//! Stack distances give LRU's curve, and the pool is no LRU: between one and two token cycles its
//! probation half decides, and hits come up from nothing. So the curve is that of the policy itself:
//! pools of a few sizes without weights, most of them there, in proportion between them. They hold keys
//! alone, a few bytes an expert.

use super::layout::PoolLayout;
use super::observe::WIDTHS;
use super::pool::{Banks, Home};
use super::slru::Union;
use serde::{Deserialize, Serialize};

/// Sizes that are replayed, in token cycles.
const CYCLES: [f64; 6] = [1.0, 1.15, 1.3, 1.5, 1.75, 2.0];

/// Beyond the last of those, so many more at equal ratios up to this share of everything.
const WIDER: i32 = 4;
const WIDEST_SHARE: f64 = 0.85;

/// One size, with what it would have done lately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CurvePoint {
    /// Size of the pool, bytes.
    pub pool_bytes: u64,
    /// Share of the experts of batches that may use the pool that it would have had; `None` before
    /// there were any.
    pub hit_ratio: Option<f64>,
    /// Bytes uploaded a token, by class of width; `None` before there were tokens.
    pub upload_bytes_per_token: [Option<f64>; WIDTHS],
    /// Share of the routed bytes of batches that would have passed the pool over, by class of width.
    pub bypassed_share: [Option<f64>; WIDTHS],
}

/// The curve, ascending in size, from the least pool that there can be to one that holds everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MissCurve {
    /// Its points.
    pub points: Vec<CurvePoint>,
}

impl MissCurve {
    /// The hit ratio at a size; `None` when it is not known. 0 below the least pool.
    #[must_use]
    pub fn hit_ratio(&self, pool_bytes: u64) -> Option<f64> {
        let least = self.points.first()?;
        if pool_bytes < least.pool_bytes {
            return least.hit_ratio.map(|_| 0.0);
        }
        self.between(pool_bytes, |point| point.hit_ratio)
    }

    /// Bytes uploaded for a token of a batch of a class of width; `None` when it is not known, and
    /// below the least pool.
    #[must_use]
    pub fn upload_bytes_per_token(&self, width: usize, pool_bytes: u64) -> Option<f64> {
        self.between(pool_bytes, |point| {
            *point.upload_bytes_per_token.get(width)?
        })
    }

    /// Share of the routed bytes of batches of a class of width that pass the pool over; `None` as
    /// above.
    #[must_use]
    pub fn bypassed_share(&self, width: usize, pool_bytes: u64) -> Option<f64> {
        self.between(pool_bytes, |point| *point.bypassed_share.get(width)?)
    }

    /// A value at a size, between points in proportion; beyond the last it is the last's.
    fn between(&self, pool_bytes: u64, value: impl Fn(&CurvePoint) -> Option<f64>) -> Option<f64> {
        let after = self
            .points
            .partition_point(|point| point.pool_bytes <= pool_bytes);
        let lower = self.points.get(after.checked_sub(1)?)?;
        let Some(upper) = self.points.get(after) else {
            return value(lower);
        };
        let (low, high) = (value(lower)?, value(upper)?);
        let span = (upper.pool_bytes - lower.pool_bytes) as f64;
        Some(low + (high - low) * (pool_bytes - lower.pool_bytes) as f64 / span)
    }
}

/// What one size did: in the call that is running, and lately.
#[derive(Clone, Copy, Debug, Default)]
struct Lately {
    call_hits: u32,
    call_misses: u32,
    call_upload_bytes: u64,
    call_bypassed_bytes: u64,
    hits: f64,
    misses: f64,
    upload_bytes: [f64; WIDTHS],
    bypassed_bytes: [f64; WIDTHS],
}

impl Lately {
    fn pooled(&mut self, hits: u32, misses: u32, expert_bytes: u64) {
        self.call_hits += hits;
        self.call_misses += misses;
        self.call_upload_bytes += u64::from(misses) * expert_bytes;
    }

    /// Takes the call in, after older ones have faded to `fade`, those of its width alone where widths
    /// are told apart.
    fn end(&mut self, width: usize, fade: f64) {
        self.hits = self.hits * fade + f64::from(self.call_hits);
        self.misses = self.misses * fade + f64::from(self.call_misses);
        let uploads = &mut self.upload_bytes[width];
        *uploads = *uploads * fade + self.call_upload_bytes as f64;
        let bypassed = &mut self.bypassed_bytes[width];
        *bypassed = *bypassed * fade + self.call_bypassed_bytes as f64;
        self.forget_call();
    }

    fn forget_call(&mut self) {
        self.call_hits = 0;
        self.call_misses = 0;
        self.call_upload_bytes = 0;
        self.call_bypassed_bytes = 0;
    }

    fn point(&self, pool_bytes: u64, weights: &[(f64, f64); WIDTHS]) -> CurvePoint {
        let accesses = self.hits + self.misses;
        let per = |sum: f64, weight: f64| (weight > 0.0).then(|| sum / weight);
        CurvePoint {
            pool_bytes,
            hit_ratio: per(self.hits, accesses),
            upload_bytes_per_token: std::array::from_fn(|width| {
                per(self.upload_bytes[width], weights[width].0)
            }),
            bypassed_share: std::array::from_fn(|width| {
                per(self.bypassed_bytes[width], weights[width].1)
            }),
        }
    }
}

/// A pool without weights.
#[derive(Clone, Debug)]
struct Ghost {
    pool_bytes: u64,
    banks: Banks,
    lately: Lately,
}

/// Sizes to replay, as shares of everything, ascending.
fn shares(layout: &PoolLayout) -> Vec<f64> {
    let cached = layout
        .layers()
        .iter()
        .filter(|layer| layer.device.is_some());
    let cycle_bytes: u64 = cached
        .map(|layer| layer.expert_bytes() * u64::from(layer.top_k))
        .sum();
    let cycle = cycle_bytes as f64 / layout.host_bytes().max(1) as f64;
    let narrow = CYCLES.map(|cycles| cycles * cycle);
    let last = narrow[CYCLES.len() - 1];
    let wider = (1..=WIDER).map(|step| {
        let part = f64::from(step) / f64::from(WIDER);
        last * (WIDEST_SHARE / last).powf(part)
    });
    let all = narrow.into_iter().chain(wider);
    all.filter(|share| *share <= WIDEST_SHARE).collect()
}

/// Pools of other sizes beside the engine.
#[derive(Clone, Debug)]
pub(super) struct Ghosts {
    ghosts: Vec<Ghost>,
    /// One that holds everything: what it misses was never routed before.
    full_bytes: u64,
    full: Lately,
    seen: Vec<bool>,
    least_bytes: u64,
    half_life_tokens: f64,
    call_routed_bytes: u64,
    /// Tokens and routed bytes by class of width, faded as the sums above.
    weights: [(f64, f64); WIDTHS],
}

/// One layer of a batch, for ghosts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch<'a> {
    pub home: Home,
    pub union: &'a Union,
    pub tokens: usize,
    pub top_k: usize,
    /// Experts of the layer.
    pub experts: u32,
    /// Bytes of one.
    pub expert_bytes: u64,
    /// Flat number of the layer's first expert.
    pub base: usize,
}

impl Ghosts {
    pub fn new(layout: &PoolLayout, experts: usize, half_life_tokens: f64) -> Self {
        let (least_bytes, full_bytes) = (layout.least_bytes(), layout.full_bytes());
        let mut ghosts: Vec<Ghost> = Vec::new();
        for share in shares(layout) {
            let pool_bytes = crate::num::to_bytes(full_bytes as f64 * share);
            let above = ghosts.last().map_or(least_bytes, |last| last.pool_bytes);
            if pool_bytes > above {
                ghosts.push(Ghost {
                    pool_bytes,
                    banks: Banks::new(layout, pool_bytes),
                    lately: Lately::default(),
                });
            }
        }
        Self {
            ghosts,
            full_bytes,
            full: Lately::default(),
            seen: vec![false; experts],
            least_bytes,
            half_life_tokens,
            call_routed_bytes: 0,
            weights: [(0.0, 0.0); WIDTHS],
        }
    }

    /// One layer of a batch goes through all sizes.
    pub fn route(&mut self, batch: &Batch<'_>) {
        let bytes = u64::from(batch.union.len()) * batch.expert_bytes;
        self.call_routed_bytes += bytes;
        for ghost in &mut self.ghosts {
            let (banks, home) = (&mut ghost.banks, batch.home);
            if !banks.admits(home.group, batch.tokens, batch.top_k, batch.experts) {
                ghost.lately.call_bypassed_bytes += bytes;
                continue;
            }
            let hits = banks.plan(home, batch.union, |_, _| {});
            let misses = batch.union.len() - hits;
            ghost.lately.pooled(hits, misses, batch.expert_bytes);
        }
        if batch.tokens > super::pool::MOST_POOLED_TOKENS {
            self.full.call_bypassed_bytes += bytes;
            return;
        }
        let mut hits = 0;
        for expert in batch.union.iter() {
            let seen = &mut self.seen[batch.base + expert as usize];
            hits += u32::from(std::mem::replace(seen, true));
        }
        let misses = batch.union.len() - hits;
        self.full.pooled(hits, misses, batch.expert_bytes);
    }

    /// The call ended. Older ones fade.
    pub fn decoded(&mut self, tokens: u32, width: usize) {
        let fade = (-f64::from(tokens) / self.half_life_tokens).exp2();
        let weight = &mut self.weights[width];
        weight.0 = weight.0 * fade + f64::from(tokens);
        weight.1 = weight.1 * fade + std::mem::take(&mut self.call_routed_bytes) as f64;
        for lately in self.each() {
            lately.end(width, fade);
        }
    }

    /// The call says nothing; the lists keep what it did to them.
    pub fn forget_call(&mut self) {
        self.call_routed_bytes = 0;
        for lately in self.each() {
            lately.forget_call();
        }
    }

    fn each(&mut self) -> impl Iterator<Item = &mut Lately> {
        let ghosts = self.ghosts.iter_mut().map(|ghost| &mut ghost.lately);
        ghosts.chain([&mut self.full])
    }

    /// Writes the curve.
    pub fn write(&self, into: &mut MissCurve) {
        into.points.clear();
        // The least pool holds one token's experts of one layer at a time: it is taken to hit never.
        let bypassed_bytes = self.full.bypassed_bytes;
        let none = Lately {
            misses: self.full.hits + self.full.misses,
            upload_bytes: std::array::from_fn(|at| self.weights[at].1 - bypassed_bytes[at]),
            bypassed_bytes,
            ..Lately::default()
        };
        into.points
            .push(none.point(self.least_bytes, &self.weights));
        for ghost in &self.ghosts {
            let point = ghost.lately.point(ghost.pool_bytes, &self.weights);
            into.points.push(point);
        }
        if self.full_bytes > self.least_bytes {
            into.points
                .push(self.full.point(self.full_bytes, &self.weights));
        }
    }
}
