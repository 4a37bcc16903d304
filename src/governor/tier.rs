//! The tier in a graphics device's memory as journals, metrics and people are told of it.

use crate::plant::Outcome;
use crate::size::format_bytes;
use crate::time::millis;
use hotpin_controllers::vram::{ChangeKind, VramCeiling, VramRule};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A change of the pool or of what is on the device for good, as written. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VramChange {
    /// What there is: `cpu`, `reload` or `static`.
    #[serde(default)]
    pub arrangement: String,
    /// What was made anew: `recreate` for the context, `reload` for the model as well.
    #[serde(default)]
    pub kind: Option<ChangeKind>,
    /// What was ordered.
    pub asked_bytes: u64,
    /// What there was.
    pub before_bytes: u64,
    /// What there is.
    pub bytes: u64,
    /// Sequences that were saved and put back.
    pub state_bytes: u64,
    /// Time that it took, milliseconds.
    pub took_ms: f64,
    /// Why it is not what was ordered.
    pub refused: Option<String>,
}

/// The tier at a tick, as written. Sizes in bytes; what is not known is `null`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VramEntry {
    /// Where experts are used from while batches are small: `cpu`, `reload` or `static`.
    pub arrangement: String,
    /// Bytes of the pool that there is.
    pub pool_bytes: u64,
    /// Slots of the pool, each for one expert.
    #[serde(default)]
    pub slots: u64,
    /// Bytes of whole layers' experts that are there for good.
    #[serde(default)]
    pub static_bytes: u64,
    /// The MoE layers that they are of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub static_layers: Vec<usize>,
    /// What the law gave them, of which whole layers fill a part.
    #[serde(default)]
    pub given_static_bytes: u64,
    /// What the law wants: `cpu`, `reload` or `static`.
    #[serde(default)]
    pub wanted: String,
    /// Bytes of it.
    pub wanted_bytes: u64,
    /// The rule that says so.
    pub rule: VramRule,
    /// Lowest ceiling.
    pub capacity_bytes: u64,
    /// Which one that is.
    pub binding: VramCeiling,
    /// Every ceiling that is known.
    pub ceilings: BTreeMap<String, u64>,
    /// Free memory of the device.
    pub free_bytes: Option<u64>,
    /// All of its memory.
    pub total_bytes: Option<u64>,
    /// Routed experts found in pools since the start.
    pub hits: u64,
    /// Those that had to be copied to the device.
    pub misses: u64,
    /// Bytes copied for them.
    pub uploaded_bytes: u64,
    /// Experts that are stable there, so that they need not be locked in RAM.
    pub covered_experts: u64,
    /// Measured time of a token now, milliseconds.
    pub present_ms: Option<f64>,
    /// Expected with a pool at the lowest ceiling.
    pub reload_ms: Option<f64>,
    /// Expected with whole layers' experts in the device's memory.
    pub static_ms: Option<f64>,
    /// Expected with all experts on the processor.
    pub cpu_ms: Option<f64>,
    /// Changes since the last tick.
    pub changes: Vec<VramChange>,
}

/// What pools of other sizes would do.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct VramPoint {
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Part of routed experts that it would hold.
    pub hit_ratio: f64,
}

impl VramEntry {
    /// Whether this tick deserves a line of its own after `before`.
    pub(super) fn differs(&self, before: &Self) -> bool {
        !self.changes.is_empty()
            || self.rule != before.rule
            || self.binding != before.binding
            || self.wanted_bytes != before.wanted_bytes
            || self.wanted != before.wanted
    }

