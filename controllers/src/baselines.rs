//! Policies to compare with (skeleton).

use crate::config::AdaptiveConfig;
use crate::ids::ModelShape;
use crate::policy::BuildError;
use crate::profile::Profile;
use crate::{Decision, Observation, Policy};

macro_rules! skeleton {
    ($name:ident, $label:literal, $doc:literal) => {
        #[doc = $doc]
        #[derive(Debug)]
        pub struct $name {
            label: &'static str,
            scores: Vec<f32>,
        }

        impl $name {
            /// A policy for one model.
            ///
            /// # Errors
            /// When the configuration or the profile is refused.
            pub fn new(
                shape: &ModelShape,
                config: &AdaptiveConfig,
                profile: Option<&[f32]>,
            ) -> Result<Self, BuildError> {
                config.check()?;
                profile
                    .map(|counts| Profile::from_counts(shape, counts))
                    .transpose()?;
                Ok(Self {
                    label: $label,
                    scores: vec![0.0; shape.total_experts()],
                })
            }
        }

        impl Policy for $name {
            fn name(&self) -> &'static str {
                self.label
            }

            fn tick(&mut self, _observation: &Observation<'_>, out: &mut Decision) {
                out.clear();
            }

            fn scores(&self) -> &[f32] {
                &self.scores
            }
        }
    };
}

skeleton!(Fetch, "fetch", "Pins nothing; capacity as in adaptive.");
skeleton!(Static, "static", "Pins the profile once.");
skeleton!(Lru, "lru", "Pins what was used last.");

impl Fetch {
    /// The same under the name `off`.
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
