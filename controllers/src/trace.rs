//! Routing traces: which experts each token was routed to, as bytes.
//!
//! Pure encoding and decoding; reading and writing files is the caller's. All integers are little
//! endian:
//!
//! | part | content |
//! |---|---|
//! | magic | `HOTPINTR`, 8 bytes |
//! | version | u16, 1 |
//! | model | u16 length, then that many bytes of UTF-8 |
//! | dense | u64, bytes of dense weights |
//! | layers | u32 count; for each MoE layer u32 experts, u32 top-k, u64 bytes an expert |
//! | check | u32, CRC-32 of everything before it |
//! | blocks | until the end: u32 token count, the tokens, u32 CRC-32 of count and tokens |
//!
//! A token is one byte of [`Phase`], then for each layer its top-k routed indices in slot order, each
//! u8 when every layer has at most 256 experts and u16 otherwise.

mod wire;

use crate::ids::{ModelShape, ShapeError};
use wire::{Reader, Slots, VERSION, crc32, decode_header, encode_header};

/// Most tokens in one block, so that one damaged block is small.
const BLOCK_TOKENS: usize = 1024;

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

/// Builds a trace. Bytes come out in whole blocks, so that they can be written as they appear.
#[derive(Clone, Debug)]
pub struct TraceEncoder {
    slots: Slots,
    out: Vec<u8>,
    block: Vec<u8>,
    block_tokens: u32,
    tokens: usize,
}

impl TraceEncoder {
    /// Starts a trace; its header is ready to be taken.
    ///
    /// # Errors
    /// When the name or the number of layers does not fit the format.
    pub fn new(header: &TraceHeader) -> Result<Self, TraceError> {
        Ok(Self {
            slots: Slots::new(&header.shape),
            out: encode_header(header)?,
            block: Vec::new(),
            block_tokens: 0,
            tokens: 0,
        })
    }

    /// Appends a token: `routed` holds flat [`crate::ExpertId`]s, layer by layer in slot order.
    ///
    /// # Errors
    /// When the ids are not as many as the model's slots, lie in another layer, or repeat.
    pub fn push(&mut self, phase: Phase, routed: &[u32]) -> Result<(), TraceError> {
        let index = |slot: usize, id: u32| id.checked_sub(self.slots.first[slot]);
        let fits = routed.len() == self.slots.count()
            && (0..routed.len()).all(|slot| {
                index(slot, routed[slot]).is_some_and(|index| index < self.slots.experts[slot])
            });
        if !fits || self.slots.repeated(routed).is_some() {
            return Err(TraceError::BadToken {
                token: self.tokens,
                given: routed.len(),
                expected: self.slots.count(),
            });
        }
        self.block.push(phase.code());
        for (slot, &id) in routed.iter().enumerate() {
            let bytes = (id - self.slots.first[slot]).to_le_bytes();
            self.block.extend_from_slice(&bytes[..self.slots.id_bytes]);
        }
        self.tokens += 1;
        self.block_tokens += 1;
        if self.block_tokens as usize == BLOCK_TOKENS {
            self.end_block();
        }
        Ok(())
    }

    /// Takes the bytes that are complete so far; the rest follows later.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// Ends the trace and returns the bytes not yet taken.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        if self.block_tokens > 0 {
            self.end_block();
        }
        self.out
    }

    fn end_block(&mut self) {
        let start = self.out.len();
        self.out.extend_from_slice(&self.block_tokens.to_le_bytes());
        self.out.append(&mut self.block);
        let check = crc32(&self.out[start..]);
        self.out.extend_from_slice(&check.to_le_bytes());
        self.block_tokens = 0;
    }
}

/// A decoded trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// What it was recorded from.
    pub header: TraceHeader,
    phases: Vec<Phase>,
    routed: Vec<u32>,
}

impl Trace {
    /// Decodes a whole trace.
    ///
    /// # Errors
    /// When the bytes are foreign, of another version, cut short or damaged; the error names the
    /// offset. Memory used is in proportion to the bytes given, whatever they claim.
    pub fn decode(bytes: &[u8]) -> Result<Self, TraceError> {
        let mut reader = Reader { bytes, at: 0 };
        let header = decode_header(&mut reader)?;
        let slots = Slots::new(&header.shape);
        let mut trace = Self {
            header,
            phases: Vec::new(),
            routed: Vec::new(),
        };
        while reader.at < bytes.len() {
            trace.decode_block(&mut reader, &slots)?;
        }
        Ok(trace)
    }

    /// Number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.phases.len()
    }

    /// Phase of one token. Panics when there is no such token.
    #[must_use]
    pub fn phase(&self, token: usize) -> Phase {
        self.phases[token]
    }

    /// Flat ids of the experts that one token was routed to, layer by layer in slot order. Panics
    /// when there is no such token.
    #[must_use]
    pub fn token(&self, token: usize) -> &[u32] {
        let slots = self.header.shape.routed_per_token() as usize;
        &self.routed[token * slots..(token + 1) * slots]
    }

    /// The ids of all tokens, one after the other.
    #[must_use]
    pub fn routed(&self) -> &[u32] {
        &self.routed
    }

    fn decode_block(&mut self, reader: &mut Reader<'_>, slots: &Slots) -> Result<(), TraceError> {
        let start = reader.at;
        let count = reader.u32("block length")? as usize;
        if count == 0 || count > BLOCK_TOKENS {
            return Err(TraceError::Value {
                offset: start,
                part: "a block length of",
                value: count as u64,
            });
        }
        let token_bytes = 1 + slots.count() * slots.id_bytes;
        let first = reader.at;
        let body = reader.take(count * token_bytes, "block")?;
        reader.check(start, "block")?;
        for (number, token) in body.chunks_exact(token_bytes).enumerate() {
            self.decode_token(token, first + number * token_bytes, slots)?;
        }
        Ok(())
    }

    fn decode_token(&mut self, token: &[u8], at: usize, slots: &Slots) -> Result<(), TraceError> {
        let value = |offset, part, value: u32| TraceError::Value {
            offset,
            part,
            value: u64::from(value),
        };
        let phase =
            Phase::from_code(token[0]).ok_or_else(|| value(at, "phase", u32::from(token[0])))?;
        let start = self.routed.len();
        for (slot, id) in token[1..].chunks_exact(slots.id_bytes).enumerate() {
            let mut wide = [0u8; 4];
            wide[..id.len()].copy_from_slice(id);
            let index = u32::from_le_bytes(wide);
            if index >= slots.experts[slot] {
                let offset = at + 1 + slot * slots.id_bytes;
                return Err(value(offset, "expert index", index));
            }
            self.routed.push(slots.first[slot] + index);
        }
        if let Some(slot) = slots.repeated(&self.routed[start..]) {
            let index = self.routed[start + slot] - slots.first[slot];
            let offset = at + 1 + slot * slots.id_bytes;
            return Err(value(offset, "repeated expert index", index));
        }
        self.phases.push(phase);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
