//! The routing tap: what ggml's scheduler tells about each graph node.
//!
//! During warm-up every node is looked at: a `MUL_MAT_ID` (or `ADD_ID`) whose weights are named
//! as routed experts' are uses them, and the tensor that selects them is the router's output of that layer. The
//! order of these nodes is the model's own and is recorded, never assumed. After that only the
//! router outputs are asked for; the scheduler then runs the graph in pieces that end there.

use super::arena::{ArenaUse, ExpertArena, Rebinder};
use super::idle::IdleExperts;
use super::trail::Trail;
use super::{Poison, Repooled};
use crate::model::is_of_experts;
use crate::time::nanos;
use llama_cpp_sys_4 as sys;
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

/// Routed experts of one layer for one micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    /// Block index of the layer in the model.
    pub block: u32,
    /// Expert indices, `tokens` rows of `top_k`, as the router gave them.
    pub experts: &'a [i32],
    /// Rows of `experts`. Below the micro-batch's tokens in a last layer, which llama.cpp computes
    /// only for the tokens whose logits are wanted.
    pub tokens: usize,
    /// Tokens of the whole decode.
    pub batch_tokens: usize,
    /// What the decode is for.
    pub pass: Pass,
    /// Time from the answer to the layer before (or the start of the decode) to now, ns: that
    /// layer's expert matmuls and what follows them.
    pub since_last_ns: u64,
}

/// What a decode is for. The two are never mixed in one decode: prompts route nearly every expert, and
/// what they route says little about the next tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// The next token of each of one or more sequences.
    Next,
    /// A part of a prompt.
    Prompt,
}

/// Receives every layer's routing while the engine waits.
pub trait RouteSink: Send + std::any::Any {
    /// Whether the routing of the decode that is about to begin has to be seen. Each layer
    /// that is seen ends a piece of graph, and the pool starts anew after it.
    fn watches(&mut self, pass: Pass) -> bool {
        let _ = pass;
        true
    }

    /// Called once a layer and micro-batch, before the layer's experts are used. An error stops the
    /// decode; nothing is sampled from it.
    ///
    /// # Errors
    /// The cause in plain words.
    fn routed(&mut self, routed: &Routed<'_>) -> Result<(), String>;

    /// Called after each decode, seen or not, before anything that it computed is used. An error makes
    /// it one that failed.
    ///
    /// # Errors
    /// The cause in plain words.
    fn accept(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Called after each decode that was accepted, with the time since the last layer's answer and the
    /// decode's whole time, ns.
    fn decoded(&mut self, pass: Pass, tokens: usize, since_last_ns: u64, decode_ns: u64);

    /// Called after a decode that failed: what was routed in it does not count.
    fn abandoned(&mut self) {}

    /// Is told that no decode follows for a while; it may wait for something until `leave_off` says otherwise.
    fn rest(&mut self, leave_off: &mut dyn FnMut() -> bool) {
        let _ = leave_off;
    }

    /// Whether the last decode had to fetch experts.
    fn streams(&self) -> bool;

    /// Asked before each decode: the bytes that the pool in the device's memory is to have from now on;
    /// `None` leaves it as it is.
    fn pool_order(&mut self) -> Option<u64> {
        None
    }

    /// Is told what came of an order that differed from what there was.
    fn repooled(&mut self, outcome: &Repooled) {
        let _ = outcome;
    }

    /// Is told that no decode can succeed any more, and why.
    fn lost(&mut self, cause: &str) {
        let _ = cause;
    }
}

/// What a node does with expert weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertOp {
    /// Multiplies by the routed experts' matrices.
    Multiply,
    /// Adds the routed experts' biases.
    AddBias,
}

/// One use of expert weights in the graph, in graph order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertUse {
    /// What is done with them.
    pub op: ExpertOp,
    /// Name of the node before the one that uses them.
    pub before: String,
    /// Name of the weight tensor in the model file.
    pub tensor: String,
    /// Block whose router selects the experts.
    pub block: u32,
    /// Address of the tensor's data.
    pub address: usize,
    /// Bytes from one expert to the next (the slice length).
    pub stride_bytes: usize,
    /// Experts in the tensor.
    pub experts: usize,
}

