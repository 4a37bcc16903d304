//! Scripted disturbances: what happens to the machine or the model, and when.
//!
//! All use one small model and machine: 16 layers of 64 experts of 4 MiB, top-4 (4 GiB, 256 MiB a
//! token), on 5 GiB of memory with a disk of 1.2 GB/s, where about 2.5 GiB are left for experts.

use crate::plant::{
    Calibrated, CalibratedError, Disturbances, Machine, Routing, Scenario, Schedule, StoreKind,
    Synthetic,
};
use hotpin_controllers::trace::Trace;
use hotpin_controllers::{AdaptiveConfig, ModelShape, PolicyKind};
use std::sync::Arc;

const MIB: u64 = 1 << 20;

/// Bytes that other processes claim in quiet times.
const QUIET_BYTES: u64 = 1280 * MIB;

/// Bytes that they claim while a hog is there: more than the reserve of 1 GiB.
const HOG_BYTES: u64 = QUIET_BYTES + 1280 * MIB;

/// Tokens before the domain changes in [`Named::DriftAtOnce`].
pub const DRIFT_TOKEN: u64 = 600;

/// When the hog of [`Named::StepHog`] and [`Named::RampHog`] comes and is gone, seconds.
pub const HOG_S: (f64, f64) = (30.0, 60.0);

/// Edges of the square wave of [`Named::SquareWave`].
pub const SQUARE_EDGES: usize = 12;

/// What others claim beside a recorded session, which has a group of its own.
const OTHERS_BYTES: u64 = 1 << 30;

/// A recorded session ends after so many seconds at the latest.
const LONGEST_S: f64 = 86_400.0;

/// A scenario by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// Another process takes 1.25 GiB at once, and lets go 30 s later.
    StepHog,
    /// The same, growing at 256 MiB/s and shrinking at once.
    RampHog,
    /// 1.25 GiB come and go, 10 s each way.
    SquareWave,
    /// The domain changes between two tokens; the profile is of the first.
    DriftAtOnce,
    /// Every expert is equally likely; the profile says otherwise.
    UniformRouter,
    /// The sensors' clock jumps an hour ahead, and later back.
    ClockJump,
    /// Nothing at all: tokens drawn independently from the domain that was profiled.
    SteadyDraws,
    /// A routing that repeats every few tokens, with nothing else happening.
    Steady,
    /// The step hog on a machine whose PSI counts the engine's own refaults, which go on after it.
    RefaultHog,
}

/// A scenario name that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no scenario is called {given:?}; there are {known}")]
pub struct UnknownScenario {
    /// What was given.
    pub given: String,
    /// All names.
    pub known: String,
}

impl std::str::FromStr for Named {
    type Err = UnknownScenario;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|named| named.label() == text)
            .ok_or_else(|| UnknownScenario {
                given: text.to_owned(),
                known: Self::ALL.map(Self::label).join(", "),
            })
    }
}

impl Named {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::StepHog,
        Self::RampHog,
        Self::SquareWave,
        Self::DriftAtOnce,
        Self::UniformRouter,
        Self::ClockJump,
        Self::SteadyDraws,
        Self::Steady,
        Self::RefaultHog,
    ];

    /// The name on the command line.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::StepHog => "step-hog",
            Self::RampHog => "ramp-hog",
            Self::SquareWave => "square-wave",
            Self::DriftAtOnce => "drift-at-once",
            Self::UniformRouter => "uniform-router",
            Self::ClockJump => "clock-jump",
            Self::SteadyDraws => "steady-draws",
            Self::Steady => "steady",
            Self::RefaultHog => "refault-hog",
        }
    }

    /// Builds it for a seed.
    #[must_use]
    pub fn scenario(self, seed: u64) -> Scenario {
        let mut scenario = quiet(self.label(), seed);
        let (from_s, to_s) = HOG_S;
        match self {
            Self::StepHog | Self::RefaultHog => {
                scenario.others = Schedule::pulses(QUIET_BYTES, HOG_BYTES, &[(from_s, to_s)]);
            }
            Self::RampHog => {
                let full_s = from_s + (HOG_BYTES - QUIET_BYTES) as f64 / (256 * MIB) as f64;
                scenario.others = Schedule::new(vec![
                    (from_s, QUIET_BYTES),
                    (full_s, HOG_BYTES),
                    (to_s, HOG_BYTES),
                    (to_s, QUIET_BYTES),
                ]);
            }
            Self::SquareWave => {
                let pulse = |n: usize| (20.0 * n as f64 + 20.0, 20.0 * n as f64 + 30.0);
                let pulses: Vec<_> = (0..SQUARE_EDGES / 2).map(pulse).collect();
                scenario.others = Schedule::pulses(QUIET_BYTES, HOG_BYTES, &pulses);
                scenario.duration_s = 160.0;
            }
            Self::DriftAtOnce => route(&mut scenario, 1.2, &[(0, 1), (DRIFT_TOKEN, 2)], None),
            Self::UniformRouter => route(&mut scenario, 0.0, &[(0, 1)], None),
            Self::ClockJump => {
                scenario.disturbances.clock_jumps = vec![(40.0, 3600.0), (70.0, -3600.0)];
            }
            Self::SteadyDraws => {}
            Self::Steady => route(&mut scenario, 1.2, &[(0, 1)], Some(4)),
        }
        if self == Self::RefaultHog {
            scenario.machine.own_refault_share = 1.0;
        }
        scenario
    }
}

