//! What every handler sees: the state of the server and its limits.

use super::openai::ApiError;
use super::queue::Queue;
use super::stats::Stats;
use crate::engine::Model;
use crate::engine::chat::Chat;
use crate::governor::Monitor;
use crate::plant::Counters;
use crate::store::Limited;
use axum::http::StatusCode;
use hotpin_controllers::{ModelShape, PolicyKind};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;

/// Bodies of the greatest length that are kept at once.
const BODIES: usize = 16;

/// Bounds on what clients may ask for and how long they may take.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Connections at once.
    pub connections: usize,
    /// Requests that wait for a sequence.
    pub queue: usize,
    /// Tokens that one request may generate; `None` for as many as fit the context.
    pub tokens: Option<u32>,
    /// Time for a request's head to arrive, and again for its body.
    pub receive: Duration,
    /// Time for a client to take any part of what it is sent.
    pub send: Duration,
    /// Time from queueing to the end of a generation; `None` for any.
    pub generation: Option<Duration>,
    /// Time that running generations get after the server was told to stop.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 4 << 20,
            connections: 1024,
            queue: 32,
            tokens: None,
            receive: Duration::from_secs(30),
            send: Duration::from_secs(60),
            generation: None,
            drain: Duration::from_secs(30),
        }
    }
}

/// A key, kept as its hash, so that comparing tells nothing of it, its length included.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// A key from its text.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(Sha256::digest(text).into())
    }

    /// Whether `text` is the key, in a time that does not depend on where they differ.
    #[must_use]
    pub fn is(&self, text: &[u8]) -> bool {
        let other: [u8; 32] = Sha256::digest(text).into();
        self.0.ct_eq(&other).into()
    }
}

/// How far the server is.
#[derive(Debug, Clone)]
pub enum Phase {
    /// The model is being made ready.
    Loading {
        /// `loading` or `pinning`.
        step: &'static str,
        /// Part of the step that is done, 0 to 1.
        fraction: f32,
    },
    /// Requests are served.
    Ready(Arc<Ready>),
    /// No new requests are taken.
    Stopping,
}

/// What is known once the model is loaded.
#[derive(Debug)]
pub struct Ready {
    /// The model, or its vocabulary alone where the weights may be loaded anew.
    pub model: Arc<Model>,
    /// Its chat template.
    pub chat: Chat,
    /// What can be said of it.
    pub info: ModelInfo,
    /// Tokens that one request's context holds.
    pub n_ctx: usize,
    /// The governor, where there is one.
    pub monitor: Option<Monitor>,
    /// What the session has to do without.
    pub limitations: Vec<Limited>,
    /// The engine's counters.
    pub counters: Arc<Counters>,
    /// The shape of its experts; `None` for a dense model.
    pub shape: Option<ModelShape>,
    /// Block number of each MoE layer.
    pub blocks: Vec<u32>,
    /// When it was ready.
    pub since: Instant,
}

/// A model and how it is run.
#[derive(Debug, Clone, Serialize)]
pub struct ModelInfo {
    /// The name that requests give.
    pub id: String,
    /// Bytes of its file.
    pub file_bytes: u64,
    /// The architecture.
    pub architecture: String,
    /// Bytes of all experts.
    pub expert_bytes: u64,
    /// Bytes of experts that one token touches.
    pub token_cycle_bytes: u64,
    /// Policy in force.
    pub policy: PolicyKind,
    /// Store in force; `null` under `off` and for dense models.
    pub store: Option<&'static str>,
    /// Context of one request, tokens.
    pub n_ctx: usize,
    /// Requests that are decoded together.
    pub parallel: usize,
    /// Logical batch, tokens.
    pub n_batch: u32,
    /// Physical batch, tokens.
    pub n_ubatch: u32,
    /// Compute threads.
    pub threads: u32,
}

/// The server's state, shared by everything on its HTTP side and the engine's thread.
#[derive(Debug)]
pub struct App {
    /// The name that requests give the model.
    pub name: String,
    /// The key, when one is needed.
    pub key: Option<Key>,
    /// Whether requests come from this machine only.
    pub loopback: bool,
    /// Bounds.
    pub limits: Limits,
    /// Jobs that wait.
    pub queue: Arc<Queue>,
    /// Counters.
    pub stats: Arc<Stats>,
    /// Bytes that all bodies together may still take.
    pub bodies: Semaphore,
    /// When the program started to serve.
    pub started: Instant,
    phase: RwLock<Phase>,
}

impl App {
    /// A server that is loading.
    #[must_use]
    pub fn new(name: String, key: Option<Key>, loopback: bool, limits: Limits) -> Self {
        Self {
            name,
            key,
            loopback,
            queue: Arc::new(Queue::new(limits.queue)),
            bodies: Semaphore::new(
                limits
                    .body_bytes
                    .saturating_mul(BODIES)
                    .min(Semaphore::MAX_PERMITS),
            ),
            limits,
            stats: Arc::default(),
            started: Instant::now(),
            phase: RwLock::new(Phase::Loading {
                step: "loading",
                fraction: 0.0,
            }),
        }
    }

    /// How far the server is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Goes on to the next phase. Nothing follows [`Phase::Stopping`].
    pub fn enter(&self, next: Phase) {
        let mut phase = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*phase, Phase::Stopping) {
            *phase = next;
        }
    }

    /// Whether the server was told to stop.
    #[must_use]
    pub fn stops(&self) -> bool {
        matches!(self.phase(), Phase::Stopping)
    }

    /// The loaded model.
    ///
    /// # Errors
    /// 503 until it is there, and when the server is stopping.
    pub fn ready(&self) -> Result<Arc<Ready>, ApiError> {
        match self.phase() {
            Phase::Ready(ready) => Ok(ready),
            Phase::Loading { .. } => Err(ApiError::unavailable("the model is still loading", 2)),
            Phase::Stopping => Err(ApiError::unavailable("the server is shutting down", 5)),
        }
    }

    /// Checks the model that a request names, if it does.
    ///
    /// # Errors
    /// 404 when this server has another one.
    pub fn check_model(&self, named: Option<&str>) -> Result<(), ApiError> {
        match named {
            Some(name) if name != self.name => Err(ApiError {
                param: Some("model".into()),
                ..ApiError::plain(
                    StatusCode::NOT_FOUND,
                    "invalid_request_error",
                    format!(
                        "there is no model {name:?} here; this server has {:?}",
                        self.name
                    ),
                )
                .with_code("model_not_found")
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Key;

    #[test]
    fn a_key_is_itself_only() {
        let key = Key::new("secret");
        assert!(key.is(b"secret"));
        for other in ["", "secre", "secret ", "Secret", "secretsecret"] {
            assert!(!key.is(other.as_bytes()), "{other:?}");
        }
        assert!(!format!("{key:?}").contains("secret"));
    }
}
