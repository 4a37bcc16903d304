//! What a token takes under each arrangement, from measured times alone.
//!
//! With the pool, a token of a batch of some width takes `base + upload x uploaded bytes`: what it
//! would take if everything were in VRAM, and the measured cost of a byte. The cost is the slope of
//! time over uploads within each class of width; the link's measured bandwidth stands in until they
//! have varied enough to tell. The processor's time is known from when it computed. Whole layers lie
//! between the two, in proportion to their bytes, corrected by what was measured of them.

mod estimate;

use super::decision::Arrangement;
use super::mean::{Mean, Sums};
use super::observe::{StepTotals, VramFigures, WIDTHS};
use crate::config::VramConfig;
use crate::num::filter_share;
use crate::sense::Step;

/// The slope remembers this many half-lives longer than the means: uploads vary most after a pool
/// was made, and then hardly.
const SLOPE_MEMORY: f64 = 16.0;

/// The link's bandwidth counts as so many tokens whose uploads deviate by a tenth of their mean.
const LINK_TOKENS: f64 = 64.0;
const LINK_DEVIATION: f64 = 0.1;

/// Without the link, uploads must deviate by this share of their mean to tell their cost.
const LEAST_DEVIATION: f64 = 0.05;

/// A measured cost of a byte is believed within these factors of the link's.
const NEAR_LINK: (f64, f64) = (0.25, 64.0);

/// Batches of which less passes the pool over count as pooled, of which all but that as bypassed.
const FEW: f64 = 0.05;

/// What is known of a class of width, ns or bytes a token.
#[derive(Clone, Copy, Debug, Default)]
struct Class {
    /// Time under the present arrangement.
    present: Mean,
    /// Time and uploads of pooled batches.
    pooled: Mean,
    uploads: Mean,
    slope: Sums,
    /// Time on the processor, or with experts that pass the pool over.
    cpu: Mean,
    /// Routed bytes.
    routed: Mean,
    /// Time under static placement over what was expected.
    correction: Mean,
    /// Recent tokens.
    mix: f64,
}

/// The estimates.
#[derive(Clone, Debug)]
pub(super) struct Times {
    half_life: f64,
    least_tokens: f64,
    mix_filter_s: f64,
    classes: [Class; WIDTHS],
    last: Option<(Arrangement, [StepTotals; WIDTHS])>,
    link_ns_per_byte: Option<f64>,
    busy_share: f64,
}

impl Times {
    pub fn new(config: &VramConfig) -> Self {
        Self {
            half_life: config.half_life_tokens,
            least_tokens: config.trial_tokens / 2.0,
            mix_filter_s: config.mix_filter_s,
            classes: [Class::default(); WIDTHS],
            last: None,
            link_ns_per_byte: None,
            busy_share: 0.0,
        }
    }

    pub fn reconfigure(&mut self, config: &VramConfig) {
        self.half_life = config.half_life_tokens;
        self.least_tokens = config.trial_tokens / 2.0;
        self.mix_filter_s = config.mix_filter_s;
    }

    /// Takes in what was decoded since the last tick; `static_share` is the share of bytes that the
    /// applied static placement has in VRAM.
    pub fn update(
        &mut self,
        step: Step,
        figures: &VramFigures,
        link_bytes_per_s: Option<f64>,
        static_share: f64,
    ) {
        self.link_ns_per_byte = link_bytes_per_s
            .filter(|rate| *rate > 0.0 && rate.is_finite())
            .map(|rate| 1e9 / rate);
        let now = (figures.arrangement, figures.steps);
        let Some((arrangement, last)) = self.last.replace(now) else {
            return;
        };
        if arrangement != figures.arrangement {
            for class in &mut self.classes {
                class.present = Mean::default();
            }
            return;
        }
        let deltas: [StepTotals; WIDTHS] =
            std::array::from_fn(|width| since(&figures.steps[width], &last[width]));
        let ns: u64 = deltas.iter().map(|delta| delta.ns).sum();
        self.mix(step, &deltas, ns as f64);
        for (width, delta) in deltas.iter().enumerate() {
            if delta.tokens > 0 && delta.ns > 0 {
                self.learn(step.now_s, width, delta, arrangement, static_share);
            }
        }
    }

