//! Where every expert's bytes are: in the model's files and in this process.
//!
//! The model map gives file offsets, warm-up gives the addresses and the order that the graph really
//! uses. Both must tell the same story: every expert tensor of a shard must lie at one common
//! distance from its file offset, inside one mapping of that shard. If not (repacked weights, a
//! device buffer), locking would lock the wrong thing, and the layout is refused.

use super::slice::SliceAt;
use super::unchanged::Stamp;
use crate::engine::{ExpertOp, ExpertUse, Learned, Placement};
use crate::model::{ModelMap, Tensor, TensorKind};
use hotpin_controllers::{ExpertId, ModelShape};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Why a layout was refused.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// The graph uses an expert tensor that the file does not have.
    #[error("the graph uses {tensor}, which is not an expert tensor of the model file")]
    Unknown {
        /// Tensor name.
        tensor: String,
    },
    /// Sizes differ between graph and file.
    #[error(
        "{tensor}: the graph sees {experts} experts of {graph_bytes} bytes, the file has slices of {file_bytes} bytes"
    )]
    Size {
        /// Tensor name.
        tensor: String,
        /// Experts as the graph sees them.
        experts: usize,
        /// Bytes an expert in the graph.
        graph_bytes: usize,
        /// Bytes an expert in the file.
        file_bytes: u64,
    },
    /// A tensor is not where its file's mapping should have it.
    #[error(
        "{tensor} is not in the mapping of its file, so locking it would not keep the file's pages"
    )]
    NotMapped {
        /// Tensor name.
        tensor: String,
    },
    /// No use of any tensor of a shard was seen, so its mapping is not known.
    #[error("the graph used no expert tensor of {path}, so its mapping is unknown")]
    Unseen {
        /// The shard.
        path: PathBuf,
    },
    /// A shard could not be opened or the mappings could not be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}

/// Addresses of all experts and dense weights of a loaded model.
#[derive(Debug)]
pub struct Layout {
    shape: ModelShape,
    slices: Vec<SliceAt>,
    /// Slices of expert `e` are `first[e]..first[e + 1]`, in the order in which the graph uses them.
    first: Vec<u32>,
    dense: Vec<(usize, usize)>,
    experts_of_tensor: Vec<(usize, usize)>,
    /// MoE layers whose experts are in a device's memory, not here.
    elsewhere: Vec<bool>,
    files: Vec<File>,
    stamps: Vec<Stamp>,
}

impl Layout {
    /// Joins the model map with what warm-up learned of a model that is on the host as a whole.
    ///
    /// # Errors
    /// [`LayoutError`], see there.
    pub fn new(map: &ModelMap, learned: &Learned) -> Result<Self, LayoutError> {
        Self::placed(map, learned, &Placement::default())
    }

