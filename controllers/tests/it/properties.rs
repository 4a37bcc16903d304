//! Properties that hold for any plant.

use crate::plant::{GIB, MIB, Plant, Random, Routing};
use hotpin_controllers::config::AdaptiveConfig;
use hotpin_controllers::{
    Adaptive, CgroupMemory, Decision, EngineTotals, Faults, Held, HostMemory, LockLimits,
    ModelShape, Moment, Observation, PinLimit, Policy, PolicyKind, Pressure, Residence, build,
};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Anything that a sensor might say, extremes included.
#[derive(Clone, Debug)]
struct Sample {
    now_ns: u64,
    host: Option<(u64, u64)>,
    cgroup: Option<(u64, u64)>,
    pressure: Option<(u64, Option<u64>, bool)>,
    memlock: Option<u64>,
    map_budget: Option<u64>,
    faults: Option<u64>,
    engine: Option<[u64; 5]>,
    stall_known: bool,
    counts: Option<u64>,
    prefill: Option<u64>,
    residence: u64,
    covered: Option<u64>,
    shortfall: u64,
}

fn bytes() -> impl Strategy<Value = u64> + Clone {
    prop_oneof![
        8 => 0u64..2 * GIB,
        1 => Just(0u64),
        1 => Just(u64::MAX),
        1 => any::<u64>(),
    ]
}

fn sample() -> impl Strategy<Value = Sample> {
    let time = prop_oneof![8 => 0u64..20_000_000_000, 1 => any::<u64>()];
    let memory = prop::option::weighted(0.8, (bytes(), bytes()));
    let pressure = prop::option::of((
        any::<u32>().prop_map(u64::from),
        prop::option::of(bytes()),
        any::<bool>(),
    ));
    let totals = [bytes(), bytes(), bytes(), bytes(), bytes()];
    (
        (time, memory.clone(), memory, pressure),
        (
            prop::option::of(bytes()),
            prop::option::of(bytes()),
            prop::option::of(bytes()),
        ),
        (prop::option::of(totals), any::<bool>()),
        (
            prop::option::of(any::<u64>()),
            prop::option::of(any::<u64>()),
            any::<u64>(),
        ),
        prop::option::of(any::<u64>()),
        prop_oneof![4 => Just(0u64), 1 => bytes()],
    )
        .prop_map(|(a, b, c, d, covered, shortfall)| Sample {
            now_ns: a.0,
            host: a.1,
            cgroup: a.2,
            pressure: a.3,
            memlock: b.0,
            map_budget: b.1,
            faults: b.2,
            engine: c.0,
            stall_known: c.1,
            counts: d.0,
            prefill: d.1,
            residence: d.2,
            covered,
            shortfall,
        })
}

/// Experts of different sizes, one layer that routes to all of its experts.
fn shape() -> ModelShape {
    ModelShape::new(vec![8, 16, 4], vec![MIB, 3 * MIB, 7 * MIB], vec![2, 4, 4]).unwrap()
}

/// Owns what an observation borrows.
struct Owned {
    counts: Option<Vec<u32>>,
    prefill: Option<Vec<u32>>,
    residence: Vec<Residence>,
    covered: Option<Vec<bool>>,
}

impl Owned {
    fn new(sample: &Sample, experts: usize) -> Self {
        let list = |seed: u64| {
            let mut random = Random(seed);
            // Now and then a list of the wrong length.
            let length = if seed.is_multiple_of(16) {
                experts - 1
            } else {
                experts
            };
            (0..length)
                .map(|_| random.below(u32::MAX))
                .collect::<Vec<_>>()
        };
        let mut random = Random(sample.residence);
        let residence = (0..experts)
            .map(|_| match random.below(3) {
                0 => Residence::Absent,
                1 => Residence::Transit,
                _ => Residence::Pinned,
            })
            .collect();
        Self {
            counts: sample.counts.map(list),
            prefill: sample.prefill.map(list),
            covered: sample
                .covered
                .map(|seed| list(seed).iter().map(|count| count % 2 == 1).collect()),
            residence,
        }
    }

