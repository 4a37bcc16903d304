//! Experts in VRAM: the pool against a plain model of it, its curve, and the law on a small plant.

mod curve;
mod inputs;
mod layout;
mod plant;
mod pool;
mod properties;
mod scenarios;

use crate::plant::MIB;
use hotpin_controllers::vram::{DeviceLayout, LayerLayout, PoolLayout, TensorLayout};

/// A tensor of `expert_bytes` an expert.
pub fn tensor(expert_bytes: u64) -> TensorLayout {
    TensorLayout {
        ggml_type: 8,
        columns: 64,
        rows: 64,
        expert_bytes,
    }
}

/// One card without limits.
pub const DEVICE: DeviceLayout = DeviceLayout {
    alignment_bytes: 128,
    split: 1.0,
    most_bank_bytes: None,
    offload_tokens: None,
};

/// Layers that are all alike, on one card.
pub fn uniform(layers: usize, experts: u32, top_k: u32, tensors: &[u64]) -> PoolLayout {
    let layer = LayerLayout {
        device: Some(0),
        experts,
        top_k,
        tensors: tensors.iter().map(|&bytes| tensor(bytes)).collect(),
    };
    PoolLayout::new(vec![layer; layers], vec![DEVICE]).unwrap()
}

/// 8 layers of 32 experts of 3 MiB, 4 to a token: 768 MiB, 96 MiB a token.
pub fn small() -> PoolLayout {
    uniform(8, 32, 4, &[MIB, MIB, MIB])
}
