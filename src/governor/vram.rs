//! The tier in a graphics device's memory: what the law sees each tick, what it orders, and what is told
//! of it.

use super::outcomes::Outcomes;
use super::tier::{VramChange, VramEntry, VramPoint};
use crate::engine::MemorySource;
use crate::plant::{Move, VramLink};
use crate::sensors::Sample;
use hotpin_controllers::Moment;
use hotpin_controllers::config::VramConfig;
use hotpin_controllers::vram::{
    Arrangement, ChangeKind, DeviceMemory, PoolLayout, VramCeiling, VramDecision, VramFigures,
    VramLaw, VramObservation,
};
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
    /// Whether whoever runs the session loads the model anew where that is ordered.
    pub can_move: bool,
    /// Bytes a second from host memory to the device, where they were measured.
    pub link_bytes_per_s: Option<f64>,
    /// Bytes of the dense weights there.
    pub dense_bytes: u64,
    /// Bytes of the context there, its pool apart.
    pub context_bytes: u64,
    /// Time that loading the model and making its context took, ns.
    pub load_ns: u64,
}

impl VramPart {
    /// Bytes that whole layers' experts take in an arrangement.
    pub(super) fn static_bytes(&self, arrangement: Arrangement) -> u64 {
        match arrangement {
            Arrangement::Static { .. } => self.layout.device_bytes(arrangement).iter().sum(),
            Arrangement::Reload { .. } | Arrangement::Cpu => 0,
        }
    }

    /// Settings as this session can follow them. The size is the command line's.
    fn followed(&self, config: &VramConfig) -> VramConfig {
        VramConfig {
            limit_bytes: self.config.limit_bytes,
            allow_static: self.can_move && config.allow_static,
            ..config.clone()
        }
    }
}

/// The tier's part of the loop.
#[derive(Debug)]
pub(super) struct Vram {
    part: VramPart,
    law: VramLaw,
    decision: VramDecision,
    figures: VramFigures,
    covered: Vec<bool>,
    memory: Option<DeviceMemory>,
    outcomes: Outcomes,
}

impl Vram {
    pub(super) fn new(part: VramPart) -> Self {
        Self {
            law: VramLaw::new(part.layout.clone(), part.followed(&part.config)),
            decision: VramDecision::default(),
            figures: VramFigures::default(),
            covered: Vec::new(),
            memory: None,
            outcomes: Outcomes::new(&part),
            part,
        }
    }

    /// Takes over other settings.
    pub(super) fn reconfigure(&mut self, config: &VramConfig) {
        self.law.reconfigure(&self.part.followed(config));
    }

