//! Experts that lie outside the model's tensors: graph nodes are pointed at slots of an arena.
//!
//! `MUL_MAT_ID` addresses expert `i` of its weights as `data + i * nb[2]`, so a tensor whose `data`
//! and `nb[2]` describe an arena of slots, and a list of indices that names slots instead of
//! experts, give the same sums bit for bit. Both are tensors of ours that replace two sources of
//! the node before it is computed. The model's own tensors and the router's output stay as they
//! are, so routing weights and expert biases, which are looked up by expert, stay right, and other
//! contexts over the same model are not touched.

use super::lookahead::{Guess, Lookahead};
use super::split::{MOST_ROWS, Routing, Splitter, Unsplittable};
use super::tap::{ExpertOp, Learned, name_of};
use super::tensors::{as_i64, blank, set_indices};
use crate::time::nanos;
use llama_cpp_sys_4 as sys;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

/// Where the slots of one weight tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Address of the tensor's part of slot 0.
    pub address: usize,
    /// Bytes from one slot to the next.
    pub stride_bytes: usize,
    /// The slot that is expert 0's own; the others' follow in order. Everybody is in their own while
    /// nobody asks for routing: the store keeps it so for the decode.
    pub home: u32,
}

/// Experts in slots. Called by the engine's thread only, after the layer's routing was answered.
pub trait ExpertArena: Send + Sync + std::fmt::Debug {
    /// Where the slots of a weight tensor are; `None` leaves the node as it is.
    fn window(&self, tensor: &str) -> Option<Window>;

    /// The slot of an expert of the block that was routed last; `None` for one that is to be read later,
    /// because there is no room for all of them at once.
    fn slot(&self, block: u32, expert: i32) -> Option<u32>;

    /// Begins to read what was left for later, whether there is room or not: after this, every routed
    /// expert has a slot.
    ///
    /// # Errors
    /// The cause in plain words; the decode must not be used.
    fn begin_all(&self) -> Result<(), String>;

    /// Is told that some of the routed experts have been used for the last time: they may go, and others
    /// may be read in their place.
    ///
    /// # Errors
    /// As for [`Self::begin_all`].
    fn used(&self, block: u32, experts: &[i32]) -> Result<(), String>;

    /// Whether reads into this tensor's part of the routed experts are still under way.
    fn is_pending(&self, block: u32, tensor: &str) -> bool;

    /// Whether all of an expert of the block that was routed last has been read.
    fn is_ready(&self, block: u32, expert: i32) -> bool;

    /// Waits until more of the routed experts has been read. False when the arena has no reads under
    /// way for them: what is not ready then is to be waited for with [`Self::wait`].
    ///
    /// # Errors
    /// The cause in plain words; the decode must not be used.
    fn wait_for_more(&self) -> Result<bool, String>;

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
    /// Experts in the tensor.
    experts: i64,
    weights: Box<sys::ggml_tensor>,
    /// The node's own list of indices, in the graph that was bound last.
    selection: *mut sys::ggml_tensor,
}

impl Stand {
    /// Shows the slots that are in use.
    fn point_at(&mut self, indices: &Indices) {
        let window = self.window;
        let first = window.address + indices.lowest as usize * window.stride_bytes;
        self.weights.data = first as *mut c_void;
        self.weights.ne[2] = as_i64(indices.span);
        self.weights.nb[3] = window.stride_bytes * indices.span;
    }
}

/// The slots of a block's routed experts, as the list of indices that nodes read.
struct Indices {
    /// Slots from [`Self::lowest`] on.
    slots: Vec<i32>,
    /// Name of the tensor that selects them.
    choice: String,
    /// The experts themselves, `top_k` for each of `tokens`.
    experts: Vec<i32>,
    top_k: usize,
    tokens: usize,
    /// Whether the block is left to the scheduler as a whole.
    whole: bool,
    /// The lowest slot in use: nodes see the arena from here on, and only as far as it is used, since
    /// ggml does some work for every expert of a tensor.
    lowest: u32,
    /// One more than the largest of `slots`.
    span: usize,
    /// Whether every expert had a slot when `slots` was made; those without have that of another one.
    complete: bool,
    tensor: Box<sys::ggml_tensor>,
}

impl Indices {
    /// Looks up the slots of the routed experts.
    fn look_up(&mut self, block: u32, arena: &dyn ExpertArena) {
        let slot_of = |&expert: &i32| arena.slot(block, expert);
        let slots: Vec<Option<u32>> = self.experts.iter().map(slot_of).collect();
        self.complete = slots.iter().all(Option::is_some);
        let known = || slots.iter().flatten().copied();
        self.lowest = known().min().unwrap_or(0);
        self.span = known().max().map_or(0, |last| last - self.lowest + 1) as usize;
        self.slots.clear();
        let lowest = self.lowest;
        let near = |slot: &Option<u32>| distance(lowest, slot.unwrap_or(lowest));
        self.slots.extend(slots.iter().map(near));
        set_indices(&mut self.tensor, &mut self.slots, self.top_k);
    }

