//! Options of the law that regulates experts in VRAM.

use super::check::{ConfigError, DAY_S, below, bytes_within, within};
use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

/// Experts in VRAM: ceilings, how the pool moves between them, and when another arrangement is chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct VramConfig {
    /// The user's own ceiling on bytes of experts in VRAM; none by default. 0 leaves all experts to
    /// the processor.
    pub limit_bytes: Option<u64>,
    /// Memory of each device left to everybody else, bytes.
    pub reserve_bytes: u64,
    /// The pool shrinks when less than this share of the reserve is free; then the whole reserve is
    /// freed. Every change makes a context anew, so what flickers within the reserve changes nothing.
    pub yield_share: f64,
    /// Let whole layers' experts lie in VRAM where that is faster; it loads the model anew.
    pub allow_static: bool,
    /// Let the processor compute all experts where that is faster.
    pub allow_cpu: bool,
    /// The pool grows only this long after the last change, and after memory was given up, seconds.
    /// The wait doubles when memory is given up soon after growth.
    pub quiet_hold_s: f64,
    /// Longest such wait, seconds.
    pub quiet_hold_max_s: f64,
    /// Time constant with which risen free memory is believed, seconds. Falls are believed at once.
    pub rise_filter_s: f64,
    /// Most that a pool grows in one change, as a factor.
    pub growth_factor: f64,
    /// Changes of size by less than this share are not made.
    pub dead_band_share: f64,
    /// Bytes that save less than this share of a token's time in all are not taken.
    pub slack_share: f64,
    /// Share of a token's time that another arrangement must save.
    pub margin_share: f64,
    /// It must save that for so long before the change is made, seconds.
    pub confirm_s: f64,
    /// Within this time of present work a change must have saved what it costs, seconds.
    pub payback_s: f64,
    /// No arrangement is left earlier than this, unless others need the memory, seconds.
    pub dwell_s: f64,
    /// The processor is tried when uploads take more than this share of a token's time and its own
    /// time is not known.
    pub trial_share: f64,
    /// Tokens of such a trial, and those after which a time counts as measured.
    pub trial_tokens: f64,
    /// Measured times that are older than this are measured anew before they decide, seconds.
    pub stale_s: f64,
    /// Half-life of times and of the miss-ratio curve, tokens.
    pub half_life_tokens: f64,
    /// Time of work over which the widths of batches are averaged, seconds.
    pub mix_filter_s: f64,
    /// An expert that the pool has held for so many tokens need not be locked in RAM.
    pub cover_tokens: f64,
    /// Wait after a change that could not be made, seconds; doubles each time.
    pub retry_s: f64,
    /// Longest such wait, seconds.
    pub retry_max_s: f64,
}

impl Default for VramConfig {
    fn default() -> Self {
        Self {
            limit_bytes: None,
            reserve_bytes: 512 << 20,
            yield_share: 0.5,
            allow_static: true,
            allow_cpu: true,
            quiet_hold_s: 20.0,
            quiet_hold_max_s: 1800.0,
            rise_filter_s: 5.0,
            growth_factor: 2.0,
            dead_band_share: 0.1,
            slack_share: 0.01,
            margin_share: 0.1,
            confirm_s: 5.0,
            payback_s: 600.0,
            dwell_s: 20.0,
            trial_share: 0.25,
            trial_tokens: 32.0,
            stale_s: 3600.0,
            half_life_tokens: 1024.0,
            mix_filter_s: 30.0,
            cover_tokens: 256.0,
            retry_s: 10.0,
            retry_max_s: 3600.0,
        }
    }
}

impl VramConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if let Some(limit_bytes) = self.limit_bytes {
            bytes_within("vram.limit_bytes", limit_bytes, 0)?;
        }
        bytes_within("vram.reserve_bytes", self.reserve_bytes, 0)?;
        within("vram.yield_share", self.yield_share, 0.0, 1.0)?;
        within("vram.quiet_hold_s", self.quiet_hold_s, 0.1, DAY_S)?;
        within(
            "vram.quiet_hold_max_s",
            self.quiet_hold_max_s,
            self.quiet_hold_s,
            DAY_S,
        )?;
        within("vram.rise_filter_s", self.rise_filter_s, 0.0, DAY_S)?;
        within("vram.growth_factor", self.growth_factor, 1.01, 1e6)?;
        within("vram.dead_band_share", self.dead_band_share, 0.0, 1.0)?;
        within("vram.slack_share", self.slack_share, 0.0, 1.0)?;
        within("vram.margin_share", self.margin_share, 0.0, 1.0)?;
        within("vram.confirm_s", self.confirm_s, 0.0, DAY_S)?;
        within("vram.payback_s", self.payback_s, 0.0, DAY_S)?;
        within("vram.dwell_s", self.dwell_s, 0.0, DAY_S)?;
        within("vram.trial_share", self.trial_share, 0.0, 1.0)?;
        within("vram.trial_tokens", self.trial_tokens, 1.0, 1e6)?;
        within("vram.stale_s", self.stale_s, 1.0, 365.0 * DAY_S)?;
        within("vram.half_life_tokens", self.half_life_tokens, 1.0, 1e6)?;
        within("vram.mix_filter_s", self.mix_filter_s, 0.1, DAY_S)?;
        within("vram.cover_tokens", self.cover_tokens, 0.0, 1e6)?;
        within("vram.retry_s", self.retry_s, 0.1, DAY_S)?;
        within("vram.retry_max_s", self.retry_max_s, self.retry_s, DAY_S)?;
        // A factor below the dead-band would allow no growth at all.
        below(
            ("1 + vram.dead_band_share", 1.0 + self.dead_band_share),
            ("vram.growth_factor", self.growth_factor),
            "no growth would be large enough to be made",
        )?;
        below(
            ("vram.slack_share", self.slack_share),
            ("vram.margin_share", self.margin_share),
            "sizes would be given up that an arrangement is chosen for",
        )
    }
}
