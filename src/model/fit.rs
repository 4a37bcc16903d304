//! Whether a model fits the memory there is, and what that means for it.

use super::map::ModelMap;
use crate::size::format_bytes;
use serde::Serialize;

/// What the model asks of memory, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Demand {
    /// Dense weights.
    pub dense_bytes: u64,
    /// All experts; 0 when the model is dense.
    pub expert_bytes: u64,
    /// Experts that one token touches.
    pub token_cycle_bytes: u64,
}

impl Demand {
    /// The demand of a model.
    #[must_use]
    pub fn of(map: &ModelMap) -> Self {
        Self {
            dense_bytes: map.dense_bytes(),
            expert_bytes: map.expert_bytes(),
            token_cycle_bytes: map.token_cycle_bytes(),
        }
    }
}

/// The memory there is, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Available now, whichever of host and cgroup has less.
    pub available_bytes: u64,
    /// To be left to KV, page cache and other programs.
    pub reserve_bytes: u64,
}

impl Memory {
    /// What weights may take: available without the reserve.
    #[must_use]
    pub fn usable_bytes(self) -> u64 {
        self.available_bytes.saturating_sub(self.reserve_bytes)
    }
}

/// How a model and the memory there is go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// MoE, and all of it fits.
    All,
    /// MoE, and the dense weights and at least one token cycle of experts fit.
    Control,
    /// MoE, and the dense weights fit, but not one token cycle with them.
    BelowTokenCycle,
    /// MoE, and not even the dense weights fit.
    BelowDense,
    /// Not a MoE model.
    Dense,
}

/// A [`Fit`] with the figures it was judged by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Judgement {
    /// The verdict.
    pub verdict: Fit,
    /// What the model asks for.
    #[serde(flatten)]
    pub demand: Demand,
    /// What there is.
    #[serde(flatten)]
    pub memory: Memory,
    /// What weights may take, bytes.
    pub usable_bytes: u64,
    /// The verdict in plain words.
    pub sentence: String,
}

impl Judgement {
    /// Judges `demand` against `memory`.
    #[must_use]
    pub fn new(demand: Demand, memory: Memory) -> Self {
        let verdict = Fit::of(demand, memory.usable_bytes());
        Self {
            verdict,
            demand,
            memory,
            usable_bytes: memory.usable_bytes(),
            sentence: sentence(verdict, demand, memory.usable_bytes()),
        }
    }
}

impl Fit {
    /// The verdict for weights that may take `usable_bytes`.
    #[must_use]
    pub fn of(demand: Demand, usable_bytes: u64) -> Self {
        let Some(experts_may) = usable_bytes.checked_sub(demand.dense_bytes) else {
            return if demand.expert_bytes == 0 {
                Self::Dense
            } else {
                Self::BelowDense
            };
        };
        match demand {
            Demand {
                expert_bytes: 0, ..
            } => Self::Dense,
            Demand { expert_bytes, .. } if expert_bytes <= experts_may => Self::All,
            Demand {
                token_cycle_bytes, ..
            } if token_cycle_bytes <= experts_may => Self::Control,
            _ => Self::BelowTokenCycle,
        }
    }
}

fn sentence(verdict: Fit, demand: Demand, usable_bytes: u64) -> String {
    let usable = format_bytes(usable_bytes);
    let dense = format_bytes(demand.dense_bytes);
    let experts = format_bytes(demand.expert_bytes);
    let cycle = format_bytes(demand.token_cycle_bytes);
    let all = format_bytes(demand.dense_bytes.saturating_add(demand.expert_bytes));
    match verdict {
        Fit::All => format!(
            "The model ({all}) fits in the {usable} that weights may take: locking everything is best."
        ),
        Fit::Control => format!(
            "The model ({all}) is larger than the {usable} that weights may take; {} are left for \
             experts after the dense weights, of {experts}: keeping the hot ones locked pays.",
            format_bytes(usable_bytes.saturating_sub(demand.dense_bytes))
        ),
        Fit::BelowTokenCycle => format!(
            "After the dense weights ({dense}) the {usable} that weights may take do not hold the \
             experts of a single token ({cycle}): every token will read from disk. Free memory, \
             lower the reserve or use a smaller quantisation."
        ),
        Fit::BelowDense => format!(
            "The {usable} that weights may take do not even hold the dense weights ({dense}), which \
             every token uses: this will be very slow. Free memory, lower the reserve or use a \
             smaller model."
        ),
        Fit::Dense if demand.dense_bytes <= usable_bytes => format!(
            "This is a dense model ({all}): it has no experts, so there is nothing to pin. It fits \
             in the {usable} that weights may take and runs as llama.cpp runs it."
        ),
        Fit::Dense => format!(
            "This is a dense model ({all}): it has no experts, so there is nothing to pin. It is \
             larger than the {usable} that weights may take, so every token will read from disk."
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOE: Demand = Demand {
        dense_bytes: 100,
        expert_bytes: 1000,
        token_cycle_bytes: 50,
    };

    fn check(demand: Demand, usable_bytes: u64, verdict: Fit, words: &str) {
        let memory = Memory {
            available_bytes: usable_bytes + 7,
            reserve_bytes: 7,
        };
        let judgement = Judgement::new(demand, memory);
        assert_eq!(judgement.verdict, verdict, "{demand:?} in {usable_bytes}");
        assert_eq!(judgement.usable_bytes, usable_bytes);
        assert!(judgement.sentence.contains(words), "{}", judgement.sentence);
    }

    #[test]
    fn verdicts_change_exactly_at_their_bounds() {
        check(MOE, 1100, Fit::All, "locking everything is best");
        check(MOE, 1099, Fit::Control, "hot ones locked");
        check(MOE, 150, Fit::Control, "hot ones locked");
        check(MOE, 149, Fit::BelowTokenCycle, "single token");
        check(MOE, 100, Fit::BelowTokenCycle, "single token");
        check(MOE, 99, Fit::BelowDense, "do not even hold");
        check(MOE, 0, Fit::BelowDense, "do not even hold");
    }

    #[test]
    fn a_dense_model_has_nothing_to_pin() {
        let dense = Demand {
            dense_bytes: 100,
            expert_bytes: 0,
            token_cycle_bytes: 0,
        };
        check(dense, 100, Fit::Dense, "nothing to pin. It fits");
        check(dense, 99, Fit::Dense, "nothing to pin. It is larger");
    }

    #[test]
    fn a_reserve_above_what_is_available_leaves_nothing() {
        let memory = Memory {
            available_bytes: 5,
            reserve_bytes: 6,
        };
        assert_eq!(memory.usable_bytes(), 0);
        assert_eq!(Judgement::new(MOE, memory).verdict, Fit::BelowDense);
    }

    #[test]
    fn absurd_sizes_do_not_overflow() {
        let absurd = Demand {
            dense_bytes: u64::MAX,
            expert_bytes: u64::MAX,
            token_cycle_bytes: u64::MAX,
        };
        assert_eq!(Fit::of(absurd, u64::MAX), Fit::BelowTokenCycle);
        let memory = Memory {
            available_bytes: u64::MAX,
            reserve_bytes: 0,
        };
        assert!(!Judgement::new(absurd, memory).sentence.is_empty());
    }
}
