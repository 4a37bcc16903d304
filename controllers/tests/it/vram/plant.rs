//! One card, an engine whose time is made of bytes, and others that want the card's memory.

use super::small;
use crate::plant::{MIB, Random};
use hotpin_controllers::Moment;
use hotpin_controllers::config::VramConfig;
use hotpin_controllers::vram::{
    Arrangement, ChangeCosts, DeviceMemory, PoolLayout, Routed, Tracker, VramDecision, VramFigures,
    VramLaw, VramObservation, VramRule,
};

/// Time between ticks.
const TICK_NS: u64 = 100_000_000;

/// What bytes and tokens take, ns.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    pub dense_ns: f64,
    pub vram_ns_per_byte: f64,
    pub upload_ns_per_byte: f64,
    pub cpu_ns_per_byte: f64,
}

/// Which sensors there are.
#[derive(Clone, Copy, Debug)]
pub struct Sensors {
    pub memory: bool,
    pub figures: bool,
    pub link: bool,
    /// What the link's sensor says for each ns that a byte takes.
    pub link_factor: f64,
    pub recreate: bool,
    pub reload: bool,
    pub context: bool,
    pub host: bool,
}

/// Routing: this share of it goes to the first `hot` experts of each layer.
#[derive(Clone, Copy, Debug)]
pub struct Skew {
    pub hot: u32,
    pub share: f64,
}

pub struct Card {
    pub layout: PoolLayout,
    pub tracker: Tracker,
    pub law: VramLaw,
    pub out: VramDecision,
    pub applied: Arrangement,
    pub total_bytes: u64,
    /// What others want; they get what is free.
    pub others_bytes: u64,
    taken_bytes: u64,
    pub rates: Rates,
    pub skew: Skew,
    pub width: u32,
    pub idle: bool,
    pub recreate_ns: u64,
    pub reload_ns: u64,
    pub state_bytes: u64,
    /// Pools above this cannot be made.
    pub fails_above_bytes: u64,
    /// Arrangements with this label cannot be made.
    pub refuses: Option<&'static str>,
    pub sensors: Sensors,
    /// Changes that were made: when (seconds), to what, by which rule.
    pub changes: Vec<(f64, Arrangement, VramRule)>,
    pub failures: u32,
    pub now_ns: u64,
    pub tokens: u64,
    random: Random,
    figures: VramFigures,
    failed: Option<Arrangement>,
}

pub fn config() -> VramConfig {
    VramConfig {
        reserve_bytes: 128 * MIB,
        slack_share: 0.0,
        ..VramConfig::default()
    }
}

impl Card {
    pub fn new(config: &VramConfig) -> Self {
        Self::with_layout(small(), config)
    }

    pub fn with_layout(layout: PoolLayout, config: &VramConfig) -> Self {
        Self {
            tracker: Tracker::new(layout.clone(), Arrangement::Cpu, config),
            law: VramLaw::new(layout.clone(), config.clone()),
            layout,
            out: VramDecision::default(),
            applied: Arrangement::Cpu,
            total_bytes: 700 * MIB,
            others_bytes: 100 * MIB,
            taken_bytes: 0,
            rates: Rates {
                dense_ns: 5e6,
                vram_ns_per_byte: 0.02,
                upload_ns_per_byte: 1.0,
                cpu_ns_per_byte: 0.3,
            },
            skew: Skew {
                hot: 8,
                share: 0.95,
            },
            width: 1,
            idle: false,
            recreate_ns: 500_000_000,
            reload_ns: 20_000_000_000,
            state_bytes: 10 * MIB,
            fails_above_bytes: u64::MAX,
            refuses: None,
            sensors: Sensors {
                memory: true,
                figures: true,
                link: true,
                link_factor: 1.0,
                recreate: true,
                reload: true,
                context: true,
                host: true,
            },
            changes: Vec::new(),
            failures: 0,
            now_ns: 1_000_000_000,
            tokens: 0,
            random: Random(11),
            figures: VramFigures::default(),
            failed: None,
        }
    }

    /// A card that has run for a while.
    pub fn warm(config: &VramConfig) -> Self {
        let mut card = Self::new(config);
        card.run(60.0);
        card.changes.clear();
        card
    }

    pub fn held_bytes(&self) -> u64 {
        self.layout.device_bytes(self.applied).iter().sum()
    }

    pub fn free_bytes(&self) -> u64 {
        self.total_bytes
            .saturating_sub(self.taken_bytes + self.held_bytes())
    }

    pub fn now_s(&self) -> f64 {
        self.now_ns as f64 / 1e9
    }

