//! The pool against a plain model of llama.cpp's: two lists, searched from the front.

use super::{DEVICE, small, tensor, uniform};
use crate::plant::{MIB, Random};
use hotpin_controllers::vram::{
    Copied, DeviceLayout, LayerLayout, MOST_POOLED_TOKENS, Pool, PoolCounts, PoolLayout, Routed,
};
use proptest::prelude::*;
use std::collections::VecDeque;

type Key = (usize, i32);

/// One group.
struct Plain {
    probation: VecDeque<Option<Key>>,
    protected: VecDeque<Key>,
    slots: usize,
}

impl Plain {
    fn new(slots: usize) -> Self {
        Self {
            probation: vec![None; slots].into(),
            protected: VecDeque::new(),
            slots,
        }
    }

    fn holds(&self, key: Key) -> bool {
        self.probation.contains(&Some(key)) || self.protected.contains(&key)
    }

    /// Hits of a batch's distinct experts.
    fn plan(&mut self, layer: usize, ids: &[i32]) -> usize {
        let mut first: Vec<i32> = Vec::new();
        for &id in ids {
            if !first.contains(&id) {
                first.push(id);
            }
        }
        let mut hits = 0;
        for &id in &first {
            if self.holds((layer, id)) {
                self.promote((layer, id));
                hits += 1;
            }
        }
        let mut sorted = first.clone();
        sorted.sort_unstable();
        for &id in &sorted {
            if !self.holds((layer, id)) {
                self.drop_one(layer, &first);
                self.probation.push_back(Some((layer, id)));
            }
        }
        hits
    }

    fn promote(&mut self, key: Key) {
        self.probation.retain(|slot| *slot != Some(key));
        self.protected.retain(|slot| *slot != key);
        self.protected.push_back(key);
        if self.protected.len() > self.slots / 2 {
            let demoted = self.protected.pop_front();
            self.probation.push_back(demoted);
        }
    }

    /// The oldest that this batch does not use, on probation first.
    fn drop_one(&mut self, layer: usize, used: &[i32]) {
        let is_used = |key: &Key| key.0 == layer && used.contains(&key.1);
        let free = |slot: &Option<Key>| slot.as_ref().is_none_or(|key| !is_used(key));
        if let Some(at) = self.probation.iter().position(free) {
            self.probation.remove(at);
        } else {
            let at = self.protected.iter().position(|key| !is_used(key)).unwrap();
            self.protected.remove(at);
        }
    }
}

/// Rows of distinct experts, skewed towards low numbers.
fn batch(random: &mut Random, tokens: usize, experts: u32, top_k: u32) -> Vec<i32> {
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let start = ids.len();
        while ids.len() < start + top_k as usize {
            let among = random.below(experts) + 1;
            let id = random.below(among).cast_signed();
            if !ids[start..].contains(&id) {
                ids.push(id);
            }
        }
    }
    ids
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Two groups, batches of all widths, every size.
    #[test]
    fn hits_and_residence_are_the_plain_models(
        seed: u64,
        layers in 1usize..4,
        experts in 4u32..20,
        top_k in 1u32..4,
        thousandths in 50u64..1100,
    ) {
        let layer = |bytes| LayerLayout {
            device: Some(0),
            experts,
            top_k,
            tensors: vec![tensor(bytes), tensor(1000)],
        };
        let list: Vec<LayerLayout> = (0..layers).map(|_| layer(4096)).chain([layer(8192)]).collect();
        let layout = PoolLayout::new(list, vec![DEVICE]).unwrap();
        let size = layout.full_bytes() * thousandths / 1000;
        let size = size.max(layout.least_bytes());
        let mut pool = Pool::new(&layout, size).unwrap();
        let plan = layout.plan(size).unwrap();
        let mut plain: Vec<Plain> =
            plan.groups.iter().map(|group| Plain::new(group.slots as usize)).collect();
        let mut random = Random(seed);
        let mut expected = PoolCounts::default();
        for _ in 0..120 {
            let most = if random.below(4) == 0 { 40 } else { 3 };
            let tokens = 1 + random.below(most) as usize;
            for layer in 0..=layers {
                let group = usize::from(layer == layers);
                let ids = batch(&mut random, tokens, experts, top_k);
                let most = (tokens * top_k as usize).min(experts as usize);
                let admitted = tokens <= MOST_POOLED_TOKENS && most <= plain[group].slots;
                let routed = pool.route(layer, &ids, tokens);
                if !admitted {
                    prop_assert!(matches!(routed, Routed::Bypassed { .. }), "{routed:?}");
                    continue;
                }
                let hits = plain[group].plan(layer, &ids) as u64;
                let mut distinct = ids.clone();
                distinct.sort_unstable();
                distinct.dedup();
                let misses = distinct.len() as u64 - hits;
                expected.hits += hits;
                expected.misses += misses;
                expected.upload_bytes += misses * list_bytes(&layout, layer);
            }
        }
        prop_assert_eq!(pool.totals().counts(), expected);
        for layer in 0..=layers {
            let lists = &plain[usize::from(layer == layers)];
            for expert in 0..experts {
                let key = (layer, expert.cast_signed());
                prop_assert_eq!(pool.holds(layer, expert), lists.holds(key));
                prop_assert_eq!(pool.protects(layer, expert), lists.protected.contains(&key));
            }
        }
    }
}

