//! Identifiers and the shape of a model, shared by everything that talks about experts.

use serde::{Deserialize, Serialize};

/// Flat index of one (layer, index) expert: `layer_base[layer] + index`.
///
/// Only MoE layers are counted, in graph order; see [`ModelShape`].
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default,
)]
#[serde(transparent)]
pub struct ExpertId(pub u32);

impl ExpertId {
    /// The flat index as a slice index.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A moment on a monotonic clock, in nanoseconds since an arbitrary start.
///
/// Controllers never read a clock; every moment is handed to them, and all differences saturate, so
/// a clock that steps backwards is a pause and not a panic.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default,
)]
#[serde(transparent)]
pub struct Moment {
    /// Nanoseconds since the arbitrary start.
    pub ns: u64,
}

impl Moment {
    /// Seconds from `earlier` to `self`; zero when the clock went backwards.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "2^53 ns is 104 days; beyond it the loss is < 2 ns"
    )]
    pub fn seconds_since(self, earlier: Self) -> f64 {
        self.ns.saturating_sub(earlier.ns) as f64 / 1e9
    }
}

/// Sizes of a model's experts, as far as control needs them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelShape {
    /// For each MoE layer: number of experts.
    experts: Vec<u32>,
    /// For each MoE layer: bytes of one expert (all of its slices).
    expert_bytes: Vec<u64>,
    /// For each MoE layer: experts routed to per token.
    top_k: Vec<u32>,
    /// For each MoE layer: flat index of its expert 0; one entry more than layers.
    base: Vec<u32>,
}

/// Why a [`ModelShape`] was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// The three vectors differ in length.
    #[error(
        "shape lists differ in length: {experts} expert counts, {expert_bytes} sizes, {top_k} top-k values"
    )]
    LengthMismatch {
        /// Length of the expert-count list.
        experts: usize,
        /// Length of the size list.
        expert_bytes: usize,
        /// Length of the top-k list.
        top_k: usize,
    },
    /// A layer routes to more experts than it has, or has none, or its experts are empty.
    #[error(
        "MoE layer {layer}: {experts} experts of {expert_bytes} bytes, top-{top_k} is not a usable shape"
    )]
    BadLayer {
        /// Position in the list of MoE layers.
        layer: usize,
        /// Experts in that layer.
        experts: u32,
        /// Bytes of one expert.
        expert_bytes: u64,
        /// Experts routed to per token.
        top_k: u32,
    },
    /// More experts than a flat 32-bit index can name.
    #[error("more than {limit} experts in all")]
    TooMany {
        /// The largest number supported.
        limit: u32,
    },
    /// More bytes than any machine has.
    #[error("experts of more than {limit} bytes in all")]
    TooLarge {
        /// The most that is supported.
        limit: u64,
    },
}

impl ModelShape {
    /// Most experts that a model may have in all (1 T models have about 25,000).
    pub const MAX_EXPERTS: u32 = 1 << 20;

    /// Most bytes that all experts may have together, so that no sum of them overflows.
    pub const MAX_BYTES: u64 = 1 << 60;

    /// Builds a shape from per-layer expert counts, expert sizes in bytes and top-k.
    ///
    /// # Errors
    /// When the lists differ in length, a layer is empty or routes to more experts than it has, or
    /// there are more than [`Self::MAX_EXPERTS`] experts or [`Self::MAX_BYTES`] bytes.
    pub fn new(
        experts: Vec<u32>,
        expert_bytes: Vec<u64>,
        top_k: Vec<u32>,
    ) -> Result<Self, ShapeError> {
        if experts.len() != expert_bytes.len() || experts.len() != top_k.len() {
            return Err(ShapeError::LengthMismatch {
                experts: experts.len(),
                expert_bytes: expert_bytes.len(),
                top_k: top_k.len(),
            });
        }
        let mut base = Vec::with_capacity(experts.len() + 1);
        let mut next = 0u32;
        base.push(next);
        let mut total_bytes = 0u64;
        for layer in 0..experts.len() {
            let (n, bytes, k) = (experts[layer], expert_bytes[layer], top_k[layer]);
            if n == 0 || bytes == 0 || k == 0 || k > n {
                return Err(ShapeError::BadLayer {
                    layer,
                    experts: n,
                    expert_bytes: bytes,
                    top_k: k,
                });
            }
            next = next
                .checked_add(n)
                .filter(|&total| total <= Self::MAX_EXPERTS)
                .ok_or(ShapeError::TooMany {
                    limit: Self::MAX_EXPERTS,
                })?;
            base.push(next);
            total_bytes = bytes
                .checked_mul(u64::from(n))
                .and_then(|bytes| total_bytes.checked_add(bytes))
                .filter(|&total| total <= Self::MAX_BYTES)
                .ok_or(ShapeError::TooLarge {
                    limit: Self::MAX_BYTES,
                })?;
        }
        Ok(Self {
            experts,
            expert_bytes,
            top_k,
            base,
        })
    }

    /// A shape whose layers are all alike.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn uniform(
        layers: usize,
        experts: u32,
        expert_bytes: u64,
        top_k: u32,
    ) -> Result<Self, ShapeError> {
        Self::new(
            vec![experts; layers],
            vec![expert_bytes; layers],
            vec![top_k; layers],
        )
    }

    /// Number of MoE layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.experts.len()
    }

    /// Number of experts over all layers.
    #[must_use]
    pub fn total_experts(&self) -> usize {
        self.base.last().copied().unwrap_or(0) as usize
    }

    /// Experts in one MoE layer.
    #[must_use]
    pub fn experts_in(&self, layer: usize) -> u32 {
        self.experts[layer]
    }

    /// Experts routed to per token in one MoE layer.
    #[must_use]
    pub fn top_k_in(&self, layer: usize) -> u32 {
        self.top_k[layer]
    }

    /// Flat index of (layer, index).
    #[must_use]
    pub fn id(&self, layer: usize, index: u32) -> ExpertId {
        debug_assert!(index < self.experts[layer]);
        ExpertId(self.base[layer] + index)
    }

    /// MoE layer of an expert.
    #[must_use]
    pub fn layer_of(&self, id: ExpertId) -> usize {
        self.base.partition_point(|&b| b <= id.0) - 1
    }

    /// (layer, index) of an expert.
    #[must_use]
    pub fn place(&self, id: ExpertId) -> (usize, u32) {
        let layer = self.layer_of(id);
        (layer, id.0 - self.base[layer])
    }

    /// Bytes of one expert.
    #[must_use]
    pub fn bytes(&self, id: ExpertId) -> u64 {
        self.expert_bytes[self.layer_of(id)]
    }

    /// Bytes of each expert of one MoE layer.
    #[must_use]
    pub fn layer_expert_bytes(&self, layer: usize) -> u64 {
        self.expert_bytes[layer]
    }

    /// Bytes that one decoded token touches: the sum over layers of top-k x expert bytes.
    #[must_use]
    pub fn token_cycle_bytes(&self) -> u64 {
        self.expert_bytes
            .iter()
            .zip(&self.top_k)
            .map(|(&b, &k)| b * u64::from(k))
            .sum()
    }

    /// Bytes of all experts.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.expert_bytes
            .iter()
            .zip(&self.experts)
            .map(|(&b, &n)| b * u64::from(n))
            .sum()
    }

    /// Routed experts per token over all layers.
    #[must_use]
    pub fn routed_per_token(&self) -> u32 {
        self.top_k.iter().sum()
    }
}
