//! The GGUF header: metadata and the table of tensors. Tensor data is never read.
//!
//! The file is read through a buffer and not mapped, so that a file that shrinks meanwhile is an
//! error and not a SIGBUS. Memory is bounded by the file's size and by the constants below.

use super::error::{ModelError, shown};
use super::metadata::Metadata;
use super::source::Source;
use super::types::{GgmlType, NoSuchType, ggml_type};
use super::values::read_value;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Most tensors in one file (the largest real models have a few thousand).
pub const MAX_TENSORS: u64 = 1 << 15;
/// Most metadata entries in one file.
pub const MAX_KEYS: u64 = 1 << 16;
/// Longest metadata key, bytes (the format's own limit).
pub const MAX_KEY_BYTES: u64 = u16::MAX as u64;
/// Most metadata values that are kept.
pub const MAX_KEPT_KEYS: usize = 256;
/// Longest tensor name, bytes (ggml itself is built with 64 to 128).
pub const MAX_NAME_BYTES: u64 = 127;
/// ggml's limit on dimensions.
pub const MAX_DIMS: u32 = 4;
/// Largest accepted alignment, bytes.
pub const MAX_ALIGNMENT: u64 = 1 << 24;

/// A metadata entry takes at least a key length, a type and one byte of value.
const MIN_KEY_BYTES: u64 = 8 + 1 + 4 + 1;
/// A tensor entry takes at least a name length, a name, a dimension count, a type and an offset.
const MIN_TENSOR_BYTES: u64 = 8 + 1 + 4 + 4 + 8;
const DEFAULT_ALIGNMENT: u64 = 32;

/// One tensor as the header describes it.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Name.
    pub name: Box<str>,
    /// Elements per dimension, innermost first; ones beyond [`TensorInfo::dims`].
    all_dims: [u64; MAX_DIMS as usize],
    used_dims: u8,
    /// Type.
    pub ty: &'static GgmlType,
    /// Where its data starts in the file, bytes.
    pub offset: u64,
    /// Bytes of its data.
    pub bytes: u64,
}

impl TensorInfo {
    /// Elements per dimension, innermost first.
    #[must_use]
    pub fn dims(&self) -> &[u64] {
        &self.all_dims[..usize::from(self.used_dims)]
    }
}

/// Which file it was, as the system tells it apart, and in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileIdentity {
    /// Device number.
    pub device: u64,
    /// Inode number on that device.
    pub inode: u64,
    /// When its contents were changed last: seconds, and nanoseconds within them.
    pub modified: (i64, i64),
}

