//! What a run left behind: a record a tick, and the figures that scenarios are judged by.

use super::Scenario;
use super::engine::Engine;
use hotpin_controllers::{Ceiling, PinLimit, PressureCause};
use serde::Serialize;

/// A change of direction of capacity counts when it moves by this share of the model.
const REVERSAL_SHARE: f64 = 0.01;

/// One tick. Amounts are since the tick before, levels are after the decision was carried out.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TickRecord {
    /// When, seconds of virtual time.
    pub at_s: f64,
    /// False when the tick was skipped because the last decision was still being carried out; its
    /// levels of decision are then the last ones.
    pub decided: bool,
    /// Bytes of experts in memory when the tick began.
    pub held_before_bytes: u64,
    /// Capacity in force when the tick began, bytes; on the first tick the one that it decided.
    pub capacity_before_bytes: u64,
    /// Bytes claimed by other processes.
    pub others_bytes: u64,
    /// What the machine permits, see [`Scenario::true_ceiling_bytes`].
    pub true_ceiling_bytes: u64,
    /// Capacity decided, bytes.
    pub capacity_bytes: u64,
    /// Pin budget decided, bytes.
    pub pin_budget_bytes: u64,
    /// Bytes locked.
    pub pinned_bytes: u64,
    /// Bytes in transit, by the store's books.
    pub transit_bytes: u64,
    /// Bytes claimed that no reclaim could give.
    pub shortage_bytes: u64,
    /// The ceiling that binds.
    pub binding: Option<Ceiling>,
    /// What limits the pin budget.
    pub pin_limit: Option<PinLimit>,
    /// What holds the pressure ceiling down.
    pub pressure_cause: Option<PressureCause>,
    /// Tokens decoded.
    pub tokens: u64,
    /// Routed experts that were in memory.
    pub hits: u64,
    /// Routed experts.
    pub accesses: u64,
    /// Time that the engine waited for expert bytes, seconds.
    pub stall_s: f64,
    /// PSI `some`, seconds.
    pub pressure_s: f64,
    /// Major faults of the engine.
    pub major_faults: u64,
    /// Bytes ordered locked.
    pub locked_bytes: u64,
    /// Bytes unlocked.
    pub unlocked_bytes: u64,
    /// Drift was found.
    pub drift: bool,
}

/// Running totals.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub tokens: u64,
    pub hits: u64,
    pub accesses: u64,
    pub misses: u64,
    pub stall_s: f64,
    pub pressure_s: f64,
    pub major_faults: u64,
    pub fetch_bytes: u64,
    pub elapsed_s: f64,
}

impl Totals {
    pub fn of(engine: &Engine<'_>) -> Self {
        let totals = &engine.totals;
        Self {
            tokens: totals.decode_tokens,
            hits: engine.true_hits,
            accesses: totals.hits + totals.misses,
            misses: totals.misses,
            stall_s: totals.stall_ns as f64 / 1e9,
            pressure_s: engine.memory.stall_s,
            major_faults: engine.major_faults,
            fetch_bytes: engine.read_bytes,
            elapsed_s: engine.now_s,
        }
    }

    pub fn since(&self, last: &Self) -> Self {
        Self {
            tokens: self.tokens - last.tokens,
            hits: self.hits - last.hits,
            accesses: self.accesses - last.accesses,
            misses: self.misses - last.misses,
            stall_s: self.stall_s - last.stall_s,
            pressure_s: self.pressure_s - last.pressure_s,
            major_faults: self.major_faults - last.major_faults,
            fetch_bytes: self.fetch_bytes - last.fetch_bytes,
            elapsed_s: self.elapsed_s - last.elapsed_s,
        }
    }
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The scenario's name.
    pub scenario: String,
    /// The policy's name.
    pub policy: &'static str,
    /// Seed that reproduces it.
    pub seed: u64,
    /// Tokens decoded.
    pub tokens: u64,
    /// Tokens per second of virtual time.
    pub tok_s: f64,
    /// Share of routed experts that were in memory.
    pub hit_ratio: f64,
    /// Most by which capacity, as a tick found it, exceeded the true ceiling, bytes.
    pub max_overshoot_bytes: u64,
    /// Most ticks by which capacity lagged: so long ago the true ceiling last permitted what a tick
    /// found in force. A step that is followed on the next tick lags by 1, and so does a ramp that
    /// every tick follows.
    pub overshoot_ticks: usize,
    /// The same for the bytes held.
    pub held_overshoot_ticks: usize,
    /// Most bytes claimed that no reclaim could give.
    pub max_shortage_bytes: u64,
    /// Times that capacity changed direction, by at least 1% of the model.
    pub reversals: usize,
    /// Bytes ordered locked after the first tick.
    pub bytes_churned: u64,
    /// Bytes read for what the engine missed.
    pub bytes_fetched: u64,
    /// Major faults of the engine.
    pub major_faults: u64,
    /// Ticks skipped because the last decision was still being carried out.
    pub skipped_ticks: usize,
    /// Every tick.
    pub ticks: Vec<TickRecord>,
}

