//! Policies to compare with. All follow the same capacity law; they differ in what they lock.

use crate::config::{AdaptiveConfig, Checked, TargetingConfig};
use crate::decision::{PinLimit, Reason};
use crate::ids::ModelShape;
use crate::num::narrow;
use crate::pins::{PinBudget, PinInput};
use crate::policy::BuildError;
use crate::profile::Profile;
use crate::regulator::{Now, Regulator};
use crate::targeting::{Fill, TargetInput, Targeting};
use crate::{Decision, Observation, Policy};

/// Most locks and unlocks a tick under `lru`, which has no other brake.
const LRU_SWAPS_PER_TICK: u32 = 256;

/// Payback so long that only the sign of the gain matters.
const ANY_GAIN_TOKENS: f64 = 1e9;

/// Recency as a score: 1 / (1 + tokens since the last routing), 0 for never.
#[derive(Clone, Debug)]
struct Recency {
    used_at: Vec<f64>,
    last: Vec<u32>,
    known: bool,
    score: Vec<f32>,
}

impl Recency {
    fn new(experts: usize) -> Self {
        Self {
            used_at: vec![f64::NEG_INFINITY; experts],
            last: vec![0; experts],
            known: false,
            score: vec![0.0; experts],
        }
    }

    fn update(&mut self, counts: Option<&[u32]>, tokens_total: f64) {
        let counts = counts.filter(|counts| counts.len() == self.score.len());
        let known = std::mem::replace(&mut self.known, counts.is_some());
        let Some(counts) = counts else { return };
        if !known {
            self.last.copy_from_slice(counts);
            return;
        }
        let slots = self
            .used_at
            .iter_mut()
            .zip(&mut self.last)
            .zip(&mut self.score);
        for (((used_at, last), score), &count) in slots.zip(counts) {
            if count != *last {
                *used_at = tokens_total;
                *last = count;
            }
            *score = narrow(1.0 / (1.0 + (tokens_total - *used_at)));
        }
    }
}

/// `fetch`: nothing is pinned, all of the capacity is transit.
#[derive(Clone, Debug)]
pub struct Fetch {
    label: &'static str,
    regulator: Regulator,
    recency: Recency,
}

impl Fetch {
    /// A policy for one model. The profile is checked and not used.
    ///
    /// # Errors
    /// When the configuration or the profile is refused.
    pub fn new(
        shape: &ModelShape,
        config: &AdaptiveConfig,
        profile: Option<&[f32]>,
    ) -> Result<Self, BuildError> {
        profile
            .map(|counts| Profile::from_counts(shape, counts))
            .transpose()?;
        Ok(Self {
            label: "fetch",
            regulator: Regulator::new(shape, config.check()?, None),
            recency: Recency::new(shape.total_experts()),
        })
    }

    /// The same under the name `off`: the engine then fetches nothing either.
    ///
    /// # Errors
    /// When the configuration or the profile is refused.
    pub fn off(
        shape: &ModelShape,
        config: &AdaptiveConfig,
        profile: Option<&[f32]>,
    ) -> Result<Self, BuildError> {
        Ok(Self {
            label: "off",
            ..Self::new(shape, config, profile)?
        })
    }
}

impl Policy for Fetch {
    fn name(&self) -> &'static str {
        self.label
    }

    fn tick(&mut self, observation: &Observation<'_>, out: &mut Decision) {
        let now = self.regulator.tick(observation, out);
        self.recency
            .update(observation.decode_counts, now.tokens_total);
        out.pin_limit = PinLimit::Policy;
    }

    fn limit_capacity(&mut self, bytes: Option<u64>) {
        self.regulator.limit_capacity(bytes);
    }

    fn reconfigure(&mut self, config: &Checked) {
        self.regulator.reconfigure(config);
    }

    fn scores(&self) -> &[f32] {
        &self.recency.score
    }
}

/// `static`: HotPin. The profile's experts that fit at the start, and never any others; when the
/// budget shrinks the worst go, when it grows again they come back.
#[derive(Clone, Debug)]
pub struct Static {
    pins: Pins,
    /// Profile probability of the experts chosen at the start, 0 for all others.
    chosen: Vec<f32>,
    recency: Recency,
}

impl Static {
    /// A policy for one model.
    ///
    /// # Errors
    /// When the configuration or the profile is refused, or there is no profile.
    pub fn new(
        shape: &ModelShape,
        config: &AdaptiveConfig,
        profile: Option<&[f32]>,
    ) -> Result<Self, BuildError> {
        let profile = Profile::from_counts(shape, profile.ok_or(BuildError::NoProfile)?)?;
        let checked = config.check()?;
        let targeting = TargetingConfig {
            max_swaps_per_tick: 0,
            payback_tokens: ANY_GAIN_TOKENS,
            ..checked.get().targeting.clone()
        };
        Ok(Self {
            pins: Pins::new(shape, checked, &targeting),
            chosen: profile.probabilities().to_vec(),
            recency: Recency::new(shape.total_experts()),
        })
    }
}

