//! The cache policies by name.

use super::ReplayError;
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// The policies that replay knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReplayPolicy {
    /// The most frequent experts of the first tokens, resident from the start and never changed.
    Static,
    /// Evict what was used least recently.
    Lru,
    /// Evict the lowest of two decayed rates; a miss enters only when it is above the victim.
    LfuDecay,
    /// Segmented LRU.
    Slru,
    /// W-TinyLFU.
    WTinylfu,
    /// Adaptive replacement cache.
    Arc,
    /// S3-FIFO.
    S3Fifo,
    /// The ranking of hotpin's adaptive policy.
    Adaptive,
    /// The optimum: evict what is used last, or do not admit (Belady 1966, with bypass).
    Belady,
}

impl ReplayPolicy {
    /// All policies.
    pub const ALL: [Self; 9] = [
        Self::Static,
        Self::Lru,
        Self::LfuDecay,
        Self::Slru,
        Self::WTinylfu,
        Self::Arc,
        Self::S3Fifo,
        Self::Adaptive,
        Self::Belady,
    ];

    /// The name on the command line.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Lru => "lru",
            Self::LfuDecay => "lfu-decay",
            Self::Slru => "slru",
            Self::WTinylfu => "w-tinylfu",
            Self::Arc => "arc",
            Self::S3Fifo => "s3-fifo",
            Self::Adaptive => "adaptive",
            Self::Belady => "belady",
        }
    }
}

impl fmt::Display for ReplayPolicy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.label())
    }
}

impl FromStr for ReplayPolicy {
    type Err = ReplayError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.label() == text)
            .ok_or_else(|| ReplayError::UnknownPolicy {
                given: text.to_owned(),
            })
    }
}
