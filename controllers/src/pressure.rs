//! The pressure ceiling: a PID on the share of time that tasks stall on memory.
//!
//! The controlled variable is the filtered PSI `some` fraction; the output `u` is a shrink in nepers
//! from the capacity at which the episode began, so that every step is multiplicative:
//! `limit = anchor x exp(-u)`. An output limiter lets the limit fall at once and rise only after a
//! quiet hold and slowly; the integral tracks what the limiter let through (back-calculation,
//! Astrom and Hagglund, *PID Controllers*, 2nd ed., section 3.5), so neither saturation winds up.

use crate::config::PressureConfig;
use crate::decision::PressureCause;
use crate::num::{filter_share, to_bytes};
use crate::observe::Pressure;
use crate::sense::{Step, difference};

/// Bytes of a page in the kernel's reclaim counters. Larger pages only make confirmation later.
const PAGE_BYTES: f64 = 4096.0;

/// What the pressure loop reads each tick.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PressureInput {
    pub step: Step,
    pub sample: Option<Pressure>,
    /// Least available - reserve over host and cgroup, bytes.
    pub headroom_bytes: Option<u64>,
    /// Bytes that our own fetches asked for since the last tick.
    pub fetched_bytes: u64,
    /// Share of booked hits that must have faulted, when known.
    pub phantom_share: Option<f64>,
    /// Lowest of the other ceilings, bytes.
    pub reference_bytes: u64,
    /// Capacity of the last tick, bytes; `None` on the first.
    pub applied_bytes: Option<u64>,
    /// Bytes locked now.
    pub pinned_bytes: u64,
    /// The loop stops here, bytes.
    pub floor_bytes: u64,
}

/// The ceiling and what holds it down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PressureOutput {
    pub ceiling_bytes: Option<u64>,
    pub cause: Option<PressureCause>,
}

/// A measurement of pressure.
#[derive(Clone, Copy, Debug)]
struct Measured {
    fraction: f64,
    slope_per_s: f64,
    cause: Option<PressureCause>,
}

/// An episode of confirmed pressure and the recovery from it.
#[derive(Clone, Copy, Debug)]
struct Episode {
    anchor_bytes: f64,
    limit_bytes: f64,
    integral: f64,
    cause: PressureCause,
    last_pressed_s: f64,
}

/// The loop's state.
#[derive(Clone, Debug)]
pub(crate) struct PressureLoop {
    config: PressureConfig,
    meter: Meter,
    episode: Option<Episode>,
    trim: PhantomTrim,
}

impl PressureLoop {
    pub fn new(config: &PressureConfig) -> Self {
        Self {
            config: config.clone(),
            meter: Meter::default(),
            episode: None,
            trim: PhantomTrim::default(),
        }
    }

    /// Takes over other settings; an episode of pressure goes on under them.
    pub fn reconfigure(&mut self, config: &PressureConfig) {
        self.config = config.clone();
    }

    /// One tick.
    pub fn update(&mut self, input: &PressureInput) -> PressureOutput {
        let measured = self.meter.read(&self.config, input);
        match measured {
            Some(measured) => self.regulate(input, measured),
            // Blind: an old episode must not bind for ever.
            None => self.episode = None,
        }
        let trimmed = self.trim.update(&self.config, input);
        let reference = input.reference_bytes as f64;
        let mut ceiling = measured.map(|_| reference);
        let mut cause = None;
        if let Some(episode) = self
            .episode
            .filter(|episode| episode.limit_bytes < reference)
        {
            ceiling = Some(episode.limit_bytes);
            cause = Some(episode.cause);
        }
        if trimmed < 1.0 {
            let floor = input.floor_bytes.min(input.reference_bytes) as f64;
            let trimmed_bytes = (reference * trimmed).max(floor);
            if trimmed_bytes < ceiling.unwrap_or(reference) {
                ceiling = Some(trimmed_bytes);
                cause = Some(PressureCause::Faults);
            }
        }
        PressureOutput {
            ceiling_bytes: ceiling.map(to_bytes),
            cause,
        }
    }

