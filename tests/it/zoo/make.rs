//! From a row of the table to a GGUF file.

use super::blueprint::{self, Wanted};
use super::rows::{BASE, Place, Row, Value};
use super::weights;
use crate::gguf_writer::{F32, Gguf, I32, I32_TENSOR, Ty};
use hotpin::demo::byte_tokens;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use tempfile::TempDir;

/// Entries of the vocabulary: a token for each byte, then control tokens.
pub const VOCABULARY: u32 = 264;

/// A model file and what was written into it.
pub struct Made {
    pub path: PathBuf,
    /// Bytes of each expert tensor, by name.
    pub experts: HashMap<String, Rc<[u8]>>,
    /// Whether prompts must be decoded in one micro-batch.
    pub whole_prompts: bool,
    /// Keeps what is not in the model's folder.
    _elsewhere: Option<TempDir>,
}

/// A tensor as it is written.
struct Written {
    name: String,
    dims: Vec<u64>,
    ty: Ty,
    bytes: Rc<[u8]>,
}

impl Written {
    fn add_to(&self, file: Gguf) -> Gguf {
        file.data(&self.name, &self.dims, self.ty, Rc::clone(&self.bytes))
    }
}

/// The header of a row's model, without tensors and without the block for multi-token prediction, of
/// which llama.cpp makes nothing from metadata alone.
fn metadata(row: &Row) -> Gguf {
    let mut model = Gguf::new()
        .text("general.architecture", row.architecture)
        .text("general.name", &format!("tiny {}", row.architecture));
    if let Some(bytes) = row.alignment {
        model = model.alignment(bytes);
    }
    for (key, value) in BASE {
        if !row.keys.iter().any(|(own, _)| own == key) {
            model = set(model, row, key, value);
        }
    }
    for (key, value) in row.keys {
        model = set(model, row, key, value);
    }
    vocabulary(model)
}

/// The same with that block.
fn whole_metadata(row: &Row) -> Gguf {
    const BLOCKS: &[(&str, Value)] = &[
        ("block_count", Value::Absent),
        ("nextn_predict_layers", Value::Absent),
    ];
    if !row.mtp {
        return metadata(row);
    }
    let keys: Vec<_> = row.keys.iter().chain(BLOCKS).copied().collect();
    let model = metadata(&Row {
        keys: keys.leak(),
        ..*row
    });
    let model = set(model, row, "block_count", &Value::Uint(row.blocks() + 1));
    set(model, row, "nextn_predict_layers", &Value::Uint(1))
}

fn set(model: Gguf, row: &Row, key: &str, value: &Value) -> Gguf {
    let key = format!("{}.{key}", row.architecture);
    match *value {
        Value::Uint(value) => model.u32(&key, value),
        Value::Float(value) => model.f32(&key, value),
        Value::Bool(value) => model.bool(&key, value),
        Value::Uints(values) => model.u32s(&key, values),
        Value::Ints(values) => model.i32s(&key, values),
        Value::Bools(values) => model.bools(&key, values),
        Value::Absent => model,
    }
}

/// Byte-level BPE with no merge that matters.
fn vocabulary(model: Gguf) -> Gguf {
    let mut tokens = byte_tokens();
    tokens.extend(["th", "in"].map(str::to_owned));
    let controls = VOCABULARY - u32::try_from(tokens.len()).expect("small");
    let mut types = vec![1; tokens.len()];
    tokens.extend((0..controls).map(|n| format!("<|control {n}|>")));
    types.resize(tokens.len(), 3);
    model
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "default")
        .texts("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &types)
        .texts("tokenizer.ggml.merges", &["t h", "i n"])
        .u32("tokenizer.ggml.bos_token_id", VOCABULARY - 2)
        .u32("tokenizer.ggml.eos_token_id", VOCABULARY - 1)
}

/// The tensors that a row's model has: those that llama.cpp makes for its architecture, less the
/// optional ones that the row leaves out.
fn tensors(row: &Row, folder: &Path) -> Option<Vec<Wanted>> {
    let mut wanted = blueprint::tensors(&metadata(row), folder)?;
    if row.splits_gate_up {
        wanted = wanted.into_iter().flat_map(unfused).collect();
    }
    wanted.retain(|tensor| !row.leaves_out(&tensor.name));
    if row.mtp {
        let block = mtp_block(row, &wanted);
        wanted.extend(block);
    }
    Some(wanted)
}

/// A block like the last one, and what joins it to the model.
fn mtp_block(row: &Row, trunk: &[Wanted]) -> Vec<Wanted> {
    let (last, own) = (row.blocks() - 1, row.blocks());
    let prefix = format!("blk.{last}.");
    let like_last = trunk.iter().filter_map(|tensor| {
        let rest = tensor.name.strip_prefix(&prefix)?;
        Some(Wanted {
            name: format!("blk.{own}.{rest}"),
            dims: tensor.dims.clone(),
        })
    });
    let width = trunk
        .iter()
        .find(|tensor| tensor.name == "output_norm.weight")
        .expect("an output norm")
        .dims[0];
    let joins = [
        ("eh_proj", vec![2 * width, width]),
        ("enorm", vec![width]),
        ("hnorm", vec![width]),
        ("shared_head_norm", vec![width]),
    ];
    let joins = joins.map(|(name, dims)| Wanted {
        name: format!("blk.{own}.nextn.{name}.weight"),
        dims,
    });
    like_last.chain(joins).collect()
}

