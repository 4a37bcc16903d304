//! What the loop must do as a whole: rest, follow, give way, come back.

use crate::plant::{EXPERT, MIB, Plant, Routing};
use hotpin_controllers::config::AdaptiveConfig;
use hotpin_controllers::{
    Adaptive, Ceiling, ExpertId, ModelShape, PinLimit, Policy, Reason, Residence,
};

fn adaptive(plant: &Plant) -> Adaptive {
    Adaptive::new(&plant.shape, &AdaptiveConfig::default(), None).unwrap()
}

/// Share of the pinned experts that lie in the layer's hot window.
fn pinned_hot(plant: &Plant, first: u32, width: u32) -> (usize, usize) {
    let mut hot = 0;
    let mut pinned = 0;
    for (index, residence) in (0u32..).zip(&plant.residence) {
        if *residence == Residence::Pinned {
            let (layer, at) = plant.shape.place(ExpertId(index));
            let experts = plant.shape.experts_in(layer);
            let start = (first + u32::try_from(layer).unwrap() * 5) % experts;
            pinned += 1;
            hot += usize::from((at + experts - start) % experts < width);
        }
    }
    (hot, pinned)
}

#[test]
fn uniform_routing_pins_nothing_and_leaves_capacity_to_transit() {
    let mut plant = Plant::new(512 * MIB);
    plant.routing = Routing::Uniform;
    let mut policy = adaptive(&plant);
    for _ in 0..600 {
        plant.tick(&mut policy);
        assert_eq!(plant.out.pin_limit, PinLimit::Uniform);
    }
    assert_eq!((plant.out.pin_budget_bytes, plant.pinned_bytes()), (0, 0));
    assert_eq!(plant.out.capacity_bytes, 512 * MIB);
}

#[test]
fn pins_are_let_go_when_routing_turns_uniform() {
    let mut plant = Plant::new(512 * MIB);
    let mut policy = adaptive(&plant);
    plant.run(&mut policy, 20.0);
    assert!(plant.pinned_bytes() > 0);
    plant.routing = Routing::Uniform;
    plant.run(&mut policy, 120.0);
    assert_eq!(
        (plant.out.pin_limit, plant.pinned_bytes()),
        (PinLimit::Uniform, 0)
    );
}

/// 600 experts are hot, as many as can be pinned.
fn wide_plant() -> Plant {
    let shape = ModelShape::uniform(30, 64, EXPERT, 4).unwrap();
    let mut plant = Plant::shaped(shape, 1600 * MIB);
    plant.routing = wide_hot(0);
    plant
}

fn wide_hot(first: u32) -> Routing {
    Routing::Hot {
        first,
        width: 20,
        share: 0.95,
    }
}

#[test]
fn drift_is_followed_within_sixty_tokens() {
    // 600 pinned experts, all of them stale at once, at 15 tokens a second.
    let mut plant = wide_plant();
    let mut policy = adaptive(&plant);
    plant.run(&mut policy, 30.0);
    let (fresh, pinned) = pinned_hot(&plant, 0, 20);
    assert!(
        pinned >= 580 && fresh * 10 >= pinned * 9,
        "{fresh} of {pinned}"
    );
    plant.routing = wide_hot(32);
    let mut drift = false;
    let follow = |plant: &mut Plant, policy: &mut Adaptive, ticks: u32| {
        let mut drift = false;
        for tick in 0..ticks {
            plant.tokens_per_tick = 1 + tick % 2;
            drift |= plant.tick(policy).drift;
            assert!(plant.out.pin.len() <= 12 + 8);
        }
        drift
    };
    drift |= follow(&mut plant, &mut policy, 40);
    let (fresh, pinned) = pinned_hot(&plant, 32, 20);
    assert!(drift);
    // Stale pins go first and the room is filled after them, 12 experts a tick since that was
    // fastest when measured: 40 ticks are worth 480, which is 80% of the budget. The set is whole
    // again a little later; until then the missing part is held by transit.
    assert!(
        pinned >= 480 && fresh * 10 >= pinned * 8,
        "{fresh} of {pinned} after 60 tokens"
    );
    follow(&mut plant, &mut policy, 20);
    let (fresh, pinned) = pinned_hot(&plant, 32, 20);
    assert!(
        pinned >= 580 && fresh * 10 >= pinned * 9,
        "{fresh} of {pinned} after 90 tokens"
    );
}

/// Guards against stale pins that hold memory for as long as the churn limit likes: unlocking is
/// cheap and needs no tokens from the bucket.
#[test]
fn stale_pins_go_within_forty_tokens_and_without_the_churn_limit() {
    let mut plant = wide_plant();
    let mut config = AdaptiveConfig::default();
    config.targeting.churn_bytes_per_s = 1;
    config.targeting.churn_burst_bytes = 1;
    let mut profile = vec![0.0; plant.shape.total_experts()];
    for layer in 0..30u32 {
        for at in 0..20 {
            let expert = plant.shape.id(layer as usize, (layer * 5 + at) % 64);
            profile[expert.index()] = 1.0;
        }
    }
    let mut policy = Adaptive::new(&plant.shape, &config, Some(&profile)).unwrap();
    plant.run(&mut policy, 30.0);
    let (fresh, _) = pinned_hot(&plant, 0, 20);
    assert!(fresh >= 580, "{fresh}");
    plant.routing = wide_hot(32);
    for _ in 0..20 {
        plant.tick(&mut policy);
        let reasons = plant.out.unpin.iter().map(|action| action.reason);
        assert!(reasons.into_iter().all(|reason| reason != Reason::Shrink));
    }
    let (stale, _) = pinned_hot(&plant, 0, 20);
    assert!(stale * 5 <= fresh, "{stale} of {fresh} are still pinned");
}

