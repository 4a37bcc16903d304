use super::*;
use crate::engine::Poll;
use crate::engine::threads::ThreadPools;

const WIDTH: i64 = 32;
const HIDDEN: i64 = 48;
const EXPERTS: i64 = 6;
const TOP_K: usize = 4;
/// What is routed, token by token.
const CHOICES: [i32; 12] = [5, 0, 3, 2, 3, 5, 1, 0, 2, 3, 4, 5];

/// How a layer is put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Gate and up in two tensors.
    Split,
    /// Gate and up in one tensor, and biases.
    FusedWithBiases,
    /// With an operation that the planner does not know.
    Unknown,
}

/// One layer's graph in memory of ggml's.
struct Layer {
    context: *mut sys::ggml_context,
    graph: *mut sys::ggml_cgraph,
    /// Position of the first and the last expert multiplication among the nodes.
    first: usize,
    last: usize,
    tokens: usize,
}

impl Layer {
    fn new(kind: Kind, tokens: usize) -> Self {
        // SAFETY: plain calls into ggml with tensors of one context, which lives as long as `self`.
        unsafe {
            let context = sys::ggml_init(sys::ggml_init_params {
                mem_size: 16 << 20,
                mem_buffer: std::ptr::null_mut(),
                no_alloc: false,
            });
            let f32s = sys::GGML_TYPE_F32;
            let tensor = |ne: [i64; 3], seed: u32| {
                let tensor = sys::ggml_new_tensor_3d(context, f32s, ne[0], ne[1], ne[2]);
                fill(tensor, seed);
                tensor
            };
            let count = i64::try_from(tokens).unwrap();
            let input = tensor([WIDTH, 1, count], 1);
            let ids = sys::ggml_new_tensor_2d(context, sys::GGML_TYPE_I32, 4, count);
            std::ptr::copy_nonoverlapping(
                CHOICES.as_ptr(),
                (*ids).data.cast::<i32>(),
                tokens * TOP_K,
            );
            sys::ggml_set_name(ids, c"topk-0".as_ptr());
            let multiply = |weights, x| sys::ggml_mul_mat_id(context, weights, x, ids);
            let (gate, up) = if kind == Kind::FusedWithBiases {
                let both = multiply(tensor([WIDTH, 2 * HIDDEN, EXPERTS], 2), input);
                let biases = tensor([2 * HIDDEN, EXPERTS, 1], 3);
                let both = sys::ggml_add_id(context, both, biases, ids);
                let (row, plane) = ((*both).nb[1], (*both).nb[2]);
                let part =
                    |offset| sys::ggml_view_3d(context, both, HIDDEN, 4, count, row, plane, offset);
                (part(0), part(size_of::<f32>() * 48))
            } else {
                let up = multiply(tensor([WIDTH, HIDDEN, EXPERTS], 2), input);
                (multiply(tensor([WIDTH, HIDDEN, EXPERTS], 3), input), up)
            };
            let mut hidden = sys::ggml_swiglu_split(context, gate, up);
            if kind == Kind::Unknown {
                hidden = sys::ggml_mul(context, hidden, sys::ggml_sum_rows(context, hidden));
            }
            let hidden = sys::ggml_clamp(context, hidden, -0.4, 0.4);
            let down = multiply(tensor([HIDDEN, WIDTH, EXPERTS], 4), hidden);
            let graph = sys::ggml_new_graph_custom(context, 64, false);
            sys::ggml_build_forward_expand(graph, down);
            let mut layer = Self {
                context,
                graph,
                first: 0,
                last: 0,
                tokens,
            };
            let multiplies: Vec<usize> = (0..layer.nodes().len())
                .filter(|&at| layer.nodes()[at].as_ref().op == sys::GGML_OP_MUL_MAT_ID)
                .collect();
            layer.first = multiplies[0];
            layer.last = multiplies[multiplies.len() - 1];
            layer
        }
    }

    fn nodes(&self) -> Vec<NonNull<Tensor>> {
        // SAFETY: the graph has as many nodes as it says.
        unsafe {
            (0..sys::ggml_graph_n_nodes(self.graph))
                .map(|at| NonNull::new(sys::ggml_graph_node(self.graph, at)).unwrap())
                .collect()
        }
    }

    fn compute(&self) {
        // SAFETY: the graph and its tensors are in the context's memory.
        let status = unsafe { sys::ggml_graph_compute_with_ctx(self.context, self.graph, 2) };
        assert_eq!(status, sys::GGML_STATUS_SUCCESS);
    }

    /// The bits of the last node's result.
    fn result(&self) -> Vec<u32> {
        // SAFETY: the last node is of 32-bit floats without gaps.
        unsafe {
            let node = self.nodes()[self.last];
            let node = node.as_ref();
            let words = sys::ggml_nbytes(node) / 4;
            std::slice::from_raw_parts(node.data.cast::<u32>(), words).to_vec()
        }
    }