fn list_bytes(layout: &PoolLayout, layer: usize) -> u64 {
    layout.layers()[layer].expert_bytes()
}

#[test]
fn small_and_large_batches_are_told_apart_by_ids() {
    let layout = uniform(1, 64, 4, &[1000]);
    let mut pool = Pool::new(&layout, layout.full_bytes()).unwrap();
    let ids = |tokens: i32| (0..tokens * 4).map(|id| id % 64).collect::<Vec<_>>();
    pool.route(0, &ids(8), 8);
    pool.route(0, &ids(9), 9);
    let totals = *pool.totals();
    let counts = |hits, misses| PoolCounts {
        hits,
        misses,
        upload_bytes: misses * 1000,
    };
    assert_eq!(totals.small, counts(0, 32));
    assert_eq!(totals.large, counts(32, 4));
}

#[test]
fn wide_batches_move_nothing_and_copy_what_is_there_where_the_card_computes_them() {
    for (offload_tokens, copied) in [(None, 0), (Some(32), 3 * 4), (Some(64), 0)] {
        let device = DeviceLayout {
            offload_tokens,
            ..DEVICE
        };
        let layer = LayerLayout {
            device: Some(0),
            experts: 16,
            top_k: 4,
            tensors: vec![tensor(100), tensor(100), tensor(300)],
        };
        let layout = PoolLayout::new(vec![layer], vec![device]).unwrap();
        let mut pool = Pool::new(&layout, layout.full_bytes()).unwrap();
        pool.route(0, &[1, 2, 3, 4], 1);
        let before = pool.totals().counts();
        let wide: Vec<i32> = (0..33 * 4).map(|id| id % 16).collect();
        let routed = pool.route(0, &wide, 33);
        let all = Routed::Bypassed {
            experts: 16,
            bytes: 16 * 500,
        };
        assert_eq!(routed, all);
        assert_eq!(pool.totals().counts(), before);
        assert_eq!(pool.totals().bypassed.wide, 1);
        let bytes = copied / 3 * 500;
        assert_eq!(
            pool.totals().copied,
            Copied {
                slices: copied,
                bytes
            }
        );
    }
}

#[test]
fn a_batch_that_could_select_more_than_there_are_slots_is_passed_over() {
    let layout = small();
    let mut pool = Pool::new(&layout, layout.least_bytes()).unwrap();
    assert_eq!(layout.plan(pool.bytes()).unwrap().groups[0].slots, 4);
    // The same four experts twice would fit, but llama.cpp knows only how many there could be.
    let routed = pool.route(0, &[0, 1, 2, 3, 0, 1, 2, 3], 2);
    let bytes = 4 * 3 * MIB;
    assert_eq!(routed, Routed::Bypassed { experts: 4, bytes });
    assert_eq!(pool.totals().bypassed.union, 1);
    assert_eq!(pool.totals().bypassed.wide, 0);
}

#[test]
fn what_is_no_batch_of_the_model_moves_nothing() {
    let layout = small();
    let mut pool = Pool::new(&layout, layout.full_bytes()).unwrap();
    for (layer, ids, tokens) in [
        (8, [0, 1, 2, 3], 1),
        (0, [0, 1, 2, 32], 1),
        (0, [0, 1, 2, -1], 1),
        (0, [0, 1, 2, 3], 0),
    ] {
        assert_eq!(pool.route(layer, &ids, tokens), Routed::Uncached);
    }
    assert_eq!(*pool.totals(), Default::default());
    assert!(!pool.holds(8, 0) && !pool.holds(0, 32) && !pool.protects(0, 0));
}
