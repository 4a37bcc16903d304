//! What the server counts: requests, tokens, and how long a token took.

use super::job::{Timings, Usage};
use crate::time::seconds;
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Upper bounds of the buckets of token times, seconds: a factor of about 1.6 apart.
pub const TOKEN_BOUNDS_S: [f64; 18] = [
    0.002, 0.003, 0.005, 0.008, 0.013, 0.02, 0.03, 0.05, 0.08, 0.13, 0.2, 0.3, 0.5, 0.8, 1.3, 2.0,
    5.0, 20.0,
];
/// Finished requests that are remembered.
const REMEMBERED: usize = 64;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was answered.
    Finished,
    /// Its client went away.
    Cancelled,
    /// It failed.
    Failed,
    /// The queue was full.
    Refused,
}

impl Outcome {
    /// All, in the order of the counters.
    pub const ALL: [Self; 4] = [Self::Finished, Self::Cancelled, Self::Failed, Self::Refused];

    /// The label used in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
            Self::Refused => "refused",
        }
    }
}

/// A finished request, without anything that was said in it.
#[derive(Debug, Clone, Serialize)]
pub struct Finished {
    /// Its id.
    pub id: String,
    /// Seconds since the server was ready.
    pub at_s: f64,
    /// How it ended.
    pub outcome: Outcome,
    /// Its tokens.
    #[serde(flatten)]
    pub usage: Usage,
    /// Its times.
    #[serde(flatten)]
    pub timings: Timings,
}

/// Counters, written by the engine's thread and read by anyone.
#[derive(Debug, Default)]
pub struct Stats {
    outcomes: [AtomicU64; 4],
    running: AtomicU64,
    rounds: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    token_ns: AtomicU64,
    token_buckets: [AtomicU64; TOKEN_BOUNDS_S.len() + 1],
    recent: Mutex<VecDeque<Finished>>,
}

/// A copy of the histogram of token times.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenTimes {
    /// Tokens in each bucket, the last one open.
    pub counts: Vec<u64>,
    /// Their sum, seconds.
    pub sum_s: f64,
}

/// The scalar counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Requests that hold a sequence.
    pub running: u64,
    /// Requests answered.
    pub finished: u64,
    /// Requests whose client went away.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests that found the queue full.
    pub refused: u64,
    /// Prompt tokens, without those in the context already.
    pub prompt_tokens: u64,
    /// Prompt tokens that were in the context already.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
}

impl Stats {
    pub(super) fn ended(&self, outcome: Outcome) {
        self.outcomes[outcome as usize].fetch_add(1, Relaxed);
    }

    pub(super) fn set_running(&self, running: usize) {
        self.running.store(running as u64, Relaxed);
    }

    /// The engine's thread has come round.
    pub fn round(&self) {
        self.rounds.fetch_add(1, Relaxed);
    }

    pub(super) fn rounds(&self) -> u64 {
        self.rounds.load(Relaxed)
    }

    pub(super) fn prompt(&self, decoded: usize, cached: usize) {
        self.prompt_tokens.fetch_add(decoded as u64, Relaxed);
        self.cached_tokens.fetch_add(cached as u64, Relaxed);
    }

    /// A token was chosen.
    pub(super) fn chosen(&self) {
        self.generated_tokens.fetch_add(1, Relaxed);
    }

    /// `tokens` tokens were decoded, which took `ns`.
    pub(super) fn decoded(&self, tokens: usize, ns: u64) {
        let tokens = tokens as u64;
        self.token_ns.fetch_add(ns.saturating_mul(tokens), Relaxed);
        let s = seconds(ns);
        let bucket = TOKEN_BOUNDS_S.partition_point(|&bound| bound < s);
        self.token_buckets[bucket].fetch_add(tokens, Relaxed);
    }

    pub(super) fn remember(&self, finished: Finished) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if recent.len() == REMEMBERED {
            recent.pop_front();
        }
        recent.push_back(finished);
    }

    /// The requests that finished last, oldest first.
    #[must_use]
    pub fn recent(&self) -> Vec<Finished> {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.iter().cloned().collect()
    }

    /// Seconds that the last requests took on average, which is when a place becomes free; rounded up.
    #[must_use]
    pub fn turn_s(&self) -> u32 {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let took = |f: &Finished| f.timings.prompt_s + f.timings.decode_s;
        let sum: f64 = recent.iter().map(took).sum();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a saturating cast of a time"
        )]
        let mean = (sum / recent.len().max(1) as f64).ceil() as u32;
        mean
    }

    /// Requests by outcome.
    #[must_use]
    pub fn outcome(&self, outcome: Outcome) -> u64 {
        self.outcomes[outcome as usize].load(Relaxed)
    }

    /// The scalar counters.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts {
            running: self.running.load(Relaxed),
            finished: self.outcome(Outcome::Finished),
            cancelled: self.outcome(Outcome::Cancelled),
            failed: self.outcome(Outcome::Failed),
            refused: self.outcome(Outcome::Refused),
            prompt_tokens: self.prompt_tokens.load(Relaxed),
            cached_tokens: self.cached_tokens.load(Relaxed),
            generated_tokens: self.generated_tokens.load(Relaxed),
        }
    }

    /// The histogram of token times.
    #[must_use]
    pub fn token_times(&self) -> TokenTimes {
        TokenTimes {
            counts: self.token_buckets.iter().map(|b| b.load(Relaxed)).collect(),
            sum_s: seconds(self.token_ns.load(Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Stats, TOKEN_BOUNDS_S};

    #[test]
    fn token_times_fall_into_the_bucket_that_bounds_them() {
        let stats = Stats::default();
        stats.decoded(1, 2_000_000);
        stats.decoded(3, 2_000_001);
        stats.decoded(1, 60_000_000_000);
        let times = stats.token_times();
        assert_eq!(times.counts[0], 1, "at the bound");
        assert_eq!(times.counts[1], 3, "just above it");
        assert_eq!(times.counts[TOKEN_BOUNDS_S.len()], 1);
        assert_eq!(times.counts.iter().sum::<u64>(), 5);
        assert!((times.sum_s - 60.008).abs() < 1e-5, "{}", times.sum_s);
    }
}
