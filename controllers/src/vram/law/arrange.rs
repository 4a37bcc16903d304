//! Which arrangement there should be: what is faster by the margin, confirmed, and pays.

use super::{Choice, Now, Trial, VramLaw};
use crate::vram::choice::Compared;
use crate::vram::decision::{Arrangement, ChangeKind, VramRule};

impl VramLaw {
    pub(super) fn start(&self, now: &Now<'_>) -> Choice {
        match self.pool_of(self.failures.bound(now.hard.pool_bytes)) {
            Arrangement::Cpu if self.is_unknown(now) => (Arrangement::Cpu, VramRule::Blind),
            Arrangement::Cpu => (Arrangement::Cpu, VramRule::TooSmall),
            pool => (pool, VramRule::Start),
        }
    }

    /// Nothing bounds a pool but what cannot be seen.
    pub(super) fn is_unknown(&self, now: &Now<'_>) -> bool {
        now.room.pool_bytes.is_none() && self.config.limit_bytes.is_none()
    }

    pub(super) fn choose(&mut self, now: &Now<'_>) -> Choice {
        let applied = now.observation.applied;
        let now_s = now.step.now_s;
        if let Some(trial) = self.trial {
            return self.on_trial(now, trial);
        }
        if now.room.blind {
            self.pace.blind(now_s);
            return (applied, VramRule::Blind);
        }
        if self.failures.waits(now_s) {
            return (applied, VramRule::Failed);
        }
        if applied == Arrangement::Cpu && !self.times.knows_pool() {
            let (begun, rule) = self.start(now);
            return match begun {
                Arrangement::Cpu => (applied, rule),
                _ if !self.pace.may_grow(now_s) => (applied, VramRule::Dwell),
                pool => (pool, VramRule::Start),
            };
        }
        let (other, rule) = self.other_arrangement(now);
        if other != applied || matches!(rule, VramRule::Confirm | VramRule::Dwell) {
            return (other, rule);
        }
        if let Some(trial) = self.tries(now) {
            return trial;
        }
        match self.resizes(now) {
            (_, VramRule::Hold) => (applied, rule),
            resized => resized,
        }
    }

    /// The best of the other arrangements, when the change to it is due and can be made.
    pub(super) fn other_arrangement(&mut self, now: &Now<'_>) -> Choice {
        let applied = now.observation.applied;
        let better = match self.compared(now).better(&self.config, applied) {
            Ok(better) => better,
            Err(rule) => {
                self.pace.unconfirm(&[]);
                return (applied, rule);
            }
        };
        let labels: Vec<&str> = better.iter().map(|b| b.arrangement.label()).collect();
        self.pace.unconfirm(&labels);
        let now_s = now.step.now_s;
        let mut kept_by = None;
        for other in better {
            let label = other.arrangement.label();
            let why = if !self.pace.confirmed(now_s, label, self.config.confirm_s) {
                VramRule::Confirm
            } else if !self.pace.may_leave(now_s) {
                VramRule::Dwell
            } else {
                match self.pays(now, other.arrangement, other.gain_share) {
                    Ok(()) => return (other.arrangement, other.rule),
                    Err(why) => why,
                }
            };
            kept_by.get_or_insert(why);
        }
        (applied, kept_by.unwrap_or(VramRule::Hold))
    }

    /// The pool that there could be: what is worth having of what memory permits, or what growth will
    /// reach by and by.
    pub(super) fn pool_candidate(&self, now: &Now<'_>) -> Option<Arrangement> {
        let worth = now.value_bytes.unwrap_or(u64::MAX);
        let pool = self.pool_of(now.calm.pool_bytes.min(worth));
        match now.observation.applied {
            Arrangement::Reload { pool_bytes } => Some(Arrangement::Reload {
                pool_bytes: pool_bytes.max(pool.bytes()),
            }),
            _ => Some(pool).filter(|pool| *pool != Arrangement::Cpu),
        }
    }

    /// The whole layers that there could be. More of them are worth a load of the model only if they
    /// are many.
    pub(super) fn placed_candidate(&self, now: &Now<'_>) -> Option<Arrangement> {
        let most_bytes = now.calm.static_bytes;
        let applied = now.observation.applied;
        if let Arrangement::Static { bytes } = applied {
            let enough = self.layers(bytes) as f64 * (1.0 + self.config.dead_band_share);
            if (self.layers(most_bytes) as f64) < enough {
                return Some(applied);
            }
        }
        (self.config.allow_static && self.layers(most_bytes) > 0)
            .then_some(Arrangement::Static { bytes: most_bytes })
    }

