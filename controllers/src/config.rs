//! Options of the control laws: what a user may write, and the checked form that the laws take.
//!
//! [`AdaptiveConfig`] is raw input (serde, unknown keys refused). [`AdaptiveConfig::check`] turns it
//! into [`Checked`], whose invariants the laws rely on; nothing is clamped on the way, a bad value
//! is refused with its name.

use serde::{Deserialize, Serialize};

/// Options of the capacity law and the pinned set, as written by a user.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdaptiveConfig {
    /// Byte ceilings and how capacity moves between them.
    pub capacity: CapacityConfig,
    /// The PID on memory pressure.
    pub pressure: PressureConfig,
    /// The slow loop on what memory buys, and idleness.
    pub value: ValueConfig,
    /// The locked part of the capacity.
    pub pins: PinConfig,
    /// Routing scores.
    pub scores: ScoreConfig,
    /// Choice of the pinned set.
    pub targeting: TargetingConfig,
    /// Drift detection.
    pub drift: DriftConfig,
}

/// Byte ceilings and how capacity moves between them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CapacityConfig {
    /// The user's own ceiling on capacity, bytes; none by default.
    pub limit_bytes: Option<u64>,
    /// Host memory left to everybody else, bytes.
    pub host_reserve_bytes: u64,
    /// Cgroup memory left to the rest of the group (KV, stacks, page tables), bytes.
    pub cgroup_reserve_bytes: u64,
    /// The pressure and value ceilings stop here, bytes; by default one token cycle.
    pub floor_bytes: Option<u64>,
    /// How fast capacity may grow, bytes per second. Below disk bandwidth, so that growth never
    /// queues more reads than the disk delivers.
    pub growth_bytes_per_s: u64,
    /// Growth waits until this long after the last shrink that exceeded the dead-band, seconds.
    pub quiet_hold_s: f64,
    /// Changes of available memory smaller than this start no growth, bytes.
    pub dead_band_bytes: u64,
    /// Time constant with which a risen memory ceiling is believed, seconds. Falls are believed at
    /// once.
    pub rise_filter_s: f64,
}

impl Default for CapacityConfig {
    fn default() -> Self {
        Self {
            limit_bytes: None,
            host_reserve_bytes: 1 << 30,
            cgroup_reserve_bytes: 128 << 20,
            floor_bytes: None,
            growth_bytes_per_s: 512 << 20,
            quiet_hold_s: 5.0,
            dead_band_bytes: 64 << 20,
            rise_filter_s: 2.0,
        }
    }
}

/// The PID on memory pressure. Its output is a shrink in nepers: ceiling = anchor x exp(-output).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PressureConfig {
    /// Fraction of time stalled on memory (PSI `some`) above which capacity shrinks.
    pub shrink_threshold: f64,
    /// Fraction below which capacity may grow again; strictly inside `shrink_threshold`.
    pub grow_threshold: f64,
    /// Proportional gain, nepers per unit of stall fraction.
    pub proportional_gain: f64,
    /// Integral gain, nepers per unit of stall fraction and second.
    pub integral_gain_per_s: f64,
    /// Derivative gain on the filtered stall fraction, neper seconds per unit.
    pub derivative_gain_s: f64,
    /// Time constant of the filter on the stall fraction, seconds.
    pub filter_s: f64,
    /// Tracking time of the back-calculation, seconds.
    pub tracking_s: f64,
    /// The ceiling grows only after this long without confirmed pressure, seconds.
    pub quiet_hold_s: f64,
    /// Growth of the ceiling, fraction of the other ceilings' minimum per second.
    pub growth_per_s: f64,
    /// Headroom (available - reserve) below this fraction of capacity confirms pressure.
    pub low_headroom_fraction: f64,
    /// Direct reclaim beyond our own reads that confirms pressure, bytes per second.
    pub confirm_reclaim_bytes_per_s: u64,
    /// Direct reclaim that counts as a stall fraction of 1 where PSI is absent, bytes per second.
    pub reclaim_scale_bytes_per_s: u64,
    /// Gain of direct reclaim alone, relative to PSI.
    pub reclaim_gain: f64,
    /// Share of booked hits that may fault before capacity is trimmed.
    pub phantom_threshold: f64,
    /// Trim gain, nepers per unit of phantom share and second.
    pub phantom_gain_per_s: f64,
    /// The trim never goes below this fraction of the other ceilings, since a process's major
    /// faults may have other causes.
    pub phantom_floor_fraction: f64,
    /// Share of booked misses whose pages may fault one by one (fetch too late) unblamed.
    pub late_miss_share: f64,
}

