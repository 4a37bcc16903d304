//! What a layout is made from, and why it may be refused.

use serde::{Deserialize, Serialize};

/// Most layers, and most experts of a layer, that a layout takes.
const MOST: usize = 1 << 16;

/// One expert tensor of a layer, as far as banks care. Tensors are alike when all fields are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorLayout {
    /// ggml's number of the type of its weights.
    pub ggml_type: u32,
    /// Elements of a row (`ne[0]`).
    pub columns: u64,
    /// Rows of one expert (`ne[1]`).
    pub rows: u64,
    /// Bytes from one expert to the next (`nb[2]`).
    pub expert_bytes: u64,
}

/// One MoE layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerLayout {
    /// Number of the device that would cache it, which is the one that the layer is assigned to.
    /// `None` when it lies outside of every card.
    pub device: Option<usize>,
    /// Experts of the layer.
    pub experts: u32,
    /// Experts routed to a token.
    pub top_k: u32,
    /// Its expert tensors, in the order gate_up, gate, up, down; those that it has.
    pub tensors: Vec<TensorLayout>,
}

impl LayerLayout {
    /// Bytes of one expert, all of its tensors.
    #[must_use]
    pub fn expert_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.expert_bytes).sum()
    }

    /// Bytes of all experts.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.expert_bytes() * u64::from(self.experts)
    }
}

/// One card.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceLayout {
    /// Alignment of its buffers, bytes.
    pub alignment_bytes: u64,
    /// Its share of the pool, relative to the others': its part of `--tensor-split`, or the bytes that
    /// were free when the context was made. llama.cpp splits evenly where all are 0.
    pub split: f64,
    /// Most bytes of one bank: the device's largest buffer and, where it cannot index with 64 bits,
    /// its `maxStorageBufferRange`, whichever is less. `None` where there is no such limit. A larger
    /// bank ends the process inside ggml.
    pub most_bank_bytes: Option<u64>,
    /// Batches of at least this many tokens are computed on the device with weights copied for them,
    /// though those lie in host memory (`op_offload`); `None` when that is off.
    pub offload_tokens: Option<u32>,
}

impl DeviceLayout {
    /// Whether the device computes with all experts of a layer in one tensor of each kind.
    #[must_use]
    pub fn bears(&self, layer: &LayerLayout) -> bool {
        let bytes = |tensor: &TensorLayout| tensor.expert_bytes * u64::from(layer.experts);
        let largest_bytes = layer.tensors.iter().map(bytes).max().unwrap_or(0);
        self.most_bank_bytes
            .is_none_or(|most| largest_bytes <= most)
    }
}

/// Why a layout was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LayoutError {
    /// No layer has a device.
    #[error("no MoE layer is assigned to a device")]
    NoLayers,
    /// A layer cannot be what it says.
    #[error(
        "MoE layer {layer}: {experts} experts, top-{top_k}, {tensors} tensors, device {device:?} of {devices}: no usable layout"
    )]
    Layer {
        /// Its number among the MoE layers.
        layer: usize,
        /// Experts in it.
        experts: u32,
        /// Experts routed to a token.
        top_k: u32,
        /// Expert tensors in it.
        tensors: usize,
        /// The device that it names.
        device: Option<usize>,
        /// Devices that there are.
        devices: usize,
    },
    /// A device cannot be what it says.
    #[error(
        "device {device}: alignment of {alignment_bytes} bytes, split {split}: no usable device"
    )]
    Device {
        /// Its number.
        device: usize,
        /// Alignment, bytes.
        alignment_bytes: u64,
        /// Its split.
        split: f64,
    },
    /// More bytes than any machine has.
    #[error("{bytes} bytes of experts in all")]
    TooLarge {
        /// Bytes of all experts.
        bytes: u64,
    },
    /// llama.cpp refuses to make a context with a pool of this size.
    #[error("a pool of {bytes} bytes cannot hold one token's experts; {least_bytes} can")]
    TooSmall {
        /// The size.
        bytes: u64,
        /// The least size that works.
        least_bytes: u64,
    },
}

/// Refuses what no layer can be.
pub(super) fn check_layer(
    number: usize,
    layer: &LayerLayout,
    devices: usize,
) -> Result<(), LayoutError> {
    let sizes = layer.tensors.iter().map(|tensor| tensor.expert_bytes);
    let usable = layer.experts > 0
        && layer.experts as usize <= MOST
        && number < MOST
        && (1..=layer.experts).contains(&layer.top_k)
        && (1..=4).contains(&layer.tensors.len())
        && sizes.clone().all(|bytes| (1..1 << 36).contains(&bytes))
        && layer.device.is_none_or(|device| device < devices);
    if usable {
        return Ok(());
    }
    Err(LayoutError::Layer {
        layer: number,
        experts: layer.experts,
        top_k: layer.top_k,
        tensors: layer.tensors.len(),
        device: layer.device,
        devices,
    })
}
