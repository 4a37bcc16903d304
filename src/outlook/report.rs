//! An outlook in words.

use super::{Advice, Outlook, Source};
use crate::size::format_bytes;
use std::fmt;

impl Advice {
    /// What to do, in one sentence.
    #[must_use]
    pub const fn sentence(self) -> &'static str {
        match self {
            Self::Fits => "Fits: everything stays in memory, and control has nothing to do.",
            Self::ControlPays => {
                "Control pays: the hot experts stay in memory and follow the topic."
            }
            Self::Uniform => {
                "Control cannot pay: routing is as even as chance, so whichever experts are kept, the \
                 same share of uses reads from disk. More memory or a faster disk helps."
            }
            Self::Dense => "Control cannot pay: a dense model uses every weight for every token.",
            Self::BelowTokenCycle => {
                "Control cannot pay: below one token cycle every token reads its experts from disk. \
                 More memory, or a smaller quantisation."
            }
        }
    }
}

impl fmt::Display for Outlook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} in {}", self.model, format_bytes(self.memory_bytes))?;
        writeln!(f, "{}", self.fit.sentence)?;
        writeln!(
            f,
            "experts        {} of them, room for {} of {}",
            self.total_experts,
            format_bytes(self.capacity_bytes),
            format_bytes(self.fit.demand.expert_bytes),
        )?;
        writeln!(
            f,
            "pinned first   {} experts, {}",
            self.pinned_experts,
            format_bytes(self.pinned_bytes)
        )?;
        if let Some(bytes) = self.lock_limit_bytes {
            writeln!(
                f,
                "lock limit     {}, dense weights included: what is beyond it may be reclaimed; `hotpin doctor {}` tells \
                 how to raise it",
                format_bytes(bytes),
                self.model
            )?;
        }
        let from = match self.from {
            Source::Trace => "from the trace",
            Source::Profile => "from the profile, as long as the topic stays",
            Source::Nothing => "as if all experts were used alike; --profile or --trace tells more",
        };
        match self.hit_ratio {
            Some(hits) => writeln!(
                f,
                "hits           {:.0} to {:.0}%, {from}",
                hits.low * 100.0,
                hits.high * 100.0
            )?,
            None => writeln!(f, "hits           not known")?,
        }
        match self.tok_s {
            Some(speed) => writeln!(f, "tok/s          {:.1} to {:.1}", speed.low, speed.high)?,
            None => writeln!(
                f,
                "tok/s          not known; `hotpin bench {} --calibrate FILE` measures this machine",
                self.model
            )?,
        }
        writeln!(
            f,
            "crawls below   {}",
            format_bytes(self.crawls_below_bytes)
        )?;
        f.write_str(self.advice.sentence())
    }
}
