//! Which tensors an architecture has, asked of llama.cpp itself: it builds a model from metadata alone
//! and tells each tensor that it made.

use crate::gguf_writer::Gguf;
use llama_cpp_sys_4 as sys;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;

/// A tensor that an architecture may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub name: String,
    /// Innermost first, without outer dimensions of one.
    pub dims: Vec<u64>,
}

/// `struct gguf_init_params`, which the bindings leave out together with the calls below.
#[repr(C)]
struct InitParams {
    no_alloc: bool,
    ctx: *mut *mut sys::ggml_context,
}

unsafe extern "C" {
    fn gguf_init_from_file(path: *const c_char, params: InitParams) -> *mut sys::gguf_context;
    fn gguf_free(gguf: *mut sys::gguf_context);
}

/// Every tensor that llama.cpp makes for this metadata, optional ones included. `None` when it makes
/// no model of it; it has said why on stderr then.
pub fn tensors(metadata: &Gguf, folder: &Path) -> Option<Vec<Wanted>> {
    let path = metadata.write(folder, "metadata.gguf");
    let path = CString::new(path.to_str().expect("UTF-8 path")).expect("no NUL");
    let mut wanted: Vec<Wanted> = Vec::new();
    // SAFETY: the path is NUL-terminated; the header is freed after the model that was made from it;
    // `wanted` outlives the call in which `note` uses it.
    let made = unsafe {
        let header = gguf_init_from_file(
            path.as_ptr(),
            InitParams {
                no_alloc: true,
                ctx: std::ptr::null_mut(),
            },
        );
        assert!(!header.is_null(), "ggml refuses the metadata");
        let mut params = sys::llama_model_default_params();
        params.n_gpu_layers = 0;
        let model = sys::llama_model_init_from_user(
            header,
            Some(note),
            (&raw mut wanted).cast::<c_void>(),
            params,
        );
        let made = !model.is_null();
        if made {
            sys::llama_model_free(model);
        }
        gguf_free(header);
        made
    };
    // Tensors that are used twice, such as a tied embedding, are told twice.
    let mut seen = std::collections::HashSet::new();
    wanted.retain(|tensor| seen.insert(tensor.name.clone()));
    made.then_some(wanted)
}

unsafe extern "C" fn note(tensor: *mut sys::ggml_tensor, wanted: *mut c_void) {
    // SAFETY: llama.cpp passes a valid tensor and back the pointer to the list that `tensors` gave it.
    let (tensor, wanted) = unsafe { (&*tensor, &mut *wanted.cast::<Vec<Wanted>>()) };
    // SAFETY: ggml keeps names NUL-terminated in their array.
    let name = unsafe { CStr::from_ptr(tensor.name.as_ptr()) };
    let mut dims: Vec<u64> = tensor.ne.iter().map(|&n| n.unsigned_abs()).collect();
    while dims.len() > 1 && dims.last() == Some(&1) {
        dims.pop();
    }
    wanted.push(Wanted {
        name: name.to_str().expect("UTF-8 name").to_owned(),
        dims,
    });
}
