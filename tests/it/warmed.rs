//! Models that llama.cpp never loaded, as if it had.

use hotpin::engine::{ExpertOp, ExpertUse, Learned};
use hotpin::model::ModelMap;

/// What a mapping of the model looks like after warm-up.
pub fn learned(map: &ModelMap, base: usize) -> Learned {
    let uses = map.layers().iter().flat_map(|layer| {
        layer.parts.iter().map(|part| {
            let info = &map.tensors()[part.tensor as usize].info;
            ExpertUse {
                op: ExpertOp::Multiply,
                before: String::new(),
                tensor: info.name.to_string(),
                block: layer.block,
                address: base + usize::try_from(info.offset).expect("an address"),
                stride_bytes: usize::try_from(part.slice_bytes).expect("small"),
                experts: layer.experts as usize,
            }
        })
    });
    Learned {
        uses: uses.collect(),
        ..Learned::default()
    }
}
