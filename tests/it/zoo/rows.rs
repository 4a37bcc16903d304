//! What a row of the tables says. docs/models.md says how to add one.

/// A value of the metadata.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    Uint(u32),
    Float(f32),
    Bool(bool),
    Uints(&'static [u32]),
    Ints(&'static [i32]),
    Bools(&'static [bool]),
    /// A key of [`BASE`] that this architecture must not have.
    Absent,
}

use Value::{Bool, Float, Uint};

pub type Key = (&'static str, Value);

/// How the files of a model lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// All in one file.
    OneFile,
    /// That many shards side by side. Tensors are dealt out one by one, so that a layer's experts are
    /// in several of them.
    Shards(u16),
    /// Shards with names that say nothing, on two file systems; the model's path is a symbolic link
    /// among others, as in the caches of model hubs.
    Linked(u16),
    /// A read-only file on a read-only mount, where this process may make one.
    ReadOnlyMount,
}

/// One architecture.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The row's name, a model that people run.
    pub name: &'static str,
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Metadata, without the architecture's prefix, in place of [`BASE`]'s or besides it.
    pub keys: &'static [Key],
    /// Optional tensors that such models do not have: parts of their names.
    pub without: &'static [&'static str],
    /// Optional tensors that they do have, though [`WITHOUT`] leaves them out.
    pub with: &'static [&'static str],
    /// Whether gate and up are two tensors where llama.cpp takes one, too.
    pub splits_gate_up: bool,
    /// Whether a block for multi-token prediction follows.
    pub mtp: bool,
    /// Whether prompts must be decoded in one micro-batch, because attention looks ahead.
    pub whole_prompts: bool,
    /// How its files lie.
    pub place: Place,
    /// Bytes that tensors are aligned to, where that is not ggml's default.
    pub alignment: Option<u32>,
    /// Types of the experts' weights: (gate and up, down) for the blocks in turn.
    pub types: &'static [(&'static str, &'static str)],
}

/// What most architectures have in common. Nobody minds a key that it does not know.
pub const BASE: &[Key] = &[
    ("context_length", Uint(512)),
    ("embedding_length", Uint(128)),
    ("block_count", Uint(4)),
    ("feed_forward_length", Uint(192)),
    ("attention.head_count", Uint(4)),
    ("attention.head_count_kv", Uint(2)),
    ("attention.key_length", Uint(32)),
    ("attention.value_length", Uint(32)),
    ("attention.layer_norm_rms_epsilon", Float(1e-5)),
    ("attention.layer_norm_epsilon", Float(1e-5)),
    ("rope.dimension_count", Uint(32)),
    ("rope.freq_base", Float(10_000.0)),
    ("expert_count", Uint(8)),
    ("expert_used_count", Uint(2)),
    ("expert_feed_forward_length", Uint(64)),
    ("expert_shared_feed_forward_length", Uint(64)),
    ("expert_shared_count", Uint(1)),
    ("expert_weights_scale", Float(1.0)),
    ("expert_weights_norm", Bool(true)),
    ("expert_gating_func", Uint(SOFTMAX)),
];

/// Optional tensors that only few models have.
pub const WITHOUT: &[&str] = &[
    ".scale",
    ".input_scale",
    "rope_freqs",
    "rope_factors",
    "attn_q.bias",
    "attn_k.bias",
    "attn_v.bias",
    "attn_qkv.bias",
    "attn_output.bias",
];

pub const SOFTMAX: u32 = 1;
pub const SIGMOID: u32 = 2;
pub const SQRT_SOFTPLUS: u32 = 4;

impl Row {
    pub const fn new(architecture: &'static str, name: &'static str, keys: &'static [Key]) -> Self {
        Self {
            name,
            architecture,
            keys,
            without: &[],
            with: &[],
            splits_gate_up: false,
            mtp: false,
            whole_prompts: false,
            types: &[("q8_0", "q8_0")],
            place: Place::OneFile,
            alignment: None,
        }
    }

    pub const fn types(mut self, types: &'static [(&'static str, &'static str)]) -> Self {
        self.types = types;
        self
    }

    pub const fn without(mut self, names: &'static [&'static str]) -> Self {
        self.without = names;
        self
    }

    pub const fn with(mut self, names: &'static [&'static str]) -> Self {
        self.with = names;
        self
    }

    pub const fn split_gate_up(mut self) -> Self {
        self.splits_gate_up = true;
        self
    }

    pub const fn aligned(mut self, bytes: u32) -> Self {
        self.alignment = Some(bytes);
        self
    }

    pub const fn lies(mut self, place: Place) -> Self {
        self.place = place;
        self
    }

    pub const fn mtp(mut self) -> Self {
        self.mtp = true;
        self
    }

    pub const fn whole_prompts(mut self) -> Self {
        self.whole_prompts = true;
        self
    }

    /// Whether the row's model has no tensor of that name.
    pub fn leaves_out(&self, name: &str) -> bool {
        let any = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        any(self.without) || any(WITHOUT) && !any(self.with)
    }

    fn uint(&self, key: &str) -> u32 {
        let found = self.keys.iter().chain(BASE).find(|(k, _)| *k == key);
        match found {
            Some((_, Uint(value))) => *value,
            _ => panic!("{}: {key} is no number", self.name),
        }
    }

    /// Experts of a layer.
    pub fn experts(&self) -> u32 {
        self.uint("expert_count")
    }

    /// Blocks, without one for multi-token prediction.
    pub fn blocks(&self) -> u32 {
        self.uint("block_count")
    }
}
