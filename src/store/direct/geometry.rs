//! Where each expert's bytes go in a slot, and which aligned range of the file they come from.
//!
//! A slot holds all parts of one expert, each in an area of its own. Experts whose slots are equally
//! large share one arena (a *class*), whichever layer they belong to. Direct reads start and end at
//! multiples of the device's alignment, so a slice arrives with what surrounds it, at its file
//! offset's distance from an aligned address (its *phase*). ggml wants every slice of a tensor at one
//! phase: where the file has several, slices are moved within their area after the read.

use crate::engine::{ExpertOp, Learned};
use crate::model::{ModelMap, TensorKind};
use hotpin_controllers::{ExpertId, ModelShape};
use std::collections::HashMap;

/// Areas start at least so aligned: a cache line, which no kernel of ggml exceeds.
const AREA_ALIGN_BYTES: usize = 64;
/// Slots are whole pages, so that they can be given back one by one.
const SLOT_ALIGN_BYTES: usize = 4096;

/// One part of a layer's experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) tensor: String,
    pub(super) shard: usize,
    /// Offset of expert 0's slice in the file.
    file_offset: u64,
    pub(super) slice_bytes: usize,
    /// Start of the area within a slot.
    area: usize,
    /// Where in its area the slice lies.
    phase: usize,
}

/// One MoE layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layer {
    pub(super) class: usize,
    pub(super) parts: Vec<Part>,
}

/// Layers whose slots are equally large.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Class {
    pub(super) slot_bytes: usize,
    /// Experts of all its layers.
    pub(super) experts: usize,
}

/// A range to read and what to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) shard: usize,
    /// First byte to read, aligned.
    pub(super) offset: u64,
    /// Where it goes within the slot, aligned.
    pub(super) at: usize,
    /// Bytes to read, a multiple of the alignment; the file may end before.
    pub(super) len: usize,
    /// Bytes in front of the slice.
    pub(super) skip: usize,
    /// Where the slice belongs within the slot.
    pub(super) slice_at: usize,
    pub(super) slice_bytes: usize,
}

/// Geometry of a whole model.
#[derive(Debug)]
pub(super) struct Geometry {
    align: usize,
    pub(super) shape: ModelShape,
    pub(super) layers: Vec<Layer>,
    pub(super) classes: Vec<Class>,
    /// Layer and part of each tensor.
    pub(super) by_tensor: HashMap<String, (usize, usize)>,
    pub(super) layer_of_block: Vec<Option<usize>>,
    pub(super) most_parts: usize,
}

fn up(n: usize, to: usize) -> usize {
    n.div_ceil(to) * to
}

fn rest(offset: u64, align: usize) -> usize {
    // Below `align`, which is a usize.
    usize::try_from(offset % align as u64).unwrap_or(0)
}

impl Geometry {
    /// Lays out the weights that the graph multiplies by, in graph order. `align` is that of direct
    /// reads, a power of two, or 1 for reads of any range.
    pub(super) fn new(map: &ModelMap, learned: &Learned, align: usize) -> Self {
        let shape = map.shape().clone();
        let last_block = map.layers().iter().map(|l| l.block as usize + 1).max();
        let mut geometry = Self {
            align,
            layers: Vec::new(),
            classes: Vec::new(),
            by_tensor: HashMap::new(),
            layer_of_block: vec![None; last_block.unwrap_or(0)],
            most_parts: 0,
            shape,
        };
        for (index, layer) in map.layers().iter().enumerate() {
            geometry.layer_of_block[layer.block as usize] = Some(index);
            let mut parts = Vec::new();
            let mut slot_bytes = 0;
            let used = learned
                .uses
                .iter()
                .filter(|u| u.op == ExpertOp::Multiply && u.block == layer.block);
            for used in used {
                let Some(tensor) = map
                    .tensor(&used.tensor)
                    .filter(|t| t.kind == TensorKind::Expert)
                else {
                    continue;
                };
                let part = geometry.part(tensor, layer.experts, slot_bytes);
                slot_bytes = part.area + geometry.area_bytes(&part);
                geometry
                    .by_tensor
                    .insert(used.tensor.clone(), (index, parts.len()));
                parts.push(part);
            }
            geometry.most_parts = geometry.most_parts.max(parts.len());
            let class = geometry.class_of(up(slot_bytes, SLOT_ALIGN_BYTES));
            geometry.classes[class].experts += layer.experts as usize;
            geometry.layers.push(Layer { class, parts });
        }
        geometry
    }

    fn part(&self, tensor: &crate::model::Tensor, experts: u32, at: usize) -> Part {
        let slice_bytes = tensor.info.bytes / u64::from(experts.max(1));
        Part {
            tensor: tensor.info.name.to_string(),
            shard: tensor.shard as usize,
            file_offset: tensor.info.offset,
            slice_bytes: usize::try_from(slice_bytes).unwrap_or(usize::MAX),
            area: up(at, self.align.max(AREA_ALIGN_BYTES)),
            phase: rest(tensor.info.offset, self.align),
        }
    }

    /// Bytes of a part's area: the slice with what a direct read brings along on either side.
    fn area_bytes(&self, part: &Part) -> usize {
        let skip = if part.slice_bytes.is_multiple_of(self.align) {
            part.phase
        } else {
            self.align - 1
        };
        up(skip + part.slice_bytes, self.align)
    }

    fn class_of(&mut self, slot_bytes: usize) -> usize {
        let known = self.classes.iter().position(|c| c.slot_bytes == slot_bytes);
        known.unwrap_or_else(|| {
            self.classes.push(Class {
                slot_bytes,
                experts: 0,
            });
            self.classes.len() - 1
        })
    }

    /// The range of one part of one expert.
    pub(super) fn extent(&self, id: ExpertId, part: usize) -> Extent {
        let (layer, index) = self.shape.place(id);
        let part = &self.layers[layer].parts[part];
        let start = part.file_offset + u64::from(index) * part.slice_bytes as u64;
        let skip = rest(start, self.align);
        Extent {
            shard: part.shard,
            offset: start - skip as u64,
            at: part.area,
            len: up(skip + part.slice_bytes, self.align),
            skip,
            slice_at: part.area + part.phase,
            slice_bytes: part.slice_bytes,
        }
    }

    /// The expert that a router of a block names by its index; `None` for what the model lacks.
    pub(super) fn expert(&self, block: u32, index: i32) -> Option<ExpertId> {
        let layer = (*self.layer_of_block.get(block as usize)?)?;
        let index = u32::try_from(index).ok()?;
        (index < self.shape.experts_in(layer)).then(|| self.shape.id(layer, index))
    }

    /// Where a tensor's slices lie within slots, and its layer.
    pub(super) fn place(&self, tensor: &str) -> Option<(usize, usize)> {
        let &(layer, part) = self.by_tensor.get(tensor)?;
        let found = &self.layers[layer].parts[part];
        Some((layer, found.area + found.phase))
    }

    /// Class of an expert.
    pub(super) fn class(&self, id: ExpertId) -> usize {
        self.layers[self.shape.layer_of(id)].class
    }

    /// Number of a part of an expert, below the number of experts times `most_parts`.
    pub(super) fn slice(&self, id: ExpertId, part: usize) -> usize {
        id.index() * self.most_parts + part
    }

    /// Parts of an expert.
    pub(super) fn parts(&self, id: ExpertId) -> usize {
        self.layers[self.shape.layer_of(id)].parts.len()
    }
}
