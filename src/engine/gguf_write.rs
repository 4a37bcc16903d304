//! Reads the header of a GGUF file and composes a new header with ggml's own code.
//!
//! Only headers pass through here: the tensor data that follows them is streamed by the caller.

use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use llama_cpp_sys_4 as sys;

use super::quantize::TensorType;

/// The calls of ggml's `gguf.h` that are used here. llama-cpp-sys-4 links them, and its bindings
/// know `gguf_context`, but leave these functions out.
mod ffi {
    use super::{c_char, sys};
    use sys::gguf_context as Gguf;

    /// Mirrors `struct gguf_init_params`.
    #[repr(C)]
    pub struct InitParams {
        pub no_alloc: bool,
        pub ctx: *mut *mut sys::ggml_context,
    }

    /// `GGUF_TYPE_UINT16` of `enum gguf_type`.
    pub const TYPE_U16: u32 = 2;
    /// `GGUF_TYPE_UINT32` of `enum gguf_type`.
    pub const TYPE_U32: u32 = 4;
    /// `GGUF_TYPE_STRING` of `enum gguf_type`.
    pub const TYPE_STRING: u32 = 8;

    unsafe extern "C" {
        pub fn gguf_init_empty() -> *mut Gguf;
        pub fn gguf_init_from_file(path: *const c_char, params: InitParams) -> *mut Gguf;
        pub fn gguf_free(gguf: *mut Gguf);
        pub fn gguf_get_data_offset(gguf: *const Gguf) -> usize;
        pub fn gguf_find_key(gguf: *const Gguf, key: *const c_char) -> i64;
        pub fn gguf_get_kv_type(gguf: *const Gguf, id: i64) -> u32;
        pub fn gguf_get_val_u16(gguf: *const Gguf, id: i64) -> u16;
        pub fn gguf_get_val_u32(gguf: *const Gguf, id: i64) -> u32;
        pub fn gguf_get_val_str(gguf: *const Gguf, id: i64) -> *const c_char;
        pub fn gguf_get_n_tensors(gguf: *const Gguf) -> i64;
        pub fn gguf_get_tensor_offset(gguf: *const Gguf, id: i64) -> usize;
        pub fn gguf_get_tensor_name(gguf: *const Gguf, id: i64) -> *const c_char;
        pub fn gguf_get_tensor_ne(gguf: *const Gguf, id: i64) -> *const i64;
        pub fn gguf_get_tensor_type(gguf: *const Gguf, id: i64) -> sys::ggml_type;
        pub fn gguf_get_tensor_size(gguf: *const Gguf, id: i64) -> usize;
        pub fn gguf_remove_key(gguf: *mut Gguf, key: *const c_char) -> i64;
        pub fn gguf_set_val_u32(gguf: *mut Gguf, key: *const c_char, value: u32);
        pub fn gguf_set_val_str(gguf: *mut Gguf, key: *const c_char, value: *const c_char);
        pub fn gguf_set_kv(gguf: *mut Gguf, source: *const Gguf);
        pub fn gguf_find_tensor(gguf: *const Gguf, name: *const c_char) -> i64;
        pub fn gguf_add_tensor(gguf: *mut Gguf, tensor: *const sys::ggml_tensor);
        pub fn gguf_get_meta_size(gguf: *const Gguf) -> usize;
        pub fn gguf_get_meta_data(gguf: *const Gguf, data: *mut std::ffi::c_void);
    }
}

/// Bytes to which ggml aligns tensor data unless a file says otherwise.
pub const ALIGNMENT_BYTES: u64 = 32;

/// Longest tensor name, without the terminator (`GGML_MAX_NAME` - 1).
const MAX_NAME_BYTES: usize = 63;