impl Default for PressureConfig {
    fn default() -> Self {
        Self {
            shrink_threshold: 0.10,
            grow_threshold: 0.03,
            proportional_gain: 1.0,
            integral_gain_per_s: 1.0,
            derivative_gain_s: 0.1,
            filter_s: 0.5,
            tracking_s: 1.0,
            quiet_hold_s: 5.0,
            growth_per_s: 0.03,
            low_headroom_fraction: 0.05,
            confirm_reclaim_bytes_per_s: 8 << 20,
            reclaim_scale_bytes_per_s: 256 << 20,
            reclaim_gain: 0.5,
            phantom_threshold: 0.05,
            phantom_gain_per_s: 0.5,
            phantom_floor_fraction: 0.5,
            late_miss_share: 0.5,
        }
    }
}

/// The slow loop on what memory buys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ValueConfig {
    /// Price of memory: stall seconds that the least valuable GiB must save per second
    /// (`--target-stall`). `None` or 0 leaves the loop off.
    pub target_stall_per_gib: Option<f64>,
    /// Give capacity back while nothing is decoded.
    pub give_back_idle: bool,
    /// Without a decoded token for this long the session is idle, seconds.
    pub idle_after_s: f64,
    /// Capacity given back while idle, fraction of the other ceilings' minimum per second.
    pub idle_decay_per_s: f64,
    /// Proportional gain, fraction of the other ceilings' minimum per unit of relative error.
    pub proportional_gain: f64,
    /// Integral gain, the same per second.
    pub integral_gain_per_s: f64,
    /// Relative error within which the loop rests.
    pub dead_band: f64,
    /// Time constant of the filter on the marginal value, seconds.
    pub filter_s: f64,
    /// Disk bandwidth assumed until a miss's cost is measured, bytes per second.
    pub read_bytes_per_s: u64,
    /// Misses after which half of the estimate of a miss's cost is renewed.
    pub miss_cost_half_life: f64,
}

impl Default for ValueConfig {
    fn default() -> Self {
        Self {
            target_stall_per_gib: None,
            give_back_idle: true,
            idle_after_s: 120.0,
            idle_decay_per_s: 0.01,
            proportional_gain: 0.02,
            integral_gain_per_s: 0.01,
            dead_band: 0.2,
            filter_s: 5.0,
            read_bytes_per_s: 1 << 30,
            miss_cost_half_life: 2000.0,
        }
    }
}

/// The locked part of the capacity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PinConfig {
    /// Share of capacity that may be locked; the rest is transit.
    pub share: f64,
    /// Least transit, bytes.
    pub transit_floor_bytes: u64,
    /// Least transit in units of the largest layer's top-k experts.
    pub transit_floor_layers: u32,
    /// Wait after a failed lock before the budget may grow again, seconds; doubles each time.
    pub lock_retry_s: f64,
    /// Longest such wait, seconds.
    pub lock_retry_max_s: f64,
    /// Routing tokens seen before the skew gate judges.
    pub gate_tokens: f64,
    /// Standard scores of skew above which pins are allowed.
    pub gate_on_z: f64,
    /// Standard scores below which they are forbidden again.
    pub gate_off_z: f64,
    /// Coefficient of variation of the routing probabilities below which skew, however certain, is
    /// too small to pin on.
    pub gate_min_variation: f64,
}

impl Default for PinConfig {
    fn default() -> Self {
        Self {
            share: 0.75,
            transit_floor_bytes: 32 << 20,
            transit_floor_layers: 4,
            lock_retry_s: 10.0,
            lock_retry_max_s: 300.0,
            gate_tokens: 16.0,
            gate_on_z: 5.0,
            gate_off_z: 2.5,
            gate_min_variation: 0.15,
        }
    }
}

