//! Between tap and store: counts each layer's routing, fetches what it names, and measures how long
//! the engine waited for it.

use super::{Counters, VramFeed};
use crate::engine::{Pass, Repooled, RouteSink, Routed};
use crate::store::{ExpertStore, LeaveOff, StoreError};
use crate::time::nanos;
use crate::trace::Recorder;
use hotpin_controllers::{ExpertId, ModelShape};
use std::sync::Arc;
use std::time::Instant;

/// Tokens without a miss after which experts are taken to be resident for the time being.
const STREAMING_MEMORY_TOKENS: u32 = 8;
/// While all experts are resident, routing is looked at in one decode out of this many. Seeing a token's
/// routing costs up to a thirtieth of its time, and there is nothing to fetch; scores take their time
/// from the routings that they are told, so a sample leaves them what they are.
const SAMPLE_EVERY: u32 = 8;
/// Weight of a fully resident layer's time in the baseline.
const BASELINE_WEIGHT: f64 = 0.1;

/// Feeds one session's tap.
#[derive(Debug)]
pub struct Feeder {
    counters: Arc<Counters>,
    store: Arc<dyn ExpertStore>,
    shape: ModelShape,
    /// MoE layer of each block, where it has one.
    layer_of_block: Vec<Option<usize>>,
    routed: Vec<ExpertId>,
    /// Last round in which an expert was seen, to keep `routed` distinct.
    seen: Vec<u32>,
    round: u32,
    /// Usual time of a resident layer, for each number of sequences that are decoded together (from
    /// one on) and each layer.
    baselines_ns: Vec<Vec<Option<f64>>>,
    /// The layer that was answered last in this decode, and whether all of it was locked.
    last: Option<(usize, bool)>,
    /// What the store had waited when it was last asked, ns.
    waited_ns: u64,
    quiet_tokens: u32,
    unseen: u32,
    missed: bool,
    recorder: Option<Recorder>,
    vram: Option<VramFeed>,
}

impl Feeder {
    /// A feeder for a model whose MoE layers are the blocks `blocks`, in order.
    #[must_use]
    pub fn new(
        counters: Arc<Counters>,
        store: Arc<dyn ExpertStore>,
        shape: ModelShape,
        blocks: &[u32],
        recorder: Option<Recorder>,
    ) -> Self {
        let last_block = blocks.iter().max().map_or(0, |&b| b as usize + 1);
        let mut layer_of_block = vec![None; last_block];
        for (layer, &block) in blocks.iter().enumerate() {
            layer_of_block[block as usize] = Some(layer);
        }
        Self {
            routed: Vec::with_capacity(shape.total_experts()),
            seen: vec![0; shape.total_experts()],
            baselines_ns: Vec::new(),
            counters,
            store,
            shape,
            layer_of_block,
            round: 0,
            last: None,
            waited_ns: 0,
            quiet_tokens: STREAMING_MEMORY_TOKENS,
            unseen: 0,
            missed: false,
            recorder,
            vram: None,
        }
    }

    /// Follows a pool in a device's memory as well.
    #[must_use]
    pub fn with_vram(mut self, vram: Option<VramFeed>) -> Self {
        self.vram = vram;
        self
    }

    /// Takes it apart: what outlives the model that it was made for.
    #[must_use]
    pub fn into_parts(self) -> (Option<Recorder>, Option<VramFeed>) {
        (self.recorder, self.vram)
    }

    /// Collects the distinct experts of one layer and counts them: in a decode once for each token that
    /// was routed to them, in a prompt once.
    fn collect(&mut self, layer: usize, routed: &Routed<'_>) -> Result<(), StoreError> {
        self.round = self.round.wrapping_add(1);
        if self.round == 0 {
            self.seen.fill(0);
            self.round = 1;
        }
        self.routed.clear();
        let experts = self.shape.experts_in(layer);
        let next = routed.pass == Pass::Next;
        for &expert in routed.experts {
            let index = u32::try_from(expert).ok().filter(|&e| e < experts).ok_or(
                StoreError::NoSuchExpert {
                    layer,
                    expert,
                    experts,
                },
            )?;
            let id = self.shape.id(layer, index);
            if next {
                self.counters.routed_in_decode(id.index());
            }
            if self.seen[id.index()] == self.round {
                continue;
            }
            self.seen[id.index()] = self.round;
            self.routed.push(id);
            if !next {
                self.counters.routed_in_prefill(id.index());
            }
        }
        Ok(())
    }

