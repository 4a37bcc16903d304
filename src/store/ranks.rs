//! What transit is ranked by.

use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};
use hotpin_controllers::ExpertId;

/// Factor on an expert's rank for each use before the next publication.
const USE_RANK: f32 = 1.4;

/// Ranks as `f32` bits: published by the governor, raised by the engine on each use.
#[derive(Debug)]
pub(super) struct Ranks(Vec<AtomicU32>);

impl Ranks {
    pub(super) fn new(experts: usize) -> Self {
        Self((0..experts).map(|_| AtomicU32::new(0)).collect())
    }

    pub(super) fn of(&self, index: usize) -> f32 {
        f32::from_bits(self.0[index].load(Relaxed))
    }

    /// An expert in use ranks with what is used now until the governor publishes again.
    pub(super) fn raise(&self, id: ExpertId) {
        // A publication between load and store loses one use of one expert until the next tick.
        let raised = self.of(id.index()).max(1.0) * USE_RANK;
        self.0[id.index()].store(raised.to_bits(), Relaxed);
    }

    pub(super) fn publish(&self, ranks: &[f32]) {
        for (slot, rank) in self.0.iter().zip(ranks) {
            slot.store(rank.to_bits(), Relaxed);
        }
    }
}
