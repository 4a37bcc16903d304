//! What the law does while the card, the bus and the work change.

use super::plant::{Card, Skew, config};
use super::{DEVICE, tensor};
use crate::plant::{GIB, MIB};
use hotpin_controllers::config::VramConfig;
use hotpin_controllers::vram::{
    Arrangement, ChangeKind, DeviceLayout, LayerLayout, PoolLayout, VramCeiling, VramRule,
};

const UNIFORM: Skew = Skew {
    hot: 32,
    share: 1.0,
};

fn rules(card: &Card) -> Vec<VramRule> {
    card.changes.iter().map(|change| change.2).collect()
}

fn label(card: &Card) -> &'static str {
    card.applied.label()
}

#[test]
fn the_pool_begins_as_large_as_memory_permits() {
    let mut card = Card::new(&config());
    card.tick();
    assert_eq!(card.out.rule, VramRule::Start);
    assert_eq!(card.out.binding, VramCeiling::Memory);
    let left = card.free_bytes();
    assert!((128 * MIB..134 * MIB).contains(&left), "{} MiB", left / MIB);
    card.run(15.0);
    assert_eq!(card.changes.len(), 1, "{:?}", card.changes);
}

/// Guards against a card that swaps, or another program that cannot start.
#[test]
fn a_hog_gets_its_memory_at_once_and_gives_it_back_slowly() {
    let mut card = Card::warm(&config());
    let before = card.held_bytes();
    card.others_bytes += 300 * MIB;
    card.tick();
    assert_eq!(card.out.rule, VramRule::Yield);
    assert!(card.free_bytes() >= 128 * MIB, "the whole reserve is free");
    card.run(2.0);
    // They took the reserve, and what was freed for it; then they had what they wanted.
    assert_eq!(rules(&card), [VramRule::Yield; 2]);
    assert!(card.free_bytes() >= 128 * MIB);
    card.run(15.0);
    assert_eq!(card.changes.len(), 2);
    card.others_bytes -= 300 * MIB;
    let left_s = card.now_s();
    card.run(120.0);
    assert!(
        card.held_bytes() as f64 > before as f64 * 0.9,
        "it came back"
    );
    let grown: Vec<f64> = card.changes[2..]
        .iter()
        .map(|change| change.0 - left_s)
        .collect();
    assert!(rules(&card)[2..].iter().all(|rule| *rule == VramRule::Grow));
    assert!(grown[0] > 2.0, "risen memory is believed slowly: {grown:?}");
    assert!(grown.len() >= 2, "in steps: {grown:?}");
}

#[test]
fn an_urgent_change_says_so_and_uncovers() {
    let mut card = Card::warm(&config());
    assert!(card.out.cover);
    card.others_bytes += 300 * MIB;
    card.tick();
    assert_eq!(card.out.rule, VramRule::Yield);
    let change = card.out.change.unwrap();
    assert_eq!(change.kind, ChangeKind::Recreate);
    assert!(change.urgent);
    assert!(!card.out.cover, "what is covered is taken back first");
}

#[test]
fn less_than_a_tokens_experts_is_no_pool_and_it_comes_back() {
    let mut card = Card::warm(&config());
    card.others_bytes = 560 * MIB;
    card.run(10.0);
    assert_eq!(card.applied, Arrangement::Cpu);
    assert!(
        card.changes.len() <= 3,
        "each time more is given: {:?}",
        card.changes
    );
    card.others_bytes = 100 * MIB;
    card.run(120.0);
    assert_eq!(label(&card), "reload");
}

/// Guards against a context made anew for every window that somebody opens.
#[test]
fn what_flickers_within_the_reserve_changes_nothing() {
    let mut card = Card::warm(&config());
    let calm = card.others_bytes;
    card.run_with(300.0, |card| {
        let up = (card.now_ns / 700_000_000).is_multiple_of(2);
        card.others_bytes = if up { calm + 60 * MIB } else { calm };
    });
    assert_eq!(card.changes, []);
}

/// Guards against flapping: without the doubling hold there were some 90 changes.
#[test]
fn a_square_wave_of_memory_is_followed_less_and_less() {
    let mut card = Card::new(&config());
    // Fewer tokens, for the test's sake.
    card.rates.dense_ns = 30e6;
    card.run(60.0);
    card.changes.clear();
    let calm = card.others_bytes;
    card.run_with(1800.0, |card| {
        let up = (card.now_ns / 20_000_000_000).is_multiple_of(2);
        card.others_bytes = if up { calm + 300 * MIB } else { calm };
    });
    assert!(card.changes.len() <= 16, "{:?}", card.changes);
    assert!(rules(&card).contains(&VramRule::Yield));
    card.others_bytes = calm;
    card.run(2000.0);
    assert!(card.held_bytes() > 400 * MIB, "and it is not given up");
}

