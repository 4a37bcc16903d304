use super::*;
use hotpin_controllers::ModelShape;
use hotpin_controllers::trace::{TraceEncoder, TraceHeader};
use proptest::prelude::*;

/// A trace of one layer of `experts` experts, top-1.
fn replay(experts: u32, ids: &[u32]) -> Replay {
    let header = TraceHeader {
        model: String::new(),
        architecture: String::new(),
        dense_bytes: 0,
        shape: ModelShape::uniform(1, experts, 1, 1).unwrap(),
    };
    let mut encoder = TraceEncoder::new(&header).unwrap();
    for &id in ids {
        encoder.push(Phase::Decode, &[id]).unwrap();
    }
    // Replay must pass over it.
    encoder.push(Phase::Prefill, &[0]).unwrap();
    Replay::new(&Trace::decode(&encoder.finish()).unwrap(), Part::All).unwrap()
}

/// Hits of one cache for all.
fn hits(replay: &Replay, policy: ReplayPolicy, capacity: usize) -> u64 {
    replay.tally(policy, capacity, Pooling::Global, 0).hits
}

/// LRU as one would write it down.
fn plain_lru(ids: &[u32], capacity: usize) -> u64 {
    let mut held: Vec<u32> = Vec::new();
    let mut hits = 0;
    for &id in ids {
        if let Some(at) = held.iter().position(|&h| h == id) {
            held.remove(at);
            hits += 1;
        } else if held.len() == capacity {
            held.remove(0);
        }
        held.push(id);
    }
    hits
}

/// The best that any schedule of keeping can reach, by trying all of them.
fn best_possible(ids: &[u32], held: &[u32], capacity: usize) -> u64 {
    let Some((&id, rest)) = ids.split_first() else {
        return 0;
    };
    if held.contains(&id) {
        return 1 + best_possible(rest, held, capacity);
    }
    let bypass = best_possible(rest, held, capacity);
    let mut grown = held.to_vec();
    grown.push(id);
    if grown.len() <= capacity {
        return bypass.max(best_possible(rest, &grown, capacity));
    }
    (0..held.len())
        .map(|victim| {
            let mut swapped = grown.clone();
            swapped.swap_remove(victim);
            best_possible(rest, &swapped, capacity)
        })
        .fold(bypass, u64::max)
}

#[test]
fn a_loop_larger_than_the_cache_defeats_lru_and_not_belady() {
    let ids: Vec<u32> = (0..40).map(|at| at % 4).collect();
    let replay = replay(4, &ids);
    let results = replay
        .run(
            &ReplayPolicy::ALL,
            &[Capacity::Experts(2)],
            Pooling::Global,
            4,
        )
        .unwrap();
    let hits: Vec<u64> = results.iter().map(|result| result.hits).collect();
    assert_eq!(hits[1], 0);
    assert_eq!(hits[8], 18, "two of four stay, after one cold miss each");
    assert_eq!(results[0].hits, 20, "static is warm from the start");
    assert_eq!(results[1].gap_closed, Some(0.0));
    assert_eq!(results[8].gap_closed, Some(1.0));
    assert!(results.iter().all(|result| result.accesses == 40));
}

#[test]
fn a_cache_of_everything_misses_each_expert_once() {
    let ids: Vec<u32> = (0..50).map(|at| at * at % 7).collect();
    let replay = replay(7, &ids);
    for policy in ReplayPolicy::ALL {
        if policy == ReplayPolicy::Static {
            continue;
        }
        let tally = replay.tally(policy, 7, Pooling::Global, 0);
        assert_eq!(tally.hits, 50 - 4, "{policy}");
        assert_eq!(tally.replaced, 0, "{policy}");
    }
    assert_eq!(
        replay
            .run(
                &[ReplayPolicy::Lru],
                &[Capacity::Percent(100.0)],
                Pooling::Global,
                0
            )
            .unwrap()[0]
            .gap_closed,
        None
    );
}

#[test]
fn decayed_counts_keep_the_frequent_through_a_scan() {
    let mut ids: Vec<u32> = (0..60).map(|at| at % 2).collect();
    ids.extend(2..10);
    ids.extend([0, 1]);
    let replay = replay(10, &ids);
    assert_eq!(hits(&replay, ReplayPolicy::LfuDecay, 2), 60);
    assert_eq!(hits(&replay, ReplayPolicy::Lru, 2), 58);
}

#[test]
fn frequency_survives_a_scan_where_recency_does_not() {
    // Two experts in turn, then a scan of sixteen, again and again.
    let mut ids: Vec<u32> = Vec::new();
    for _ in 0..30 {
        ids.extend((0..40).map(|at| at % 2));
        ids.extend(2..18);
    }
    let replay = replay(18, &ids);
    let lru = hits(&replay, ReplayPolicy::Lru, 8);
    for policy in [
        ReplayPolicy::Slru,
        ReplayPolicy::WTinylfu,
        ReplayPolicy::Arc,
        ReplayPolicy::S3Fifo,
        ReplayPolicy::LfuDecay,
        ReplayPolicy::Adaptive,
    ] {
        let hits = hits(&replay, policy, 8);
        assert!(hits > lru, "{policy}: {hits}, lru {lru}");
    }
}

