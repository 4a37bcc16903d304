//! The tier in a graphics device's memory: what the law sees each tick, what it orders, and what is told
//! of it.

use crate::engine::{MemorySource, Repooled};
use crate::plant::VramLink;
use crate::sensors::Sample;
use hotpin_controllers::Moment;
use hotpin_controllers::config::VramConfig;
use hotpin_controllers::vram::{
    Arrangement, ChangeCosts, ChangeKind, DeviceMemory, PoolCounts, PoolLayout, VramCeiling,
    VramDecision, VramFigures, VramLaw, VramObservation, VramRule,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What of a session is in a device's memory.
#[derive(Debug, Clone)]
pub struct VramPart {
    /// Where engine and governor meet.
    pub link: Arc<VramLink>,
    /// Who knows how much of the device's memory is free.
    pub source: Arc<dyn MemorySource>,
    /// How llama.cpp lays out its pool.
    pub layout: PoolLayout,
    /// Settings of the law.
    pub config: VramConfig,
    /// Bytes a second from host memory to the device, where they were measured.
    pub link_bytes_per_s: Option<f64>,
    /// Bytes of the dense weights there.
    pub dense_bytes: u64,
}

/// A change of the pool, as written. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VramChange {
    /// What was ordered.
    pub asked_bytes: u64,
    /// What there was.
    pub before_bytes: u64,
    /// What there is.
    pub bytes: u64,
    /// Sequences that were saved and put back.
    pub state_bytes: u64,
    /// Time that it took, milliseconds.
    pub took_ms: f64,
    /// Why it is not what was ordered.
    pub refused: Option<String>,
}

/// The tier at a tick, as written. Sizes in bytes; what is not known is `null`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VramEntry {
    /// Where experts are used from while batches are small: `cpu`, `reload` or `static`.
    pub arrangement: String,
    /// Bytes of the pool that there is.
    pub pool_bytes: u64,
    /// Bytes that the law wants.
    pub wanted_bytes: u64,
    /// The rule that says so.
    pub rule: VramRule,
    /// Lowest ceiling.
    pub capacity_bytes: u64,
    /// Which one that is.
    pub binding: VramCeiling,
    /// Every ceiling that is known.
    pub ceilings: BTreeMap<String, u64>,
    /// Free memory of the device.
    pub free_bytes: Option<u64>,
    /// All of its memory.
    pub total_bytes: Option<u64>,
    /// Routed experts found in pools since the start.
    pub hits: u64,
    /// Those that had to be copied to the device.
    pub misses: u64,
    /// Bytes copied for them.
    pub uploaded_bytes: u64,
    /// Experts that are stable there, so that they need not be locked in RAM.
    pub covered_experts: u64,
    /// Measured time of a token now, milliseconds.
    pub present_ms: Option<f64>,
    /// Expected with a pool at the lowest ceiling.
    pub reload_ms: Option<f64>,
    /// Expected with whole layers' experts in the device's memory.
    pub static_ms: Option<f64>,
    /// Expected with all experts on the processor.
    pub cpu_ms: Option<f64>,
    /// Changes since the last tick.
    pub changes: Vec<VramChange>,
}

/// What pools of other sizes would do.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct VramPoint {
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Part of routed experts that it would hold.
    pub hit_ratio: f64,
}

/// The tier's part of the loop.
#[derive(Debug)]
pub(super) struct Vram {
    part: VramPart,
    law: VramLaw,
    decision: VramDecision,
    figures: VramFigures,
    covered: Vec<bool>,
    costs: ChangeCosts,
    failed: Option<Arrangement>,
    /// Uses of the pools before this one.
    earlier: PoolCounts,
    memory: Option<DeviceMemory>,
    changes: Vec<Repooled>,
    changed: u64,
}

impl Vram {
    pub(super) fn new(part: VramPart) -> Self {
        Self {
            law: VramLaw::new(part.layout.clone(), part.config.clone()),
            decision: VramDecision::default(),
            figures: VramFigures::default(),
            covered: Vec::new(),
            costs: ChangeCosts {
                dense_bytes: Some(part.dense_bytes),
                ..ChangeCosts::default()
            },
            failed: None,
            earlier: PoolCounts::default(),
            memory: None,
            changes: Vec::new(),
            changed: 0,
            part,
        }
    }

    /// Takes over other settings.
    pub(super) fn reconfigure(&mut self, config: &VramConfig) {
        // The size is the command line's.
        let config = VramConfig {
            limit_bytes: self.part.config.limit_bytes,
            ..config.clone()
        };
        self.law.reconfigure(&config);
        self.part.config = config;
    }

