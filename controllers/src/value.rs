//! The value ceiling: memory that saves too little stall is given back, and so is an idle session's.
//!
//! A slow PI in velocity form on the relative error between the marginal value of capacity (stall
//! seconds saved per second by its least valuable GiB) and the price that the user set.

use crate::config::ValueConfig;
use crate::num::{filter_share, to_bytes};
use crate::observe::EngineTotals;
use crate::sense::Step;

/// Misses that the assumed cost of a miss counts for before it is measured.
const ASSUMED_MISSES: f64 = 50.0;

/// What a routed expert that is not resident costs, seconds: measured, or assumed from bandwidth.
#[derive(Clone, Debug)]
pub(crate) struct MissCost {
    half_life_misses: f64,
    stall_s: f64,
    misses: f64,
}

impl MissCost {
    pub fn new(config: &ValueConfig, mean_expert_bytes: f64) -> Self {
        let assumed_s = mean_expert_bytes / config.read_bytes_per_s as f64;
        Self {
            half_life_misses: config.miss_cost_half_life,
            stall_s: assumed_s * ASSUMED_MISSES,
            misses: ASSUMED_MISSES,
        }
    }

    /// Takes one tick's stall and misses in; `stall_known` as in the observation.
    pub fn update(&mut self, delta: Option<EngineTotals>, stall_known: bool) {
        let Some(delta) = delta.filter(|delta| stall_known && delta.misses > 0) else {
            return;
        };
        let misses = delta.misses as f64;
        let keep = (-misses / self.half_life_misses).exp2();
        self.stall_s = self.stall_s * keep + delta.stall_ns as f64 / 1e9;
        self.misses = self.misses * keep + misses;
    }

    /// Seconds a miss, between 1 us and 1 s.
    pub fn seconds(&self) -> f64 {
        (self.stall_s / self.misses).clamp(1e-6, 1.0)
    }
}

/// What the value loop reads each tick.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ValueInput {
    pub step: Step,
    /// Tokens decoded since the last tick.
    pub tokens: f64,
    /// Stall seconds saved per second and GiB at the margin; `None` while unknown.
    pub marginal_per_gib: Option<f64>,
    /// Lowest of the other ceilings, pressure excepted, bytes.
    pub reference_bytes: u64,
    /// Capacity of the last tick, bytes.
    pub applied_bytes: Option<u64>,
    /// The loop stops here, bytes.
    pub floor_bytes: u64,
}

/// The ceiling, and whether idleness ended on this tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ValueOutput {
    pub ceiling_bytes: Option<u64>,
    pub resumed: bool,
}

/// The loop's state.
#[derive(Clone, Debug)]
pub(crate) struct ValueLoop {
    config: ValueConfig,
    last_token_s: f64,
    idle_limit_bytes: Option<f64>,
    priced: Option<Priced>,
}

/// State of the PI while a price is set.
#[derive(Clone, Copy, Debug)]
struct Priced {
    limit_bytes: f64,
    marginal: f64,
    error: f64,
}

impl ValueLoop {
    pub fn new(config: &ValueConfig) -> Self {
        Self {
            config: config.clone(),
            last_token_s: 0.0,
            idle_limit_bytes: None,
            priced: None,
        }
    }

    /// Takes over other settings; without a price its ceiling goes.
    pub fn reconfigure(&mut self, config: &ValueConfig) {
        self.config = config.clone();
        if !self.is_priced() {
            self.priced = None;
        }
    }

    /// Whether a price is set, so that the marginal value is wanted.
    pub fn is_priced(&self) -> bool {
        self.config
            .target_stall_per_gib
            .is_some_and(|target| target > 0.0)
    }

    /// One tick.
    pub fn update(&mut self, input: &ValueInput) -> ValueOutput {
        let resumed = self.idle(input);
        let priced = if self.idle_limit_bytes.is_none() {
            self.price(input)
        } else {
            None
        };
        let limit_bytes = match (self.idle_limit_bytes, priced) {
            (Some(idle), Some(priced)) => Some(idle.min(priced)),
            (idle, priced) => idle.or(priced),
        };
        ValueOutput {
            ceiling_bytes: limit_bytes.map(to_bytes),
            resumed,
        }
    }

    /// Decays the idle limit; true when a token ended an idle time.
    fn idle(&mut self, input: &ValueInput) -> bool {
        if input.tokens > 0.0 {
            self.last_token_s = input.step.now_s;
            return self.idle_limit_bytes.take().is_some();
        }
        let idle_s = input.step.now_s - self.last_token_s;
        if !self.config.give_back_idle || idle_s < self.config.idle_after_s {
            return false;
        }
        let reference = input.reference_bytes as f64;
        let floor = input.floor_bytes.min(input.reference_bytes) as f64;
        let from = self
            .idle_limit_bytes
            .or(input.applied_bytes.map(|bytes| bytes as f64))
            .map_or(reference, |bytes| bytes.min(reference));
        let given_bytes = self.config.idle_decay_per_s * reference * input.step.dt_s;
        self.idle_limit_bytes = Some((from - given_bytes).max(floor));
        false
    }

