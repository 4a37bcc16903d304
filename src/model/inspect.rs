//! What `hotpin inspect` reports, as data and as text.

use super::fit::{Demand, Judgement, Memory};
use super::map::{ModelMap, TensorKind};
use crate::size::format_bytes;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// The smallest and largest of something over the MoE layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Span {
    /// The smallest.
    pub min: u64,
    /// The largest.
    pub max: u64,
}

impl Span {
    fn over(values: impl Iterator<Item = u64>) -> Option<Self> {
        values.fold(None, |span: Option<Self>, n| {
            Some(span.map_or(Self { min: n, max: n }, |s| Self {
                min: s.min.min(n),
                max: s.max.max(n),
            }))
        })
    }

    fn show(self, each: impl Fn(u64) -> String) -> String {
        if self.min == self.max {
            each(self.min)
        } else {
            format!("{} to {}", each(self.min), each(self.max))
        }
    }
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileReport {
    /// Path.
    pub path: String,
    /// Size, bytes.
    pub bytes: u64,
}

/// How much of the model is of one tensor type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TypeReport {
    /// ggml's name of the type.
    #[serde(rename = "type")]
    pub ty: &'static str,
    /// Tensors.
    pub tensors: u64,
    /// Bytes.
    pub bytes: u64,
    /// Bytes of these that are experts'.
    pub expert_bytes: u64,
}

/// The report of `hotpin inspect`. MoE figures are `None` (null) for a dense model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Inspection {
    /// Architecture.
    pub architecture: String,
    /// Name.
    pub name: String,
    /// Identifies the model in profiles.
    pub fingerprint: String,
    /// Files in shard order.
    pub files: Vec<FileReport>,
    /// Whether there are routed experts.
    pub is_moe: bool,
    /// Blocks in all.
    pub layers: u32,
    /// Blocks with routed experts.
    pub moe_layers: usize,
    /// The context that the model was trained for, tokens.
    pub context_length: Option<u64>,
    /// Experts a MoE layer.
    pub experts: Option<Span>,
    /// Experts over all layers.
    pub total_experts: usize,
    /// Experts routed to per token and layer.
    pub top_k: Option<Span>,
    /// Bytes of one expert.
    pub bytes_per_expert: Option<Span>,
    /// Bytes of the dense weights.
    pub dense_bytes: u64,
    /// Bytes of all experts.
    pub expert_bytes: u64,
    /// Bytes of weights that plain decoding never touches.
    pub idle_bytes: u64,
    /// Bytes of all tensors.
    pub total_bytes: u64,
    /// Bytes of experts that one token touches.
    pub token_cycle_bytes: u64,
    /// Tensor types in use, most bytes first.
    pub types: Vec<TypeReport>,
    /// How it fits this machine; `None` when the memory there is is not known.
    pub fit: Option<Judgement>,
}

impl Inspection {
    /// Reports on a model, and on how it fits `memory` where that is known.
    #[must_use]
    pub fn new(map: &ModelMap, memory: Option<Memory>) -> Self {
        let layers = map.layers().iter();
        Self {
            architecture: map.architecture().to_owned(),
            name: map.name().to_owned(),
            fingerprint: map.fingerprint().to_owned(),
            files: map
                .shards()
                .iter()
                .map(|shard| FileReport {
                    path: shard.path.display().to_string(),
                    bytes: shard.file_bytes,
                })
                .collect(),
            is_moe: map.is_moe(),
            layers: map.block_count(),
            moe_layers: map.layers().len(),
            context_length: map.context_length(),
            experts: Span::over(layers.clone().map(|layer| layer.experts.into())),
            total_experts: map.shape().total_experts(),
            top_k: Span::over(layers.clone().map(|layer| layer.top_k.into())),
            bytes_per_expert: Span::over(layers.map(|layer| layer.expert_bytes)),
            dense_bytes: map.dense_bytes(),
            expert_bytes: map.expert_bytes(),
            idle_bytes: map.idle_bytes(),
            total_bytes: map.total_bytes(),
            token_cycle_bytes: map.token_cycle_bytes(),
            types: types_of(map),
            fit: memory.map(|memory| Judgement::new(Demand::of(map), memory)),
        }
    }
}

fn types_of(map: &ModelMap) -> Vec<TypeReport> {
    let mut by_id: BTreeMap<u32, TypeReport> = BTreeMap::new();
    for tensor in map.tensors() {
        let ty = tensor.info.ty;
        let report = by_id.entry(ty.id).or_insert(TypeReport {
            ty: ty.name,
            tensors: 0,
            bytes: 0,
            expert_bytes: 0,
        });
        report.tensors += 1;
        report.bytes += tensor.info.bytes;
        if tensor.kind == TensorKind::Expert {
            report.expert_bytes += tensor.info.bytes;
        }
    }
    let mut types: Vec<TypeReport> = by_id.into_values().collect();
    types.sort_by_key(|report| std::cmp::Reverse(report.bytes));
    types
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |label: &str, value: &str| writeln!(f, "{label:<15}{value}");
        row("model", &format!("{} ({})", self.name, self.architecture))?;
        for file in &self.files {
            row(
                "file",
                &format!("{} ({})", file.path, format_bytes(file.bytes)),
            )?;
        }
        row(
            "fingerprint",
            self.fingerprint.get(..16).unwrap_or(&self.fingerprint),
        )?;
        if let (Some(experts), Some(top_k), Some(bytes)) =
            (self.experts, self.top_k, self.bytes_per_expert)
        {
            let number = |n: u64| n.to_string();
            row(
                "layers",
                &format!("{}, of which {} MoE", self.layers, self.moe_layers),
            )?;
            row(
                "experts",
                &format!(
                    "{} a layer, {} in all",
                    experts.show(number),
                    self.total_experts
                ),
            )?;
            row("top-k", &top_k.show(number))?;
            row("an expert", &bytes.show(format_bytes))?;
            row("token cycle", &format_bytes(self.token_cycle_bytes))?;
            row("experts' bytes", &format_bytes(self.expert_bytes))?;
        } else {
            row("layers", &format!("{}, none of them MoE", self.layers))?;
        }
        row("dense bytes", &format_bytes(self.dense_bytes))?;
        if self.idle_bytes > 0 {
            let idle = format_bytes(self.idle_bytes);
            row(
                "never touched",
                &format!("{idle} (blocks for multi-token prediction)"),
            )?;
        }
        row("all weights", &format_bytes(self.total_bytes))?;
        let types: Vec<String> = self
            .types
            .iter()
            .map(|t| format!("{} {}", t.ty, format_bytes(t.bytes)))
            .collect();
        row("types", &types.join(", "))?;
        if let Some(context) = self.context_length {
            row("context", &format!("{context} tokens"))?;
        }
        match &self.fit {
            Some(fit) => row("this machine", &fit.sentence),
            None => row("this machine", "available memory is not known"),
        }
    }
}
