//! The pin budget: how much of the capacity may be locked, and whether routing deserves it.

use crate::config::PinConfig;
use crate::decision::PinLimit;
use crate::num::to_bytes;
use crate::observe::{Held, LockLimits};
use crate::scores::Skew;
use crate::sense::{Sizes, Step};

/// Whether routing is skewed enough to pin on, with hysteresis.
#[derive(Clone, Debug)]
pub(crate) struct SkewGate {
    config: PinConfig,
    open: bool,
    profiled: bool,
}

impl SkewGate {
    /// Until there is evidence, a profile is trusted, and without one nothing is pinned.
    pub fn new(config: &PinConfig, profiled: bool) -> Self {
        Self {
            config: config.clone(),
            open: profiled,
            profiled,
        }
    }

    /// Takes over other settings; open stays open.
    pub fn reconfigure(&mut self, config: &PinConfig) {
        self.config = config.clone();
    }

    /// Takes the present skew in; true when pins are allowed.
    pub fn update(&mut self, skew: Skew) -> bool {
        let config = &self.config;
        if skew.tokens < config.gate_tokens {
            return self.open;
        }
        let needed_z = if self.open {
            config.gate_off_z
        } else {
            config.gate_on_z
        };
        // The effect must not flap either.
        let ease = if self.open { 0.7 } else { 1.0 };
        self.open = skew.z > needed_z && skew.variation > config.gate_min_variation * ease;
        self.open
    }

    /// Whether a profile was trusted at the start.
    pub const fn is_profiled(&self) -> bool {
        self.profiled
    }
}

/// What the budget is made from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PinInput {
    pub step: Step,
    pub capacity_bytes: u64,
    /// The skew gate's word.
    pub allowed: bool,
    pub locks: LockLimits,
    pub held: Held,
}

/// The budget law's state: the memory of failed locks.
#[derive(Clone, Debug)]
pub(crate) struct PinBudget {
    config: PinConfig,
    total_bytes: u64,
    transit_floor_bytes: u64,
    cycles_bytes: u64,
    /// What was locked when locks failed, until when that stands, and the next wait.
    failed: Option<(u64, f64)>,
    wait_s: f64,
    last_failure_s: f64,
}

impl PinBudget {
    pub fn new(config: &PinConfig, sizes: &Sizes) -> Self {
        let layers = u64::from(config.transit_floor_layers);
        let layers_bytes = sizes.widest_layer_bytes.saturating_mul(layers);
        Self {
            config: config.clone(),
            total_bytes: sizes.total_bytes,
            transit_floor_bytes: layers_bytes.max(config.transit_floor_bytes),
            cycles_bytes: to_bytes(config.transit_cycles * sizes.cycle_bytes as f64),
            failed: None,
            wait_s: config.lock_retry_s,
            last_failure_s: 0.0,
        }
    }

    /// Takes over other settings; what is known of failures stays.
    pub fn reconfigure(&mut self, config: &PinConfig, sizes: &Sizes) {
        *self = Self {
            failed: self.failed,
            wait_s: self.wait_s,
            last_failure_s: self.last_failure_s,
            ..Self::new(config, sizes)
        };
    }

    /// Bytes that may be locked, and what set that.
    pub fn decide(&mut self, input: &PinInput) -> (u64, PinLimit) {
        self.remember_failures(input);
        let locks = input.locks;
        let memlock_bytes = locks
            .memlock_bytes
            .map(|bytes| bytes.saturating_sub(locks.locked_elsewhere_bytes));
        let failed_bytes = self.failed.map(|(bytes, _)| bytes);
        let (share_bytes, share_limit) = self.share_of(input);
        [
            (Some(share_bytes), share_limit),
            (memlock_bytes, PinLimit::Memlock),
            (locks.map_budget_bytes, PinLimit::Maps),
            (failed_bytes, PinLimit::LockFailures),
        ]
        .into_iter()
        .filter_map(|(bytes, limit)| bytes.map(|bytes| (bytes, limit)))
        .min_by_key(|&(bytes, _)| bytes)
        .unwrap_or((0, share_limit))
    }

    /// The share of capacity that is not left to transit. The less there is left to miss, the less
    /// transit is needed, so that the budget reaches everything as capacity does.
    fn share_of(&self, input: &PinInput) -> (u64, PinLimit) {
        if input.capacity_bytes >= self.total_bytes {
            return (self.total_bytes, PinLimit::Model);
        }
        if !input.allowed {
            return (0, PinLimit::Uniform);
        }
        let outside_bytes = self.total_bytes - input.capacity_bytes;
        let share_bytes = to_bytes((1.0 - self.config.share) * input.capacity_bytes as f64);
        let cycles_bytes = self.cycles_bytes.min(input.capacity_bytes / 2);
        let transit_bytes = share_bytes
            .max(cycles_bytes)
            .min(outside_bytes)
            .max(self.transit_floor_bytes);
        let pinned_bytes = input.capacity_bytes.saturating_sub(transit_bytes);
        (pinned_bytes, PinLimit::Share)
    }

