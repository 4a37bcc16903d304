//! Capacity: the lowest of six ceilings, followed down at once and up slowly.

use crate::config::{CapacityConfig, Checked};
use crate::decision::{Ceiling, Decision};
use crate::demand::Demand;
use crate::num::{filter_share, to_bytes};
use crate::observe::Observation;
use crate::pressure::{PressureInput, PressureLoop};
use crate::sense::{Sizes, Step};
use crate::value::{ValueInput, ValueLoop};

/// What the capacity law reads besides the observation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CapacityInput {
    pub step: Step,
    /// Tokens decoded since the last tick.
    pub tokens: f64,
    /// Bytes fetched since the last tick.
    pub fetched_bytes: u64,
    /// Share of booked hits that must have faulted, when known.
    pub phantom_share: Option<f64>,
    /// Stall seconds saved per second and GiB at the margin, when known.
    pub marginal_per_gib: Option<f64>,
}

/// The law's state.
#[derive(Clone, Debug)]
pub(crate) struct CapacityLaw {
    config: CapacityConfig,
    total_bytes: u64,
    floor_bytes: u64,
    pressure: PressureLoop,
    value: ValueLoop,
    /// What others take of the host's memory and of the cgroup's.
    demand: [Demand; 2],
    mover: Mover,
    /// The host's ceiling when its memory was last known.
    host_bytes: Option<u64>,
    had_cgroup: bool,
}

impl CapacityLaw {
    pub fn new(config: &Checked, sizes: &Sizes) -> Self {
        let config = config.get();
        Self {
            config: config.capacity.clone(),
            total_bytes: sizes.total_bytes,
            floor_bytes: floor_bytes(&config.capacity, sizes),
            pressure: PressureLoop::new(&config.pressure),
            value: ValueLoop::new(&config.value),
            demand: Default::default(),
            mover: Mover::default(),
            host_bytes: None,
            had_cgroup: false,
        }
    }

    /// Replaces the user's own ceiling, bytes.
    pub fn limit(&mut self, bytes: Option<u64>) {
        self.config.limit_bytes = bytes;
    }

    /// Takes over other settings; the user's own ceiling stays.
    pub fn reconfigure(&mut self, config: &Checked, sizes: &Sizes) {
        let config = config.get();
        self.config = CapacityConfig {
            limit_bytes: self.config.limit_bytes,
            ..config.capacity.clone()
        };
        self.floor_bytes = floor_bytes(&config.capacity, sizes);
        self.pressure.reconfigure(&config.pressure);
        self.value.reconfigure(&config.value);
    }

    /// Whether the marginal value of capacity is wanted.
    pub fn wants_marginal(&self) -> bool {
        self.value.is_priced()
    }

    /// Capacity of the last tick, bytes.
    pub fn capacity_bytes(&self) -> Option<u64> {
        self.mover.capacity_bytes.map(to_bytes)
    }

    /// Decides capacity, the ceilings, which of them binds, and the cause of pressure.
    pub fn decide(
        &mut self,
        observation: &Observation<'_>,
        input: &CapacityInput,
        out: &mut Decision,
    ) {
        let elapsed_s = input.step.elapsed_s;
        let mut memory =
            MemoryCeilings::read(&self.config, observation, &mut self.demand, elapsed_s);
        let blind = self.remember(&mut memory);
        let mut ceilings = [
            Some(self.total_bytes),
            self.config.limit_bytes,
            memory.host_bytes,
            memory.cgroup_bytes,
            None,
            None,
        ];
        let (_, reference_bytes) = lowest(&ceilings);
        let applied_bytes = self.capacity_bytes();
        let pressure = self.pressure.update(&PressureInput {
            step: input.step,
            sample: observation.pressure,
            headroom_bytes: memory.headroom_bytes,
            fetched_bytes: input.fetched_bytes,
            phantom_share: input.phantom_share,
            reference_bytes,
            applied_bytes,
            pinned_bytes: observation.held.pinned_bytes,
            floor_bytes: self.floor_bytes,
        });
        let value = self.value.update(&ValueInput {
            step: input.step,
            tokens: input.tokens,
            marginal_per_gib: input.marginal_per_gib,
            reference_bytes,
            applied_bytes,
            floor_bytes: self.floor_bytes,
        });
        ceilings[4] = pressure.ceiling_bytes;
        ceilings[5] = value.ceiling_bytes;
        let (binding, target_bytes) = lowest(&ceilings);
        let followed_bytes = self.mover.follow(
            &self.config,
            &Goal {
                step: input.step,
                target_bytes: target_bytes as f64,
                floor_bytes: self.floor_bytes as f64,
                memory_bytes: memory.lowest_bytes(),
                yielding: binding != Ceiling::Value,
                resumed: value.resumed,
                blind,
            },
        );
        // Floating point may round a huge ceiling up.
        out.capacity_bytes = followed_bytes.min(target_bytes);
        out.binding = binding;
        out.ceilings = ceilings;
        out.pressure_cause = pressure.cause;
    }

