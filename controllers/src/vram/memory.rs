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
    /// What failed and until when it is remembered, seconds.
    failed: Option<(Arrangement, f64)>,
    /// Nothing but yielding is tried before.
    until_s: f64,
}

impl Failures {
    pub const fn new(config: &VramConfig) -> Self {
        Self {
            wait_s: config.retry_s,
            failed: None,
            until_s: 0.0,
        }
    }

    /// Takes in a failure, and forgets old ones.
    pub fn update(&mut self, now_s: f64, failed: Option<Arrangement>, config: &VramConfig) {
        if let Some(arrangement) = failed {
            self.until_s = now_s + self.wait_s;
            if arrangement.bytes() > 0 {
                self.failed = Some((arrangement, now_s + FAILED_WAITS * self.wait_s));
            }
            self.wait_s = (self.wait_s * 2.0).min(config.retry_max_s);
            return;
        }
        if self.failed.is_some_and(|(_, until_s)| now_s >= until_s) {
            self.failed = None;
        }
        if self.failed.is_none() && now_s - self.until_s >= 2.0 * self.wait_s {
            self.wait_s = config.retry_s;
        }
    }

    /// Bytes that are not known to fail.
    pub fn ceiling_bytes(&self) -> Option<u64> {
        self.failed.map(|(failed, _)| below(failed))
    }

    /// The same, if what failed was less of what there is.
    pub fn ceiling_below(&self, applied: Arrangement) -> Option<u64> {
        let (failed, _) = self.failed?;
        let less = failed.label() == applied.label() && failed.bytes() < applied.bytes();
        less.then(|| below(failed))
    }

    /// At most so many bytes, and none that are known to fail.
    pub fn bound(&self, bytes: u64) -> u64 {
        self.ceiling_bytes().map_or(bytes, |most| most.min(bytes))
    }

    /// Whether the next try waits.
    pub fn waits(&self, now_s: f64) -> bool {
        now_s < self.until_s
    }
}

fn below(failed: Arrangement) -> u64 {
    to_bytes(failed.bytes() as f64 * BELOW_FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_bounds_a_yield_only_if_it_was_less_of_the_same() {
        let pool = |pool_bytes| Arrangement::Reload { pool_bytes };
        let config = VramConfig::default();
        let mut failures = Failures::new(&config);
        assert_eq!(failures.bound(400), 400);
        for (failed, bounds) in [
            (pool(400), None),
            (pool(500), None),
            (pool(300), Some(225)),
            (Arrangement::Static { bytes: 300 }, None),
        ] {
            failures.update(0.0, Some(failed), &config);
            assert_eq!(failures.ceiling_below(pool(400)), bounds, "{failed:?}");
            assert_eq!(failures.bound(1000), below(failed));
        }
        let forgotten_s = FAILED_WAITS * config.retry_max_s + 1.0;
        failures.update(forgotten_s, None, &config);
        assert_eq!(failures.bound(1000), 1000);
    }
}
