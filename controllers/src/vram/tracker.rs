//! The engine's side: every routing and every decode call, as they happen.

use super::curve::{Batch, Ghosts};
use super::decision::Arrangement;
use super::layout::PoolLayout;
use super::observe::{StepTotals, VramFigures, WIDTHS, width_class};
use super::pool::{Homes, Pool, PoolTotals, Routed};
use super::slru::Union;
use crate::config::VramConfig;
use crate::ids::ExpertId;

/// An expert's stay in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stay {
    /// Decoded tokens when it came; `None` when it is not there.
    since_tokens: Option<u64>,
    /// It was hit since.
    hit: bool,
}

const AWAY: Stay = Stay {
    since_tokens: None,
    hit: false,
};

/// Follows the pool of the running context and those of other sizes.
#[derive(Clone, Debug)]
pub struct Tracker {
    layout: PoolLayout,
    cover_tokens: u64,
    arrangement: Arrangement,
    pool: Option<Pool>,
    homes: Homes,
    ghosts: Ghosts,
    union: Union,
    steps: [StepTotals; WIDTHS],
    /// Of the decode call that is running.
    call: StepTotals,
    /// Flat number of each layer's first expert.
    bases: Vec<usize>,
    stays: Vec<Stay>,
    tokens: u64,
}

impl Tracker {
    /// A tracker for a context that was just made.
    #[must_use]
    pub fn new(layout: PoolLayout, arrangement: Arrangement, config: &VramConfig) -> Self {
        let mut bases = Vec::with_capacity(layout.layers().len());
        let mut experts = 0;
        for layer in layout.layers() {
            bases.push(experts);
            experts += layer.experts as usize;
        }
        let mut tracker = Self {
            homes: Homes::new(&layout),
            ghosts: Ghosts::new(&layout, experts, config.half_life_tokens),
            cover_tokens: crate::num::to_bytes(config.cover_tokens),
            layout,
            arrangement,
            pool: None,
            union: Union::default(),
            steps: [StepTotals::default(); WIDTHS],
            call: StepTotals::default(),
            bases,
            stays: vec![AWAY; experts],
            tokens: 0,
        };
        tracker.arranged(arrangement);
        tracker
    }

    /// The layout.
    #[must_use]
    pub const fn layout(&self) -> &PoolLayout {
        &self.layout
    }

    /// Another context was made: its pool is empty and its totals begin at 0. What is known of other
    /// sizes, and the totals of decode calls, stay.
    pub fn arranged(&mut self, arrangement: Arrangement) {
        self.arrangement = arrangement;
        self.pool = match arrangement {
            Arrangement::Reload { pool_bytes } => Pool::new(&self.layout, pool_bytes).ok(),
            Arrangement::Cpu | Arrangement::Static { .. } => None,
        };
        self.stays.fill(AWAY);
        if let Arrangement::Static { bytes } = arrangement {
            for layer in self.layout.static_layers(bytes) {
                let experts = self.layout.layers()[layer].experts as usize;
                let base = self.bases[layer];
                self.stays[base..base + experts].fill(Stay {
                    since_tokens: Some(self.tokens),
                    hit: true,
                });
            }
        }
    }

    /// Splits of the devices with which the next context divides its pool; see
    /// [`PoolLayout::split`]. Call it before [`Self::arranged`].
    pub fn split(&mut self, splits: &[f64]) {
        self.layout.split(splits);
    }

    /// A micro-batch was routed through one MoE layer (number among the MoE layers, in graph order).
    /// `ids` are `tokens` rows of top-k experts, as the router gave them. Call it for every layer of
    /// every micro-batch, in the order in which the graph computes them, also in warm-up and for
    /// decodes that fail later.
    pub fn route(&mut self, layer: usize, ids: &[i32], tokens: usize) -> Routed {
        let mut union = std::mem::take(&mut self.union);
        let routed = self.route_into(&mut union, layer, ids, tokens);
        self.union = union;
        routed
    }

