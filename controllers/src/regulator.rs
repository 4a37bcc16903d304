//! What every policy shares: differences of totals, scores, the cost of a miss, drift and capacity.

use crate::capacity::{CapacityInput, CapacityLaw};
use crate::config::Checked;
use crate::decision::Decision;
use crate::drift::Drift;
use crate::ids::ModelShape;
use crate::num::filter_share;
use crate::observe::{EngineTotals, Observation};
use crate::profile::Profile;
use crate::scores::Scores;
use crate::sense::{Delta, Sense, Sizes, Step};
use crate::value::MissCost;

/// Bytes that one major fault brings in: expert ranges are MADV_RANDOM, so one page.
const FAULT_BYTES: f64 = 4096.0;

/// Seconds between two looks at the marginal value.
const MARGIN_PERIOD_S: f64 = 1.0;

const GIB: f64 = 1_073_741_824.0;

/// The shared state.
#[derive(Clone, Debug)]
pub(crate) struct Regulator {
    config: Checked,
    pub sizes: Sizes,
    pub scores: Scores,
    sense: Sense,
    cost: MissCost,
    drift: Drift,
    capacity: CapacityLaw,
    tokens: f64,
    tokens_per_s: f64,
    marginal: Option<(f64, f64)>,
}

/// What a policy needs to know after the shared part of a tick.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    pub step: Step,
    /// Tokens decoded since the start.
    pub tokens_total: f64,
    /// Seconds that a miss costs.
    pub miss_cost_s: f64,
    /// Drift was found a short while ago.
    pub hurry: bool,
}

impl Regulator {
    pub fn new(shape: &ModelShape, config: Checked, profile: Option<&Profile>) -> Self {
        let sizes = Sizes::new(shape);
        Self {
            scores: Scores::new(shape, &config.get().scores, profile),
            sense: Sense::default(),
            cost: MissCost::new(&config.get().value, sizes.mean_bytes),
            drift: Drift::new(&config.get().drift),
            capacity: CapacityLaw::new(&config, &sizes),
            tokens: 0.0,
            tokens_per_s: 0.0,
            marginal: None,
            sizes,
            config,
        }
    }

    /// Replaces the user's own ceiling on capacity, bytes.
    pub fn limit_capacity(&mut self, bytes: Option<u64>) {
        self.capacity.limit(bytes);
    }

    /// Takes over other settings of everything but the scores.
    pub fn reconfigure(&mut self, config: &Checked) {
        self.capacity.reconfigure(config, &self.sizes);
        self.drift.reconfigure(&config.get().drift);
        self.config = config.clone();
    }

    /// Reads one observation and decides everything but the pins.
    pub fn tick(&mut self, observation: &Observation<'_>, out: &mut Decision) -> Now {
        out.clear();
        let step = self.sense.step(observation.now);
        let delta = self.sense.delta(observation);
        let factor = self.drift.half_life_factor();
        let counted = self.scores.update(
            observation.decode_counts,
            observation.prefill_counts,
            factor,
        );
        let told = delta
            .engine
            .map_or(0.0, |engine| engine.decode_tokens as f64);
        // The tap may be off, or count a token before its last layer is done.
        let tokens = counted.max(told);
        self.tokens += tokens;
        self.rate(step, tokens);
        out.drift = self.drift.update(delta.engine, tokens);
        self.cost.update(delta.engine, observation.stall_known);
        let input = CapacityInput {
            step,
            tokens: if worked(delta.engine) {
                tokens.max(f64::MIN_POSITIVE)
            } else {
                tokens
            },
            fetched_bytes: delta.engine.map_or(0, |engine| engine.fetch_bytes),
            phantom_share: self.phantom_share(delta),
            marginal_per_gib: self.marginal_per_gib(step),
        };
        self.capacity.decide(observation, &input, out);
        Now {
            step,
            tokens_total: self.tokens,
            miss_cost_s: self.cost.seconds(),
            hurry: self.drift.hurries(),
        }
    }

    fn rate(&mut self, step: Step, tokens: f64) {
        if step.elapsed_s > 0.0 {
            let share = filter_share(step.elapsed_s, self.config.get().value.filter_s);
            self.tokens_per_s += (tokens / step.elapsed_s - self.tokens_per_s) * share;
        }
    }

    /// Share of the hits in the books that must have faulted, beyond what late fetches explain.
    fn phantom_share(&self, delta: Delta) -> Option<f64> {
        let engine = delta.engine.filter(|engine| engine.hits > 0)?;
        let faulted_experts = delta.major_faults? as f64 * FAULT_BYTES / self.sizes.mean_bytes;
        let late = engine.misses as f64 * self.config.get().pressure.late_miss_share;
        Some(((faulted_experts - late).max(0.0) / engine.hits as f64).min(1.0))
    }

    /// Stall seconds that the least valuable GiB of capacity saves per second: routings per second
    /// of the experts at the edge, times the cost of a miss, over their bytes.
    fn marginal_per_gib(&mut self, step: Step) -> Option<f64> {
        if !self.capacity.wants_marginal() || self.tokens <= 0.0 {
            return None;
        }
        let capacity_bytes = self.capacity.capacity_bytes()?;
        let due = self
            .marginal
            .is_none_or(|(at_s, _)| step.now_s - at_s >= MARGIN_PERIOD_S);
        if due {
            let score = self
                .scores
                .at_margin(capacity_bytes as f64 / self.sizes.mean_bytes);
            self.marginal = Some((step.now_s, score));
        }
        let (_, score) = self.marginal?;
        let saved_s_per_s = score * self.tokens_per_s * self.cost.seconds();
        Some(saved_s_per_s / self.sizes.mean_bytes * GIB)
    }
}

/// Prefill is work too: it ends idleness.
fn worked(engine: Option<EngineTotals>) -> bool {
    engine.is_some_and(|engine| engine.prefill_tokens > 0)
}
