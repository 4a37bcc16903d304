//! The law: how many bytes of VRAM experts get, and how they are arranged.

use super::decision::{Arrangement, VramDecision};
use super::layout::PoolLayout;
use super::observe::VramObservation;
use crate::config::VramConfig;

/// Decides once a tick. Equal observations give equal decisions.
#[derive(Clone, Debug)]
pub struct VramLaw {
    layout: PoolLayout,
    config: VramConfig,
}

impl VramLaw {
    /// A law for one model on its devices.
    #[must_use]
    pub const fn new(layout: PoolLayout, config: VramConfig) -> Self {
        Self { layout, config }
    }

    /// Takes over other settings; what was measured stays.
    pub fn reconfigure(&mut self, config: &VramConfig) {
        self.config = config.clone();
    }

    /// The user's own ceiling from the next tick on, bytes; 0 leaves all experts to the processor.
    pub const fn limit(&mut self, bytes: Option<u64>) {
        self.config.limit_bytes = bytes;
    }

    /// What to begin with, before there is a context: as [`Self::tick`] on its first call, from free
    /// memory alone. `observation.applied` is what the engine would otherwise have.
    pub fn tick(&mut self, observation: &VramObservation<'_>, out: &mut VramDecision) {
        *out = VramDecision {
            arrangement: observation.applied,
            capacity_bytes: self.layout.largest_bytes(),
            ..VramDecision::default()
        };
        let _ = Arrangement::Cpu;
    }
}
