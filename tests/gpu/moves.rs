//! Whole layers' experts that go to the device for good while a session runs, and come back.

use crate::rigged::{Device, NEVER, PATIENCE, TICK, TOTAL, locked_bytes, quick, rig, tier};
use crate::support::{Toy, bits, toy};
use hotpin::engine::Model;
use hotpin::plant::{Move, Resumed, Rig, VramSize};
use hotpin_controllers::vram::{Arrangement, ChangeKind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Bytes of the last two layers' experts.
pub fn two_layers(toy: &Toy) -> u64 {
    let bytes = toy.layout().host_bytes() / 2;
    assert_eq!(toy.layout().static_layers(bytes), [2, 3]);
    bytes
}

/// Follows an order: another model, and the rig over it.
fn follow(toy: &Toy, rig: Rig<'_>, order: Move, refused: Option<&str>) -> Rig<'static> {
    let placement = match refused {
        None => rig.placement_of(&toy.map, order.to),
        Some(_) => rig.session.model().placement().clone(),
    };
    let parked = rig.park(order, Instant::now()).expect("on a device");
    // Tests end with the process.
    let model = Model::open_placed(toy.map.path(), placement, |_| true).expect("model");
    let model: &'static Model = Box::leak(Box::new(model));
    let resumed = parked.resume(model, &toy.map, refused.map(str::to_owned));
    let Resumed { rig, lost } = resumed.expect("resumed");
    assert_eq!(lost, None);
    rig
}

fn apart(a: &[u32], b: &[u32]) -> f32 {
    let pairs = a.iter().zip(b);
    pairs
        .map(|(&a, &b)| (f32::from_bits(a) - f32::from_bits(b)).abs())
        .fold(0.0, f32::max)
}

#[test]
fn layers_go_to_the_device_and_come_back_with_the_sequence() {
    let Some(alone) = toy("layers_go_to_the_device_and_come_back_with_the_sequence") else {
        return;
    };
    let toy = alone.toy;
    let device = Arc::new(Device::default());
    let tokens = toy.tokens(24);
    let mut stays = rig(&alone, &device, VramSize::Off, quick(), NEVER);
    let expected: Vec<Vec<u32>> = tokens
        .iter()
        .map(|token| {
            stays.session.decode(&[*token]).expect("decode");
            bits(stays.session.logits())
        })
        .collect();
    drop(stays);
    let mut rig = rig(&alone, &device, VramSize::Auto, quick(), NEVER);
    let link = rig.vram_link().expect("a tier");
    assert_eq!(rig.move_due(), None);
    let bytes = two_layers(toy);
    let there = Move {
        to: Arrangement::Static { bytes },
        both_fit: false,
    };
    let back = Move {
        to: Arrangement::Cpu,
        both_fit: true,
    };
    let mut most = 0.0_f32;
    for (part, step) in tokens.chunks(6).enumerate() {
        for token in step {
            rig.session.decode(&[*token]).expect("decode");
            let at = rig.session.position() - 1;
            most = most.max(apart(&bits(rig.session.logits()), &expected[at]));
        }
        let (order, refused) = match part {
            0 => (there, Some("the device has no room")),
            1 => (there, None),
            2 => (back, None),
            _ => break,
        };
        link.order_move(order);
        assert_eq!(rig.move_due(), Some(order));
        rig = follow(toy, rig, order, refused);
        assert_eq!(rig.move_due(), None, "followed, or refused once");
        let is_there = part == 1;
        assert_eq!(link.applied() == order.to, refused.is_none());
        let store = rig.store.clone().expect("store");
        // What is on the device is nothing that RAM could hold.
        let (on_device, here) = (toy.map.shape().id(3, 0), toy.map.shape().id(0, 0));
        assert_eq!(store.pin(on_device).expect("pin"), !is_there);
        assert!(store.pin(here).expect("pin"));
        assert_eq!(store.locked_bytes(), locked_bytes(toy.map.path()));
        assert_eq!(rig.session.position(), 6 * (part + 1));
    }
    eprintln!("a sequence that moves there and back: logits at most {most} apart");
    assert!(most < 0.5, "{most}");
}

#[test]
fn a_hog_gets_back_what_whole_layers_take() {
    let Some(alone) = toy("a_hog_gets_back_what_whole_layers_take") else {
        return;
    };
    let toy = alone.toy;
    let device = Arc::new(Device::default());
    let tokens = toy.tokens(8);
    let mut control = quick();
    // Only what must be given up is; which arrangement is faster is not asked here.
    control.vram.confirm_s = 3600.0;
    let mut rig = rig(&alone, &device, VramSize::Auto, control, TICK);
    let there = Move {
        to: Arrangement::Static {
            bytes: two_layers(toy),
        },
        both_fit: true,
    };
    // What the law begins with is there first.
    rig.session.decode(&tokens[..1]).expect("decode");
    assert!(rig.session.pool_bytes() > 0);
    rig = follow(toy, rig, there, None);
    device.pool_bytes.store(there.to.bytes(), Relaxed);
    let began = Instant::now();
    let decode = |rig: &mut Rig<'_>, what: &str| {
        assert!(began.elapsed() < PATIENCE, "{what}");
        rig.session.clear();
        rig.session.decode(&tokens[..4]).expect("prompt");
        rig.session.decode(&tokens[4..5]).expect("decode");
    };
    while tier(&rig).is_none_or(|tier| tier.arrangement != "static") {
        decode(&mut rig, "the tier is told");
    }
    let told = tier(&rig).expect("a tier");
    assert_eq!(told.static_bytes, there.to.bytes());
    assert_eq!(told.pool_bytes, 0);
    device.hog_bytes.store(TOTAL, Relaxed);
    let order = loop {
        if let Some(order) = rig.move_due() {
            break order;
        }
        decode(&mut rig, "an order");
    };
    assert!(order.to.bytes() < there.to.bytes(), "{order:?}");
    rig = follow(toy, rig, order, None);
    device.pool_bytes.store(0, Relaxed);
    while tier(&rig).is_none_or(|tier| tier.arrangement != "cpu") {
        decode(&mut rig, "it is told");
    }
    let recent = rig.governor.as_ref().expect("regulated").recent(10_000);
    let changes: Vec<_> = recent
        .iter()
        .filter_map(|entry| entry.vram.as_ref())
        .flat_map(|tier| &tier.changes)
        .filter(|change| change.kind == Some(ChangeKind::Reload))
        .map(|change| {
            (
                change.arrangement.as_str(),
                change.bytes,
                change.refused.clone(),
            )
        })
        .collect();
    assert_eq!(
        changes,
        [("static", there.to.bytes(), None), ("cpu", 0, None)]
    );
    let status = rig.governor.as_ref().expect("regulated").status();
    assert_eq!(status.vram_changes, 3, "the first pool, and both moves");
    let yielded = recent
        .iter()
        .filter_map(|entry| entry.vram.as_ref())
        .any(|tier| tier.rule.label() == "yield" && tier.wanted != "static");
    assert!(yielded, "the rule is in the journal");
}
