//! The adaptive policy's ranking on a cache: keep what is used soonest, as
//! [`hotpin_controllers::NextUse`] expects it.
//!
//! A layer's experts are accessed together: hits are counted, the ranking learns of the routing, and
//! each miss then takes the place of the lowest-ranked expert, if it ranks above that itself.

use super::Tally;
use hotpin_controllers::{ModelShape, NextUse};
use std::ops::Range;

/// A part of the cache with a size of its own.
#[derive(Debug)]
struct Pool {
    experts: Range<usize>,
    capacity: usize,
    count: usize,
}

/// Replays tokens of `shape` over pools that split the experts: one for all, or one a layer.
pub(super) fn run(routed: &[u32], shape: &ModelShape, pools: &[(Range<usize>, usize)]) -> Tally {
    let experts = shape.total_experts();
    let mut pools: Vec<_> = pools
        .iter()
        .map(|(experts, capacity)| Pool {
            experts: experts.clone(),
            capacity: *capacity,
            count: 0,
        })
        .collect();
    let pool_of = |id: usize| pools.iter().position(|pool| pool.experts.contains(&id));
    let pool_of_layer: Vec<usize> = (0..shape.layers())
        .map(|layer| pool_of(shape.id(layer, 0).index()).unwrap_or(0))
        .collect();
    let mut ranking = NextUse::new(shape, None);
    let mut present = vec![false; experts];
    // The rank of what is in the cache, infinite for the rest.
    let mut held = vec![f32::INFINITY; experts];
    let mut routings = vec![0.0; experts];
    let mut tally = Tally::default();
    for token in routed.chunks_exact(shape.routed_per_token() as usize) {
        ranking.advance(1.0, 1.0);
        for ((held, &present), &rank) in held.iter_mut().zip(&present).zip(ranking.order()) {
            *held = if present { rank } else { f32::INFINITY };
        }
        let mut rest = token;
        for (layer, &pool) in pool_of_layer.iter().enumerate() {
            let (ids, later) = rest.split_at(shape.top_k_in(layer) as usize);
            rest = later;
            let first = shape.id(layer, 0).index();
            let range = first..first + shape.experts_in(layer) as usize;
            for &id in ids {
                tally.hits += u64::from(present[id as usize]);
                routings[id as usize] = 1.0;
            }
            ranking.turn(layer, &routings[range.clone()]);
            for id in range {
                routings[id] = 0.0;
                if present[id] {
                    held[id] = ranking.order()[id];
                }
            }
            let pool = &mut pools[pool];
            for &id in ids {
                let id = id as usize;
                if present[id] {
                    continue;
                }
                let rank = ranking.order()[id];
                if pool.count < pool.capacity {
                    pool.count += 1;
                } else if let Some(victim) = lowest(&held, &pool.experts, rank) {
                    present[victim] = false;
                    held[victim] = f32::INFINITY;
                    tally.replaced += 1;
                } else {
                    continue;
                }
                present[id] = true;
                held[id] = rank;
            }
        }
    }
    tally
}

/// The lowest-ranked expert, if it ranks below `rank`.
fn lowest(held: &[f32], experts: &Range<usize>, rank: f32) -> Option<usize> {
    let held = &held[experts.clone()];
    let lowest = least(held);
    if lowest >= rank {
        return None;
    }
    let at = held.iter().position(|&held| held <= lowest)?;
    Some(experts.start + at)
}

/// The least number, by eight minima side by side.
fn least(numbers: &[f32]) -> f32 {
    let lower = |a: f32, b: f32| if b < a { b } else { a };
    let (eights, rest) = numbers.as_chunks::<8>();
    let mut least = [f32::INFINITY; 8];
    for eight in eights {
        for (least, &number) in least.iter_mut().zip(eight) {
            *least = lower(*least, number);
        }
    }
    rest.iter()
        .chain(&least)
        .copied()
        .fold(f32::INFINITY, lower)
}