impl Report {
    pub(super) fn new(
        scenario: &Scenario,
        policy: &'static str,
        ticks: Vec<TickRecord>,
        totals: Totals,
    ) -> Self {
        let most_lag = |bytes: fn(&TickRecord) -> u64| {
            (0..ticks.len())
                .map(|at| lag(&ticks[..=at], bytes(&ticks[at])))
                .max()
                .unwrap_or(0)
        };
        let overshoot = |tick: &TickRecord| {
            tick.capacity_before_bytes
                .saturating_sub(tick.true_ceiling_bytes)
        };
        let threshold_bytes = scenario.shape.total_bytes() as f64 * REVERSAL_SHARE;
        Self {
            scenario: scenario.name.clone(),
            policy,
            seed: scenario.seed,
            tokens: totals.tokens,
            tok_s: totals.tokens as f64 / totals.elapsed_s,
            hit_ratio: ratio(totals.hits, totals.accesses),
            max_overshoot_bytes: ticks.iter().map(overshoot).max().unwrap_or(0),
            overshoot_ticks: most_lag(|tick| tick.capacity_before_bytes),
            held_overshoot_ticks: most_lag(|tick| tick.held_before_bytes),
            max_shortage_bytes: ticks
                .iter()
                .map(|tick| tick.shortage_bytes)
                .max()
                .unwrap_or(0),
            reversals: reversals(
                ticks.iter().map(|tick| tick.capacity_bytes as f64),
                threshold_bytes,
            ),
            bytes_churned: ticks.iter().skip(1).map(|tick| tick.locked_bytes).sum(),
            bytes_fetched: totals.fetch_bytes,
            major_faults: totals.major_faults,
            skipped_ticks: ticks.iter().filter(|tick| !tick.decided).count(),
            ticks,
        }
    }

    /// Ticks within `[from_s, to_s)`.
    pub fn between(&self, from_s: f64, to_s: f64) -> impl Iterator<Item = &TickRecord> {
        self.ticks
            .iter()
            .filter(move |tick| tick.at_s >= from_s && tick.at_s < to_s)
    }

    /// Share of experts routed within `[from_s, to_s)` that were in memory; 0 when none was routed.
    #[must_use]
    pub fn hit_ratio_between(&self, from_s: f64, to_s: f64) -> f64 {
        let sums = self.between(from_s, to_s).fold((0, 0), |sums, tick| {
            (sums.0 + tick.hits, sums.1 + tick.accesses)
        });
        ratio(sums.0, sums.1)
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

/// Ticks since the true ceiling last permitted `bytes`; all of them when it never did.
fn lag(ticks: &[TickRecord], bytes: u64) -> usize {
    let permitted = |tick: &TickRecord| tick.true_ceiling_bytes >= bytes;
    ticks
        .iter()
        .rev()
        .position(permitted)
        .unwrap_or(ticks.len())
}

/// Changes of direction of at least `threshold`: turning points of the series seen with that much
/// backlash.
fn reversals(mut values: impl Iterator<Item = f64>, threshold: f64) -> usize {
    let Some(first) = values.next() else { return 0 };
    let (mut low, mut high) = (first, first);
    let mut rising = None;
    let mut count = 0;
    for value in values {
        (low, high) = (low.min(value), high.max(value));
        let turned = match rising {
            None if value >= low + threshold => Some(true),
            None if value <= high - threshold => Some(false),
            Some(true) if value <= high - threshold => Some(false),
            Some(false) if value >= low + threshold => Some(true),
            _ => None,
        };
        if let Some(direction) = turned {
            count += usize::from(rising.is_some());
            rising = Some(direction);
            (low, high) = (value, value);
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reversals_need_a_move() {
        let count = |values: &[f64]| reversals(values.iter().copied(), 10.0);
        assert_eq!(count(&[]), 0);
        assert_eq!(count(&[100.0, 50.0, 20.0]), 0);
        assert_eq!(count(&[100.0, 20.0, 25.0, 20.0, 28.0]), 0);
        assert_eq!(count(&[100.0, 20.0, 31.0, 95.0, 96.0]), 1);
        assert_eq!(count(&[100.0, 20.0, 100.0, 20.0, 100.0]), 3);
        assert_eq!(count(&[0.0, 4.0, 8.0, 12.0, 8.0, 4.0, 0.0]), 1);
    }

    #[test]
    fn lag_is_how_long_ago_it_was_permitted() {
        let ticks = [5, 9, 7, 3].map(|true_ceiling_bytes| TickRecord {
            true_ceiling_bytes,
            ..TickRecord::default()
        });
        assert_eq!([3, 7, 8, 10].map(|bytes| lag(&ticks, bytes)), [0, 1, 2, 4]);
    }
}
