//! The control of the pool: another program takes the device's memory, and gives it back.

use crate::support::{options, toy};
use hotpin::engine::MemorySource;
use hotpin::governor::{OnFailure, VramEntry};
use hotpin::plant::{Rig, RigOptions, VramOptions, VramSize};
use hotpin::store::StoreKind;
use hotpin_controllers::vram::DeviceMemory;
use hotpin_controllers::{AdaptiveConfig, PolicyKind, Residence};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A device of 4 GiB of which a hog and the session's own pool hold some.
#[derive(Debug, Default)]
pub struct Device {
    pub hog_bytes: AtomicU64,
    pub pool_bytes: AtomicU64,
}

pub const TOTAL: u64 = 4 << 30;
const RESERVE: u64 = 512 << 10;

impl MemorySource for Device {
    fn memory(&self) -> Option<DeviceMemory> {
        let held = self.hog_bytes.load(Relaxed) + self.pool_bytes.load(Relaxed);
        Some(DeviceMemory {
            total_bytes: TOTAL,
            free_bytes: TOTAL.saturating_sub(held),
        })
    }
}

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
        let entry = rig.governor.as_ref().expect("regulated").status().entry;
        let tier = entry.and_then(|e| e.vram).expect("a tier");
        if wanted(&tier) && tier.pool_bytes == rig.session.pool_bytes() {
            return tier;
        }
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{what}: {tier:?}"
        );
    }
}

pub fn quick() -> AdaptiveConfig {
    let mut control = AdaptiveConfig::default();
    // Toy sizes and times: the law's own are made for GB and days.
    let vram = &mut control.vram;
    vram.reserve_bytes = RESERVE;
    vram.quiet_hold_s = 0.2;
    vram.quiet_hold_max_s = 0.4;
    vram.rise_filter_s = 0.0;
    vram.growth_factor = 1000.0;
    vram.dwell_s = 0.0;
    vram.confirm_s = 0.0;
    vram.retry_s = 0.2;
    vram.slack_share = 0.0;
    vram.cover_tokens = 8.0;
    // A software device is slower than the processor; here only memory is to decide.
    vram.allow_cpu = false;
    control.pins.transit_floor_bytes = 0;
    control
}

fn rig<'m>(
    alone: &'m crate::support::Alone,
    device: &Arc<Device>,
    size: VramSize,
    control: AdaptiveConfig,
) -> Rig<'m> {
    rig_with(alone, device, size, control, Duration::from_millis(20))
}

/// A rig on the toy, whose model may be loaded anew.
pub fn rig_with<'m>(
    alone: &'m crate::support::Alone,
    device: &Arc<Device>,
    size: VramSize,
    control: AdaptiveConfig,
    tick: Duration,
) -> Rig<'m> {
    let toy = alone.toy;
    let options = RigOptions {
        control,
        tick,
        on_failure: OnFailure::Stop,
        vram: VramOptions {
            size,
            source: Some(Arc::clone(device) as Arc<dyn MemorySource>),
            moves: true,
        },
        ..RigOptions::new(PolicyKind::Adaptive, StoreKind::Auto, options())
    };
    Rig::assemble(&toy.model, &toy.map, options, &mut |_, _| {}).expect("rig")
}

#[test]
fn a_hog_gets_the_memory_and_the_pool_comes_back() {
    let Some(alone) = toy("a_hog_gets_the_memory_and_the_pool_comes_back") else {
        return;
    };
    let layout = alone.toy.layout();
    let device = Arc::new(Device::default());
    let mut rig = rig(&alone, &device, VramSize::Auto, quick());
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
        let mut rig = rig(&alone, &device, size, quick());
        let tier = until(&mut rig, &device, &tokens, "size", |t| {
            t.pool_bytes <= most && (t.pool_bytes > 0) == (most > 0)
        });
        assert!(tier.pool_bytes <= most, "{size:?}: {tier:?}");
        if most != half {
            assert!(!rig.notes.is_empty(), "{size:?} is told about");
        }
    }
    let device = Arc::new(Device::default());
    let rig = rig(&alone, &device, VramSize::Off, quick());
    assert!(!rig.session.has_pool());
}

#[test]
fn direct_is_refused_by_name() {
    let Some(alone) = toy("direct_is_refused_by_name") else {
        return;
    };
    let toy = alone.toy;
    let options = RigOptions {
        control: quick(),
        tick: Duration::from_secs(3600),
        on_failure: OnFailure::Stop,
        ..RigOptions::new(PolicyKind::Adaptive, StoreKind::Direct, options())
    };
    let error = Rig::assemble(&toy.model, &toy.map, options, &mut |_, _| {}).expect_err("refused");
    assert!(error.to_string().contains("--store direct"), "{error}");
}

/// Bytes of the model's mapping that the kernel has locked.
fn locked_bytes(path: &std::path::Path) -> u64 {
    let name = path.to_str().expect("UTF-8");
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let mut ours = false;
    let mut sum = 0;
    for line in smaps.lines() {
        if let Some(first) = line.split_whitespace().next()
            && first.contains('-')
            && !first.ends_with(':')
        {
            ours = line.ends_with(name);
        } else if let (true, Some(rest)) = (ours, line.strip_prefix("Locked:")) {
            let kib: u64 = rest.trim().trim_end_matches(" kB").parse().expect("a size");
            sum += kib * 1024;
        }
    }
    sum
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
    let mut rig = rig(&alone, &device, VramSize::Auto, control);
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
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "{what}: {}",
                pinned(rig)
            );
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
