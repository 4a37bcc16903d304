//! From headers to the model map: classifies tensors, checks them against the metadata, cuts the
//! expert tensors into slices and coalesces the rest.

use super::error::{ModelError, shown};
use super::experts::{MIN_SIDE_SLICE_BYTES, NameClass, Role, classify_name, slice_bytes};
use super::gguf::Header;
use super::map::{ModelMap, MoeLayer, Part, Range, Shard, Slice, Tensor, TensorKind};
use super::metadata::{Metadata, PerLayer};
use super::{KEY_ARCHITECTURE, KEY_NAME};
use hotpin_controllers::ModelShape;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Most experts in one layer (llama.cpp itself stops at 1024).
pub const MAX_LAYER_EXPERTS: u64 = 1 << 16;
/// Most blocks of a model (llama.cpp itself stops at 512).
pub const MAX_BLOCKS: u64 = 1 << 14;

const RECONVERT: &str = "convert the model again with a current converter";

/// What the metadata says about the model.
struct Facts {
    path: PathBuf,
    architecture: String,
    name: String,
    blocks: Option<u32>,
    /// The last blocks, which only multi-token prediction runs.
    idle_blocks: u32,
    experts: Option<PerLayer>,
    top_k: Option<PerLayer>,
    context_length: Option<u64>,
}

impl Facts {
    fn read(metadata: &Metadata, path: &Path) -> Result<Self, ModelError> {
        let Some(architecture) = metadata.text(KEY_ARCHITECTURE)? else {
            return Err(ModelError::Model {
                path: path.to_owned(),
                what: format!(
                    "the header has no '{KEY_ARCHITECTURE}', so this is not a language model"
                ),
                fix: "pass the GGUF file of a model",
            });
        };
        let key = |name: &str| format!("{architecture}.{name}");
        let mut facts = Self {
            path: path.to_owned(),
            architecture: architecture.to_owned(),
            name: String::new(),
            blocks: None,
            idle_blocks: 0,
            experts: metadata.per_layer(&key("expert_count"))?,
            top_k: metadata.per_layer(&key("expert_used_count"))?,
            context_length: metadata.uint(&key("context_length"))?,
        };
        facts.name = match metadata.text(KEY_NAME)? {
            Some(name) if !name.trim().is_empty() => name.trim().to_owned(),
            _ => path
                .file_stem()
                .map_or_else(|| "unnamed".into(), |s| shown(&s.to_string_lossy())),
        };
        facts.blocks = facts.small(metadata.uint(&key("block_count"))?, "block_count")?;
        let idle = facts.small(
            metadata.uint(&key("nextn_predict_layers"))?,
            "nextn_predict_layers",
        )?;
        // A model that is nothing but such blocks runs them.
        facts.idle_blocks = idle
            .filter(|&idle| facts.blocks.is_some_and(|all| idle < all))
            .unwrap_or(0);
        Ok(facts)
    }

    fn small(&self, value: Option<u64>, name: &str) -> Result<Option<u32>, ModelError> {
        match value {
            Some(n) if n > MAX_BLOCKS => Err(self.wrong(format!(
                "'{name}' is {n}, and at most {MAX_BLOCKS} is accepted"
            ))),
            other => Ok(other.and_then(|n| u32::try_from(n).ok())),
        }
    }

    fn wrong(&self, what: String) -> ModelError {
        ModelError::Model {
            path: self.path.clone(),
            what,
            fix: RECONVERT,
        }
    }

    /// The first of the idle blocks.
    fn first_idle(&self) -> u32 {
        self.blocks
            .map_or(u32::MAX, |blocks| blocks - self.idle_blocks)
    }

    /// (experts, top-k) of a block that has expert tensors.
    fn routing(&self, block: u32) -> Result<(u32, u32), ModelError> {
        let number = |list: &Option<PerLayer>, name: &str| {
            let key = format!("{}.{name}", self.architecture);
            match list.as_ref().map(|list| list.at(block)) {
                None => Err(self.wrong(format!("block {block} has expert tensors, but there is no '{key}'"))),
                Some(None) => Err(self.wrong(format!("the list '{key}' ends before block {block}"))),
                Some(Some(n)) if n == 0 || n > MAX_LAYER_EXPERTS => Err(self.wrong(format!(
                    "block {block} has expert tensors, but '{key}' is {n}, which is not within 1 to \
                     {MAX_LAYER_EXPERTS}"
                ))),
                Some(Some(n)) => Ok(u32::try_from(n).unwrap_or(u32::MAX)),
            }
        };
        let experts = number(&self.experts, "expert_count")?;
        let top_k = number(&self.top_k, "expert_used_count")?;
        if top_k > experts {
            return Err(self.wrong(format!(
                "block {block} routes to {top_k} of {experts} experts"
            )));
        }
        Ok((experts, top_k))
    }
}