/// Why a GGUF header could not be read or composed.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The path cannot be handed to C.
    #[error("{path}: the path holds a NUL byte")]
    Path {
        /// The path as given.
        path: PathBuf,
    },
    /// ggml refuses the file.
    #[error("{path}: not a GGUF file that this llama.cpp can read")]
    Unreadable {
        /// The file.
        path: PathBuf,
    },
    /// A tensor has a type or shape that this ggml does not know.
    #[error("{path}: tensor {name} has a type or shape that ggml does not know")]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A key, value or tensor that ggml would refuse to write.
    #[error("cannot write {what} to a GGUF header: {reason}")]
    Refused {
        /// The key or tensor name.
        what: String,
        /// Why.
        reason: &'static str,
    },
}

/// One tensor as its file's header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, such as `blk.0.ffn_up.weight`.
    pub name: String,
    /// Its type.
    pub ty: TensorType,
    /// Values in each dimension, innermost first; always four.
    pub shape: [u64; 4],
    /// Where its data starts, in bytes from the start of the file.
    pub offset_bytes: u64,
    /// Bytes of its data.
    pub size_bytes: u64,
}

/// Owner of one `gguf_context`.
#[derive(Debug)]
struct Handle(NonNull<sys::gguf_context>);

impl Handle {
    fn as_ptr(&self) -> *mut sys::gguf_context {
        self.0.as_ptr()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a gguf_init_* call, and this is its only owner.
        unsafe { ffi::gguf_free(self.as_ptr()) }
    }
}

/// The header of an existing GGUF file.
#[derive(Debug)]
pub struct GgufSource {
    handle: Handle,
    tensors: Vec<TensorInfo>,
}

impl GgufSource {
    /// Reads the header of `path`; no tensor data is loaded.
    ///
    /// # Errors
    /// When ggml refuses the file, or a tensor's type is unknown.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        use std::os::unix::ffi::OsStrExt;
        let c_path = CString::new(path.as_os_str().as_bytes()).map_err(|_| GgufError::Path {
            path: path.to_owned(),
        })?;
        let params = ffi::InitParams {
            no_alloc: true,
            ctx: std::ptr::null_mut(),
        };
        // SAFETY: `c_path` is NUL-terminated and outlives the call; a null `ctx` asks for no tensors.
        let raw = unsafe { ffi::gguf_init_from_file(c_path.as_ptr(), params) };
        let handle = NonNull::new(raw)
            .map(Handle)
            .ok_or_else(|| GgufError::Unreadable {
                path: path.to_owned(),
            })?;
        let tensors = read_tensors(&handle, path)?;
        Ok(Self { handle, tensors })
    }

    /// The tensors in the file's order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|t| t.name == name)
    }

    /// The value of a string key; `None` when it is absent or of another type.
    #[must_use]
    pub fn string(&self, key: &str) -> Option<String> {
        let id = self.find(key, ffi::TYPE_STRING)?;
        // SAFETY: `find` returned a valid id of a scalar string; ggml owns the string for as long
        // as the handle lives, and it is copied here.
        let value = unsafe { CStr::from_ptr(ffi::gguf_get_val_str(self.handle.as_ptr(), id)) };
        Some(value.to_string_lossy().into_owned())
    }

    /// The value of an unsigned 16-bit or 32-bit key; `None` when it is absent or of another type.
    #[must_use]
    pub fn unsigned(&self, key: &str) -> Option<u32> {
        if let Some(id) = self.find(key, ffi::TYPE_U16) {
            // SAFETY: `find` returned a valid id of a scalar u16.
            return Some(unsafe { ffi::gguf_get_val_u16(self.handle.as_ptr(), id) }.into());
        }
        let id = self.find(key, ffi::TYPE_U32)?;
        // SAFETY: `find` returned a valid id of a scalar u32.
        Some(unsafe { ffi::gguf_get_val_u32(self.handle.as_ptr(), id) })
    }

    /// The id of `key` if it is there and a scalar of type `ty` (arrays have a type of their own).
    fn find(&self, key: &str, ty: u32) -> Option<i64> {
        let key = CString::new(key).ok()?;
        // SAFETY: the handle is live, `key` is NUL-terminated, and the type is asked of an id that
        // was found just before.
        unsafe {
            let id = ffi::gguf_find_key(self.handle.as_ptr(), key.as_ptr());
            (id >= 0 && ffi::gguf_get_kv_type(self.handle.as_ptr(), id) == ty).then_some(id)
        }
    }
}