/// Routing scores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScoreConfig {
    /// Half-life of the fast component, tokens.
    pub fast_half_life_tokens: f64,
    /// Half-life of the slow component, tokens.
    pub slow_half_life_tokens: f64,
    /// Weight of the slow component's decayed counts; the fast one's is 1.
    pub slow_weight: f64,
    /// Weight of one prefill routing.
    pub prefill_weight: f64,
    /// Most that prefill may add to one expert in one tick, decode routings.
    pub prefill_cap: f64,
    /// Tokens of evidence that the starting profile counts for.
    pub profile_tokens: f64,
}

impl Default for ScoreConfig {
    fn default() -> Self {
        Self {
            fast_half_life_tokens: 8.0,
            slow_half_life_tokens: 64.0,
            slow_weight: 0.5,
            prefill_weight: 0.05,
            prefill_cap: 0.5,
            profile_tokens: 64.0,
        }
    }
}

/// Choice of the pinned set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TargetingConfig {
    /// A candidate must beat a pinned expert's score per byte by this fraction.
    pub margin: f64,
    /// The same for a candidate that must be read from disk first.
    pub absent_margin: f64,
    /// A swap must pay for itself within this many tokens.
    pub payback_tokens: f64,
    /// Time to lock or unlock one MiB that is resident, microseconds.
    pub lock_us_per_mib: f64,
    /// A pinned expert stays for at least this long, seconds.
    pub dwell_s: f64,
    /// A pinned expert stays for at least this many decoded tokens.
    pub dwell_tokens: f64,
    /// Refill of the churn bucket, bytes per second.
    pub churn_bytes_per_s: u64,
    /// Size of the churn bucket, bytes.
    pub churn_burst_bytes: u64,
    /// What locking a resident byte costs the bucket, relative to reading one.
    pub resident_cost: f64,
    /// Most swaps a tick.
    pub max_swaps_per_tick: u32,
    /// Most fills a tick after the first.
    pub max_fills_per_tick: u32,
}

impl Default for TargetingConfig {
    fn default() -> Self {
        Self {
            margin: 0.25,
            absent_margin: 2.0,
            payback_tokens: 64.0,
            lock_us_per_mib: 60.0,
            dwell_s: 1.0,
            dwell_tokens: 8.0,
            churn_bytes_per_s: 1 << 30,
            churn_burst_bytes: 1 << 30,
            resident_cost: 0.1,
            max_swaps_per_tick: 24,
            max_fills_per_tick: 64,
        }
    }
}

/// Drift detection: Page-Hinkley on the hit rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DriftConfig {
    /// Detect drift at all.
    pub enabled: bool,
    /// Fall of the hit rate per token that is tolerated.
    pub tolerance: f64,
    /// Cumulated fall (hit rate x tokens) that is called drift.
    pub threshold: f64,
    /// Tokens over which the usual hit rate is averaged.
    pub memory_tokens: f64,
    /// Tokens for which half-lives are shortened after drift.
    pub hurry_tokens: f64,
    /// Factor on the half-lives meanwhile.
    pub hurry_factor: f64,
}

impl Default for DriftConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            tolerance: 0.04,
            threshold: 2.0,
            memory_tokens: 256.0,
            hurry_tokens: 64.0,
            hurry_factor: 0.5,
        }
    }
}

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
        Ok(Checked(self.clone()))
    }
}

const DAY_S: f64 = 86_400.0;
const MANY: f64 = 1e9;

fn within(name: &'static str, value: f64, least: f64, most: f64) -> Result<(), ConfigError> {
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

fn bytes_within(name: &'static str, value: u64, least: u64) -> Result<(), ConfigError> {
    within(name, value as f64, least as f64, (1u64 << 60) as f64)
}

fn below(
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
        within("drift.tolerance", self.tolerance, 0.0, 1.0)?;
        within("drift.threshold", self.threshold, 1e-3, 1000.0)?;
        within("drift.memory_tokens", self.memory_tokens, 1.0, 1e6)?;
        within("drift.hurry_tokens", self.hurry_tokens, 0.0, 1e6)?;
        within("drift.hurry_factor", self.hurry_factor, 0.05, 1.0)
    }
}