    pub fn run(&mut self, seconds: f64) {
        self.run_with(seconds, |_| {});
    }

    /// Runs, and lets `between` change the world before each tick.
    pub fn run_with(&mut self, seconds: f64, mut between: impl FnMut(&mut Self)) {
        let end_s = self.now_s() + seconds;
        while self.now_s() < end_s {
            between(self);
            self.tick();
            let next_ns = self.now_ns + TICK_NS;
            while !self.idle && self.now_ns < next_ns {
                self.decode();
            }
            self.now_ns = self.now_ns.max(next_ns);
        }
    }

    pub fn tick(&mut self) {
        let left_bytes = self.total_bytes.saturating_sub(self.held_bytes());
        self.taken_bytes = self.others_bytes.min(left_bytes);
        self.tracker.figures(&mut self.figures);
        let sensors = self.sensors;
        let memory = DeviceMemory {
            total_bytes: self.total_bytes,
            free_bytes: self.free_bytes(),
        };
        let observation = VramObservation {
            now: Moment { ns: self.now_ns },
            devices: &[sensors.memory.then_some(memory)],
            figures: sensors.figures.then_some(&self.figures),
            applied: self.applied,
            link_bytes_per_s: sensors
                .link
                .then_some(1e9 / (self.rates.upload_ns_per_byte * sensors.link_factor)),
            costs: ChangeCosts {
                recreate_ns: sensors.recreate.then_some(self.recreate_ns),
                reload_ns: sensors.reload.then_some(self.reload_ns),
                context_bytes: sensors.context.then_some(20 * MIB),
                dense_bytes: sensors.context.then_some(50 * MIB),
                state_bytes: Some(self.state_bytes),
            },
            host_available_bytes: sensors.host.then_some(100 * MIB),
            failed: self.failed.take(),
            idle: self.idle,
        };
        self.law.tick(&observation, &mut self.out);
        if self.out.change.is_some() {
            self.change();
        }
    }

    fn change(&mut self) {
        let to = self.out.arrangement;
        let kind = self.applied.change_to(to).unwrap();
        self.now_ns += match kind {
            hotpin_controllers::vram::ChangeKind::Recreate => self.recreate_ns,
            hotpin_controllers::vram::ChangeKind::Reload => self.reload_ns,
        };
        let needs: u64 = self.layout.device_bytes(to).iter().sum();
        let could = self.total_bytes.saturating_sub(self.taken_bytes);
        let refused = self.refuses == Some(to.label());
        if needs > could || refused || to.bytes() > self.fails_above_bytes {
            self.failed = Some(to);
            self.failures += 1;
            return;
        }
        self.applied = to;
        self.tracker.arranged(to);
        let at_s = self.now_s();
        self.changes.push((at_s, to, self.out.rule));
    }

    fn decode(&mut self) {
        let mut ns = self.rates.dense_ns * (1.0 + 0.02 * f64::from(self.width));
        let placed = match self.applied {
            Arrangement::Static { bytes } => self.layout.static_layers(bytes),
            _ => Vec::new(),
        };
        for layer in 0..self.layout.layers().len() {
            let ids: Vec<i32> = (0..self.width).flat_map(|_| self.row()).collect();
            let mut distinct = ids.clone();
            distinct.sort_unstable();
            distinct.dedup();
            let bytes = distinct.len() as f64 * self.layout.layers()[layer].expert_bytes() as f64;
            let routed = self.tracker.route(layer, &ids, self.width as usize);
            ns += match routed {
                Routed::Pooled { upload_bytes, .. } => {
                    bytes * self.rates.vram_ns_per_byte
                        + upload_bytes as f64 * self.rates.upload_ns_per_byte
                }
                _ if placed.contains(&layer) => bytes * self.rates.vram_ns_per_byte,
                _ => bytes * self.rates.cpu_ns_per_byte,
            };
        }
        let noise = 0.98 + 0.04 * self.random.unit();
        let took = std::time::Duration::from_secs_f64(ns * noise / 1e9);
        let ns = u64::try_from(took.as_nanos()).unwrap();
        self.now_ns += ns;
        self.tokens += u64::from(self.width);
        self.tracker.decoded(self.width, ns, true);
    }

    fn row(&mut self) -> Vec<i32> {
        let layer = &self.layout.layers()[0];
        let (experts, top_k) = (layer.experts, layer.top_k as usize);
        let mut ids: Vec<i32> = Vec::with_capacity(top_k);
        while ids.len() < top_k {
            let hot = self.random.unit() < self.skew.share;
            let among = if hot { self.skew.hot } else { experts };
            let id = self.random.below(among).cast_signed();
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        ids
    }
}
