//! Routed experts, each computed as soon as it has been read.
//!
//! `MUL_MAT_ID` takes all routed experts at once and so waits for the last of them. From a layer's
//! first expert multiplication to its last, every row belongs to one token and one expert, and
//! nothing goes from row to row. So while some experts are still on their way, these nodes are
//! computed here, by ggml itself on the same threads, for the rows of the experts that are there:
//! the same kernels on the same numbers, hence the same bits. The last node's rows are put where it
//! would have put them, and the scheduler passes the nodes over.
//!
//! A layer with anything in between that is not known to work row by row, or is used later on, is
//! left to the scheduler.

mod plan;
mod runner;

pub(super) use self::plan::Unsplittable;

use self::plan::{External, Operand, Step};
use self::runner::Runner;
use super::tensors::{as_i64, blank, set_indices};
use llama_cpp_sys_4 as sys;
use std::ffi::c_void;
use std::ptr::NonNull;

type Tensor = sys::ggml_tensor;

/// Nodes from a layer's first expert multiplication to its last. The longest chain that llama.cpp
/// builds has about twelve.
const MOST_NODES: usize = 32;

/// Rows of one group, unless a single expert has more: bounds the memory for what lies between.
pub(super) const MOST_ROWS: usize = 1024;

/// Bytes to which parts of the scratch memory are aligned.
const ALIGN: usize = 64;

/// A layer's routing: `top_k` experts for each of `tokens`, token by token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Routing<'a> {
    pub(super) top_k: usize,
    pub(super) tokens: usize,
    pub(super) slots: &'a [i32],
    pub(super) experts: &'a [i32],
    /// Name of the tensor that selects the experts.
    pub(super) choice: &'a str,
    /// The table of slots that multiplications by expert read.
    pub(super) table: *const Tensor,
}

/// Computes layers in groups of rows.
pub(super) struct Splitter {
    collecting: bool,
    nodes: Vec<NonNull<Tensor>>,
    steps: Vec<Step>,
    externals: Vec<External>,
    /// Copies of externals that the last node's result would overwrite.
    saved: Vec<u64>,
    /// Operands and results of one group: see [`Self::lay_out`].
    tensors: Vec<Tensor>,
    /// The part of each step's weights that the group needs.
    weights: Vec<Tensor>,
    scratch: Vec<u64>,
    slots: Vec<i32>,
    experts: Vec<i32>,
    /// Nodes that the scheduler is to pass over, and what they do.
    silenced: Vec<(NonNull<Tensor>, sys::ggml_op)>,
    runner: Runner,
}

impl Splitter {
    pub(super) fn new() -> Self {
        Self {
            collecting: false,
            nodes: Vec::with_capacity(MOST_NODES),
            steps: Vec::with_capacity(MOST_NODES),
            externals: Vec::new(),
            saved: Vec::new(),
            tensors: Vec::new(),
            weights: Vec::new(),
            scratch: Vec::new(),
            slots: Vec::new(),
            experts: Vec::new(),
            silenced: Vec::new(),
            runner: Runner::new(MOST_NODES),
        }
    }

    /// The threads that compute; those of the context, which is idle meanwhile.
    pub(super) fn use_threads(&mut self, pool: NonNull<sys::ggml_threadpool>, threads: u32) {
        self.runner.use_threads(pool, threads);
    }

    /// Whether there is anything to compute with.
    pub(super) fn is_able(&self) -> bool {
        self.runner.is_able()
    }

    /// Begins to collect a layer's nodes.
    pub(super) fn begin(&mut self) {
        self.collecting = true;
        self.nodes.clear();
    }

    /// Whether a layer is being collected: its nodes are not computed, and nothing was waited for.
    pub(super) const fn is_collecting(&self) -> bool {
        self.collecting
    }

    /// Ends collecting.
    pub(super) fn stop(&mut self) {
        self.collecting = false;
    }

    /// Takes in a node of the layer. False when there are too many.
    pub(super) fn collect(&mut self, node: &mut Tensor) -> bool {
        self.nodes.push(NonNull::from(node));
        self.nodes.len() < MOST_NODES
    }

    /// Finds out how the collected nodes are computed.
    ///
    /// # Errors
    /// [`Unsplittable`] when they must be computed as they are.
    pub(super) fn plan(&mut self, routing: &Routing<'_>) -> Result<(), Unsplittable> {
        plan::plan(&self.nodes, routing, &mut self.steps, &mut self.externals)?;
        self.save_externals();
        Ok(())
    }

