//! llama.cpp's expert pool, replayed beside it: what it hits, misses and uploads, live.

use super::layout::{LayoutError, PoolLayout};
use super::slru::{Slru, Union};
use serde::{Deserialize, Serialize};

/// Batches of more tokens than this never use the pool.
pub const MOST_POOLED_TOKENS: usize = 32;

/// Batches of at most this many tokens' worth of routed experts are counted as small.
const SMALL_TOKENS: usize = 8;

/// Experts looked for in the pool, one for each layer and batch that uses it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolCounts {
    /// Found there.
    pub hits: u64,
    /// Not found, and uploaded.
    pub misses: u64,
    /// Bytes uploaded for those.
    pub upload_bytes: u64,
}

/// Layers of batches that the pool was passed over for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bypasses {
    /// Of more than [`MOST_POOLED_TOKENS`] tokens.
    pub wide: u64,
    /// Which could select more experts than the pool has slots for the layer's group.
    pub union: u64,
    /// Distinct experts that they routed to, all kinds together.
    pub experts: u64,
    /// Bytes of those.
    pub bytes: u64,
}

/// Running totals of a pool, from its making on. The first three are what llama.cpp prints when the
/// context is freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolTotals {
    /// `ubatch <= 8`.
    pub small: PoolCounts,
    /// `ubatch > 8`.
    pub large: PoolCounts,
    /// `large batches`: slices of experts (one for each of its tensors) copied within the device for
    /// batches that pass the pool over, and their bytes.
    pub copied: Copied,
    /// Passed over.
    pub bypassed: Bypasses,
}

/// Slices copied within a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    /// Slices.
    pub slices: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl PoolTotals {
    /// Small and large batches together.
    #[must_use]
    pub const fn counts(&self) -> PoolCounts {
        PoolCounts {
            hits: self.small.hits + self.large.hits,
            misses: self.small.misses + self.large.misses,
            upload_bytes: self.small.upload_bytes + self.large.upload_bytes,
        }
    }
}

/// What became of one layer of one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routed {
    /// The pool was used.
    Pooled {
        /// Distinct experts that had a slot.
        hits: u32,
        /// Those that had none.
        misses: u32,
        /// Bytes uploaded for them.
        upload_bytes: u64,
    },
    /// The batch was too wide, or could select more experts than there are slots. Nothing moved.
    Bypassed {
        /// Distinct experts that it selected.
        experts: u32,
        /// Bytes of those.
        bytes: u64,
    },
    /// The layer has no device, its group no slots, or the ids are none of its experts.
    Uncached,
}

/// A change of who has slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Eviction {
    pub layer: usize,
    pub expert: u32,
}

/// The pool's lists at one size, without counts.
#[derive(Clone, Debug)]
pub(super) struct Banks {
    groups: Vec<Slru>,
}

/// Where a layer is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Home {
    pub group: usize,
    /// Number of the layer within the group.
    pub at: usize,
}

impl Banks {
    pub fn new(layout: &PoolLayout, pool_bytes: u64) -> Self {
        let plan = layout.plan_any(pool_bytes);
        let groups = layout.groups.iter().zip(&plan.groups);
        Self {
            groups: groups
                .map(|(group, plan)| Slru::new(group.layers.len(), group.experts, plan.slots))
                .collect(),
        }
    }

    /// Slots of a group.
    pub fn slots(&self, group: usize) -> u32 {
        self.groups[group].len()
    }

    pub fn lists(&self, group: usize) -> &Slru {
        &self.groups[group]
    }

    /// Whether a batch may use the pool: `tokens` rows of `top_k` ids, in a layer of `experts`.
    pub fn admits(&self, group: usize, tokens: usize, top_k: usize, experts: u32) -> bool {
        let most = tokens.saturating_mul(top_k).min(experts as usize);
        tokens > 0 && tokens <= MOST_POOLED_TOKENS && most <= self.slots(group) as usize
    }

    /// Hits of a batch that is admitted; the others get slots.
    pub fn plan(&mut self, home: Home, union: &Union, evicted: impl FnMut(usize, u32)) -> u32 {
        self.groups[home.group].plan(home.at, union, evicted)
    }
}

/// Homes of layers, and sizes of their experts.
#[derive(Clone, Debug)]
pub(super) struct Homes {
    layers: Vec<Option<Home>>,
}

impl Homes {
    pub fn new(layout: &PoolLayout) -> Self {
        let mut layers = vec![None; layout.layers().len()];
        for (group, entry) in layout.groups.iter().enumerate() {
            for (at, &layer) in entry.layers.iter().enumerate() {
                layers[layer] = Some(Home { group, at });
            }
        }
        Self { layers }
    }

    pub fn of(&self, layer: usize) -> Option<Home> {
        self.layers.get(layer).copied().flatten()
    }
}

/// The pool of one context, from the context's making on.
#[derive(Clone, Debug)]
pub struct Pool {
    layout: PoolLayout,
    homes: Homes,
    banks: Banks,
    union: Union,
    totals: PoolTotals,
    pool_bytes: u64,
    evictions: Vec<Eviction>,
}

