//! The miss-ratio curve and what is stable, as the tracker tells them.

use super::{small, uniform};
use crate::plant::Random;
use hotpin_controllers::config::VramConfig;
use hotpin_controllers::vram::{Arrangement, MissCurve, Pool, PoolLayout, Tracker, VramFigures};
use hotpin_controllers::{ExpertId, ModelShape};

fn config() -> VramConfig {
    VramConfig {
        half_life_tokens: 1e6,
        ..VramConfig::default()
    }
}

/// One token: most experts from a window that moves slowly.
fn token(random: &mut Random, at: usize, experts: u32) -> Vec<i32> {
    let mut ids = Vec::new();
    while ids.len() < 4 {
        let wide = random.below(5) == 0;
        let first = u32::try_from(at / 50).unwrap();
        let id = if wide {
            random.below(experts)
        } else {
            (first + random.below(experts / 4)) % experts
        };
        if !ids.contains(&id.cast_signed()) {
            ids.push(id.cast_signed());
        }
    }
    ids
}

fn curve(tracker: &Tracker) -> MissCurve {
    let mut figures = VramFigures::default();
    tracker.figures(&mut figures);
    figures.curve
}

/// At its own points the curve is the pool's, and between them near it.
#[test]
fn the_curve_is_that_of_pools_of_other_sizes() {
    let layout = uniform(6, 64, 4, &[3000, 1000]);
    let sizes: Vec<u64> = (2..20).map(|n| layout.full_bytes() / 20 * n).collect();
    let mut pools: Vec<Pool> = sizes
        .iter()
        .map(|&b| Pool::new(&layout, b).unwrap())
        .collect();
    let mut tracker = Tracker::new(layout, Arrangement::Cpu, &config());
    let mut random = Random(7);
    for at in 0..1500 {
        for layer in 0..6 {
            let ids = token(&mut random, at, 64);
            tracker.route(layer, &ids, 1);
            for pool in &mut pools {
                pool.route(layer, &ids, 1);
            }
        }
        tracker.decoded(1, 1, true);
    }
    let curve = curve(&tracker);
    let mut worst: f64 = 0.0;
    for pool in &pools {
        let counts = pool.totals().counts();
        let ratio = counts.hits as f64 / (counts.hits + counts.misses) as f64;
        let told = curve.hit_ratio(pool.bytes()).unwrap();
        worst = worst.max((told - ratio).abs());
        let uploads = curve.upload_bytes_per_token(0, pool.bytes()).unwrap();
        let exact = counts.upload_bytes as f64 / 1500.0;
        assert!(
            (uploads - exact).abs() < 0.03 * 24.0 * 4000.0,
            "{uploads} {exact}"
        );
    }
    assert!(worst < 0.03, "{worst}");
    let rising = curve
        .points
        .windows(2)
        .all(|pair| pair[0].pool_bytes < pair[1].pool_bytes);
    assert!(rising, "{curve:?}");
}

#[test]
fn nothing_is_known_before_there_were_tokens() {
    let tracker = Tracker::new(small(), Arrangement::Cpu, &config());
    let curve = curve(&tracker);
    assert_eq!(curve.hit_ratio(u64::MAX), None);
    assert_eq!(curve.upload_bytes_per_token(0, u64::MAX), None);
    assert_eq!(MissCurve::default().hit_ratio(1), None);
}

/// Wider batches are known apart, and those that pass every pool over are no hits.
#[test]
fn widths_are_told_apart() {
    let layout = small();
    let mut tracker = Tracker::new(layout.clone(), Arrangement::Cpu, &config());
    let ids = |tokens: i32| (0..tokens * 4).map(|id| (id * 5) % 32).collect::<Vec<_>>();
    for _ in 0..20 {
        for layer in 0..8 {
            tracker.route(layer, &ids(1), 1);
        }
        tracker.decoded(1, 1000, true);
        for layer in 0..8 {
            tracker.route(layer, &ids(40), 40);
        }
        tracker.decoded(40, 9000, true);
    }
    let mut figures = VramFigures::default();
    tracker.figures(&mut figures);
    let full = layout.full_bytes();
    assert_eq!(figures.curve.bypassed_share(0, full), Some(0.0));
    assert_eq!(figures.curve.bypassed_share(6, full), Some(1.0));
    assert_eq!(figures.curve.upload_bytes_per_token(3, full), None);
    assert_eq!(
        (figures.steps[0].tokens, figures.steps[6].tokens),
        (20, 800)
    );
    assert_eq!(figures.steps[6].routed_bytes, 20 * 8 * 32 * (3 << 20));
    let hits = figures.curve.hit_ratio(full).unwrap();
    assert!(hits > 0.9, "{hits}");
}

