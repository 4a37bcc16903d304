//! Control laws of hotpin.
//!
//! Pure: no I/O, no clock, no threads, no unsafe. Every moment and observation is an argument, so
//! the same code regulates the live engine and the simulated plant, and equal observations give
//! equal decisions.
#![forbid(unsafe_code)]

pub mod adaptive;
pub mod baselines;
mod capacity;
pub mod config;
pub mod decision;
mod demand;
mod drift;
pub mod ids;
pub mod next_use;
mod num;
mod numeric;
pub mod observe;
mod pins;
pub mod policy;
mod pressure;
pub mod profile;
mod regulator;
mod scores;
mod sense;
mod targeting;
pub mod trace;
mod value;
pub mod vram;

pub use adaptive::Adaptive;
pub use config::{AdaptiveConfig, Checked, ConfigError};
pub use decision::{Action, Ceiling, Decision, PinLimit, PressureCause, Reason};
pub use ids::{ExpertId, ModelShape, Moment, ShapeError};
pub use next_use::NextUse;
pub use observe::{
    CgroupMemory, EngineTotals, Faults, Held, HostMemory, LockLimits, Observation, Pressure,
    Residence,
};
pub use policy::{BuildError, PolicyKind, UnknownPolicy, build};
pub use profile::{Profile, ProfileError};

/// A policy: observations in, decisions out.
pub trait Policy: Send {
    /// The policy's name as given to `--policy`.
    fn name(&self) -> &'static str;

    /// Decides one tick. `out` is cleared first.
    fn tick(&mut self, observation: &Observation<'_>, out: &mut Decision);

    /// Puts another ceiling on capacity, or none, from the next tick on; bytes. A policy that has no
    /// capacity of its own ignores it.
    fn limit_capacity(&mut self, bytes: Option<u64>) {
        let _ = bytes;
    }

    /// Takes over other settings from the next tick on, with what was learned and decided so far. The
    /// ceiling on capacity stays as [`Policy::limit_capacity`] set it, and scores keep the settings
    /// that they were counted with. A policy without settings ignores it.
    fn reconfigure(&mut self, config: &Checked) {
        let _ = config;
    }

    /// Current scores by expert: expected decode routings per token.
    fn scores(&self) -> &[f32];

    /// What the store ranks transit by: not negative, comparable over all experts, higher for what is
    /// rather kept. A use until the next tick raises an expert to at least 1.
    fn ranks(&self) -> &[f32] {
        self.scores()
    }
}
