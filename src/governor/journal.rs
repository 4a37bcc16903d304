//! The journal of decisions: a ring in memory, and JSON lines in a file on request.

use super::act::Acted;
use super::journal_file::JournalFile;
use super::monitor::Page;
use super::observe::Plant;
use super::tier::VramEntry;
use crate::sensors::Sample;
use crate::time::{millis, seconds};
use hotpin_controllers::{Action, Ceiling, Decision, ModelShape, Moment, PinLimit, Reason};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Entries kept in memory.
const KEPT: usize = 4096;
/// A tick on which nothing changed is written only when this much time has passed.
const HEARTBEAT_NS: u64 = 1_000_000_000;
/// Capacity changes below this share are no change worth a line of their own.
const CHANGE_SHARE: u64 = 256;

/// One change of the pinned set, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// MoE layer.
    pub layer: usize,
    /// Expert in the layer.
    pub expert: u32,
    /// The rule.
    pub reason: Reason,
    /// Its score then: expected routings per decoded token.
    pub score: f32,
}

/// One tick, as written. Sizes in bytes; what no sensor told is `null`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Seconds since the governor started.
    pub t_s: f64,
    /// Budget for pinned + transit.
    pub capacity_bytes: u64,
    /// The ceiling that set it.
    pub binding: Ceiling,
    /// Every ceiling that is known.
    pub ceilings: BTreeMap<String, u64>,
    /// Budget for pinned.
    pub pin_budget_bytes: u64,
    /// What set it.
    pub pin_limit: PinLimit,
    /// Pinned after the tick.
    pub pinned_bytes: u64,
    /// In transit after the tick.
    pub transit_bytes: u64,
    /// Host memory available.
    pub available_bytes: Option<u64>,
    /// Available in the tightest cgroup.
    pub cgroup_available_bytes: Option<u64>,
    /// Tokens decoded since the last tick.
    pub decode_tokens: u64,
    /// Hit ratio since the last tick; `null` when nothing was routed.
    pub hit_ratio: Option<f64>,
    /// Stall since the last tick, milliseconds.
    pub stall_ms: f64,
    /// Major faults since the last tick.
    pub major_faults: u64,
    /// Drift was detected.
    pub drift: bool,
    /// Experts pinned.
    pub pinned: Vec<Change>,
    /// Experts unpinned.
    pub unpinned: Vec<Change>,
    /// The last lock failure of the tick.
    pub lock_error: Option<String>,
    /// Transit that an audit found gone.
    pub lost_bytes: Option<u64>,
    /// Ticks without a change that this line stands for besides its own.
    pub quiet_ticks: u32,
    /// Where memory ran short between ticks: from the last look that found enough until what others need was
    /// given back, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yield_ms: Option<f64>,
    /// The tier in a device's memory, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vram: Option<VramEntry>,
}

impl Entry {
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub(super) fn new(
        now: Moment,
        decision: &Decision,
        sample: &Sample,
        acted: &Acted,
        plant: &Plant,
        shape: &ModelShape,
        vram: Option<VramEntry>,
    ) -> Self {
        let change = plant.change();
        let routed = change.hits + change.misses;
        let named = |actions: &[Action]| {
            actions
                .iter()
                .map(|a| {
                    let (layer, expert) = shape.place(a.expert);
                    Change {
                        layer,
                        expert,
                        reason: a.reason,
                        score: a.score,
                    }
                })
                .collect()
        };
        Self {
            t_s: seconds(now.ns),
            capacity_bytes: decision.capacity_bytes,
            binding: decision.binding,
            ceilings: Ceiling::ALL
                .iter()
                .zip(decision.ceilings)
                .filter_map(|(c, bytes)| Some((c.label().to_owned(), bytes?)))
                .collect(),
            pin_budget_bytes: decision.pin_budget_bytes,
            pin_limit: decision.pin_limit,
            pinned_bytes: acted.pinned_bytes,
            transit_bytes: acted.transit_bytes,
            available_bytes: sample.host.map(|h| h.available_bytes),
            cgroup_available_bytes: sample.cgroup.map(|c| c.available_bytes),
            decode_tokens: change.decode_tokens,
            hit_ratio: (routed > 0).then(|| change.hits as f64 / routed as f64),
            stall_ms: millis(change.stall_ns),
            major_faults: plant.new_faults(),
            drift: decision.drift,
            pinned: named(&acted.pinned),
            unpinned: named(&acted.unpinned),
            lock_error: acted.last_error.clone(),
            lost_bytes: acted.lost_bytes,
            quiet_ticks: 0,
            yield_ms: acted.yielded.map(|time| time.as_secs_f64() * 1e3),
            vram,
        }
    }

    /// Whether this tick deserves a line of its own after `before`.
    fn differs(&self, before: &Self) -> bool {
        let moved = self.capacity_bytes.abs_diff(before.capacity_bytes);
        self.binding != before.binding
            || self.pin_limit != before.pin_limit
            || moved > before.capacity_bytes / CHANGE_SHARE
            || !self.pinned.is_empty()
            || !self.unpinned.is_empty()
            || self.drift
            || self.lock_error.is_some()
            || self.lost_bytes > Some(0)
            || self.yield_ms.is_some()
            || match (&self.vram, &before.vram) {
                (Some(now), Some(before)) => now.differs(before),
                (now, before) => now.is_some() != before.is_some(),
            }
    }
}

/// The ring, and the file if there is one.
#[derive(Debug, Default)]
pub struct Journal {
    ring: VecDeque<Entry>,
    /// Entries that have left the ring.
    forgotten: u64,
    file: Option<JournalFile>,
    quiet: u32,
    last_ns: u64,
}

impl Journal {
    /// A journal that also writes to `file`.
    #[must_use]
    pub fn new(file: Option<JournalFile>) -> Self {
        Self {
            file,
            ..Self::default()
        }
    }

    pub(super) fn push(&mut self, mut entry: Entry) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a time since start"
        )]
        let now_ns = (entry.t_s * 1e9) as u64;
        let quiet = self
            .ring
            .back()
            .is_some_and(|before| !entry.differs(before));
        if quiet && now_ns.saturating_sub(self.last_ns) < HEARTBEAT_NS {
            self.quiet += 1;
            return;
        }
        entry.quiet_ticks = std::mem::take(&mut self.quiet);
        self.last_ns = now_ns;
        if let Some(file) = &mut self.file {
            file.write(&entry);
        }
        if self.ring.len() == KEPT {
            self.ring.pop_front();
            self.forgotten += 1;
        }
        self.ring.push_back(entry);
    }

    /// The last `most` entries, oldest first.
    #[must_use]
    pub fn recent(&self, most: usize) -> Vec<Entry> {
        self.ring
            .iter()
            .skip(self.ring.len().saturating_sub(most))
            .cloned()
            .collect()
    }

    /// Up to `most` entries with numbers below `before`, or the last ones. Entries are numbered from
    /// 0 on.
    pub(super) fn page(&self, before: Option<u64>, most: usize) -> Page {
        let oldest = self.forgotten;
        let next = oldest + self.ring.len() as u64;
        let end = before.unwrap_or(next).clamp(oldest, next);
        let first = end.saturating_sub(most as u64).max(oldest);
        let entries = (first..end)
            .filter_map(|number| {
                let at = usize::try_from(number - oldest).ok()?;
                Some((number, self.ring.get(at)?.clone()))
            })
            .collect();
        Page { entries, oldest }
    }

    /// Waits until the file has all lines, for a while.
    pub(super) fn flush(&mut self) {
        if let Some(file) = &mut self.file {
            file.flush();
        }
    }
}