    fn observation(&self, sample: &Sample) -> Observation<'_> {
        let pinned: u64 = (0u32..)
            .zip(&self.residence)
            .filter(|(_, r)| **r == Residence::Pinned)
            .map(|(i, _)| shape().bytes(hotpin_controllers::ExpertId(i)))
            .sum();
        Observation {
            now: Moment { ns: sample.now_ns },
            host: sample
                .host
                .map(|(total_bytes, available_bytes)| HostMemory {
                    total_bytes,
                    available_bytes,
                }),
            cgroup: sample
                .cgroup
                .map(|(limit_bytes, available_bytes)| CgroupMemory {
                    limit_bytes,
                    available_bytes,
                }),
            pressure: sample.pressure.map(|(some, reclaim, psi_absent)| Pressure {
                some_total_us: some,
                full_total_us: 0,
                direct_reclaim_pages: reclaim,
                psi_absent,
            }),
            locks: LockLimits {
                memlock_bytes: sample.memlock,
                locked_elsewhere_bytes: sample.shortfall,
                map_budget_bytes: sample.map_budget,
            },
            faults: sample.faults.map(|major| Faults { major }),
            engine: sample
                .engine
                .map(|[tokens, stall, hits, misses, fetch]| EngineTotals {
                    decode_tokens: tokens,
                    prefill_tokens: 0,
                    decode_ns: 0,
                    stall_ns: stall,
                    hits,
                    misses,
                    fetch_bytes: fetch,
                }),
            stall_known: sample.stall_known,
            decode_counts: self.counts.as_deref(),
            prefill_counts: self.prefill.as_deref(),
            residence: &self.residence,
            covered: self.covered.as_deref(),
            held: Held {
                pinned_bytes: pinned,
                transit_bytes: 0,
                lock_shortfall_bytes: sample.shortfall,
            },
        }
    }
}