    /// Keeps the host's ceiling where it was while its memory, known before, cannot be read. Returns whether a
    /// memory sensor is missing so that nothing may grow. A cgroup without a limit is not told from one that
    /// cannot be read, so that there the hold alone begins anew.
    fn remember(&mut self, memory: &mut MemoryCeilings) -> bool {
        let lost_host = memory.host_bytes.is_none() && self.host_bytes.is_some();
        if lost_host {
            memory.host_bytes = self.host_bytes;
        }
        self.host_bytes = memory.host_bytes;
        let has_cgroup = memory.cgroup_bytes.is_some();
        let had_cgroup = std::mem::replace(&mut self.had_cgroup, has_cgroup);
        lost_host || (had_cgroup && !has_cgroup)
    }
}

/// Where the pressure and value ceilings stop, bytes.
fn floor_bytes(config: &CapacityConfig, sizes: &Sizes) -> u64 {
    config
        .floor_bytes
        .unwrap_or(sizes.cycle_bytes)
        .min(sizes.total_bytes)
}

/// The lowest ceiling; of equals, the first in [`Ceiling::ALL`].
fn lowest(ceilings: &[Option<u64>; 6]) -> (Ceiling, u64) {
    Ceiling::ALL
        .into_iter()
        .zip(ceilings)
        .filter_map(|(ceiling, bytes)| bytes.map(|bytes| (ceiling, bytes)))
        .min_by_key(|&(ceiling, bytes)| (bytes, ceiling))
        .unwrap_or((Ceiling::Model, 0))
}

/// The feed-forward ceilings. Our locked bytes have left what is available and are added back;
/// transit is page cache, which `available` still counts. What others will have taken before it can be given
/// up is taken off.
#[derive(Clone, Copy, Debug)]
struct MemoryCeilings {
    host_bytes: Option<u64>,
    cgroup_bytes: Option<u64>,
    headroom_bytes: Option<u64>,
}

impl MemoryCeilings {
    fn read(
        config: &CapacityConfig,
        observation: &Observation<'_>,
        demand: &mut [Demand; 2],
        elapsed_s: f64,
    ) -> Self {
        let pinned_bytes = observation.held.pinned_bytes;
        let host = observation.host.map(|host| host.available_bytes);
        let cgroup = observation.cgroup.map(|cgroup| cgroup.available_bytes);
        let reserved = [
            (host, config.host_reserve_bytes),
            (cgroup, config.cgroup_reserve_bytes),
        ];
        let mut ceiling = |which: usize| {
            let (available, reserve): (Option<u64>, u64) = reserved[which];
            let free = available.map(|bytes| bytes.saturating_add(pinned_bytes));
            let ahead = demand[which].ahead_bytes(free, elapsed_s, config.demand_lead_s, reserve);
            free.map(|bytes| bytes.saturating_sub(reserve.saturating_add(ahead)))
        };
        let headroom = |(available, reserve): (Option<u64>, u64)| {
            available.map(|bytes| bytes.saturating_sub(reserve))
        };
        Self {
            host_bytes: ceiling(0),
            cgroup_bytes: ceiling(1),
            headroom_bytes: reserved.into_iter().filter_map(headroom).min(),
        }
    }

