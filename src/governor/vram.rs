//! The tier in a graphics device's memory: what the law sees each tick, what it orders, and what is told
//! of it.

use super::tier::{VramChange, VramEntry, VramPoint};
use crate::engine::{MemorySource, PoolTotals};
use crate::plant::{Move, Moved, Outcome, VramLink};
use crate::sensors::Sample;
use hotpin_controllers::Moment;
use hotpin_controllers::config::VramConfig;
use hotpin_controllers::vram::{
    Arrangement, ChangeCosts, ChangeKind, DeviceMemory, PoolCounts, PoolLayout, VramCeiling,
    VramDecision, VramFigures, VramLaw, VramObservation,
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
    /// Bytes a second from host memory to the device, where they were measured.
    pub link_bytes_per_s: Option<f64>,
    /// Bytes of the dense weights there.
    pub dense_bytes: u64,
    /// Bytes of the context there, its pool apart.
    pub context_bytes: u64,
    /// Time that loading the model and making its context took, ns.
    pub load_ns: u64,
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
    changes: Vec<Outcome>,
    changed: u64,
    /// Time of the last change of placement, and bytes that were loaded for it.
    last_load: (u64, u64),
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
                context_bytes: Some(part.context_bytes),
                ..ChangeCosts::default()
            },
            last_load: (part.load_ns, part.dense_bytes),
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
        // The size is the command line's, and whether models can be loaded anew the verb's.
        let config = VramConfig {
            limit_bytes: self.part.config.limit_bytes,
            allow_static: self.part.config.allow_static && config.allow_static,
            ..config.clone()
        };
        self.law.reconfigure(&config);
        self.part.config = config;
    }

    /// Reads the device and the shadow, lets the law decide, and orders what it wants.
    pub(super) fn tick(&mut self, now: Moment, sample: &Sample, idle: bool) {
        self.read();
        self.memory = self.part.source.memory();
        let applied = self.part.link.applied();
        self.costs.reload_ns = Some(self.load_ns(applied));
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

    /// Time that loading the model anew would take, ns: as long as it took last, and with more to be
    /// loaded longer in proportion.
    fn load_ns(&self, applied: Arrangement) -> u64 {
        let (took_ns, loaded_bytes) = self.last_load;
        let free_bytes = self.memory.map_or(u64::MAX, |memory| memory.free_bytes);
        let experts_bytes = free_bytes
            .saturating_add(applied.bytes())
            .min(self.part.layout.host_bytes());
        let bytes = self.part.dense_bytes.saturating_add(experts_bytes);
        let scaled = u128::from(took_ns) * u128::from(bytes.max(loaded_bytes))
            / u128::from(loaded_bytes.max(1));
        u64::try_from(scaled).unwrap_or(u64::MAX)
    }

    /// Takes in what the engine's side left.
    fn read(&mut self) {
        let mut published = self.part.link.published();
        self.changes = std::mem::take(&mut published.changes);
        self.figures.clone_from(&published.figures);
        self.covered.clone_from(&published.covered);
        drop(published);
        for change in std::mem::take(&mut self.changes) {
            match &change {
                Outcome::Pool(pool) => {
                    self.changed += u64::from(pool.bytes != pool.before_bytes);
                    self.note_end(pool.ended.as_ref());
                    if pool.refused.is_some() {
                        self.failed = Some(Arrangement::Reload {
                            pool_bytes: pool.asked_bytes,
                        });
                    } else {
                        self.costs.recreate_ns = Some(pool.took_ns);
                        self.costs.state_bytes = Some(pool.state_bytes);
                    }
                }
                Outcome::Placed(moved) => self.note_move(moved),
            }
            self.changes.push(change);
        }
    }

    fn note_move(&mut self, moved: &Moved) {
        self.changed += u64::from(moved.now != moved.before);
        self.note_end(moved.ended.as_ref());
        if moved.refused.is_some() && moved.now != moved.asked {
            self.failed = Some(moved.asked);
            return;
        }
        let on_device = match moved.now {
            Arrangement::Static { .. } => self.part.layout.device_bytes(moved.now).iter().sum(),
            Arrangement::Reload { .. } | Arrangement::Cpu => 0,
        };
        self.last_load = (moved.took_ns, self.part.dense_bytes + on_device);
        self.costs.state_bytes = Some(moved.state_bytes);
    }

    /// Takes in the uses of a pool that is no more.
    fn note_end(&mut self, ended: Option<&PoolTotals>) {
        let Some(ended) = ended else { return };
        for count in [ended.small, ended.large] {
            self.earlier.hits += count.hits;
            self.earlier.misses += count.misses;
            self.earlier.upload_bytes += bytes_of(count.uploaded_bytes);
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

    fn slots(&self, pool_bytes: u64) -> u64 {
        let plan = self.part.layout.plan(pool_bytes);
        plan.map_or(0, |plan| {
            plan.groups.iter().map(|group| u64::from(group.slots)).sum()
        })
    }

    pub(super) fn entry(&self) -> VramEntry {
        let applied = self.part.link.applied();
        let decision = &self.decision;
        let counts = self.figures.pool.counts();
        let ms = |ns: Option<f64>| ns.map(|ns| ns / 1e6);
        VramEntry {
            arrangement: applied.label().to_owned(),
            pool_bytes: self.part.link.pool_bytes(),
            slots: match applied {
                Arrangement::Reload { pool_bytes } => self.slots(pool_bytes),
                Arrangement::Static { .. } | Arrangement::Cpu => 0,
            },
            static_bytes: match applied {
                Arrangement::Static { .. } => self.part.layout.device_bytes(applied).iter().sum(),
                Arrangement::Reload { .. } | Arrangement::Cpu => 0,
            },
            given_static_bytes: match applied {
                Arrangement::Static { bytes } => bytes,
                Arrangement::Reload { .. } | Arrangement::Cpu => 0,
            },
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

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "llama.cpp's MiB, not negative"
)]
fn bytes_of(bytes: f64) -> u64 {
    bytes.max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotpin_controllers::vram::{DeviceLayout, LayerLayout, TensorLayout};

    const MIB: u64 = 1 << 20;
    const SECOND: u64 = 1_000_000_000;

    #[derive(Debug)]
    struct Unseen;

    impl MemorySource for Unseen {
        fn memory(&self) -> Option<DeviceMemory> {
            None
        }
    }

    /// Four layers of eight experts of 1 MiB; 8 MiB of dense weights, loaded in a second.
    fn tier() -> Vram {
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
        Vram::new(VramPart {
            link: Arc::default(),
            source: Arc::new(Unseen),
            layout: PoolLayout::new(vec![layer; 4], vec![device]).expect("layout"),
            config: VramConfig::default(),
            link_bytes_per_s: None,
            dense_bytes: 8 * MIB,
            context_bytes: MIB,
            load_ns: SECOND,
        })
    }

    #[test]
    fn loading_anew_costs_what_it_took_last_for_its_bytes() {
        let mut tier = tier();
        assert_eq!(
            tier.load_ns(Arrangement::Cpu),
            5 * SECOND,
            "all 32 MiB more"
        );
        let free = |free_bytes| DeviceMemory {
            total_bytes: 64 * MIB,
            free_bytes,
        };
        tier.memory = Some(free(8 * MIB));
        assert_eq!(
            tier.load_ns(Arrangement::Cpu),
            2 * SECOND,
            "as much as fits"
        );
        let asked = Arrangement::Static { bytes: 17 * MIB };
        let moved = Moved {
            asked,
            before: Arrangement::Cpu,
            now: asked,
            ended: None,
            state_bytes: 7,
            took_ns: 9 * SECOND,
            refused: None,
        };
        tier.note_move(&moved);
        assert_eq!((tier.failed, tier.changed), (None, 1));
        assert_eq!(tier.costs.state_bytes, Some(7));
        tier.memory = Some(free(0));
        // Two layers of it and the dense weights took 9 s; 17 MiB and those take a little more.
        assert_eq!(tier.load_ns(asked), 9 * SECOND * 25 / 24);
        let refused = Moved {
            asked,
            before: Arrangement::Cpu,
            now: Arrangement::Cpu,
            took_ns: SECOND,
            refused: Some("no room".into()),
            ..moved
        };
        tier.note_move(&refused);
        assert_eq!((tier.failed, tier.changed), (Some(asked), 1));
        assert_eq!(
            tier.load_ns(asked),
            9 * SECOND * 25 / 24,
            "it tells no time"
        );
    }
}
