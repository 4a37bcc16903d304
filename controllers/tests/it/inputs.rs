//! Each input matters: taken away, it changes decisions in the way that docs/control.md says.

use crate::plant::{EXPERT, GIB, MIB, Plant, Random, Routing, Sensors};
use hotpin_controllers::config::AdaptiveConfig;
use hotpin_controllers::{
    Adaptive, Ceiling, Decision, ModelShape, PinLimit, PressureCause, Reason,
};

fn adaptive(plant: &Plant, config: &AdaptiveConfig) -> Adaptive {
    Adaptive::new(&plant.shape, config, None).unwrap()
}

fn ceiling(out: &Decision, which: Ceiling) -> Option<u64> {
    Ceiling::ALL
        .iter()
        .position(|c| *c == which)
        .and_then(|at| out.ceilings[at])
}

/// A warm plant with a regulated policy.
fn warm(sensors: Sensors) -> (Plant, Adaptive) {
    let mut plant = Plant::new(512 * MIB);
    plant.sensors = sensors;
    let mut policy = adaptive(&plant, &AdaptiveConfig::default());
    plant.run(&mut policy, 20.0);
    (plant, policy)
}

#[test]
fn without_routing_counts_nothing_new_is_pinned() {
    let (with, _) = warm(Sensors::ALL);
    let (without, _) = warm(Sensors {
        counts: false,
        ..Sensors::ALL
    });
    assert!(with.pinned_bytes() > 150 * MIB, "{}", with.pinned_bytes());
    assert_eq!(without.pinned_bytes(), 0);
    assert_eq!(without.out.pin_limit, PinLimit::Uniform);
}

#[test]
fn without_routing_counts_a_profile_is_never_left() {
    let mut profile = vec![0.0; 512];
    profile[20..80].fill(1.0);
    let pinned = |counts| {
        let mut plant = Plant::new(512 * MIB);
        plant.sensors.counts = counts;
        let mut policy =
            Adaptive::new(&plant.shape, &AdaptiveConfig::default(), Some(&profile)).unwrap();
        plant.run(&mut policy, 20.0);
        let stay =
            (20..80).filter(|&i| plant.residence[i] == hotpin_controllers::Residence::Pinned);
        (stay.count(), plant.swaps)
    };
    assert_eq!(pinned(false), (60, 0));
    let (stay, _) = pinned(true);
    assert!(stay < 40, "{stay} stale experts are still pinned");
}

#[test]
fn without_major_faults_phantom_hits_go_unnoticed() {
    for (faults, sees) in [(true, true), (false, false)] {
        let (mut plant, mut policy) = warm(Sensors {
            faults,
            ..Sensors::ALL
        });
        let before = plant.out.capacity_bytes;
        assert_eq!(plant.out.pressure_cause, None);
        plant.phantom_share = 0.5;
        plant.run(&mut policy, 10.0);
        assert_eq!(plant.out.capacity_bytes < before * 3 / 4, sees);
        assert_eq!(
            plant.out.pressure_cause == Some(PressureCause::Faults),
            sees
        );
        plant.phantom_share = 0.0;
        plant.run(&mut policy, 60.0);
        assert!(
            plant.out.capacity_bytes >= before - 2 * MIB,
            "it comes back"
        );
    }
}

#[test]
fn the_fault_trim_is_bounded() {
    let (mut plant, mut policy) = warm(Sensors::ALL);
    let before = plant.out.capacity_bytes;
    plant.phantom_share = 1.0;
    plant.run(&mut policy, 100.0);
    assert!(plant.out.capacity_bytes >= before / 2 - MIB);
}

#[test]
fn measured_stall_decides_whether_a_swap_pays() {
    let swaps = |stall| {
        let mut plant = Plant::new(512 * MIB);
        plant.sensors.stall = stall;
        plant.miss_ns = 500; // the "disk" is memory: a miss costs next to nothing
        let mut policy = adaptive(&plant, &AdaptiveConfig::default());
        plant.run(&mut policy, 60.0);
        plant.swaps = 0;
        plant.routing = Routing::Hot {
            first: 32,
            width: 12,
            share: 0.9,
        };
        plant.run(&mut policy, 20.0);
        plant.swaps
    };
    let (known, unknown) = (swaps(true), swaps(false));
    assert!(
        known * 4 < unknown,
        "{known} swaps with measured stall, {unknown} on the default"
    );
}

