//! The closed loop in virtual time: a model decoding on a machine, regulated by a real policy.
//!
//! The engine decodes tokens layer by layer. Experts that are not resident are read from one disk,
//! which the governor's pins share; nothing else takes time. Every tick the policy reads an
//! [`hotpin_controllers::Observation`] made from the simulated machine, and its decision is carried out as the live
//! governor does it. docs/sim.md says what is left out.

mod disturbance;
mod engine;
mod governor;
mod hardware;
mod lists;
mod memory;
mod report;
mod routing;
mod schedule;
mod store;

pub use report::{Report, TickRecord};
pub use routing::{Routing, Synthetic};
pub use schedule::Schedule;

pub use disturbance::{Disturbances, Sensor};
pub use hardware::{Calibrated, CalibratedError};
pub use store::Keeper;

pub(crate) use engine::PinQueue;
pub(crate) use store::{Access, Store};

use engine::Engine;
use governor::Governor;
use hotpin_controllers::{AdaptiveConfig, BuildError, ModelShape, Policy, PolicyKind, build};

/// The kernel keeps one part in this many of memory free in the background.
const WATERMARK_SHARE: u64 = 100;

/// A shortage of this share of memory stalls somebody all of the time.
const THRASH_SHARE: f64 = 0.05;

/// Where expert bytes live, as in the live program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum StoreKind {
    /// The file mapping, the page cache and `mlock`.
    #[default]
    Mapped,
    /// An arena of their own, read past the page cache while parts that have come are computed.
    Direct,
}

impl StoreKind {
    /// The name on the command line.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Mapped => "mapped",
            Self::Direct => "direct",
        }
    }
}

/// A store name that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no store is called {given:?}; there are mapped and direct")]
pub struct UnknownStore {
    /// What was given.
    pub given: String,
}

impl std::str::FromStr for StoreKind {
    type Err = UnknownStore;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Mapped, Self::Direct]
            .into_iter()
            .find(|kind| kind.label() == text)
            .ok_or_else(|| UnknownStore {
                given: text.to_owned(),
            })
    }
}

/// A simulated machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Memory, bytes.
    pub host_bytes: u64,
    /// Limit of a cgroup that holds the engine alone, bytes.
    pub cgroup_bytes: Option<u64>,
    /// Dense weights, KV and program, locked from the start, bytes.
    pub dense_bytes: u64,
    /// Disk bandwidth of exact-range reads, bytes per second.
    pub disk_bytes_per_s: f64,
    /// The same when pages fault in one by one.
    pub fault_bytes_per_s: f64,
    /// Latency of one batch of reads, seconds.
    pub disk_latency_s: f64,
    /// Direct reclaim, bytes per second.
    pub reclaim_bytes_per_s: f64,
    /// Share of the waits for experts that the store itself had evicted that PSI counts as memory
    /// stall. The kernel counts a wait only for pages that its own reclaim took, so this is 0 where
    /// the store evicts with `posix_fadvise`; 1 is a machine on which every refault is pressure.
    pub own_refault_share: f64,
    /// Time to compute one token with everything resident, seconds.
    pub compute_s: f64,
    /// Bandwidth of page faults with the kernel's readahead, as `off` reads: bytes read per second.
    pub readahead_bytes_per_s: f64,
    /// Until the first page of a layer's experts has faulted in so, seconds.
    pub readahead_latency_s: f64,
    /// Bytes that such faults read, and that then are cached, for a byte used; at least 1.
    pub readahead_amplification: f64,
    /// Locking a resident byte, seconds of a core that the engine lacks meanwhile.
    pub lock_s_per_byte: f64,
    /// The same for unlocking.
    pub unlock_s_per_byte: f64,
    /// What a byte costs, beyond the read, of memory that the store `direct` uses for the first time,
    /// seconds: it is zeroed and locked. The governor does it ahead of the engine as far as it can.
    pub fresh_s_per_byte: f64,
    /// What a byte that the engine reads costs it beside the wait, seconds: reads are begun and taken in,
    /// and what arrives is computed apart.
    pub handling_s_per_byte: f64,
}

/// A run of the closed loop.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Name in reports.
    pub name: String,
    /// The model.
    pub shape: ModelShape,
    /// The machine.
    pub machine: Machine,
    /// Where experts live.
    pub store: StoreKind,
    /// What other processes claim; it cannot be reclaimed.
    pub others: Schedule,
    /// Which experts are routed.
    pub routing: Routing,
    /// Starting profile: expert counts by flat id.
    pub profile: Option<Vec<f32>>,
    /// What goes wrong, and when.
    pub disturbances: Disturbances,
    /// Length, seconds of virtual time.
    pub duration_s: f64,
    /// The run ends after so many tokens, if that is sooner.
    pub most_tokens: Option<u64>,
    /// Time between ticks, seconds.
    pub tick_s: f64,
    /// Seed of everything random.
    pub seed: u64,
    /// Options of the control laws.
    pub config: AdaptiveConfig,
}