    /// Copies what the last node's result would overwrite while it is still needed: the graph's
    /// memory is used again along its order.
    fn save_externals(&mut self) {
        let Some(last) = self.steps.last() else {
            return;
        };
        // SAFETY: a node of the graph that is being scheduled.
        let result = span(unsafe { last.node.as_ref() });
        let overlaps = |external: &External| {
            let (start, end) = span(&external.tensor);
            start < result.1 && result.0 < end
        };
        let words = |external: &External| {
            let (start, end) = span(&external.tensor);
            (end - start).div_ceil(8)
        };
        let needed: usize = self
            .externals
            .iter()
            .filter(|e| overlaps(e))
            .map(words)
            .sum();
        if self.saved.len() < needed {
            self.saved.resize(needed, 0);
        }
        let mut at = 0;
        for external in self.externals.iter_mut().filter(|e| overlaps(e)) {
            let (start, end) = span(&external.tensor);
            // SAFETY: the external's own range, and a buffer that was just made long enough.
            unsafe {
                let to = self.saved.as_mut_ptr().add(at).cast::<u8>();
                std::ptr::copy_nonoverlapping(start as *const u8, to, end - start);
                external.tensor.data = to.cast::<c_void>();
            }
            at += (end - start).div_ceil(8);
        }
    }

    /// Computes the planned steps for some rows of the routing and puts the results in place.
    ///
    /// # Errors
    /// In words, when ggml fails.
    pub(super) fn compute(&mut self, rows: &[usize], routing: &Routing<'_>) -> Result<(), String> {
        let slots = || rows.iter().map(|&row| routing.slots[row]);
        let lowest = slots().min().unwrap_or(0);
        let span = slots().max().unwrap_or(0) - lowest + 1;
        self.slots.clear();
        self.slots.extend(slots().map(|slot| slot - lowest));
        self.experts.clear();
        self.experts
            .extend(rows.iter().map(|&row| routing.experts[row]));
        self.lay_out(rows, routing.top_k);
        self.lay_out_weights(lowest, span);
        self.link();
        let first = 2 + self.externals.len();
        let results = self.tensors[first..]
            .iter_mut()
            .zip(&self.steps)
            .filter(|(_, step)| !step.is_view)
            .map(|(tensor, _)| NonNull::from(tensor));
        self.runner.run(results)?;
        self.place(rows, routing.top_k);
        Ok(())
    }

    /// Makes the tensors of a group: two lists of indices, the rows of each external operand, and one
    /// result a step. Each has the group's rows one after the other, as if they were one token's.
    fn lay_out(&mut self, rows: &[usize], top_k: usize) {
        let count = rows.len();
        let area = |row_bytes: usize| (row_bytes * count).next_multiple_of(ALIGN);
        let inputs: usize = self.externals.iter().map(|e| area(e.row_bytes())).sum();
        let computed = self.steps.iter().filter(|s| !s.is_view);
        let bytes = inputs + computed.map(|s| area(s.row_bytes)).sum::<usize>();
        if self.scratch.len() * 8 < bytes + ALIGN {
            self.scratch.resize((bytes + ALIGN).div_ceil(8), 0);
        }
        let scratch = self.scratch.as_mut_ptr().cast::<u8>();
        let mut at = scratch.align_offset(ALIGN);
        self.tensors.clear();
        self.tensors.push(index_list(&mut self.slots));
        self.tensors.push(index_list(&mut self.experts));
        for external in &self.externals {
            // SAFETY: the scratch memory has room for the rows of every operand and result, and
            // the external has a row for each of the routing's.
            unsafe {
                let to = scratch.add(at);
                for (position, &row) in rows.iter().enumerate() {
                    std::ptr::copy_nonoverlapping(
                        external.row(row / top_k, row % top_k),
                        to.add(position * external.row_bytes()),
                        external.row_bytes(),
                    );
                }
                let tensor = compact(&external.tensor, to, external.row_bytes(), count);
                self.tensors.push(tensor);
            }
            at += area(external.row_bytes());
        }
        for step in &self.steps {
            // SAFETY: nodes of the graph that is being scheduled; the scratch memory as above.
            unsafe {
                let data = match step.operands[0] {
                    Operand::Step(viewed) if step.is_view => {
                        let viewed = &self.tensors[2 + self.externals.len() + viewed];
                        viewed.data.cast::<u8>().add(step.view_offset)
                    }
                    _ => {
                        let data = scratch.add(at);
                        at += area(step.row_bytes);
                        data
                    }
                };
                let tensor = compact(step.node.as_ref(), data, step.row_bytes, count);
                self.tensors.push(tensor);
            }
        }
    }