    /// Looks up the slots of some rows, whose experts may have been read after the others were looked
    /// up.
    fn look_up_some(
        &self,
        block: u32,
        arena: &dyn ExpertArena,
        rows: &[usize],
        slots: &mut [i32],
    ) -> Result<(), String> {
        for of_one in rows.chunk_by(|&a, &b| self.experts[a] == self.experts[b]) {
            let expert = self.experts[of_one[0]];
            let slot = arena.slot(block, expert);
            let slot = slot.ok_or_else(|| format!("expert {expert} has no slot"))?;
            for &row in of_one {
                slots[row] = distance(self.lowest, slot);
            }
        }
        Ok(())
    }
}

/// From one slot of an arena to another: far below 2^31.
fn distance(from: u32, to: u32) -> i32 {
    i32::try_from(i64::from(to) - i64::from(from)).unwrap_or(i32::MAX)
}

/// How an arena's experts were used so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaUse {
    /// Layers of which some experts were computed while others were still being read.
    pub split_layers: u64,
    /// Rows that were computed in them: one for each expert of each token.
    pub split_rows: u64,
    /// Time that computing them took, ns.
    pub split_ns: u64,
    /// Decodes that used all experts at home, without asking for routing.
    pub home_decodes: u64,
}

/// Points nodes at an arena.
pub(super) struct Rebinder {
    arena: Arc<dyn ExpertArena>,
    stands: Vec<Stand>,
    by_tensor: HashMap<String, usize>,
    indices: HashMap<u32, Indices>,
    /// Uses of the block that was routed last, in graph order, that were not met yet.
    coming: std::ops::Range<usize>,
    /// Whether the graph was cut in front of the block's first use, so that everything before it
    /// is there.
    cut_before_first: bool,
    splitter: Splitter,
    lookahead: Lookahead,
    used: ArenaUse,
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
                experts: as_i64(used.experts),
                weights: Box::new(blank()),
                selection: std::ptr::null_mut(),
            });
            indices.entry(used.block).or_insert_with(|| Indices {
                slots: Vec::new(),
                choice: format!("{}{}", learned.router_prefix, used.block),
                experts: Vec::new(),
                top_k: 0,
                tokens: 0,
                whole: learned.shared_blocks.contains(&used.block),
                lowest: 0,
                span: 0,
                complete: false,
                tensor: Box::new(blank()),
            });
        }
        Self {
            arena,
            stands,
            by_tensor,
            indices,
            coming: 0..0,
            cut_before_first: false,
            splitter: Splitter::new(),
            lookahead: Lookahead::new(),
            used: ArenaUse::default(),
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
        if self.splitter.is_collecting() {
            return Err(format!("block {block} was routed within another's experts"));
        }
        let Some(indices) = self.indices.get_mut(&block) else {
            return Ok(());
        };
        indices.experts.clear();
        indices.experts.extend_from_slice(experts);
        indices.top_k = top_k;
        indices.tokens = tokens;
        indices.look_up(block, &*self.arena);
        let complete = indices.complete;
        if !complete && !self.may_split(block) {
            self.begin_all(block)?;
        }
        let first = self.stands.iter().position(|s| s.block == block);
        let first = first.unwrap_or(self.stands.len());
        let count = self.stands[first..]
            .iter()
            .take_while(|s| s.block == block)
            .count();
        self.coming = first..first + count;
        self.cut_before_first = false;
        Ok(())
    }

    /// Has every routed expert of a block read, with a slot of its own, and points the block's nodes at
    /// them.
    fn begin_all(&mut self, block: u32) -> Result<(), String> {
        self.arena.begin_all()?;
        let Some(indices) = self.indices.get_mut(&block) else {
            return Ok(());
        };
        indices.look_up(block, &*self.arena);
        if !indices.complete {
            return Err(format!("an expert of block {block} has no slot"));
        }
        for stand in self.stands.iter_mut().filter(|s| s.block == block) {
            stand.point_at(indices);
        }
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

    /// Hands over the threads that the context computes with from now on.
    pub(super) fn use_threads(&mut self, pool: NonNull<sys::ggml_threadpool>, threads: u32) {
        self.splitter.use_threads(pool, threads);
    }

    /// Whether the graph should be cut after `node`, because the next node needs bytes that are
    /// still on their way and everything up to here can be computed meanwhile. Wrong answers cost
    /// overlap only: [`Self::meet`] waits in any case.
    pub(super) fn cuts_after(&mut self, node: &sys::ggml_tensor) -> bool {
        let Some(next) = self.stands.get(self.coming.start) else {
            return false;
        };
        let cuts = !self.coming.is_empty()
            && !self.splitter.is_collecting()
            && name_of(node) == next.before.as_bytes()
            && self.arena.is_pending(next.block, &next.tensor);
        self.cut_before_first = cuts;
        cuts
    }

    /// Whether a use is its block's first.
    fn is_first(&self, at: usize) -> bool {
        at == 0 || self.stands[at - 1].block != self.stands[at].block
    }

    /// Is asked about each node, always before it is computed, so no wait can be at the wrong
    /// place. A node that uses expert weights is pointed at the arena; its bytes are waited for
    /// here, or together with those of the whole layer.
    ///
    /// A decode that is not `sound` any more waits for nothing, but its nodes are pointed at memory
    /// that goes with their indices all the same: some may still be computed.
    pub(super) fn meet(&mut self, node: &mut sys::ggml_tensor, sound: bool) -> Result<(), String> {
        let bound = self.bind(node)?;
        if !sound {
            return Ok(());
        }
        if self.splitter.is_collecting() && !self.splitter.collect(node) {
            return self.give_up_splitting("the layer is too long");
        }
        let Some(at) = bound else {
            return Ok(());
        };
        if self.coming.contains(&at) {
            self.coming.start = at + 1;
        }
        let block = self.stands[at].block;
        if std::mem::take(&mut self.cut_before_first) && self.may_split(block) && self.is_first(at)
        {
            self.splitter.begin();
            self.splitter.collect(node);
        }
        if !self.splitter.is_collecting() {
            if !self.indices.get(&block).is_some_and(|i| i.complete) {
                self.begin_all(block)?;
            }
            return self.arena.wait(block, &self.stands[at].tensor);
        }
        if self.coming.is_empty() {
            return self.compute_split(block);
        }
        Ok(())
    }

    /// Is asked about each node of a decode whose routing nobody asks for: points one that uses
    /// expert weights at its layer's slots, which are in the experts' order.
    pub(super) fn meet_at_home(&mut self, node: &mut sys::ggml_tensor) -> Result<(), String> {
        let Some(at) = self.bind(node)? else {
            return Ok(());
        };
        let stand = &mut self.stands[at];
        let window = stand.window;
        let (home, stride) = (window.home as usize, window.stride_bytes);
        stand.weights.data = (window.address + home * stride) as *mut c_void;
        stand.weights.ne[2] = stand.experts;
        stand.weights.nb[3] = stride * usize::try_from(stand.experts).unwrap_or(0);
        node.src[2] = stand.selection;
        Ok(())
    }

    /// Whether a block's experts may be computed one by one.
    fn may_split(&self, block: u32) -> bool {
        let indices = self.indices.get(&block);
        self.splitter.is_able() && indices.is_some_and(|i| !i.whole && i.experts.len() > 1)
    }

    /// Computes a collected layer's experts as they come.
    fn compute_split(&mut self, block: u32) -> Result<(), String> {
        let Some(indices) = self.indices.get(&block) else {
            return self.give_up_splitting("its block is unknown");
        };
        let routing = Routing {
            top_k: indices.top_k,
            tokens: indices.tokens,
            slots: &indices.slots,
            experts: &indices.experts,
            choice: &indices.choice,
            table: &raw const *indices.tensor,
        };
        if let Err(Unsplittable(why)) = self.splitter.plan(&routing) {
            return self.give_up_splitting(&why);
        }
        self.splitter.stop();
        self.used.split_layers += 1;
        // Rows by expert, so that an expert's are computed together.
        let mut left: Vec<usize> = (0..routing.experts.len()).collect();
        left.sort_by_key(|&row| routing.experts[row]);
        let mut slots = indices.slots.clone();
        let mut used = Vec::new();
        while !left.is_empty() {
            let (mut ready, mut waiting) = part_ready(&*self.arena, block, &routing, &left);
            if ready.is_empty() {
                if self.arena.wait_for_more()? {
                    continue;
                }
                wait_for_all(&*self.arena, &self.stands, block)?;
                ready = std::mem::take(&mut waiting);
            }
            while !ready.is_empty() {
                let group: Vec<usize> = ready.drain(..first_group(&routing, &ready)).collect();
                used.clear();
                if !indices.complete {
                    used.extend(group.iter().map(|&row| routing.experts[row]));
                    used.dedup();
                    indices.look_up_some(block, &*self.arena, &group, &mut slots)?;
                }
                let started = Instant::now();
                let routing = Routing {
                    slots: &slots,
                    ..routing
                };
                self.splitter.compute(&group, &routing)?;
                self.used.split_rows += group.len() as u64;
                self.used.split_ns += nanos(started.elapsed());
                if !used.is_empty() {
                    self.arena.used(block, &used)?;
                }
            }
            left = waiting;
        }
        wait_for_all(&*self.arena, &self.stands, block)?;
        self.splitter.finish();
        Ok(())
    }

    /// Leaves the collected nodes to the scheduler, now and from now on.
    fn give_up_splitting(&mut self, why: &str) -> Result<(), String> {
        self.splitter.stop();
        let Some(at) = self.coming.start.checked_sub(1) else {
            return Ok(());
        };
        let block = self.stands[at].block;
        tracing::debug!("experts of block {block} are computed all at once: {why}");
        if let Some(indices) = self.indices.get_mut(&block) {
            indices.whole = true;
        }
        self.begin_all(block)?;
        wait_for_all(&*self.arena, &self.stands, block)
    }

    /// How experts were used so far.
    pub(super) const fn used(&self) -> ArenaUse {
        self.used
    }

    /// Notes a decode at home.
    pub(super) fn count_home_decode(&mut self) {
        self.used.home_decodes += 1;
    }

    /// Whether nodes were computed here that the scheduler is about to pass over, with none of the
    /// graph's experts left to come. It must stop after the node that it asks about then: what comes
    /// next may already be another graph in the same memory, or this one once more for the next
    /// micro-batch, and in both the nodes have to do their own work.
    pub(super) fn ends_pass(&self) -> bool {
        self.splitter.has_silenced() && self.coming.end == self.stands.len()
    }

    /// Gives nodes that the scheduler has passed over back what they do. Called when it has computed
    /// everything that it asked about.
    pub(super) fn passed_over(&mut self) {
        self.splitter.restore();
    }

    /// Ends a decode. Says what is wrong when nodes were computed that were to be computed here.
    pub(super) fn end(&mut self) -> Option<String> {
        let open = self.splitter.is_collecting();
        self.splitter.stop();
        self.splitter.restore();
        open.then(|| "the graph ended within a layer's experts".to_owned())
    }

    /// Points a node at the arena, if it uses expert weights, and says which use it is.
    fn bind(&mut self, node: &mut sys::ggml_tensor) -> Result<Option<usize>, String> {
        if node.op != sys::GGML_OP_MUL_MAT_ID {
            return Ok(None);
        }
        // SAFETY: sources of a scheduled node are null or valid for the life of the graph; our own
        // tensors live as long as `self`, which outlives the context.
        let (Some(weights), Some(selection)) = (unsafe { node.src[0].as_ref() }, unsafe {
            node.src[2].as_ref()
        }) else {
            return Ok(None);
        };
        let Some(&at) = std::str::from_utf8(name_of(weights))
            .ok()
            .and_then(|name| self.by_tensor.get(name))
        else {
            return Ok(None);
        };
        let stand = &mut self.stands[at];
        let Some(indices) = self.indices.get_mut(&stand.block) else {
            return Ok(None);
        };
        let ours = std::ptr::eq(weights, &raw const *stand.weights);
        if !ours {
            stand.selection = node.src[2];
            if name_of(selection) != indices.choice.as_bytes() {
                return Err(format!(
                    "{} is selected by another tensor than at warm-up",
                    stand.tensor
                ));
            }
            *stand.weights = *weights;
            stand.weights.nb[2] = stand.window.stride_bytes;
            stand.weights.view_src = std::ptr::null_mut();
            indices.tensor.buffer = selection.buffer;
            indices.tensor.name = selection.name;
            node.src[0] = &raw mut *stand.weights;
        }
        stand.point_at(indices);
        node.src[2] = &raw mut *indices.tensor;
        Ok(Some(at))
    }
}