/// What warm-up learned about the graph.
#[derive(Clone, Debug, Default)]
pub struct Learned {
    /// Every use of expert weights on the host, in the order in which the graph uses them.
    pub uses: Vec<ExpertUse>,
    /// Name prefix of the router outputs, up to and including the dash before the block index.
    pub router_prefix: String,
    /// Blocks whose routing can be seen, in graph order.
    pub blocks: Vec<u32>,
    /// Largest top-k seen.
    pub top_k: usize,
    /// Blocks in which something between the first and the last expert multiplication is used after
    /// the last, too.
    pub shared_blocks: Vec<u32>,
    /// Blocks of which several nodes have the name of the router's output: which of them selects the
    /// routed experts, counted from 0, and of how many.
    pub namesakes: HashMap<u32, (usize, usize)>,
    /// Blocks of which several nodes have that name, and it cannot be told which of them selects, since a
    /// copy on another device does.
    pub unclear_blocks: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Learning,
    Running,
}

/// State behind the callback. Lives in a box whose address llama.cpp keeps.
pub(super) struct Tap {
    phase: Phase,
    learned: Learned,
    sink: Option<Box<dyn RouteSink>>,
    rebinder: Option<Rebinder>,
    /// The threads that the context computes with.
    threads: Option<(NonNull<sys::ggml_threadpool>, u32)>,
    /// Name of the node that was asked about last, while learning.
    before: String,
    /// The graph that is being learned.
    trail: Trail,
    /// Router outputs with namesakes that were asked about in this decode.
    asked: HashMap<u32, usize>,
    /// The block whose router output the scheduler was told to stop after.
    due: Option<u32>,
    idle: IdleExperts,
    experts: Vec<i32>,
    /// A router's output that was in a device's memory.
    copied: Vec<u8>,
    batch_tokens: usize,
    watching: bool,
    pass: Pass,
    last: Instant,
    poison: Arc<Poison>,
}

impl std::fmt::Debug for Tap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tap")
            .field("phase", &self.phase)
            .field("learned", &self.learned)
            .finish()
    }
}

impl Tap {
    /// A tap that learns until [`Self::run`].
    pub(super) fn new(poison: Arc<Poison>) -> Self {
        Self {
            phase: Phase::Learning,
            learned: Learned::default(),
            sink: None,
            rebinder: None,
            threads: None,
            before: String::new(),
            trail: Trail::default(),
            asked: HashMap::new(),
            due: None,
            idle: IdleExperts::default(),
            experts: Vec::new(),
            copied: Vec::new(),
            batch_tokens: 0,
            watching: false,
            pass: Pass::Next,
            last: Instant::now(),
            poison,
        }
    }

    pub(super) fn learned(&self) -> &Learned {
        &self.learned
    }

    /// Stops learning and hands routing to `sink` from now on; experts are then used from `arena`,
    /// if there is one. `max_tokens` is the micro-batch.
    pub(super) fn run(
        &mut self,
        sink: Box<dyn RouteSink>,
        arena: Option<Arc<dyn ExpertArena>>,
        max_tokens: usize,
    ) {
        self.phase = Phase::Running;
        self.learned.shared_blocks = self.trail.shared_blocks();
        self.learned.namesakes = self.trail.namesakes();
        self.learned.unclear_blocks = self.trail.unclear_blocks();
        self.trail.clear();
        self.rebinder = arena.map(|arena| Rebinder::new(arena, &self.learned));
        if let (Some(rebinder), Some((pool, threads))) = (&mut self.rebinder, self.threads) {
            rebinder.use_threads(pool, threads);
        }
        self.experts = Vec::with_capacity(self.learned.top_k * max_tokens);
        self.sink = Some(sink);
    }

    /// Gives the sink back.
    pub(super) fn take_sink(&mut self) -> Option<Box<dyn RouteSink>> {
        self.sink.take()
    }

    pub(super) fn sink(&self) -> Option<&dyn RouteSink> {
        self.sink.as_deref()
    }

    /// Marks the start of a decode of `tokens`.
    pub(super) fn begin(&mut self, pass: Pass, tokens: usize) {
        self.trail.clear();
        self.asked.clear();
        self.due = None;
        self.batch_tokens = tokens;
        self.pass = pass;
        self.watching = self.sink.as_mut().is_some_and(|sink| sink.watches(pass));
        self.last = Instant::now();
        if let (Some(rebinder), false) = (&mut self.rebinder, self.watching) {
            rebinder.count_home_decode();
        }
    }

    /// How an arena's experts were used so far; `None` without an arena.
    pub(super) fn arena_use(&self) -> Option<ArenaUse> {
        self.rebinder.as_ref().map(Rebinder::used)
    }