    fn regulate(&mut self, input: &PressureInput, measured: Measured) {
        let config = &self.config;
        let reference = input.reference_bytes as f64;
        let applied = input.applied_bytes.map_or(reference, |bytes| bytes as f64);
        let pressing = measured
            .cause
            .filter(|_| measured.fraction > config.shrink_threshold);
        let mut episode = match (self.episode, pressing) {
            (Some(episode), _) => episode,
            (None, Some(cause)) => {
                let floor = input.floor_bytes as f64;
                Episode::start(applied.min(reference).max(floor), cause, input.step)
            }
            (None, None) => return,
        };
        let dt_s = input.step.dt_s;
        if let Some(cause) = pressing {
            episode.cause = cause;
            episode.last_pressed_s = input.step.now_s;
            let error = measured.fraction - config.shrink_threshold;
            let slope = measured.slope_per_s.max(0.0);
            let raw = config.proportional_gain * error
                + episode.integral
                + config.derivative_gain_s * slope;
            episode.shrink_to(raw, input.floor_bytes);
            // Another ceiling already took more: start biting from there. Locks not yet given back:
            // asking for more is windup.
            let real_bytes = if applied < episode.limit_bytes {
                applied
            } else {
                episode.limit_bytes.max(input.pinned_bytes as f64)
            };
            episode.integral += config.integral_gain_per_s * error * dt_s;
            episode.track(raw, real_bytes, dt_s / config.tracking_s);
        } else {
            // Unconfirmed pressure is quiet: it is our own refaults, and the less is left to us the
            // more there are of them, so that waiting for their end would be for ever.
            let foreign = measured.cause.map_or(0.0, |_| measured.fraction);
            let quiet = foreign < config.grow_threshold
                && input.step.now_s - episode.last_pressed_s >= config.quiet_hold_s;
            // Relative to its threshold: how fast to grow is the limiter's business.
            let error = if quiet {
                foreign / config.grow_threshold - 1.0
            } else {
                0.0
            };
            episode.integral += config.integral_gain_per_s * error * dt_s;
            let raw = config.proportional_gain * error + episode.integral;
            if quiet {
                let step_bytes = config.growth_per_s * reference * dt_s;
                let wanted_bytes = episode.bytes_at(raw);
                let most_bytes = episode.limit_bytes + step_bytes;
                episode.limit_bytes = wanted_bytes.min(most_bytes).max(episode.limit_bytes);
            }
            episode.track(raw, episode.limit_bytes, dt_s / config.tracking_s);
            if quiet && episode.limit_bytes >= reference {
                self.episode = None;
                return;
            }
        }
        self.episode = Some(episode);
    }
}

impl Episode {
    fn start(anchor_bytes: f64, cause: PressureCause, step: Step) -> Self {
        let anchor_bytes = anchor_bytes.max(1.0);
        Self {
            anchor_bytes,
            limit_bytes: anchor_bytes,
            integral: 0.0,
            cause,
            last_pressed_s: step.now_s,
        }
    }

    fn bytes_at(&self, nepers: f64) -> f64 {
        self.anchor_bytes * (-nepers).exp()
    }

    /// Lowers the limit to what `nepers` asks for, never raises it, and stops at the floor.
    fn shrink_to(&mut self, nepers: f64, floor_bytes: u64) {
        let wanted_bytes = self.bytes_at(nepers).max(floor_bytes as f64);
        self.limit_bytes = self.limit_bytes.min(wanted_bytes);
    }

    /// Back-calculation: moves the integral so that the output approaches what took effect.
    fn track(&mut self, nepers: f64, real_bytes: f64, share: f64) {
        let real_nepers = (self.anchor_bytes / real_bytes.max(1.0)).ln();
        self.integral += (real_nepers - nepers) * share.min(1.0);
    }
}

/// Turns running totals into a filtered pressure fraction with its confirmation.
#[derive(Clone, Debug, Default)]
struct Meter {
    stall_total_us: Option<u64>,
    reclaim_total_pages: Option<u64>,
    stall_fraction: f64,
    reclaim_bytes_per_s: f64,
}

impl Meter {
    fn read(&mut self, config: &PressureConfig, input: &PressureInput) -> Option<Measured> {
        let sample = input.sample;
        let reclaim_total = sample.and_then(|sample| sample.direct_reclaim_pages);
        let stall_total = sample
            .filter(|sample| !sample.psi_absent)
            .map(|sample| sample.some_total_us);
        let pages = difference(
            &mut self.reclaim_total_pages,
            reclaim_total,
            u64::saturating_sub,
        );
        let stall_us = difference(&mut self.stall_total_us, stall_total, u64::saturating_sub);
        self.filter_reclaim(config, input, reclaim_total.is_some(), pages);
        if stall_total.is_some() {
            Some(self.filter_stall(config, input, stall_us))
        } else if reclaim_total.is_some() {
            self.stall_fraction = 0.0;
            Some(self.reclaim_alone(config))
        } else {
            *self = Self::default();
            None
        }
    }

