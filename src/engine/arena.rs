//! Experts that lie outside the model's tensors: graph nodes are pointed at slots of an arena.
//!
//! `MUL_MAT_ID` addresses expert `i` of its weights as `data + i * nb[2]`, so a tensor whose `data`
//! and `nb[2]` describe an arena of slots, and a list of indices that names slots instead of
//! experts, give the same sums bit for bit. Both are tensors of ours that replace two sources of
//! the node before it is computed. The model's own tensors and the router's output stay as they
//! are, so routing weights and expert biases, which are looked up by expert, stay right, and other
//! contexts over the same model are not touched.

use super::lookahead::{Guess, Lookahead};
use super::tap::{ExpertOp, Learned, name_of};
use llama_cpp_sys_4 as sys;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

/// Where the slots of one weight tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Address of the tensor's part of slot 0.
    pub address: usize,
    /// Bytes from one slot to the next.
    pub stride_bytes: usize,
}

/// Experts in slots. Called by the engine's thread only, after the layer's routing was answered.
pub trait ExpertArena: Send + Sync + std::fmt::Debug {
    /// Where the slots of a weight tensor are; `None` leaves the node as it is.
    fn window(&self, tensor: &str) -> Option<Window>;

    /// The slot of an expert of the block that was routed last.
    fn slot(&self, block: u32, expert: i32) -> Option<u32>;

    /// Whether reads into this tensor's part of the routed experts are still under way.
    fn is_pending(&self, block: u32, tensor: &str) -> bool;

    /// How many layers ahead guesses are wanted now; 0 for none.
    fn looks_ahead(&self) -> usize {
        0
    }

    /// Is told what a coming layer will probably choose, best guess first.
    fn foresee(&self, block: u32, guesses: &[Guess]) {
        let _ = (block, guesses);
    }

    /// Waits until this tensor's part of every routed expert has been read.
    ///
    /// # Errors
    /// The cause in plain words; the decode must not be used.
    fn wait(&self, block: u32, tensor: &str) -> Result<(), String>;
}

/// One use of expert weights and the tensor that stands in for them.
struct Stand {
    block: u32,
    tensor: String,
    /// Name of the node before this one in the graph that was learned.
    before: String,
    window: Window,
    weights: Box<sys::ggml_tensor>,
}

/// The slots of a block's routed experts, as the list of indices that nodes read.
struct Indices {
    slots: Vec<i32>,
    /// One more than the largest of them.
    end: i64,
    tensor: Box<sys::ggml_tensor>,
}

/// Points nodes at an arena.
pub(super) struct Rebinder {
    arena: Arc<dyn ExpertArena>,
    router_prefix: String,
    stands: Vec<Stand>,
    by_tensor: HashMap<String, usize>,
    indices: HashMap<u32, Indices>,
    /// Uses of the block that was routed last, in graph order, that were not met yet.
    coming: std::ops::Range<usize>,
    lookahead: Lookahead,
}

impl Rebinder {
    /// Prepares stand-ins for everything that warm-up saw and the arena holds.
    pub(super) fn new(arena: Arc<dyn ExpertArena>, learned: &Learned) -> Self {
        let mut stands = Vec::new();
        let mut by_tensor = HashMap::new();
        let mut indices = HashMap::new();
        for used in &learned.uses {
            if used.op != ExpertOp::Multiply {
                continue;
            }
            let Some(window) = arena.window(&used.tensor) else {
                continue;
            };
            by_tensor.insert(used.tensor.clone(), stands.len());
            stands.push(Stand {
                block: used.block,
                tensor: used.tensor.clone(),
                before: used.before.clone(),
                window,
                weights: Box::new(blank()),
            });
            indices.entry(used.block).or_insert_with(|| Indices {
                slots: Vec::new(),
                end: 0,
                tensor: Box::new(blank()),
            });
        }
        Self {
            arena,
            router_prefix: learned.router_prefix.clone(),
            stands,
            by_tensor,
            indices,
            coming: 0..0,
            lookahead: Lookahead::new(),
        }
    }

