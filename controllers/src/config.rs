//! Options of the control laws: what a user may write, and the checked form that the laws take.
//!
//! [`AdaptiveConfig`] is raw input (serde, unknown keys refused). [`AdaptiveConfig::check`] turns it
//! into [`Checked`], whose invariants the laws rely on; nothing is clamped on the way, a bad value
//! is refused with its name.

mod check;
mod vram;

pub use check::{Checked, ConfigError};
use documented::DocumentedFields;
use serde::{Deserialize, Serialize};
pub use vram::VramConfig;

/// Options of the capacity law and the pinned set, as written by a user.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, DocumentedFields)]
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
    /// Experts in VRAM.
    pub vram: VramConfig,
}

/// What a key of a configuration means, in the words of its field here; the key is a section, such as
/// `pins`, or one of its fields, such as `pins.share`. `None` for what is no key.
#[must_use]
pub fn meaning(key: &str) -> Option<&'static str> {
    let Some((section, field)) = key.split_once('.') else {
        return AdaptiveConfig::get_field_docs(key).ok();
    };
    match section {
        "capacity" => CapacityConfig::get_field_docs(field).ok(),
        "pressure" => PressureConfig::get_field_docs(field).ok(),
        "value" => ValueConfig::get_field_docs(field).ok(),
        "pins" => PinConfig::get_field_docs(field).ok(),
        "scores" => ScoreConfig::get_field_docs(field).ok(),
        "targeting" => TargetingConfig::get_field_docs(field).ok(),
        "drift" => DriftConfig::get_field_docs(field).ok(),
        "vram" => VramConfig::get_field_docs(field).ok(),
        _ => None,
    }
}

/// Byte ceilings and how capacity moves between them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
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
    /// What others take of a memory within this time, at the rate at which they take it, is given up ahead, seconds;
    /// beyond a sixteenth of that memory's reserve, and at most the reserve. Longer than two ticks, so that
    /// a reserve is whole again while somebody goes on taking memory.
    pub demand_lead_s: f64,
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
            cgroup_reserve_bytes: 64 << 20,
            floor_bytes: None,
            demand_lead_s: 0.25,
            growth_bytes_per_s: 512 << 20,
            quiet_hold_s: 5.0,
            dead_band_bytes: 64 << 20,
            rise_filter_s: 2.0,
        }
    }
}

/// The PID on memory pressure. Its output is a shrink in nepers: ceiling = anchor x exp(-output).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct PinConfig {
    /// Share of capacity that may be locked; the rest is transit.
    pub share: f64,
    /// Least transit, bytes.
    pub transit_floor_bytes: u64,
    /// Least transit in units of the largest layer's top-k experts.
    pub transit_floor_layers: u32,
    /// Transit wanted in token cycles, as far as half of the capacity allows. With less, what one
    /// token loads is gone before the next, and no candidate is resident when targeting looks.
    pub transit_cycles: f64,
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
            transit_cycles: 1.0,
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
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
    /// Probability that one token without a routing costs an expert in rank.
    pub idle_cost_per_token: f64,
    /// Tokens without a routing after which an expert's expected routings have halved.
    pub idle_half_life_tokens: f64,
    /// Tokens of evidence that the starting profile counts for.
    pub profile_tokens: f64,
}

impl Default for ScoreConfig {
    fn default() -> Self {
        Self {
            fast_half_life_tokens: 16.0,
            slow_half_life_tokens: 64.0,
            slow_weight: 0.5,
            prefill_weight: 0.05,
            prefill_cap: 0.5,
            idle_cost_per_token: 0.03,
            idle_half_life_tokens: 16.0,
            profile_tokens: 64.0,
        }
    }
}

/// Choice of the pinned set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct TargetingConfig {
    /// A candidate must beat a pinned expert's score per byte by this fraction.
    pub margin: f64,
    /// The same for a candidate that must be read from disk first.
    pub absent_margin: f64,
    /// Routings that an expert must have missed, at the rate at which it was last seen, before its
    /// idleness counts as the end of its use: chance explains more with `exp(-stale_missed)`.
    pub stale_missed: f64,
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
            margin: 1.0,
            absent_margin: 2.0,
            stale_missed: 8.0,
            payback_tokens: 16.0,
            lock_us_per_mib: 60.0,
            dwell_s: 1.0,
            dwell_tokens: 8.0,
            churn_bytes_per_s: 1 << 30,
            churn_burst_bytes: 1 << 30,
            resident_cost: 0.1,
            max_swaps_per_tick: 8,
            max_fills_per_tick: 12,
        }
    }
}

/// Drift detection: Page-Hinkley on the hit rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct DriftConfig {
    /// Detect drift at all.
    pub enabled: bool,
    /// Fall of the hit rate that is tolerated, in its usual deviation from token to token.
    pub tolerance: f64,
    /// Cumulated fall beyond it (deviations x tokens) that is called drift.
    pub threshold: f64,
    /// Tokens from which the usual hit rate is learnt before a fall counts.
    pub learn_tokens: f64,
    /// Tokens over which the usual hit rate is averaged.
    pub memory_tokens: f64,
    /// Tokens for which half-lives are shortened after drift.
    pub hurry_tokens: f64,
    /// Factor on the half-lives meanwhile. [`TargetingConfig::stale_missed`] is 0 meanwhile.
    pub hurry_factor: f64,
}

impl Default for DriftConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            tolerance: 0.5,
            threshold: 9.0,
            learn_tokens: 16.0,
            memory_tokens: 256.0,
            hurry_tokens: 64.0,
            hurry_factor: 0.5,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(json: &str) -> String {
        let config: AdaptiveConfig = serde_json::from_str(json).unwrap();
        config.check().unwrap_err().to_string()
    }

    #[test]
    fn defaults_pass() {
        assert_eq!(AdaptiveConfig::default().check(), Ok(Checked::default()));
        let empty: AdaptiveConfig = serde_json::from_str("{}").unwrap();
        assert_eq!(empty, AdaptiveConfig::default());
    }

    #[test]
    fn unknown_keys_are_refused() {
        let unknown = serde_json::from_str::<AdaptiveConfig>(r#"{"pins": {"shares": 0.5}}"#);
        assert!(unknown.unwrap_err().to_string().contains("shares"));
        assert!(serde_json::from_str::<AdaptiveConfig>(r#"{"pin": {}}"#).is_err());
    }

    #[test]
    fn relations_that_keep_the_loop_stable_are_asserted() {
        let grow = refused(r#"{"pressure": {"grow_threshold": 0.1}}"#);
        assert!(grow.contains("never comes to rest"), "{grow}");
        let speed = refused(r#"{"pressure": {"growth_per_s": 0.5}}"#);
        assert!(speed.contains("shrink faster than it grows"), "{speed}");
        let gate = refused(r#"{"pins": {"gate_off_z": 6.0}}"#);
        assert!(gate.contains("flap"), "{gate}");
        let halves = refused(r#"{"scores": {"fast_half_life_tokens": 64.0}}"#);
        assert!(halves.contains("slow_half_life_tokens"), "{halves}");
    }

    #[test]
    fn ranges_are_named_and_nan_is_refused() {
        let share = refused(r#"{"pins": {"share": 1.5}}"#);
        assert_eq!(share, "pins.share = 1.5 must lie within 0 and 1");
        let mut config = AdaptiveConfig::default();
        config.pressure.filter_s = f64::NAN;
        assert!(config.check().is_err());
        let hold = refused(r#"{"capacity": {"quiet_hold_s": 0.0}}"#);
        assert!(hold.contains("capacity.quiet_hold_s"));
    }
}
