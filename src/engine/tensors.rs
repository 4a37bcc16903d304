//! Tensors of ours that stand beside those of llama.cpp's graph.

use llama_cpp_sys_4 as sys;
use std::ffi::c_void;

/// A tensor without anything in it.
pub(super) fn blank() -> sys::ggml_tensor {
    // SAFETY: all of the struct's fields are numbers and pointers, for which zero is valid.
    unsafe { std::mem::zeroed() }
}

/// Makes a tensor the table of `indices`, `width` for each token, and leaves its name and buffer as
/// they are. The indices must stay where they are while the tensor is used.
pub(super) fn set_indices(tensor: &mut sys::ggml_tensor, indices: &mut [i32], width: usize) {
    let (bytes, row_bytes) = (size_of_val(indices), width * size_of::<i32>());
    tensor.type_ = sys::GGML_TYPE_I32;
    tensor.op = sys::GGML_OP_NONE;
    tensor.ne = [as_i64(width), as_i64(indices.len() / width.max(1)), 1, 1];
    tensor.nb = [size_of::<i32>(), row_bytes, bytes, bytes];
    tensor.data = indices.as_mut_ptr().cast::<c_void>();
    tensor.view_src = std::ptr::null_mut();
}

/// A length as ggml writes it.
pub(super) fn as_i64(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
