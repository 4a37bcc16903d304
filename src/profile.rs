//! Profiles: how often each expert was routed to, as a starting point for the pinned set.

use crate::model::ModelMap;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Version of the file's layout.
const VERSION: u32 = 1;

/// Why a profile was refused or could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file could not be read or written.
    #[error("profile {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is not a profile.
    #[error("profile {path} could not be read: {detail}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong and where.
        detail: String,
    },
    /// Another version of this program wrote it.
    #[error("profile {path} has version {version}, and this program reads version {VERSION}")]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// The profile is of another model.
    #[error(
        "profile {path} was made for {theirs}, and this model is {ours}; make one with `hotpin profile`"
    )]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// Model of the profile, name and shape.
        theirs: String,
        /// Model at hand, name and shape.
        ours: String,
    },
}

/// Routing counts of one MoE layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCounts {
    /// Block index in the model.
    pub block: u32,
    /// Times that each expert was routed to.
    pub counts: Vec<u64>,
}

/// Expert counts of one model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Version of this layout.
    pub version: u32,
    /// Model name.
    pub model: String,
    /// Model architecture.
    pub architecture: String,
    /// Fingerprint of the model's shapes and types.
    pub fingerprint: String,
    /// Tokens that were counted.
    pub tokens: u64,
    /// One entry a MoE layer, in order.
    pub layer: Vec<LayerCounts>,
}

impl Profile {
    /// A profile of `map` from counts indexed by expert.
    #[must_use]
    pub fn new(map: &ModelMap, counts: &[u64], tokens: u64) -> Self {
        let mut rest = counts;
        let layer = map
            .layers()
            .iter()
            .map(|l| {
                let (own, others) = rest.split_at(rest.len().min(l.experts as usize));
                rest = others;
                LayerCounts {
                    block: l.block,
                    counts: own.to_vec(),
                }
            })
            .collect();
        Self {
            version: VERSION,
            model: map.name().to_owned(),
            architecture: map.architecture().to_owned(),
            fingerprint: map.fingerprint().to_owned(),
            tokens,
            layer,
        }
    }

    /// Reads a profile and checks that it is one of `map`.
    ///
    /// # Errors
    /// [`ProfileError`], see there.
    pub fn load(path: &Path, map: &ModelMap) -> Result<Self, ProfileError> {
        let malformed = |detail: String| ProfileError::Malformed {
            path: path.to_owned(),
            detail,
        };
        let text = std::fs::read_to_string(path).map_err(|source| ProfileError::Io {
            path: path.to_owned(),
            source,
        })?;
        let profile: Self = toml::from_str(&text).map_err(|e| malformed(e.to_string()))?;
        if profile.version != VERSION {
            return Err(ProfileError::Version {
                path: path.to_owned(),
                version: profile.version,
            });
        }
        let shape = profile.layer.iter().map(|l| (l.block, l.counts.len()));
        let ours = map.layers().iter().map(|l| (l.block, l.experts as usize));
        if profile.fingerprint != map.fingerprint() || !shape.eq(ours) {
            return Err(ProfileError::OtherModel {
                path: path.to_owned(),
                theirs: profile.describe(),
                ours: Self::new(map, &vec![0; map.shape().total_experts()], 0).describe(),
            });
        }
        Ok(profile)
    }

    fn describe(&self) -> String {
        let experts = self.layer.iter().map(|l| l.counts.len()).max().unwrap_or(0);
        let print = self.fingerprint.get(..12).unwrap_or(&self.fingerprint);
        format!(
            "\"{}\" ({}, {} MoE layers of {experts} experts, fingerprint {print})",
            self.model,
            self.architecture,
            self.layer.len()
        )
    }

    /// Counts indexed by expert, for the controllers.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "relative weights; 24 bits suffice"
    )]
    pub fn counts(&self) -> Vec<f32> {
        self.layer
            .iter()
            .flat_map(|l| l.counts.iter().map(|&n| n as f32))
            .collect()
    }

    /// Writes the profile: all of it or nothing.
    ///
    /// # Errors
    /// [`ProfileError::Io`].
    pub fn save(&self, path: &Path) -> Result<(), ProfileError> {
        let text = toml::to_string(self).map_err(|e| ProfileError::Malformed {
            path: path.to_owned(),
            detail: e.to_string(),
        })?;
        crate::files::write_whole(path, &text).map_err(|source| ProfileError::Io {
            path: path.to_owned(),
            source,
        })
    }
}