    /// Fades what was done by the time spent working, so that pauses forget nothing.
    fn mix(&mut self, step: Step, deltas: &[StepTotals; WIDTHS], ns: f64) {
        if step.elapsed_s > 0.0 {
            let busy = (ns / 1e9 / step.elapsed_s).min(1.0);
            let share = filter_share(step.elapsed_s, self.mix_filter_s);
            self.busy_share += (busy - self.busy_share) * share;
        }
        let fade = 1.0 - filter_share(ns / 1e9, self.mix_filter_s);
        for (class, delta) in self.classes.iter_mut().zip(deltas) {
            class.mix = class.mix * fade + delta.tokens as f64;
        }
    }

    fn learn(
        &mut self,
        now_s: f64,
        width: usize,
        delta: &StepTotals,
        arrangement: Arrangement,
        static_share: f64,
    ) {
        let tokens = delta.tokens as f64;
        let (y, x) = (delta.ns as f64 / tokens, delta.upload_bytes as f64 / tokens);
        let routed = delta.routed_bytes as f64;
        let bypassed = if routed > 0.0 {
            delta.bypassed_bytes as f64 / routed
        } else {
            0.0
        };
        let half_life = self.half_life;
        let expected = self.placed_uncorrected(width, static_share);
        let class = &mut self.classes[width];
        class.present.add(y, tokens, half_life, now_s);
        class.routed.add(routed / tokens, tokens, half_life, now_s);
        match arrangement {
            Arrangement::Reload { .. } if bypassed < FEW => {
                class.pooled.add(y, tokens, half_life, now_s);
                class.uploads.add(x, tokens, half_life, now_s);
                class.slope.add(x, y, tokens, half_life * SLOPE_MEMORY);
            }
            Arrangement::Reload { .. } if bypassed > 1.0 - FEW => {
                class.cpu.add(y, tokens, half_life, now_s);
            }
            Arrangement::Cpu => class.cpu.add(y, tokens, half_life, now_s),
            Arrangement::Static { .. } => {
                if let Some(expected) = expected {
                    class.correction.add(y / expected, tokens, half_life, now_s);
                }
            }
            Arrangement::Reload { .. } => {}
        }
    }

    /// Cost of an uploaded byte, ns.
    pub fn upload_ns_per_byte(&self) -> Option<f64> {
        let (mut variance, mut covariance, mut squares, mut tokens) = (0.0, 0.0, 0.0, 0.0);
        for class in &self.classes {
            let spread = class.slope.spread();
            variance += spread.0;
            covariance += spread.1;
            squares += spread.2;
            tokens += class.slope.n;
        }
        if let Some(link) = self.link_ns_per_byte {
            let mean_square = if tokens > 0.0 { squares / tokens } else { 0.0 };
            let weight = LINK_TOKENS * LINK_DEVIATION * LINK_DEVIATION * mean_square;
            if variance + weight <= 0.0 {
                return Some(link);
            }
            let slope = (covariance + weight * link) / (variance + weight);
            return Some(slope.clamp(link * NEAR_LINK.0, link * NEAR_LINK.1));
        }
        let enough = tokens >= self.least_tokens
            && squares > 0.0
            && variance >= LEAST_DEVIATION * LEAST_DEVIATION * squares;
        enough.then(|| (covariance / variance).max(0.0))
    }

    /// Share of the last while in which tokens were computed.
    pub const fn busy_share(&self) -> f64 {
        self.busy_share
    }
}

impl Class {
    /// Its part of the present time.
    fn time(&self) -> f64 {
        self.present.get(0.0).unwrap_or(0.0) * self.mix
    }
}

fn since(now: &StepTotals, last: &StepTotals) -> StepTotals {
    StepTotals {
        steps: now.steps.saturating_sub(last.steps),
        tokens: now.tokens.saturating_sub(last.tokens),
        ns: now.ns.saturating_sub(last.ns),
        routed_bytes: now.routed_bytes.saturating_sub(last.routed_bytes),
        upload_bytes: now.upload_bytes.saturating_sub(last.upload_bytes),
        bypassed_bytes: now.bypassed_bytes.saturating_sub(last.bypassed_bytes),
    }
}
