//! Ways to place a model over VRAM, RAM and disk.

use super::hardware::Hardware;
use super::model::ModelSizes;
use hotpin_controllers::PolicyKind;
use serde::Serialize;

/// A way to place a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// As many whole layers as fit lie in VRAM, the others are computed on the processor.
    LayerOffload,
    /// All dense weights lie in VRAM, the experts of as many layers as fit too; the experts of the
    /// other layers are computed on the processor.
    CpuExperts,
    /// Dense weights lie in VRAM, the rest of it caches experts, least recently used out first. A
    /// missing expert is copied and awaited.
    ReloadLru,
    /// The same cache under the adaptive policy.
    ReloadAdaptive,
    /// Like `ReloadLru`, but a missing expert is computed on the processor while it is copied for
    /// later uses.
    AssistLru,
    /// The same cache under the adaptive policy.
    AssistAdaptive,
    /// Dense weights lie in VRAM, the rest of it is llama.cpp's expert pool. A missing expert is
    /// copied and awaited, before any of its layer is computed.
    PoolSlru,
    /// The same under `hotpin`'s law: how large the pool is, and whether whole layers or the processor
    /// are better. RAM under the adaptive policy.
    Regulated,
    /// No card: page faults bring in what is missing.
    Mmap,
    /// No card: exact ranges are read when they are routed, nothing is pinned.
    Fetch,
    /// No card: a profile's experts are pinned once.
    Static,
    /// No card: the adaptive policy.
    Adaptive,
}

/// What happens to an expert that is not in the cache in VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Miss {
    /// The card waits for its copy.
    Copy,
    /// The processor computes it.
    Assist,
}

/// Where a layer's experts are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Experts {
    /// All lie in VRAM.
    Vram,
    /// On the processor.
    Cpu,
    /// In VRAM what is cached, of the others see [`Miss`].
    Cached,
}

/// A layer's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerPlace {
    /// Its dense weights lie in VRAM.
    pub dense_on_card: bool,
    pub experts: Experts,
}

/// Where everything is.
#[derive(Clone, Debug)]
pub(super) struct Placement {
    pub layers: Vec<LayerPlace>,
    pub miss: Miss,
    /// Policy of the cache in VRAM and its bytes, where there is one.
    pub vram: Option<(PolicyKind, f64)>,
    /// Bytes of llama.cpp's pool, where that keeps the experts, and whether the law has them.
    pub pool: Option<(f64, bool)>,
    /// Policy of RAM and the bytes that it has for experts.
    pub ram: (PolicyKind, f64),
    /// Bandwidth of the disk as this strategy reads it.
    pub disk_bytes_per_s: f64,
}

/// Why a strategy cannot be had on a machine.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize)]
pub enum Impossible {
    /// Dense weights and KV alone are too large.
    #[error(
        "dense weights and KV need {needed_bytes:.2e} bytes of VRAM, there are {given_bytes:.2e}"
    )]
    Vram {
        /// Bytes needed.
        needed_bytes: f64,
        /// Bytes there.
        given_bytes: f64,
    },
    /// The cache could not hold one layer's routed experts.
    #[error(
        "{given_bytes:.2e} bytes are left for experts, less than one token's {needed_bytes:.2e}"
    )]
    TokenCycle {
        /// Bytes needed.
        needed_bytes: f64,
        /// Bytes there.
        given_bytes: f64,
    },
}