#[test]
fn a_change_that_does_not_pay_is_not_made() {
    for (recreate_s, payback_s, grows) in [(1, 60.0, true), (30, 10.0, false)] {
        let mut card = Card::warm(&VramConfig {
            payback_s,
            ..config()
        });
        card.others_bytes += 300 * MIB;
        card.run(30.0);
        card.others_bytes -= 300 * MIB;
        card.recreate_ns = recreate_s * 1_000_000_000;
        card.run(120.0);
        assert_eq!(
            rules(&card).contains(&VramRule::Grow),
            grows,
            "{recreate_s}"
        );
        assert_eq!(card.out.rule == VramRule::Payback, !grows, "{:?}", card.out);
    }
}

#[test]
fn over_a_slow_bus_the_processor_is_tried_and_kept() {
    let mut card = Card::new(&VramConfig {
        allow_static: false,
        ..config()
    });
    card.skew = UNIFORM;
    card.rates.upload_ns_per_byte = 4.0;
    card.run(300.0);
    assert_eq!(card.applied, Arrangement::Cpu);
    assert_eq!(rules(&card), [VramRule::Start, VramRule::Trial]);
    let expected = card.out.expected;
    assert!(expected.reload_ns > expected.cpu_ns, "{expected:?}");
}

#[test]
fn over_a_quick_bus_the_processor_is_tried_once() {
    let mut card = Card::new(&config());
    card.total_bytes = 500 * MIB;
    card.run(200.0);
    let expected = [VramRule::Start, VramRule::Trial, VramRule::Reload];
    assert_eq!(rules(&card), expected, "{:?}", card.out);
    let (away_s, back_s) = (card.changes[1].0, card.changes[2].0);
    assert!(back_s - away_s < 5.0, "{:?}", card.changes);
}

#[test]
fn a_trial_that_could_save_little_is_not_made() {
    let mut card = Card::new(&config());
    card.rates.upload_ns_per_byte = 0.05;
    card.run(200.0);
    assert_eq!(rules(&card), [VramRule::Start]);
}

/// Sixteen topics at once need more than the pool holds: whole layers are better, then the pool again.
#[test]
fn wide_batches_go_to_whole_layers_and_come_back() {
    let mut card = Card::new(&config());
    card.run(60.0);
    (card.width, card.skew) = (16, UNIFORM);
    card.run(400.0);
    assert_eq!(label(&card), "static", "{:?} {:?}", card.changes, card.out);
    let expected = card.out.expected;
    assert!(expected.static_ns < expected.cpu_ns && expected.cpu_ns < expected.reload_ns);
    let placed = card.changes.len();
    (card.width, card.skew) = (
        1,
        Skew {
            hot: 8,
            share: 0.95,
        },
    );
    card.run(400.0);
    assert_eq!(label(&card), "reload", "{:?} {:?}", card.changes, card.out);
    assert!(card.changes.len() <= placed + 2, "{:?}", card.changes);
}

#[test]
fn without_whole_layers_wide_batches_go_to_the_processor() {
    let mut card = Card::new(&VramConfig {
        allow_static: false,
        ..config()
    });
    (card.width, card.skew) = (16, UNIFORM);
    card.run(300.0);
    assert_eq!(label(&card), "cpu", "{:?}", card.changes);
    let mut card = Card::new(&VramConfig {
        allow_static: false,
        allow_cpu: false,
        ..config()
    });
    (card.width, card.skew) = (16, UNIFORM);
    card.run(300.0);
    assert_eq!(label(&card), "reload", "nothing else is allowed");
}

#[test]
fn a_load_of_the_model_that_does_not_pay_is_not_made() {
    let mut card = Card::new(&config());
    card.run(60.0);
    card.reload_ns = 3_600_000_000_000;
    (card.width, card.skew) = (16, UNIFORM);
    card.run(300.0);
    assert_eq!(label(&card), "cpu");
    assert_eq!(card.out.rule, VramRule::Payback);
}

/// Guards against VRAM that buys nothing.
#[test]
fn a_pool_that_needs_little_gives_the_rest_back_when_idle() {
    let mut card = Card::new(&VramConfig {
        slack_share: 0.01,
        ..config()
    });
    card.skew = Skew { hot: 4, share: 1.0 };
    card.run(60.0);
    assert_eq!(card.out.binding, VramCeiling::Value);
    assert_eq!(card.changes.len(), 1, "not while it works");
    card.idle = true;
    card.run(60.0);
    assert_eq!(rules(&card)[1..], [VramRule::Spare]);
    assert!(card.held_bytes() < 160 * MIB, "{}", card.held_bytes() / MIB);
    card.idle = false;
    card.run(120.0);
    assert_eq!(card.changes.len(), 2, "it is enough: {:?}", card.changes);
}

