//! Writes small GGUF files for tests, sound ones and hostile ones.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A ggml type as tests need it: (number, elements of a block, bytes of a block).
pub type Ty = (u32, u64, u64);
pub const F32: Ty = (0, 1, 4);
pub const F16: Ty = (1, 1, 2);
pub const Q4_0: Ty = (2, 32, 18);
pub const Q8_0: Ty = (8, 32, 34);
pub const MXFP4: Ty = (39, 32, 17);
pub const I32_TENSOR: Ty = (26, 1, 4);

/// GGUF value types, by number.
pub const U8: u32 = 0;
pub const U16: u32 = 2;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const F32_VALUE: u32 = 6;
pub const BOOL: u32 = 7;
pub const TEXT: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;

#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    dims: Vec<u64>,
    ty: Ty,
    data: Data,
}

/// What a tensor's data is.
#[derive(Clone, Debug)]
enum Data {
    /// Equal parts, each of one byte again and again.
    Fill(Vec<u8>),
    /// These bytes.
    Bytes(Rc<[u8]>),
    /// Nothing: a hole in the file, which reads as zeros.
    Hole,
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
        self.raw(key, U16, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, F32_VALUE, &value.to_le_bytes())
    }

    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, BOOL, &[u8::from(value)])
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        let mut raw = Vec::new();
        text(&mut raw, value);
        self.raw(key, TEXT, &raw)
    }

    fn array(self, key: &str, ty: u32, count: usize, values: impl Iterator<Item = u8>) -> Self {
        let mut raw = ty.to_le_bytes().to_vec();
        raw.extend((count as u64).to_le_bytes());
        raw.extend(values);
        self.raw(key, ARRAY, &raw)
    }

    pub fn u32s(self, key: &str, values: &[u32]) -> Self {
        let raw = values.iter().flat_map(|value| value.to_le_bytes());
        self.array(key, U32, values.len(), raw)
    }

    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let raw = values.iter().flat_map(|value| value.to_le_bytes());
        self.array(key, I32, values.len(), raw)
    }

    pub fn bools(self, key: &str, values: &[bool]) -> Self {
        let raw = values.iter().map(|&value| u8::from(value));
        self.array(key, BOOL, values.len(), raw)
    }

    pub fn texts<S: AsRef<str>>(self, key: &str, values: &[S]) -> Self {
        let mut raw = Vec::new();
        for value in values {
            text(&mut raw, value.as_ref());
        }
        self.array(key, TEXT, values.len(), raw.into_iter())
    }

    fn with(mut self, name: &str, dims: &[u64], ty: Ty, data: Data) -> Self {
        self.tensors.push(Tensor {
            name: name.into(),
            dims: dims.to_vec(),
            ty,
            data,
        });
        self
    }

    /// A tensor filled with one byte.
    pub fn tensor(self, name: &str, dims: &[u64], ty: Ty) -> Self {
        self.with(name, dims, ty, Data::Fill(vec![0xd0]))
    }

    /// A tensor of these bytes, which must be as many as its shape takes.
    pub fn data(self, name: &str, dims: &[u64], ty: Ty, bytes: Rc<[u8]>) -> Self {
        self.with(name, dims, ty, Data::Bytes(bytes))
    }

    /// A tensor whose data is a hole. Only for [`Self::write`].
    pub fn hole(self, name: &str, dims: &[u64], ty: Ty) -> Self {
        self.with(name, dims, ty, Data::Hole)
    }

    /// An expert tensor in which expert `e`'s bytes are all `e + tag`.
    pub fn experts(self, name: &str, dims: &[u64], ty: Ty, tag: u8) -> Self {
        let experts = *dims.last().unwrap();
        let fill = (0..experts)
            .map(|e| tag.wrapping_add(e.to_le_bytes()[0]))
            .collect();
        self.with(name, dims, ty, Data::Fill(fill))
    }

    /// The file's bytes.
    pub fn build(&self) -> Vec<u8> {
        let mut out = self.header();
        for tensor in &self.tensors {
            let alignment = usize::try_from(self.alignment).unwrap();
            out.resize(out.len().next_multiple_of(alignment), 0);
            let bytes = usize::try_from(tensor.bytes()).unwrap();
            match &tensor.data {
                Data::Fill(fill) => {
                    for byte in fill {
                        out.resize(out.len() + bytes / fill.len(), *byte);
                    }
                }
                Data::Bytes(data) => {
                    assert_eq!(data.len(), bytes, "{}", tensor.name);
                    out.extend_from_slice(data);
                }
                Data::Hole => panic!("{} is a hole", tensor.name),
            }
        }
        out
    }

    /// The file's bytes up to the first tensor's data.
    fn header(&self) -> Vec<u8> {
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
        out
    }

    /// Writes the file into `dir`. A file whose tensors are holes takes no more of the disk than its
    /// header.
    pub fn write(&self, dir: &Path, name: &str) -> PathBuf {
        let path = dir.join(name);
        if !self.tensors.iter().any(|t| matches!(t.data, Data::Hole)) {
            std::fs::write(&path, self.build()).unwrap();
            return path;
        }
        assert!(self.tensors.iter().all(|t| matches!(t.data, Data::Hole)));
        let mut file = std::fs::File::create(&path).unwrap();
        let header = self.header();
        file.write_all(&header).unwrap();
        let start = (header.len() as u64).next_multiple_of(self.alignment);
        let end = self.tensors.iter().fold(start, |at, tensor| {
            at.next_multiple_of(self.alignment) + tensor.bytes()
        });
        file.set_len(end).unwrap();
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
