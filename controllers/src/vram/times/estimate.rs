//! What a token would take, from what was learned.

use super::{Class, FEW, Times};
use crate::vram::curve::MissCurve;
use crate::vram::observe::WIDTHS;

/// Classes of width that may use a pool. Wider batches may be computed on the card with weights copied
/// for them, so they say nothing about narrower ones, nor those about them.
const POOLED: usize = WIDTHS - 1;

/// A class of width that is unknown may be left as it is below this share of the present time.
const UNKNOWN_SHARE: f64 = 0.1;

impl Times {
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

    pub(super) fn placed_uncorrected(&self, width: usize, share: f64) -> Option<f64> {
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
