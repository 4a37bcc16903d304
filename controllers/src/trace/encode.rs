//! Writing a trace.

use super::wire::{Slots, crc32, encode_header};
use super::{MOST_BLOCK_BYTES, PROMPT, Phase, TICK, Tick, TraceError, TraceHeader, codec};

/// Bytes of records in a block unless told otherwise: what a crash may lose.
const BLOCK_BYTES: usize = 64 << 10;

/// Builds a trace. Bytes come out in whole blocks, so that they can be written as they appear.
#[derive(Clone, Debug)]
pub struct TraceEncoder {
    slots: Slots,
    out: Vec<u8>,
    block: Vec<u8>,
    block_bytes: usize,
    level: i32,
    tokens: usize,
}

impl TraceEncoder {
    /// Starts a trace; its header is ready to be taken. Blocks are small and compressed fast.
    ///
    /// # Errors
    /// When a name or the number of layers does not fit the format.
    pub fn new(header: &TraceHeader) -> Result<Self, TraceError> {
        Ok(Self {
            slots: Slots::new(&header.shape),
            out: encode_header(header)?,
            block: Vec::new(),
            block_bytes: BLOCK_BYTES,
            level: 1,
            tokens: 0,
        })
    }

    /// Makes blocks as large as they may be and spends time on compressing them: for files that are
    /// written once and kept.
    #[must_use]
    pub fn compact(mut self) -> Self {
        self.block_bytes = MOST_BLOCK_BYTES;
        self.level = 19;
        self
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
        self.room_for(1 + routed.len() * self.slots.id_bytes);
        self.block.push(phase.code());
        for (slot, &id) in routed.iter().enumerate() {
            let bytes = (id - self.slots.first[slot]).to_le_bytes();
            self.block.extend_from_slice(&bytes[..self.slots.id_bytes]);
        }
        self.tokens += 1;
        Ok(())
    }

    /// What follows belongs to a new prompt.
    ///
    /// # Errors
    /// When the label is longer than 65,535 bytes.
    pub fn prompt(&mut self, label: &str) -> Result<(), TraceError> {
        let most = usize::from(u16::MAX);
        let bytes = u16::try_from(label.len()).map_err(|_| TraceError::TooLarge {
            part: "a prompt's label",
            value: label.len(),
            most,
        })?;
        self.room_for(3 + label.len());
        self.block.push(PROMPT);
        self.block.extend_from_slice(&bytes.to_le_bytes());
        self.block.extend_from_slice(label.as_bytes());
        Ok(())
    }

    /// Appends what the controllers saw and decided.
    ///
    /// # Errors
    /// When it is too large for a block.
    pub fn tick(&mut self, tick: &Tick) -> Result<(), TraceError> {
        let json = tick.to_json();
        let most = MOST_BLOCK_BYTES - 5;
        let bytes = u32::try_from(json.len())
            .ok()
            .filter(|_| json.len() <= most);
        let bytes = bytes.ok_or(TraceError::TooLarge {
            part: "a tick",
            value: json.len(),
            most,
        })?;
        self.room_for(5 + json.len());
        self.block.push(TICK);
        self.block.extend_from_slice(&bytes.to_le_bytes());
        self.block.extend_from_slice(&json);
        Ok(())
    }

    /// Takes the bytes that are complete so far; the rest follows later.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// Ends the block, so that [`TraceEncoder::take`] returns everything.
    pub fn flush(&mut self) {
        if self.block.is_empty() {
            return;
        }
        let start = self.out.len();
        let (codec, stored) = codec::compress(&self.block, self.level);
        for length in [stored.len(), self.block.len()] {
            // Both are at most a little over `MOST_BLOCK_BYTES`.
            let length = u32::try_from(length).unwrap_or(u32::MAX);
            self.out.extend_from_slice(&length.to_le_bytes());
        }
        self.out.push(codec);
        self.out.extend_from_slice(&stored);
        let check = crc32(&self.out[start..]);
        self.out.extend_from_slice(&check.to_le_bytes());
        self.block.clear();
    }

    /// Ends the trace and returns the bytes not yet taken.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.flush();
        self.out
    }

    /// Ends the block when `more` bytes would make it too large.
    fn room_for(&mut self, more: usize) {
        if self.block.len() + more > self.block_bytes {
            self.flush();
        }
    }
}
