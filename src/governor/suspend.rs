//! A loop that stands still while its store is made anew, over a model that was loaded anew. What it has
//! learned, its journal and those who watch it go on with the next store.

use super::{Governor, Loop, Ongoing, Regulated, lock};
use crate::plant::Counters;
use crate::store::{DenseLock, DirectStore, ExpertStore};
use hotpin_controllers::ModelShape;
use std::sync::{Arc, Weak};

/// What goes round the loop, without the store that it acted on.
pub struct Suspended {
    ongoing: Ongoing,
    counters: Arc<Counters>,
    shape: ModelShape,
}

impl std::fmt::Debug for Suspended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Suspended")
            .field("options", &self.ongoing.options)
            .field("vram", &self.ongoing.vram)
            .finish_non_exhaustive()
    }
}

impl Governor {
    /// Ends the loop for a while. `None` when it had ended before. Its store is given up either way:
    /// nobody who watches the loop can reach it any more.
    #[must_use]
    pub fn suspend(mut self) -> Option<Suspended> {
        let looped = self.end();
        *lock(&self.shared.store) = Weak::<DirectStore>::new();
        let Loop {
            ongoing, regulated, ..
        } = looped?;
        Some(Suspended {
            ongoing,
            counters: regulated.counters,
            shape: regulated.shape,
        })
    }
}

impl Suspended {
    /// Goes on with another store over the same model file, whose dense weights are locked as `dense`
    /// says. What the first decision wanted is wanted again by those that follow.
    ///
    /// # Errors
    /// When the threads cannot be started.
    pub fn resume(
        self,
        store: Arc<dyn ExpertStore>,
        dense: &DenseLock,
    ) -> std::io::Result<Governor> {
        let mut ongoing = self.ongoing;
        ongoing.options.dense.note(dense);
        *lock(&ongoing.shared.store) = Arc::downgrade(&store);
        *lock(&ongoing.shared.stop) = false;
        let regulated = Regulated {
            store,
            counters: self.counters,
            shape: self.shape,
        };
        Governor::launch(Loop::new(ongoing, regulated))
    }

    /// Whether dense weights were locked.
    #[must_use]
    pub fn dense_locked(&self) -> bool {
        self.ongoing.options.dense.locked_bytes > 0
    }
}