/// Guards against flapping at the frontier: what was let go is not locked again before it is
/// routed again, though its release moves the frontier itself.
#[test]
fn what_was_let_go_is_not_pinned_again_before_it_is_routed() {
    let mut plant = wide_plant();
    let mut policy = adaptive(&plant);
    let mut released: Vec<Option<u32>> = vec![None; plant.shape.total_experts()];
    let mut seen = 0;
    for tick in 0..900u32 {
        plant.routing = wide_hot(tick / 150 * 32 % 64);
        plant.tick(&mut policy);
        for action in &plant.out.pin {
            let index = action.expert.index();
            let count = plant.counts[index];
            assert_ne!(released[index], Some(count), "tick {tick}");
        }
        for action in &plant.out.unpin {
            if action.reason == Reason::Stale {
                released[action.expert.index()] = Some(plant.counts[action.expert.index()]);
                seen += 1;
            }
        }
    }
    assert!(seen > 1000, "{seen} releases");
}

#[test]
fn a_profile_is_pinned_on_the_first_tick() {
    let mut plant = Plant::new(512 * MIB);
    let profile: Vec<f32> = (0..512u16).map(|i| f32::from(i % 64)).collect();
    let mut policy =
        Adaptive::new(&plant.shape, &AdaptiveConfig::default(), Some(&profile)).unwrap();
    let out = plant.tick(&mut policy).clone();
    assert_eq!(out.pin.len(), 192, "three quarters of 256 experts");
    assert!(
        out.pin
            .iter()
            .all(|action| action.reason == Reason::Profile)
    );
    assert!(
        out.pin
            .iter()
            .all(|action| plant.shape.place(action.expert).1 >= 40)
    );
}

#[test]
fn when_everything_fits_everything_is_locked() {
    let mut plant = Plant::new(4096 * MIB);
    let mut policy = adaptive(&plant);
    plant.tick(&mut policy);
    assert_eq!(
        (plant.out.binding, plant.out.pin_limit),
        (Ceiling::Model, PinLimit::Model)
    );
    assert_eq!(plant.out.pin_budget_bytes, plant.shape.total_bytes());
    assert!(
        plant
            .out
            .pin
            .iter()
            .all(|action| action.reason == Reason::LockAll)
    );
    plant.run(&mut policy, 10.0);
    assert_eq!(plant.pinned_bytes(), plant.shape.total_bytes());
    assert!(plant.out.pin.is_empty() && plant.out.unpin.is_empty());
}

#[test]
fn capacity_gives_way_at_once_and_comes_back_within_a_minute() {
    // 8 GiB held, a hog at 1 GB/s until the reserve is crossed by 4 GiB, then its exit.
    let shape = ModelShape::uniform(32, 128, 2 * EXPERT, 4).unwrap();
    let mut plant = Plant::shaped(shape, 12 * 1024 * MIB);
    plant.tokens_per_tick = 1;
    let mut policy = adaptive(&plant);
    plant.run(&mut policy, 60.0);
    let (others, full) = (plant.others, plant.out.capacity_bytes);
    for _ in 0..80 {
        plant.others += 100 * MIB;
        plant.tick(&mut policy);
        let free = plant.host_total - plant.others;
        assert!(
            plant.out.capacity_bytes + 1024 * MIB <= free,
            "above its ceiling"
        );
        assert!(plant.pinned_bytes() <= plant.out.pin_budget_bytes);
    }
    let low = plant.out.capacity_bytes;
    plant.others = others;
    plant.run(&mut policy, 4.0);
    assert_eq!(plant.out.capacity_bytes, low, "it waits for quiet");
    plant.run(&mut policy, 40.0);
    assert!(plant.out.capacity_bytes + 64 * MIB >= full);
}

#[test]
fn a_steady_workload_keeps_its_pins() {
    let mut plant = Plant::new(512 * MIB);
    let mut policy = adaptive(&plant);
    plant.run(&mut policy, 60.0);
    let before = plant.swaps;
    plant.run(&mut policy, 60.0);
    let per_token = (plant.swaps - before) as f64 / 1200.0;
    let (hot, pinned) = pinned_hot(&plant, 0, 12);
    assert!(
        hot >= 85 && pinned >= 96,
        "{hot} hot of {pinned} pinned, 96 are hot"
    );
    // Half of the pins are cold; noise moves some of them on each of 32 routings a token.
    assert!(per_token < 3.0, "{per_token} swaps a token");
}

#[test]
fn prefill_alone_ends_idleness() {
    let mut plant = Plant::new(512 * MIB);
    let mut policy = adaptive(&plant);
    plant.tokens_per_tick = 0;
    plant.run(&mut policy, 300.0);
    assert!(plant.out.capacity_bytes < 512 * MIB);
    plant.engine.prefill_tokens += 100;
    assert_eq!(plant.tick(&mut policy).capacity_bytes, 512 * MIB);
    assert!(policy.scores().iter().all(|score| score.is_finite()));
}