/// Builds the map from the headers of all shards.
pub(super) fn build(headers: Vec<Header>) -> Result<ModelMap, ModelError> {
    let facts = Facts::read(&headers[0].metadata, &headers[0].path)?;
    let (shards, mut tensors) = flatten(headers);
    let by_name = sort_by_name(&facts, &shards, &tensors)?;
    check_sizes(&facts, &shards)?;
    let layers = classify(&facts, &mut tensors)?;
    if layers.is_empty()
        && facts
            .experts
            .as_ref()
            .is_some_and(|experts| experts.max() > 1)
    {
        return Err(
            facts.wrong("the header gives an expert count, but no tensor holds experts".into())
        );
    }
    let shape = ModelShape::new(
        layers.iter().map(|layer| layer.experts).collect(),
        layers.iter().map(|layer| layer.expert_bytes).collect(),
        layers.iter().map(|layer| layer.top_k).collect(),
    )
    .map_err(|error| facts.wrong(error.to_string()))?;
    let (slices, slice_base) = cut(&facts, &shards, &tensors, &layers)?;
    let dense = coalesce(&tensors, TensorKind::Dense);
    let idle = coalesce(&tensors, TensorKind::Idle);
    let fingerprint = fingerprint(&facts, &layers, &tensors, &by_name);
    let last_block = tensors
        .iter()
        .filter_map(|tensor| block_of(&tensor.info.name))
        .max();
    Ok(ModelMap {
        block_count: facts.blocks.map_or_else(
            || last_block.map_or(0, |last| last.saturating_add(1)),
            |blocks| blocks - facts.idle_blocks,
        ),
        dense_bytes: bytes_of(&tensors, TensorKind::Dense),
        idle_bytes: bytes_of(&tensors, TensorKind::Idle),
        architecture: facts.architecture,
        name: facts.name,
        context_length: facts.context_length,
        shards,
        tensors,
        by_name,
        layers,
        slices,
        slice_base,
        dense,
        idle,
        shape,
        fingerprint,
    })
}

fn flatten(headers: Vec<Header>) -> (Vec<Shard>, Vec<Tensor>) {
    let mut shards = Vec::with_capacity(headers.len());
    let mut tensors = Vec::with_capacity(headers.iter().map(|header| header.tensors.len()).sum());
    for (shard, header) in (0u32..).zip(headers) {
        tensors.extend(header.tensors.into_iter().map(|info| Tensor {
            shard,
            kind: TensorKind::Dense,
            info,
        }));
        shards.push(Shard {
            path: header.path,
            identity: header.identity,
            file_bytes: header.file_bytes,
            data_offset: header.data_offset,
        });
    }
    (shards, tensors)
}

/// Indices sorted by name; refuses two tensors of one name.
fn sort_by_name(
    facts: &Facts,
    shards: &[Shard],
    tensors: &[Tensor],
) -> Result<Vec<u32>, ModelError> {
    let name = |index: u32| tensors[index as usize].info.name.as_ref();
    let mut order: Vec<u32> = (0u32..).zip(tensors).map(|(index, _)| index).collect();
    order.sort_unstable_by_key(|&index| name(index));
    if let Some(twins) = order.windows(2).find(|pair| name(pair[0]) == name(pair[1])) {
        let path = |index: u32| {
            shards[tensors[index as usize].shard as usize]
                .path
                .display()
        };
        return Err(facts.wrong(format!(
            "tensor '{}' appears twice, in {} and in {}",
            name(twins[0]),
            path(twins[0]),
            path(twins[1])
        )));
    }
    Ok(order)
}

/// Files whose sizes cannot be added are refused, so that no sum of tensor bytes overflows.
fn check_sizes(facts: &Facts, shards: &[Shard]) -> Result<(), ModelError> {
    let total = shards
        .iter()
        .try_fold(0u64, |sum, shard| sum.checked_add(shard.file_bytes));
    if total.is_some() {
        return Ok(());
    }
    Err(facts.wrong("the files together are larger than 2^64 bytes".into()))
}

fn block_of(name: &str) -> Option<u32> {
    match classify_name(name) {
        NameClass::Expert { block, .. } | NameClass::Block(block) => Some(block),
        NameClass::OldExpert | NameClass::Outside => None,
    }
}

/// Marks each tensor's kind, and gathers the expert tensors into layers.
fn classify(facts: &Facts, tensors: &mut [Tensor]) -> Result<Vec<MoeLayer>, ModelError> {
    let mut layers: BTreeMap<u32, MoeLayer> = BTreeMap::new();
    for (index, tensor) in (0u32..).zip(tensors) {
        let name = &tensor.info.name;
        let (block, role, weight) = match classify_name(name) {
            NameClass::Outside => continue,
            NameClass::Block(block) => {
                if block >= facts.first_idle() {
                    tensor.kind = TensorKind::Idle;
                }
                continue;
            }
            NameClass::OldExpert => {
                return Err(facts.wrong(format!(
                    "tensor '{name}' is in the layout of one tensor an expert, which llama.cpp no longer reads"
                )));
            }
            NameClass::Expert {
                block,
                role,
                weight,
            } => (block, role, weight),
        };
        if facts.blocks.is_some_and(|blocks| block >= blocks) {
            return Err(facts.wrong(format!("tensor '{name}' is beyond the model's last block")));
        }
        if block >= facts.first_idle() {
            tensor.kind = TensorKind::Idle;
            continue;
        }
        let (experts, top_k) = facts.routing(block)?;
        let bytes = slice_bytes(&tensor.info, experts);
        let slice_bytes = match bytes {
            Some(bytes) if weight || bytes >= MIN_SIDE_SLICE_BYTES => bytes,
            None if weight => {
                return Err(facts.wrong(format!(
                    "tensor '{name}' of shape {:?} does not hold {experts} experts",
                    tensor.info.dims()
                )));
            }
            _ => continue,
        };
        tensor.kind = TensorKind::Expert;
        let layer = layers.entry(block).or_insert_with(|| MoeLayer {
            block,
            experts,
            top_k,
            expert_bytes: 0,
            parts: Vec::new(),
        });
        layer.expert_bytes += slice_bytes;
        layer.parts.push(Part {
            tensor: index,
            role,
            weight,
            slice_bytes,
        });
    }
    finish_layers(facts, layers)
}

