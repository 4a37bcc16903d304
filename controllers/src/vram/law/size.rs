//! How large the pool should be: what must be given up, what may grow, and what is worth having.

use super::{Choice, Now, VramLaw};
use crate::vram::decision::{Arrangement, VramRule};

/// Sizes that the law chooses are multiples of this, bytes.
const GRAIN_BYTES: u64 = 1 << 20;

/// A pool gives memory back only if it needs less than this share of what it has.
const SPARE_SHARE: f64 = 0.75;

/// Sizes that are looked at for what is worth having.
const PARTS: u64 = 48;

impl VramLaw {
    /// What must be given up at once, if anything.
    pub(super) fn yields(&self, now: &Now<'_>) -> Option<Choice> {
        let applied = now.observation.applied;
        // An order that gives up enough is on its way.
        let due = self.order.map_or(applied, |order| order.arrangement);
        let bytes = due.bytes().min(applied.bytes());
        if bytes == 0 || bytes <= self.most_of(now.hard, applied) {
            return None;
        }
        let told = self.config.limit_bytes.is_some_and(|most| bytes > most);
        let most_bank = matches!(applied, Arrangement::Reload { .. }) && bytes > self.bank_bytes;
        if !now.room.pressed && !told && !most_bank {
            return None;
        }
        // Who takes whatever is freed wants more than a sensor can say: each time twice as much.
        let extra = self.config.reserve_bytes as f64 * self.pace.insistence(now.step.now_s);
        let extra_bytes = if told { 0 } else { crate::num::to_bytes(extra) };
        // A smaller size that failed has to be smaller the next time; a larger one, or another arrangement, says
        // nothing of what works.
        let failed = self.failures.ceiling_below(applied);
        let most = failed.unwrap_or(u64::MAX);
        let left = |bytes: u64| bytes.saturating_sub(extra_bytes).min(most);
        let static_bytes = left(now.hard.static_bytes);
        let arrangement = match applied {
            Arrangement::Static { .. } if self.layers(static_bytes) > 0 => Arrangement::Static {
                bytes: static_bytes,
            },
            _ => self.pool_of(left(now.hard.pool_bytes)),
        };
        (arrangement != applied).then_some((arrangement, VramRule::Yield))
    }

    /// A pool of at most so many bytes; the processor where none is possible.
    pub(super) fn pool_of(&self, most_bytes: u64) -> Arrangement {
        let rounded = most_bytes - most_bytes % GRAIN_BYTES;
        let pool_bytes = if rounded >= self.least_bytes {
            rounded
        } else {
            most_bytes
        };
        if pool_bytes < self.least_bytes || pool_bytes == 0 {
            return Arrangement::Cpu;
        }
        Arrangement::Reload { pool_bytes }
    }

    pub(super) fn layers(&self, bytes: u64) -> usize {
        self.layout.static_layers(bytes).len()
    }

    pub(super) fn static_share(&self, arrangement: Arrangement) -> f64 {
        let bytes: u64 = match arrangement {
            Arrangement::Static { .. } => self.layout.device_bytes(arrangement).iter().sum(),
            Arrangement::Reload { .. } | Arrangement::Cpu => 0,
        };
        bytes as f64 / self.layout.host_bytes().max(1) as f64
    }

    /// Another size of the pool that there is.
    pub(super) fn resizes(&self, now: &Now<'_>) -> Choice {
        let applied = now.observation.applied;
        let Arrangement::Reload { pool_bytes } = applied else {
            return (applied, VramRule::Hold);
        };
        let now_s = now.step.now_s;
        let worth = now.value_bytes.unwrap_or(u64::MAX);
        let spare = pool_bytes as f64 * SPARE_SHARE;
        if (worth as f64) < spare && now.observation.idle && self.pace.may_leave(now_s) {
            return (self.pool_of(worth.max(self.least_bytes)), VramRule::Spare);
        }
        let most = pool_bytes as f64 * self.config.growth_factor;
        let wanted = crate::num::to_bytes(most)
            .min(worth)
            .min(self.failures.bound(now.hard.pool_bytes));
        let to = self.pool_of(wanted.min(now.calm.pool_bytes));
        let band = self.config.dead_band_share;
        if (wanted as f64) < pool_bytes as f64 * (1.0 + band) {
            return (applied, VramRule::Hold);
        }
        // One change for memory that comes back, not one for each part of it that is believed.
        let believed = to.bytes() as f64 >= wanted as f64 * (1.0 - band)
            && to.bytes() as f64 >= pool_bytes as f64 * (1.0 + band);
        if !believed || !self.pace.may_grow(now_s) {
            return (applied, VramRule::Dwell);
        }
        // Where routing is not seen, memory alone decides.
        let Some(figures) = now.observation.figures else {
            return (to, VramRule::Grow);
        };
        let time = |bytes| self.times.reload(&figures.curve, bytes);
        let (Some(present), Some(then)) = (time(pool_bytes), time(to.bytes())) else {
            return (applied, VramRule::Unmeasured);
        };
        let gain = 1.0 - then / present;
        if gain < 2.0 * self.config.slack_share {
            return (applied, VramRule::Hold);
        }
        match self.pays(now, to, gain) {
            Ok(()) => (to, VramRule::Grow),
            Err(why) => (applied, why),
        }
    }

    /// The least pool that is as fast as the largest, but for the slack; `None` when not known.
    pub(super) fn value_bytes(&self, now: &Now<'_>) -> Option<u64> {
        let curve = &now.observation.figures?.curve;
        let most = now.hard.pool_bytes;
        if most < self.least_bytes {
            return None;
        }
        let best = self.times.reload(curve, most)?;
        let bearable = best * (1.0 + self.config.slack_share);
        let size = |part: u64| self.least_bytes + (most - self.least_bytes) / PARTS * part;
        let mut least = most;
        for part in (0..PARTS).rev() {
            match self.times.reload(curve, size(part)) {
                Some(ns) if ns <= bearable => least = size(part),
                _ => break,
            }
        }
        Some(least)
    }
}
