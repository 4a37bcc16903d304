//! Which experts a coming layer will probably choose: its router applied to this layer's input.
//!
//! The residual stream changes little from one layer to the next, so the router of layer `l + n`
//! mostly chooses the same on what layer `l`'s router saw, once the scale of the norms between them
//! is corrected. A guess is used for reading ahead only; nothing is computed from it.

use super::tap::name_of;
use llama_cpp_sys_4 as sys;
use std::collections::HashMap;

/// Nodes between a router's product and its choice: softmax, biases, groups, sort, view.
const MOST_HOPS: usize = 12;

/// An expert and the router's logit for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guess {
    /// Index in its layer.
    pub expert: i32,
    /// By how much its logit exceeds that of the first one not chosen.
    pub margin: f32,
}

/// One layer's router, copied out of the model.
struct Router {
    block: u32,
    top_k: usize,
    /// Rows of `width`, one an expert, times the norm's weight.
    rows: Vec<f32>,
    width: usize,
    /// 1 / weight of the norm in front of it.
    unscale: Vec<f32>,
}

/// Routers of all layers that could be understood.
pub(super) struct Lookahead {
    /// In graph order.
    routers: Vec<Router>,
    at_block: HashMap<u32, usize>,
    input: Vec<f32>,
    logits: Vec<(f32, i32)>,
    guesses: Vec<Guess>,
}

/// Follows a router's choice back to the product that it was made from.
fn product(choice: &sys::ggml_tensor) -> Option<&sys::ggml_tensor> {
    let mut node = choice;
    for _ in 0..MOST_HOPS {
        if node.op == sys::GGML_OP_MUL_MAT {
            return Some(node);
        }
        // SAFETY: sources of a node of the running graph are null or valid as long as the graph.
        node = unsafe { node.src[0].as_ref() }?;
    }
    None
}

/// The values of a one- or two-dimensional tensor of 32-bit floats in host memory.
///
/// # Safety
/// The tensor's data must be valid host memory.
unsafe fn floats(tensor: &sys::ggml_tensor) -> Option<&[f32]> {
    let (width, rows) = (
        usize::try_from(tensor.ne[0]).ok()?,
        usize::try_from(tensor.ne[1]).ok()?,
    );
    let plain = tensor.type_ == sys::GGML_TYPE_F32
        && tensor.nb[0] == size_of::<f32>()
        && tensor.nb[1] == width * size_of::<f32>()
        && tensor.ne[2] * tensor.ne[3] == 1
        && !tensor.data.is_null()
        && tensor.data.cast::<f32>().is_aligned();
    // SAFETY: by the caller, and the shape was just checked.
    plain.then(|| unsafe { std::slice::from_raw_parts(tensor.data.cast::<f32>(), width * rows) })
}

impl Lookahead {
    pub(super) fn new() -> Self {
        Self {
            routers: Vec::new(),
            at_block: HashMap::new(),
            input: Vec::new(),
            logits: Vec::new(),
            guesses: Vec::new(),
        }
    }

    /// Learns a layer's router from the node of its choice.
    pub(super) fn learn(&mut self, block: u32, choice: &sys::ggml_tensor) {
        if !self.at_block.contains_key(&block)
            && let Some(router) = Router::new(block, choice)
        {
            self.at_block.insert(block, self.routers.len());
            self.routers.push(router);
        }
    }

    /// What the layer `ahead` layers after `block` will probably choose for the one token of `choice`.
    pub(super) fn guess(
        &mut self,
        block: u32,
        choice: &sys::ggml_tensor,
        ahead: usize,
    ) -> Option<(u32, &[Guess])> {
        let at = *self.at_block.get(&block)?;
        let (here, there) = (self.routers.get(at)?, self.routers.get(at + ahead)?);
        // SAFETY: as in `product`.
        let input = unsafe { product(choice)?.src[1].as_ref() }?;
        // SAFETY: the experts' matmuls, which come later, use this tensor, so it is still there.
        let input = unsafe { floats(input) }?;
        if input.len() != here.width || here.width != there.width {
            return None;
        }
        self.input.clear();
        self.input
            .extend(input.iter().zip(&here.unscale).map(|(x, u)| x * u));
        self.logits.clear();
        for (expert, row) in there.rows.chunks_exact(there.width).enumerate() {
            self.logits
                .push((dot(row, &self.input), i32::try_from(expert).unwrap_or(0)));
        }
        let top_k = there.top_k;
        if self.logits.len() <= top_k {
            return None;
        }
        self.logits
            .select_nth_unstable_by(top_k, |a, b| b.0.total_cmp(&a.0));
        let first_out = self.logits[top_k].0;
        self.guesses.clear();
        self.guesses
            .extend(self.logits[..top_k].iter().map(|&(logit, expert)| Guess {
                expert,
                margin: logit - first_out,
            }));
        self.guesses
            .sort_unstable_by(|a, b| b.margin.total_cmp(&a.margin));
        Some((there.block, &self.guesses))
    }
}

impl Router {
    fn new(block: u32, choice: &sys::ggml_tensor) -> Option<Self> {
        let product = product(choice)?;
        // SAFETY: as in `product`.
        let (weights, input) = unsafe { (product.src[0].as_ref()?, product.src[1].as_ref()?) };
        let width = usize::try_from(weights.ne[0]).ok()?;
        // SAFETY: weights of the loaded model are mapped, and the CPU backend's are host memory.
        let rows = unsafe { floats(weights) }?;
        let scale = if input.op == sys::GGML_OP_MUL {
            // SAFETY: as in `product`; a norm's weight is the model's, as above.
            unsafe { input.src[1].as_ref().and_then(|t| floats(t)) }
        } else {
            None
        };
        let scale = scale.filter(|s| s.len() == width && s.iter().all(|&x| x.abs() > 1e-6));
        let (rows, unscale) = match scale {
            Some(scale) => (
                rows.iter()
                    .zip(scale.iter().cycle())
                    .map(|(w, s)| w * s)
                    .collect(),
                scale.iter().map(|s| 1.0 / s).collect(),
            ),
            None => (rows.to_vec(), vec![1.0; width]),
        };
        tracing::debug!(
            "router of block {block}: {} scaled {}",
            String::from_utf8_lossy(name_of(weights)),
            scale.is_some()
        );
        Some(Self {
            block,
            top_k: usize::try_from(choice.ne[0]).ok()?,
            rows,
            width,
            unscale,
        })
    }
}

/// Inner product in lanes, which the compiler turns into vector instructions.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0_f32; LANES];
    let (heads_a, tail_a) = a.as_chunks::<LANES>();
    let (heads_b, tail_b) = b.as_chunks::<LANES>();
    for (x, y) in heads_a.iter().zip(heads_b) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * y[lane];
        }
    }
    let tail: f32 = tail_a.iter().zip(tail_b).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f32>() + tail
}

#[cfg(test)]
mod tests {
    use super::dot;

    #[test]
    fn inner_products_take_every_element_once() {
        let a: Vec<f32> = (0..37_u8).map(f32::from).collect();
        let ones = vec![1.0; 37];
        assert!((dot(&a, &ones) - 666.0).abs() < 1e-3);
    }
}
