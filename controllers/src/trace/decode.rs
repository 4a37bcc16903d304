//! Reading a trace, whole or as it arrives.

use super::wire::{Reader, Slots, decode_header};
use super::{MOST_BLOCK_BYTES, PROMPT, Phase, TICK, Tick, TraceError, TraceHeader, codec};

/// Bytes of a block before what it stores.
const BLOCK_HEAD_BYTES: usize = 9;

/// A decoded trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// What it was recorded from.
    pub header: TraceHeader,
    phases: Vec<Phase>,
    routed: Vec<u32>,
    prompts: Vec<(usize, String)>,
    ticks: Vec<(usize, Tick)>,
}

impl Trace {
    /// Decodes a whole trace.
    ///
    /// # Errors
    /// When the bytes are foreign, of another version, cut short or damaged; the error names the
    /// offset. A block takes at most [`MOST_BLOCK_BYTES`] more than the bytes given.
    pub fn decode(bytes: &[u8]) -> Result<Self, TraceError> {
        let (trace, ended) = Self::recover(bytes)?;
        ended.map_or(Ok(trace), Err)
    }

    /// Decodes as much of a trace as there is: everything up to the last whole block, and what is
    /// wrong with the rest, if there is one.
    ///
    /// # Errors
    /// When not even the header can be read.
    pub fn recover(bytes: &[u8]) -> Result<(Self, Option<TraceError>), TraceError> {
        let mut decoder = TraceDecoder::default();
        decoder.feed(bytes);
        let header = decoder.header()?.clone();
        let mut trace = Self::empty(header);
        loop {
            match decoder.block(&mut trace) {
                Ok(true) => {}
                Ok(false) => return Ok((trace, decoder.unfinished())),
                Err(error) => return Ok((trace, Some(error))),
            }
        }
    }

    /// A trace of no tokens.
    #[must_use]
    pub fn empty(header: TraceHeader) -> Self {
        Self {
            header,
            phases: Vec::new(),
            routed: Vec::new(),
            prompts: Vec::new(),
            ticks: Vec::new(),
        }
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

    /// Where prompts begin: their first token and label.
    #[must_use]
    pub fn prompts(&self) -> &[(usize, String)] {
        &self.prompts
    }

    /// Ticks, each with the number of tokens before it.
    #[must_use]
    pub fn ticks(&self) -> &[(usize, Tick)] {
        &self.ticks
    }

    fn truncate(&mut self, tokens: usize) {
        let slots = self.header.shape.routed_per_token() as usize;
        self.phases.truncate(tokens);
        self.routed.truncate(tokens * slots);
    }

    fn records(&mut self, records: &[u8], slots: &Slots, offset: usize) -> Result<(), TraceError> {
        let (tokens, prompts, ticks) = (self.tokens(), self.prompts.len(), self.ticks.len());
        let mut reader = Reader {
            bytes: records,
            at: 0,
        };
        while reader.at < records.len() {
            let at = reader.at;
            if let Err(problem) = self.record(&mut reader, slots) {
                // A block counts whole or not at all.
                self.truncate(tokens);
                self.prompts.truncate(prompts);
                self.ticks.truncate(ticks);
                return Err(TraceError::Record {
                    offset,
                    at,
                    problem,
                });
            }
        }
        Ok(())
    }

    fn record(&mut self, reader: &mut Reader<'_>, slots: &Slots) -> Result<(), String> {
        let short = |error: TraceError| error.to_string();
        let tag = reader.take(1, "tag").map_err(short)?[0];
        match tag {
            PROMPT => {
                let bytes = usize::from(reader.u16("label length").map_err(short)?);
                let label = reader.take(bytes, "label").map_err(short)?;
                let label = str::from_utf8(label).map_err(|error| format!("label: {error}"))?;
                self.prompts.push((self.tokens(), label.to_owned()));
            }
            TICK => {
                let bytes = reader.u32("tick length").map_err(short)? as usize;
                let json = reader.take(bytes, "tick").map_err(short)?;
                let tick = Tick::from_json(json).map_err(|error| format!("tick: {error}"))?;
                self.ticks.push((self.tokens(), tick));
            }
            _ => {
                let phase =
                    Phase::from_code(tag).ok_or_else(|| format!("no record has tag {tag}"))?;
                let ids = slots.count() * slots.id_bytes;
                self.token_ids(reader.take(ids, "token").map_err(short)?, slots)?;
                self.phases.push(phase);
            }
        }
        Ok(())
    }

    fn token_ids(&mut self, ids: &[u8], slots: &Slots) -> Result<(), String> {
        let start = self.routed.len();
        for (slot, id) in ids.chunks_exact(slots.id_bytes).enumerate() {
            let mut wide = [0u8; 4];
            wide[..id.len()].copy_from_slice(id);
            let index = u32::from_le_bytes(wide);
            let experts = slots.experts[slot];
            if index >= experts {
                return Err(format!("slot {slot} names expert {index} of {experts}"));
            }
            self.routed.push(slots.first[slot] + index);
        }
        match slots.repeated(&self.routed[start..]) {
            Some(slot) => Err(format!("slot {slot} repeats an expert of its layer")),
            None => Ok(()),
        }
    }
}

/// Takes in the bytes of a trace piece by piece and gives out whole blocks.
#[derive(Clone, Debug, Default)]
pub struct TraceDecoder {
    pending: Vec<u8>,
    /// Bytes of `pending` that are done with, and where `pending` begins in the trace.
    done: usize,
    offset: usize,
    header: Option<(TraceHeader, Slots)>,
}

impl TraceDecoder {
    /// More bytes have come.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.pending.drain(..self.done);
        self.offset += self.done;
        self.done = 0;
        self.pending.extend_from_slice(bytes);
    }

