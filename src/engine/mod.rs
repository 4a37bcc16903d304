//! llama.cpp as the plant: loading, the routing tap, decoding and sampling.
//!
//! Besides `store`, this is the only home of unsafe code. Nothing here decides what stays in memory:
//! the tap hands each layer's routed experts to a [`RouteSink`] and waits for its answer.

mod arena;
mod batch;
pub mod capture;
pub mod chat;
mod context;
mod device;
pub mod gguf_write;
mod idle;
mod log;
mod lookahead;
mod lost_page;
mod mapping;
mod model;
mod options;
mod placement;
mod poison;
mod pool;
mod processors;
pub mod quantize;
mod sampler;
mod session;
mod split;
mod tap;
mod tensors;
mod threads;
mod trail;
mod urgency;

pub use arena::{ArenaUse, ExpertArena, Window};
pub use batch::Row;
pub use device::{BankRow, Device, Link, MemorySource, gpu_backends};
pub use lookahead::Guess;
pub use lost_page::end_on_lost_page;
pub use model::{Model, Token};
pub use options::{CacheType, EngineOptions, FlashAttention, Poll};
pub use placement::{GpuLayers, NoSuchLayers, Placement};
pub use poison::Poison;
pub use pool::{Kept, PoolCount, PoolSlots, PoolTotals, Repooled};
pub use sampler::{Constraint, Likelihood, Sampler, SamplerOptions, likelihoods};
pub use session::Session;
pub use tap::{ExpertOp, ExpertUse, Learned, Pass, RouteSink, Routed};
pub use urgency::{Urgency, hurry};

/// What can go wrong in the engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// llama.cpp did not load the model.
    #[error("llama.cpp could not load {path}: {detail}")]
    Load {
        /// The file that was asked for.
        path: String,
        /// What llama.cpp logged last.
        detail: String,
    },
    /// llama.cpp did not create a context.
    #[error(
        "llama.cpp could not create a context of {n_ctx} tokens (batch {n_batch}, micro-batch {n_ubatch}): {detail}; a smaller -c needs less memory"
    )]
    Context {
        /// Context length in tokens.
        n_ctx: u32,
        /// Logical batch, tokens.
        n_batch: u32,
        /// Physical batch, tokens.
        n_ubatch: u32,
        /// What llama.cpp logged last.
        detail: String,
    },
    /// Text could not be tokenised.
    #[error("the text could not be tokenised: {0}")]
    Tokenize(String),
    /// A token could not be turned into text.
    #[error("token {token} could not be turned into text: {detail}")]
    Detokenize {
        /// The token's id.
        token: i32,
        /// The cause.
        detail: String,
    },
    /// The prompt and what was generated do not fit the context.
    #[error(
        "the context is full: {used} tokens are in it, {wanted} more were to be decoded, and it holds {n_ctx}; give a larger -c"
    )]
    ContextFull {
        /// Tokens in the context.
        used: usize,
        /// Tokens of the batch.
        wanted: usize,
        /// Context length.
        n_ctx: usize,
    },
    /// An output grammar could not be used.
    #[error("the output grammar could not be used: {0}")]
    Grammar(String),
    /// `llama_decode` failed.
    #[error("decoding failed: {0}")]
    Decode(String),
    /// Expert bytes could not be had, so the decode was stopped before sampling.
    #[error("stopped before sampling: {0}")]
    Poisoned(String),
    /// The chat template could not be applied.
    #[error("the model's chat template could not be applied: {0}; --raw sends the prompt as it is")]
    Template(String),
    /// The expert tensors that the graph uses are not the ones of the model map.
    #[error("the graph's expert tensors do not match the model file: {0}")]
    Unmapped(String),
    /// There is no graphics device to use.
    #[error("no graphics device: {0}")]
    NoDevice(String),
    /// The context was given up while its pool was changed, and no other could be created.
    #[error(
        "the context could not be created again after its pool in the device's memory was changed: {0}"
    )]
    Lost(String),
    /// The thread pool could not be made.
    #[error("a pool of {threads} threads could not be made")]
    Threads {
        /// Threads asked for.
        threads: u32,
    },
}
