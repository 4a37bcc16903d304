//! The options that a sweep may turn, and how far.

use hotpin_controllers::AdaptiveConfig;

/// One option of the control laws, or two that only make sense together.
#[derive(Clone, Copy)]
pub struct Knob {
    /// Its key, as docs/control.md lists it.
    pub name: &'static str,
    /// Values to try.
    pub values: &'static [f64],
    /// Sets it.
    pub set: fn(&mut AdaptiveConfig, f64),
    /// Reads it.
    pub get: fn(&AdaptiveConfig) -> f64,
}

impl std::fmt::Debug for Knob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Knob")
            .field("name", &self.name)
            .field("values", &self.values)
            .finish_non_exhaustive()
    }
}

/// A knob on one field.
macro_rules! knob {
    ($name:literal, $($field:ident).+, $values:expr) => {
        Knob {
            name: $name,
            values: &$values,
            set: |config, value| config.$($field).+ = value,
            get: |config| config.$($field).+,
        }
    };
}

/// All of them.
pub const KNOBS: [Knob; 14] = [
    knob!("pins.share", pins.share, [0.35, 0.5, 0.65, 0.75, 0.85]),
    knob!(
        "pins.transit_cycles",
        pins.transit_cycles,
        [0.5, 1.0, 1.5, 2.0]
    ),
    knob!(
        "scores.fast_half_life_tokens",
        scores.fast_half_life_tokens,
        [4.0, 8.0, 16.0, 32.0]
    ),
    knob!(
        "scores.slow_half_life_tokens",
        scores.slow_half_life_tokens,
        [48.0, 64.0, 128.0, 256.0]
    ),
    knob!("scores.slow_weight", scores.slow_weight, [0.25, 0.5, 1.0]),
    knob!(
        "scores.idle_cost_per_token",
        scores.idle_cost_per_token,
        [0.01, 0.02, 0.03, 0.05]
    ),
    knob!("targeting.margin", targeting.margin, [0.25, 0.5, 1.0, 2.0]),
    knob!(
        "targeting.absent_margin",
        targeting.absent_margin,
        [1.0, 2.0, 4.0]
    ),
    knob!(
        "targeting.stale_missed",
        targeting.stale_missed,
        [4.0, 6.0, 8.0, 12.0]
    ),
    knob!(
        "targeting.payback_tokens",
        targeting.payback_tokens,
        [8.0, 16.0, 32.0]
    ),
    knob!(
        "pressure.integral_gain_per_s",
        pressure.integral_gain_per_s,
        [0.5, 1.0, 2.0]
    ),
    knob!(
        "capacity.quiet_hold_s",
        capacity.quiet_hold_s,
        [2.0, 5.0, 10.0]
    ),
    knob!(
        "capacity.rise_filter_s",
        capacity.rise_filter_s,
        [1.0, 2.0, 4.0]
    ),
    knob!("drift.threshold", drift.threshold, [6.0, 9.0, 15.0]),
];
