//! The changing part of the state: one message a tick.

use super::app::{App, Phase};
use super::degraded::{InForce, in_force};
use super::stats::Counts;
use crate::governor::{Entry, Monitor};
use crate::plant::Totals;
use crate::time::millis;
use hotpin_controllers::{PressureCause, Residence};
use serde::Serialize;

/// Steps of a score in [`ExpertMap`].
const SCORE_STEPS: f32 = 63.0;
const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// One message of `/api/events`, and the changing part of `/api/state`.
#[derive(Debug, Serialize)]
pub struct Tick {
    /// Ticks since the governor started; `null` where there is none.
    pub number: Option<u64>,
    /// Seconds since the program started to serve.
    pub uptime_s: f64,
    /// The tick as in the journal; `null` where there is no governor.
    pub tick: Option<Entry>,
    /// What holds the pressure ceiling down, while something does.
    pub pressure_cause: Option<PressureCause>,
    /// Why the loop ended, when it did before it was asked to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// What the session has to do without, each by name and with its reason.
    pub degraded: Vec<InForce>,
    /// Whether the pinned set is frozen.
    pub paused: bool,
    /// The ceiling on capacity set by a control, bytes; absent when none was set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub set_capacity_bytes: Option<Option<u64>>,
    /// Running totals.
    pub totals: RunningTotals,
    /// Requests.
    pub requests: Requests,
    /// Every expert, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertMap>,
}

/// Totals since the start.
#[derive(Debug, Default, Serialize)]
pub struct RunningTotals {
    /// Tokens generated.
    pub decode_tokens: u64,
    /// Prompt tokens decoded.
    pub prompt_tokens: u64,
    /// Routed experts that were resident.
    pub hits: u64,
    /// Those of them that were locked.
    pub pinned_hits: u64,
    /// Routed experts that were not resident.
    pub misses: u64,
    /// Bytes that reads were started for.
    pub fetch_bytes: u64,
    /// Time waited for expert bytes.
    pub stall_ms: f64,
    /// Time inside decodes.
    pub decode_ms: f64,
    /// Major faults; `null` where unknown.
    pub major_faults: Option<u64>,
    /// Time that tasks stalled on memory; `null` without PSI.
    pub pressure_stall_ms: Option<f64>,
    /// Times that drift was detected.
    pub drift_events: u64,
    /// Lock calls that failed.
    pub lock_errors: u64,
}

/// Requests now and in all.
#[derive(Debug, Serialize)]
pub struct Requests {
    /// Requests that wait.
    pub queued: usize,
    /// Counters.
    #[serde(flatten)]
    pub counts: Counts,
}

/// Every expert in one character each, layer by layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExpertMap {
    /// `P` pinned, `t` in transit, `.` absent.
    pub residence: String,
    /// A digit of base64: the square root of the score (0 to 1) in 63 steps.
    pub score: String,
}

impl ExpertMap {
    fn new(residence: &[Residence], scores: &[f32]) -> Self {
        Self {
            residence: residence
                .iter()
                .map(|residence| match residence {
                    Residence::Pinned => 'P',
                    Residence::Transit => 't',
                    Residence::Absent => '.',
                })
                .collect(),
            score: scores.iter().map(|&score| digit(score)).collect(),
        }
    }
}

fn digit(score: f32) -> char {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "0 to 63"
    )]
    let step = (score.clamp(0.0, 1.0).sqrt() * SCORE_STEPS).round() as usize;
    char::from(DIGITS[step.min(DIGITS.len() - 1)])
}

/// The state as of the last tick.
pub(super) fn tick(app: &App, with_experts: bool) -> Tick {
    let phase = app.phase();
    let ready = match &phase {
        Phase::Ready(ready) => Some(ready),
        Phase::Loading { .. } | Phase::Stopping => None,
    };
    let monitor = ready.and_then(|ready| ready.monitor.as_ref());
    let status = monitor.map(Monitor::status);
    let totals = ready
        .map(|ready| ready.counters.totals())
        .unwrap_or_default();
    let experts = monitor.filter(|_| with_experts).map(|monitor| {
        let (residence, scores) = monitor.experts();
        ExpertMap::new(&residence, &scores)
    });
    let status = status.as_ref();
    Tick {
        number: status.map(|s| s.ticks),
        uptime_s: app.started.elapsed().as_secs_f64(),
        tick: status.and_then(|s| s.entry.clone()),
        pressure_cause: status.and_then(|s| s.decision.pressure_cause),
        failed: status.and_then(|s| s.failed.clone()),
        degraded: ready
            .map(|ready| in_force(ready, status))
            .unwrap_or_default(),
        paused: monitor.is_some_and(Monitor::is_paused),
        set_capacity_bytes: status.and_then(|s| s.limit),
        totals: RunningTotals {
            major_faults: status.and_then(|s| s.major_faults),
            pressure_stall_ms: status.and_then(|s| s.pressure_stall_us).map(milli_of_us),
            drift_events: status.map_or(0, |s| s.drift_events),
            lock_errors: status.map_or(0, |s| s.lock_errors),
            ..running(&totals, &app.stats.counts())
        },
        requests: Requests {
            queued: app.queue.waiting(),
            counts: app.stats.counts(),
        },
        experts,
    }
}

#[expect(clippy::cast_precision_loss, reason = "times far below 2^53")]
fn milli_of_us(us: u64) -> f64 {
    us as f64 / 1e3
}

fn running(totals: &Totals, counts: &Counts) -> RunningTotals {
    RunningTotals {
        decode_tokens: counts.generated_tokens,
        prompt_tokens: counts.prompt_tokens,
        hits: totals.hits,
        pinned_hits: totals.pinned_hits,
        misses: totals.misses,
        fetch_bytes: totals.fetch_bytes,
        stall_ms: millis(totals.stall_ns),
        decode_ms: millis(totals.decode_ns),
        ..RunningTotals::default()
    }
}

#[cfg(test)]
mod tests {
    use super::{ExpertMap, digit};
    use hotpin_controllers::Residence;

    #[test]
    fn experts_are_one_character_each() {
        let residence = [Residence::Pinned, Residence::Transit, Residence::Absent];
        let map = ExpertMap::new(&residence, &[1.0, 0.25, 0.0]);
        assert_eq!(map.residence, "Pt.");
        assert_eq!(map.score, "/gA");
        assert_eq!(digit(f32::NAN), 'A');
        assert_eq!(digit(7.0), '/');
    }
}
