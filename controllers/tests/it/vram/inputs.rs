//! Each input of the law matters: taken away, it changes decisions in the way that docs/control.md says.

use super::plant::{Card, Sensors, config};
use crate::plant::MIB;
use hotpin_controllers::config::VramConfig;
use hotpin_controllers::vram::{Arrangement, VramCeiling, VramRule};

fn without(take: impl Fn(&mut Sensors), config: &VramConfig) -> Card {
    let mut card = Card::new(config);
    take(&mut card.sensors);
    card
}

/// A hog comes for 30 s and goes; the card runs on for `seconds`.
fn after_a_hog(card: &mut Card, seconds: f64) {
    card.run(60.0);
    card.others_bytes += 300 * MIB;
    card.run(30.0);
    card.others_bytes -= 300 * MIB;
    card.run(seconds);
}

fn grew(card: &Card) -> bool {
    card.changes.iter().any(|change| change.2 == VramRule::Grow)
}

#[test]
fn without_device_memory_only_what_the_user_gives_is_taken() {
    let blind = |sensors: &mut Sensors| sensors.memory = false;
    let mut card = without(blind, &config());
    card.run(60.0);
    assert_eq!(
        (card.applied, card.out.rule),
        (Arrangement::Cpu, VramRule::Blind)
    );
    assert_eq!(card.out.capacity_bytes, 0);
    let given = VramConfig {
        limit_bytes: Some(200 * MIB),
        ..config()
    };
    let mut card = without(blind, &given);
    card.run(60.0);
    assert_eq!(card.held_bytes() / MIB, 198, "66 slots");
    assert_eq!(card.out.ceilings[3], None);
    assert_eq!(card.out.binding, VramCeiling::Configured);
}

#[test]
fn device_memory_that_goes_missing_stops_growth_and_nothing_else() {
    let mut card = Card::new(&config());
    after_a_hog(&mut card, 1.0);
    let held = card.held_bytes();
    card.sensors.memory = false;
    card.run(120.0);
    assert_eq!((card.held_bytes(), card.out.rule), (held, VramRule::Blind));
    card.sensors.memory = true;
    card.run(120.0);
    assert!(grew(&card));
}

#[test]
fn without_routing_memory_alone_sets_the_size() {
    let mut card = without(|sensors| sensors.figures = false, &config());
    after_a_hog(&mut card, 120.0);
    assert!(grew(&card), "{:?}", card.changes);
    assert_eq!(card.out.ceilings[5], None, "no value is known");
    let known = [card.out.expected.present_ns, card.out.expected.reload_ns];
    assert_eq!(known, [None, None]);
    assert_eq!(card.applied.label(), "reload", "and no other arrangement");
}

#[test]
fn without_the_link_uploads_tell_what_a_byte_costs() {
    let mut card = without(|sensors| sensors.link = false, &config());
    after_a_hog(&mut card, 120.0);
    assert!(grew(&card));
    let mut known = Card::new(&config());
    after_a_hog(&mut known, 120.0);
    let (told, measured) = (known.out.expected.reload_ns, card.out.expected.reload_ns);
    let ratio = measured.unwrap() / told.unwrap();
    assert!((ratio - 1.0).abs() < 0.1, "{told:?} {measured:?}");
}

#[test]
fn a_link_that_was_measured_wrongly_is_corrected() {
    let mut card = Card::new(&VramConfig {
        allow_static: false,
        ..config()
    });
    card.skew.share = 0.0;
    card.rates.upload_ns_per_byte = 4.0;
    // Ten times as fast as it is: by that alone the pool would be twice as fast as the processor.
    card.sensors.link_factor = 0.1;
    card.run(200.0);
    assert_eq!(card.applied, Arrangement::Cpu, "{:?}", card.out);
    let expected = card.out.expected;
    assert!(
        expected.reload_ns.unwrap() > 2.0 * expected.cpu_ns.unwrap(),
        "{expected:?}"
    );
}

#[test]
fn what_changes_cost_must_be_known() {
    let mut card = without(|sensors| sensors.recreate = false, &config());
    after_a_hog(&mut card, 120.0);
    assert!(!grew(&card));
    assert_eq!(card.out.rule, VramRule::Unmeasured);
    let yielded = card
        .changes
        .iter()
        .any(|change| change.2 == VramRule::Yield);
    assert!(yielded, "yielding asks for no price");
    let mut card = without(|sensors| sensors.reload = false, &config());
    card.run(60.0);
    card.width = 16;
    card.skew.share = 0.0;
    card.run(300.0);
    assert_eq!(card.applied, Arrangement::Cpu);
    assert_eq!(
        card.out.rule,
        VramRule::Unmeasured,
        "static placement has no price"
    );
}

#[test]
fn what_a_context_takes_tells_whether_both_fit() {
    // The new pool takes 198 MiB and its context 20; 128 are the reserve.
    for (context, free_mib, fits) in [(true, 350, true), (true, 340, false), (false, 900, false)] {
        let mut card = Card::new(&config());
        card.sensors.context = context;
        card.total_bytes = 4096 * MIB;
        card.run(10.0);
        card.law.limit(Some(200 * MIB));
        card.total_bytes = card.held_bytes() + card.others_bytes + free_mib * MIB;
        card.tick();
        assert_eq!(
            card.out.change.unwrap().both_fit,
            fits,
            "{context} {free_mib}"
        );
    }
}

#[test]
fn host_memory_that_is_not_known_forbids_nothing() {
    let mut card = without(|sensors| sensors.host = false, &config());
    card.state_bytes = u64::MAX;
    after_a_hog(&mut card, 120.0);
    assert!(grew(&card));
}
