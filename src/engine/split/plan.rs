//! How a layer's nodes are computed for some of its rows.

use super::{Routing, Tensor};
use crate::engine::tap::name_of;
use crate::engine::tensors::as_i64;
use llama_cpp_sys_4 as sys;
use std::ptr::NonNull;

/// Operands of the nodes that are known.
const MOST_OPERANDS: usize = 3;

/// Where a step takes an operand from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operand {
    None,
    /// The rows of an earlier step.
    Step(usize),
    /// Rows that were there before.
    External(usize),
    /// The slots of the rows' experts.
    Slots,
    /// The rows' experts.
    Experts,
    /// Weights of all experts, looked up by the rows' slots.
    Weights(*mut Tensor),
    /// A tensor that is the same for all rows.
    Whole(*mut Tensor),
}

/// A node that is computed row by row.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) node: NonNull<Tensor>,
    pub(super) operands: [Operand; MOST_OPERANDS],
    /// Bytes from one row to the next where rows lie without gaps; a view has those of what it views.
    pub(super) row_bytes: usize,
    /// A view into an earlier step's rows: nothing to compute.
    pub(super) is_view: bool,
    /// Where in each row a view begins.
    pub(super) view_offset: usize,
}

/// An operand from outside that has a row for each token, or for each expert of each token.
#[derive(Clone, Debug)]
pub(super) struct External {
    source: *mut Tensor,
    /// What it is; its data may have been copied.
    pub(super) tensor: Tensor,
}

impl External {
    pub(super) fn row_bytes(&self) -> usize {
        row_bytes(&self.tensor)
    }

    /// Address of a row.
    pub(super) fn row(&self, token: usize, at: usize) -> *const u8 {
        let at = if self.tensor.ne[1] == 1 { 0 } else { at };
        let offset = token * self.tensor.nb[2] + at * self.tensor.nb[1];
        self.tensor.data.cast::<u8>().wrapping_add(offset)
    }
}

/// Why a layer is left to the scheduler.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::engine) struct Unsplittable(pub(in crate::engine) String);

/// Plans `nodes`, in graph order, from the first expert multiplication to the last.
pub(super) fn plan(
    nodes: &[NonNull<Tensor>],
    routing: &Routing<'_>,
    steps: &mut Vec<Step>,
    externals: &mut Vec<External>,
) -> Result<(), Unsplittable> {
    steps.clear();
    externals.clear();
    let mut planner = Planner {
        routing,
        steps,
        externals,
    };
    for pointer in nodes {
        // SAFETY: a node of the graph that is being scheduled.
        let node = unsafe { pointer.as_ref() };
        planner.take(node).map_err(|why| {
            let name = String::from_utf8_lossy(name_of(node));
            Unsplittable(format!("{name} {why}"))
        })?;
    }
    Ok(())
}

struct Planner<'a> {
    routing: &'a Routing<'a>,
    steps: &'a mut Vec<Step>,
    externals: &'a mut Vec<External>,
}

