//! The adaptive policy: capacity by override of ceilings, pins by expected next use.

use crate::config::{AdaptiveConfig, Checked};
use crate::decision::{PinLimit, Reason};
use crate::ids::ModelShape;
use crate::pins::{PinBudget, PinInput, SkewGate};
use crate::policy::BuildError;
use crate::profile::Profile;
use crate::regulator::Regulator;
use crate::targeting::{Fill, TargetInput, Targeting};
use crate::{Decision, Observation, Policy};

/// The regulated policy.
#[derive(Clone, Debug)]
pub struct Adaptive {
    config: Checked,
    regulator: Regulator,
    gate: SkewGate,
    budget: PinBudget,
    targeting: Targeting,
    /// Ranks while some experts are in VRAM, which transit need not keep; else empty.
    beside_vram: Vec<f32>,
}

impl Adaptive {
    /// A policy for one model; `profile` holds expert counts indexed by [`crate::ExpertId`].
    ///
    /// # Errors
    /// When the configuration or the profile is refused.
    pub fn new(
        shape: &ModelShape,
        config: &AdaptiveConfig,
        profile: Option<&[f32]>,
    ) -> Result<Self, BuildError> {
        let config = config.check()?;
        let profile = profile
            .map(|counts| Profile::from_counts(shape, counts))
            .transpose()?;
        let regulator = Regulator::new(shape, config.clone(), profile.as_ref());
        Ok(Self {
            gate: SkewGate::new(&config.get().pins, profile.is_some()),
            budget: PinBudget::new(&config.get().pins, &regulator.sizes),
            targeting: Targeting::new(&config.get().targeting, shape.total_experts()),
            beside_vram: Vec::new(),
            regulator,
            config,
        })
    }
}

impl Adaptive {
    fn rank_beside(&mut self, covered: Option<&[bool]>) {
        self.beside_vram.clear();
        let Some(covered) = covered else { return };
        let ranks = self.regulator.scores.ranks();
        self.beside_vram.extend_from_slice(ranks);
        for (rank, _) in self
            .beside_vram
            .iter_mut()
            .zip(covered)
            .filter(|(_, c)| **c)
        {
            *rank = 0.0;
        }
    }
}

impl Policy for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn tick(&mut self, observation: &Observation<'_>, out: &mut Decision) {
        let now = self.regulator.tick(observation, out);
        let allowed = self.gate.update(self.regulator.scores.skew());
        let (budget_bytes, limit) = self.budget.decide(&PinInput {
            step: now.step,
            capacity_bytes: out.capacity_bytes,
            allowed,
            locks: observation.locks,
            held: observation.held,
        });
        out.pin_budget_bytes = budget_bytes;
        out.pin_limit = limit;
        let fill = if limit == PinLimit::Model {
            Fill::Everything {
                at_once: now.step.first,
            }
        } else if now.step.first && self.gate.is_profiled() {
            Fill::AtOnce(Reason::Profile)
        } else {
            Fill::Paying(Reason::Fill)
        };
        // Where everything fits, the next context's pool is filled the faster for it.
        let covered = observation.covered.filter(|_| limit != PinLimit::Model);
        self.rank_beside(covered);
        let input = TargetInput {
            step: now.step,
            tokens: now.tokens_total,
            scores: self.regulator.scores.get(),
            ranks: self.regulator.scores.ranks(),
            idleness: Some(self.regulator.scores.idleness()).filter(|_| limit != PinLimit::Model),
            hurry: now.hurry,
            residence: observation.residence,
            covered,
            budget_bytes,
            miss_cost_s: now.miss_cost_s,
            read_bytes_per_s: self.config.get().value.read_bytes_per_s as f64,
            fill,
            swap_reason: Reason::Swap,
        };
        self.targeting.decide(&self.regulator.sizes, &input, out);
    }

    fn limit_capacity(&mut self, bytes: Option<u64>) {
        self.regulator.limit_capacity(bytes);
    }

    fn reconfigure(&mut self, config: &Checked) {
        self.regulator.reconfigure(config);
        let values = config.get();
        self.gate.reconfigure(&values.pins);
        self.budget.reconfigure(&values.pins, &self.regulator.sizes);
        self.targeting.reconfigure(&values.targeting);
        self.config = config.clone();
    }

    fn scores(&self) -> &[f32] {
        self.regulator.scores.get()
    }

    fn ranks(&self) -> &[f32] {
        if self.beside_vram.is_empty() {
            self.regulator.scores.ranks()
        } else {
            &self.beside_vram
        }
    }
}
