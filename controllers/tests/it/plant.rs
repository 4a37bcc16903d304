//! A plant that is just big enough to regulate: experts, a page cache, a host and a cgroup with other
//! users, and sensors that can be taken away.

use hotpin_controllers::{
    CgroupMemory, Decision, EngineTotals, ExpertId, Faults, Held, HostMemory, LockLimits,
    ModelShape, Moment, Observation, Policy, Pressure, Residence,
};

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
/// Bytes of one expert.
pub const EXPERT: u64 = 2 * MIB;

/// SplitMix64: one seed, one run.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u32) -> u32 {
        u32::try_from(self.next() % u64::from(limit)).unwrap()
    }

    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// How tokens are routed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Routing {
    /// Every expert alike.
    Uniform,
    /// A hot window of `width` experts per layer, starting at `first`, gets `share` of the routings.
    Hot { first: u32, width: u32, share: f64 },
}

/// Which sensors exist.
#[derive(Clone, Copy, Debug)]
pub struct Sensors {
    pub host: bool,
    pub cgroup: bool,
    pub psi: bool,
    pub reclaim: bool,
    pub faults: bool,
    pub engine: bool,
    pub stall: bool,
    pub counts: bool,
}

impl Sensors {
    pub const ALL: Self = Self {
        host: true,
        cgroup: true,
        psi: true,
        reclaim: true,
        faults: true,
        engine: true,
        stall: true,
        counts: true,
    };
}

pub struct Plant {
    pub shape: ModelShape,
    pub random: Random,
    pub routing: Routing,
    pub sensors: Sensors,
    pub now: Moment,
    pub tick_ns: u64,
    pub tokens_per_tick: u32,
    /// Bytes of the host taken by others.
    pub host_total: u64,
    pub others: u64,
    /// Cgroup limit, if there is one, and what else lives in it.
    pub cgroup_limit: Option<u64>,
    pub cgroup_others: u64,
    /// Added per second of time.
    pub stall_fraction: f64,
    pub reclaim_bytes_per_s: u64,
    /// Share of hits that fault page by page, unknown to the books.
    pub phantom_share: f64,
    pub miss_ns: u64,
    pub locks: LockLimits,
    pub lock_shortfall: u64,
    /// Locks beyond this fail.
    pub lock_most: Option<u64>,
    pub counts: Vec<u32>,
    pub residence: Vec<Residence>,
    /// Experts that VRAM has, if there is a card.
    pub covered: Option<Vec<bool>>,
    pub engine: EngineTotals,
    pressure: Pressure,
    faults: Faults,
    used_at: Vec<u64>,
    pub out: Decision,
    pub swaps: usize,
}

impl Plant {
    /// 8 layers of 64 experts, top-4: 1 GiB of experts, a token cycle of 64 MiB.
    pub fn new(capacity: u64) -> Self {
        Self::shaped(ModelShape::uniform(8, 64, EXPERT, 4).unwrap(), capacity)
    }

    /// A host on which the default reserve leaves `capacity` bytes.
    pub fn shaped(shape: ModelShape, capacity: u64) -> Self {
        let experts = shape.total_experts();
        Self {
            shape,
            random: Random(7),
            routing: Routing::Hot {
                first: 0,
                width: 12,
                share: 0.9,
            },
            sensors: Sensors::ALL,
            now: Moment { ns: 1_000_000_000 },
            tick_ns: 100_000_000,
            tokens_per_tick: 2,
            host_total: 24 * GIB,
            others: 24 * GIB - GIB - capacity,
            cgroup_limit: None,
            cgroup_others: 0,
            stall_fraction: 0.0,
            reclaim_bytes_per_s: 0,
            phantom_share: 0.0,
            miss_ns: 2_000_000,
            locks: LockLimits {
                memlock_bytes: None,
                locked_elsewhere_bytes: 0,
                map_budget_bytes: None,
            },
            lock_shortfall: 0,
            lock_most: None,
            counts: vec![0; experts],
            residence: vec![Residence::Absent; experts],
            covered: None,
            engine: EngineTotals::default(),
            pressure: Pressure {
                direct_reclaim_pages: Some(0),
                ..Pressure::default()
            },
            faults: Faults::default(),
            used_at: vec![0; experts],
            out: Decision::default(),
            swaps: 0,
        }
    }

    pub fn pinned_bytes(&self) -> u64 {
        self.bytes_in(Residence::Pinned)
    }

    fn bytes_in(&self, residence: Residence) -> u64 {
        (0u32..)
            .zip(&self.residence)
            .filter(|(_, r)| **r == residence)
            .map(|(index, _)| self.shape.bytes(ExpertId(index)))
            .sum()
    }

    /// One tick: decode, sense, decide, act.
    pub fn tick(&mut self, policy: &mut dyn Policy) -> &Decision {
        self.now.ns += self.tick_ns;
        for _ in 0..self.tokens_per_tick {
            self.decode();
        }
        self.totals();
        let mut out = std::mem::take(&mut self.out);
        policy.tick(&self.observation(), &mut out);
        self.act(&out);
        self.out = out;
        &self.out
    }

