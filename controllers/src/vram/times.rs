//! What a token takes under each arrangement, from measured times alone.
//!
//! With the pool, a token of a batch of some width takes `base + upload x uploaded bytes`: what it
//! would take if everything were in VRAM, and the measured cost of a byte. The cost is the slope of
//! time over uploads within each class of width; the link's measured bandwidth stands in until they
//! have varied enough to tell. The processor's time is known from when it computed. Whole layers lie
//! between the two, in proportion to their bytes, corrected by what was measured of them.

use super::curve::MissCurve;
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

/// Classes of width that may use a pool. Wider batches may be computed on the card with weights copied
/// for them, so they say nothing about narrower ones, nor those about them.
const POOLED: usize = WIDTHS - 1;

/// A class of width that is unknown may be left as it is below this share of the present time.
const UNKNOWN_SHARE: f64 = 0.1;

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

    /// Whether the pool was ever timed.
    pub fn knows_pool(&self) -> bool {
        self.classes
            .iter()
            .any(|class| class.pooled.get(self.least_tokens).is_some())
    }

    /// If everything were in VRAM.
    pub fn resident(&self) -> Option<f64> {
        self.over_mix(|width| self.base(width))
    }

    /// Whether the processor's time is known for what is decoded most, and not too old.
    pub fn knows_cpu(&self, now_s: f64, stale_s: f64) -> bool {
        let most = self
            .classes
            .iter()
            .enumerate()
            .max_by(|a, b| a.1.time().total_cmp(&b.1.time()))
            .map_or(0, |(width, _)| width);
        let fresh = |class: &Class| {
            class.cpu.get(self.least_tokens).is_some() && now_s - class.cpu.at_s <= stale_s
        };
        // Another width's tells by bytes.
        fresh(&self.classes[most])
            || (self.classes[..POOLED].iter().any(fresh) && self.cpu(most).is_some())
    }

    /// Tokens computed by the processor that its estimates rest on.
    pub fn cpu_tokens(&self) -> f64 {
        self.classes.iter().map(|class| class.cpu.tokens).sum()
    }

    /// A token's time now, as measured.
    pub fn present(&self) -> Option<f64> {
        self.over_mix(|width| self.classes[width].present.get(1.0))
    }

    /// With a pool of that size.
    pub fn reload(&self, curve: &MissCurve, pool_bytes: u64) -> Option<f64> {
        let cost = self.upload_ns_per_byte()?;
        self.over_mix(|width| {
            let bypassed = curve.bypassed_share(width, pool_bytes)?;
            if bypassed > 1.0 - FEW {
                return self.cpu(width);
            }
            let uploads = curve.upload_bytes_per_token(width, pool_bytes)?;
            let pooled = self.base(width)? * (1.0 - bypassed) + uploads * cost;
            if bypassed < FEW {
                return Some(pooled);
            }
            Some(pooled + bypassed * self.cpu(width)?)
        })
    }

    /// On the processor.
    pub fn all_cpu(&self) -> Option<f64> {
        self.over_mix(|width| self.cpu(width))
    }

    /// With that share of the expert bytes in whole layers in VRAM.
    pub fn placed(&self, share: f64) -> Option<f64> {
        self.over_mix(|width| {
            let correction = self.correction(width);
            Some(self.placed_uncorrected(width, share)? * correction)
        })
    }

    fn placed_uncorrected(&self, width: usize, share: f64) -> Option<f64> {
        let (cpu, base) = (self.cpu(width)?, self.base(width)?);
        Some(cpu - share * (cpu - base))
    }

    /// Of this width, else of all that were measured, else none.
    fn correction(&self, width: usize) -> f64 {
        let own = self.classes[width].correction.get(self.least_tokens);
        own.unwrap_or_else(|| {
            let (sum, tokens) = self
                .classes
                .iter()
                .fold((0.0, 0.0), |(sum, tokens), class| {
                    (sum + class.correction.sum, tokens + class.correction.tokens)
                });
            if tokens >= self.least_tokens {
                sum / tokens
            } else {
                1.0
            }
        })
    }

    /// Everything in VRAM. A token of a wider batch takes no longer than one of a narrower, whose time
    /// stands in where its own is not known.
    fn base(&self, width: usize) -> Option<f64> {
        let cost = self.upload_ns_per_byte()?;
        (0..=width).rev().find_map(|narrower| {
            let class = &self.classes[narrower];
            let time = class.pooled.get(self.least_tokens)?;
            let uploads = class.uploads.get(self.least_tokens)?;
            // Noise must not make it nothing.
            Some((time - uploads * cost).max(time * 0.02))
        })
    }

    /// On the processor: measured, or another width's time beyond its base, by routed bytes.
    fn cpu(&self, width: usize) -> Option<f64> {
        let own = self.classes[width].cpu.get(self.least_tokens);
        own.or_else(|| {
            if width >= POOLED {
                return None;
            }
            let routed = self.classes[width].routed.get(1.0)?;
            let base = self.base(width)?;
            let nearest = (0..POOLED)
                .filter(|&other| {
                    let class = &self.classes[other];
                    class.cpu.get(self.least_tokens).is_some()
                        && class.routed.get(1.0).is_some_and(|bytes| bytes > 0.0)
                        && self.base(other).is_some()
                })
                .min_by_key(|other| other.abs_diff(width))?;
            let class = &self.classes[nearest];
            let time = class.cpu.get(self.least_tokens)?;
            let per_byte = (time - self.base(nearest)?).max(0.0) / class.routed.get(1.0)?;
            Some(base + per_byte * routed)
        })
    }

    /// Mean over what was decoded lately. A width that is unknown and takes little time stays as it
    /// is.
    fn over_mix(&self, time: impl Fn(usize) -> Option<f64>) -> Option<f64> {
        let all: f64 = self.classes.iter().map(Class::time).sum();
        let (mut sum, mut tokens) = (0.0, 0.0);
        for (width, class) in self.classes.iter().enumerate() {
            if class.time() <= 0.0 {
                continue;
            }
            let rare = class.time() < UNKNOWN_SHARE * all;
            let own = match time(width) {
                Some(own) => own,
                None if rare => class.present.get(0.0)?,
                None => return None,
            };
            sum += own * class.mix;
            tokens += class.mix;
        }
        (tokens > 0.0).then(|| sum / tokens)
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