/// Why a scenario cannot run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScenarioError {
    /// A rate, time or length is not a positive number.
    #[error("{name} of the scenario is {value}, which is not a positive number")]
    NotPositive {
        /// The field.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// The trace was recorded from another model, or is empty.
    #[error(
        "the trace's {trace_experts} experts over {tokens} tokens do not fit the scenario's model of {experts}"
    )]
    Trace {
        /// Experts of the trace.
        trace_experts: usize,
        /// Its tokens.
        tokens: usize,
        /// Experts of the scenario's model.
        experts: usize,
    },
    /// The policy could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
}

impl Scenario {
    /// Runs the loop under a policy by name.
    ///
    /// # Errors
    /// When the scenario or its options are refused.
    pub fn run_kind(&self, kind: PolicyKind) -> Result<Report, ScenarioError> {
        let mut policy = build(kind, &self.shape, &self.config, self.profile.as_deref())?;
        let keeper = match (kind, self.store) {
            (PolicyKind::Off, _) => Keeper::Kernel,
            (_, StoreKind::Direct) => Keeper::Arena,
            (PolicyKind::Fetch | PolicyKind::Static, StoreKind::Mapped) => Keeper::Kernel,
            (PolicyKind::Lru | PolicyKind::Adaptive, StoreKind::Mapped) => Keeper::Store,
        };
        self.run_kept(policy.as_mut(), keeper, kind != PolicyKind::Off)
    }

    /// Runs the loop under a policy.
    ///
    /// # Errors
    /// When the scenario is refused.
    pub fn run(&self, policy: &mut dyn Policy) -> Result<Report, ScenarioError> {
        let keeper = match self.store {
            StoreKind::Mapped => Keeper::Store,
            StoreKind::Direct => Keeper::Arena,
        };
        self.run_kept(policy, keeper, true)
    }

    /// `fetches` is false for the engine as llama.cpp ships it, which nobody tells what is routed.
    fn run_kept(
        &self,
        policy: &mut dyn Policy,
        keeper: Keeper,
        fetches: bool,
    ) -> Result<Report, ScenarioError> {
        self.check()?;
        let mut engine = Engine::new(self, keeper, fetches);
        let mut governor = Governor::new(self);
        governor.start(policy, &mut engine);
        let most_tokens = self.most_tokens.unwrap_or(u64::MAX);
        while engine.now_s < self.duration_s && engine.totals.decode_tokens < most_tokens {
            engine.step();
            governor.catch_up(policy, &mut engine);
        }
        Ok(governor.report(policy.name(), &engine))
    }

    /// The least of the ceilings that the machine sets at a time, bytes: no controller may hold
    /// more.
    #[must_use]
    pub fn true_ceiling_bytes(&self, s: f64) -> u64 {
        let machine = &self.machine;
        let capacity = &self.config.capacity;
        let host_bytes = machine
            .host_bytes
            .saturating_sub(machine.dense_bytes + self.others.at(s) + capacity.host_reserve_bytes);
        let cgroup_bytes = machine.cgroup_bytes.map_or(u64::MAX, |limit_bytes| {
            limit_bytes.saturating_sub(machine.dense_bytes + capacity.cgroup_reserve_bytes)
        });
        let limit_bytes = capacity.limit_bytes.unwrap_or(u64::MAX);
        host_bytes
            .min(cgroup_bytes)
            .min(limit_bytes)
            .min(self.shape.total_bytes())
    }

    /// Bytes that the kernel has for experts at the start, reserves not counted.
    fn room_bytes(&self) -> u64 {
        let machine = &self.machine;
        let host_bytes = machine.host_bytes.saturating_sub(self.others.at(0.0));
        let group_bytes = machine.cgroup_bytes.unwrap_or(u64::MAX);
        host_bytes
            .min(group_bytes)
            .saturating_sub(machine.dense_bytes)
    }

    fn check(&self) -> Result<(), ScenarioError> {
        let machine = &self.machine;
        let positive = [
            ("duration_s", self.duration_s),
            ("tick_s", self.tick_s),
            ("disk_bytes_per_s", machine.disk_bytes_per_s),
            ("fault_bytes_per_s", machine.fault_bytes_per_s),
            ("reclaim_bytes_per_s", machine.reclaim_bytes_per_s),
            ("compute_s", machine.compute_s),
            ("readahead_bytes_per_s", machine.readahead_bytes_per_s),
            ("readahead_amplification", machine.readahead_amplification),
        ];
        for (name, value) in positive {
            if !(value.is_finite() && value > 0.0) {
                return Err(ScenarioError::NotPositive { name, value });
            }
        }
        let Routing::Trace(trace) = &self.routing else {
            return Ok(());
        };
        if trace.tokens() > 0 && trace.header.shape == self.shape {
            return Ok(());
        }
        Err(ScenarioError::Trace {
            trace_experts: trace.header.shape.total_experts(),
            tokens: trace.tokens(),
            experts: self.shape.total_experts(),
        })
    }
}

/// Bytes from a real number, saturating.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "float-to-int `as` saturates, which is what is wanted"
)]
pub(crate) fn to_bytes(value: f64) -> u64 {
    value as u64
}