    /// Puts the graph back as llama.cpp made it. Called after each decode, before its outcome is
    /// looked at.
    pub(super) fn restore(&mut self) {
        self.idle.restore();
        if let Some(cause) = self.rebinder.as_mut().and_then(Rebinder::end) {
            self.poison.set(cause);
        }
    }

    /// Hands over the threads that the context computes with from now on.
    pub(super) fn use_threads(&mut self, pool: NonNull<sys::ggml_threadpool>, threads: u32) {
        self.threads = Some((pool, threads));
        if let Some(rebinder) = &mut self.rebinder {
            rebinder.use_threads(pool, threads);
        }
    }

    /// Asks whether what a decode computed may be used.
    pub(super) fn accept(&mut self) -> Result<(), String> {
        self.sink.as_mut().map_or(Ok(()), |sink| sink.accept())
    }

    /// Marks the end of a decode that failed.
    pub(super) fn abandon(&mut self) {
        if let Some(sink) = &mut self.sink {
            sink.abandoned();
        }
    }

    /// Marks the end of a decode that began `decode_ns` ago.
    pub(super) fn end(&mut self, tokens: usize, decode_ns: u64) {
        let since = nanos(self.last.elapsed());
        if let Some(sink) = &mut self.sink {
            sink.decoded(self.pass, tokens, since, decode_ns);
        }
    }

    /// Tells the sink that no decode follows for a while.
    pub(super) fn rest(&mut self, leave_off: &mut dyn FnMut() -> bool) {
        if let Some(sink) = &mut self.sink {
            sink.rest(leave_off);
        }
    }

    /// The pool that the sink asks for.
    pub(super) fn pool_order(&mut self) -> Option<u64> {
        self.sink.as_mut().and_then(|sink| sink.pool_order())
    }

    /// Tells the sink what came of its order.
    pub(super) fn repooled(&mut self, outcome: &Repooled) {
        if let Some(sink) = &mut self.sink {
            sink.repooled(outcome);
        }
    }

    /// Tells the sink that no decode can succeed any more.
    pub(super) fn lost(&mut self, cause: &str) {
        if let Some(sink) = &mut self.sink {
            sink.lost(cause);
        }
    }

    /// Whether the scheduler is to stop after this node.
    fn wants(&mut self, node: &mut sys::ggml_tensor) -> bool {
        match self.phase {
            Phase::Learning => {
                let block = self.learn(node);
                self.trail.add(node, block);
                self.idle.spare(node);
                self.before.clear();
                self.before
                    .push_str(&String::from_utf8_lossy(name_of(node)));
                false
            }
            Phase::Running => {
                if self.sink.is_none() {
                    return false;
                }
                if let Some(rebinder) = &mut self.rebinder {
                    // What was poisoned before must not be waited for again and again.
                    let sound = !self.poison.is_set();
                    let met = if self.watching {
                        rebinder.meet(node, sound)
                    } else {
                        rebinder.meet_at_home(node)
                    };
                    if let (true, Err(cause)) = (sound, met) {
                        self.poison.set(cause);
                    }
                    if self.watching && (rebinder.cuts_after(node) || rebinder.ends_pass()) {
                        self.due = self.chosen_by(node);
                        return true;
                    }
                }
                self.due = if self.watching {
                    self.chosen_by(node)
                } else {
                    None
                };
                self.due.is_some()
            }
        }
    }

    /// The block whose routed experts a node selects. To be asked once for each node.
    fn chosen_by(&mut self, node: &sys::ggml_tensor) -> Option<u32> {
        let block = block_of(name_of(node), self.learned.router_prefix.as_bytes())?;
        let Some(&(own, all)) = self.learned.namesakes.get(&block) else {
            return Some(block);
        };
        let asked = self.asked.entry(block).or_default();
        *asked += 1;
        ((*asked - 1) % all == own).then_some(block)
    }