#[test]
fn no_order_is_beyond_what_a_bank_may_be() {
    let layer = LayerLayout {
        device: Some(0),
        experts: 32,
        top_k: 4,
        tensors: vec![tensor(MIB); 3],
    };
    let device = DeviceLayout {
        most_bank_bytes: Some(50 * MIB),
        ..DEVICE
    };
    let layout = PoolLayout::new(vec![layer; 8], vec![device]).unwrap();
    let config = VramConfig {
        allow_static: false,
        allow_cpu: false,
        ..config()
    };
    let mut card = Card::with_layout(layout, &config);
    card.total_bytes = 100 * GIB;
    card.run(60.0);
    assert_eq!(card.out.binding, VramCeiling::Bank);
    for (_, arrangement, _) in &card.changes {
        if let Ok(plan) = card.layout.plan(arrangement.bytes()) {
            assert!(plan.groups[0].largest_bank_bytes <= 50 * MIB);
        }
    }
    assert!(card.held_bytes() > 140 * MIB);
}

#[test]
fn zero_and_too_little_leave_all_to_the_processor() {
    for limit_bytes in [0, 10 * MIB] {
        let mut card = Card::new(&VramConfig {
            limit_bytes: Some(limit_bytes),
            ..config()
        });
        card.run(30.0);
        assert_eq!(card.changes, []);
        assert_eq!(card.out.rule, VramRule::TooSmall);
        assert_eq!(card.out.binding, VramCeiling::Configured);
        card.law.limit(Some(300 * MIB));
        card.run(15.0);
        let pool_bytes = 300 * MIB;
        assert_eq!(card.applied, Arrangement::Reload { pool_bytes });
        card.law.limit(Some(0));
        card.run(1.0);
        assert_eq!(card.applied, Arrangement::Cpu, "at once");
    }
}

#[test]
fn what_could_not_be_made_is_tried_smaller_and_seldom() {
    let mut card = Card::new(&config());
    card.fails_above_bytes = 300 * MIB;
    card.run(600.0);
    assert_eq!(label(&card), "reload");
    assert!(card.held_bytes() > 150 * MIB, "{}", card.held_bytes() / MIB);
    assert!(card.failures <= 8, "{} failures", card.failures);
}

/// Guards against a pool that is made smaller because a larger one, or whole layers, could not be had.
#[test]
fn what_could_not_be_made_takes_nothing_from_what_works() {
    // Growth by less than a third.
    let mut card = Card::warm(&config());
    card.others_bytes += 100 * MIB;
    card.run(2.0);
    let before = card.applied;
    card.fails_above_bytes = before.bytes();
    card.others_bytes -= 100 * MIB;
    card.changes.clear();
    card.run_with(600.0, |card| card.idle = card.now_s() > 300.0);
    assert!(card.failures > 0, "it was tried");
    assert_eq!((card.applied, rules(&card)), (before, vec![]));
    // Whole layers of about the pool's size.
    let mut card = Card::new(&config());
    card.run(60.0);
    let before = card.applied;
    card.refuses = Some("static");
    (card.width, card.skew) = (16, UNIFORM);
    card.changes.clear();
    card.run(400.0);
    assert!(card.failures > 0, "they were tried");
    let smaller: Vec<_> = card
        .changes
        .iter()
        .filter(|change| change.2 == VramRule::Yield)
        .collect();
    assert_eq!(
        smaller,
        Vec::<&(f64, Arrangement, VramRule)>::new(),
        "{before:?}"
    );
}

#[test]
fn a_yield_that_fails_asks_for_less_the_next_time() {
    let mut card = Card::warm(&VramConfig {
        reserve_bytes: 16 * MIB,
        ..config()
    });
    card.fails_above_bytes = 400 * MIB;
    card.others_bytes += 100 * MIB;
    card.run(10.0);
    let bytes = card.applied.bytes();
    assert!(
        (300 * MIB..=400 * MIB).contains(&bytes),
        "{:?}",
        card.changes
    );
    assert!(card.failures <= 2, "{} failures", card.failures);
}

#[test]
fn saved_sequences_that_do_not_fit_forbid_what_is_not_urgent() {
    let mut card = Card::warm(&config());
    card.state_bytes = GIB;
    card.others_bytes += 300 * MIB;
    card.run(30.0);
    card.others_bytes -= 300 * MIB;
    card.run(120.0);
    assert!(rules(&card).iter().all(|rule| *rule == VramRule::Yield));
    assert_eq!(card.out.rule, VramRule::NoRoom);
    card.state_bytes = MIB;
    card.run(60.0);
    assert!(rules(&card).contains(&VramRule::Grow));
}