    /// The same of a model that is partly in a device's memory. llama.cpp takes what it does not need
    /// out of its mapping, at either end: nothing of that must be touched by address.
    ///
    /// # Errors
    /// [`LayoutError`], see there.
    pub fn placed(
        map: &ModelMap,
        learned: &Learned,
        placement: &Placement,
    ) -> Result<Self, LayoutError> {
        let shape = map.shape().clone();
        let bases = shard_bases(map, learned)?;
        let base_of = |shard: u32| {
            bases[shard as usize].ok_or_else(|| LayoutError::Unseen {
                path: map.shards()[shard as usize].path.clone(),
            })
        };
        // Position in the graph of each tensor's first use; what the graph does not use comes last.
        let mut ranks = vec![usize::MAX; map.tensors().len()];
        for (rank, used) in learned.uses.iter().enumerate() {
            if let Some(at) = map
                .tensors()
                .iter()
                .position(|t| *t.info.name == used.tensor)
            {
                ranks[at] = rank;
            }
        }
        let elsewhere: Vec<bool> = map
            .layers()
            .iter()
            .map(|layer| placement.experts().contains(&layer.block))
            .collect();
        let mut slices = Vec::new();
        let mut first = Vec::with_capacity(shape.total_experts() + 1);
        for expert in 0..shape.total_experts() {
            first.push(index_u32(slices.len()));
            if elsewhere[shape.place(ExpertId(index_u32(expert))).0] {
                continue;
            }
            let mut own = map.expert_slices(ExpertId(index_u32(expert))).to_vec();
            own.sort_by_key(|s| ranks[s.tensor as usize]);
            for s in own {
                slices.push(SliceAt {
                    address: base_of(s.shard)?.wrapping_add(to_usize(s.offset)),
                    len: to_usize(s.len),
                    shard: s.shard as usize,
                    offset: s.offset,
                });
            }
        }
        first.push(index_u32(slices.len()));
        let bases = all_bases(map, bases)?;
        let at = |shard: u32, offset: u64, len: u64| {
            bases[shard as usize].map(|b| (b.wrapping_add(to_usize(offset)), to_usize(len)))
        };
        let of_tensors = |kind: TensorKind| -> Vec<(usize, usize)> {
            map.tensors()
                .iter()
                .filter(|t| t.kind == kind && placement.on_host(&t.info.name))
                .filter_map(|t| at(t.shard, t.info.offset, t.info.bytes))
                .collect()
        };
        let dense = if placement.uses_device() {
            of_tensors(TensorKind::Dense)
        } else {
            map.dense_ranges()
                .iter()
                .filter_map(|r| at(r.shard, r.offset, r.len))
                .collect()
        };
        let experts_of_tensor = of_tensors(TensorKind::Expert);
        let files = map
            .shards()
            .iter()
            .map(|s| open(&s.path))
            .collect::<Result<Vec<_>, _>>()?;
        let stamps = map
            .shards()
            .iter()
            .zip(&files)
            .map(|(shard, file)| {
                Stamp::new(shard, file).map_err(|source| LayoutError::Io {
                    path: shard.path.clone(),
                    source,
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            shape,
            slices,
            first,
            dense,
            experts_of_tensor,
            elsewhere,
            files,
            stamps,
        })
    }

    /// The model's shape.
    #[must_use]
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// All slices, grouped by expert; none of experts that are elsewhere.
    #[must_use]
    pub fn slices(&self) -> &[SliceAt] {
        &self.slices
    }

    /// Indices into [`Self::slices`] of one expert, in graph order.
    #[must_use]
    pub fn slices_of(&self, expert: ExpertId) -> std::ops::Range<usize> {
        self.first[expert.index()] as usize..self.first[expert.index() + 1] as usize
    }

    /// Dense weights: address and length of each range.
    #[must_use]
    pub fn dense(&self) -> &[(usize, usize)] {
        &self.dense
    }

    /// Bytes of the dense weights.
    #[must_use]
    pub fn dense_bytes(&self) -> u64 {
        self.dense.iter().map(|&(_, len)| len as u64).sum()
    }

    /// Whether an expert is used from memory here, and not from a device's.
    #[must_use]
    pub fn is_here(&self, expert: ExpertId) -> bool {
        !self.elsewhere[self.shape.place(expert).0]
    }

    /// Whole expert tensors: address and length of each.
    #[must_use]
    pub fn expert_tensors(&self) -> &[(usize, usize)] {
        &self.experts_of_tensor
    }

    /// The open file of a shard.
    #[must_use]
    pub fn file(&self, shard: usize) -> &File {
        &self.files[shard]
    }

    /// All open shards.
    #[must_use]
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// Whether every shard is still what it was when its header was read.
    ///
    /// # Errors
    /// In words for the user.
    pub fn check_unchanged(&self) -> Result<(), String> {
        self.stamps
            .iter()
            .zip(&self.files)
            .try_for_each(|(stamp, file)| stamp.check(file))
    }
}

fn read_maps() -> Result<String, LayoutError> {
    let path = PathBuf::from("/proc/self/maps");
    std::fs::read_to_string(&path).map_err(|source| LayoutError::Io { path, source })
}

fn inode(path: &Path) -> Result<u64, LayoutError> {
    let io = |source| LayoutError::Io {
        path: path.to_owned(),
        source,
    };
    Ok(std::fs::metadata(path).map_err(io)?.ino())
}

/// The same, with the mappings of shards that hold nothing but dense weights, of which warm-up sees
/// no tensor. A shard that is mapped more than once stays unknown.
fn all_bases(
    map: &ModelMap,
    mut bases: Vec<Option<usize>>,
) -> Result<Vec<Option<usize>>, LayoutError> {
    let unknown = bases.iter_mut().zip(map.shards());
    for (base, shard) in unknown.filter(|(base, _)| base.is_none()) {
        let inode = inode(&shard.path)?;
        let maps = read_maps()?;
        let mut found = maps.lines().filter_map(|line| mapping_base(line, inode));
        *base = found.next();
        if found.any(|other| Some(other) != *base) {
            *base = None;
        }
    }
    Ok(bases)
}

/// Start of each shard's mapping, for the shards of which warm-up saw a tensor.
fn shard_bases(map: &ModelMap, learned: &Learned) -> Result<Vec<Option<usize>>, LayoutError> {
    let maps = read_maps()?;
    let mut bases: Vec<Option<usize>> = vec![None; map.shards().len()];
    for used in &learned.uses {
        if is_small_side(map, used) {
            continue;
        }
        let tensor = expert_tensor(map, used)?;
        let shard = &map.shards()[tensor.shard as usize];
        let not_mapped = || LayoutError::NotMapped {
            tensor: used.tensor.clone(),
        };
        let inode = inode(&shard.path)?;
        if !maps
            .lines()
            .any(|line| line_maps(line, used.address, inode))
        {
            return Err(not_mapped());
        }
        let base = used.address.wrapping_sub(to_usize(tensor.info.offset));
        let known = bases[tensor.shard as usize].get_or_insert(base);
        if *known != base {
            return Err(not_mapped());
        }
    }
    Ok(bases)
}

/// Whether these are biases so small that they count as dense weights.
fn is_small_side(map: &ModelMap, used: &ExpertUse) -> bool {
    let dense = |t: &Tensor| t.kind == TensorKind::Dense;
    used.op == ExpertOp::AddBias && map.tensor(&used.tensor).is_some_and(dense)
}

/// The tensor of the file that the graph used, if both agree on its size.
fn expert_tensor<'m>(map: &'m ModelMap, used: &ExpertUse) -> Result<&'m Tensor, LayoutError> {
    let tensor = map
        .tensor(&used.tensor)
        .filter(|t| t.kind == TensorKind::Expert)
        .ok_or_else(|| LayoutError::Unknown {
            tensor: used.tensor.clone(),
        })?;
    let file_bytes = tensor.info.bytes / (used.experts.max(1) as u64);
    let agrees = used.stride_bytes as u64 == file_bytes
        && used.experts as u64 * file_bytes == tensor.info.bytes;
    if agrees {
        return Ok(tensor);
    }
    Err(LayoutError::Size {
        tensor: used.tensor.clone(),
        experts: used.experts,
        graph_bytes: used.stride_bytes,
        file_bytes,
    })
}

