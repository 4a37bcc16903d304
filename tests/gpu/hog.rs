//! The control of the pool: another program takes the device's memory, and gives it back.

use crate::rigged::{
    Device, NEVER, PATIENCE, RESERVE, TICK, TOTAL, locked_bytes, quick, rig, tier,
};
use crate::support::{options, toy};
use hotpin::governor::VramEntry;
use hotpin::plant::{Rig, RigOptions, VramSize};
use hotpin::store::StoreKind;
use hotpin_controllers::{PolicyKind, Residence};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Decodes until the last tick is as wanted.
fn until(
    rig: &mut Rig<'_>,
    device: &Device,
    tokens: &[i32],
    what: &str,
    wanted: impl Fn(&VramEntry) -> bool,
) -> VramEntry {
    let began = Instant::now();
    loop {
        for &token in tokens {
            if rig.session.position() + 1 >= rig.session.n_ctx() {
                rig.session.clear();
            }
            rig.session.decode(&[token]).expect("decode");
            device.pool_bytes.store(rig.session.pool_bytes(), Relaxed);
        }
        let tier = tier(rig).expect("a tier");
        if wanted(&tier) && tier.pool_bytes == rig.session.pool_bytes() {
            return tier;
        }
        assert!(began.elapsed() < PATIENCE, "{what}: {tier:?}");
    }
}

#[test]
fn a_hog_gets_the_memory_and_the_pool_comes_back() {
    let Some(alone) = toy("a_hog_gets_the_memory_and_the_pool_comes_back") else {
        return;
    };
    let layout = alone.toy.layout();
    let device = Arc::new(Device::default());
    let mut rig = rig(&alone, &device, VramSize::Auto, quick(), TICK);
    assert_eq!(rig.store_kind, StoreKind::Mapped);
    let tokens = alone.toy.tokens(8);
    let full = layout.largest_bytes();
    let whole = until(&mut rig, &device, &tokens, "start", |t| t.pool_bytes > 0);
    assert!(whole.pool_bytes <= full);
    // Less than half of the reserve is left: the pool gives the whole of it back.
    let hog_bytes = TOTAL - whole.pool_bytes - RESERVE / 4;
    device.hog_bytes.store(hog_bytes, Relaxed);
    let less = until(&mut rig, &device, &tokens, "hog", |t| {
        t.pool_bytes < whole.pool_bytes
    });
    // Sizes are those of `moe_cache_size`, slots are whole: more than the half that it yields at is free.
    assert!(
        TOTAL - hog_bytes - less.pool_bytes > RESERVE / 2,
        "{less:?}"
    );
    device.hog_bytes.store(TOTAL, Relaxed);
    until(&mut rig, &device, &tokens, "all of it", |t| {
        t.pool_bytes == 0
    });
    device.hog_bytes.store(0, Relaxed);
    let again = until(&mut rig, &device, &tokens, "back", |t| t.pool_bytes > 0);
    eprintln!(
        "pool: {} bytes, {} beside a hog, 0 when it takes all, {} after it",
        whole.pool_bytes, less.pool_bytes, again.pool_bytes
    );
    assert!(again.hits > 0 && again.misses > 0 && again.uploaded_bytes > 0);
    let status = rig.governor.as_ref().expect("regulated").status();
    assert!(status.vram_changes >= 3, "{}", status.vram_changes);
    assert!(status.failed.is_none());
}

#[test]
fn sizes_are_kept_to_and_none_is_none() {
    let Some(alone) = toy("sizes_are_kept_to_and_none_is_none") else {
        return;
    };
    let layout = alone.toy.layout();
    let half = layout.least_bytes().midpoint(layout.largest_bytes());
    let tokens = alone.toy.tokens(8);
    for (size, most) in [
        (VramSize::Bytes(half), half),
        // More than the device could ever compute with.
        (VramSize::Bytes(u64::MAX >> 2), layout.largest_bytes()),
        (VramSize::Bytes(1), 0),
    ] {
        let device = Arc::new(Device::default());
        let mut rig = rig(&alone, &device, size, quick(), TICK);
        let tier = until(&mut rig, &device, &tokens, "size", |t| {
            t.pool_bytes <= most && (t.pool_bytes > 0) == (most > 0)
        });
        assert!(tier.pool_bytes <= most, "{size:?}: {tier:?}");
        if most != half {
            assert!(!rig.notes.is_empty(), "{size:?} is told about");
        }
    }
    let device = Arc::new(Device::default());
    let rig = rig(&alone, &device, VramSize::Off, quick(), TICK);
    assert!(!rig.session.may_have_pool());
}

#[test]
fn direct_is_refused_by_name() {
    let Some(alone) = toy("direct_is_refused_by_name") else {
        return;
    };
    let toy = alone.toy;
    let options = RigOptions {
        control: quick(),
        tick: NEVER,
        ..RigOptions::new(PolicyKind::Adaptive, StoreKind::Direct, options())
    };
    let error = Rig::assemble(&toy.model, &toy.map, options, &mut |_, _| {}).expect_err("refused");
    assert!(error.to_string().contains("--store direct"), "{error}");
}

#[test]
fn pins_are_released_for_the_pool_and_taken_back() {
    let Some(alone) = toy("pins_are_released_for_the_pool_and_taken_back") else {
        return;
    };
    let toy = alone.toy;
    let device = Arc::new(Device::default());
    let mut control = quick();
    // Not all experts have room in RAM: what the pool has need not be among them.
    control.capacity.limit_bytes = Some(toy.map.expert_bytes() * 3 / 4);
    let mut rig = rig(&alone, &device, VramSize::Auto, control, TICK);
    let tokens = toy.tokens(32);
    device.hog_bytes.store(TOTAL, Relaxed);
    until(&mut rig, &device, &tokens, "no pool", |t| t.pool_bytes == 0);
    let pinned = |rig: &Rig<'_>| {
        let store = rig.store.clone().expect("store");
        let mut all = vec![Residence::Absent; toy.map.shape().total_experts()];
        store.residence_into(&mut all);
        all.iter().filter(|r| **r == Residence::Pinned).count()
    };
    let wait = |rig: &mut Rig<'_>, what: &str, wanted: &dyn Fn(usize) -> bool| {
        let began = Instant::now();
        while !wanted(pinned(rig)) {
            for &token in &tokens {
                if rig.session.position() + 1 >= rig.session.n_ctx() {
                    rig.session.clear();
                }
                rig.session.decode(&[token]).expect("decode");
                device.pool_bytes.store(rig.session.pool_bytes(), Relaxed);
            }
            assert!(began.elapsed() < PATIENCE, "{what}: {}", pinned(rig));
        }
        pinned(rig)
    };
    let before = wait(&mut rig, "pins without a pool", &|n| n > 0);
    device.hog_bytes.store(0, Relaxed);
    until(&mut rig, &device, &tokens, "a pool", |t| {
        t.covered_experts > 0
    });
    let beside = wait(&mut rig, "pins are released", &|n| n < before);
    device.hog_bytes.store(TOTAL, Relaxed);
    until(&mut rig, &device, &tokens, "the pool goes", |t| {
        t.pool_bytes == 0
    });
    let after = wait(&mut rig, "pins are taken back", &|n| n > beside);
    eprintln!("pinned experts: {before} without a pool, {beside} beside it, {after} after it");
    // The books are the kernel's, once nothing moves.
    rig.governor.as_mut().expect("regulated").stop();
    let store = rig.store.clone().expect("store");
    assert_eq!(store.locked_bytes(), locked_bytes(toy.map.path()));
}