    /// Runs for some seconds.
    pub fn run(&mut self, policy: &mut dyn Policy, seconds: f64) {
        let ticks = seconds * 1e9 / self.tick_ns as f64;
        let mut done = 0.0;
        while done < ticks {
            self.tick(policy);
            done += 1.0;
        }
    }

    fn decode(&mut self) {
        self.engine.decode_tokens += 1;
        for layer in 0..self.shape.layers() {
            let experts = self.shape.experts_in(layer);
            let mut picked = Vec::new();
            while picked.len() < self.shape.top_k_in(layer) as usize {
                let index = match self.routing {
                    Routing::Hot {
                        first,
                        width,
                        share,
                    } if self.random.unit() < share => {
                        // Each layer has its own window.
                        let shift = u32::try_from(layer).unwrap() * 5;
                        (first + shift + self.random.below(width)) % experts
                    }
                    _ => self.random.below(experts),
                };
                if !picked.contains(&index) {
                    picked.push(index);
                    self.route(self.shape.id(layer, index));
                }
            }
        }
    }

    fn route(&mut self, expert: ExpertId) {
        let index = expert.index();
        self.counts[index] = self.counts[index].wrapping_add(1);
        self.used_at[index] = self.engine.decode_tokens;
        let bytes = self.shape.bytes(expert);
        if self.residence[index] == Residence::Absent {
            self.engine.misses += 1;
            self.engine.stall_ns += self.miss_ns;
            self.engine.fetch_bytes += bytes;
            self.residence[index] = Residence::Transit;
        } else {
            self.engine.hits += 1;
            if self.random.unit() < self.phantom_share {
                self.faults.major += bytes / 4096;
            }
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "small positive numbers"
    )]
    fn totals(&mut self) {
        let tick_us = self.tick_ns as f64 / 1e3;
        self.pressure.some_total_us += (tick_us * self.stall_fraction) as u64;
        let reclaimed = self.reclaim_bytes_per_s as f64 * tick_us / 1e6 / 4096.0;
        if let Some(pages) = &mut self.pressure.direct_reclaim_pages {
            *pages += reclaimed as u64;
        }
    }

    pub fn observation(&self) -> Observation<'_> {
        let pinned = self.pinned_bytes();
        let sensors = self.sensors;
        let pressure = Pressure {
            psi_absent: !sensors.psi,
            direct_reclaim_pages: self
                .pressure
                .direct_reclaim_pages
                .filter(|_| sensors.reclaim),
            ..self.pressure
        };
        Observation {
            now: self.now,
            host: sensors.host.then(|| HostMemory {
                total_bytes: self.host_total,
                available_bytes: self.host_total.saturating_sub(self.others + pinned),
            }),
            cgroup: self
                .cgroup_limit
                .filter(|_| sensors.cgroup)
                .map(|limit| CgroupMemory {
                    limit_bytes: limit,
                    available_bytes: limit.saturating_sub(self.cgroup_others + pinned),
                }),
            pressure: (sensors.psi || sensors.reclaim).then_some(pressure),
            locks: self.locks,
            faults: sensors.faults.then_some(self.faults),
            engine: sensors.engine.then_some(self.engine),
            stall_known: sensors.stall,
            decode_counts: sensors.counts.then_some(&self.counts),
            prefill_counts: None,
            residence: &self.residence,
            covered: self.covered.as_deref(),
            held: Held {
                pinned_bytes: pinned,
                transit_bytes: self.bytes_in(Residence::Transit),
                lock_shortfall_bytes: self.lock_shortfall,
            },
        }
    }

    fn act(&mut self, out: &Decision) {
        self.swaps += out.pin.len().min(out.unpin.len());
        for action in &out.unpin {
            self.residence[action.expert.index()] = Residence::Transit;
        }
        self.lock_shortfall = 0;
        let mut pinned = self.pinned_bytes();
        for action in &out.pin {
            let bytes = self.shape.bytes(action.expert);
            if self.lock_most.is_some_and(|most| pinned + bytes > most) {
                self.lock_shortfall += bytes;
                continue;
            }
            pinned += bytes;
            self.residence[action.expert.index()] = Residence::Pinned;
        }
        self.evict(out.capacity_bytes);
    }

    fn evict(&mut self, capacity: u64) {
        let mut held = self.pinned_bytes() + self.bytes_in(Residence::Transit);
        let mut transit: Vec<usize> = (0..self.residence.len())
            .filter(|&index| self.residence[index] == Residence::Transit)
            .collect();
        transit.sort_by_key(|&index| (self.used_at[index], index));
        for index in transit {
            if held <= capacity {
                break;
            }
            self.residence[index] = Residence::Absent;
            held -= EXPERT.min(held);
        }
    }
}