    /// Books how long the layer answered last was waited for. Where the store does not know, that is
    /// its time above its baseline, which fully locked layers set.
    fn settle(&mut self, tokens: usize, since_last_ns: u64) {
        if let Some(waited_ns) = self.store.waited_ns() {
            self.counters
                .stalled(waited_ns.saturating_sub(self.waited_ns));
            self.waited_ns = waited_ns;
            return;
        }
        let Some((layer, locked)) = self.last.take() else {
            return;
        };
        #[expect(
            clippy::cast_precision_loss,
            reason = "layer times are far below 2^53 ns"
        )]
        let took = since_last_ns as f64;
        if self.baselines_ns.len() < tokens {
            self.baselines_ns
                .resize(tokens, vec![None; self.shape.layers()]);
        }
        let baseline = self.baselines_ns[tokens - 1][layer].get_or_insert(took);
        if locked {
            *baseline += BASELINE_WEIGHT * (took - *baseline);
        } else if took < *baseline {
            *baseline = took;
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, below 2^53"
        )]
        let stall_ns = (took - *baseline).max(0.0) as u64;
        if !locked {
            self.counters.stalled(stall_ns);
        }
    }

    /// Leaves out what was waited until now: stalls are those of tokens that are generated one by one,
    /// and a prompt's would be booked on the first of them.
    fn forget_waits(&mut self) {
        self.waited_ns = self.store.waited_ns().unwrap_or(0);
    }
}

impl RouteSink for Feeder {
    fn watches(&mut self, pass: Pass) -> bool {
        // A pool's shadow has to see what the pool sees.
        let may_miss = pass == Pass::Next && self.recorder.is_none() && self.vram.is_none();
        if may_miss && self.unseen + 1 < SAMPLE_EVERY && self.store.is_complete() {
            self.unseen += 1;
            return false;
        }
        self.unseen = 0;
        true
    }

    fn routed(&mut self, routed: &Routed<'_>) -> Result<(), String> {
        if routed.pass == Pass::Next {
            self.settle(routed.batch_tokens, routed.since_last_ns);
        }
        let layer = self
            .layer_of_block
            .get(routed.block as usize)
            .copied()
            .flatten();
        let Some(layer) = layer else { return Ok(()) };
        self.collect(layer, routed).map_err(|e| e.to_string())?;
        if let Some(recorder) = &mut self.recorder {
            recorder.routed(layer, routed);
        }
        if let Some(vram) = &mut self.vram {
            vram.route(layer, routed.experts, routed.tokens, &mut self.routed);
        }
        let started = Instant::now();
        let found = self.store.fetch(&self.routed).map_err(|e| e.to_string())?;
        let fetch_ns = nanos(started.elapsed());
        self.counters.fetched(&found, fetch_ns);
        self.missed |= found.misses > 0;
        if found.misses > 0 {
            self.counters.stalled(fetch_ns);
        }
        if routed.pass == Pass::Next {
            self.counters.layer_missed(found.misses);
            self.last = Some((layer, found.pinned_hits as usize == self.routed.len()));
        }
        Ok(())
    }

    fn accept(&mut self) -> Result<(), String> {
        if self.counters.halted().is_none()
            && let Err(cause) = self.store.check_unchanged()
        {
            // It will not be again what it was.
            self.counters.halt(cause);
        }
        self.counters
            .halted()
            .map_or(Ok(()), |cause| Err(cause.to_owned()))
    }

    fn decoded(&mut self, pass: Pass, tokens: usize, since_last_ns: u64, decode_ns: u64) {
        self.store.release();
        if pass == Pass::Next {
            self.settle(tokens, since_last_ns);
        } else {
            self.forget_waits();
        }
        self.last = None;
        if let Some(recorder) = &mut self.recorder {
            recorder.end_batch();
        }
        self.counters.decoded(pass, tokens as u64, decode_ns);
        if let Some(vram) = &mut self.vram {
            vram.decoded(tokens, decode_ns, true);
        }
        self.quiet_tokens = if self.missed {
            0
        } else {
            self.quiet_tokens.saturating_add(1)
        };
        self.missed = false;
    }

    fn rest(&mut self, leave_off: LeaveOff<'_>) {
        self.store.rest(leave_off);
    }

    fn abandoned(&mut self) {
        self.store.release();
        self.forget_waits();
        self.last = None;
        if let Some(recorder) = &mut self.recorder {
            recorder.abandon_batch();
        }
        if let Some(vram) = &mut self.vram {
            vram.decoded(0, 0, false);
        }
    }

    fn pool_order(&mut self) -> Option<u64> {
        self.vram.as_ref().and_then(VramFeed::order)
    }

    fn repooled(&mut self, outcome: &Repooled) {
        if let Some(vram) = &mut self.vram {
            vram.repooled(outcome);
        }
    }

    fn lost(&mut self, cause: &str) {
        self.counters.halt(cause.to_owned());
    }

    fn streams(&self) -> bool {
        self.quiet_tokens < STREAMING_MEMORY_TOKENS
    }
}
