//! The starting profile: expert counts from earlier runs, as routing probabilities.

use crate::ids::{ExpertId, ModelShape};
use crate::num;

/// Why a profile was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// It was made for another model.
    #[error("profile has {given} counts, the model has {expected} experts")]
    Length {
        /// Counts given.
        given: usize,
        /// Experts of the model.
        expected: usize,
    },
    /// A count is negative, infinite or not a number.
    #[error("profile count {count} of expert {index} in MoE layer {layer} is not a count")]
    BadCount {
        /// Position in the list of MoE layers.
        layer: usize,
        /// Index of the expert in its layer.
        index: u32,
        /// What was given.
        count: f32,
    },
}

/// Routing probabilities per expert: each layer's counts scaled to sum to its top-k.
///
/// A layer without any count has probability 0 throughout: the profile says nothing about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    probability: Vec<f32>,
}

impl Profile {
    /// Scales raw counts, indexed by [`ExpertId`]. Any unit will do, since each layer is scaled by
    /// its own sum.
    ///
    /// # Errors
    /// When the length is not the model's, or a count is negative or not finite.
    pub fn from_counts(shape: &ModelShape, counts: &[f32]) -> Result<Self, ProfileError> {
        let expected = shape.total_experts();
        if counts.len() != expected {
            return Err(ProfileError::Length {
                given: counts.len(),
                expected,
            });
        }
        let mut probability = Vec::with_capacity(expected);
        for layer in 0..shape.layers() {
            let first = shape.id(layer, 0).index();
            let of_layer = &counts[first..first + shape.experts_in(layer) as usize];
            if let Some(at) = of_layer
                .iter()
                .position(|count| !count.is_finite() || *count < 0.0)
            {
                let index = num::to_u32(at);
                return Err(ProfileError::BadCount {
                    layer,
                    index,
                    count: of_layer[at],
                });
            }
            let sum: f64 = of_layer.iter().map(|&count| f64::from(count)).sum();
            let scale = if sum > 0.0 {
                f64::from(shape.top_k_in(layer)) / sum
            } else {
                0.0
            };
            probability.extend(
                of_layer
                    .iter()
                    .map(|&count| num::narrow((f64::from(count) * scale).min(1.0))),
            );
        }
        Ok(Self { probability })
    }

    /// Probability per expert that a token is routed to it.
    #[must_use]
    pub fn probabilities(&self) -> &[f32] {
        &self.probability
    }

    /// Probability that a token is routed to `expert`.
    #[must_use]
    pub fn probability(&self, expert: ExpertId) -> f32 {
        self.probability.get(expert.index()).copied().unwrap_or(0.0)
    }
}
