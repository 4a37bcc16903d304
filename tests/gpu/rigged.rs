//! A rig on the toy over a device whose memory the test gives and takes.

use crate::support::{Alone, options};
use hotpin::engine::{MemorySource, Model};
use hotpin::governor::{OnFailure, VramEntry};
use hotpin::model::ModelMap;
use hotpin::plant::{Rig, RigOptions, VramOptions, VramSize};
use hotpin::store::StoreKind;
use hotpin_controllers::vram::DeviceMemory;
use hotpin_controllers::{AdaptiveConfig, PolicyKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Time between ticks where decisions are looked at.
pub const TICK: Duration = Duration::from_millis(20);
/// Never ticks by itself: what is ordered is the test's.
pub const NEVER: Duration = Duration::from_secs(3600);
/// What is waited for comes before that, or never.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A device of 4 GiB of which a hog and the session's own pool hold some.
#[derive(Debug, Default)]
pub struct Device {
    pub hog_bytes: AtomicU64,
    pub pool_bytes: AtomicU64,
}

pub const TOTAL: u64 = 4 << 30;
pub const RESERVE: u64 = 512 << 10;

impl MemorySource for Device {
    fn memory(&self) -> Option<DeviceMemory> {
        let held = self.hog_bytes.load(Relaxed) + self.pool_bytes.load(Relaxed);
        Some(DeviceMemory {
            total_bytes: TOTAL,
            free_bytes: TOTAL.saturating_sub(held),
        })
    }
}

/// The tier at the last tick.
pub fn tier(rig: &Rig<'_>) -> Option<VramEntry> {
    let status = rig.governor.as_ref().expect("regulated").status();
    assert!(status.failed.is_none(), "{:?}", status.failed);
    status.entry.and_then(|entry| entry.vram)
}

/// Settings for toy sizes and times: the law's own are made for GB and days.
pub fn quick() -> AdaptiveConfig {
    let mut control = AdaptiveConfig::default();
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

/// A rig on the toy, whose model may be loaded anew.
pub fn rig<'m>(
    alone: &'m Alone,
    device: &Arc<Device>,
    size: VramSize,
    control: AdaptiveConfig,
    tick: Duration,
) -> Rig<'m> {
    rig_over(
        &alone.toy.model,
        &alone.toy.map,
        device,
        size,
        control,
        tick,
    )
}

/// The same over another load of it.
pub fn rig_over<'m>(
    model: &'m Model,
    map: &ModelMap,
    device: &Arc<Device>,
    size: VramSize,
    control: AdaptiveConfig,
    tick: Duration,
) -> Rig<'m> {
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
    Rig::assemble(model, map, options, &mut |_, _| {}).expect("rig")
}

/// Bytes of the mappings of a file that are locked. Several models map it here, and what `smaps` calls locked is
/// each one's share.
pub fn locked_bytes(path: &std::path::Path) -> u64 {
    let name = path.to_str().expect("UTF-8");
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let (mut size, mut sum) = (0, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some(range) if !range.ends_with(':') => {
                let ends = range.split_once('-').expect("a range");
                let at = |hex| u64::from_str_radix(hex, 16).expect("an address");
                size = if line.ends_with(name) {
                    at(ends.1) - at(ends.0)
                } else {
                    0
                };
            }
            Some("VmFlags:") if words.any(|flag| flag == "lo") => sum += size,
            _ => {}
        }
    }
    sum
}