    /// Records a node that uses expert weights. Returns the block whose experts it multiplies by.
    fn learn(&mut self, node: &sys::ggml_tensor) -> Option<u32> {
        let (op, weights, selection) = match node.op {
            sys::GGML_OP_MUL_MAT_ID => (ExpertOp::Multiply, node.src[0], node.src[2]),
            sys::GGML_OP_ADD_ID => (ExpertOp::AddBias, node.src[1], node.src[2]),
            _ => return None,
        };
        // SAFETY: sources of a scheduled node are null or valid for the life of the graph.
        let (Some(weights), Some(selection)) =
            (unsafe { weights.as_ref() }, unsafe { selection.as_ref() })
        else {
            return None;
        };
        let Ok(tensor) = std::str::from_utf8(original(name_of(weights))) else {
            return None;
        };
        let router = original(name_of(selection));
        let dash = router.iter().rposition(|&b| b == b'-')?;
        let (prefix, block) = router.split_at(dash + 1);
        let (Ok(prefix), Some(block)) = (std::str::from_utf8(prefix), number(block)) else {
            return None;
        };
        if !is_of_experts(tensor) {
            return None;
        }
        let multiplies = (op == ExpertOp::Multiply).then_some(block);
        let learned = &mut self.learned;
        if learned.router_prefix.is_empty() {
            prefix.clone_into(&mut learned.router_prefix);
        }
        if prefix != learned.router_prefix {
            return None;
        }
        if learned.uses.iter().any(|u| u.tensor == tensor) {
            return multiplies;
        }
        let here = is_on_host(weights);
        if learned.blocks.last() != Some(&block) {
            learned.blocks.push(block);
        }
        learned.top_k = learned
            .top_k
            .max(usize::try_from(selection.ne[0]).unwrap_or(0));
        if !here {
            return multiplies;
        }
        // Biases are [n, experts], weights [n, m, experts].
        let last_dim = if op == ExpertOp::AddBias { 1 } else { 2 };
        learned.uses.push(ExpertUse {
            op,
            before: self.before.clone(),
            tensor: tensor.to_owned(),
            block,
            address: weights.data as usize,
            stride_bytes: weights.nb[last_dim],
            experts: usize::try_from(weights.ne[last_dim]).unwrap_or(0),
        });
        multiplies
    }

    /// Is told that everything up to a node has been computed; if it is a router's output, it is read
    /// and handed on. False stops the scheduler's loop.
    fn deliver(&mut self, node: &sys::ggml_tensor) -> bool {
        if let Some(rebinder) = &mut self.rebinder {
            rebinder.passed_over();
        }
        let Some(block) = self.due.take() else {
            return true;
        };
        let (top_k, tokens) = (node.ne[0], node.ne[1]);
        let (Ok(top_k), Ok(tokens)) = (usize::try_from(top_k), usize::try_from(tokens)) else {
            return true;
        };
        if node.type_ != sys::GGML_TYPE_I32 || node.data.is_null() {
            self.poison.set(format!(
                "the router output of block {block} is not a list of indices"
            ));
            return false;
        }
        let mut bytes: *const u8 = node.data.cast();
        if !is_on_host(node) {
            // SAFETY: a scheduled node was computed, is no other tensor's view without a buffer, and
            // the copy has all of its bytes.
            unsafe {
                let length = sys::ggml_nbytes(node);
                self.copied.resize(length, 0);
                sys::ggml_backend_tensor_get(node, self.copied.as_mut_ptr().cast(), 0, length);
            }
            bytes = self.copied.as_ptr();
        }
        self.experts.clear();
        for token in 0..tokens {
            for slot in 0..top_k {
                // SAFETY: the node was just computed and its bytes are in host memory, or were copied
                // there from its first to its last; (slot, token) is inside its dims and strides are
                // the tensor's own.
                let id = unsafe {
                    bytes
                        .add(token * node.nb[1] + slot * node.nb[0])
                        .cast::<i32>()
                        .read_unaligned()
                };
                self.experts.push(id);
            }
        }
        let Some(sink) = &mut self.sink else {
            return true;
        };
        let routed = Routed {
            block,
            experts: &self.experts,
            tokens,
            batch_tokens: self.batch_tokens,
            pass: self.pass,
            since_last_ns: nanos(self.last.elapsed()),
        };
        let answer = sink.routed(&routed);
        let answer = answer.and_then(|()| match &mut self.rebinder {
            Some(rebinder) => rebinder.routed(block, &self.experts, top_k, tokens),
            None => Ok(()),
        });
        if answer.is_ok()
            && tokens == 1
            && let Some(rebinder) = &mut self.rebinder
        {
            rebinder.look_ahead(block, node);
        }
        self.last = Instant::now();
        if let Err(cause) = answer {
            self.poison.set(cause);
            return false;
        }
        true
    }
}

pub(super) fn name_of(tensor: &sys::ggml_tensor) -> &[u8] {
    // SAFETY: ggml keeps names NUL-terminated inside the fixed array.
    unsafe { CStr::from_ptr(tensor.name.as_ptr()) }.to_bytes()
}