    fn route_into(
        &mut self,
        union: &mut Union,
        layer: usize,
        ids: &[i32],
        tokens: usize,
    ) -> Routed {
        let Some(home) = self.homes.of(layer) else {
            return Routed::Uncached;
        };
        let experts = self.layout.layers()[layer].experts;
        if tokens == 0 || !union.set(ids, experts) {
            return Routed::Uncached;
        }
        let batch = Batch {
            home,
            union,
            tokens,
            top_k: ids.len() / tokens,
            experts,
            expert_bytes: self.layout.groups[home.group].expert_bytes(),
            base: self.bases[layer],
        };
        self.call.routed_bytes += u64::from(union.len()) * batch.expert_bytes;
        self.ghosts.route(&batch);
        let Some(pool) = &mut self.pool else {
            return Routed::Uncached;
        };
        let routed = pool.route_union(layer, union, tokens, batch.top_k);
        match routed {
            Routed::Pooled { upload_bytes, .. } => {
                self.call.upload_bytes += upload_bytes;
                for gone in pool.evictions() {
                    self.stays[self.bases[gone.layer] + gone.expert as usize] = AWAY;
                }
                for expert in union.iter() {
                    let stay = &mut self.stays[batch.base + expert as usize];
                    stay.hit = stay.since_tokens.is_some();
                    stay.since_tokens.get_or_insert(self.tokens);
                }
            }
            Routed::Bypassed { bytes, .. } => self.call.bypassed_bytes += bytes,
            Routed::Uncached => {}
        }
        routed
    }

    /// A decode call of so many tokens (of all sequences) ended, and took `ns`. `steady` is false for
    /// calls whose time says nothing: warm-up, the first of a context, failed ones.
    pub fn decoded(&mut self, tokens: u32, ns: u64, steady: bool) {
        let call = std::mem::take(&mut self.call);
        if !steady {
            self.ghosts.forget_call();
            return;
        }
        self.tokens += u64::from(tokens);
        let width = width_class(tokens);
        self.ghosts.decoded(tokens, width);
        let totals = &mut self.steps[width];
        totals.steps += 1;
        totals.tokens += u64::from(tokens);
        totals.ns += ns;
        totals.routed_bytes += call.routed_bytes;
        totals.upload_bytes += call.upload_bytes;
        totals.bypassed_bytes += call.bypassed_bytes;
    }

    /// The pool's totals since its context was made; `None` without a pool.
    #[must_use]
    pub fn totals(&self) -> Option<&PoolTotals> {
        self.pool.as_ref().map(Pool::totals)
    }

    /// The pool that is followed; `None` without one.
    #[must_use]
    pub const fn pool(&self) -> Option<&Pool> {
        self.pool.as_ref()
    }

    /// Writes what the law wants to know; allocations are kept.
    pub fn figures(&self, into: &mut VramFigures) {
        into.arrangement = self.arrangement;
        into.pool = self.totals().copied().unwrap_or_default();
        into.steps = self.steps;
        self.ghosts.write(&mut into.curve);
    }

    /// Whether an expert is stable in VRAM, so that it need not be locked in RAM: one of a static
    /// layer, or one that the pool has held for [`VramConfig::cover_tokens`] tokens and hit since.
    /// Over as soon as the pool evicts it or the context is made anew.
    #[must_use]
    pub fn covers(&self, expert: ExpertId) -> bool {
        self.stays
            .get(expert.index())
            .is_some_and(|stay| self.is_stable(*stay))
    }

    /// Writes [`Self::covers`] for every expert, by [`ExpertId`].
    pub fn covered(&self, into: &mut Vec<bool>) {
        into.clear();
        into.extend(self.stays.iter().map(|stay| self.is_stable(*stay)));
    }

    fn is_stable(&self, stay: Stay) -> bool {
        stay.hit
            && stay
                .since_tokens
                .is_some_and(|since| self.tokens - since >= self.cover_tokens)
    }
}