    /// Reads the device and the shadow, lets the law decide, and orders what it wants.
    pub(super) fn tick(&mut self, now: Moment, sample: &Sample, idle: bool) {
        self.read();
        self.memory = self.part.source.memory();
        let applied = self.part.link.applied();
        let free_bytes = self.memory.map(|memory| memory.free_bytes);
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
            costs: self.outcomes.costs(&self.part, applied, free_bytes),
            host_available_bytes: sample.host.map(|host| available(host.available_bytes)),
            failed: self.outcomes.failed(),
            idle,
        };
        self.law.tick(&observation, &mut self.decision);
        let to = self.decision.arrangement;
        match self.decision.change {
            Some(change) if change.kind == ChangeKind::Recreate => {
                self.part.link.order(to.bytes());
            }
            Some(change) => self.part.link.order_move(Move {
                to,
                both_fit: change.both_fit,
            }),
            None => self.part.link.withdraw(),
        }
    }

    /// Takes in what the engine's side left.
    fn read(&mut self) {
        let mut published = self.part.link.published();
        let outcomes = std::mem::take(&mut published.changes);
        self.figures.clone_from(&published.figures);
        self.covered.clone_from(&published.covered);
        drop(published);
        self.outcomes.take(outcomes, &self.part);
    }

    /// Experts that need not be locked in RAM, by id.
    pub(super) fn covered(&self) -> Option<&[bool]> {
        (self.decision.cover && !self.covered.is_empty()).then_some(&self.covered)
    }

    /// Changes of the pool since the start.
    pub(super) fn changed(&self) -> u64 {
        self.outcomes.changed
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

    fn slots(&self, pool_bytes: u64) -> u64 {
        let plan = self.part.layout.plan(pool_bytes);
        plan.map_or(0, |plan| {
            plan.groups.iter().map(|group| u64::from(group.slots)).sum()
        })
    }

    pub(super) fn entry(&self) -> VramEntry {
        let applied = self.part.link.applied();
        let decision = &self.decision;
        let (earlier, counts) = (self.outcomes.earlier, self.figures.pool.counts());
        let ms = |ns: Option<f64>| ns.map(|ns| ns / 1e6);
        let (slots, static_layers, given_static_bytes) = match applied {
            Arrangement::Reload { pool_bytes } => (self.slots(pool_bytes), Vec::new(), 0),
            Arrangement::Static { bytes } => (0, self.part.layout.static_layers(bytes), bytes),
            Arrangement::Cpu => (0, Vec::new(), 0),
        };
        VramEntry {
            arrangement: applied.label().to_owned(),
            pool_bytes: self.part.link.pool_bytes(),
            slots,
            static_bytes: self.part.static_bytes(applied),
            static_layers,
            given_static_bytes,
            wanted: decision.arrangement.label().to_owned(),
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
            hits: earlier.hits + counts.hits,
            misses: earlier.misses + counts.misses,
            uploaded_bytes: earlier.upload_bytes + counts.upload_bytes,
            covered_experts: self.covered.iter().filter(|&&covered| covered).count() as u64,
            present_ms: ms(decision.expected.present_ns),
            reload_ms: ms(decision.expected.reload_ns),
            static_ms: ms(decision.expected.static_ns),
            cpu_ms: ms(decision.expected.cpu_ns),
            changes: self.outcomes.last.iter().map(VramChange::from).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotpin_controllers::vram::{DeviceLayout, LayerLayout, TensorLayout};

    const MIB: u64 = 1 << 20;

    #[derive(Debug)]
    struct Unseen;

    impl MemorySource for Unseen {
        fn memory(&self) -> Option<DeviceMemory> {
            None
        }
    }

    impl VramPart {
        /// Four layers of eight experts of 1 MiB; 8 MiB of dense weights, loaded in a second.
        pub(in crate::governor) fn example() -> Self {
            let layer = LayerLayout {
                device: Some(0),
                experts: 8,
                top_k: 2,
                tensors: vec![TensorLayout {
                    ggml_type: 8,
                    columns: 1024,
                    rows: 1024,
                    expert_bytes: MIB,
                }],
            };
            let device = DeviceLayout {
                alignment_bytes: 256,
                split: 1.0,
                most_bank_bytes: None,
                offload_tokens: None,
            };
            Self {
                link: Arc::default(),
                source: Arc::new(Unseen),
                layout: PoolLayout::new(vec![layer; 4], vec![device]).expect("layout"),
                config: VramConfig::default(),
                can_move: true,
                link_bytes_per_s: None,
                dense_bytes: 8 * MIB,
                context_bytes: MIB,
                load_ns: 1_000_000_000,
            }
        }
    }

    #[test]
    fn settings_are_followed_as_far_as_the_session_can_and_again_when_they_come_back() {
        let mut part = VramPart::example();
        part.config.limit_bytes = Some(7);
        let config = |allow_static| VramConfig {
            allow_static,
            limit_bytes: None,
            ..VramConfig::default()
        };
        let followed = |part: &VramPart, allow_static| {
            let followed = part.followed(&config(allow_static));
            (followed.allow_static, followed.limit_bytes)
        };
        for allowed in [true, false, true] {
            assert_eq!(followed(&part, allowed), (allowed, Some(7)));
        }
        part.can_move = false;
        assert_eq!(followed(&part, true), (false, Some(7)));
    }
}
