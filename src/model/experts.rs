//! Which tensors hold routed experts, by name and shape.

use super::gguf::TensorInfo;
use serde::{Deserialize, Serialize};

/// Biases and scales of fewer bytes an expert than this count as dense: locking one would lock the
/// page it shares with its neighbours, and fetching one costs as much as fetching a page.
pub const MIN_SIDE_SLICE_BYTES: u64 = 4096;

/// What an expert tensor does in its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Gate and up projection in one tensor.
    GateUp,
    /// Gate projection.
    Gate,
    /// Up projection.
    Up,
    /// Down projection.
    Down,
    /// Another `ffn_*_exps` tensor.
    Other,
}

/// What a tensor's name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameClass {
    /// A tensor of routed experts.
    Expert {
        /// Block index.
        block: u32,
        /// What it does.
        role: Role,
        /// Whether it is a weight (and not a bias or scale of one).
        weight: bool,
    },
    /// One expert's tensor in the layout from before experts were stacked.
    OldExpert,
    /// A dense tensor of a block.
    Block(u32),
    /// A dense tensor outside of the blocks.
    Outside,
}

/// Classifies a tensor name.
///
/// Routed experts are `blk.N.ffn_*_exps.*`. Not among them: shared experts (`_shexp`), which every
/// token uses; chunk experts (`_chexps`), which are few and follow the routed ones; the norm before
/// the experts (`ffn_norm_exps`); and value experts of attention (`attn_v_exps`), which have a
/// router of their own.
#[must_use]
pub fn classify_name(name: &str) -> NameClass {
    let Some((block, rest)) = name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'))
    else {
        return NameClass::Outside;
    };
    let Ok(block) = block.parse::<u32>() else {
        return NameClass::Outside;
    };
    let (base, suffix) = rest.split_once('.').unwrap_or((rest, ""));
    if matches!(base, "ffn_gate" | "ffn_up" | "ffn_down") {
        let index = suffix.split('.').next().unwrap_or("");
        if !index.is_empty() && index.bytes().all(|b| b.is_ascii_digit()) {
            return NameClass::OldExpert;
        }
    }
    if !base.starts_with("ffn_") || !base.ends_with("_exps") || base == "ffn_norm_exps" {
        return NameClass::Block(block);
    }
    let role = match base {
        "ffn_gate_up_exps" => Role::GateUp,
        "ffn_gate_exps" => Role::Gate,
        "ffn_up_exps" => Role::Up,
        "ffn_down_exps" => Role::Down,
        _ => Role::Other,
    };
    NameClass::Expert {
        block,
        role,
        weight: suffix == "weight",
    }
}

/// Whether a tensor of that name holds routed experts, or biases or scales of them.
#[must_use]
pub fn is_of_experts(name: &str) -> bool {
    matches!(classify_name(name), NameClass::Expert { .. })
}

/// Bytes of one expert's slice of `tensor`, or `None` when it does not divide into `experts` along
/// its outermost dimension.
#[must_use]
pub fn slice_bytes(tensor: &TensorInfo, experts: u32) -> Option<u64> {
    if experts == 1 {
        // Writers drop outer dimensions of one.
        return Some(tensor.bytes);
    }
    let experts = u64::from(experts);
    let (&outer, inner) = tensor.dims().split_last()?;
    if outer != experts || experts == 0 {
        return None;
    }
    // A one-dimensional tensor divides only if its blocks are single elements.
    let divides = !inner.is_empty() || tensor.ty.block_elements == 1;
    (divides && tensor.bytes.is_multiple_of(experts)).then_some(tensor.bytes / experts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let expert = |block, role, weight| NameClass::Expert {
            block,
            role,
            weight,
        };
        let cases = [
            ("blk.7.ffn_gate_exps.weight", expert(7, Role::Gate, true)),
            ("blk.7.ffn_up_exps.bias", expert(7, Role::Up, false)),
            ("blk.0.ffn_down_exps.scale", expert(0, Role::Down, false)),
            (
                "blk.12.ffn_gate_up_exps.weight",
                expert(12, Role::GateUp, true),
            ),
            ("blk.1.ffn_latent_exps.weight", expert(1, Role::Other, true)),
            ("blk.1.ffn_gate_shexp.weight", NameClass::Block(1)),
            ("blk.1.ffn_gate_chexps.weight", NameClass::Block(1)),
            ("blk.1.ffn_norm_exps.weight", NameClass::Block(1)),
            ("blk.1.attn_v_exps.weight", NameClass::Block(1)),
            ("blk.1.ffn_gate_inp.weight", NameClass::Block(1)),
            ("blk.1.ffn_gate.weight", NameClass::Block(1)),
            ("blk.1.ffn_gate.3.weight", NameClass::OldExpert),
            ("blk.1.ffn_down.17.weight", NameClass::OldExpert),
            ("token_embd.weight", NameClass::Outside),
            ("blk.x.ffn_up_exps.weight", NameClass::Outside),
            ("blk.99999999999.ffn_up_exps.weight", NameClass::Outside),
            ("blk.3", NameClass::Outside),
            ("blk.3.", NameClass::Block(3)),
        ];
        for (name, class) in cases {
            assert_eq!(classify_name(name), class, "{name}");
        }
    }
}
