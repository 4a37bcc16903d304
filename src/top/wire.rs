//! What a server sends, as far as it is shown (docs/api.md has all of it).

use crate::governor::Entry;
use serde::Deserialize;

/// `/api/state`.
#[derive(Debug, Clone, Deserialize)]
pub struct State {
    /// `loading`, `ready` or `stopping`.
    pub phase: String,
    /// How far loading is.
    pub loading: Option<Loading>,
    /// The model, once it is loaded.
    pub model: Option<Model>,
    /// Its MoE layers.
    pub layers: Option<Vec<Layer>>,
    /// The changing part.
    pub now: Tick,
}

/// How far loading is.
#[derive(Debug, Clone, Deserialize)]
pub struct Loading {
    /// `loading` or `pinning`.
    pub step: String,
    /// 0 to 1.
    pub fraction: f64,
}

/// The model and how it runs.
#[derive(Debug, Clone, Deserialize)]
pub struct Model {
    /// Its name.
    pub id: String,
    /// Bytes of all experts.
    pub expert_bytes: u64,
    /// The policy.
    pub policy: String,
    /// The store; `null` under `off`.
    pub store: Option<String>,
    /// Requests decoded together.
    pub parallel: u64,
}

/// A MoE layer.
#[derive(Debug, Clone, Deserialize)]
pub struct Layer {
    /// Its block in the model.
    pub block: Option<u32>,
    /// Its experts.
    pub experts: usize,
}

/// A message of `/api/events`.
#[derive(Debug, Clone, Deserialize)]
pub struct Tick {
    /// Seconds since the program started to serve.
    pub uptime_s: f64,
    /// The tick as in the journal.
    pub tick: Option<Entry>,
    /// Why the control loop has ended.
    pub failed: Option<String>,
    /// Whether the pinned set is frozen.
    pub paused: bool,
    /// Running totals.
    pub totals: Totals,
    /// Requests.
    pub requests: Requests,
    /// Every expert, where they differ from the last message.
    pub experts: Option<Experts>,
}

/// Running totals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
pub struct Totals {
    /// Tokens generated.
    pub decode_tokens: u64,
    /// Prompt tokens decoded.
    pub prompt_tokens: u64,
    /// Routed experts that were resident.
    pub hits: u64,
    /// Routed experts that were not.
    pub misses: u64,
    /// Bytes read.
    pub fetch_bytes: u64,
    /// Time waited for expert bytes, ms.
    pub stall_ms: f64,
    /// Major faults; `None` where unknown.
    pub major_faults: Option<u64>,
    /// Times that drift was detected.
    pub drift_events: u64,
}

/// Requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
pub struct Requests {
    /// They wait.
    pub queued: u64,
    /// They are answered now.
    pub running: u64,
    /// They were answered.
    pub finished: u64,
    /// Their clients went away.
    pub cancelled: u64,
    /// They failed.
    pub failed: u64,
    /// They found the queue full.
    pub refused: u64,
}

/// Every expert in one character each.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Experts {
    /// `P`, `t` or `.`.
    pub residence: String,
    /// Digits of base64, 0 to 63.
    pub score: String,
}