/// What is told of calls whose time says nothing: lists move, sums do not.
#[test]
fn calls_that_say_nothing_leave_no_figures() {
    let mut tracker = Tracker::new(small(), Arrangement::Cpu, &config());
    tracker.route(0, &[0, 1, 2, 3], 1);
    tracker.decoded(1, 1_000_000, false);
    let mut figures = VramFigures::default();
    tracker.figures(&mut figures);
    assert_eq!(figures.steps[0].tokens, 0);
    assert_eq!(figures.curve.hit_ratio(u64::MAX), None);
}

fn route_all(tracker: &mut Tracker, ids: &[i32]) {
    for layer in 0..8 {
        tracker.route(layer, ids, 1);
    }
    tracker.decoded(1, 1000, true);
}

#[test]
fn what_stays_and_is_hit_is_covered_until_it_is_evicted() {
    let layout = small();
    let shape = ModelShape::uniform(8, 32, 3 << 20, 4).unwrap();
    let pool_bytes = layout.full_bytes() / 4;
    let config = VramConfig {
        cover_tokens: 10.0,
        ..config()
    };
    let arrangement = Arrangement::Reload { pool_bytes };
    let mut tracker = Tracker::new(layout, arrangement, &config);
    let mut covered = Vec::new();
    for token in 0..12 {
        tracker.covered(&mut covered);
        assert_eq!(covered.len(), shape.total_experts());
        assert_eq!(covered.iter().any(|&c| c), token >= 10, "{token}");
        route_all(&mut tracker, &[0, 1, 2, 3]);
    }
    let hot = shape.id(5, 2);
    assert!(tracker.covers(hot));
    assert!(!tracker.covers(shape.id(5, 4)));
    assert!(!tracker.covers(ExpertId(u32::MAX)));
    // Others come and stay away from the protected half; then they take it.
    for first in [4, 8, 12, 16, 4, 8, 12, 16] {
        route_all(&mut tracker, &[first, first + 1, first + 2, first + 3]);
        tracker.covered(&mut covered);
        let pool = tracker.pool().unwrap();
        assert_eq!(
            covered[hot.index()],
            pool.holds(5, 2),
            "gone when it is evicted"
        );
    }
    tracker.arranged(arrangement);
    tracker.covered(&mut covered);
    assert!(!covered.iter().any(|&c| c), "a new context's pool is empty");
}

#[test]
fn static_layers_are_covered_after_a_while() {
    let layout = small();
    let bytes = 2 * 96 * (1 << 20);
    let config = VramConfig {
        cover_tokens: 3.0,
        ..config()
    };
    let mut tracker = Tracker::new(layout, Arrangement::Static { bytes }, &config);
    let mut covered = Vec::new();
    tracker.covered(&mut covered);
    assert!(!covered.iter().any(|&c| c));
    for _ in 0..3 {
        route_all(&mut tracker, &[0, 1, 2, 3]);
    }
    tracker.covered(&mut covered);
    let expected: Vec<bool> = (0..256).map(|expert| expert >= 6 * 32).collect();
    assert_eq!(covered, expected);
    assert_eq!(tracker.totals(), None);
}

/// The best batch counts: others compute on the same machine.
/// `cargo test --release -p hotpin-controllers costs_little -- --nocapture` prints it.
#[test]
#[cfg_attr(debug_assertions, ignore = "the bar is for optimised code")]
fn an_access_of_the_tracker_costs_little() {
    const MOST_NS: f64 = 250.0;
    let layout: PoolLayout = uniform(24, 32, 4, &[1 << 20, 1 << 20, 1 << 20]);
    let pool_bytes = layout.full_bytes() / 4;
    let mut tracker = Tracker::new(layout, Arrangement::Reload { pool_bytes }, &config());
    let mut random = Random(3);
    let tokens: Vec<Vec<i32>> = (0..400).map(|at| token(&mut random, at, 32)).collect();
    let mut best = f64::INFINITY;
    for batch in 0..2000 {
        let start = std::time::Instant::now();
        for ids in &tokens[batch % 8 * 50..][..50] {
            for layer in 0..24 {
                tracker.route(layer, ids, 1);
            }
            tracker.decoded(1, 1000, true);
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e9 / (50.0 * 96.0));
        if batch >= 100 && best < MOST_NS {
            break;
        }
    }
    eprintln!("{best:.0} ns an access");
    assert!(best < MOST_NS, "{best:.0} ns");
}
