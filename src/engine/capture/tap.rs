//! The graph callback of a capture.

use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use llama_cpp_sys_4 as sys;

use super::{CaptureError, Row, Sink};

/// What the graph callback needs.
pub(super) struct Tap<'a, 's> {
    prefix: String,
    layers: usize,
    sink: &'a mut Sink<'s>,
    first_position: usize,
    rows_seen: Vec<usize>,
    failure: Option<CaptureError>,
}

impl<'a, 's> Tap<'a, 's> {
    pub(super) fn new(prefix: &str, layers: usize, sink: &'a mut Sink<'s>) -> Self {
        let prefix = format!("{prefix}-");
        Self {
            prefix,
            layers,
            sink,
            first_position: 0,
            rows_seen: vec![0; layers],
            failure: None,
        }
    }

    pub(super) fn begin(&mut self, first_position: usize) {
        self.first_position = first_position;
        self.rows_seen.fill(0);
    }

    /// Reports what went wrong during the batch: a stopped callback does not fail the decode.
    pub(super) fn finish(&mut self, tokens: usize) -> Result<(), CaptureError> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        match self.rows_seen.iter().position(|&rows| rows != tokens) {
            Some(layer) => Err(CaptureError::Tensor {
                name: format!("{}{layer}", self.prefix),
            }),
            None => Ok(()),
        }
    }

    /// The layer of the tensor, when it is one of those looked for.
    fn layer_of(&self, tensor: &sys::ggml_tensor) -> Option<usize> {
        // SAFETY: ggml keeps names NUL-terminated within their array.
        let name = unsafe { CStr::from_ptr(tensor.name.as_ptr()) };
        let layer = name
            .to_str()
            .ok()?
            .strip_prefix(&self.prefix)?
            .parse()
            .ok()?;
        (layer < self.layers).then_some(layer)
    }

    /// Whether the graph shall go on (`ask` false) or stop at this tensor (`ask` true).
    fn visit(&mut self, tensor: &sys::ggml_tensor, ask: bool) -> bool {
        let Some(layer) = self.layer_of(tensor) else {
            return !ask;
        };
        if ask {
            return true;
        }
        if self.failure.is_none() {
            self.failure = self.hand_out(tensor, layer).err();
        }
        self.failure.is_none() && layer + 1 < self.layers
    }

    fn hand_out(&mut self, tensor: &sys::ggml_tensor, layer: usize) -> Result<(), CaptureError> {
        let floats = tensor.type_ == sys::GGML_TYPE_F32;
        let missing = || CaptureError::Tensor {
            name: format!("{}{layer}", self.prefix),
        };
        let width = usize::try_from(tensor.ne[0]).map_err(|_| missing())?;
        let rows = usize::try_from(tensor.ne[1]).map_err(|_| missing())?;
        let stride = tensor.nb[1];
        let plain = (floats || tensor.type_ == sys::GGML_TYPE_I32)
            && tensor.nb[0] == 4
            && stride.is_multiple_of(4)
            && tensor.ne[2] * tensor.ne[3] == 1
            && !tensor.data.is_null()
            && tensor.data.cast::<u32>().is_aligned()
            && is_host(tensor);
        if !plain {
            return Err(missing());
        }
        for row in 0..rows {
            // SAFETY: the tensor was computed just now and lies in host memory; row `row` starts
            // at `row * stride` and has `width` values of 4 bytes, aligned to 4.
            let values = unsafe {
                let start = tensor.data.cast::<u8>().add(row * stride);
                if floats {
                    Row::Floats(std::slice::from_raw_parts(start.cast(), width))
                } else {
                    Row::Ints(std::slice::from_raw_parts(start.cast(), width))
                }
            };
            (self.sink)(layer, self.first_position + row, values).map_err(CaptureError::Sink)?;
        }
        self.rows_seen[layer] = rows;
        Ok(())
    }
}

fn is_host(tensor: &sys::ggml_tensor) -> bool {
    let owner = if tensor.view_src.is_null() {
        tensor
    } else {
        // SAFETY: a view's source lives as long as the graph that is being evaluated.
        unsafe { &*tensor.view_src }
    };
    // SAFETY: the buffer pointer is ggml's own and checked for null.
    !owner.buffer.is_null() && unsafe { sys::ggml_backend_buffer_is_host(owner.buffer) }
}

/// llama.cpp's graph callback; `user_data` is the [`Tap`] of the running capture.
pub(super) unsafe extern "C" fn on_tensor(
    tensor: *mut sys::ggml_tensor,
    ask: bool,
    user_data: *mut c_void,
) -> bool {
    // SAFETY: ggml passes a live tensor, and `Context` its own tap, which it frees after the context
    // and hands to nobody while a decode runs.
    let (tap, tensor) = unsafe { (&mut *user_data.cast::<Tap<'_, '_>>(), &*tensor) };
    match catch_unwind(AssertUnwindSafe(|| tap.visit(tensor, ask))) {
        Ok(answer) => answer,
        Err(_) => {
            tap.failure = Some(CaptureError::Panicked);
            false
        }
    }
}