impl Pool {
    /// An empty pool of `pool_bytes` (`moe_cache_size`).
    ///
    /// # Errors
    /// [`LayoutError::TooSmall`], where llama.cpp makes no context.
    pub fn new(layout: &PoolLayout, pool_bytes: u64) -> Result<Self, LayoutError> {
        layout.plan(pool_bytes)?;
        Ok(Self {
            homes: Homes::new(layout),
            banks: Banks::new(layout, pool_bytes),
            layout: layout.clone(),
            union: Union::default(),
            totals: PoolTotals::default(),
            pool_bytes,
            evictions: Vec::new(),
        })
    }

    /// The size that it was made with, bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.pool_bytes
    }

    /// Totals since it was made.
    #[must_use]
    pub const fn totals(&self) -> &PoolTotals {
        &self.totals
    }

    /// Whether an expert of a MoE layer has a slot.
    #[must_use]
    pub fn holds(&self, layer: usize, expert: u32) -> bool {
        self.at(layer, expert)
            .is_some_and(|(home, lists)| lists.holds(home.at, expert))
    }

    /// Whether an expert has a slot of the protected half: it was hit since it came.
    #[must_use]
    pub fn protects(&self, layer: usize, expert: u32) -> bool {
        self.at(layer, expert)
            .is_some_and(|(home, lists)| lists.protects(home.at, expert))
    }

    /// Routes a micro-batch through one MoE layer. `ids` are `tokens` rows of top-k experts, as the
    /// router gave them.
    pub fn route(&mut self, layer: usize, ids: &[i32], tokens: usize) -> Routed {
        let Some(experts) = self.layout.layers().get(layer).map(|layer| layer.experts) else {
            return Routed::Uncached;
        };
        let mut union = std::mem::take(&mut self.union);
        let routed = if tokens > 0 && union.set(ids, experts) {
            self.route_union(layer, &union, tokens, ids.len() / tokens)
        } else {
            Routed::Uncached
        };
        self.union = union;
        routed
    }

    pub(super) fn route_union(
        &mut self,
        layer: usize,
        union: &Union,
        tokens: usize,
        top_k: usize,
    ) -> Routed {
        self.evictions.clear();
        let Some(home) = self.homes.of(layer) else {
            return Routed::Uncached;
        };
        if self.banks.slots(home.group) == 0 {
            return Routed::Uncached;
        }
        let entry = &self.layout.layers()[layer];
        let expert_bytes = self.layout.groups[home.group].expert_bytes();
        if !self.banks.admits(home.group, tokens, top_k, entry.experts) {
            return self.bypass(layer, home, union, tokens);
        }
        let evictions = &mut self.evictions;
        let layers = &self.layout.groups[home.group].layers;
        let hits = self.banks.plan(home, union, |at, expert| {
            evictions.push(Eviction {
                layer: layers[at],
                expert,
            });
        });
        let misses = union.len() - hits;
        let upload_bytes = u64::from(misses) * expert_bytes;
        let small = tokens * top_k <= SMALL_TOKENS * self.layout.most_top_k() as usize;
        let counts = if small {
            &mut self.totals.small
        } else {
            &mut self.totals.large
        };
        counts.hits += u64::from(hits);
        counts.misses += u64::from(misses);
        counts.upload_bytes += upload_bytes;
        Routed::Pooled {
            hits,
            misses,
            upload_bytes,
        }
    }

    /// Experts that the last batch took slots from.
    pub(super) fn evictions(&self) -> &[Eviction] {
        &self.evictions
    }

    fn bypass(&mut self, layer: usize, home: Home, union: &Union, tokens: usize) -> Routed {
        let group = &self.layout.groups[home.group];
        let bytes = u64::from(union.len()) * group.expert_bytes();
        let bypassed = &mut self.totals.bypassed;
        if tokens > MOST_POOLED_TOKENS {
            bypassed.wide += 1;
        } else {
            bypassed.union += 1;
        }
        bypassed.experts += u64::from(union.len());
        bypassed.bytes += bytes;
        let offloads = self.layout.devices()[group.device]
            .offload_tokens
            .is_some_and(|least| tokens >= least as usize);
        if offloads {
            let lists = self.banks.lists(home.group);
            let held = union.iter().filter(|&e| lists.holds(home.at, e)).count() as u64;
            let tensors = self.layout.layers()[layer].tensors.len() as u64;
            self.totals.copied.slices += held * tensors;
            self.totals.copied.bytes += held * group.expert_bytes();
        }
        Routed::Bypassed {
            experts: union.len(),
            bytes,
        }
    }

    fn at(&self, layer: usize, expert: u32) -> Option<(Home, &Slru)> {
        let home = self.homes.of(layer)?;
        let within = expert < self.layout.layers()[layer].experts;
        let lists = self.banks.lists(home.group);
        (within && lists.len() > 0).then_some((home, lists))
    }
}
