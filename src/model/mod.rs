//! The model map, read from the GGUF files themselves: which bytes of which file belong to which
//! expert, which are dense, and how much of it all a token touches.
//!
//! Invariant: only headers are read, through a buffer; no model file is mapped or written here, and
//! no number from a file is used before it is checked against the file's size.
#![forbid(unsafe_code)]

mod build;
mod error;
mod experts;
mod fit;
pub mod gguf;
mod inspect;
mod map;
mod metadata;
mod shards;
mod source;
pub mod types;
mod values;

pub use build::{MAX_BLOCKS, MAX_LAYER_EXPERTS};
pub use error::ModelError;
pub use experts::{MIN_SIDE_SLICE_BYTES, NameClass, Role, classify_name, is_of_experts};
pub use fit::{Demand, Fit, Judgement, Memory};
pub use gguf::FileIdentity;
pub use inspect::Inspection;
pub use map::{ModelMap, MoeLayer, Part, Range, Shard, Slice, Tensor, TensorKind};
pub use metadata::{Metadata, PerLayer, Value};
pub use shards::MAX_SHARDS;
pub use source::MAX_HEADER_BYTES;

/// The metadata key of the architecture.
const KEY_ARCHITECTURE: &str = "general.architecture";
/// The metadata key of the model's name.
const KEY_NAME: &str = "general.name";

/// The metadata that the map is made from; everything else is passed over.
#[must_use]
pub fn is_model_key(key: &str) -> bool {
    const OF_ARCHITECTURE: [&str; 5] = [
        "block_count",
        "context_length",
        "expert_count",
        "expert_used_count",
        "nextn_predict_layers",
    ];
    key == KEY_ARCHITECTURE
        || key == KEY_NAME
        || key.starts_with("split.")
        || key
            .split_once('.')
            .is_some_and(|(_, rest)| OF_ARCHITECTURE.contains(&rest))
}
