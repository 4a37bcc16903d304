use super::*;
use hotpin_controllers::ModelShape;
use hotpin_controllers::trace::{TraceEncoder, TraceHeader};
use proptest::prelude::*;

/// A trace of one layer of `experts` experts, top-1.
fn replay(experts: u32, ids: &[u32]) -> Replay {
    let header = TraceHeader {
        model: String::new(),
        dense_bytes: 0,
        shape: ModelShape::uniform(1, experts, 1, 1).unwrap(),
    };
    let mut encoder = TraceEncoder::new(&header).unwrap();
    for &id in ids {
        encoder.push(Phase::Decode, &[id]).unwrap();
    }
    // Replay must pass over it.
    encoder.push(Phase::Prefill, &[0]).unwrap();
    Replay::new(&Trace::decode(&encoder.finish()).unwrap()).unwrap()
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
        .run(&ReplayPolicy::ALL, &[Capacity::Experts(2)], 4)
        .unwrap();
    let hits: Vec<u64> = results.iter().map(|result| result.hits).collect();
    assert_eq!(hits[1], 0);
    assert_eq!(hits[3], 18, "two of four stay, after one cold miss each");
    assert_eq!(results[0].hits, 20, "static is warm from the start");
    assert_eq!(results[1].gap_closed, Some(0.0));
    assert_eq!(results[3].gap_closed, Some(1.0));
    assert!(results.iter().all(|result| result.accesses == 40));
}

#[test]
fn a_cache_of_everything_misses_each_expert_once() {
    let ids: Vec<u32> = (0..50).map(|at| at * at % 7).collect();
    let replay = replay(7, &ids);
    for policy in [
        ReplayPolicy::Lru,
        ReplayPolicy::LfuDecay,
        ReplayPolicy::Belady,
    ] {
        assert_eq!(replay.hits(policy, 7, 0), 50 - 4, "{policy}");
    }
    assert_eq!(
        replay
            .run(&[ReplayPolicy::Lru], &[Capacity::Percent(100.0)], 0)
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
    assert_eq!(replay.hits(ReplayPolicy::LfuDecay, 2, 0), 60);
    assert_eq!(replay.hits(ReplayPolicy::Lru, 2, 0), 58);
}

proptest! {
    #[test]
    fn lru_is_lru(ids in proptest::collection::vec(0u32..9, 1..200), capacity in 1usize..9) {
        prop_assert_eq!(replay(9, &ids).hits(ReplayPolicy::Lru, capacity, 0), plain_lru(&ids, capacity));
    }

    #[test]
    fn belady_is_the_optimum(ids in proptest::collection::vec(0u32..5, 1..14), capacity in 1usize..4) {
        prop_assert_eq!(replay(5, &ids).hits(ReplayPolicy::Belady, capacity, 0), best_possible(&ids, &[], capacity));
    }
}

/// Sweeps are cheap only when LRU is. The bar of 20 million accesses a second holds on an idle
/// core; run it alone: `cargo test --release -p hotpin-sim lru_is_fast -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement, which a busy machine fails"]
fn lru_is_fast() {
    let mut rng = crate::rng::Rng::keyed(&[1]);
    // The smaller of two draws: skewed, and with no pattern to predict.
    let mut draw = || u32::try_from(rng.bits() % 768).unwrap();
    let ids: Vec<u32> = (0..10_000_000).map(|_| draw().min(draw())).collect();
    let start = std::time::Instant::now();
    let hits = lru::hits(&ids, 768, 192);
    let per_s = ids.len() as f64 / start.elapsed().as_secs_f64();
    eprintln!("{:.1} million accesses a second, {hits} hits", per_s / 1e6);
    assert!(per_s > 20e6, "{per_s}");
}
