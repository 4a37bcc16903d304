//! A view of the loop for whoever wants to watch or steer it: what was decided and why, where every
//! expert is and since when, and the few things that may be changed while it runs.

use super::journal::Entry;
use super::{Shared, Status, lock};
use crate::store::ExpertStore;
use hdrhistogram::Histogram;
use hotpin_controllers::{
    Action, AdaptiveConfig, Checked, ConfigError, ExpertId, Reason, Residence,
};
use serde::Serialize;
use std::sync::Arc;
use tokio::sync::watch;

/// A handle on a running governor. It outlives the loop; what it tells then no longer changes.
#[derive(Debug, Clone)]
pub struct Monitor(pub(super) Arc<Shared>);

/// What somebody asked the loop to do, in force from the next tick on.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Orders {
    pub(super) paused: bool,
    /// A new ceiling on capacity that waits to be told to the policy.
    pub(super) limit: Option<Option<u64>>,
    /// Other settings of the control laws that wait likewise.
    pub(super) control: Option<Checked>,
}

/// Where every expert is and what it scored at the last tick, by expert.
#[derive(Debug, Clone, Default)]
pub struct Experts {
    /// Residence by the store's books.
    pub residence: Vec<Residence>,
    /// Expected routings per token.
    pub scores: Vec<f32>,
    pub(super) fates: Vec<Fate>,
}

/// A change of one expert, in seconds since the governor started.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Event {
    /// When.
    pub t_s: f64,
    /// The rule.
    pub reason: Reason,
    /// Its score then.
    pub score: f32,
}

/// What happened last to one expert.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Fate {
    /// Since when it is where it is; `null` since the start.
    pub since_s: Option<f64>,
    /// When it was pinned last.
    pub pinned: Option<Event>,
    /// When it was unpinned last.
    pub unpinned: Option<Event>,
    /// When it left memory last, seconds.
    pub evicted_s: Option<f64>,
}

/// One expert as it stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Standing {
    /// Where it is.
    pub residence: Residence,
    /// Expected routings per token.
    pub score: f32,
    /// Experts that score higher.
    pub better: usize,
    /// What happened to it.
    pub fate: Fate,
}

/// A part of the journal.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// Entries with their numbers, oldest first.
    pub entries: Vec<(u64, Entry)>,
    /// Number of the oldest entry that is still kept.
    pub oldest: u64,
}

impl Monitor {
    /// The last tick.
    #[must_use]
    pub fn status(&self) -> Status {
        lock(&self.0.status).clone()
    }

    /// Up to `most` journal entries with numbers below `before`, or the last ones.
    #[must_use]
    pub fn page(&self, before: Option<u64>, most: usize) -> Page {
        lock(&self.0.journal).page(before, most)
    }

    /// A copy of the histogram of tick times, ns.
    #[must_use]
    pub fn tick_times(&self) -> Histogram<u64> {
        lock(&self.0.tick_ns).clone()
    }

    /// Residence and scores of all experts.
    #[must_use]
    pub fn experts(&self) -> (Vec<Residence>, Vec<f32>) {
        let experts = lock(&self.0.experts);
        (experts.residence.clone(), experts.scores.clone())
    }

    /// One expert; `None` when there is no such.
    #[must_use]
    pub fn standing(&self, id: ExpertId) -> Option<Standing> {
        let experts = lock(&self.0.experts);
        let score = *experts.scores.get(id.index())?;
        Some(Standing {
            residence: *experts.residence.get(id.index())?,
            score,
            better: experts.scores.iter().filter(|&&s| s > score).count(),
            fate: *experts.fates.get(id.index())?,
        })
    }

    /// Stops or resumes changes of the pinned set. What must be unlocked because capacity fell is
    /// unlocked all the same.
    pub fn pause(&self, paused: bool) {
        lock(&self.0.orders).paused = paused;
    }

