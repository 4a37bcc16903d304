//! Settings of the engine that change its bits or its speed.

use serde::{Deserialize, Serialize};

/// Storage type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum CacheType {
    /// 16-bit floats.
    #[default]
    F16,
    /// 32-bit floats.
    F32,
    /// Brain floats.
    Bf16,
    /// 8-bit blocks (needs flash attention for V).
    #[value(name = "q8_0")]
    Q8_0,
    /// 4-bit blocks (needs flash attention for V).
    #[value(name = "q4_0")]
    Q4_0,
}

impl CacheType {
    pub(super) fn ggml(self) -> llama_cpp_4::quantize::GgmlType {
        use llama_cpp_4::quantize::GgmlType;
        match self {
            Self::F16 => GgmlType::F16,
            Self::F32 => GgmlType::F32,
            Self::Bf16 => GgmlType::BF16,
            Self::Q8_0 => GgmlType::Q8_0,
            Self::Q4_0 => GgmlType::Q4_0,
        }
    }
}

/// Whether attention uses the fused kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum FlashAttention {
    /// llama.cpp decides.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// How idle compute threads wait.
///
/// Spinning threads answer soonest but take the core that page faults and reads need, so a policy
/// that streams experts waits quietly (docs/control.md gives the figures).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Poll {
    /// ggml's default: spin for a while, then sleep. What stock llama.cpp does.
    Spin,
    /// Spin briefly, then sleep.
    Quiet,
    /// Spin while every routed expert is resident, quiet while experts are streamed.
    Follow,
}

/// Settings of a session. All of them hold for its life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineOptions {
    /// Compute threads, for decode and prefill alike.
    pub threads: u32,
    /// Context length of each sequence, tokens.
    pub n_ctx: u32,
    /// Sequences that may be in the context at once.
    pub sequences: u32,
    /// Logical batch, tokens.
    pub n_batch: u32,
    /// Physical batch, tokens. ggml's kernels depend on it, so it is part of bit identity.
    pub n_ubatch: u32,
    /// Type of cached keys.
    pub cache_k: CacheType,
    /// Type of cached values.
    pub cache_v: CacheType,
    /// Flash attention.
    pub flash_attention: FlashAttention,
    /// How idle compute threads wait.
    pub poll: Poll,
}

impl Default for EngineOptions {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(2, |n| n.get());
        Self {
            threads: u32::try_from(threads).unwrap_or(2),
            n_ctx: 4096,
            sequences: 1,
            n_batch: 512,
            n_ubatch: 512,
            cache_k: CacheType::default(),
            cache_v: CacheType::default(),
            flash_attention: FlashAttention::default(),
            poll: Poll::Spin,
        }
    }
}