impl FileIdentity {
    /// The identity of an open file.
    #[must_use]
    pub fn of(metadata: &std::fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// The header of one file.
#[derive(Clone, Debug)]
pub struct Header {
    /// The file.
    pub path: PathBuf,
    /// Its identity.
    pub identity: FileIdentity,
    /// Its size, bytes.
    pub file_bytes: u64,
    /// GGUF version, 2 or 3.
    pub version: u32,
    /// Alignment of tensor data, bytes.
    pub alignment: u64,
    /// Where tensor data starts, bytes.
    pub data_offset: u64,
    /// The kept metadata.
    pub metadata: Metadata,
    /// The tensors in the order of their data, which leaves no gaps but padding.
    pub tensors: Vec<TensorInfo>,
}

/// Reads the header of the file at `path`, keeping the metadata whose keys `keep` accepts.
///
/// # Errors
/// When the file cannot be read, is not GGUF, is truncated or contradicts itself.
pub fn read_file(path: &Path, keep: fn(&str) -> bool) -> Result<Header, ModelError> {
    let io = |action| {
        move |source| ModelError::Io {
            path: path.to_owned(),
            action,
            source,
        }
    };
    // Opening a pipe would block, so look first.
    let kind = std::fs::metadata(path)
        .map_err(io("open the model"))?
        .file_type();
    let found = match () {
        () if kind.is_dir() => "directory",
        () if kind.is_fifo() => "pipe",
        () if kind.is_socket() => "socket",
        () if !kind.is_file() => "device",
        () => "",
    };
    if !found.is_empty() {
        return Err(ModelError::NotAFile {
            path: path.to_owned(),
            found,
        });
    }
    let file = File::open(path).map_err(io("open the model"))?;
    let stat = file.metadata().map_err(io("stat the model"))?;
    let mut header = read(file, path, stat.len(), keep)?;
    header.identity = FileIdentity::of(&stat);
    Ok(header)
}

/// Reads a header from anything that can seek, of `file_bytes` bytes; `path` is for errors.
///
/// # Errors
/// As [`read_file`].
pub fn read<R: Read + Seek>(
    input: R,
    path: &Path,
    file_bytes: u64,
    keep: fn(&str) -> bool,
) -> Result<Header, ModelError> {
    let mut source = Source::new(input, path, file_bytes);
    check_magic(&mut source)?;
    let version = read_version(&mut source)?;
    let tensor_count = read_count(&mut source, "tensor count", MAX_TENSORS, MIN_TENSOR_BYTES)?;
    let key_count = read_count(&mut source, "metadata count", MAX_KEYS, MIN_KEY_BYTES)?;
    let mut metadata = Metadata::new(path);
    let mut scratch = Vec::new();
    for index in 0..key_count {
        read_entry(&mut source, &mut metadata, &mut scratch, index, keep)?;
    }
    let alignment = read_alignment(&source, &metadata)?;
    source.check_room(tensor_count, MIN_TENSOR_BYTES, "the tensor table")?;
    // Bounded by MAX_TENSORS, and by what the file has room for.
    let mut tensors = Vec::with_capacity(usize::try_from(tensor_count).unwrap_or(0));
    for index in 0..tensor_count {
        tensors.push(read_tensor(&mut source, &mut scratch, index)?);
    }
    let data_offset = if tensors.is_empty() {
        source.position()
    } else {
        source.position().next_multiple_of(alignment)
    };
    place_data(&source, &mut tensors, data_offset, alignment)?;
    Ok(Header {
        path: path.to_owned(),
        identity: FileIdentity::default(),
        file_bytes,
        version,
        alignment,
        data_offset,
        metadata,
        tensors,
    })
}

fn check_magic<R: Read + Seek>(source: &mut Source<R>) -> Result<(), ModelError> {
    const REPEAT: &str = "download the model again";
    let refuse = |source: &Source<R>, found, fix| {
        Err(ModelError::NotGguf {
            path: source.path().to_owned(),
            found,
            fix,
        })
    };
    if source.file_bytes() == 0 {
        return refuse(source, "an empty file", REPEAT);
    }
    if source.file_bytes() < 4 {
        return refuse(source, "a file of less than 4 bytes", REPEAT);
    }
    match &source.bytes::<4>("the magic")? {
        b"GGUF" => Ok(()),
        [b'P', b'K', ..] => refuse(
            source,
            "a zip archive",
            "unpack it and pass the .gguf file in it",
        ),
        [0x1f, 0x8b, ..] => refuse(source, "gzip data", "unpack it first"),
        [0x28, 0xb5, 0x2f, 0xfd] => refuse(source, "zstd data", "unpack it first"),
        b"vers" => refuse(
            source,
            "a Git LFS pointer",
            "fetch the file itself with git lfs pull",
        ),
        b"<!DO" | b"<htm" | b"<HTM" => refuse(source, "a web page", REPEAT),
        b"lmgg" | b"fmgg" | b"tjgg" => refuse(
            source,
            "a GGML file from before GGUF",
            "get the model in GGUF format",
        ),
        b"FUGG" => refuse(
            source,
            "a byte-swapped GGUF file",
            "get a little-endian GGUF file",
        ),
        _ => refuse(
            source,
            "something else",
            "pass a .gguf file; other formats must be converted",
        ),
    }
}

fn read_version<R: Read + Seek>(source: &mut Source<R>) -> Result<u32, ModelError> {
    let version = source.u32("the version")?;
    let what = match version {
        2 | 3 => return Ok(version),
        1 => "this is GGUF version 1, which is no longer in use".to_owned(),
        v if v & 0xffff == 0 && v != 0 => "this is a big-endian GGUF file".to_owned(),
        v => format!("this is GGUF version {v}, which is not known"),
    };
    Err(ModelError::Version {
        path: source.path().to_owned(),
        what,
    })
}

fn read_count<R: Read + Seek>(
    source: &mut Source<R>,
    what: &str,
    limit: u64,
    item_bytes: u64,
) -> Result<u64, ModelError> {
    let at = source.position();
    let count = source.u64(what)?;
    if count > limit {
        return Err(source.beyond(at, what, count, limit));
    }
    source.check_room(count, item_bytes, what)?;
    Ok(count)
}

fn read_entry<R: Read + Seek>(
    source: &mut Source<R>,
    metadata: &mut Metadata,
    scratch: &mut Vec<u8>,
    index: u64,
    keep: fn(&str) -> bool,
) -> Result<(), ModelError> {
    let at = source.position();
    source.text_into(scratch, MAX_KEY_BYTES, "a metadata key")?;
    let Ok(key) = std::str::from_utf8(scratch) else {
        return Err(source.bad(at, format!("metadata key {index} is not UTF-8")));
    };
    if key.is_empty() {
        return Err(source.bad(at, format!("metadata key {index} is empty")));
    }
    let wanted = key.len() < 256 && (key == KEY_ALIGNMENT || keep(key));
    if !wanted {
        read_value(source, false)?;
        return Ok(());
    }
    let key = String::from_utf8_lossy(scratch).into_owned();
    if metadata.get(&key).is_some() {
        return Err(source.bad(at, format!("metadata '{}' appears twice", shown(&key))));
    }
    if metadata.len() == MAX_KEPT_KEYS {
        let count = MAX_KEPT_KEYS as u64;
        return Err(source.beyond(at, "the number of model properties", count + 1, count));
    }
    let value = read_value(source, true)?;
    metadata.push(key, value);
    Ok(())
}

fn read_alignment<R: Read + Seek>(
    source: &Source<R>,
    metadata: &Metadata,
) -> Result<u64, ModelError> {
    let alignment = metadata.uint(KEY_ALIGNMENT)?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() {
        return Err(source.bad(
            source.position(),
            format!("metadata '{KEY_ALIGNMENT}' is {alignment}, which is not a power of two"),
        ));
    }
    if alignment > MAX_ALIGNMENT {
        return Err(source.beyond(source.position(), KEY_ALIGNMENT, alignment, MAX_ALIGNMENT));
    }
    Ok(alignment)
}

/// The key of the data alignment, which is kept in any case.
pub const KEY_ALIGNMENT: &str = "general.alignment";

fn read_tensor<R: Read + Seek>(
    source: &mut Source<R>,
    scratch: &mut Vec<u8>,
    index: u64,
) -> Result<TensorInfo, ModelError> {
    let at = source.position();
    source.text_into(scratch, MAX_NAME_BYTES, "a tensor name")?;
    let name = match std::str::from_utf8(scratch) {
        Ok(name) if !name.is_empty() && !name.contains(char::is_control) => Box::from(name),
        _ => {
            return Err(source.bad(
                at,
                format!("the name of tensor {index} is not printable text"),
            ));
        }
    };
    let dim_count = source.u32("a dimension count")?;
    if dim_count > MAX_DIMS {
        let what = format!("the dimension count of tensor '{name}'");
        return Err(source.beyond(at, &what, dim_count.into(), MAX_DIMS.into()));
    }
    let mut all_dims = [1u64; MAX_DIMS as usize];
    let used_dims = u8::try_from(dim_count).unwrap_or(0);
    for dim in &mut all_dims[..usize::from(used_dims)] {
        *dim = source.u64("a dimension")?;
    }
    let ty = read_tensor_type(source, &name)?;
    let dims = &all_dims[..usize::from(used_dims)];
    let bytes = ty
        .tensor_bytes(dims)
        .filter(|&bytes| bytes <= i64::MAX.unsigned_abs())
        .ok_or_else(|| {
            source.bad(
                at,
                format!(
                    "tensor '{name}' of type {} cannot have the shape {dims:?}",
                    ty.name
                ),
            )
        })?;
    let offset = source.u64("a tensor's offset")?;
    Ok(TensorInfo {
        name,
        all_dims,
        used_dims,
        ty,
        offset,
        bytes,
    })
}

fn read_tensor_type<R: Read + Seek>(
    source: &mut Source<R>,
    name: &str,
) -> Result<&'static GgmlType, ModelError> {
    let at = source.position();
    let id = source.u32("a tensor's type")?;
    ggml_type(id).map_err(|why| ModelError::Header {
        path: source.path().to_owned(),
        offset: at,
        what: match why {
            NoSuchType::Removed(old) => {
                format!("tensor '{name}' has type {id} ({old}), which ggml has removed")
            }
            NoSuchType::Unknown => {
                format!("tensor '{name}' has type {id}, which is not known here")
            }
        },
        fix: "get the model in another quantisation, or the file again if it may be damaged",
    })
}

/// Turns offsets within the data into offsets within the file, and checks that the data follows
/// the order of the table without gaps or overlap (llama.cpp asks for the same) and is all there.
fn place_data<R: Read + Seek>(
    source: &Source<R>,
    tensors: &mut [TensorInfo],
    data_offset: u64,
    alignment: u64,
) -> Result<(), ModelError> {
    let mut expected = 0u64;
    let mut first_missing = None;
    for tensor in &mut *tensors {
        if tensor.offset != expected {
            return Err(source.bad(
                source.position(),
                format!(
                    "tensor '{}' is at data offset {}, expected {expected}",
                    tensor.name, tensor.offset
                ),
            ));
        }
        // Neither sum overflows: the offset is checked below, sizes are below 2^63.
        let end = expected
            .checked_add(tensor.bytes)
            .filter(|&end| end <= i64::MAX.unsigned_abs());
        let Some(end) = end else {
            return Err(source.bad(
                source.position(),
                "the tensors take more than 2^63 bytes".into(),
            ));
        };
        tensor.offset += data_offset;
        if data_offset + end > source.file_bytes() && first_missing.is_none() {
            first_missing = Some((tensor.name.clone(), tensor.offset));
        }
        expected = end.next_multiple_of(alignment);
    }
    let Some((name, offset)) = first_missing else {
        return Ok(());
    };
    let last_end = tensors
        .last()
        .map_or(data_offset, |tensor| tensor.offset + tensor.bytes);
    Err(ModelError::Truncated {
        path: source.path().to_owned(),
        offset,
        what: format!("the data of tensor '{name}' and of those after it"),
        needed_bytes: last_end,
        file_bytes: source.file_bytes(),
    })
}