#[test]
fn measured_stall_sets_the_value_of_memory() {
    let capacity = |stall| {
        let mut plant = Plant::new(768 * MIB);
        plant.sensors.stall = stall;
        plant.miss_ns = 2_000;
        let mut config = AdaptiveConfig::default();
        config.value.target_stall_per_gib = Some(0.05);
        let mut policy = adaptive(&plant, &config);
        plant.run(&mut policy, 200.0);
        (plant.out.capacity_bytes, plant.out.binding)
    };
    let ((known, binding), (unknown, _)) = (capacity(true), capacity(false));
    assert_eq!(binding, Ceiling::Value);
    assert!(
        known < unknown / 2,
        "{known} with measured stall, {unknown} without"
    );
}

#[test]
fn without_meminfo_a_hog_is_not_seen() {
    for (host, sees) in [(true, true), (false, false)] {
        let (mut plant, mut policy) = warm(Sensors {
            host,
            ..Sensors::ALL
        });
        assert_eq!(ceiling(&plant.out, Ceiling::Host).is_some(), host);
        plant.others += 300 * MIB;
        plant.tick(&mut policy);
        assert_eq!(
            plant.out.capacity_bytes <= 212 * MIB,
            sees,
            "on the very tick"
        );
        assert_eq!(plant.pinned_bytes() <= 212 * MIB, sees);
        assert_eq!(
            plant.out.binding,
            if sees { Ceiling::Host } else { Ceiling::Model }
        );
    }
}

/// Guards against growth to the whole model because `/proc/meminfo` could not be read for a while.
#[test]
fn meminfo_that_goes_missing_lets_nothing_grow_until_it_is_back() {
    let (mut plant, mut policy) = warm(Sensors::ALL);
    // Others have just left, so that there is something to grow to.
    plant.others += 300 * MIB;
    plant.run(&mut policy, 2.0);
    plant.others -= 300 * MIB;
    plant.run(&mut policy, 1.0);
    let before = plant.out.capacity_bytes;
    assert!(before <= 212 * MIB, "{}", before / MIB);
    let host = ceiling(&plant.out, Ceiling::Host);
    plant.sensors.host = false;
    for _ in 0..600 {
        plant.tick(&mut policy);
        assert_eq!(ceiling(&plant.out, Ceiling::Host), host);
        assert_eq!(plant.out.capacity_bytes, before);
    }
    // Idle memory is given back, and not taken again on the word of a sensor that says nothing.
    plant.tokens_per_tick = 0;
    plant.run(&mut policy, 320.0);
    let idle = plant.out.capacity_bytes;
    assert_eq!(idle, plant.shape.token_cycle_bytes());
    plant.tokens_per_tick = 2;
    plant.run(&mut policy, 60.0);
    assert_eq!(plant.out.capacity_bytes, idle);
    plant.sensors.host = true;
    plant.run(&mut policy, 4.9);
    assert_eq!(plant.out.capacity_bytes, idle, "the hold begins anew");
    plant.run(&mut policy, 30.0);
    assert!(
        plant.out.capacity_bytes >= 500 * MIB,
        "{}",
        plant.out.capacity_bytes / MIB
    );
}

/// A limit that is lifted is no sensor that fails.
#[test]
fn a_cgroup_limit_that_is_lifted_is_followed_after_the_hold() {
    let mut plant = Plant::new(768 * MIB);
    plant.cgroup_limit = Some(512 * MIB);
    let mut policy = adaptive(&plant, &AdaptiveConfig::default());
    plant.run(&mut policy, 10.0);
    let before = plant.out.capacity_bytes;
    plant.cgroup_limit = None;
    plant.run(&mut policy, 4.9);
    assert_eq!(plant.out.capacity_bytes, before);
    plant.run(&mut policy, 20.0);
    assert!(
        plant.out.capacity_bytes >= 700 * MIB,
        "{}",
        plant.out.capacity_bytes / MIB
    );
}