fn read_tensors(handle: &Handle, path: &Path) -> Result<Vec<TensorInfo>, GgufError> {
    // SAFETY: the handle is live; every id below is in 0..n_tensors, for which ggml returns a
    // NUL-terminated name and four extents that live as long as the handle and are copied here.
    let (data_offset, count) = unsafe {
        (
            ffi::gguf_get_data_offset(handle.as_ptr()),
            ffi::gguf_get_n_tensors(handle.as_ptr()),
        )
    };
    (0..count)
        .map(|id| {
            // SAFETY: as above.
            let (name, extents, raw_type, offset, size) = unsafe {
                (
                    CStr::from_ptr(ffi::gguf_get_tensor_name(handle.as_ptr(), id)),
                    *ffi::gguf_get_tensor_ne(handle.as_ptr(), id).cast::<[i64; 4]>(),
                    ffi::gguf_get_tensor_type(handle.as_ptr(), id),
                    ffi::gguf_get_tensor_offset(handle.as_ptr(), id),
                    ffi::gguf_get_tensor_size(handle.as_ptr(), id),
                )
            };
            let name = name.to_string_lossy().into_owned();
            let unknown = || GgufError::Tensor {
                path: path.to_owned(),
                name: name.clone(),
            };
            let mut shape = [0; 4];
            for (to, from) in shape.iter_mut().zip(extents) {
                *to = u64::try_from(from).map_err(|_| unknown())?;
            }
            Ok(TensorInfo {
                ty: TensorType::from_raw(raw_type).ok_or_else(unknown)?,
                shape,
                offset_bytes: (data_offset as u64).saturating_add(offset as u64),
                size_bytes: size as u64,
                name,
            })
        })
        .collect()
}

/// A header in the making: keys, values and tensor descriptions.
#[derive(Debug)]
pub struct GgufHeader {
    handle: Handle,
}

impl GgufHeader {
    /// Starts a header with every key of `source`, except its alignment: this header's tensors are
    /// aligned to [`ALIGNMENT_BYTES`].
    #[must_use]
    pub fn from_source(source: &GgufSource) -> Self {
        // SAFETY: gguf_init_empty allocates with C++ `new`, which does not return null. Both handles
        // are live during the copy, and the key is NUL-terminated.
        let handle = unsafe {
            let handle = Handle(NonNull::new_unchecked(ffi::gguf_init_empty()));
            ffi::gguf_set_kv(handle.as_ptr(), source.handle.as_ptr());
            ffi::gguf_remove_key(handle.as_ptr(), c"general.alignment".as_ptr());
            handle
        };
        Self { handle }
    }

    /// Sets an unsigned 32-bit key.
    ///
    /// # Errors
    /// When the key is empty or holds a NUL byte.
    pub fn set_u32(&mut self, key: &str, value: u32) -> Result<(), GgufError> {
        let key = c_key(key)?;
        // SAFETY: the handle is live and the key NUL-terminated and not empty.
        unsafe { ffi::gguf_set_val_u32(self.handle.as_ptr(), key.as_ptr(), value) };
        Ok(())
    }

    /// Sets a string key.
    ///
    /// # Errors
    /// When the key is empty, or key or value hold a NUL byte.
    pub fn set_string(&mut self, key: &str, value: &str) -> Result<(), GgufError> {
        let c_key = c_key(key)?;
        let value = CString::new(value).map_err(|_| GgufError::Refused {
            what: key.to_owned(),
            reason: "NUL byte in value",
        })?;
        // SAFETY: the handle is live, both strings are NUL-terminated and the key is not empty.
        unsafe { ffi::gguf_set_val_str(self.handle.as_ptr(), c_key.as_ptr(), value.as_ptr()) };
        Ok(())
    }