    /// Overwrites every result.
    fn forget(&self) {
        for mut node in self.nodes() {
            // SAFETY: as for `result`; views are parts of other nodes.
            unsafe {
                let node = node.as_mut();
                if node.op != sys::GGML_OP_VIEW {
                    node.data
                        .cast::<u8>()
                        .write_bytes(0xff, sys::ggml_nbytes(node));
                }
            }
        }
    }

    fn routing(&self) -> Routing<'_> {
        Routing {
            top_k: TOP_K,
            tokens: self.tokens,
            slots: &CHOICES[..self.tokens * TOP_K],
            experts: &CHOICES[..self.tokens * TOP_K],
            choice: "topk-0",
            // SAFETY: a node of the layer's graph.
            table: unsafe { self.nodes()[self.first].as_ref() }.src[2],
        }
    }

    fn collected(&self, splitter: &mut Splitter) -> Result<(), Unsplittable> {
        splitter.begin();
        for node in &mut self.nodes()[self.first..=self.last] {
            // SAFETY: nodes of the layer's graph, which nothing else uses.
            assert!(splitter.collect(unsafe { node.as_mut() }));
        }
        splitter.stop();
        splitter.plan(&self.routing())
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        // SAFETY: made in `new`.
        unsafe { sys::ggml_free(self.context) };
    }
}

/// Fills a tensor with numbers between -1 and 1.
///
/// # Safety
/// The tensor must be of 32-bit floats without gaps.
unsafe fn fill(tensor: *mut Tensor, seed: u32) {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    // SAFETY: by the contract.
    unsafe {
        let count = sys::ggml_nbytes(tensor) / 4;
        for at in 0..count {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            let value = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
            (*tensor).data.cast::<f32>().add(at).write(value);
        }
    }
}

#[test]
fn rows_computed_apart_have_the_bits_of_rows_computed_together() {
    let pools = ThreadPools::new(2, Poll::Quiet).unwrap();
    let pool = NonNull::new(pools.pick(true).unwrap().as_ptr()).unwrap();
    for (kind, tokens) in [
        (Kind::Split, 1),
        (Kind::Split, 3),
        (Kind::FusedWithBiases, 1),
        (Kind::FusedWithBiases, 3),
    ] {
        let layer = Layer::new(kind, tokens);
        layer.compute();
        let expected = layer.result();
        let rows: Vec<usize> = (0..tokens * TOP_K).collect();
        for size in [1, 3, rows.len()] {
            layer.forget();
            assert_ne!(layer.result(), expected);
            let mut splitter = Splitter::new();
            splitter.use_threads(pool, 2);
            layer.collected(&mut splitter).unwrap();
            for group in rows.rchunks(size) {
                splitter.compute(group, &layer.routing()).unwrap();
            }
            splitter.finish();
            assert_eq!(layer.result(), expected, "{kind:?} {tokens} by {size}");
            // What was computed here is passed over, and afterwards it is not.
            layer.forget();
            layer.compute();
            assert_ne!(layer.result(), expected);
            splitter.restore();
            layer.compute();
            assert_eq!(layer.result(), expected);
        }
    }
}

#[test]
fn what_the_result_would_overwrite_is_saved_first() {
    let pools = ThreadPools::new(1, Poll::Quiet).unwrap();
    let pool = NonNull::new(pools.pick(true).unwrap().as_ptr()).unwrap();
    let layer = Layer::new(Kind::Split, 3);
    layer.compute();
    let expected = layer.result();
    // The last node's memory begins where the input's does, as ggml's allocator would have it.
    let (mut last, first) = (layer.nodes()[layer.last], layer.nodes()[layer.first]);
    // SAFETY: the context's memory goes on far beyond the input, and what follows it there is
    // overwritten only by results that nobody reads any more.
    unsafe {
        let input = first.as_ref().src[1];
        let room = sys::ggml_new_tensor_3d(layer.context, sys::GGML_TYPE_F32, WIDTH, 4, 3);
        let bytes = sys::ggml_nbytes(input);
        std::ptr::copy_nonoverlapping((*input).data.cast::<u8>(), (*room).data.cast::<u8>(), bytes);
        (*input).data = (*room).data;
        last.as_mut().data = (*room).data;
    }
    let mut splitter = Splitter::new();
    splitter.use_threads(pool, 1);
    layer.collected(&mut splitter).unwrap();
    for row in 0..3 * TOP_K {
        splitter.compute(&[row], &layer.routing()).unwrap();
    }
    splitter.finish();
    assert_eq!(layer.result(), expected);
}

#[test]
fn a_layer_with_an_unknown_operation_is_refused() {
    let layer = Layer::new(Kind::Unknown, 1);
    let Err(Unsplittable(why)) = layer.collected(&mut Splitter::new()) else {
        panic!("it was planned");
    };
    assert!(why.contains("not known to work row by row"), "{why}");
}
