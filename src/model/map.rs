//! The model map: where each expert's bytes are, and where everything else is.

use super::error::ModelError;
use super::experts::Role;
use super::gguf::{FileIdentity, TensorInfo};
use super::{build, shards};
use hotpin_controllers::{ExpertId, ModelShape};
use std::path::{Path, PathBuf};

/// One file of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its path.
    pub path: PathBuf,
    /// Its identity when the header was read.
    pub identity: FileIdentity,
    /// Its size, bytes.
    pub file_bytes: u64,
    /// Where its tensor data starts, bytes.
    pub data_offset: u64,
}

/// One tensor of the model.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The shard that holds it, an index into [`ModelMap::shards`].
    pub shard: u32,
    /// What it counts as.
    pub kind: TensorKind,
    /// Name, type, shape and place.
    pub info: TensorInfo,
}

/// What a tensor counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorKind {
    /// Used for every token.
    Dense,
    /// Routed experts.
    Expert,
    /// In a block that plain decoding never runs (multi-token prediction).
    Idle,
}

/// A piece of one expert: a range of one shard within one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Index into [`ModelMap::shards`].
    pub shard: u32,
    /// Index into [`ModelMap::tensors`].
    pub tensor: u32,
    /// Where it starts in the file, bytes.
    pub offset: u64,
    /// Its length, bytes.
    pub len: u64,
}

/// A range of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Index into [`ModelMap::shards`].
    pub shard: u32,
    /// Where it starts in the file, bytes.
    pub offset: u64,
    /// Its length, bytes. Includes the padding between the tensors that it covers.
    pub len: u64,
}

/// One part of a layer's experts: a tensor that holds one slice of each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Index into [`ModelMap::tensors`].
    pub tensor: u32,
    /// What it does.
    pub role: Role,
    /// Whether it is a weight, and not a bias or scale.
    pub weight: bool,
    /// Bytes of each expert's slice.
    pub slice_bytes: u64,
}

/// One MoE layer. Layers are counted from 0 without the dense ones; `block` is llama.cpp's number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeLayer {
    /// Block index, the N of `blk.N`.
    pub block: u32,
    /// Number of experts.
    pub experts: u32,
    /// Experts routed to per token.
    pub top_k: u32,
    /// Bytes of one expert: the sum of its slices.
    pub expert_bytes: u64,
    /// The parts, in the order of [`ModelMap::expert_slices`]: weights first (gate and up, gate,
    /// up, down), then biases and scales.
    pub parts: Vec<Part>,
}

/// The map of a model, dense or MoE.
#[derive(Clone, Debug)]
pub struct ModelMap {
    pub(super) architecture: String,
    pub(super) name: String,
    pub(super) block_count: u32,
    pub(super) context_length: Option<u64>,
    pub(super) shards: Vec<Shard>,
    pub(super) tensors: Vec<Tensor>,
    /// Indices of `tensors` sorted by name.
    pub(super) by_name: Vec<u32>,
    pub(super) layers: Vec<MoeLayer>,
    /// All slices, expert after expert.
    pub(super) slices: Vec<Slice>,
    /// For each MoE layer, where its slices start.
    pub(super) slice_base: Vec<usize>,
    pub(super) dense: Vec<Range>,
    pub(super) idle: Vec<Range>,
    pub(super) shape: ModelShape,
    pub(super) dense_bytes: u64,
    pub(super) idle_bytes: u64,
    pub(super) fingerprint: String,
}

impl ModelMap {
    /// Reads the headers of the model at `path`, the first shard if it is split.
    ///
    /// # Errors
    /// When a file cannot be read, is not GGUF, is truncated or corrupt, when a shard is missing
    /// or not the one its name says, or when the experts' tensors and the metadata disagree.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        build::build(shards::read_all(path, super::is_model_key)?)
    }

    /// `general.architecture`.
    #[must_use]
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// `general.name`, or the file's name without its ending.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path to load the model from: the first shard, beside which the others are.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.shards[0].path
    }

    /// Blocks (transformer layers) in all, MoE or not, without those that decoding never runs.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        self.block_count
    }

    /// The context that the model was trained for, tokens, if the header says so.
    #[must_use]
    pub fn context_length(&self) -> Option<u64> {
        self.context_length
    }

    /// The files.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// All tensors, in shard order and then in the order of their data.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensor of that name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        let at = self
            .by_name
            .binary_search_by(|&index| self.tensors[index as usize].info.name.as_ref().cmp(name))
            .ok()?;
        Some(&self.tensors[self.by_name[at] as usize])
    }

    /// Whether there are routed experts at all.
    #[must_use]
    pub fn is_moe(&self) -> bool {
        !self.layers.is_empty()
    }

    /// The MoE layers in block order.
    #[must_use]
    pub fn layers(&self) -> &[MoeLayer] {
        &self.layers
    }

    /// The MoE layer of a block; `None` for a dense block.
    #[must_use]
    pub fn layer_of_block(&self, block: u32) -> Option<usize> {
        self.layers
            .binary_search_by_key(&block, |layer| layer.block)
            .ok()
    }

    /// The shape that controllers need; without layers when the model is dense.
    #[must_use]
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// The slices of one expert, in the order of its layer's [`MoeLayer::parts`]; none for an
    /// expert that the model does not have.
    #[must_use]
    pub fn expert_slices(&self, id: ExpertId) -> &[Slice] {
        if id.index() >= self.shape.total_experts() {
            return &[];
        }
        let (layer, index) = self.shape.place(id);
        let parts = self.layers[layer].parts.len();
        let start = self.slice_base[layer] + index as usize * parts;
        &self.slices[start..start + parts]
    }

    /// The dense weights, coalesced, in file order.
    #[must_use]
    pub fn dense_ranges(&self) -> &[Range] {
        &self.dense
    }

    /// Weights that plain decoding never touches (blocks for multi-token prediction), coalesced.
    #[must_use]
    pub fn idle_ranges(&self) -> &[Range] {
        &self.idle
    }

    /// Bytes of the dense weights.
    #[must_use]
    pub fn dense_bytes(&self) -> u64 {
        self.dense_bytes
    }

    /// Bytes of the weights that plain decoding never touches.
    #[must_use]
    pub fn idle_bytes(&self) -> u64 {
        self.idle_bytes
    }

    /// Bytes of all experts.
    #[must_use]
    pub fn expert_bytes(&self) -> u64 {
        self.shape.total_bytes()
    }

    /// Bytes of all tensors.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        // The sum is at most the sum of the files' sizes, which was checked.
        self.dense_bytes + self.idle_bytes + self.expert_bytes()
    }

    /// Bytes of experts that one decoded token touches.
    #[must_use]
    pub fn token_cycle_bytes(&self) -> u64 {
        self.shape.token_cycle_bytes()
    }

    /// Hex SHA-256 over architecture, name, layer shapes and every tensor's name, type and shape.
    /// The same weights split differently have the same fingerprint.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }
}