/// Two tensors in place of a fused one.
fn unfused(tensor: Wanted) -> Vec<Wanted> {
    if !tensor.name.ends_with("ffn_gate_up_exps.weight") {
        return vec![tensor];
    }
    let mut dims = tensor.dims.clone();
    dims[1] /= 2;
    ["gate", "up"]
        .map(|role| Wanted {
            name: tensor.name.replace("gate_up", role),
            dims: dims.clone(),
        })
        .into()
}

/// Writes a row's model. `None` when llama.cpp makes no model of its metadata.
pub fn model(row: &Row, folder: &Path) -> Option<Made> {
    let mut experts = HashMap::new();
    let mut tensors = Vec::new();
    for Wanted { name, dims } in self::tensors(row, folder)? {
        let ty = type_of(row, &name, &dims);
        let bytes = if ty == I32_TENSOR {
            weights::indices(&name, &dims, row.experts())
        } else {
            weights::bytes(&name, &dims, ty)
        };
        if name.contains("_exps.") {
            experts.insert(name.clone(), Rc::clone(&bytes));
        }
        tensors.push(Written {
            name,
            dims,
            ty,
            bytes,
        });
    }
    let (path, elsewhere) = write(row, &tensors, folder);
    Some(Made {
        path,
        experts,
        whole_prompts: row.whole_prompts,
        _elsewhere: elsewhere,
    })
}

/// Writes a model's files as the row says they lie.
fn write(row: &Row, tensors: &[Written], folder: &Path) -> (PathBuf, Option<TempDir>) {
    let whole = || {
        let model = tensors
            .iter()
            .fold(whole_metadata(row), |file, tensor| tensor.add_to(file));
        model.write(folder, "model.gguf")
    };
    match row.place {
        Place::OneFile => (whole(), None),
        Place::Shards(count) => {
            for (shard, index) in shards(row, tensors, count).iter().zip(0..) {
                shard.write(folder, &shard_name(index, count));
            }
            (folder.join(shard_name(0, count)), None)
        }
        Place::Linked(count) => {
            let elsewhere = TempDir::new_in("/dev/shm").expect("a folder in memory");
            let links = folder.join("snapshot");
            std::fs::create_dir(&links).expect("folder");
            for (shard, index) in shards(row, tensors, count).iter().zip(0..) {
                let place = [folder, elsewhere.path()][usize::from(index % 2)];
                let blob = shard.write(place, &format!("blob{index}"));
                let link = links.join(shard_name(index, count));
                std::os::unix::fs::symlink(blob, link).expect("link");
            }
            (links.join(shard_name(0, count)), Some(elsewhere))
        }
        Place::ReadOnlyMount => {
            let path = whole();
            mount_read_only(folder, &path);
            (path, None)
        }
    }
}

fn shard_name(index: u16, count: u16) -> String {
    format!("model-{:05}-of-{count:05}.gguf", index + 1)
}

/// Deals the tensors out to shards.
fn shards(row: &Row, tensors: &[Written], count: u16) -> Vec<Gguf> {
    let all = i32::try_from(tensors.len()).expect("few");
    (0..count)
        .map(|index| {
            let file = if index == 0 {
                whole_metadata(row)
            } else {
                Gguf::new()
            };
            let file = file.u16("split.no", index).u16("split.count", count).raw(
                "split.tensors.count",
                I32,
                &all.to_le_bytes(),
            );
            tensors
                .iter()
                .skip(usize::from(index))
                .step_by(usize::from(count))
                .fold(file, |file, tensor| tensor.add_to(file))
        })
        .collect()
}

/// Makes the folder read-only for this process and what it starts. Said where that is not allowed.
fn mount_read_only(folder: &Path, file: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o444)).expect("permissions");
    let folder = std::ffi::CString::new(folder.to_str().expect("UTF-8")).expect("no NUL");
    let none = std::ptr::null();
    let read_only = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY;
    // SAFETY: strings are NUL-terminated; a mount namespace of its own is not seen by anybody else.
    let mounted = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(
                none,
                c"/".as_ptr(),
                none,
                libc::MS_REC | libc::MS_PRIVATE,
                none.cast(),
            ) == 0
            && libc::mount(
                folder.as_ptr(),
                folder.as_ptr(),
                none,
                libc::MS_BIND,
                none.cast(),
            ) == 0
            && libc::mount(none, folder.as_ptr(), none, read_only, none.cast()) == 0
    };
    if mounted {
        let refused = std::fs::write(file.with_file_name("new"), "").expect_err("read-only");
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        return;
    }
    let why = std::io::Error::last_os_error();
    let ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    assert!(!ci, "no mount could be made: {why}");
    eprintln!("SKIPPED the read-only mount, a read-only file alone: {why}");
}

/// Experts have the row's types, everything else is in floats.
fn type_of(row: &Row, name: &str, dims: &[u64]) -> Ty {
    let is_expert = name.contains("_exps.") && name.ends_with(".weight") && dims.len() == 3;
    if name.contains("tid2eid") {
        return I32_TENSOR;
    }
    if !is_expert {
        return F32;
    }
    let layer: usize = name
        .split('.')
        .nth(1)
        .and_then(|block| block.parse().ok())
        .expect("a block");
    let types = row.types[layer % row.types.len()];
    let ty = if name.contains("down") {
        types.1
    } else {
        types.0
    };
    weights::type_named(ty)
}
