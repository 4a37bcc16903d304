//! Time of one control tick at the size of large models: 48 layers of 128 experts, and the 58 of 256
//! of DeepSeek-V3.

use criterion::{Criterion, criterion_group, criterion_main};
use hotpin_controllers::{
    Adaptive, AdaptiveConfig, CgroupMemory, Decision, EngineTotals, Faults, Held, HostMemory,
    LockLimits, ModelShape, Moment, Observation, Policy, Pressure, Residence,
};
use std::hint::black_box;

/// Layers, and experts in each.
const SIZES: [(usize, u32); 2] = [(48, 128), (58, 256)];
const TOP_K: u32 = 8;
const EXPERT_BYTES: u64 = 9_437_184;
const TICK_NS: u64 = 100_000_000;

/// A model whose routing drifts: hot experts move a little each tick.
struct Script {
    layers: usize,
    experts: u32,
    shape: ModelShape,
    counts: Vec<u32>,
    prefill: Vec<u32>,
    residence: Vec<Residence>,
    pinned_bytes: u64,
    ticks: u64,
    random: u64,
}

impl Script {
    fn new(layers: usize, experts: u32) -> Self {
        let shape = ModelShape::uniform(layers, experts, EXPERT_BYTES, TOP_K).expect("a shape");
        let n = shape.total_experts();
        Self {
            layers,
            experts,
            counts: vec![0; n],
            prefill: vec![0; n],
            residence: vec![Residence::Absent; n],
            pinned_bytes: 0,
            ticks: 0,
            random: 1,
            shape,
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 33) % n
    }

    /// One tick: route a token, decide, and do what was decided.
    fn step(&mut self, policy: &mut dyn Policy, decision: &mut Decision) {
        self.ticks += 1;
        for layer in 0..self.layers {
            for _ in 0..TOP_K {
                // Squaring skews towards low numbers; the shift moves the hot spot.
                let u = self.below(1000) * self.below(1000);
                let index = (u * u64::from(self.experts) / 1_000_000 + self.ticks / 50)
                    % u64::from(self.experts);
                let id = self
                    .shape
                    .id(layer, u32::try_from(index).expect("an index"));
                self.counts[id.index()] = self.counts[id.index()].wrapping_add(1);
                if self.residence[id.index()] == Residence::Absent {
                    self.residence[id.index()] = Residence::Transit;
                }
            }
        }
        let routed = (self.layers as u64) * u64::from(TOP_K);
        let observation = Observation {
            now: Moment {
                ns: self.ticks * TICK_NS,
            },
            host: Some(HostMemory {
                total_bytes: 64 << 30,
                available_bytes: (24 << 30) - self.pinned_bytes,
            }),
            cgroup: Some(CgroupMemory {
                limit_bytes: 32 << 30,
                available_bytes: (24 << 30) - self.pinned_bytes,
            }),
            pressure: Some(Pressure {
                some_total_us: self.ticks * 1000,
                direct_reclaim_pages: Some(self.ticks),
                ..Pressure::default()
            }),
            locks: LockLimits {
                memlock_bytes: None,
                locked_elsewhere_bytes: 0,
                map_budget_bytes: None,
            },
            faults: Some(Faults { major: self.ticks }),
            engine: Some(EngineTotals {
                decode_tokens: self.ticks,
                decode_ns: self.ticks * TICK_NS,
                stall_ns: self.ticks * TICK_NS / 4,
                hits: self.ticks * routed * 3 / 4,
                misses: self.ticks * routed / 4,
                fetch_bytes: self.ticks * routed / 4 * EXPERT_BYTES,
                ..EngineTotals::default()
            }),
            stall_known: true,
            decode_counts: Some(&self.counts),
            prefill_counts: Some(&self.prefill),
            residence: &self.residence,
            covered: None,
            held: Held {
                pinned_bytes: self.pinned_bytes,
                ..Held::default()
            },
        };
        policy.tick(&observation, decision);
        for action in &decision.unpin {
            self.residence[action.expert.index()] = Residence::Transit;
            self.pinned_bytes -= EXPERT_BYTES;
        }
        for action in &decision.pin {
            self.residence[action.expert.index()] = Residence::Pinned;
            self.pinned_bytes += EXPERT_BYTES;
        }
    }
}

fn tick(c: &mut Criterion) {
    for (layers, experts) in SIZES {
        tick_at(c, layers, experts);
    }
}

fn tick_at(c: &mut Criterion, layers: usize, experts: u32) {
    let name = format!("tick/{layers}x{experts}");
    let mut script = Script::new(layers, experts);
    let mut policy =
        Adaptive::new(&script.shape, &AdaptiveConfig::default(), None).expect("a policy");
    let mut decision = Decision::default();
    for _ in 0..500 {
        script.step(&mut policy, &mut decision);
    }
    c.bench_function(&name, |b| {
        b.iter(|| script.step(black_box(&mut policy), &mut decision));
    });
    // criterion reports means; the bar is on the slow end.
    let mut times: Vec<u128> = (0..20_000)
        .map(|_| {
            let began = std::time::Instant::now();
            script.step(&mut policy, &mut decision);
            began.elapsed().as_nanos()
        })
        .collect();
    times.sort_unstable();
    let at = |share: usize| times[times.len() * share / 1000] as f64 / 1e3;
    #[expect(clippy::print_stdout, reason = "a benchmark's result")]
    {
        println!(
            "{name} over 20000: p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us",
            at(500),
            at(990),
            at(999)
        );
    }
}

criterion_group!(benches, tick);
criterion_main!(benches);
