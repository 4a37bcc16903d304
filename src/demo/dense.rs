//! The dense model that experts are made from, checked once.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::error::Error;
use crate::engine::gguf_write::{GgufSource, TensorInfo};
use crate::engine::quantize::dequantize;

/// One of the three matrices of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// `n_ff` rows of `n_embd` values.
    Gate,
    /// `n_ff` rows of `n_embd` values.
    Up,
    /// `n_embd` rows of `n_ff` values.
    Down,
}

impl Part {
    pub(super) const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    /// The part's name within tensor names.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Gate => "ffn_gate",
            Self::Up => "ffn_up",
            Self::Down => "ffn_down",
        }
    }
}

/// A dense llama model whose tensors are all there, in shape and within the file.
#[derive(Debug)]
pub(super) struct Dense {
    pub(super) header: GgufSource,
    pub(super) layers: u32,
    /// Width of the hidden states.
    pub(super) n_embd: u32,
    /// Hidden units of a feed-forward block.
    pub(super) n_ff: u32,
    path: PathBuf,
    file: File,
}

impl Dense {
    /// Opens and checks `path`.
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(Error::io(path))?;
        let header = GgufSource::open(path)?;
        check_kind(&header, path)?;
        let key = |name: &str| {
            let missing = || Error::Missing {
                path: path.to_owned(),
                name: name.to_owned(),
            };
            header.unsigned(name).filter(|&n| n > 0).ok_or_else(missing)
        };
        let (layers, n_embd) = (key("llama.block_count")?, key("llama.embedding_length")?);
        let up = find(&header, path, 0, Part::Up)?;
        let n_ff = u32::try_from(up.shape[1]).unwrap_or(0);
        let dense = Self {
            layers,
            n_embd,
            n_ff,
            path: path.to_owned(),
            file,
            header,
        };
        dense.check_extent()?;
        dense.check_shapes()?;
        Ok(dense)
    }

    /// The tensor of one part of one layer.
    pub(super) fn part(&self, layer: u32, part: Part) -> Result<&TensorInfo, Error> {
        find(&self.header, &self.path, layer, part)
    }

    /// Values in one row of a part.
    pub(super) const fn row_len(&self, part: Part) -> u32 {
        match part {
            Part::Gate | Part::Up => self.n_embd,
            Part::Down => self.n_ff,
        }
    }

    /// All values of one part of one layer, row after row.
    pub(super) fn values(&self, layer: u32, part: Part) -> Result<Vec<f32>, Error> {
        let tensor = self.part(layer, part)?;
        let mut bytes = vec![0u8; usize::try_from(tensor.size_bytes).unwrap_or(usize::MAX)];
        self.read(tensor.offset_bytes, &mut bytes)?;
        let mut values = vec![0f32; self.n_embd as usize * self.n_ff as usize];
        dequantize(tensor.ty, self.row_len(part) as usize, &bytes, &mut values)?;
        Ok(values)
    }

    /// Reads raw bytes of the file.
    pub(super) fn read(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), Error> {
        self.file
            .read_exact_at(out, offset_bytes)
            .map_err(Error::io(&self.path))
    }

    /// Every tensor must end before the file does: nothing is allocated on a header's word alone.
    fn check_extent(&self) -> Result<(), Error> {
        let file_bytes = self.file.metadata().map_err(Error::io(&self.path))?.len();
        for tensor in self.header.tensors() {
            let end_bytes = tensor.offset_bytes.saturating_add(tensor.size_bytes);
            if end_bytes > file_bytes {
                let (path, name) = (self.path.clone(), tensor.name.clone());
                return Err(Error::Truncated {
                    path,
                    name,
                    end_bytes,
                    file_bytes,
                });
            }
        }
        Ok(())
    }

    fn check_shapes(&self) -> Result<(), Error> {
        let (n_embd, n_ff) = (u64::from(self.n_embd), u64::from(self.n_ff));
        for layer in 0..self.layers {
            for part in Part::ALL {
                let tensor = self.part(layer, part)?;
                let expected = match part {
                    Part::Gate | Part::Up => [n_embd, n_ff, 1, 1],
                    Part::Down => [n_ff, n_embd, 1, 1],
                };
                if tensor.shape != expected {
                    let problem = format!("has shape {:?}, not {expected:?}", tensor.shape);
                    return Err(self.bad(tensor, problem));
                }
                self.check_type(tensor)?;
            }
        }
        self.check_extras()
    }

    /// llama.cpp's MoE graph has no place for biases or scales of a dense feed-forward block.
    fn check_extras(&self) -> Result<(), Error> {
        let extra = self.header.tensors().iter().find(|t| {
            let is_ffn = Part::ALL
                .iter()
                .any(|p| t.name.contains(&format!(".{}.", p.name())));
            is_ffn && !t.name.ends_with(".weight")
        });
        match extra {
            Some(tensor) => Err(self.bad(tensor, "cannot be carried over into experts".to_owned())),
            None => Ok(()),
        }
    }

    fn check_type(&self, tensor: &TensorInfo) -> Result<(), Error> {
        if tensor.ty.reads_as_floats() {
            return Ok(());
        }
        Err(self.bad(
            tensor,
            format!("is {}, which cannot be read as floats", tensor.ty.name()),
        ))
    }

    fn bad(&self, tensor: &TensorInfo, problem: String) -> Error {
        Error::Tensor {
            path: self.path.clone(),
            name: tensor.name.clone(),
            problem,
        }
    }
}

fn find<'h>(
    header: &'h GgufSource,
    path: &Path,
    layer: u32,
    part: Part,
) -> Result<&'h TensorInfo, Error> {
    let name = format!("blk.{layer}.{}.weight", part.name());
    header.tensor(&name).ok_or_else(|| Error::Missing {
        path: path.to_owned(),
        name,
    })
}

fn check_kind(header: &GgufSource, path: &Path) -> Result<(), Error> {
    let path = path.to_owned();
    let architecture = header.string("general.architecture");
    if architecture.as_deref() != Some("llama") {
        let found = architecture.unwrap_or_else(|| "not given".to_owned());
        return Err(Error::NotLlama { path, found });
    }
    if let Some(experts) = header.unsigned("llama.expert_count").filter(|&n| n > 0) {
        return Err(Error::AlreadyMoe {
            path,
            evidence: format!("llama.expert_count = {experts}"),
        });
    }
    if let Some(parts) = header.unsigned("split.count").filter(|&n| n > 1) {
        return Err(Error::Split { path, parts });
    }
    let expert_tensor =
        |t: &&TensorInfo| t.name.contains("_exps") || t.name.contains("ffn_gate_inp");
    if let Some(tensor) = header.tensors().iter().find(expert_tensor) {
        return Err(Error::AlreadyMoe {
            path,
            evidence: format!("tensor {}", tensor.name),
        });
    }
    Ok(())
}
