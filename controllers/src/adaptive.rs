//! The adaptive policy (skeleton).

use crate::config::AdaptiveConfig;
use crate::ids::ModelShape;
use crate::policy::BuildError;
use crate::profile::Profile;
use crate::{Decision, Observation, Policy};

/// The regulated policy: capacity by override of ceilings, pins by expected next use.
#[derive(Debug)]
pub struct Adaptive {
    scores: Vec<f32>,
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
        config.check()?;
        let profile = profile
            .map(|counts| Profile::from_counts(shape, counts))
            .transpose()?;
        let scores = profile.map_or_else(
            || vec![0.0; shape.total_experts()],
            |p| p.probabilities().to_vec(),
        );
        Ok(Self { scores })
    }
}

impl Policy for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn tick(&mut self, _observation: &Observation<'_>, out: &mut Decision) {
        out.clear();
    }

    fn scores(&self) -> &[f32] {
        &self.scores
    }
}