/// A trace of two layers, top-1, in prompts of ten tokens.
fn two_layers() -> Trace {
    let header = TraceHeader {
        model: String::new(),
        architecture: String::new(),
        dense_bytes: 0,
        shape: ModelShape::uniform(2, 6, 10, 1).unwrap(),
    };
    let mut encoder = TraceEncoder::new(&header).unwrap();
    for token in 0..60u32 {
        if token % 10 == 0 {
            encoder.prompt("").unwrap();
        }
        let first = (token * 7 / 3) % 6;
        encoder
            .push(Phase::Decode, &[first, 6 + token % 3])
            .unwrap();
    }
    Trace::decode(&encoder.finish()).unwrap()
}

#[test]
fn halves_are_whole_prompts_and_make_up_the_trace() {
    let trace = two_layers();
    let part = |part| Replay::new(&trace, part).unwrap();
    assert_eq!(part(Part::Even).routed[..20], part(Part::All).routed[..20]);
    assert_eq!(part(Part::Odd).routed[..20], part(Part::All).routed[20..40]);
    let tokens = [Part::Even, Part::Odd].map(|half| part(half).tokens());
    assert_eq!(tokens, [30, 30]);
}

#[test]
fn a_cache_a_layer_is_as_good_as_its_layers() {
    let replay = Replay::new(&two_layers(), Part::All).unwrap();
    for policy in ReplayPolicy::ALL {
        let split = replay.tally(policy, 6, Pooling::PerLayer, 6).hits;
        let alone = |keep: Range<u32>| {
            let ids = replay.routed.iter().filter(|id| keep.contains(id));
            let routed: Vec<u32> = ids.copied().collect();
            Replay {
                routed,
                slots: 1,
                ..replay.clone()
            }
        };
        if policy != ReplayPolicy::Adaptive {
            let (a, b) = (alone(0..6), alone(6..12));
            let sum =
                a.pool(policy, &a.routed, 1, 3, 6).hits + b.pool(policy, &b.routed, 1, 3, 6).hits;
            assert_eq!(split, sum, "{policy}");
        }
        assert!(
            split >= 57,
            "{policy}: the second layer's three experts stay: {split}"
        );
    }
}

#[test]
fn reads_and_replacements_are_counted() {
    let ids: Vec<u32> = (0..40).map(|at| at % 4).collect();
    let mut replay = replay(4, &ids);
    replay.shape = ModelShape::uniform(1, 4, 1000, 1).unwrap();
    let capacity = [Capacity::Bytes(2500)];
    let policies = [
        ReplayPolicy::Lru,
        ReplayPolicy::Belady,
        ReplayPolicy::Static,
    ];
    let results = replay
        .run(&policies, &capacity, Pooling::Global, 4)
        .unwrap();
    assert_eq!(results[0].capacity_experts, 2);
    assert!((results[0].read_bytes_per_token - 1000.0).abs() < 1e-9);
    assert!((results[0].replaced_per_token - 38.0 / 40.0).abs() < 1e-9);
    assert!((results[1].read_bytes_per_token - 550.0).abs() < 1e-9);
    assert!((results[2].replaced_per_token).abs() < 1e-9);
}

proptest! {
    #[test]
    fn no_policy_beats_the_optimum(ids in proptest::collection::vec(0u32..12, 1..300), capacity in 1usize..12) {
        let replay = replay(12, &ids);
        let best = hits(&replay, ReplayPolicy::Belady, capacity);
        for policy in ReplayPolicy::ALL {
            if policy != ReplayPolicy::Static {
                let tally = replay.tally(policy, capacity, Pooling::Global, 0);
                prop_assert!(tally.hits <= best, "{} {} {}", policy, tally.hits, best);
                prop_assert!(tally.hits + tally.replaced <= ids.len() as u64);
            }
        }
    }

    #[test]
    fn lru_is_lru(ids in proptest::collection::vec(0u32..9, 1..200), capacity in 1usize..9) {
        prop_assert_eq!(hits(&replay(9, &ids), ReplayPolicy::Lru, capacity), plain_lru(&ids, capacity));
    }

    #[test]
    fn belady_is_the_optimum(ids in proptest::collection::vec(0u32..5, 1..14), capacity in 1usize..4) {
        prop_assert_eq!(hits(&replay(5, &ids), ReplayPolicy::Belady, capacity), best_possible(&ids, &[], capacity));
    }
}

/// Sweeps are cheap only when LRU is: 20 million accesses a second on one core. The best of many short
/// runs is what it does, whatever else the machine does meanwhile.
/// `cargo test --release -p hotpin-sim lru_is_fast -- --nocapture` prints it.
#[test]
#[cfg_attr(debug_assertions, ignore = "the bar is for optimised code")]
fn lru_is_fast() {
    const RUNS: usize = 20;
    let mut rng = crate::rng::Rng::keyed(&[1]);
    // The smaller of two draws: skewed, and with no pattern to predict.
    let mut draw = || u32::try_from(rng.bits() % 768).unwrap();
    let ids: Vec<u32> = (0..500_000).map(|_| draw().min(draw())).collect();
    let mut per_s: Vec<f64> = (0..RUNS)
        .map(|_| {
            let start = std::time::Instant::now();
            let hits = lru::run(&ids, 768, 192).hits;
            assert!(hits > 0);
            ids.len() as f64 / start.elapsed().as_secs_f64()
        })
        .collect();
    per_s.sort_unstable_by(f64::total_cmp);
    let best = per_s[RUNS - 1];
    eprintln!(
        "{:.1} million accesses a second, median {:.1}",
        best / 1e6,
        per_s[RUNS / 2] / 1e6
    );
    assert!(best > 20e6, "{per_s:?}");
}