/// Waits until everything that a block's uses need has been read.
fn wait_for_all(arena: &dyn ExpertArena, stands: &[Stand], block: u32) -> Result<(), String> {
    stands
        .iter()
        .filter(|stand| stand.block == block)
        .try_for_each(|stand| arena.wait(block, &stand.tensor))
}

/// Parts rows, which are in the order of their experts, into those whose experts have been read and
/// the others.
fn part_ready(
    arena: &dyn ExpertArena,
    block: u32,
    routing: &Routing<'_>,
    rows: &[usize],
) -> (Vec<usize>, Vec<usize>) {
    let (mut ready, mut waiting) = (Vec::new(), Vec::new());
    for of_one in rows.chunk_by(|&a, &b| routing.experts[a] == routing.experts[b]) {
        let is_ready = arena.is_ready(block, routing.experts[of_one[0]]);
        if is_ready { &mut ready } else { &mut waiting }.extend_from_slice(of_one);
    }
    (ready, waiting)
}

/// How many of `rows` make a group: whole experts, few enough to bound the memory it takes.
fn first_group(routing: &Routing<'_>, rows: &[usize]) -> usize {
    let mut end = 0;
    for of_one in rows.chunk_by(|&a, &b| routing.experts[a] == routing.experts[b]) {
        if end > 0 && end + of_one.len() > MOST_ROWS {
            break;
        }
        end += of_one.len();
    }
    end
}