    fn price(&mut self, input: &ValueInput) -> Option<f64> {
        let target = self
            .config
            .target_stall_per_gib
            .filter(|&target| target > 0.0)?;
        let reference = input.reference_bytes as f64;
        let Some(marginal) = input.marginal_per_gib else {
            return self.priced.map(|priced| priced.limit_bytes.min(reference));
        };
        let priced = self.priced.get_or_insert(Priced {
            limit_bytes: input.applied_bytes.map_or(reference, |bytes| bytes as f64),
            marginal,
            error: 0.0,
        });
        let dt_s = input.step.dt_s;
        priced.marginal += (marginal - priced.marginal) * filter_share(dt_s, self.config.filter_s);
        let relative = ((priced.marginal - target) / target).clamp(-1.0, 1.0);
        let error = if relative.abs() <= self.config.dead_band {
            0.0
        } else {
            relative
        };
        let change = self.config.proportional_gain * (error - priced.error)
            + self.config.integral_gain_per_s * error * dt_s;
        priced.error = error;
        // Clamping the state itself is the anti-windup of a velocity form.
        let floor = input.floor_bytes.min(input.reference_bytes) as f64;
        priced.limit_bytes = (priced.limit_bytes + change * reference).clamp(floor, reference);
        Some(priced.limit_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFERENCE: u64 = 1000;

    fn input(now_s: f64, tokens: f64, marginal: Option<f64>, applied: Option<u64>) -> ValueInput {
        ValueInput {
            step: Step {
                now_s,
                dt_s: 0.1,
                elapsed_s: 0.1,
                first: false,
            },
            tokens,
            marginal_per_gib: marginal,
            reference_bytes: REFERENCE,
            applied_bytes: applied,
            floor_bytes: 100,
        }
    }

    /// Marginal value `worth / capacity`: runs the loop and returns where it rests.
    fn rest(target: f64, worth: f64) -> u64 {
        let config = ValueConfig {
            target_stall_per_gib: Some(target),
            ..ValueConfig::default()
        };
        let mut law = ValueLoop::new(&config);
        let mut capacity = REFERENCE;
        for tick in 0..20_000u32 {
            let marginal = worth / capacity as f64;
            let now_s = f64::from(tick) / 10.0;
            let output = law.update(&input(now_s, 1.0, Some(marginal), Some(capacity)));
            capacity = output.ceiling_bytes.unwrap_or(REFERENCE);
        }
        capacity
    }

    #[test]
    fn capacity_rests_where_the_last_byte_is_worth_its_price() {
        let capacity = rest(0.01, 4.0);
        assert!(
            (330..=500).contains(&capacity),
            "{capacity}: 4 / 400 is the price"
        );
        assert_eq!(rest(0.01, 1e6), REFERENCE, "dear memory is kept");
        assert_eq!(
            rest(0.01, 1e-6),
            100,
            "worthless memory is given back down to the floor"
        );
    }

    #[test]
    fn without_a_price_there_is_no_ceiling() {
        for target in [None, Some(0.0)] {
            let config = ValueConfig {
                target_stall_per_gib: target,
                ..ValueConfig::default()
            };
            let mut law = ValueLoop::new(&config);
            assert!(!law.is_priced());
            let output = law.update(&input(1.0, 1.0, Some(0.0), Some(REFERENCE)));
            assert_eq!(
                output,
                ValueOutput {
                    ceiling_bytes: None,
                    resumed: false
                }
            );
        }
    }

    #[test]
    fn the_cost_of_a_miss_is_assumed_until_it_is_measured() {
        let config = ValueConfig::default();
        let mut cost = MissCost::new(&config, (1u32 << 20).into());
        assert!((cost.seconds() - 1.0 / 1024.0).abs() < 1e-9);
        let delta = EngineTotals {
            misses: 10,
            stall_ns: 80_000_000,
            ..EngineTotals::default()
        };
        for _ in 0..1000 {
            cost.update(Some(delta), false);
        }
        assert!(
            (cost.seconds() - 1.0 / 1024.0).abs() < 1e-9,
            "unknown stall is no stall"
        );
        for _ in 0..1000 {
            cost.update(Some(delta), true);
        }
        assert!((cost.seconds() - 0.008).abs() < 1e-4);
    }
}
