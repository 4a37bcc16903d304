//! What a sweep is judged by: scripted scenarios, and routing that was recorded.

use super::{Case, SweepError};
use crate::plant::{Routing, StoreKind};
use crate::replay::{Part, Replay};
use crate::scenarios::{Named, SQUARE_EDGES};
use hotpin_controllers::ModelShape;
use hotpin_controllers::trace::{Phase, Trace, TraceEncoder, TraceHeader};
use std::sync::Arc;

/// Bytes of an expert of a trace that does not say: so many that a token reads what the scripted
/// model's does.
const UNKNOWN_EXPERT_BYTES: u64 = 3 << 20;

/// Seconds to compute a token of it, and rate of direct reads, as on the development machine.
const COMPUTE_S: f64 = 0.025;
const DIRECT_BYTES_PER_S: f64 = 2.1e9;

/// Longer than any recorded case.
const LONGEST_S: f64 = 86_400.0;

/// Shares of the experts that recorded routing is given room for.
const RECORDED_SHARES: [f64; 2] = [0.25, 0.5];

/// The scripted scenarios, with these seeds each.
#[must_use]
pub fn scripted(seeds: std::ops::RangeInclusive<u64>) -> Vec<Case> {
    let named = [
        (Named::StepHog, 4),
        (Named::SquareWave, SQUARE_EDGES + 2),
        (Named::DriftAtOnce, 0),
        (Named::UniformRouter, 0),
        (Named::SteadyDraws, 0),
        (Named::RefaultHog, 6),
    ];
    let mut cases = Vec::new();
    for (named, most_reversals) in named {
        for seed in seeds.clone() {
            let mut scenario = named.scenario(seed);
            scenario.name = format!("{} {seed}", named.label());
            cases.push(Case {
                scenario,
                most_reversals,
            });
        }
    }
    cases
}

/// The first decoded tokens of a part of a trace, on the scripted machine with room for a share of the
/// experts, under both stores.
///
/// # Errors
/// When that part has no tokens.
pub fn recorded(trace: &Trace, part: Part, tokens: usize) -> Result<Vec<Case>, SweepError> {
    let replay = Replay::new(trace, part)?;
    let header = &trace.header;
    let shape = sized(&header.shape)?;
    let mut encoder = TraceEncoder::new(&TraceHeader {
        shape: shape.clone(),
        ..header.clone()
    })?;
    for token in replay.routed_tokens().take(tokens) {
        encoder.push(Phase::Decode, token)?;
    }
    let cut = Arc::new(Trace::decode(&encoder.finish())?);
    let mut cases = Vec::new();
    for share in RECORDED_SHARES {
        for store in [StoreKind::Mapped, StoreKind::Direct] {
            let mut scenario = Named::SteadyDraws.scenario(1);
            let percent = share * 100.0;
            let experts = shape.total_experts();
            scenario.name = format!(
                "trace of {experts} experts, {part:?}, {percent}%, {}",
                store.label()
            );
            scenario.shape = shape.clone();
            scenario.routing = Routing::Trace(Arc::clone(&cut));
            scenario.profile = None;
            scenario.store = store;
            scenario.machine.host_bytes += 2 * shape.total_bytes();
            scenario.machine.compute_s = COMPUTE_S;
            if store == StoreKind::Direct {
                scenario.machine.disk_bytes_per_s = DIRECT_BYTES_PER_S;
                scenario.machine.lock_s_per_byte = 0.0;
                scenario.machine.unlock_s_per_byte = 0.0;
            }
            scenario.duration_s = LONGEST_S;
            scenario.most_tokens = Some(cut.tokens() as u64);
            let bytes = shape.total_bytes() as f64 * share;
            scenario.config.capacity.limit_bytes = Some(crate::plant::to_bytes(bytes));
            cases.push(Case {
                scenario,
                most_reversals: 0,
            });
        }
    }
    Ok(cases)
}

/// The shape, with a size for experts where a foreign trace has none.
fn sized(shape: &ModelShape) -> Result<ModelShape, SweepError> {
    if shape.total_bytes() > shape.total_experts() as u64 {
        return Ok(shape.clone());
    }
    let layers = || 0..shape.layers();
    Ok(ModelShape::new(
        layers().map(|layer| shape.experts_in(layer)).collect(),
        vec![UNKNOWN_EXPERT_BYTES; shape.layers()],
        layers().map(|layer| shape.top_k_in(layer)).collect(),
    )?)
}