#[test]
fn without_the_cgroup_its_limit_is_not_kept() {
    for (cgroup, sees) in [(true, true), (false, false)] {
        let mut plant = Plant::new(768 * MIB);
        plant.sensors.cgroup = cgroup;
        plant.cgroup_limit = Some(512 * MIB);
        let mut policy = adaptive(&plant, &AdaptiveConfig::default());
        plant.run(&mut policy, 10.0);
        // 512 MiB less the reserve of 64 MiB.
        assert_eq!(plant.out.capacity_bytes <= 448 * MIB, sees);
        assert_eq!(
            plant.out.binding,
            if sees { Ceiling::Cgroup } else { Ceiling::Host }
        );
    }
}

/// Stall that direct reclaim confirms.
fn press(plant: &mut Plant) {
    plant.stall_fraction = 0.4;
    plant.reclaim_bytes_per_s = 4 * GIB;
}

#[test]
fn without_psi_pressure_weighs_less_and_without_both_nothing() {
    let after = |psi, reclaim| {
        let (mut plant, mut policy) = warm(Sensors {
            psi,
            reclaim,
            ..Sensors::ALL
        });
        press(&mut plant);
        plant.run(&mut policy, 1.0);
        (
            plant.out.capacity_bytes,
            plant.out.pressure_cause,
            ceiling(&plant.out, Ceiling::Pressure),
        )
    };
    let (both, cause, seen) = after(true, true);
    assert!(both < 512 * MIB && seen.is_some());
    assert_eq!(cause, Some(PressureCause::StallReclaim));
    let (alone, cause, seen) = after(false, true);
    assert!(alone < 512 * MIB && seen.is_some());
    assert_eq!(cause, Some(PressureCause::Reclaim));
    assert_eq!(after(false, false), (512 * MIB, None, None));
}

#[test]
fn stall_without_confirmation_does_not_shrink() {
    let unconfirmed = Sensors {
        reclaim: false,
        ..Sensors::ALL
    };
    let (mut plant, mut policy) = warm(unconfirmed);
    press(&mut plant);
    plant.run(&mut policy, 10.0);
    assert_eq!(
        plant.out.capacity_bytes,
        512 * MIB,
        "our own refaults stall as well"
    );
    // Low headroom confirms it: next to nothing is available besides what we hold locked.
    let mut config = AdaptiveConfig::default();
    config.pins.share = 0.99;
    config.pins.transit_floor_bytes = 0;
    config.pins.transit_floor_layers = 1;
    config.pins.transit_cycles = 0.0;
    let mut plant = Plant::new(512 * MIB);
    plant.sensors = unconfirmed;
    let mut policy = adaptive(&plant, &config);
    plant.run(&mut policy, 20.0);
    press(&mut plant);
    plant.run(&mut policy, 1.0);
    assert!(plant.out.capacity_bytes < 480 * MIB);
    assert_eq!(
        plant.out.pressure_cause,
        Some(PressureCause::StallLowHeadroom)
    );
}

#[test]
fn reclaim_that_our_own_reads_explain_confirms_nothing() {
    let (mut plant, mut policy) = warm(Sensors::ALL);
    plant.stall_fraction = 0.4;
    for _ in 0..100 {
        let before = plant.engine.fetch_bytes;
        plant.tick(&mut policy);
        // As much as was read is pushed out in the next tick.
        plant.reclaim_bytes_per_s = (plant.engine.fetch_bytes - before) * 10;
        plant.engine.fetch_bytes += 8 * MIB;
    }
    assert_eq!(plant.out.pressure_cause, None);
}