    fn remember_failures(&mut self, input: &PinInput) {
        let now_s = input.step.now_s;
        if input.held.lock_shortfall_bytes > 0 {
            self.failed = Some((input.held.pinned_bytes, now_s + self.wait_s));
            self.wait_s = (self.wait_s * 2.0).min(self.config.lock_retry_max_s);
            self.last_failure_s = now_s;
        } else if self.failed.is_some_and(|(_, until_s)| now_s >= until_s) {
            self.failed = None;
        } else if self.failed.is_none() && now_s - self.last_failure_s >= 2.0 * self.wait_s {
            self.wait_s = self.config.lock_retry_s;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::ModelShape;

    const MIB: u64 = 1 << 20;

    fn budget() -> PinBudget {
        let shape = ModelShape::uniform(10, 100, MIB, 2).unwrap();
        let config = PinConfig {
            transit_floor_bytes: 8 * MIB,
            ..PinConfig::default()
        };
        PinBudget::new(&config, &Sizes::new(&shape))
    }

    fn input(capacity_mib: u64) -> PinInput {
        PinInput {
            step: Step {
                now_s: 1000.0,
                dt_s: 0.1,
                elapsed_s: 0.1,
                first: false,
            },
            capacity_bytes: capacity_mib * MIB,
            allowed: true,
            locks: LockLimits {
                memlock_bytes: None,
                locked_elsewhere_bytes: 100 * MIB,
                map_budget_bytes: None,
            },
            held: Held::default(),
        }
    }

    #[test]
    fn transit_shrinks_as_capacity_reaches_the_model() {
        let mut budget = budget();
        let mib = |capacity| {
            let (bytes, limit) = budget.decide(&input(capacity));
            (bytes / MIB, limit)
        };
        let cases = [4, 100, 400, 900, 995, 1000].map(mib);
        let shares = [0, 75, 300, 800, 987].map(|bytes| (bytes, PinLimit::Share));
        assert_eq!(cases[..5], shares);
        assert_eq!(cases[5], (1000, PinLimit::Model));
    }

    #[test]
    fn lock_limits_bind_by_name() {
        let mut budget = budget();
        let mut tight = input(400);
        tight.locks.memlock_bytes = Some(300 * MIB);
        assert_eq!(budget.decide(&tight), (200 * MIB, PinLimit::Memlock));
        tight.locks.map_budget_bytes = Some(50 * MIB);
        assert_eq!(budget.decide(&tight), (50 * MIB, PinLimit::Maps));
        tight.locks.memlock_bytes = Some(10 * MIB);
        assert_eq!(budget.decide(&tight), (0, PinLimit::Memlock));
        tight.allowed = false;
        assert_eq!(budget.decide(&tight).0, 0);
    }

    #[test]
    fn failed_locks_hold_the_budget_and_back_off() {
        let mut budget = budget();
        let at = |now_s: f64, shortfall: u64| {
            let mut input = input(400);
            input.step.now_s = now_s;
            input.held = Held {
                pinned_bytes: 40 * MIB,
                transit_bytes: 0,
                lock_shortfall_bytes: shortfall,
            };
            input
        };
        assert_eq!(
            budget.decide(&at(0.0, 1)),
            (40 * MIB, PinLimit::LockFailures)
        );
        assert_eq!(budget.decide(&at(9.9, 0)).1, PinLimit::LockFailures);
        assert_eq!(budget.decide(&at(10.0, 0)).1, PinLimit::Share);
        assert_eq!(budget.decide(&at(10.1, 1)).1, PinLimit::LockFailures);
        assert_eq!(
            budget.decide(&at(30.0, 0)).1,
            PinLimit::LockFailures,
            "waits twice as long"
        );
        assert_eq!(budget.decide(&at(30.2, 0)).1, PinLimit::Share);
        budget.decide(&at(200.0, 0));
        budget.decide(&at(200.1, 1));
        assert_eq!(
            budget.decide(&at(210.2, 0)).1,
            PinLimit::Share,
            "the wait was forgotten"
        );
    }

    #[test]
    fn the_gate_trusts_a_profile_until_it_knows_better() {
        let skew = |tokens, z| Skew {
            tokens,
            z,
            variation: 1.0,
        };
        let mut gate = SkewGate::new(&PinConfig::default(), true);
        assert!(gate.update(skew(3.0, 0.0)));
        assert!(!gate.update(skew(30.0, 0.0)), "uniform after all");
        assert!(
            !gate.update(skew(30.0, 4.0)),
            "between the thresholds it stays"
        );
        assert!(gate.update(skew(30.0, 6.0)));
        assert!(gate.update(skew(30.0, 4.0)));
        assert!(!SkewGate::new(&PinConfig::default(), false).update(skew(3.0, 9.0)));
    }
}
