//! Checks of a configuration: ranges, and the relations that keep the loop stable.

use super::{
    AdaptiveConfig, CapacityConfig, DriftConfig, PinConfig, PressureConfig, ScoreConfig,
    TargetingConfig, ValueConfig,
};

/// Why a configuration was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A number lies outside its range, or is not a number.
    #[error("{name} = {value} must lie within {least} and {most}")]
    Range {
        /// The key, dotted.
        name: &'static str,
        /// What was given.
        value: f64,
        /// Least value allowed.
        least: f64,
        /// Greatest value allowed.
        most: f64,
    },
    /// Two values contradict each other.
    #[error("{smaller} = {smaller_value} must be below {larger} = {larger_value}: {why}")]
    Order {
        /// The key that must be smaller.
        smaller: &'static str,
        /// Its value.
        smaller_value: f64,
        /// The key that must be larger.
        larger: &'static str,
        /// Its value.
        larger_value: f64,
        /// What goes wrong otherwise.
        why: &'static str,
    },
}

/// A configuration that passed [`AdaptiveConfig::check`].
#[derive(Clone, Debug, PartialEq)]
pub struct Checked(AdaptiveConfig);

impl Checked {
    /// The checked values.
    #[must_use]
    pub const fn get(&self) -> &AdaptiveConfig {
        &self.0
    }
}

impl Default for Checked {
    /// The defaults, which a test checks.
    fn default() -> Self {
        Self(AdaptiveConfig::default())
    }
}

impl AdaptiveConfig {
    /// Checks ranges and the relations that keep the loop stable.
    ///
    /// # Errors
    /// Names the first key whose value is out of range or contradicts another.
    pub fn check(&self) -> Result<Checked, ConfigError> {
        self.capacity.check()?;
        self.pressure.check()?;
        self.value.check()?;
        self.pins.check()?;
        self.scores.check()?;
        self.targeting.check()?;
        self.drift.check()?;
        self.vram.check()?;
        Ok(Checked(self.clone()))
    }
}

pub(super) const DAY_S: f64 = 86_400.0;
const MANY: f64 = 1e9;

pub(super) fn within(
    name: &'static str,
    value: f64,
    least: f64,
    most: f64,
) -> Result<(), ConfigError> {
    // Written so that NaN fails.
    if value >= least && value <= most {
        return Ok(());
    }
    Err(ConfigError::Range {
        name,
        value,
        least,
        most,
    })
}

pub(super) fn bytes_within(name: &'static str, value: u64, least: u64) -> Result<(), ConfigError> {
    within(name, value as f64, least as f64, (1u64 << 60) as f64)
}