fn finish_layers(
    facts: &Facts,
    layers: BTreeMap<u32, MoeLayer>,
) -> Result<Vec<MoeLayer>, ModelError> {
    let mut out: Vec<MoeLayer> = layers.into_values().collect();
    for layer in &mut out {
        layer
            .parts
            .sort_by_key(|part| (!part.weight, part.role, part.tensor));
        let has = |role| {
            layer
                .parts
                .iter()
                .any(|part| part.weight && part.role == role)
        };
        let missing = [
            (has(Role::Down), "ffn_down_exps"),
            (
                has(Role::Up) || has(Role::GateUp),
                "ffn_up_exps or ffn_gate_up_exps",
            ),
        ];
        if let Some((_, name)) = missing.iter().find(|(there, _)| !there) {
            return Err(facts.wrong(format!(
                "block {} has expert tensors, but no {name}",
                layer.block
            )));
        }
    }
    Ok(out)
}

/// Cuts the expert tensors into slices, expert after expert.
fn cut(
    facts: &Facts,
    shards: &[Shard],
    tensors: &[Tensor],
    layers: &[MoeLayer],
) -> Result<(Vec<Slice>, Vec<usize>), ModelError> {
    let count: usize = layers
        .iter()
        .map(|layer| layer.experts as usize * layer.parts.len())
        .sum();
    let table_bytes = (count as u64).saturating_mul(size_of::<Slice>() as u64);
    let file_bytes: u64 = shards.iter().map(|shard| shard.file_bytes).sum();
    if table_bytes > file_bytes {
        return Err(facts.wrong(format!(
            "{count} slices in {file_bytes} bytes of files are too small to be a model's"
        )));
    }
    let mut slices = Vec::with_capacity(count);
    let mut base = Vec::with_capacity(layers.len());
    for layer in layers {
        base.push(slices.len());
        for expert in 0..u64::from(layer.experts) {
            slices.extend(layer.parts.iter().map(|part| {
                let tensor = &tensors[part.tensor as usize];
                Slice {
                    shard: tensor.shard,
                    tensor: part.tensor,
                    offset: tensor.info.offset + expert * part.slice_bytes,
                    len: part.slice_bytes,
                }
            }));
        }
    }
    Ok((slices, base))
}

/// Ranges of all tensors of one kind; neighbours in a file become one range, padding included.
fn coalesce(tensors: &[Tensor], kind: TensorKind) -> Vec<Range> {
    let mut ranges: Vec<Range> = Vec::new();
    let mut adjoins = false;
    for tensor in tensors {
        if tensor.kind != kind {
            adjoins = false;
            continue;
        }
        let end = tensor.info.offset + tensor.info.bytes;
        match ranges.last_mut() {
            Some(last) if adjoins && last.shard == tensor.shard => last.len = end - last.offset,
            _ => ranges.push(Range {
                shard: tensor.shard,
                offset: tensor.info.offset,
                len: tensor.info.bytes,
            }),
        }
        adjoins = true;
    }
    ranges.retain(|range| range.len > 0);
    ranges
}

fn bytes_of(tensors: &[Tensor], kind: TensorKind) -> u64 {
    tensors
        .iter()
        .filter(|tensor| tensor.kind == kind)
        .map(|tensor| tensor.info.bytes)
        .sum()
}

fn fingerprint(facts: &Facts, layers: &[MoeLayer], tensors: &[Tensor], by_name: &[u32]) -> String {
    let mut hash = Sha256::new();
    // Every field ends in a byte that it cannot contain, so no two models share an encoding.
    let mut line = |text: String| {
        hash.update(text.as_bytes());
        hash.update([0]);
    };
    line("hotpin model 1".into());
    line(facts.architecture.clone());
    line(facts.name.clone());
    for layer in layers {
        line(format!(
            "{} {} {} {}",
            layer.block, layer.experts, layer.top_k, layer.expert_bytes
        ));
    }
    for &index in by_name {
        let info = &tensors[index as usize].info;
        line(info.name.to_string());
        line(format!("{} {:?} {}", info.ty.id, info.dims(), info.bytes));
    }
    hash.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