/// The name of the tensor that the scheduler copied to another backend: `CPU#name#0` is that of `name`.
pub(super) fn original(name: &[u8]) -> &[u8] {
    let copied = || {
        let (_, rest) = split_at(name, name.iter().position(|&b| b == b'#')?);
        let (inner, copy) = split_at(rest, rest.iter().rposition(|&b| b == b'#')?);
        number(copy).map(|_| inner)
    };
    copied().unwrap_or(name)
}

/// What is before and behind the byte at `at`.
fn split_at(name: &[u8], at: usize) -> (&[u8], &[u8]) {
    (&name[..at], &name[at + 1..])
}

/// Whether a tensor's bytes can be read through its address.
pub(super) fn is_on_host(tensor: &sys::ggml_tensor) -> bool {
    // SAFETY: a scheduled tensor's buffer, or that of the tensor that it is a view of, is null or
    // lives as long as the graph.
    unsafe {
        let buffer = tensor
            .view_src
            .as_ref()
            .map_or(tensor.buffer, |whole| whole.buffer);
        buffer.is_null() || sys::ggml_backend_buffer_is_host(buffer)
    }
}

/// The number after `prefix`, if the name is exactly that.
fn block_of(name: &[u8], prefix: &[u8]) -> Option<u32> {
    if prefix.is_empty() {
        None
    } else {
        number(name.strip_prefix(prefix)?)
    }
}

fn number(digits: &[u8]) -> Option<u32> {
    if digits.is_empty() || digits.len() > 6 {
        return None;
    }
    digits.iter().try_fold(0u32, |sum, &b| {
        b.is_ascii_digit().then(|| sum * 10 + u32::from(b - b'0'))
    })
}

/// `cb_eval` of the context.
///
/// # Safety
/// `user_data` is the context's [`Tap`], touched by nobody else during a decode; `tensor` is a node
/// of the graph that is being scheduled.
pub(super) unsafe extern "C" fn on_node(
    tensor: *mut sys::ggml_tensor,
    ask: bool,
    user_data: *mut c_void,
) -> bool {
    // SAFETY: as the function's own contract.
    let (Some(tap), Some(node)) = (unsafe { user_data.cast::<Tap>().as_mut() }, unsafe {
        tensor.as_mut()
    }) else {
        return !ask;
    };
    let poison = Arc::clone(&tap.poison);
    // An unwind must not cross the C++ frames above us.
    catch_unwind(AssertUnwindSafe(|| {
        if ask {
            tap.wants(node)
        } else {
            tap.deliver(node)
        }
    }))
    .unwrap_or_else(|panic| {
        poison.set(format!(
            "the routing tap panicked: {}",
            panic_text(panic.as_ref())
        ));
        false
    })
}

/// The abort callback of the context.
///
/// # Safety
/// `user_data` is a [`Poison`] that outlives the context.
pub(super) unsafe extern "C" fn on_abort_check(user_data: *mut c_void) -> bool {
    // SAFETY: as the function's own contract.
    unsafe { user_data.cast::<Poison>().as_ref() }.is_some_and(Poison::is_set)
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::{block_of, number, original};

    #[test]
    fn block_numbers_are_read_only_from_exact_names() {
        let prefix = b"ffn_moe_topk-";
        assert_eq!(block_of(b"ffn_moe_topk-0", prefix), Some(0));
        assert_eq!(block_of(b"ffn_moe_topk-57", prefix), Some(57));
        assert_eq!(block_of(b"ffn_moe_topk-", prefix), None);
        assert_eq!(block_of(b"ffn_moe_topk-5 (view)", prefix), None);
        assert_eq!(block_of(b"ffn_moe_probs-5", prefix), None);
        assert_eq!(block_of(b"ffn_moe_topk-5", b""), None);
        assert_eq!(number(b"12345678901"), None);
    }

    #[test]
    fn copies_have_their_originals_names() {
        assert_eq!(original(b"CPU#ffn_moe_topk-3#0"), b"ffn_moe_topk-3");
        assert_eq!(original(b"Vulkan0#blk.0.x.weight#1"), b"blk.0.x.weight");
        for name in ["ffn_moe_topk-3", "#", "a#b", "a#b#c", "##"] {
            assert_eq!(original(name.as_bytes()), name.as_bytes());
        }
    }
}