    /// Whether the pinned set is frozen.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        lock(&self.0.orders).paused
    }

    /// Puts another ceiling on capacity, or none, in bytes.
    pub fn limit_capacity(&self, bytes: Option<u64>) {
        lock(&self.0.orders).limit = Some(bytes);
    }

    /// Puts other settings of the control laws in force, at the next tick. The ceiling on capacity stays
    /// ([`Monitor::limit_capacity`] sets it), and so do scores that were counted under older ones.
    ///
    /// # Errors
    /// When they are out of range or contradict each other; the old ones then stay.
    pub fn reconfigure(&self, control: &AdaptiveConfig) -> Result<(), ConfigError> {
        let checked = control.check()?;
        lock(&self.0.orders).control = Some(checked);
        Ok(())
    }

    /// The store that is acted on; `None` while there is none. To be held for a look only: a store does
    /// not outlive the model that it is over.
    #[must_use]
    pub fn store(&self) -> Option<Arc<dyn ExpertStore>> {
        lock(&self.0.store).upgrade()
    }

    /// Tells the number of ticks each time it rises.
    #[must_use]
    pub fn ticks(&self) -> watch::Receiver<u64> {
        self.0.ticks.subscribe()
    }
}

impl Experts {
    pub(super) fn new(experts: usize) -> Self {
        Self {
            residence: vec![Residence::Absent; experts],
            scores: vec![0.0; experts],
            fates: vec![Fate::default(); experts],
        }
    }

    /// Takes in where the experts are after a tick and what was done to them in it.
    pub(super) fn update(
        &mut self,
        t_s: f64,
        residence: &[Residence],
        scores: &[f32],
        pinned: &[Action],
        unpinned: &[Action],
    ) {
        for ((fate, before), &now) in self
            .fates
            .iter_mut()
            .zip(&mut self.residence)
            .zip(residence)
        {
            if *before == now {
                continue;
            }
            fate.since_s = Some(t_s);
            if now == Residence::Absent {
                fate.evicted_s = Some(t_s);
            }
            *before = now;
        }
        for (slot, &score) in self.scores.iter_mut().zip(scores) {
            *slot = score;
        }
        let event = |action: &Action| Event {
            t_s,
            reason: action.reason,
            score: action.score,
        };
        for action in pinned {
            if let Some(fate) = self.fates.get_mut(action.expert.index()) {
                fate.pinned = Some(event(action));
            }
        }
        for action in unpinned {
            if let Some(fate) = self.fates.get_mut(action.expert.index()) {
                fate.unpinned = Some(event(action));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Experts;
    use hotpin_controllers::{Action, ExpertId, Reason, Residence};

    #[test]
    fn fates_tell_the_last_change_of_each_kind() {
        let mut experts = Experts::new(2);
        let action = |reason| Action {
            expert: ExpertId(1),
            reason,
            score: 0.5,
        };
        let transit = [Residence::Absent, Residence::Transit];
        let pinned = [Residence::Absent, Residence::Pinned];
        experts.update(1.0, &pinned, &[0.1, 0.5], &[action(Reason::Fill)], &[]);
        experts.update(2.0, &transit, &[0.1, 0.4], &[], &[action(Reason::Stale)]);
        experts.update(3.0, &transit, &[0.1, 0.3], &[], &[]);
        let fate = experts.fates[1];
        assert_eq!(fate.since_s, Some(2.0));
        assert_eq!(
            fate.pinned.map(|e| (e.t_s, e.reason)),
            Some((1.0, Reason::Fill))
        );
        assert_eq!(
            fate.unpinned.map(|e| (e.t_s, e.reason)),
            Some((2.0, Reason::Stale))
        );
        assert_eq!(fate.evicted_s, None);
        experts.update(4.0, &[Residence::Absent; 2], &[0.0; 2], &[], &[]);
        assert_eq!(experts.fates[1].evicted_s, Some(4.0));
        assert_eq!(experts.fates[0].since_s, None, "never moved");
        assert_eq!(experts.scores, [0.0, 0.0]);
    }
}