    fn lowest_bytes(&self) -> Option<f64> {
        [self.host_bytes, self.cgroup_bytes]
            .into_iter()
            .flatten()
            .min()
            .map(|bytes| bytes as f64)
    }
}

/// Where capacity should go this tick.
#[derive(Clone, Copy, Debug)]
struct Goal {
    step: Step,
    /// Lowest ceiling.
    target_bytes: f64,
    /// Below this no growth waits: less than a token cycle is of no use.
    floor_bytes: f64,
    /// Lower of the two noisy ceilings.
    memory_bytes: Option<f64>,
    /// A shrink now yields to others and delays growth.
    yielding: bool,
    /// An idle session works again: its memory has stayed free, so it is taken back at once.
    resumed: bool,
    /// A sensor is missing: no growth on its silence.
    blind: bool,
}

/// Follows the target: down at once; up after a quiet hold, beyond a dead-band, at a slew.
#[derive(Clone, Debug, Default)]
struct Mover {
    capacity_bytes: Option<f64>,
    /// Capacity before the present run of shrinks.
    mark_bytes: f64,
    held_since_s: f64,
    /// `memory_bytes`, falls believed at once and rises slowly.
    calm_bytes: Option<f64>,
    growing: bool,
}

impl Mover {
    fn follow(&mut self, config: &CapacityConfig, goal: &Goal) -> u64 {
        self.calm(config, goal);
        let dead_band = config.dead_band_bytes as f64;
        let reach_bytes = self
            .calm_bytes
            .map_or(goal.target_bytes, |calm| calm.min(goal.target_bytes));
        if goal.blind {
            self.held_since_s = goal.step.now_s;
            self.growing = false;
        }
        let capacity = match self.capacity_bytes {
            None => goal.target_bytes,
            Some(capacity) if goal.target_bytes < capacity => {
                self.shrunk(goal, dead_band);
                goal.target_bytes
            }
            Some(capacity) if goal.blind => capacity,
            Some(capacity) if goal.resumed => reach_bytes.max(capacity),
            Some(capacity) => self.grow(config, goal, capacity, reach_bytes),
        };
        let capacity = capacity.max(goal.floor_bytes.min(goal.target_bytes));
        if capacity >= self.mark_bytes || goal.step.first {
            self.mark_bytes = capacity;
        }
        self.capacity_bytes = Some(capacity);
        to_bytes(capacity)
    }

    fn calm(&mut self, config: &CapacityConfig, goal: &Goal) {
        self.calm_bytes = goal.memory_bytes.map(|memory| match self.calm_bytes {
            Some(calm) if memory > calm => {
                calm + (memory - calm) * filter_share(goal.step.dt_s, config.rise_filter_s)
            }
            _ => memory,
        });
    }

    fn shrunk(&mut self, goal: &Goal, dead_band: f64) {
        self.growing = false;
        if self.mark_bytes - goal.target_bytes > dead_band {
            self.mark_bytes = goal.target_bytes;
            if goal.yielding {
                self.held_since_s = goal.step.now_s;
            }
        }
    }

    fn grow(&mut self, config: &CapacityConfig, goal: &Goal, capacity: f64, reach: f64) -> f64 {
        let dead_band = config.dead_band_bytes as f64;
        let quiet = goal.step.now_s - self.held_since_s >= config.quiet_hold_s;
        // An exact ceiling well below the noisy ones needs no dead-band.
        let exact = self
            .calm_bytes
            .is_none_or(|calm| calm >= goal.target_bytes + dead_band);
        let enough = exact || reach > capacity + dead_band;
        self.growing = quiet && reach > capacity && (self.growing || enough);
        if !self.growing {
            return capacity;
        }
        let step_bytes = config.growth_bytes_per_s as f64 * goal.step.dt_s;
        (capacity + step_bytes).min(reach)
    }
}
