//! What the demo model's file will hold: its header and, in order, where each tensor comes from.

use super::dense::{Dense, Part};
use super::error::Error;
use super::options::Options;
use crate::engine::gguf_write::{ALIGNMENT_BYTES, GgufHeader};
use crate::engine::quantize::TensorType;

/// Where a tensor's data comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// Bytes of the source, from this offset on.
    Copy {
        /// Offset in the source, in bytes.
        offset_bytes: u64,
    },
    /// A layer's router.
    Router {
        /// The layer.
        layer: u32,
    },
    /// One part of all experts of a layer.
    Experts {
        /// The layer.
        layer: u32,
        /// The part.
        part: Part,
    },
}

/// A tensor of the demo model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) origin: Origin,
    pub(super) size_bytes: u64,
}

/// The whole file.
#[derive(Debug)]
pub(super) struct Plan {
    /// The header, padded to where data starts.
    pub(super) header: Vec<u8>,
    /// Tensors in file order.
    pub(super) items: Vec<Item>,
    /// Size of the file.
    pub(super) total_bytes: u64,
}

impl Plan {
    pub(super) fn new(dense: &Dense, options: &Options) -> Result<Self, Error> {
        let mut header = compose_keys(dense, options)?;
        let mut items = Vec::new();
        for tensor in dense.header.tensors() {
            let (origin, size_bytes) = match feed_forward(&tensor.name, dense.layers) {
                None => {
                    let origin = Origin::Copy {
                        offset_bytes: tensor.offset_bytes,
                    };
                    (
                        origin,
                        header.add_tensor(&tensor.name, tensor.ty, tensor.shape)?,
                    )
                }
                Some((layer, part)) => {
                    if part == Part::Gate {
                        items.push(add_router(&mut header, dense, options, layer)?);
                    }
                    let name = format!("blk.{layer}.{}_exps.weight", part.name());
                    let [row_len, rows, ..] = tensor.shape;
                    let shape = [row_len, rows, u64::from(options.experts), 1];
                    let ty = options.quant.tensor_type();
                    ty.row_bytes(dense.row_len(part) as usize)?;
                    (
                        Origin::Experts { layer, part },
                        header.add_tensor(&name, ty, shape)?,
                    )
                }
            };
            items.push(Item { origin, size_bytes });
        }
        let header = header.to_bytes();
        let data_bytes: u64 = items.iter().map(|item| padded(item.size_bytes)).sum();
        Ok(Self {
            total_bytes: header.len() as u64 + data_bytes,
            header,
            items,
        })
    }
}

/// Bytes that a tensor takes in the file.
pub(super) const fn padded(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(ALIGNMENT_BYTES) * ALIGNMENT_BYTES
}

fn add_router(
    header: &mut GgufHeader,
    dense: &Dense,
    options: &Options,
    layer: u32,
) -> Result<Item, Error> {
    let name = format!("blk.{layer}.ffn_gate_inp.weight");
    let shape = [u64::from(dense.n_embd), u64::from(options.experts), 1, 1];
    let size_bytes = header.add_tensor(&name, TensorType::F32, shape)?;
    Ok(Item {
        origin: Origin::Router { layer },
        size_bytes,
    })
}

/// The layer and part of a feed-forward weight.
fn feed_forward(name: &str, layers: u32) -> Option<(u32, Part)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer = layer.parse().ok().filter(|&layer| layer < layers)?;
    let part = rest.strip_suffix(".weight")?;
    Part::ALL
        .into_iter()
        .find(|p| p.name() == part)
        .map(|part| (layer, part))
}

fn compose_keys(dense: &Dense, options: &Options) -> Result<GgufHeader, Error> {
    let source = &dense.header;
    let mut header = GgufHeader::from_source(source);
    header.set_u32("llama.expert_count", options.experts)?;
    header.set_u32("llama.expert_used_count", options.top_k)?;
    header.set_u32("general.file_type", options.quant.file_type())?;
    header.set_u32("general.quantization_version", QUANTIZATION_VERSION)?;
    let name = source
        .string("general.name")
        .unwrap_or_else(|| "llama".to_owned());
    header.set_string(
        "general.name",
        &format!("{name} {}x MoE (hotpin demo)", options.experts),
    )?;
    if let Some(size) = source.string("general.size_label") {
        header.set_string("general.size_label", &format!("{}x{size}", options.experts))?;
    }
    Ok(header)
}

/// `GGML_QNT_VERSION`: the layout of quantised blocks that ggml writes.
const QUANTIZATION_VERSION: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_feed_forward_weights_of_the_models_layers_become_experts() {
        assert_eq!(feed_forward("blk.3.ffn_up.weight", 4), Some((3, Part::Up)));
        assert_eq!(feed_forward("blk.4.ffn_up.weight", 4), None);
        assert_eq!(feed_forward("blk.3.ffn_norm.weight", 4), None);
        assert_eq!(feed_forward("output.weight", 4), None);
        assert_eq!(padded(33), 64);
    }
}
