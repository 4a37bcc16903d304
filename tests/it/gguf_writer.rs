//! Writes small GGUF files for tests, sound ones and hostile ones.

use std::path::{Path, PathBuf};

/// A ggml type as tests need it: (number, elements of a block, bytes of a block).
pub type Ty = (u32, u64, u64);
pub const F32: Ty = (0, 1, 4);
pub const F16: Ty = (1, 1, 2);
pub const Q4_0: Ty = (2, 32, 18);
pub const Q8_0: Ty = (8, 32, 34);
pub const MXFP4: Ty = (39, 32, 17);

/// GGUF value types, by number.
pub const U8: u32 = 0;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const TEXT: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;

#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    dims: Vec<u64>,
    ty: Ty,
    /// The byte that each of `fill.len()` equal parts of the data is filled with.
    fill: Vec<u8>,
}

/// A GGUF file in the making.
#[derive(Clone, Debug)]
pub struct Gguf {
    version: u32,
    alignment: u64,
    keys: Vec<u8>,
    key_count: u64,
    tensors: Vec<Tensor>,
}

pub fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Gguf {
    pub fn new() -> Self {
        Self {
            version: 3,
            alignment: 32,
            keys: Vec::new(),
            key_count: 0,
            tensors: Vec::new(),
        }
    }

    /// The start of a model's metadata.
    pub fn model(architecture: &str, name: &str, blocks: u32) -> Self {
        Self::new()
            .text("general.architecture", architecture)
            .text("general.name", name)
            .u32(&format!("{architecture}.block_count"), blocks)
    }

    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Declares an alignment; data is aligned to it when it is a power of two below 64 KiB.
    pub fn alignment(mut self, alignment: u32) -> Self {
        if alignment.is_power_of_two() && alignment < 1 << 16 {
            self.alignment = alignment.into();
        }
        self.u32("general.alignment", alignment)
    }

    /// A metadata entry with raw value bytes.
    pub fn raw(mut self, key: &str, ty: u32, value: &[u8]) -> Self {
        text(&mut self.keys, key);
        self.keys.extend(ty.to_le_bytes());
        self.keys.extend(value);
        self.key_count += 1;
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, U32, &value.to_le_bytes())
    }

    pub fn u16(self, key: &str, value: u16) -> Self {
        self.raw(key, 2, &value.to_le_bytes())
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        let mut raw = Vec::new();
        text(&mut raw, value);
        self.raw(key, TEXT, &raw)
    }

    pub fn u32s(self, key: &str, values: &[u32]) -> Self {
        let mut raw = U32.to_le_bytes().to_vec();
        raw.extend((values.len() as u64).to_le_bytes());
        raw.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.raw(key, ARRAY, &raw)
    }

    pub fn texts(self, key: &str, values: &[&str]) -> Self {
        let mut raw = TEXT.to_le_bytes().to_vec();
        raw.extend((values.len() as u64).to_le_bytes());
        for value in values {
            text(&mut raw, value);
        }
        self.raw(key, ARRAY, &raw)
    }

    /// A tensor filled with one byte.
    pub fn tensor(mut self, name: &str, dims: &[u64], ty: Ty) -> Self {
        let fill = vec![0xd0];
        self.tensors.push(Tensor {
            name: name.into(),
            dims: dims.to_vec(),
            ty,
            fill,
        });
        self
    }

    /// An expert tensor in which expert `e`'s bytes are all `e + tag`.
    pub fn experts(mut self, name: &str, dims: &[u64], ty: Ty, tag: u8) -> Self {
        let experts = *dims.last().unwrap();
        let fill = (0..experts)
            .map(|e| tag.wrapping_add(e.to_le_bytes()[0]))
            .collect();
        self.tensors.push(Tensor {
            name: name.into(),
            dims: dims.to_vec(),
            ty,
            fill,
        });
        self
    }

    /// The file's bytes.
    pub fn build(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.to_le_bytes());
        out.extend(&self.keys);
        let mut offset = 0u64;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend(u32::try_from(tensor.dims.len()).unwrap().to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(tensor.ty.0.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset = (offset + tensor.bytes()).next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            let alignment = usize::try_from(self.alignment).unwrap();
            out.resize(out.len().next_multiple_of(alignment), 0);
            let part = usize::try_from(tensor.bytes()).unwrap() / tensor.fill.len();
            for byte in &tensor.fill {
                out.resize(out.len() + part, *byte);
            }
        }
        out
    }

    /// Writes the file into `dir`.
    pub fn write(&self, dir: &Path, name: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, self.build()).unwrap();
        path
    }
}

impl Tensor {
    fn bytes(&self) -> u64 {
        let (_, block_elements, block_bytes) = self.ty;
        self.dims.iter().product::<u64>() / block_elements * block_bytes
    }
}

/// A MoE model of `blocks` layers, the first `dense` of them dense, with gate, up and down tensors.
pub fn moe(blocks: u32, dense: u32, experts: u32, top_k: u32) -> Gguf {
    let mut model = Gguf::model("testmoe", "Test MoE", blocks)
        .u32("testmoe.expert_count", experts)
        .u32("testmoe.expert_used_count", top_k)
        .texts("tokenizer.ggml.tokens", &["a", "bb", "", "dddd"])
        .tensor("token_embd.weight", &[64, 10], F16);
    for block in 0..blocks {
        model = model.tensor(&format!("blk.{block}.attn_q.weight"), &[64, 64], Q8_0);
        if block < dense {
            model = model.tensor(&format!("blk.{block}.ffn_up.weight"), &[64, 96], Q8_0);
            continue;
        }
        let n = u64::from(experts);
        model = model
            .tensor(&format!("blk.{block}.ffn_gate_inp.weight"), &[64, n], F32)
            .experts(
                &format!("blk.{block}.ffn_gate_exps.weight"),
                &[64, 32, n],
                Q4_0,
                0x10,
            )
            .experts(
                &format!("blk.{block}.ffn_up_exps.weight"),
                &[64, 32, n],
                Q4_0,
                0x40,
            )
            .experts(
                &format!("blk.{block}.ffn_down_exps.weight"),
                &[32, 64, n],
                Q8_0,
                0x80,
            );
    }
    model.tensor("output_norm.weight", &[64], F32)
}
