//! The bytes of a trace: header, slots, check sums, and a cursor that never passes the end.

use super::{TraceError, TraceHeader};
use crate::ids::ModelShape;
use std::collections::HashSet;
use std::ops::Range;

const MAGIC: [u8; 8] = *b"HOTPINTR";
/// The version that is written, and the only one that is read.
pub(super) const VERSION: u16 = 2;
/// Most MoE layers that a trace may have.
const MAX_LAYERS: u32 = 4096;
/// Slots of a layer up to which each is compared with every other; beyond, they are looked up.
const FEW_SLOTS: usize = 64;
/// Bytes of one layer in the header.
const LAYER_BYTES: usize = 16;

/// The slots of a token: for each, its layer's first expert and number of experts.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    pub first: Vec<u32>,
    pub experts: Vec<u32>,
    layers: Vec<Range<usize>>,
    pub id_bytes: usize,
}

impl Slots {
    pub fn new(shape: &ModelShape) -> Self {
        let mut slots = Self {
            first: Vec::new(),
            experts: Vec::new(),
            layers: Vec::new(),
            id_bytes: 1,
        };
        for layer in 0..shape.layers() {
            let (experts, top_k) = (shape.experts_in(layer), shape.top_k_in(layer) as usize);
            let first = shape.id(layer, 0).0;
            let start = slots.first.len();
            slots.first.extend(std::iter::repeat_n(first, top_k));
            slots.experts.extend(std::iter::repeat_n(experts, top_k));
            slots.layers.push(start..start + top_k);
            slots.id_bytes = slots.id_bytes.max(id_bytes(experts));
        }
        slots
    }

    pub fn count(&self) -> usize {
        self.first.len()
    }

    /// The first slot that names an expert of an earlier slot of its layer.
    pub fn repeated(&self, routed: &[u32]) -> Option<usize> {
        self.layers.iter().find_map(|layer| {
            let mut slots = layer.clone();
            if layer.len() > FEW_SLOTS {
                let mut seen = HashSet::with_capacity(layer.len());
                return slots.find(|&slot| !seen.insert(routed[slot]));
            }
            slots.find(|&slot| routed[layer.start..slot].contains(&routed[slot]))
        })
    }
}

const fn id_bytes(experts: u32) -> usize {
    match experts {
        0..=0x100 => 1,
        0x101..=0x1_0000 => 2,
        _ => 4,
    }
}

pub(super) fn encode_header(header: &TraceHeader) -> Result<Vec<u8>, TraceError> {
    let shape = &header.shape;
    let too_large = |part, value, most| TraceError::TooLarge { part, value, most };
    let layers = u32::try_from(shape.layers())
        .ok()
        .filter(|&layers| layers > 0 && layers <= MAX_LAYERS)
        .ok_or_else(|| too_large("a layer count", shape.layers(), MAX_LAYERS as usize))?;
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&VERSION.to_le_bytes());
    for (part, name) in [
        ("a model name", &header.model),
        ("an architecture", &header.architecture),
    ] {
        let bytes = u16::try_from(name.len())
            .map_err(|_| too_large(part, name.len(), usize::from(u16::MAX)))?;
        out.extend_from_slice(&bytes.to_le_bytes());
        out.extend_from_slice(name.as_bytes());
    }
    out.extend_from_slice(&header.dense_bytes.to_le_bytes());
    out.extend_from_slice(&layers.to_le_bytes());
    for layer in 0..shape.layers() {
        out.extend_from_slice(&shape.experts_in(layer).to_le_bytes());
        out.extend_from_slice(&shape.top_k_in(layer).to_le_bytes());
        out.extend_from_slice(&shape.layer_expert_bytes(layer).to_le_bytes());
    }
    let check = crc32(&out);
    out.extend_from_slice(&check.to_le_bytes());
    Ok(out)
}

