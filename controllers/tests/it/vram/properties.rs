//! What holds whatever the sensors say.

use super::small;
use crate::plant::{MIB, Random};
use hotpin_controllers::Moment;
use hotpin_controllers::config::VramConfig;
use hotpin_controllers::vram::{
    Arrangement, ChangeCosts, DeviceMemory, Tracker, VramDecision, VramFigures, VramLaw,
    VramObservation, VramRule,
};
use proptest::prelude::*;

/// Anything that a tick might bring, extremes included.
#[derive(Clone, Debug)]
struct Sample {
    step_ns: u64,
    memory: Option<(u64, u64)>,
    figures: bool,
    link: Option<f64>,
    costs: [Option<u64>; 5],
    host: Option<u64>,
    fails: bool,
    applies: bool,
    idle: bool,
    limit: Option<u64>,
    calls: Vec<(u32, u64)>,
}

fn bytes() -> impl Strategy<Value = u64> + Clone {
    prop_oneof![6 => 0u64..1024 * MIB, 1 => Just(0u64), 1 => Just(u64::MAX), 1 => any::<u64>()]
}

fn sample() -> impl Strategy<Value = Sample> {
    let costs = [(); 5].map(|()| prop::option::of(bytes()));
    let rate = prop_oneof![1e6f64..1e11, Just(0.0), Just(f64::NAN), Just(f64::INFINITY)];
    let call = (1u32..70, prop_oneof![1u64..1_000_000_000, any::<u64>()]);
    (
        (
            prop_oneof![4 => 0u64..30_000_000_000, 1 => any::<u64>()],
            prop::option::weighted(0.8, (bytes(), bytes())),
            any::<bool>(),
            prop::option::of(rate),
            costs,
        ),
        (
            prop::option::of(bytes()),
            any::<bool>(),
            any::<bool>(),
            any::<bool>(),
        ),
        prop::option::weighted(0.2, bytes()),
        prop::collection::vec(call, 0..4),
    )
        .prop_map(|(a, b, limit, calls)| Sample {
            step_ns: a.0,
            memory: a.1,
            figures: a.2,
            link: a.3,
            costs: a.4,
            host: b.0,
            fails: b.1,
            applies: b.2,
            idle: b.3,
            limit,
            calls,
        })
}

fn check_sound(law_limit: Option<u64>, applied: Arrangement, out: &VramDecision) {
    let lowest = out.ceilings.iter().flatten().min().copied().unwrap_or(0);
    assert_eq!(out.capacity_bytes, lowest);
    let changes = out.change.map(|change| change.kind);
    assert_eq!(changes, applied.change_to(out.arrangement));
    let bytes = out.arrangement.bytes();
    if let Arrangement::Reload { pool_bytes } = out.arrangement {
        assert!(pool_bytes > 0 && pool_bytes <= small().full_bytes().max(applied.bytes()));
        if changes.is_some() {
            assert!(
                pool_bytes >= small().least_bytes(),
                "llama.cpp would refuse {out:?}"
            );
        }
    }
    if bytes > applied.bytes() {
        let hard = [0, 1, 2, 3, 4]
            .into_iter()
            .filter_map(|at| out.ceilings[at])
            .min();
        // Whole layers have a ceiling of their own, which the pool's padding does not lower.
        let slack = if matches!(out.arrangement, Arrangement::Static { .. }) {
            3 * MIB
        } else {
            0
        };
        assert!(bytes <= hard.unwrap() + slack, "{out:?}");
    }
    if law_limit == Some(0) && out.rule == VramRule::Yield {
        assert_eq!(out.arrangement, Arrangement::Cpu);
    }
    for ns in [
        out.expected.present_ns,
        out.expected.reload_ns,
        out.expected.cpu_ns,
    ] {
        assert!(ns.is_none_or(|ns| ns.is_finite() && ns >= 0.0), "{out:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn decisions_are_sound_and_repeatable(
        seed: u64,
        samples in prop::collection::vec(sample(), 1..40),
    ) {
        let config = VramConfig { reserve_bytes: 64 * MIB, ..VramConfig::default() };
        let mut laws = [(); 2].map(|()| VramLaw::new(small(), config.clone()));
        let mut tracker = Tracker::new(small(), Arrangement::Cpu, &config);
        let mut random = Random(seed);
        let (mut now, mut applied, mut failed) = (Moment { ns: 0 }, Arrangement::Cpu, None);
        let mut figures = VramFigures::default();
        for sample in &samples {
            now.ns = now.ns.wrapping_add(sample.step_ns);
            for &(tokens, ns) in &sample.calls {
                for layer in 0..8 {
                    let ids: Vec<i32> =
                        (0..tokens * 4).map(|_| random.below(32).cast_signed()).collect();
                    tracker.route(layer, &ids, tokens as usize);
                }
                tracker.decoded(tokens, ns >> 8, true);
            }
            tracker.figures(&mut figures);
            let observation = VramObservation {
                now,
                devices: &[sample.memory.map(|(total_bytes, free_bytes)| DeviceMemory {
                    total_bytes,
                    free_bytes,
                })],
                figures: sample.figures.then_some(&figures),
                applied,
                link_bytes_per_s: sample.link,
                costs: ChangeCosts {
                    recreate_ns: sample.costs[0],
                    reload_ns: sample.costs[1],
                    context_bytes: sample.costs[2],
                    dense_bytes: sample.costs[3],
                    state_bytes: sample.costs[4],
                },
                host_available_bytes: sample.host,
                failed,
                idle: sample.idle,
            };
            let mut out = [VramDecision::default(); 2];
            for (law, out) in laws.iter_mut().zip(&mut out) {
                law.limit(sample.limit);
                law.tick(&observation, out);
            }
            prop_assert_eq!(out[0], out[1]);
            check_sound(sample.limit, applied, &out[0]);
            failed = None;
            if out[0].change.is_some() && sample.fails {
                failed = Some(out[0].arrangement);
            } else if out[0].change.is_some() && sample.applies {
                applied = out[0].arrangement;
                tracker.arranged(applied);
            }
        }
    }
}