    /// Reads the device and the shadow, lets the law decide, and orders what it wants.
    pub(super) fn tick(&mut self, now: Moment, sample: &Sample, idle: bool) {
        self.read();
        self.memory = self.part.source.memory();
        let applied = match self.part.link.pool_bytes() {
            0 => Arrangement::Cpu,
            pool_bytes => Arrangement::Reload { pool_bytes },
        };
        let available = |host: u64| {
            let cgroup = sample.cgroup.map_or(u64::MAX, |c| c.available_bytes);
            host.min(cgroup)
        };
        let seen = self.figures.steps.iter().any(|steps| steps.steps > 0);
        let observation = VramObservation {
            now,
            devices: &[self.memory],
            figures: seen.then_some(&self.figures),
            applied,
            link_bytes_per_s: self.part.link_bytes_per_s,
            costs: self.costs,
            host_available_bytes: sample.host.map(|host| available(host.available_bytes)),
            failed: self.failed.take(),
            idle,
        };
        self.law.tick(&observation, &mut self.decision);
        // Whole layers are placed when a model is loaded, which a running session cannot do anew.
        match self.decision.change.map(|change| change.kind) {
            Some(ChangeKind::Recreate) => {
                self.part.link.order(self.decision.arrangement.bytes());
            }
            Some(ChangeKind::Reload) | None => self.part.link.withdraw(),
        }
    }

    /// Takes in what the engine's side left.
    fn read(&mut self) {
        let mut published = self.part.link.published();
        self.changes = std::mem::take(&mut published.changes);
        self.figures.clone_from(&published.figures);
        self.covered.clone_from(&published.covered);
        drop(published);
        for change in &self.changes {
            self.changed += u64::from(change.bytes != change.before_bytes);
            if let Some(ended) = &change.ended {
                for count in [ended.small, ended.large] {
                    self.earlier.hits += count.hits;
                    self.earlier.misses += count.misses;
                    self.earlier.upload_bytes += bytes_of(count.uploaded_bytes);
                }
            }
            if change.refused.is_some() {
                self.failed = Some(Arrangement::Reload {
                    pool_bytes: change.asked_bytes,
                });
            } else {
                self.costs.recreate_ns = Some(change.took_ns);
                self.costs.state_bytes = Some(change.state_bytes);
            }
        }
    }

    /// Experts that need not be locked in RAM, by id.
    pub(super) fn covered(&self) -> Option<&[bool]> {
        (self.decision.cover && !self.covered.is_empty()).then_some(&self.covered)
    }

    /// Changes of the pool since the start.
    pub(super) fn changed(&self) -> u64 {
        self.changed
    }

    /// What pools of other sizes would do.
    pub(super) fn curve(&self) -> Vec<VramPoint> {
        let points = self.figures.curve.points.iter();
        points
            .filter_map(|point| {
                Some(VramPoint {
                    pool_bytes: point.pool_bytes,
                    hit_ratio: point.hit_ratio?,
                })
            })
            .collect()
    }

    pub(super) fn entry(&self) -> VramEntry {
        let pool_bytes = self.part.link.pool_bytes();
        let decision = &self.decision;
        let counts = self.figures.pool.counts();
        let ms = |ns: Option<f64>| ns.map(|ns| ns / 1e6);
        VramEntry {
            arrangement: if pool_bytes == 0 { "cpu" } else { "reload" }.to_owned(),
            pool_bytes,
            wanted_bytes: decision.arrangement.bytes(),
            rule: decision.rule,
            capacity_bytes: decision.capacity_bytes,
            binding: decision.binding,
            ceilings: VramCeiling::ALL
                .iter()
                .zip(decision.ceilings)
                .filter_map(|(c, bytes)| Some((c.label().to_owned(), bytes?)))
                .collect(),
            free_bytes: self.memory.map(|memory| memory.free_bytes),
            total_bytes: self.memory.map(|memory| memory.total_bytes),
            hits: self.earlier.hits + counts.hits,
            misses: self.earlier.misses + counts.misses,
            uploaded_bytes: self.earlier.upload_bytes + counts.upload_bytes,
            covered_experts: self.covered.iter().filter(|&&covered| covered).count() as u64,
            present_ms: ms(decision.expected.present_ns),
            reload_ms: ms(decision.expected.reload_ns),
            static_ms: ms(decision.expected.static_ns),
            cpu_ms: ms(decision.expected.cpu_ns),
            changes: self.changes.iter().map(VramChange::from).collect(),
        }
    }
}

impl VramEntry {
    /// Whether this tick deserves a line of its own after `before`.
    pub(super) fn differs(&self, before: &Self) -> bool {
        !self.changes.is_empty()
            || self.rule != before.rule
            || self.binding != before.binding
            || self.wanted_bytes != before.wanted_bytes
    }

    /// Part of the routed experts that were found in the device's memory; `None` before any was routed
    /// there.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub fn hit_ratio(&self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }
}

impl From<&Repooled> for VramChange {
    #[expect(clippy::cast_precision_loss, reason = "times far below 2^53 ns")]
    fn from(change: &Repooled) -> Self {
        Self {
            asked_bytes: change.asked_bytes,
            before_bytes: change.before_bytes,
            bytes: change.bytes,
            state_bytes: change.state_bytes,
            took_ms: change.took_ns as f64 / 1e6,
            refused: change.refused.clone(),
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "llama.cpp's MiB, not negative"
)]
fn bytes_of(bytes: f64) -> u64 {
    bytes.max(0.0) as u64
}