/// A line of `/proc/self/maps`: addresses, offset in the file, inode.
fn parse_mapping(line: &str) -> Option<(std::ops::Range<usize>, usize, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let hex = |text| usize::from_str_radix(text, 16).ok();
    let offset = hex(fields.nth(1)?)?;
    let inode = fields.nth(1)?.parse().ok()?;
    Some((hex(start)?..hex(end)?, offset, inode))
}

/// Whether a line of `/proc/self/maps` covers `address` and is backed by `inode`.
fn line_maps(line: &str, address: usize, inode: u64) -> bool {
    parse_mapping(line)
        .is_some_and(|(range, _, backed)| range.contains(&address) && backed == inode)
}

/// Where the file of `inode` would begin, going by a line of `/proc/self/maps` that maps some of it.
fn mapping_base(line: &str, inode: u64) -> Option<usize> {
    let (range, offset, backed) = parse_mapping(line)?;
    (backed == inode).then(|| range.start.wrapping_sub(offset))
}

fn open(path: &Path) -> Result<File, LayoutError> {
    File::open(path).map_err(|source| LayoutError::Io {
        path: path.to_owned(),
        source,
    })
}

fn index_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// File offsets and sizes were checked against the file, and the file is mapped whole.
fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::{line_maps, mapping_base};

    #[test]
    fn maps_lines_are_matched_by_address_and_inode() {
        let line = "7f0000000000-7f0000002000 r--s 00000000 fe:00 4711    /models/my model.gguf";
        assert!(line_maps(line, 0x7f00_0000_0000, 4711));
        assert!(line_maps(line, 0x7f00_0000_1fff, 4711));
        assert!(!line_maps(line, 0x7f00_0000_2000, 4711));
        assert!(!line_maps(line, 0x7f00_0000_0000, 4712));
        assert!(!line_maps("nonsense", 0, 0));
        assert!(!line_maps("", 0, 0));
        let part = "7f0000003000-7f0000005000 r--s 00003000 fe:00 4711    /models/my model.gguf";
        for line in [line, part] {
            assert_eq!(mapping_base(line, 4711), Some(0x7f00_0000_0000));
            assert_eq!(mapping_base(line, 4712), None);
        }
    }
}