    /// Takes in what the router of a block chose: `top_k` experts for each of `tokens`.
    pub(super) fn routed(
        &mut self,
        block: u32,
        experts: &[i32],
        top_k: usize,
        tokens: usize,
    ) -> Result<(), String> {
        let Some(indices) = self.indices.get_mut(&block) else {
            return Ok(());
        };
        indices.slots.clear();
        indices.end = 0;
        for &expert in experts {
            let slot = self
                .arena
                .slot(block, expert)
                .and_then(|slot| i32::try_from(slot).ok())
                .ok_or_else(|| format!("expert {expert} of block {block} has no slot"))?;
            indices.end = indices.end.max(i64::from(slot) + 1);
            indices.slots.push(slot);
        }
        let (width, rows) = (as_i64(top_k), as_i64(tokens));
        let row_bytes = top_k * size_of::<i32>();
        let tensor = &mut indices.tensor;
        tensor.type_ = sys::GGML_TYPE_I32;
        tensor.op = sys::GGML_OP_NONE;
        tensor.ne = [width, rows, 1, 1];
        tensor.nb = [
            size_of::<i32>(),
            row_bytes,
            row_bytes * tokens,
            row_bytes * tokens,
        ];
        tensor.data = indices.slots.as_mut_ptr().cast::<c_void>();
        let first = self.stands.iter().position(|s| s.block == block);
        let first = first.unwrap_or(self.stands.len());
        let count = self.stands[first..]
            .iter()
            .take_while(|s| s.block == block)
            .count();
        self.coming = first..first + count;
        Ok(())
    }

    /// Tells the arena what the next layers will probably choose. For one token: a batch uses nearly
    /// everything anyway.
    pub(super) fn look_ahead(&mut self, block: u32, choice: &sys::ggml_tensor) {
        self.lookahead.learn(block, choice);
        for ahead in 1..=self.arena.looks_ahead() {
            if let Some((block, guesses)) = self.lookahead.guess(block, choice, ahead) {
                self.arena.foresee(block, guesses);
            }
        }
    }

    /// Whether the graph should be cut after `node`, because the next node needs bytes that are
    /// still on their way and everything up to here can be computed meanwhile. Wrong answers cost
    /// overlap only: [`Self::bind`] waits in any case.
    pub(super) fn cuts_after(&self, node: &sys::ggml_tensor) -> bool {
        let Some(next) = self.stands.get(self.coming.start) else {
            return false;
        };
        !self.coming.is_empty()
            && name_of(node) == next.before.as_bytes()
            && self.arena.is_pending(next.block, &next.tensor)
    }

    /// Points a node that uses expert weights at the arena and waits for their bytes. Called when
    /// the scheduler asks about the node, which is always before it is computed, so no wait can be
    /// at the wrong place.
    pub(super) fn bind(&mut self, node: &mut sys::ggml_tensor) -> Result<(), String> {
        if node.op != sys::GGML_OP_MUL_MAT_ID {
            return Ok(());
        }
        // SAFETY: sources of a scheduled node are null or valid for the life of the graph; our own
        // tensors live as long as `self`, which outlives the context.
        let (Some(weights), Some(selection)) = (unsafe { node.src[0].as_ref() }, unsafe {
            node.src[2].as_ref()
        }) else {
            return Ok(());
        };
        let Some(&at) = std::str::from_utf8(name_of(weights))
            .ok()
            .and_then(|name| self.by_tensor.get(name))
        else {
            return Ok(());
        };
        let stand = &mut self.stands[at];
        let Some(indices) = self.indices.get_mut(&stand.block) else {
            return Ok(());
        };
        let ours = std::ptr::eq(weights, &raw const *stand.weights);
        if !ours {
            let chosen_by = format!("{}{}", self.router_prefix, stand.block);
            if name_of(selection) != chosen_by.as_bytes() {
                return Err(format!(
                    "{} is selected by another tensor than at warm-up",
                    stand.tensor
                ));
            }
            *stand.weights = *weights;
            stand.weights.data = stand.window.address as *mut c_void;
            stand.weights.nb[2] = stand.window.stride_bytes;
            stand.weights.view_src = std::ptr::null_mut();
            indices.tensor.buffer = selection.buffer;
            indices.tensor.name = selection.name;
            node.src[0] = &raw mut *stand.weights;
        }
        stand.weights.ne[2] = indices.end;
        stand.weights.nb[3] = stand
            .window
            .stride_bytes
            .saturating_mul(usize::try_from(indices.end).unwrap_or(usize::MAX));
        node.src[2] = &raw mut *indices.tensor;
        if self.coming.contains(&at) {
            self.coming.start = at + 1;
        }
        self.arena.wait(stand.block, &stand.tensor)
    }
}

fn as_i64(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// A tensor without anything in it.
fn blank() -> sys::ggml_tensor {
    // SAFETY: all of the struct's fields are numbers and pointers, for which zero is valid.
    unsafe { std::mem::zeroed() }
}