pub(super) fn decode_header(reader: &mut Reader<'_>) -> Result<TraceHeader, TraceError> {
    let known = reader.bytes.len().min(MAGIC.len());
    if reader.bytes[..known] != MAGIC[..known] {
        return Err(TraceError::Foreign);
    }
    reader.take(MAGIC.len(), "magic")?;
    let found = reader.u16("version")?;
    if found != VERSION {
        return Err(TraceError::Version { found });
    }
    let model = reader.text("model name")?;
    let architecture = reader.text("architecture")?;
    let dense_bytes = reader.u64("dense bytes")?;
    let layers_at = reader.at;
    let layers = reader.u32("layer count")?;
    if layers == 0 || layers > MAX_LAYERS {
        return Err(TraceError::Value {
            offset: layers_at,
            part: "a layer count of",
            value: u64::from(layers),
        });
    }
    let list_at = reader.at;
    reader.take(layers as usize * LAYER_BYTES, "layers")?;
    let offset = reader.at;
    reader.check(0, "header")?;
    let mut list = Reader {
        bytes: reader.bytes,
        at: list_at,
    };
    let (mut experts, mut top_k, mut expert_bytes) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..layers {
        experts.push(list.u32("experts")?);
        top_k.push(list.u32("top-k")?);
        expert_bytes.push(list.u64("expert bytes")?);
    }
    let shape = ModelShape::new(experts, expert_bytes, top_k)
        .map_err(|source| TraceError::Shape { offset, source })?;
    Ok(TraceHeader {
        model,
        architecture,
        dense_bytes,
        shape,
    })
}

/// A cursor that never passes the end.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
}

impl<'a> Reader<'a> {
    pub fn take(&mut self, count: usize, part: &'static str) -> Result<&'a [u8], TraceError> {
        let left = &self.bytes[self.at..];
        let taken = left.get(..count).ok_or(TraceError::Truncated {
            offset: self.at,
            part,
            missing_bytes: count.saturating_sub(left.len()),
        })?;
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, part: &'static str) -> Result<[u8; N], TraceError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, part)?);
        Ok(array)
    }

    pub fn u16(&mut self, part: &'static str) -> Result<u16, TraceError> {
        self.array(part).map(u16::from_le_bytes)
    }

    pub fn u32(&mut self, part: &'static str) -> Result<u32, TraceError> {
        self.array(part).map(u32::from_le_bytes)
    }

    fn u64(&mut self, part: &'static str) -> Result<u64, TraceError> {
        self.array(part).map(u64::from_le_bytes)
    }

    /// A length, and a text of so many bytes.
    fn text(&mut self, part: &'static str) -> Result<String, TraceError> {
        let bytes = usize::from(self.u16(part)?);
        let at = self.at;
        let text = self.take(bytes, part)?;
        str::from_utf8(text)
            .map(str::to_owned)
            .map_err(|error| TraceError::Value {
                offset: at + error.valid_up_to(),
                part: "a name that is not UTF-8, valid bytes",
                value: error.valid_up_to() as u64,
            })
    }

    /// Reads a check sum of everything from `start` to here.
    pub fn check(&mut self, start: usize, part: &'static str) -> Result<(), TraceError> {
        self.check_at(start, part, 0)
    }

    /// The same, where the bytes begin at `base` of the trace.
    pub fn check_at(
        &mut self,
        start: usize,
        part: &'static str,
        base: usize,
    ) -> Result<(), TraceError> {
        let offset = base + self.at;
        let expected = crc32(&self.bytes[start..self.at]);
        // A fuzzer would not find right sums by chance.
        if self.u32("check sum")? == expected || cfg!(fuzzing) {
            Ok(())
        } else {
            Err(TraceError::Damaged { offset, part })
        }
    }
}

/// CRC-32 as in IEEE 802.3, reflected polynomial 0xEDB88320.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        CRC_TABLE[usize::from(crc.to_le_bytes()[0] ^ byte)] ^ (crc >> 8)
    })
}

const CRC_TABLE: [u32; 256] = crc_table();

const fn crc_table() -> [u32; 256] {
    let mut table = [0u32; 256];
    let (mut index, mut seed) = (0, 0u32);
    while index < table.len() {
        let (mut crc, mut bit) = (seed, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0xedb8_8320
            } else {
                crc >> 1
            };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
        seed += 1;
    }
    table
}
