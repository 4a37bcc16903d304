//! What is told of a tick.

use super::act::Acted;
use super::journal::Entry;
use super::rounds::Loop;
use super::vram::Vram;
use super::{Swap, lock};
use crate::sensors::{DegradedReason, DegradedSet, Sample};
use hotpin_controllers::Moment;

impl Loop {
    /// Says what the sensors can no longer tell, once, and keeps it in the status.
    pub(super) fn note_degraded(&mut self, now: DegradedSet) {
        if now == self.ongoing.degraded {
            return;
        }
        let reasons = self.ongoing.sensors.degraded();
        let news = now.since(self.ongoing.degraded);
        for DegradedReason { state, reason } in &reasons {
            if news.contains(*state) {
                tracing::warn!("{}: {} ({reason})", state.name(), state.meaning());
            }
        }
        self.ongoing.degraded = now;
        lock(&self.ongoing.shared.status).degraded = reasons;
    }

    pub(super) fn report(&mut self, now: Moment, sample: &Sample, acted: &Acted, paused: bool) {
        let entry = Entry::new(
            now,
            &self.ongoing.decision,
            sample,
            acted,
            &self.ongoing.plant,
            &self.regulated.shape,
            self.ongoing.vram.as_ref().map(Vram::entry),
        );
        self.regulated.store.residence_into(&mut self.residence);
        lock(&self.ongoing.shared.experts).update(
            entry.t_s,
            &self.residence,
            self.ongoing.policy.scores(),
            &acted.pinned,
            &acted.unpinned,
        );
        lock(&self.ongoing.shared.journal).push(entry.clone());
        let mut status = lock(&self.ongoing.shared.status);
        status.ticks += 1;
        status.paused = paused;
        status.entry = Some(entry);
        if let Some(vram) = &self.ongoing.vram {
            status.vram_changes = vram.changed();
            status.vram_curve = vram.curve();
        }
        status.drift_events += u64::from(self.ongoing.decision.drift);
        if let Some(faults) = sample.faults {
            let first = *self.ongoing.first_faults.get_or_insert(faults.major);
            status.major_faults = Some(faults.major.saturating_sub(first));
        }
        if let Some(pressure) = sample.pressure.filter(|pressure| !pressure.psi_absent) {
            let first = *self
                .ongoing
                .first_stall_us
                .get_or_insert(pressure.some_total_us);
            status.pressure_stall_us = Some(pressure.some_total_us.saturating_sub(first));
        }
        for (swap, actions) in [
            (Swap::Pinned, &acted.pinned),
            (Swap::Unpinned, &acted.unpinned),
        ] {
            for action in actions {
                *status.swaps.entry((swap, action.reason)).or_default() += 1;
            }
        }
        for errno in &acted.errnos {
            *status.lock_errnos.entry(errno.clone()).or_default() += 1;
        }
        status.decision.clone_from(&self.ongoing.decision);
        status.pinned_bytes = acted.pinned_bytes;
        status.transit_bytes = acted.transit_bytes;
        status.totals = self.ongoing.plant.totals();
        status.lock_errors += u64::from(acted.lock_errors);
        let ticks = status.ticks;
        drop(status);
        self.ongoing.shared.ticks.send_replace(ticks);
    }
}