#[test]
fn without_hits_and_misses_drift_is_not_seen() {
    for (engine, sees) in [(true, true), (false, false)] {
        let shape = ModelShape::uniform(30, 64, EXPERT, 4).unwrap();
        let mut plant = Plant::shaped(shape, 1600 * MIB);
        plant.sensors.engine = engine;
        plant.routing = Routing::Hot {
            first: 0,
            width: 20,
            share: 0.95,
        };
        let mut policy = adaptive(&plant, &AdaptiveConfig::default());
        plant.run(&mut policy, 20.0);
        plant.routing = Routing::Hot {
            first: 32,
            width: 20,
            share: 0.95,
        };
        let mut seen = false;
        for _ in 0..20 {
            seen |= plant.tick(&mut policy).drift;
        }
        assert_eq!(seen, sees);
    }
}

#[test]
fn without_tokens_an_idle_session_gives_memory_back_and_takes_it_at_once() {
    let (mut plant, mut policy) = warm(Sensors::ALL);
    plant.tokens_per_tick = 0;
    plant.run(&mut policy, 119.0);
    assert_eq!(plant.out.capacity_bytes, 512 * MIB);
    plant.run(&mut policy, 200.0);
    assert_eq!(plant.out.capacity_bytes, plant.shape.token_cycle_bytes());
    assert_eq!(plant.out.binding, Ceiling::Value);
    plant.tokens_per_tick = 2;
    plant.tick(&mut policy);
    assert_eq!(plant.out.capacity_bytes, 512 * MIB);

    let mut keep = AdaptiveConfig::default();
    keep.value.give_back_idle = false;
    let mut plant = Plant::new(512 * MIB);
    let mut policy = adaptive(&plant, &keep);
    plant.tokens_per_tick = 0;
    plant.run(&mut policy, 400.0);
    assert_eq!(plant.out.capacity_bytes, 512 * MIB);
}

#[test]
fn lock_limits_and_failures_cap_the_pins() {
    let (mut plant, mut policy) = warm(Sensors::ALL);
    plant.locks.memlock_bytes = Some(64 * MIB);
    plant.tick(&mut policy);
    assert_eq!(
        (plant.out.pin_limit, plant.pinned_bytes()),
        (PinLimit::Memlock, 64 * MIB)
    );
    plant.locks.memlock_bytes = None;
    plant.locks.map_budget_bytes = Some(32 * MIB);
    plant.tick(&mut policy);
    assert_eq!(
        (plant.out.pin_limit, plant.pinned_bytes()),
        (PinLimit::Maps, 32 * MIB)
    );
    plant.locks.map_budget_bytes = None;
    plant.lock_most = Some(48 * MIB);
    plant.run(&mut policy, 1.0);
    assert_eq!(plant.out.pin_limit, PinLimit::LockFailures);
    assert!(plant.pinned_bytes() <= 48 * MIB);
    plant.lock_most = None;
    plant.run(&mut policy, 30.0);
    assert_eq!(plant.out.pin_limit, PinLimit::Share);
    assert!(plant.pinned_bytes() > 100 * MIB);
}

#[test]
fn noise_in_available_memory_does_not_move_capacity() {
    let (mut plant, mut policy) = warm(Sensors::ALL);
    let (others, mut noise) = (plant.others, Random(3));
    let mut changes = 0;
    let mut last = plant.out.capacity_bytes;
    for tick in 0..1200 {
        plant.others = others + u64::from(noise.below(40)) * MIB;
        plant.tick(&mut policy);
        changes += usize::from(tick > 100 && plant.out.capacity_bytes != last);
        last = plant.out.capacity_bytes;
    }
    assert!(changes <= 2, "capacity moved {changes} times");
    assert!(last >= 512 * MIB - 40 * MIB);
}