impl Policy for Static {
    fn name(&self) -> &'static str {
        "static"
    }

    fn tick(&mut self, observation: &Observation<'_>, out: &mut Decision) {
        let now = self.pins.regulator.tick(observation, out);
        self.recency
            .update(observation.decode_counts, now.tokens_total);
        let fill = if now.step.first {
            Fill::AtOnce(Reason::Profile)
        } else {
            Fill::Paying(Reason::Profile)
        };
        self.pins.decide(observation, now, &self.chosen, fill, out);
        if now.step.first && out.pin_limit != PinLimit::Model {
            let mut kept = vec![0.0; self.chosen.len()];
            for pin in &out.pin {
                kept[pin.expert.index()] = self.chosen[pin.expert.index()];
            }
            self.chosen = kept;
        }
    }

    fn limit_capacity(&mut self, bytes: Option<u64>) {
        self.pins.regulator.limit_capacity(bytes);
    }

    fn reconfigure(&mut self, config: &Checked) {
        self.pins.reconfigure(config);
    }

    fn scores(&self) -> &[f32] {
        &self.recency.score
    }
}

/// `lru`: what was routed last is pinned, as far as it is resident.
#[derive(Clone, Debug)]
pub struct Lru {
    pins: Pins,
    recency: Recency,
}

impl Lru {
    /// A policy for one model. The profile is checked and not used.
    ///
    /// # Errors
    /// When the configuration or the profile is refused.
    pub fn new(
        shape: &ModelShape,
        config: &AdaptiveConfig,
        profile: Option<&[f32]>,
    ) -> Result<Self, BuildError> {
        profile
            .map(|counts| Profile::from_counts(shape, counts))
            .transpose()?;
        let checked = config.check()?;
        let targeting = TargetingConfig {
            margin: 0.0,
            absent_margin: ANY_GAIN_TOKENS,
            payback_tokens: ANY_GAIN_TOKENS,
            dwell_s: 0.0,
            dwell_tokens: 0.0,
            max_swaps_per_tick: LRU_SWAPS_PER_TICK,
            max_fills_per_tick: LRU_SWAPS_PER_TICK,
            ..checked.get().targeting.clone()
        };
        let pins = Pins::new(shape, checked, &targeting);
        Ok(Self {
            pins,
            recency: Recency::new(shape.total_experts()),
        })
    }
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn tick(&mut self, observation: &Observation<'_>, out: &mut Decision) {
        let now = self.pins.regulator.tick(observation, out);
        self.recency
            .update(observation.decode_counts, now.tokens_total);
        let fill = Fill::Paying(Reason::Recent);
        self.pins
            .decide(observation, now, &self.recency.score, fill, out);
    }

    fn limit_capacity(&mut self, bytes: Option<u64>) {
        self.pins.regulator.limit_capacity(bytes);
    }

    fn reconfigure(&mut self, config: &Checked) {
        self.pins.reconfigure(config);
    }

    fn scores(&self) -> &[f32] {
        &self.recency.score
    }
}

/// What the pinning baselines share.
#[derive(Clone, Debug)]
struct Pins {
    config: Checked,
    regulator: Regulator,
    budget: PinBudget,
    targeting: Targeting,
}

impl Pins {
    fn new(shape: &ModelShape, config: Checked, targeting: &TargetingConfig) -> Self {
        let regulator = Regulator::new(shape, config.clone(), None);
        Self {
            budget: PinBudget::new(&config.get().pins, &regulator.sizes),
            targeting: Targeting::new(targeting, shape.total_experts()),
            regulator,
            config,
        }
    }

    /// Takes over other settings but for targeting, which is the policy's own.
    fn reconfigure(&mut self, config: &Checked) {
        self.regulator.reconfigure(config);
        self.budget
            .reconfigure(&config.get().pins, &self.regulator.sizes);
        self.config = config.clone();
    }

    /// Pins by the policy's own ranking, without a skew gate.
    fn decide(
        &mut self,
        observation: &Observation<'_>,
        now: Now,
        ranking: &[f32],
        fill: Fill,
        out: &mut Decision,
    ) {
        let (budget_bytes, limit) = self.budget.decide(&PinInput {
            step: now.step,
            capacity_bytes: out.capacity_bytes,
            allowed: true,
            locks: observation.locks,
            held: observation.held,
        });
        out.pin_budget_bytes = budget_bytes;
        out.pin_limit = limit;
        let input = TargetInput {
            step: now.step,
            tokens: now.tokens_total,
            scores: ranking,
            ranks: ranking,
            idleness: None,
            hurry: false,
            residence: observation.residence,
            covered: None,
            budget_bytes,
            miss_cost_s: now.miss_cost_s,
            read_bytes_per_s: self.config.get().value.read_bytes_per_s as f64,
            fill: if limit == PinLimit::Model {
                Fill::Everything {
                    at_once: now.step.first,
                }
            } else {
                fill
            },
            swap_reason: Reason::Recent,
        };
        self.targeting.decide(&self.regulator.sizes, &input, out);
    }
}
