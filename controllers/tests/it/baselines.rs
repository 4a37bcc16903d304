//! The policies to compare with.

use crate::plant::{MIB, Plant, Routing};
use hotpin_controllers::config::AdaptiveConfig;
use hotpin_controllers::{BuildError, PinLimit, Policy, PolicyKind, Reason, Residence, build};

fn policy(kind: PolicyKind, plant: &Plant, profile: Option<&[f32]>) -> Box<dyn Policy> {
    build(kind, &plant.shape, &AdaptiveConfig::default(), profile).unwrap()
}

#[test]
fn names_round_trip() {
    let plant = Plant::new(512 * MIB);
    for kind in PolicyKind::ALL {
        assert_eq!(kind.to_string().parse(), Ok(kind));
        assert_eq!(policy(kind, &plant, Some(&[1.0; 512])).name(), kind.label());
    }
    let unknown = "belady".parse::<PolicyKind>().unwrap_err();
    assert!(unknown.to_string().contains("belady"));
}

#[test]
fn all_follow_the_same_capacity_law() {
    let capacities = PolicyKind::ALL.map(|kind| {
        let mut plant = Plant::new(512 * MIB);
        let mut policy = policy(kind, &plant, Some(&[1.0; 512]));
        plant.run(policy.as_mut(), 5.0);
        plant.others += 200 * MIB;
        plant.run(policy.as_mut(), 1.0);
        plant.others -= 200 * MIB;
        plant.run(policy.as_mut(), 5.0);
        plant.out.capacity_bytes
    });
    assert!(
        capacities.iter().all(|&bytes| bytes == capacities[0]),
        "{capacities:?}"
    );
}

#[test]
fn off_and_fetch_pin_nothing() {
    for kind in [PolicyKind::Off, PolicyKind::Fetch] {
        let mut plant = Plant::new(512 * MIB);
        let mut policy = policy(kind, &plant, None);
        plant.run(policy.as_mut(), 10.0);
        assert_eq!(plant.pinned_bytes(), 0);
        assert_eq!(
            (plant.out.pin_budget_bytes, plant.out.pin_limit),
            (0, PinLimit::Policy)
        );
    }
}

#[test]
fn static_needs_a_profile_and_never_leaves_it() {
    let mut plant = Plant::new(512 * MIB);
    let config = AdaptiveConfig::default();
    let refused = build(PolicyKind::Static, &plant.shape, &config, None);
    assert_eq!(refused.err(), Some(BuildError::NoProfile));
    let profile: Vec<f32> = (0..512u16).map(|i| f32::from(i % 64)).collect();
    let mut policy = policy(PolicyKind::Static, &plant, Some(&profile));
    plant.tick(policy.as_mut());
    let start = plant.residence.clone();
    let pinned = |residence: &[Residence]| {
        residence
            .iter()
            .map(|&r| r == Residence::Pinned)
            .collect::<Vec<_>>()
    };
    plant.routing = Routing::Hot {
        first: 0,
        width: 8,
        share: 1.0,
    };
    plant.run(policy.as_mut(), 60.0);
    assert_eq!(pinned(&start), pinned(&plant.residence));
    plant.others += 256 * MIB;
    plant.tick(policy.as_mut());
    assert!(
        plant.pinned_bytes() <= 192 * MIB,
        "it gives way like the others"
    );
    plant.others -= 256 * MIB;
    plant.run(policy.as_mut(), 60.0);
    assert_eq!(
        pinned(&start),
        pinned(&plant.residence),
        "and takes its own back"
    );
}

#[test]
fn lru_pins_what_was_used_last() {
    let mut plant = Plant::new(512 * MIB);
    plant.routing = Routing::Hot {
        first: 0,
        width: 16,
        share: 1.0,
    };
    let mut policy = policy(PolicyKind::Lru, &plant, None);
    plant.run(policy.as_mut(), 10.0);
    let used = |plant: &Plant| {
        let scores = plant.counts.iter().zip(&plant.residence);
        scores
            .filter(|(count, r)| **count > 0 && **r == Residence::Pinned)
            .count()
    };
    assert_eq!(used(&plant), 128, "all that was ever used");
    plant.routing = Routing::Hot {
        first: 32,
        width: 16,
        share: 1.0,
    };
    for _ in 0..20 {
        let out = plant.tick(policy.as_mut());
        assert!(out.pin.iter().all(|action| action.reason == Reason::Recent));
    }
    let least = policy.scores().iter().zip(&plant.residence);
    let recent = least
        .filter(|(score, r)| **score > 0.02 && **r == Residence::Pinned)
        .count();
    assert!(recent >= 120, "{recent}");
}