    /// The tier in words, for people.
    #[must_use]
    pub fn words(&self) -> String {
        let what = match self.arrangement.as_str() {
            "reload" => format!(
                "a pool of {} for experts, {} slots",
                format_bytes(self.pool_bytes),
                self.slots
            ),
            "static" => format!(
                "{} of whole layers' experts for good",
                format_bytes(self.static_bytes)
            ),
            _ => "no experts".to_owned(),
        };
        let hits = self.hit_ratio().map_or_else(
            || "none routed there".to_owned(),
            |ratio| format!("{:.1}% there when routed", ratio * 100.0),
        );
        let next = if self.wanted == self.arrangement
            && self.wanted_bytes == self.pool_bytes + self.given_static_bytes
        {
            String::new()
        } else {
            format!(
                "; {} of {} is due",
                self.wanted,
                format_bytes(self.wanted_bytes)
            )
        };
        format!(
            "{what} (rule {}, bounded by {}), {hits}, {} copied to it{next}",
            self.rule.label(),
            self.binding.label(),
            format_bytes(self.uploaded_bytes)
        )
    }

    /// A pool of 3 slots that another program was given way to.
    #[cfg(test)]
    pub(crate) fn example() -> Self {
        Self {
            arrangement: "reload".into(),
            pool_bytes: 3 << 20,
            slots: 3,
            static_bytes: 0,
            static_layers: Vec::new(),
            given_static_bytes: 0,
            wanted: "reload".into(),
            wanted_bytes: 2 << 20,
            rule: VramRule::Yield,
            capacity_bytes: 2 << 20,
            binding: VramCeiling::Memory,
            ceilings: [
                ("memory".to_owned(), 2 << 20),
                ("model".to_owned(), 8 << 20),
            ]
            .into(),
            free_bytes: Some(1 << 20),
            total_bytes: Some(16 << 20),
            hits: 30,
            misses: 10,
            uploaded_bytes: 5 << 20,
            covered_experts: 2,
            present_ms: Some(4.0),
            reload_ms: Some(3.5),
            static_ms: Some(6.0),
            cpu_ms: None,
            changes: vec![VramChange {
                arrangement: "reload".into(),
                kind: Some(ChangeKind::Recreate),
                asked_bytes: 3 << 20,
                before_bytes: 0,
                bytes: 3 << 20,
                state_bytes: 1 << 10,
                took_ms: 12.0,
                refused: None,
            }],
        }
    }

    /// Part of the routed experts that were found in the device's memory; `None` before any was routed
    /// there.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub fn hit_ratio(&self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }
}

impl From<&Outcome> for VramChange {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Pool(change) => Self {
                arrangement: if change.bytes == 0 { "cpu" } else { "reload" }.to_owned(),
                kind: Some(ChangeKind::Recreate),
                asked_bytes: change.asked_bytes,
                before_bytes: change.before_bytes,
                bytes: change.bytes,
                state_bytes: change.state_bytes,
                took_ms: millis(change.took_ns),
                refused: change.refused.clone(),
            },
            Outcome::Placed(change) => Self {
                arrangement: change.now.label().to_owned(),
                kind: Some(ChangeKind::Reload),
                asked_bytes: change.asked.bytes(),
                before_bytes: change.before.bytes(),
                bytes: change.now.bytes(),
                state_bytes: change.state_bytes,
                took_ms: millis(change.took_ns),
                refused: change.refused.clone(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::VramEntry;

    #[test]
    fn each_arrangement_is_told_in_words() {
        let pool = VramEntry::example();
        assert_eq!(
            pool.words(),
            "a pool of 3.00 MiB for experts, 3 slots (rule yield, bounded by memory), 75.0% there when routed, 5.00 MiB copied to it; reload of 2.00 MiB is due"
        );
        let placed = VramEntry {
            arrangement: "static".into(),
            pool_bytes: 0,
            static_bytes: 4 << 20,
            wanted: "static".into(),
            wanted_bytes: 5 << 20,
            given_static_bytes: 5 << 20,
            hits: 0,
            misses: 0,
            ..pool
        };
        let words = placed.words();
        assert!(
            words.starts_with("4.00 MiB of whole layers' experts"),
            "{words}"
        );
        assert!(
            words.contains("none routed there") && !words.contains("due"),
            "{words}"
        );
    }
}
