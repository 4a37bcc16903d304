//! A generation that was asked for, and what comes back from it.

use crate::engine::{Constraint, Likelihood, Poison, SamplerOptions, Token};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::mpsc;

/// What to generate. Nothing in it is checked again: tokens fit the context, stop texts are not empty.
#[derive(Debug)]
pub struct Job {
    /// The request's id, as its response carries it.
    pub id: String,
    /// The prompt; not empty.
    pub prompt: Vec<Token>,
    /// How tokens are chosen.
    pub sampling: SamplerOptions,
    /// What the output must follow.
    pub constraint: Option<Constraint>,
    /// Texts that end the output; they are not part of it.
    pub stops: Vec<String>,
    /// A text that ends the output when it appears a second time.
    pub once: Option<String>,
    /// Control tokens that are to appear as text.
    pub shown: Vec<Token>,
    /// Most tokens to generate.
    pub most: u32,
    /// Likeliest tokens to report at each position, if any are.
    pub likelihoods: Option<u8>,
    /// Whether what is in the context already may be used.
    pub reuse: bool,
    /// When the generation must end.
    pub deadline: Option<Instant>,
    /// When it was queued.
    pub queued: Instant,
    /// Whether its reader has gone.
    pub gone: Arc<Gone>,
    /// Where output goes. It never waits: a job has at most `most` pieces.
    pub output: mpsc::UnboundedSender<Event>,
}

const WENT: &str = "the client went away";

/// Says that nobody waits for a job any more, and stops the decode of its prompt.
#[derive(Debug, Default)]
pub struct Gone {
    set: AtomicBool,
    /// The engine's flag, while it decodes this job's prompt and nothing else.
    armed: Mutex<Option<Arc<Poison>>>,
}

impl Gone {
    /// Whether the reader has gone.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.set.load(Acquire)
    }

    pub(super) fn set(&self) {
        self.set.store(true, Release);
        if let Some(poison) = &*self.armed() {
            poison.set(WENT.into());
        }
    }

    /// Runs `decode`, which is stopped when the reader goes.
    pub(super) fn watch<T>(&self, poison: &Arc<Poison>, decode: impl FnOnce() -> T) -> T {
        *self.armed() = Some(Arc::clone(poison));
        // Whoever went before that found nothing to stop.
        if self.is_set() {
            poison.set(WENT.into());
        }
        let outcome = decode();
        *self.armed() = None;
        // Set between the end of the decode and here, it would stop the next one.
        if self.is_set() {
            let _ = poison.take();
        }
        outcome
    }

    fn armed(&self) -> MutexGuard<'_, Option<Arc<Poison>>> {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a job sends.
#[derive(Debug)]
pub enum Event {
    /// Text that is certain, and the tokens that it came from when likelihoods were asked for.
    Piece(Piece),
    /// The end.
    Done(Done),
    /// It could not be finished.
    Failed(Failure),
}

/// A piece of output.
#[derive(Debug, Default)]
pub struct Piece {
    /// Text; may be empty when only tokens are told.
    pub text: String,
    /// Tokens with their likelihoods.
    pub tokens: Vec<TokenReport>,
}

/// One token with its likelihood and those of its rivals.
#[derive(Debug, Clone)]
pub struct TokenReport {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// The likeliest at this position: bytes and logarithms.
    pub top: Vec<(Vec<u8>, f32)>,
}

impl TokenReport {
    pub(super) fn new(
        chosen: Likelihood,
        top: &[Likelihood],
        bytes: impl Fn(Token) -> Vec<u8>,
    ) -> Self {
        Self {
            bytes: bytes(chosen.token),
            logprob: chosen.logprob,
            top: top.iter().map(|l| (bytes(l.token), l.logprob)).collect(),
        }
    }
}

/// How a generation ended.
#[derive(Debug, Clone)]
pub struct Done {
    /// Why.
    pub finish: Finish,
    /// What it used.
    pub usage: Usage,
    /// How long it took.
    pub timings: Timings,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended it, or a stop text appeared.
    Stop,
    /// The token limit was reached, or the context is full.
    Length,
}

/// Tokens that a generation used.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Those of them that were in the context already.
    pub cached_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
}

/// Times of a generation, seconds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Timings {
    /// In the queue.
    pub queue_s: f64,
    /// From leaving the queue until the prompt was decoded.
    pub prompt_s: f64,
    /// From then to the end.
    pub decode_s: f64,
}

/// Why a generation could not be finished.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The engine failed.
    #[error("the engine failed: {0}")]
    Engine(String),
    /// The output grammar cannot be followed.
    #[error("{0}")]
    Grammar(String),
    /// It took longer than the server allows.
    #[error("the generation took longer than this server allows")]
    Deadline,
    /// The server is shutting down.
    #[error("the server is shutting down")]
    Shutdown,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_goes_before_or_during_a_decode_stops_it_and_no_other_one() {
        let poison = Arc::new(Poison::default());
        let gone = Gone::default();
        assert!(!gone.watch(&poison, || poison.is_set()));
        gone.watch(&poison, || gone.set());
        assert!(!poison.is_set(), "the next decode is not stopped by it");
        assert!(
            gone.watch(&poison, || poison.is_set()),
            "gone before it began"
        );
        assert!(!poison.is_set());
        gone.set();
        assert!(!poison.is_set(), "nothing of it is under way");
    }
}
