//! Running totals, written by the engine's thread and read by anyone.

use crate::engine::Pass;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::OnceLock;

/// Layers are counted by how many of their routed experts were missing, up to this many.
pub const MOST_MISSED: usize = 16;

/// Totals since load. Counters are independent: a reader may see one a moment before another.
#[derive(Debug)]
pub struct Counters {
    decode: Box<[AtomicU32]>,
    prefill: Box<[AtomicU32]>,
    decode_tokens: AtomicU64,
    prefill_tokens: AtomicU64,
    decode_ns: AtomicU64,
    stall_ns: AtomicU64,
    fetch_ns: AtomicU64,
    hits: AtomicU64,
    pinned_hits: AtomicU64,
    misses: AtomicU64,
    fetch_bytes: AtomicU64,
    missed: [AtomicU64; MOST_MISSED + 1],
    halted: OnceLock<String>,
}

/// A copy of the scalar totals. Units are in the names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Tokens generated.
    pub decode_tokens: u64,
    /// Tokens of prompts.
    pub prefill_tokens: u64,
    /// Time inside decodes of either kind.
    pub decode_ns: u64,
    /// Time the engine waited for expert bytes: fetch calls, plus expert layers' time above their
    /// resident baseline.
    pub stall_ns: u64,
    /// The part of it spent in fetch calls.
    pub fetch_ns: u64,
    /// Routed experts that were resident, by the store's books.
    pub hits: u64,
    /// Those of them that were locked.
    pub pinned_hits: u64,
    /// Routed experts that were not resident.
    pub misses: u64,
    /// Bytes that fetches asked for.
    pub fetch_bytes: u64,
}

impl Totals {
    /// The change since `earlier`, each total apart.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            decode_tokens: self.decode_tokens.wrapping_sub(earlier.decode_tokens),
            prefill_tokens: self.prefill_tokens.wrapping_sub(earlier.prefill_tokens),
            decode_ns: self.decode_ns.wrapping_sub(earlier.decode_ns),
            stall_ns: self.stall_ns.wrapping_sub(earlier.stall_ns),
            fetch_ns: self.fetch_ns.wrapping_sub(earlier.fetch_ns),
            hits: self.hits.wrapping_sub(earlier.hits),
            pinned_hits: self.pinned_hits.wrapping_sub(earlier.pinned_hits),
            misses: self.misses.wrapping_sub(earlier.misses),
            fetch_bytes: self.fetch_bytes.wrapping_sub(earlier.fetch_bytes),
        }
    }
}

fn zeros(n: usize) -> Box<[AtomicU32]> {
    (0..n).map(|_| AtomicU32::new(0)).collect()
}

impl Counters {
    /// Zeroed counters for a model with `experts` experts in all.
    #[must_use]
    pub fn new(experts: usize) -> Self {
        Self {
            decode: zeros(experts),
            prefill: zeros(experts),
            decode_tokens: AtomicU64::new(0),
            prefill_tokens: AtomicU64::new(0),
            decode_ns: AtomicU64::new(0),
            stall_ns: AtomicU64::new(0),
            fetch_ns: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            pinned_hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            fetch_bytes: AtomicU64::new(0),
            missed: std::array::from_fn(|_| AtomicU64::new(0)),
            halted: OnceLock::new(),
        }
    }

    /// Ends the session for good: no decode succeeds any more. The first cause counts.
    pub fn halt(&self, cause: String) {
        let _ = self.halted.set(cause);
    }

    /// Why the session has ended, when it has.
    #[must_use]
    pub fn halted(&self) -> Option<&str> {
        self.halted.get().map(String::as_str)
    }

    pub(super) fn routed_in_decode(&self, expert: usize) {
        self.decode[expert].fetch_add(1, Relaxed);
    }

    pub(super) fn routed_in_prefill(&self, expert: usize) {
        self.prefill[expert].fetch_add(1, Relaxed);
    }

    pub(super) fn fetched(&self, found: &crate::store::Fetched, fetch_ns: u64) {
        self.hits.fetch_add(u64::from(found.hits), Relaxed);
        self.pinned_hits
            .fetch_add(u64::from(found.pinned_hits), Relaxed);
        self.misses.fetch_add(u64::from(found.misses), Relaxed);
        self.fetch_bytes.fetch_add(found.bytes, Relaxed);
        self.fetch_ns.fetch_add(fetch_ns, Relaxed);
    }

    /// Counts a layer of a token by how many of its routed experts were missing.
    pub(super) fn layer_missed(&self, experts: u32) {
        let class = usize::try_from(experts).map_or(MOST_MISSED, |n| n.min(MOST_MISSED));
        self.missed[class].fetch_add(1, Relaxed);
    }

    /// Layers of generated tokens by how many of their routed experts were missing; the last counts
    /// those with as many or more.
    #[must_use]
    pub fn missed(&self) -> [u64; MOST_MISSED + 1] {
        std::array::from_fn(|class| self.missed[class].load(Relaxed))
    }

    pub(super) fn stalled(&self, ns: u64) {
        self.stall_ns.fetch_add(ns, Relaxed);
    }

    pub(super) fn decoded(&self, pass: Pass, tokens: u64, decode_ns: u64) {
        let kind = match pass {
            Pass::Next => &self.decode_tokens,
            Pass::Prompt => &self.prefill_tokens,
        };
        kind.fetch_add(tokens, Relaxed);
        self.decode_ns.fetch_add(decode_ns, Relaxed);
    }

    /// The scalar totals.
    #[must_use]
    pub fn totals(&self) -> Totals {
        Totals {
            decode_tokens: self.decode_tokens.load(Relaxed),
            prefill_tokens: self.prefill_tokens.load(Relaxed),
            decode_ns: self.decode_ns.load(Relaxed),
            stall_ns: self.stall_ns.load(Relaxed),
            fetch_ns: self.fetch_ns.load(Relaxed),
            hits: self.hits.load(Relaxed),
            pinned_hits: self.pinned_hits.load(Relaxed),
            misses: self.misses.load(Relaxed),
            fetch_bytes: self.fetch_bytes.load(Relaxed),
        }
    }

    /// Copies decode routings per expert; they wrap around.
    pub fn decode_into(&self, out: &mut [u32]) {
        copy(&self.decode, out);
    }

    /// Copies prefill routings per expert (once a batch); they wrap around.
    pub fn prefill_into(&self, out: &mut [u32]) {
        copy(&self.prefill, out);
    }
}

fn copy(from: &[AtomicU32], out: &mut [u32]) {
    for (slot, counter) in out.iter_mut().zip(from) {
        *slot = counter.load(Relaxed);
    }
}