    /// Makes each step's weights, where it has any, a tensor of the slots that the group uses, of which
    /// the lowest may lie before the first that the node knows: ggml does some work for every expert
    /// of a tensor.
    fn lay_out_weights(&mut self, lowest: i32, span: i32) {
        self.weights.clear();
        for step in &self.steps {
            let mut weights = blank();
            if let Operand::Weights(whole) = step.operands[0] {
                // SAFETY: the weights of a node of the graph that is being scheduled, which reach as
                // far as the routing's slots.
                weights = unsafe { *whole };
                let stride = weights.nb[2];
                let skip = i64::from(lowest) * i64::try_from(stride).unwrap_or(0);
                let skip = isize::try_from(skip).unwrap_or(0);
                weights.data = weights.data.wrapping_byte_offset(skip);
                weights.ne[2] = i64::from(span);
                weights.nb[3] = stride * usize::try_from(span).unwrap_or(0);
            }
            self.weights.push(weights);
        }
    }

    /// Points the tensors at each other, now that they stay where they are.
    fn link(&mut self) {
        let base = self.tensors.as_mut_ptr();
        let weights = self.weights.as_mut_ptr();
        let first = 2 + self.externals.len();
        for (index, step) in self.steps.iter().enumerate() {
            // SAFETY: `lay_out` made two lists, one tensor an external and one a step, and
            // `lay_out_weights` one a step.
            unsafe {
                let tensor = &mut *base.add(first + index);
                for (source, operand) in tensor.src.iter_mut().zip(step.operands) {
                    *source = match operand {
                        Operand::None => std::ptr::null_mut(),
                        Operand::Step(at) => base.add(first + at),
                        Operand::External(at) => base.add(2 + at),
                        Operand::Slots => base,
                        Operand::Experts => base.add(1),
                        Operand::Weights(_) => weights.add(index),
                        Operand::Whole(whole) => whole,
                    };
                }
            }
        }
    }

    /// Puts the last step's rows where the node would have put them.
    fn place(&mut self, rows: &[usize], top_k: usize) {
        let (Some(step), Some(result)) = (self.steps.last(), self.tensors.last()) else {
            return;
        };
        // SAFETY: `plan` saw that the node has a row for each of the routing's; nothing else uses
        // its memory now, and what it would overwrite was saved.
        unsafe {
            let node = step.node.as_ref();
            for (position, &row) in rows.iter().enumerate() {
                let to = (row / top_k) * node.nb[2] + (row % top_k) * node.nb[1];
                std::ptr::copy_nonoverlapping(
                    result.data.cast::<u8>().add(position * step.row_bytes),
                    node.data.cast::<u8>().add(to),
                    step.row_bytes,
                );
            }
        }
    }

    /// Has the scheduler pass over the nodes that were computed here.
    pub(super) fn finish(&mut self) {
        for step in self.steps.iter().filter(|step| !step.is_view) {
            let mut pointer = step.node;
            // SAFETY: a node of the graph that is being scheduled; nothing else uses it now.
            let node = unsafe { pointer.as_mut() };
            self.silenced.push((pointer, node.op));
            node.op = sys::GGML_OP_NONE;
        }
    }

    /// Whether there are nodes that the scheduler is to pass over.
    pub(super) const fn has_silenced(&self) -> bool {
        !self.silenced.is_empty()
    }

    /// Gives the nodes back what they do. Called when the scheduler has passed them over, or when the
    /// decode has ended, with their graph still in place: a decode of several micro-batches uses a
    /// graph again or builds another one where it was.
    pub(super) fn restore(&mut self) {
        for (mut node, op) in self.silenced.drain(..) {
            // SAFETY: by the caller the graph is still there, and nothing else uses it now.
            unsafe { node.as_mut() }.op = op;
        }
    }
}

/// The addresses between which a tensor's data lies.
fn span(tensor: &Tensor) -> (usize, usize) {
    let start = tensor.data as usize;
    // SAFETY: a tensor of the running graph.
    (start, start + unsafe { sys::ggml_nbytes(tensor) })
}

/// A tensor like `like` over `count` rows at `data`.
fn compact(like: &Tensor, data: *mut u8, row_bytes: usize, count: usize) -> Tensor {
    let mut tensor = *like;
    tensor.ne[1] = as_i64(count);
    tensor.ne[2] = 1;
    tensor.ne[3] = 1;
    tensor.nb[1] = row_bytes;
    tensor.nb[2] = row_bytes * count;
    tensor.nb[3] = tensor.nb[2];
    tensor.view_src = std::ptr::null_mut();
    tensor.view_offs = 0;
    tensor.data = data.cast::<c_void>();
    tensor
}

/// A list of indices as a tensor, all of one token.
fn index_list(list: &mut [i32]) -> Tensor {
    let mut tensor = blank();
    let width = list.len();
    set_indices(&mut tensor, list, width);
    tensor
}

#[cfg(test)]
mod tests;