/// A recorded session on a calibrated machine, in a group of `cgroup_bytes`, to its last token.
///
/// # Errors
/// When the calibration has no figures of that store.
pub fn recorded(
    machine: &Calibrated,
    kind: PolicyKind,
    store: StoreKind,
    cgroup_bytes: Option<u64>,
    trace: &Arc<Trace>,
    profile: Option<Vec<f32>>,
) -> Result<Scenario, CalibratedError> {
    Ok(Scenario {
        name: "recorded".to_owned(),
        shape: trace.header.shape.clone(),
        machine: machine.machine(cgroup_bytes, kind, store)?,
        store,
        others: Schedule::constant(OTHERS_BYTES),
        routing: Routing::Trace(Arc::clone(trace)),
        profile,
        disturbances: Disturbances::default(),
        duration_s: LONGEST_S,
        most_tokens: Some(trace.tokens() as u64),
        tick_s: 0.1,
        seed: 0,
        config: AdaptiveConfig::default(),
    })
}

/// Nothing happens: one domain, profiled, and constant claims.
fn quiet(name: &str, seed: u64) -> Scenario {
    let synthetic = Synthetic {
        exponent: 1.2,
        domains: vec![(0, 1)],
        period_tokens: None,
    };
    let shape = shape();
    Scenario {
        name: name.to_owned(),
        machine: Machine {
            host_bytes: 5120 * MIB,
            cgroup_bytes: None,
            dense_bytes: 256 * MIB,
            disk_bytes_per_s: 1.2e9,
            fault_bytes_per_s: 0.4e9,
            disk_latency_s: 1e-4,
            reclaim_bytes_per_s: 2e9,
            own_refault_share: 0.0,
            compute_s: 0.025,
            readahead_bytes_per_s: 0.5e9,
            readahead_latency_s: 1e-4,
            readahead_amplification: 1.1,
            lock_s_per_byte: 60e-12,
            unlock_s_per_byte: 60e-12,
            fresh_s_per_byte: 0.0,
            handling_s_per_byte: 0.0,
        },
        store: StoreKind::Mapped,
        others: Schedule::constant(QUIET_BYTES),
        profile: Some(profile(&synthetic, &shape, seed)),
        routing: Routing::Synthetic(synthetic),
        disturbances: Disturbances::default(),
        most_tokens: None,
        duration_s: 120.0,
        tick_s: 0.1,
        seed,
        config: AdaptiveConfig::default(),
        shape,
    }
}

/// The common model.
fn shape() -> ModelShape {
    ModelShape::uniform(16, 64, 4 * MIB, 4).unwrap_or_else(|error| unreachable!("{error}"))
}

fn route(scenario: &mut Scenario, exponent: f64, domains: &[(u64, u64)], period: Option<u64>) {
    scenario.routing = Routing::Synthetic(Synthetic {
        exponent,
        domains: domains.to_vec(),
        period_tokens: period,
    });
}

/// A profile of the first domain, as exact as can be.
fn profile(synthetic: &Synthetic, shape: &ModelShape, seed: u64) -> Vec<f32> {
    let domain = synthetic.domains.first().map_or(0, |&(_, domain)| domain);
    let weights = synthetic.weights(shape, seed, domain);
    #[expect(clippy::cast_possible_truncation, reason = "rounding is wanted")]
    weights.into_iter().map(|weight| weight as f32).collect()
}