impl Planner<'_> {
    fn take(&mut self, node: &Tensor) -> Result<(), &'static str> {
        let operands = self.operands(node)?;
        let depends = operands.iter().any(|o| matches!(o, Operand::Step(_)));
        let computes_nothing = matches!(
            node.op,
            sys::GGML_OP_NONE
                | sys::GGML_OP_RESHAPE
                | sys::GGML_OP_VIEW
                | sys::GGML_OP_PERMUTE
                | sys::GGML_OP_TRANSPOSE
        );
        if computes_nothing && !depends {
            return Ok(());
        }
        if !depends && node.op != sys::GGML_OP_MUL_MAT_ID {
            return Err("does not depend on the experts");
        }
        if !self.has_rows(node) || node.ne[1] != as_i64(self.routing.top_k) {
            return Err("is not one row a token and expert");
        }
        let mut step = Step {
            node: NonNull::from(node),
            operands,
            row_bytes: row_bytes(node),
            is_view: computes_nothing,
            view_offset: 0,
        };
        if computes_nothing {
            self.view(node, &mut step)?;
        } else if !node.view_src.is_null() {
            return Err("writes into another tensor");
        } else if !works_by_row(node.op, &operands) {
            return Err("is not known to work row by row");
        }
        self.steps.push(step);
        Ok(())
    }

    fn operands(&mut self, node: &Tensor) -> Result<[Operand; MOST_OPERANDS], &'static str> {
        let mut operands = [Operand::None; MOST_OPERANDS];
        for (index, &source) in node.src.iter().enumerate() {
            // SAFETY: sources of a node of the running graph are null or valid as long as it.
            let Some(tensor) = (unsafe { source.as_ref() }) else {
                continue;
            };
            let operand = operands
                .get_mut(index)
                .ok_or("has more operands than are known")?;
            let step = self.steps.iter().position(|s| s.node.as_ptr() == source);
            *operand = match (step, node.op, index) {
                (Some(step), ..) => Operand::Step(step),
                (None, sys::GGML_OP_MUL_MAT_ID, 2) => {
                    if !std::ptr::eq(source, self.routing.table) {
                        return Err("uses weights that are not in slots");
                    }
                    Operand::Slots
                }
                (None, sys::GGML_OP_ADD_ID, 2) => {
                    if name_of(tensor) != self.routing.choice.as_bytes() {
                        return Err("is selected by something else");
                    }
                    Operand::Experts
                }
                (None, sys::GGML_OP_MUL_MAT_ID, 0) => Operand::Weights(source),
                // Biases are looked up by expert.
                (None, sys::GGML_OP_ADD_ID, 1) => Operand::Whole(source),
                (None, sys::GGML_OP_MUL_MAT_ID, 1) if self.has_rows(tensor) => {
                    self.external(source, tensor)
                }
                _ if tensor.op == sys::GGML_OP_NONE && is_one_row(tensor) => Operand::Whole(source),
                _ if self.has_rows(tensor) => self.external(source, tensor),
                _ => Operand::Whole(source),
            };
        }
        Ok(operands)
    }

    fn external(&mut self, source: *mut Tensor, tensor: &Tensor) -> Operand {
        let known = self.externals.iter().position(|e| e.source == source);
        Operand::External(known.unwrap_or_else(|| {
            self.externals.push(External {
                source,
                tensor: *tensor,
            });
            self.externals.len() - 1
        }))
    }

    /// Whether a tensor is of 32-bit floats, one row a token or one for each expert of each token.
    fn has_rows(&self, tensor: &Tensor) -> bool {
        (tensor.ne[1] == 1 || tensor.ne[1] == as_i64(self.routing.top_k))
            && tensor.ne[2] == as_i64(self.routing.tokens)
            && tensor.ne[3] == 1
            && tensor.type_ == sys::GGML_TYPE_F32
            && tensor.nb[0] == size_of::<f32>()
            && !tensor.data.is_null()
    }

    /// Plans a view: it must be a part of each row.
    fn view(&self, node: &Tensor, step: &mut Step) -> Result<(), &'static str> {
        let Operand::Step(viewed) = step.operands[0] else {
            return Err("is a view of something unknown");
        };
        let viewed = &self.steps[viewed];
        // SAFETY: as in `plan`.
        let source = unsafe { viewed.node.as_ref() };
        let offset = (node.data as usize).wrapping_sub(source.data as usize);
        let fits = offset
            .checked_add(row_bytes(node))
            .is_some_and(|end| end <= row_bytes(source));
        let same = node.nb[1] == source.nb[1] && node.nb[2] == source.nb[2];
        if node.op != sys::GGML_OP_VIEW || !fits || !same {
            return Err("is not a part of each row");
        }
        step.row_bytes = viewed.row_bytes;
        step.view_offset = offset;
        Ok(())
    }
}

/// Whether an operation computes each row from the same row of its operands and from what is the
/// same for all.
fn works_by_row(op: sys::ggml_op, operands: &[Operand; MOST_OPERANDS]) -> bool {
    let [first, second, third] = operands;
    let rows = |operand: &Operand| matches!(operand, Operand::Step(_) | Operand::External(_));
    let same_for_all = |operand: &Operand| match operand {
        // What the graph computes may be overwritten before the last group.
        // SAFETY: as in `Planner::operands`.
        Operand::Whole(tensor) => unsafe { tensor.as_ref() }
            .is_some_and(|tensor| tensor.op == sys::GGML_OP_NONE && is_one_row(tensor)),
        _ => false,
    };
    match op {
        sys::GGML_OP_MUL_MAT_ID => rows(second) && *third == Operand::Slots,
        sys::GGML_OP_ADD_ID => rows(first) && *third == Operand::Experts,
        sys::GGML_OP_MUL | sys::GGML_OP_ADD => {
            rows(first) && (rows(second) || same_for_all(second))
        }
        sys::GGML_OP_GLU => rows(first) && (rows(second) || *second == Operand::None),
        sys::GGML_OP_UNARY | sys::GGML_OP_SCALE | sys::GGML_OP_CLAMP | sys::GGML_OP_SQR => {
            rows(first) && *second == Operand::None
        }
        _ => false,
    }
}

fn is_one_row(tensor: &Tensor) -> bool {
    tensor.ne[1] == 1 && tensor.ne[2] == 1 && tensor.ne[3] == 1
}

fn row_bytes(tensor: &Tensor) -> usize {
    usize::try_from(tensor.ne[0]).unwrap_or(0) * size_of::<f32>()
}
