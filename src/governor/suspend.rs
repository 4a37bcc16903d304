//! A loop that stands still while its store is made anew, over a model that was loaded anew. What it has
//! learned, its journal and those who watch it go on with the next store.

use super::{Governor, GovernorOptions, Loop, Plant, Regulated, Shared, Vram, lock};
use crate::plant::Counters;
use crate::sensors::{DegradedSet, Sensors};
use crate::store::DenseLock;
use hotpin_controllers::{Decision, ModelShape, Policy, Residence};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// What goes round the loop, without the store that it acted on.
pub struct Suspended {
    options: GovernorOptions,
    counters: Arc<Counters>,
    shape: ModelShape,
    policy: Box<dyn Policy>,
    sensors: Sensors,
    plant: Plant,
    decision: Decision,
    started: Instant,
    shared: Arc<Shared>,
    first_faults: Option<u64>,
    first_stall_us: Option<u64>,
    degraded: DegradedSet,
    vram: Option<Vram>,
}

impl std::fmt::Debug for Suspended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Suspended")
            .field("options", &self.options)
            .field("vram", &self.vram)
            .finish_non_exhaustive()
    }
}

impl Governor {
    /// Ends the loop for a while, and gives up its store. `None` when it had ended before.
    #[must_use]
    pub fn suspend(mut self) -> Option<Suspended> {
        let looped = self.end()?;
        *lock(&self.shared.store) = Weak::<crate::store::DirectStore>::new();
        Some(Suspended {
            options: looped.options,
            counters: looped.regulated.counters,
            shape: looped.regulated.shape,
            policy: looped.policy,
            sensors: looped.sensors,
            plant: looped.plant,
            decision: looped.decision,
            started: looped.started,
            shared: looped.shared,
            first_faults: looped.first_faults,
            first_stall_us: looped.first_stall_us,
            degraded: looped.degraded,
            vram: looped.vram,
        })
    }
}

impl Suspended {
    /// Goes on with another store over the same model file, whose dense weights are locked as `dense`
    /// says.
    ///
    /// # Errors
    /// When the threads cannot be started.
    pub fn resume(
        mut self,
        store: Arc<dyn crate::store::ExpertStore>,
        dense: &DenseLock,
    ) -> std::io::Result<Governor> {
        self.options.dense.note(dense);
        *lock(&self.shared.store) = Arc::downgrade(&store);
        *lock(&self.shared.stop) = false;
        Governor::launch(Loop {
            plant: self.plant,
            residence: vec![Residence::Absent; self.shape.total_experts()],
            regulated: Regulated {
                store,
                counters: self.counters,
                shape: self.shape,
            },
            options: self.options,
            policy: self.policy,
            sensors: self.sensors,
            decision: self.decision,
            started: self.started,
            shared: self.shared,
            first_faults: self.first_faults,
            first_stall_us: self.first_stall_us,
            degraded: self.degraded,
            // What the first decision wanted is wanted again by those that follow.
            wanted: Vec::new().into_iter(),
            early: Vec::new(),
            vram: self.vram,
            enough: Instant::now(),
        })
    }

    /// Whether dense weights were locked.
    #[must_use]
    pub fn dense_locked(&self) -> bool {
        self.options.dense.locked_bytes > 0
    }
}