    pub(super) fn compared(&self, now: &Now<'_>) -> Compared {
        let applied = now.observation.applied;
        let curve = now.observation.figures.map(|figures| &figures.curve);
        let time = |arrangement: Arrangement| match arrangement {
            Arrangement::Cpu => self.times.all_cpu(),
            Arrangement::Reload { pool_bytes } => self.times.reload(curve?, pool_bytes),
            Arrangement::Static { .. } => self.times.placed(self.static_share(arrangement)),
        };
        let cpu = self.config.allow_cpu || applied == Arrangement::Cpu;
        Compared {
            pool: self.pool_candidate(now).map(|pool| (pool, time(pool))),
            placed: self
                .placed_candidate(now)
                .map(|placed| (placed, time(placed))),
            cpu: cpu.then(|| time(Arrangement::Cpu)),
            applied_ns: time(applied).or_else(|| self.times.present()),
            present_ns: self.times.present(),
        }
    }

    /// Whether a change that saves `gain` of a token's time is paid back in time, and can be made.
    pub(super) fn pays(&self, now: &Now<'_>, to: Arrangement, gain: f64) -> Result<(), VramRule> {
        let Some(cost_ns) = self.cost_ns(now, to) else {
            return Err(VramRule::Unmeasured);
        };
        let saved_per_s = gain * self.times.busy_share();
        if saved_per_s <= 0.0 || cost_ns / 1e9 / saved_per_s > self.config.payback_s {
            return Err(VramRule::Payback);
        }
        let costs = now.observation.costs;
        match (costs.state_bytes, now.observation.host_available_bytes) {
            (Some(state), Some(available)) if state > available => Err(VramRule::NoRoom),
            _ => Ok(()),
        }
    }

    /// Time lost by a change, with what an empty pool uploads until it is full, ns.
    pub(super) fn cost_ns(&self, now: &Now<'_>, to: Arrangement) -> Option<f64> {
        let costs = now.observation.costs;
        let made_ns = match now.observation.applied.change_to(to)? {
            ChangeKind::Recreate => costs.recreate_ns?,
            ChangeKind::Reload => costs.reload_ns?,
        };
        let fill_ns = match to {
            Arrangement::Reload { pool_bytes } => {
                pool_bytes as f64 * self.times.upload_ns_per_byte().unwrap_or(0.0)
            }
            Arrangement::Cpu | Arrangement::Static { .. } => 0.0,
        };
        Some(made_ns as f64 + fill_ns)
    }

    /// Whether the processor should be tried: uploads take much, its time is unknown, and the most
    /// that it could save would pay.
    pub(super) fn tries(&mut self, now: &Now<'_>) -> Option<Choice> {
        let applied = now.observation.applied;
        let Arrangement::Reload { pool_bytes } = applied else {
            return None;
        };
        let now_s = now.step.now_s;
        let known = self.times.knows_cpu(now_s, self.config.stale_s);
        if !self.config.allow_cpu || known || !self.pace.may_leave(now_s) {
            return None;
        }
        let curve = &now.observation.figures?.curve;
        let time = self.times.reload(curve, pool_bytes)?;
        let most_saved = 1.0 - self.times.resident()? / time;
        if most_saved < self.config.trial_share {
            return None;
        }
        // There and back.
        let back_ns = now.observation.costs.recreate_ns? as f64
            + pool_bytes as f64 * self.times.upload_ns_per_byte()?;
        let there_ns = self.cost_ns(now, Arrangement::Cpu)?;
        let saved_per_s = most_saved * self.times.busy_share();
        if saved_per_s <= 0.0 || (there_ns + back_ns) / 1e9 / saved_per_s > self.config.payback_s {
            return None;
        }
        self.trial = Some(Trial {
            tokens_before: self.times.cpu_tokens(),
        });
        Some((Arrangement::Cpu, VramRule::Trial))
    }

    pub(super) fn on_trial(&mut self, now: &Now<'_>, trial: Trial) -> Choice {
        let applied = now.observation.applied;
        // Means fade, so the count of tokens alone does not tell.
        let seen =
            (self.times.cpu_tokens() - trial.tokens_before) >= self.config.trial_tokens / 2.0;
        let known = self.times.knows_cpu(now.step.now_s, self.config.stale_s);
        if applied == Arrangement::Cpu && !(seen && known) {
            return (applied, VramRule::Trial);
        }
        self.trial = None;
        if applied != Arrangement::Cpu {
            return (applied, VramRule::Hold);
        }
        let compared = self.compared(now);
        let cpu_ns = compared.cpu.flatten();
        match (compared.pool, cpu_ns) {
            // The way back is part of the trial: it needs no margin, the stay does.
            (Some((pool, Some(pool_ns))), Some(cpu_ns))
                if cpu_ns > pool_ns * (1.0 - self.config.margin_share) =>
            {
                (pool, VramRule::Reload)
            }
            (Some((pool, None)), _) => (pool, VramRule::Reload),
            _ => (applied, VramRule::Cpu),
        }
    }
}