fn check_sound(policy: &dyn Policy, owned: &Owned, out: &Decision, floor: u64) {
    for bytes in out.ceilings.iter().flatten() {
        assert!(out.capacity_bytes <= *bytes, "above a ceiling: {out:?}");
    }
    let hard = out.ceilings[..4]
        .iter()
        .flatten()
        .min()
        .copied()
        .unwrap_or(0);
    assert!(
        out.capacity_bytes >= floor.min(hard),
        "below the floor: {out:?}"
    );
    assert!(out.pin_budget_bytes <= out.capacity_bytes);
    let bad = policy
        .scores()
        .iter()
        .find(|score| !score.is_finite() || **score < 0.0);
    assert_eq!(bad, None, "{}", policy.name());
    let pins: BTreeSet<_> = out.pin.iter().map(|action| action.expert).collect();
    let unpins: BTreeSet<_> = out.unpin.iter().map(|action| action.expert).collect();
    assert_eq!(
        (pins.len(), unpins.len()),
        (out.pin.len(), out.unpin.len()),
        "named twice"
    );
    assert!(pins.is_disjoint(&unpins));
    assert!(
        pins.iter()
            .all(|id| owned.residence[id.index()] != Residence::Pinned)
    );
    assert!(
        unpins
            .iter()
            .all(|id| owned.residence[id.index()] == Residence::Pinned)
    );
    if out.pin_limit == PinLimit::Policy {
        return; // `off` and `fetch` own no pins
    }
    // What remains locked fits the budget.
    let bytes = |ids: &BTreeSet<_>| ids.iter().map(|&id| shape().bytes(id)).sum::<u64>();
    let locked: u64 = (0u32..)
        .zip(&owned.residence)
        .filter(|(_, r)| **r == Residence::Pinned)
        .map(|(i, _)| shape().bytes(hotpin_controllers::ExpertId(i)))
        .sum();
    assert!(locked + bytes(&pins) - bytes(&unpins) <= out.pin_budget_bytes);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Any observation gives a sound decision; equal ones give equal decisions.
    #[test]
    fn decisions_are_sound_and_repeatable(samples in prop::collection::vec(sample(), 1..40)) {
        let (shape, mut config) = (shape(), AdaptiveConfig::default());
        config.value.target_stall_per_gib = Some(0.01);
        config.capacity.host_reserve_bytes = 100 * MIB;
        let profile = vec![1.0; shape.total_experts()];
        for kind in PolicyKind::ALL {
            let mut one = build(kind, &shape, &config, Some(&profile)).unwrap();
            let mut two = build(kind, &shape, &config, Some(&profile)).unwrap();
            let (mut out, mut again) = (Decision::default(), Decision::default());
            for sample in &samples {
                let owned = Owned::new(sample, shape.total_experts());
                one.tick(&owned.observation(sample), &mut out);
                two.tick(&owned.observation(sample), &mut again);
                check_sound(one.as_ref(), &owned, &out, shape.token_cycle_bytes());
                prop_assert_eq!(&out, &again);
            }
        }
    }

    /// However long pressure saturates, the way back is bounded.
    #[test]
    fn saturation_does_not_wind_up(minutes in 1u32..40, stall in 0.2f64..1.0) {
        let mut plant = Plant::new(900 * MIB);
        let mut config = AdaptiveConfig::default();
        config.value.give_back_idle = false;
        let mut policy = Adaptive::new(&plant.shape, &config, None).unwrap();
        plant.tokens_per_tick = 0;
        plant.tick_ns = 500_000_000;
        plant.run(&mut policy, 5.0);
        plant.stall_fraction = stall;
        plant.reclaim_bytes_per_s = GIB;
        plant.run(&mut policy, f64::from(minutes) * 60.0);
        prop_assert_eq!(plant.out.capacity_bytes, plant.shape.token_cycle_bytes());
        plant.stall_fraction = 0.0;
        plant.reclaim_bytes_per_s = 0;
        // Quiet hold 5 s, filter 2 s, then 3% of the ceiling a second.
        plant.run(&mut policy, 50.0);
        prop_assert!(plant.out.capacity_bytes >= 890 * MIB, "{}", plant.out.capacity_bytes);
    }

    /// A square wave moves capacity at most once each way per edge.
    #[test]
    fn square_waves_start_no_limit_cycle(
        half_period_s in 1u32..40,
        stall in 0.0f64..1.0,
        hog_mib in 0u64..600,
        noise_mib in 1u32..30,
        seed: u64,
    ) {
        let mut plant = Plant::new(900 * MIB);
        let mut config = AdaptiveConfig::default();
        config.value.give_back_idle = false;
        let mut policy = Adaptive::new(&plant.shape, &config, None).unwrap();
        plant.tokens_per_tick = 0;
        let (calm, mut noise) = (plant.others, Random(seed));
        let mut turns = Turns::default();
        let edges = 12;
        for edge in 0..edges {
            let pressed = edge % 2 == 1;
            plant.stall_fraction = if pressed { stall } else { 0.0 };
            plant.reclaim_bytes_per_s = if pressed { GIB } else { 0 };
            for _ in 0..half_period_s * 10 {
                let hog = if pressed { hog_mib } else { 0 };
                plant.others = calm + (hog + u64::from(noise.below(noise_mib))) * MIB;
                plant.tick(&mut policy);
                turns.see(plant.out.capacity_bytes, 32 * MIB);
            }
        }
        prop_assert!(turns.count <= edges + 2, "{} reversals", turns.count);
    }

    /// Under fixed scores and capacity the pinned set comes to rest, in the middle of a change of
    /// domain with its releases as well.
    #[test]
    fn fixed_scores_come_to_rest(seed: u64, capacity_mib in 100u64..900, drift_ticks in 0u32..40) {
        let mut plant = Plant::new(capacity_mib * MIB);
        plant.random = Random(seed);
        let mut policy = adaptive(&plant);
        plant.run(&mut policy, 8.0);
        plant.routing = Routing::Hot { first: 30, width: 12, share: 0.9 };
        plant.run(&mut policy, f64::from(drift_ticks) / 10.0);
        // From now on tokens are decoded, and no routing is counted.
        plant.tokens_per_tick = 0;
        for tick in 0..400 {
            plant.engine.decode_tokens += 2;
            plant.tick(&mut policy);
            if tick >= 200 {
                prop_assert!(plant.out.pin.is_empty() && plant.out.unpin.is_empty());
            }
        }
    }
}

fn adaptive(plant: &Plant) -> Adaptive {
    Adaptive::new(&plant.shape, &AdaptiveConfig::default(), None).unwrap()
}

/// Counts changes of direction larger than a band.
#[derive(Default)]
struct Turns {
    extreme: Option<u64>,
    rising: Option<bool>,
    count: usize,
}

impl Turns {
    fn see(&mut self, value: u64, band: u64) {
        let Some(extreme) = self.extreme else {
            self.extreme = Some(value);
            return;
        };
        let further = match self.rising {
            Some(true) => value >= extreme,
            Some(false) => value <= extreme,
            None => false,
        };
        if further {
            self.extreme = Some(value);
        } else if value.abs_diff(extreme) > band {
            self.count += usize::from(self.rising.is_some());
            self.rising = Some(value > extreme);
            self.extreme = Some(value);
        }
    }
}
