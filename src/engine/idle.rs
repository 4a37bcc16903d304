//! Warm-up without experts: what it computes is thrown away, so no expert needs to be read for it.
//!
//! ggml writes zeros for a row whose expert index is -1. While the graph is learned, every node that
//! multiplies by routed experts gets such a list in place of the router's choice; afterwards the
//! choice is put back, since llama.cpp uses the same graph again.

use super::tap::is_on_host;
use super::tensors::set_indices;
use llama_cpp_sys_4 as sys;
use std::ptr::NonNull;

/// A list of indices that names no expert.
struct NoExperts {
    /// What `_tensor` points to.
    _indices: Vec<i32>,
    /// What nodes point to.
    _tensor: Box<sys::ggml_tensor>,
}

/// The nodes that were changed.
#[derive(Default)]
pub(super) struct IdleExperts {
    changed: Vec<(NonNull<sys::ggml_tensor>, *mut sys::ggml_tensor)>,
    lists: Vec<NoExperts>,
}

impl IdleExperts {
    /// Spares a node its experts, if it multiplies by any.
    pub(super) fn spare(&mut self, node: &mut sys::ggml_tensor) {
        if node.op != sys::GGML_OP_MUL_MAT_ID {
            return;
        }
        let choice = node.src[2];
        // SAFETY: sources of a scheduled node are null or valid for the life of the graph.
        let Some(chosen) = (unsafe { choice.as_ref() }) else {
            return;
        };
        // A list of ours is none for a device; experts that are there need no reading.
        // SAFETY: as above.
        if unsafe { node.src[0].as_ref() }.is_some_and(|weights| !is_on_host(weights)) {
            return;
        }
        let (Ok(width), Ok(rows)) = (usize::try_from(chosen.ne[0]), usize::try_from(chosen.ne[1]))
        else {
            return;
        };
        let mut indices = vec![-1_i32; width * rows];
        let mut tensor = Box::new(*chosen);
        set_indices(&mut tensor, &mut indices, width);
        node.src[2] = &raw mut *tensor;
        self.changed.push((NonNull::from(node), choice));
        self.lists.push(NoExperts {
            _indices: indices,
            _tensor: tensor,
        });
    }

    /// Puts the choices back. Called when the decode has ended, with its graph still in place.
    pub(super) fn restore(&mut self) {
        for (mut node, choice) in self.changed.drain(..) {
            // SAFETY: the graph of the decode that has just ended stays in memory until llama.cpp
            // builds the next one, and nothing else uses it now.
            unsafe { node.as_mut() }.src[2] = choice;
        }
        self.lists.clear();
    }
}
