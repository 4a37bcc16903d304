//! The ceilings that memory sets: what devices have free, and sizes that could not be had.

use super::decision::Arrangement;
use super::layout::PoolLayout;
use super::observe::{DeviceMemory, VramObservation};
use crate::config::VramConfig;
use crate::num::{filter_share, to_bytes};
use crate::sense::Step;

/// A size that failed is tried again only below this share of it.
const BELOW_FAILED: f64 = 0.75;

/// For so many waits, so that smaller ones have their turn.
const FAILED_WAITS: f64 = 16.0;

/// What memory says on one tick.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Room {
    /// The largest pool that memory permits at once; `None` when no device can be read.
    pub pool_bytes: Option<u64>,
    /// The same once risen memory is believed.
    pub calm_pool_bytes: Option<u64>,
    /// The most bytes for whole layers, both ways.
    pub static_bytes: Option<u64>,
    /// As `calm_pool_bytes`.
    pub calm_static_bytes: Option<u64>,
    /// Others need what we hold: a device has less free than the reserve's yielding share.
    pub pressed: bool,
    /// A device that could be read before cannot be read now.
    pub blind: bool,
    /// Free bytes beyond the reserve, of all devices that can be read.
    pub free_bytes: u64,
}

/// Remembers what is free or ours, falls at once and rises slowly.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    calm: Vec<Option<f64>>,
    seen: Vec<bool>,
}

impl Memory {
    /// Reads the devices.
    pub fn read(
        &mut self,
        step: Step,
        layout: &PoolLayout,
        config: &VramConfig,
        observation: &VramObservation<'_>,
    ) -> Room {
        let devices = layout.devices().len();
        self.calm.resize(devices, None);
        self.seen.resize(devices, false);
        let held = layout.device_bytes(observation.applied);
        let least = config.yield_share * config.reserve_bytes as f64;
        let (mut now, mut calm) = (vec![None; devices], vec![None; devices]);
        let mut room = Room::default();
        for device in 0..devices {
            let memory: Option<DeviceMemory> = observation.devices.get(device).copied().flatten();
            let Some(memory) = memory else {
                room.blind |= self.seen[device];
                continue;
            };
            self.seen[device] = true;
            // What we hold comes and goes by our own doing, so only the sum is others'.
            let held_bytes = held.get(device).copied().unwrap_or(0);
            let ours_bytes = memory.free_bytes.saturating_add(held_bytes);
            let ours = ours_bytes as f64;
            let calm_ours = self.calm[device].map_or(ours, |calm| {
                let share = filter_share(step.dt_s, config.rise_filter_s);
                ours.min(calm + (ours - calm).max(0.0) * share)
            });
            self.calm[device] = Some(calm_ours);
            room.pressed |= memory.free_bytes as f64 <= least;
            room.free_bytes = room
                .free_bytes
                .saturating_add(memory.free_bytes.saturating_sub(config.reserve_bytes));
            let budget = |ours: u64| {
                ours.saturating_sub(config.reserve_bytes)
                    .min(memory.total_bytes)
            };
            now[device] = Some(budget(ours_bytes));
            calm[device] = Some(budget(to_bytes(calm_ours)));
        }
        if now.iter().any(Option::is_some) {
            room.pool_bytes = Some(layout.largest_within(&now));
            room.calm_pool_bytes = Some(layout.largest_within(&calm));
            room.static_bytes = Some(layout.largest_static_within(&now));
            room.calm_static_bytes = Some(layout.largest_static_within(&calm));
        }
        room
    }
}

/// Changes that could not be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failures {
    wait_s: f64,
    /// Ceiling and until when it stands, seconds.
    ceiling: Option<(u64, f64)>,
    /// Nothing but yielding is tried before.
    until_s: f64,
}

impl Failures {
    pub const fn new(config: &VramConfig) -> Self {
        Self {
            wait_s: config.retry_s,
            ceiling: None,
            until_s: 0.0,
        }
    }

    /// Takes in a failure, and forgets old ones.
    pub fn update(&mut self, now_s: f64, failed: Option<Arrangement>, config: &VramConfig) {
        if let Some(arrangement) = failed {
            let bytes = to_bytes(arrangement.bytes() as f64 * BELOW_FAILED);
            self.until_s = now_s + self.wait_s;
            if bytes > 0 {
                self.ceiling = Some((bytes, now_s + FAILED_WAITS * self.wait_s));
            }
            self.wait_s = (self.wait_s * 2.0).min(config.retry_max_s);
            return;
        }
        if self.ceiling.is_some_and(|(_, until_s)| now_s >= until_s) {
            self.ceiling = None;
        }
        if self.ceiling.is_none() && now_s - self.until_s >= 2.0 * self.wait_s {
            self.wait_s = config.retry_s;
        }
    }

    /// Bytes that are not known to fail.
    pub fn ceiling_bytes(&self) -> Option<u64> {
        self.ceiling.map(|(bytes, _)| bytes)
    }

    /// Whether the next try waits.
    pub fn waits(&self, now_s: f64) -> bool {
        now_s < self.until_s
    }
}
