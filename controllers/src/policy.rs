//! The policies by name.

use crate::Policy;
use crate::adaptive::Adaptive;
use crate::baselines::{Fetch, Lru, Static};
use crate::config::{AdaptiveConfig, ConfigError};
use crate::ids::ModelShape;
use crate::profile::ProfileError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What `--policy` names.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default,
)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKind {
    /// llama.cpp as shipped: nothing is fetched or pinned.
    Off,
    /// Exact-range fetch of routed experts, nothing pinned.
    Fetch,
    /// HotPin: pin the profile once.
    Static,
    /// Pin what was used last.
    Lru,
    /// The regulated set.
    #[default]
    Adaptive,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 5] = [
        Self::Off,
        Self::Fetch,
        Self::Static,
        Self::Lru,
        Self::Adaptive,
    ];

    /// The name on the command line.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Fetch => "fetch",
            Self::Static => "static",
            Self::Lru => "lru",
            Self::Adaptive => "adaptive",
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.label())
    }
}

/// A policy name that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no policy is called {given:?}; there are off, fetch, static, lru and adaptive")]
pub struct UnknownPolicy {
    /// What was given.
    pub given: String,
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.label() == text)
            .ok_or_else(|| UnknownPolicy {
                given: text.to_owned(),
            })
    }
}

/// Why a policy could not be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BuildError {
    /// The configuration is contradictory or out of range.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The profile does not fit the model.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// `static` pins a profile and nothing else.
    #[error("policy static needs a profile: make one with `hotpin profile`")]
    NoProfile,
}

/// Builds a policy for a model. `profile` holds expert counts indexed by [`crate::ExpertId`].
///
/// # Errors
/// When the configuration or the profile is refused, or `static` has no profile.
pub fn build(
    kind: PolicyKind,
    shape: &ModelShape,
    config: &AdaptiveConfig,
    profile: Option<&[f32]>,
) -> Result<Box<dyn Policy>, BuildError> {
    Ok(match kind {
        PolicyKind::Off => Box::new(Fetch::off(shape, config, profile)?),
        PolicyKind::Fetch => Box::new(Fetch::new(shape, config, profile)?),
        PolicyKind::Static => Box::new(Static::new(shape, config, profile)?),
        PolicyKind::Lru => Box::new(Lru::new(shape, config, profile)?),
        PolicyKind::Adaptive => Box::new(Adaptive::new(shape, config, profile)?),
    })
}