pub(super) fn below(
    smaller: (&'static str, f64),
    larger: (&'static str, f64),
    why: &'static str,
) -> Result<(), ConfigError> {
    if smaller.1 < larger.1 {
        return Ok(());
    }
    Err(ConfigError::Order {
        smaller: smaller.0,
        smaller_value: smaller.1,
        larger: larger.0,
        larger_value: larger.1,
        why,
    })
}

impl CapacityConfig {
    fn check(&self) -> Result<(), ConfigError> {
        if let Some(limit_bytes) = self.limit_bytes {
            bytes_within("capacity.limit_bytes", limit_bytes, 0)?;
        }
        if let Some(floor_bytes) = self.floor_bytes {
            bytes_within("capacity.floor_bytes", floor_bytes, 0)?;
        }
        bytes_within("capacity.host_reserve_bytes", self.host_reserve_bytes, 0)?;
        bytes_within(
            "capacity.cgroup_reserve_bytes",
            self.cgroup_reserve_bytes,
            0,
        )?;
        within("capacity.demand_lead_s", self.demand_lead_s, 0.0, 10.0)?;
        bytes_within(
            "capacity.growth_bytes_per_s",
            self.growth_bytes_per_s,
            1 << 20,
        )?;
        bytes_within("capacity.dead_band_bytes", self.dead_band_bytes, 0)?;
        within("capacity.quiet_hold_s", self.quiet_hold_s, 0.1, DAY_S)?;
        within("capacity.rise_filter_s", self.rise_filter_s, 0.0, DAY_S)
    }
}

impl PressureConfig {
    fn check(&self) -> Result<(), ConfigError> {
        within("pressure.shrink_threshold", self.shrink_threshold, 0.0, 1.0)?;
        within("pressure.grow_threshold", self.grow_threshold, 1e-4, 1.0)?;
        within(
            "pressure.proportional_gain",
            self.proportional_gain,
            0.0,
            100.0,
        )?;
        within(
            "pressure.integral_gain_per_s",
            self.integral_gain_per_s,
            0.0,
            100.0,
        )?;
        within(
            "pressure.derivative_gain_s",
            self.derivative_gain_s,
            0.0,
            100.0,
        )?;
        within("pressure.filter_s", self.filter_s, 0.0, 60.0)?;
        within("pressure.tracking_s", self.tracking_s, 0.05, 600.0)?;
        within("pressure.quiet_hold_s", self.quiet_hold_s, 0.1, DAY_S)?;
        within("pressure.growth_per_s", self.growth_per_s, 1e-6, 1.0)?;
        within(
            "pressure.low_headroom_fraction",
            self.low_headroom_fraction,
            0.0,
            1.0,
        )?;
        bytes_within(
            "pressure.confirm_reclaim_bytes_per_s",
            self.confirm_reclaim_bytes_per_s,
            1,
        )?;
        bytes_within(
            "pressure.reclaim_scale_bytes_per_s",
            self.reclaim_scale_bytes_per_s,
            1,
        )?;
        within("pressure.reclaim_gain", self.reclaim_gain, 0.0, 1.0)?;
        within(
            "pressure.phantom_threshold",
            self.phantom_threshold,
            0.0,
            1.0,
        )?;
        within(
            "pressure.phantom_gain_per_s",
            self.phantom_gain_per_s,
            0.0,
            100.0,
        )?;
        within(
            "pressure.phantom_floor_fraction",
            self.phantom_floor_fraction,
            0.01,
            1.0,
        )?;
        within("pressure.late_miss_share", self.late_miss_share, 0.0, 1.0)?;
        below(
            ("pressure.grow_threshold", self.grow_threshold),
            ("pressure.shrink_threshold", self.shrink_threshold),
            "growing and shrinking at the same pressure never comes to rest",
        )?;
        // What an error as wide as the band shrinks in its first second.
        let band = self.shrink_threshold - self.grow_threshold;
        let shrink_per_s = (self.proportional_gain + self.integral_gain_per_s) * band;
        below(
            ("pressure.growth_per_s", self.growth_per_s),
            (
                "(proportional_gain + integral_gain_per_s) x (shrink - grow threshold)",
                shrink_per_s,
            ),
            "capacity must shrink faster than it grows",
        )
    }
}

impl ValueConfig {
    fn check(&self) -> Result<(), ConfigError> {
        if let Some(target) = self.target_stall_per_gib {
            within("value.target_stall_per_gib", target, 0.0, 1000.0)?;
        }
        within("value.idle_after_s", self.idle_after_s, 0.1, DAY_S)?;
        within("value.idle_decay_per_s", self.idle_decay_per_s, 1e-6, 1.0)?;
        within("value.proportional_gain", self.proportional_gain, 0.0, 1.0)?;
        within(
            "value.integral_gain_per_s",
            self.integral_gain_per_s,
            0.0,
            1.0,
        )?;
        within("value.dead_band", self.dead_band, 0.0, 1.0)?;
        within("value.filter_s", self.filter_s, 0.0, 3600.0)?;
        bytes_within("value.read_bytes_per_s", self.read_bytes_per_s, 1 << 20)?;
        within(
            "value.miss_cost_half_life",
            self.miss_cost_half_life,
            1.0,
            MANY,
        )
    }
}

impl PinConfig {
    fn check(&self) -> Result<(), ConfigError> {
        within("pins.share", self.share, 0.0, 1.0)?;
        bytes_within("pins.transit_floor_bytes", self.transit_floor_bytes, 0)?;
        within(
            "pins.transit_floor_layers",
            f64::from(self.transit_floor_layers),
            1.0,
            1000.0,
        )?;
        within("pins.transit_cycles", self.transit_cycles, 0.0, 1000.0)?;
        within("pins.lock_retry_s", self.lock_retry_s, 0.1, DAY_S)?;
        within(
            "pins.lock_retry_max_s",
            self.lock_retry_max_s,
            self.lock_retry_s,
            DAY_S,
        )?;
        within("pins.gate_tokens", self.gate_tokens, 1.0, 1000.0)?;
        within("pins.gate_on_z", self.gate_on_z, 0.0, 1000.0)?;
        within("pins.gate_off_z", self.gate_off_z, -1000.0, 1000.0)?;
        within(
            "pins.gate_min_variation",
            self.gate_min_variation,
            0.0,
            100.0,
        )?;
        below(
            ("pins.gate_off_z", self.gate_off_z),
            ("pins.gate_on_z", self.gate_on_z),
            "the skew gate would flap",
        )
    }
}

impl ScoreConfig {
    fn check(&self) -> Result<(), ConfigError> {
        within(
            "scores.fast_half_life_tokens",
            self.fast_half_life_tokens,
            0.1,
            1e6,
        )?;
        within(
            "scores.slow_half_life_tokens",
            self.slow_half_life_tokens,
            0.1,
            1e6,
        )?;
        within("scores.slow_weight", self.slow_weight, 0.0, 100.0)?;
        within("scores.prefill_weight", self.prefill_weight, 0.0, 1.0)?;
        within("scores.prefill_cap", self.prefill_cap, 0.0, 100.0)?;
        within("scores.profile_tokens", self.profile_tokens, 0.0, 1e6)?;
        below(
            ("scores.fast_half_life_tokens", self.fast_half_life_tokens),
            ("scores.slow_half_life_tokens", self.slow_half_life_tokens),
            "the two components would be one",
        )
    }
}

impl TargetingConfig {
    fn check(&self) -> Result<(), ConfigError> {
        within("targeting.margin", self.margin, 0.0, 100.0)?;
        within(
            "targeting.absent_margin",
            self.absent_margin,
            self.margin,
            MANY,
        )?;
        within("targeting.stale_missed", self.stale_missed, 0.0, 1e6)?;
        within("targeting.payback_tokens", self.payback_tokens, 0.0, 1e6)?;
        within("targeting.lock_us_per_mib", self.lock_us_per_mib, 0.0, 1e6)?;
        within("targeting.dwell_s", self.dwell_s, 0.0, DAY_S)?;
        within("targeting.dwell_tokens", self.dwell_tokens, 0.0, 1e6)?;
        bytes_within("targeting.churn_bytes_per_s", self.churn_bytes_per_s, 1)?;
        bytes_within("targeting.churn_burst_bytes", self.churn_burst_bytes, 1)?;
        within("targeting.resident_cost", self.resident_cost, 0.0, 1.0)?;
        within(
            "targeting.max_swaps_per_tick",
            f64::from(self.max_swaps_per_tick),
            0.0,
            4096.0,
        )?;
        within(
            "targeting.max_fills_per_tick",
            f64::from(self.max_fills_per_tick),
            1.0,
            4096.0,
        )
    }
}

impl DriftConfig {
    fn check(&self) -> Result<(), ConfigError> {
        within("drift.tolerance", self.tolerance, 0.0, 100.0)?;
        within("drift.threshold", self.threshold, 1e-3, 1e6)?;
        within("drift.learn_tokens", self.learn_tokens, 1.0, 1e6)?;
        within("drift.memory_tokens", self.memory_tokens, 1.0, 1e6)?;
        within("drift.hurry_tokens", self.hurry_tokens, 0.0, 1e6)?;
        within("drift.hurry_factor", self.hurry_factor, 0.05, 1.0)
    }
}