#[test]
fn residence_decides_what_a_swap_costs() {
    // The same candidate far ahead of a pinned expert: resident it is swapped in; absent, only when
    // it is ahead by more.
    let (mut plant, mut policy) = warm(Sensors::ALL);
    plant.routing = Routing::Hot {
        first: 32,
        width: 12,
        share: 0.9,
    };
    let mut reasons = Vec::new();
    for _ in 0..60 {
        let out = plant.tick(&mut policy).clone();
        for action in &out.pin {
            if action.reason == Reason::Swap {
                reasons.push(action.expert);
            }
        }
        assert!(out.pin_budget_bytes <= out.capacity_bytes);
        assert!(plant.pinned_bytes() <= out.pin_budget_bytes + EXPERT);
    }
    assert!(reasons.len() > 20, "{} swaps", reasons.len());
}

/// What VRAM has makes room in RAM for others, and comes back when VRAM gives it up.
#[test]
fn what_is_in_vram_is_not_locked_in_ram_as_well() {
    let pinned = |plant: &Plant| -> Vec<bool> {
        let is = |r: &hotpin_controllers::Residence| *r == hotpin_controllers::Residence::Pinned;
        plant.residence.iter().map(is).collect()
    };
    let (mut plant, mut policy) = warm(Sensors::ALL);
    let before = pinned(&plant);
    let most = before.iter().filter(|p| **p).count();
    // Every second of the locked experts.
    let mut taken = false;
    let covered: Vec<bool> = before
        .iter()
        .map(|&pinned| {
            taken ^= pinned;
            pinned && taken
        })
        .collect();
    plant.covered = Some(covered.clone());
    plant.tick(&mut policy);
    let reasons: Vec<Reason> = plant.out.unpin.iter().map(|action| action.reason).collect();
    assert!(reasons.contains(&Reason::InVram), "{reasons:?}");
    plant.run(&mut policy, 30.0);
    let during = pinned(&plant);
    let both = during
        .iter()
        .zip(&covered)
        .filter(|(p, c)| **p && **c)
        .count();
    assert_eq!(both, 0);
    let held = during.iter().filter(|p| **p).count();
    assert!(
        held * 10 > most * 9,
        "{held} of {most}: the room is used for others"
    );
    let ranks = hotpin_controllers::Policy::ranks(&policy);
    let last = ranks
        .iter()
        .zip(&covered)
        .all(|(rank, c)| !*c || *rank == 0.0);
    assert!(last, "transit need not keep them");
    plant.covered = None;
    plant.run(&mut policy, 30.0);
    let after = pinned(&plant);
    // Of 64 experts in a layer 12 are hot; the others that were locked were so by chance.
    let is_hot = |id: usize| (id % 64 + 64 - id / 64 * 5) % 64 < 12;
    let hot = (0..covered.len()).filter(|&id| covered[id] && is_hot(id));
    let (were, back) = (hot.clone().count(), hot.filter(|&id| after[id]).count());
    assert!(
        were > 40 && back * 10 >= were * 9,
        "{back} of {were} are locked again"
    );
}

/// Where there is room for all, nothing is given up.
#[test]
fn while_ram_holds_everything_vram_takes_no_lock_away() {
    let mut plant = Plant::new(2 * GIB);
    let mut policy = adaptive(&plant, &AdaptiveConfig::default());
    plant.run(&mut policy, 20.0);
    assert_eq!(plant.out.pin_limit, PinLimit::Model);
    plant.covered = Some(vec![true; plant.residence.len()]);
    plant.run(&mut policy, 5.0);
    assert_eq!(plant.pinned_bytes(), GIB);
    let ranks = hotpin_controllers::Policy::ranks(&policy);
    assert!(ranks.iter().any(|rank| *rank > 0.0));
}

/// A list that covers nothing decides as none at all.
#[test]
fn a_card_that_holds_nothing_changes_nothing() {
    let run = |covered: Option<Vec<bool>>| {
        let mut plant = Plant::new(512 * MIB);
        plant.covered = covered;
        let mut policy = adaptive(&plant, &AdaptiveConfig::default());
        let mut decisions = Vec::new();
        for _ in 0..100 {
            plant.run(&mut policy, 0.1);
            decisions.push(plant.out.clone());
        }
        decisions
    };
    assert_eq!(run(None), run(Some(vec![false; 512])));
}
