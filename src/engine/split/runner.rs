//! Small graphs of tensors of ours, computed by ggml on the context's threads.

use super::{ALIGN, Tensor};
use llama_cpp_sys_4 as sys;
use std::ptr::NonNull;

/// A graph of ggml's that is filled and computed again and again.
pub(super) struct Runner {
    context: *mut sys::ggml_context,
    graph: Option<NonNull<sys::ggml_cgraph>>,
    pool: Option<(NonNull<sys::ggml_threadpool>, i32)>,
    work: Vec<u8>,
}

impl Runner {
    /// A graph of at most `nodes`.
    pub(super) fn new(nodes: usize) -> Self {
        // SAFETY: ggml allocates its context itself, with room for one graph.
        let (context, graph) = unsafe {
            let context = sys::ggml_init(sys::ggml_init_params {
                mem_size: sys::ggml_graph_overhead_custom(nodes, false)
                    + sys::ggml_tensor_overhead(),
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            });
            let graph = if context.is_null() {
                std::ptr::null_mut()
            } else {
                sys::ggml_new_graph_custom(context, nodes, false)
            };
            (context, graph)
        };
        Self {
            context,
            graph: NonNull::new(graph),
            pool: None,
            work: Vec::new(),
        }
    }

    pub(super) fn use_threads(&mut self, pool: NonNull<sys::ggml_threadpool>, threads: u32) {
        self.pool = Some((pool, i32::try_from(threads).unwrap_or(1)));
    }

    pub(super) fn is_able(&self) -> bool {
        self.graph.is_some() && self.pool.is_some()
    }

    /// Computes tensors in order.
    ///
    /// # Errors
    /// In words, when ggml fails.
    pub(super) fn run(
        &mut self,
        results: impl Iterator<Item = NonNull<Tensor>>,
    ) -> Result<(), String> {
        let (Some(graph), Some((pool, threads))) = (self.graph, self.pool) else {
            return Err("there are no threads to compute experts with".to_owned());
        };
        // SAFETY: the graph is ours; the tensors outlive the computation, and their operands are
        // tensors of ours or of the running graph. The scheduler has nothing under way while it
        // asks about a node, so its threads are free.
        let status = unsafe {
            sys::ggml_graph_clear(graph.as_ptr());
            for result in results {
                sys::ggml_graph_add_node(graph.as_ptr(), result.as_ptr());
            }
            let mut plan = sys::ggml_graph_plan(graph.as_ptr(), threads, pool.as_ptr());
            let needed = plan.work_size + ALIGN;
            // Nobody reads what is in it before: it need not be zeroed.
            if self.work.capacity() < needed {
                self.work = Vec::with_capacity(needed);
            }
            let skip = self.work.as_ptr().align_offset(ALIGN);
            plan.work_data = self.work.as_mut_ptr().add(skip);
            sys::ggml_graph_compute(graph.as_ptr(), &raw mut plan)
        };
        if status == sys::GGML_STATUS_SUCCESS {
            Ok(())
        } else {
            Err(format!("ggml could not compute experts (status {status})"))
        }
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        if !self.context.is_null() {
            // SAFETY: made in `new` and freed once; the graph lies in it.
            unsafe { sys::ggml_free(self.context) };
        }
    }
}
