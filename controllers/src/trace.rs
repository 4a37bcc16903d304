//! Recorded sessions: which experts each token was routed to, where prompts begin, and what the
//! controllers saw and decided, as bytes.
//!
//! Pure encoding and decoding; reading and writing files is the caller's. All integers are little
//! endian:
//!
//! | part | content |
//! |---|---|
//! | magic | `HOTPINTR`, 8 bytes |
//! | version | u16, 2 |
//! | model, architecture | each u16 length, then that many bytes of UTF-8 |
//! | dense | u64, bytes of dense weights |
//! | layers | u32 count; for each MoE layer u32 experts, u32 top-k, u64 bytes an expert |
//! | check | u32, CRC-32 of everything before it |
//! | blocks | until the end: u32 stored length, u32 length, u8 codec, the stored bytes, u32 CRC-32 of all that |
//!
//! Codec 0 stores records as they are, 1 as one zstd frame (feature `zstd`). Blocks stand alone, so
//! what a crash leaves behind is readable up to the last whole one. A record is a tag and a body:
//!
//! | tag | record | body |
//! |---|---|---|
//! | 0, 1 | token of decode, of prefill | for each layer its top-k routed indices in slot order, each u8 when every layer has at most 256 experts, else u16, or u32 beyond 65,536 |
//! | 2 | prompt: what follows belongs to a new one | u16 length, a label in UTF-8 |
//! | 3 | tick | u32 length, a [`Tick`] in JSON |

mod codec;
mod decode;
mod encode;
mod tick;
mod wire;

pub use decode::{Trace, TraceDecoder};
pub use encode::TraceEncoder;
pub use tick::Tick;

use crate::ids::{ModelShape, ShapeError};
use wire::VERSION;

/// Most bytes of records in one block, so that a damaged length asks for no more memory.
pub const MOST_BLOCK_BYTES: usize = 8 << 20;

const PROMPT: u8 = 2;
const TICK: u8 = 3;

/// How a token went through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// One at a time.
    Decode,
    /// In a batch of prompt tokens.
    Prefill,
}

impl Phase {
    const fn code(self) -> u8 {
        match self {
            Self::Decode => 0,
            Self::Prefill => 1,
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Decode),
            1 => Some(Self::Prefill),
            _ => None,
        }
    }
}

/// What a trace was recorded from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceHeader {
    /// Name of the model, free text.
    pub model: String,
    /// Architecture as the model file names it; empty when unknown.
    pub architecture: String,
    /// Bytes of dense weights; 0 when unknown.
    pub dense_bytes: u64,
    /// Experts, top-k and expert sizes of each MoE layer.
    pub shape: ModelShape,
}

/// Why a trace was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// It does not begin like a trace.
    #[error("not a hotpin trace: the first 8 bytes are not HOTPINTR")]
    Foreign,
    /// It was written by another version.
    #[error("trace version {found} at offset 8 is unknown; this program reads version {VERSION}")]
    Version {
        /// The version found.
        found: u16,
    },
    /// It ends early.
    #[error("trace is cut short at offset {offset}: {missing_bytes} bytes of {part} are missing")]
    Truncated {
        /// Where the part begins.
        offset: usize,
        /// What is missing.
        part: &'static str,
        /// Bytes missing of that part.
        missing_bytes: usize,
    },
    /// A check sum does not match.
    #[error("trace is damaged: the check sum at offset {offset} does not match its {part}")]
    Damaged {
        /// Offset of the check sum.
        offset: usize,
        /// What it covers.
        part: &'static str,
    },
    /// A field has a value that no trace has.
    #[error("trace has {part} {value} at offset {offset}, which cannot be")]
    Value {
        /// Offset of the field.
        offset: usize,
        /// The field.
        part: &'static str,
        /// What it says.
        value: u64,
    },
    /// The header's layers are no usable shape.
    #[error("trace header ending at offset {offset}: {source}")]
    Shape {
        /// Where the list of layers ends.
        offset: usize,
        /// What is wrong with it.
        source: ShapeError,
    },
    /// The model's name or number of layers does not fit the format.
    #[error("{part} of {value} does not fit a trace; at most {most}")]
    TooLarge {
        /// What is too large.
        part: &'static str,
        /// Its size.
        value: usize,
        /// The most that fits.
        most: usize,
    },
    /// A block is compressed in a way that this build cannot undo.
    #[error("block at offset {offset} has codec {codec}, which this program cannot read")]
    Codec {
        /// Where the block begins.
        offset: usize,
        /// The codec's number.
        codec: u8,
    },
    /// A record does not decode.
    #[error("block at offset {offset}, byte {at} of its records: {problem}")]
    Record {
        /// Where the block begins.
        offset: usize,
        /// Where the record lies in the block once decompressed.
        at: usize,
        /// What is wrong.
        problem: String,
    },
    /// A token handed to the encoder is not one of the model's.
    #[error(
        "token {token}: {given} routed ids do not fit the model's {expected} slots or its layers"
    )]
    BadToken {
        /// Number of the token, from 0.
        token: usize,
        /// Ids given.
        given: usize,
        /// Slots of the model.
        expected: usize,
    },
}

#[cfg(test)]
mod tests;