    /// The header, once its bytes are there.
    ///
    /// # Errors
    /// [`TraceError::Truncated`] while bytes are missing, and whatever is wrong with the header.
    pub fn header(&mut self) -> Result<&TraceHeader, TraceError> {
        if self.header.is_none() {
            let mut reader = Reader {
                bytes: &self.pending,
                at: 0,
            };
            let header = decode_header(&mut reader)?;
            self.done = reader.at;
            let slots = Slots::new(&header.shape);
            self.header = Some((header, slots));
        }
        match &self.header {
            Some((header, _)) => Ok(header),
            None => Err(TraceError::Foreign),
        }
    }

    /// Appends the next block to `trace`, which must have this trace's header. False when no whole
    /// block is there.
    ///
    /// # Errors
    /// When the header or the block is damaged; nothing of that block is appended.
    pub fn block(&mut self, trace: &mut Trace) -> Result<bool, TraceError> {
        self.header()?;
        let Some((_, slots)) = &self.header else {
            return Ok(false);
        };
        let start = self.offset + self.done;
        let left = &self.pending[self.done..];
        let Some(head) = left.get(..BLOCK_HEAD_BYTES) else {
            return Ok(false);
        };
        let length = |at: usize| {
            let bytes = [head[at], head[at + 1], head[at + 2], head[at + 3]];
            u32::from_le_bytes(bytes) as usize
        };
        let (stored, records, how) = (length(0), length(4), head[8]);
        for (at, value) in [(0, stored), (4, records)] {
            if value == 0 || value > MOST_BLOCK_BYTES + MOST_BLOCK_BYTES / 8 {
                return Err(TraceError::Value {
                    offset: start + at,
                    part: "a block length of",
                    value: value as u64,
                });
            }
        }
        let whole = BLOCK_HEAD_BYTES + stored + 4;
        let Some(block) = left.get(..whole) else {
            return Ok(false);
        };
        let mut reader = Reader {
            bytes: block,
            at: whole - 4,
        };
        reader.check_at(0, "block", start)?;
        let stored = &block[BLOCK_HEAD_BYTES..whole - 4];
        let records = codec::decompress(how, stored, records, start)?;
        trace.records(&records, slots, start)?;
        self.done += whole;
        Ok(true)
    }

    /// What is missing of a block that has begun; `None` at the end of a block.
    #[must_use]
    pub fn unfinished(&self) -> Option<TraceError> {
        let left = self.pending.len() - self.done;
        if left == 0 {
            return None;
        }
        let needed = self
            .pending
            .get(self.done..self.done + 4)
            .map_or(BLOCK_HEAD_BYTES, |n| {
                BLOCK_HEAD_BYTES + 4 + u32::from_le_bytes([n[0], n[1], n[2], n[3]]) as usize
            });
        Some(TraceError::Truncated {
            offset: self.offset + self.done,
            part: "block",
            missing_bytes: needed.saturating_sub(left),
        })
    }
}