    /// Direct reclaim that our own reads do not explain: each page that we read into a full page
    /// cache pushes another one out.
    fn filter_reclaim(
        &mut self,
        config: &PressureConfig,
        input: &PressureInput,
        known: bool,
        pages: Option<u64>,
    ) {
        if !known {
            self.reclaim_bytes_per_s = 0.0;
        }
        let Some(pages) = pages.filter(|_| input.step.elapsed_s > 0.0) else {
            return;
        };
        let foreign_bytes = (pages as f64 * PAGE_BYTES - input.fetched_bytes as f64).max(0.0);
        let rate = foreign_bytes / input.step.elapsed_s;
        let share = filter_share(input.step.elapsed_s, config.filter_s);
        self.reclaim_bytes_per_s += (rate - self.reclaim_bytes_per_s) * share;
    }

    fn filter_stall(
        &mut self,
        config: &PressureConfig,
        input: &PressureInput,
        stall_us: Option<u64>,
    ) -> Measured {
        let before = self.stall_fraction;
        let elapsed_s = input.step.elapsed_s;
        let mut slope_per_s = 0.0;
        if let Some(stall_us) = stall_us.filter(|_| elapsed_s > 0.0) {
            let raw = (stall_us as f64 / 1e6 / elapsed_s).min(1.0);
            self.stall_fraction += (raw - before) * filter_share(elapsed_s, config.filter_s);
            slope_per_s = (self.stall_fraction - before) / elapsed_s;
        }
        // Transit is what we leave available ourselves, so headroom is judged by what we hold.
        let held_bytes = input.applied_bytes.unwrap_or(input.reference_bytes) as f64;
        let low_bytes = config.low_headroom_fraction * held_bytes;
        let low_headroom = input
            .headroom_bytes
            .is_some_and(|bytes| (bytes as f64) < low_bytes);
        let reclaim = self.reclaim_bytes_per_s > config.confirm_reclaim_bytes_per_s as f64;
        let cause = if low_headroom {
            Some(PressureCause::StallLowHeadroom)
        } else if reclaim {
            Some(PressureCause::StallReclaim)
        } else {
            None
        };
        Measured {
            fraction: self.stall_fraction,
            slope_per_s,
            cause,
        }
    }

    fn reclaim_alone(&self, config: &PressureConfig) -> Measured {
        let scale = config.reclaim_scale_bytes_per_s as f64;
        let fraction = config.reclaim_gain * (self.reclaim_bytes_per_s / scale).min(1.0);
        Measured {
            fraction,
            slope_per_s: 0.0,
            cause: Some(PressureCause::Reclaim),
        }
    }
}

/// Trims capacity while experts that the books call resident fault: the kernel reclaims transit
/// faster than we believe.
#[derive(Clone, Debug, Default)]
struct PhantomTrim {
    share: f64,
    nepers: f64,
    last_seen_s: f64,
}

impl PhantomTrim {
    /// The fraction of the reference that remains.
    fn update(&mut self, config: &PressureConfig, input: &PressureInput) -> f64 {
        let dt_s = input.step.dt_s;
        match input.phantom_share {
            Some(share) => {
                self.share += (share.min(1.0) - self.share) * filter_share(dt_s, config.filter_s);
            }
            // Nothing was routed, or nothing is known: no evidence that it goes on.
            None => self.share = 0.0,
        }
        if self.share > config.phantom_threshold {
            self.last_seen_s = input.step.now_s;
            let most = -config.phantom_floor_fraction.ln();
            let more = config.phantom_gain_per_s * (self.share - config.phantom_threshold) * dt_s;
            self.nepers = (self.nepers + more).min(most);
        } else if self.nepers > 0.0 && input.step.now_s - self.last_seen_s >= config.quiet_hold_s {
            self.nepers = (self.nepers - config.growth_per_s * dt_s).max(0.0);
        }
        (-self.nepers).exp()
    }
}
