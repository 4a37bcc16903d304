//! Settings that change while the loop runs.

use crate::plant::{MIB, Plant};
use hotpin_controllers::config::AdaptiveConfig;
use hotpin_controllers::{Ceiling, PinLimit, Policy, PolicyKind, build};

const WITHOUT_OFF: [PolicyKind; 4] = [
    PolicyKind::Fetch,
    PolicyKind::Static,
    PolicyKind::Lru,
    PolicyKind::Adaptive,
];

fn policy(kind: PolicyKind, plant: &Plant) -> Box<dyn Policy> {
    let profile: Vec<f32> = (0..512u16).map(|i| f32::from(i % 64)).collect();
    build(
        kind,
        &plant.shape,
        &AdaptiveConfig::default(),
        Some(&profile),
    )
    .unwrap()
}

#[test]
fn equal_settings_change_nothing() {
    let same = AdaptiveConfig::default().check().unwrap();
    for kind in WITHOUT_OFF {
        let mut plants = [Plant::new(512 * MIB), Plant::new(512 * MIB)];
        let mut policies = [policy(kind, &plants[0]), policy(kind, &plants[1])];
        for tick in 0..300 {
            policies[1].reconfigure(&same);
            for (plant, policy) in plants.iter_mut().zip(&mut policies) {
                // Pressure comes and goes, so that there is an episode to go on with.
                plant.stall_fraction = if tick % 100 < 20 { 0.4 } else { 0.0 };
                plant.tick(policy.as_mut());
            }
            assert_eq!(plants[0].out, plants[1].out, "{kind}, tick {tick}");
        }
    }
}

#[test]
fn another_reserve_holds_from_the_next_tick_on_and_the_users_ceiling_stays() {
    for kind in WITHOUT_OFF {
        let mut plant = Plant::new(512 * MIB);
        let mut policy = policy(kind, &plant);
        plant.run(policy.as_mut(), 10.0);
        assert_eq!(plant.out.capacity_bytes / MIB, 512, "{kind}");
        let mut config = AdaptiveConfig::default();
        config.capacity.host_reserve_bytes += 128 * MIB;
        policy.reconfigure(&config.check().unwrap());
        plant.tick(policy.as_mut());
        assert_eq!(plant.out.binding, Ceiling::Host, "{kind}");
        assert_eq!(plant.out.capacity_bytes / MIB, 384, "{kind}");
        policy.limit_capacity(Some(100 * MIB));
        policy.reconfigure(&AdaptiveConfig::default().check().unwrap());
        plant.run(policy.as_mut(), 20.0);
        assert_eq!(plant.out.binding, Ceiling::Configured, "{kind}");
        assert_eq!(plant.out.capacity_bytes, 100 * MIB, "{kind}");
    }
}

#[test]
fn another_share_of_pins_holds_from_the_next_tick_on() {
    for kind in [PolicyKind::Lru, PolicyKind::Adaptive] {
        let mut plant = Plant::new(512 * MIB);
        let mut policy = policy(kind, &plant);
        plant.run(policy.as_mut(), 20.0);
        let before = plant.pinned_bytes();
        assert!(before > 200 * MIB, "{kind}: {before}");
        let mut config = AdaptiveConfig::default();
        config.pins.share = 0.25;
        policy.reconfigure(&config.check().unwrap());
        plant.tick(policy.as_mut());
        assert_eq!(plant.out.pin_limit, PinLimit::Share, "{kind}");
        assert_eq!(plant.out.pin_budget_bytes / MIB, 128, "{kind}");
        assert!(plant.pinned_bytes() <= 128 * MIB, "{kind}");
    }
}