    /// Adds a tensor; its data follows that of the tensors added before. Returns its size in bytes.
    ///
    /// # Errors
    /// When the name is taken, too long or not a C string, or the shape is not whole blocks or
    /// overflows.
    pub fn add_tensor(
        &mut self,
        name: &str,
        ty: TensorType,
        shape: [u64; 4],
    ) -> Result<u64, GgufError> {
        let refuse = |reason| GgufError::Refused {
            what: name.to_owned(),
            reason,
        };
        let c_name = c_key(name)?;
        if name.len() > MAX_NAME_BYTES {
            return Err(refuse("name longer than 63 bytes"));
        }
        // SAFETY: the handle is live and the name NUL-terminated.
        if unsafe { ffi::gguf_find_tensor(self.handle.as_ptr(), c_name.as_ptr()) } >= 0 {
            return Err(refuse("a tensor of this name is there already"));
        }
        let size_bytes =
            tensor_bytes(ty, shape).ok_or_else(|| refuse("shape does not fit the type"))?;
        let mut extents = [0i64; 4];
        for (to, from) in extents.iter_mut().zip(shape) {
            *to = i64::try_from(from).map_err(|_| refuse("shape does not fit the type"))?;
        }
        self.describe(&c_name, ty, extents);
        Ok(size_bytes)
    }

    /// Hands ggml a tensor without data. The arguments were checked by `add_tensor`.
    fn describe(&mut self, name: &CStr, ty: TensorType, extents: [i64; 4]) {
        // SAFETY: the arena has room for one tensor's bookkeeping (no_alloc: no data), so ggml
        // neither fails nor aborts; gguf_add_tensor copies the description before the arena is
        // freed; the name fits and is not taken, the extents are positive whole blocks.
        unsafe {
            let arena = sys::ggml_init(sys::ggml_init_params {
                mem_size: sys::ggml_tensor_overhead() * 2,
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            });
            let [ne0, ne1, ne2, ne3] = extents;
            let tensor = sys::ggml_new_tensor_4d(arena, ty.raw(), ne0, ne1, ne2, ne3);
            sys::ggml_set_name(tensor, name.as_ptr());
            ffi::gguf_add_tensor(self.handle.as_ptr(), tensor);
            sys::ggml_free(arena);
        }
    }

    /// The header's bytes, padded to where tensor data starts.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        // SAFETY: the handle is live; gguf_get_meta_data writes exactly gguf_get_meta_size bytes.
        unsafe {
            let mut bytes = vec![0u8; ffi::gguf_get_meta_size(self.handle.as_ptr())];
            ffi::gguf_get_meta_data(self.handle.as_ptr(), bytes.as_mut_ptr().cast());
            bytes
        }
    }
}

/// Bytes of a tensor, or `None` when a dimension is zero, a row is not whole blocks or it overflows.
fn tensor_bytes(ty: TensorType, shape: [u64; 4]) -> Option<u64> {
    let [row_len, rows @ ..] = shape;
    let row_bytes = ty.row_bytes(usize::try_from(row_len).ok()?).ok()? as u64;
    let total = rows
        .iter()
        .try_fold(row_bytes, |bytes, &n| bytes.checked_mul(n))?;
    (total > 0 && i64::try_from(total).is_ok()).then_some(total)
}

fn c_key(key: &str) -> Result<CString, GgufError> {
    let refuse = |reason| GgufError::Refused {
        what: key.to_owned(),
        reason,
    };
    if key.is_empty() {
        return Err(refuse("empty name"));
    }
    CString::new(key).map_err(|_| refuse("NUL byte in name"))
}