impl Strategy {
    /// Those that make sense on a machine.
    #[must_use]
    pub fn of(hardware: &Hardware) -> &'static [Self] {
        if hardware.gpu.is_some() {
            &[
                Self::LayerOffload,
                Self::CpuExperts,
                Self::ReloadLru,
                Self::ReloadAdaptive,
                Self::AssistLru,
                Self::AssistAdaptive,
                Self::PoolSlru,
                Self::Regulated,
            ]
        } else {
            &[Self::Mmap, Self::Fetch, Self::Static, Self::Adaptive]
        }
    }

    /// The name in reports.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::LayerOffload => "layer-offload",
            Self::CpuExperts => "cpu-experts",
            Self::ReloadLru => "reload-lru",
            Self::ReloadAdaptive => "reload-adaptive",
            Self::AssistLru => "assist-lru",
            Self::AssistAdaptive => "assist-adaptive",
            Self::PoolSlru => "pool-slru",
            Self::Regulated => "regulated",
            Self::Mmap => "mmap",
            Self::Fetch => "fetch",
            Self::Static => "static",
            Self::Adaptive => "adaptive",
        }
    }

    /// Whether it keeps a cache in VRAM.
    #[must_use]
    pub const fn caches(self) -> bool {
        matches!(
            self,
            Self::ReloadLru
                | Self::ReloadAdaptive
                | Self::AssistLru
                | Self::AssistAdaptive
                | Self::PoolSlru
        )
    }

    /// Whether llama.cpp's pool keeps the experts.
    const fn is_pool(self) -> bool {
        matches!(self, Self::PoolSlru | Self::Regulated)
    }

    /// The policy of its caches.
    const fn policy(self) -> PolicyKind {
        match self {
            Self::ReloadAdaptive | Self::AssistAdaptive | Self::Regulated | Self::Adaptive => {
                PolicyKind::Adaptive
            }
            Self::Static => PolicyKind::Static,
            // With nothing pinned, transit by recency is an LRU cache.
            _ => PolicyKind::Fetch,
        }
    }

    /// Places a model with the KV of `sequences` of `context` tokens.
    ///
    /// # Errors
    /// When it does not fit.
    pub(super) fn place(
        self,
        hardware: &Hardware,
        model: &ModelSizes,
        sequences: u32,
        context: u32,
    ) -> Result<Placement, Impossible> {
        let layers = model.layers as usize;
        let kv_bytes = f64::from(model.layers) * model.kv_layer_bytes(sequences, context);
        let vram_bytes = hardware.gpu.map_or(0.0, |gpu| gpu.usable_bytes());
        let for_experts_bytes = vram_bytes - model.dense_bytes() - kv_bytes;
        let mut places = vec![
            LayerPlace {
                dense_on_card: hardware.gpu.is_some(),
                experts: Experts::Cpu,
            };
            layers
        ];
        let (mut vram, mut pool) = (None, None);
        let mut dense_in_ram_bytes = 0.0;
        if hardware.gpu.is_none() {
            dense_in_ram_bytes = model.dense_bytes() + kv_bytes;
        } else if self == Self::LayerOffload {
            let layer_bytes = model.dense_layer_bytes
                + model.layer_experts_bytes()
                + model.kv_layer_bytes(sequences, context);
            let fit = whole((vram_bytes - model.other_bytes) / layer_bytes, layers);
            for (at, place) in places.iter_mut().enumerate() {
                place.dense_on_card = at < fit;
                if at < fit {
                    place.experts = Experts::Vram;
                }
            }
            dense_in_ram_bytes = (layers - fit) as f64
                * (model.dense_layer_bytes + model.kv_layer_bytes(sequences, context));
        } else {
            if for_experts_bytes < 0.0 {
                return Err(Impossible::Vram {
                    needed_bytes: model.dense_bytes() + kv_bytes,
                    given_bytes: vram_bytes,
                });
            }
            if self.caches() || self.is_pool() {
                places.fill(LayerPlace {
                    dense_on_card: true,
                    experts: Experts::Cached,
                });
                if self.is_pool() {
                    pool = Some((for_experts_bytes, self == Self::Regulated));
                } else {
                    vram = Some((self.policy(), for_experts_bytes));
                }
            } else {
                let fit = whole(for_experts_bytes / model.layer_experts_bytes(), layers);
                places[..fit].fill(LayerPlace {
                    dense_on_card: true,
                    experts: Experts::Vram,
                });
            }
        }
        let cpu = &hardware.cpu;
        let ram_bytes = (cpu.ram_bytes - cpu.ram_reserved_bytes - dense_in_ram_bytes).max(0.0);
        let cycle_bytes = f64::from(model.layers) * f64::from(model.top_k) * model.expert_bytes;
        // The law has an answer for less.
        let needed = pool.filter(|pool| !pool.1).map(|pool| pool.0);
        let given = vram.map(|vram| vram.1).into_iter().chain(needed);
        for given_bytes in given.chain([ram_bytes]) {
            if given_bytes < cycle_bytes {
                return Err(Impossible::TokenCycle {
                    needed_bytes: cycle_bytes,
                    given_bytes,
                });
            }
        }
        let disk = &hardware.disk;
        Ok(Placement {
            layers: places,
            miss: match self {
                Self::AssistLru | Self::AssistAdaptive => Miss::Assist,
                _ => Miss::Copy,
            },
            vram,
            pool,
            ram: (self.policy(), ram_bytes),
            disk_bytes_per_s: if self == Self::Mmap {
                disk.fault_bytes_per_s
            } else {
                disk.bytes_per_s
            },
        })
    }
}

/// Whole units of at most `most`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to a small range first"
)]
fn whole(units: f64, most: usize) -> usize {
    units.clamp(0.0, most as f64) as usize
}
