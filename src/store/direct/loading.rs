//! The governor's side: experts that are loaded because they are to be pinned, and the disk's speed.

use super::books::State;
use super::reader::Reader;
use super::trial::time_reads;
use super::{DirectStore, Fault, lock};
use crate::store::{ExpertStore, StoreError};
use crate::sync::atomic::Ordering::Relaxed;
use hotpin_controllers::ExpertId;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the disk's speed is measured.
const MEASURED_FOR: Duration = Duration::from_millis(60);

/// How long reads that nobody waits for let the engine's go first, and how often they look.
const GIVEN_WAY: Duration = Duration::from_millis(40);
const GIVEN_WAY_STEP: Duration = Duration::from_micros(500);

/// Why the governor's side could not load an expert.
enum NotLoaded {
    /// Its reads have ended.
    Failed(String),
    /// Some of its reads may still be under way, so its slot must not be used for anything else.
    StillReading(String),
}

/// An expert that the governor's side is loading. Whatever happens to the governor, the engine is
/// told how it ended.
struct Bringing<'a> {
    store: &'a DirectStore,
    id: ExpertId,
    ended: bool,
}

impl Bringing<'_> {
    fn end(mut self, outcome: Result<(), NotLoaded>) -> Result<(), StoreError> {
        self.ended = true;
        let mut books = lock(&self.store.books);
        let failure = match outcome {
            Ok(()) => {
                books.loaded(self.id);
                return Ok(());
            }
            Err(NotLoaded::Failed(cause)) => {
                books.drop_expert(self.id);
                cause
            }
            Err(NotLoaded::StillReading(cause)) => {
                books.give_up(self.id);
                cause
            }
        };
        Err(StoreError::Load { cause: failure })
    }
}

impl Drop for Bringing<'_> {
    fn drop(&mut self) {
        if !self.ended {
            lock(&self.store.books).give_up(self.id);
        }
        self.store.loads.notify_all();
    }
}

impl DirectStore {
    /// Loads an expert that has a slot.
    fn load(&self, id: ExpertId, address: usize) -> Result<(), NotLoaded> {
        assert!(
            self.options.fault != Some(Fault::LoaderPanic),
            "a load was to panic"
        );
        let mut reader = lock(&self.loader);
        for part in 0..self.geometry.parts(id) {
            self.queue(&mut reader, id, part, address);
        }
        let mut ended = Vec::new();
        let mut outcome = Ok(());
        while reader.outstanding() > 0 {
            reader
                .reap(true, &mut ended)
                .map_err(|e| NotLoaded::StillReading(format!("waiting for reads failed: {e}")))?;
            // Others are late reads of an expert that was given up.
            for done in ended.drain(..).filter(|done| done.owner.0 == id.0) {
                let part = usize::from(done.owner.1);
                let taken = done.result.and_then(|()| self.settle(id, part, address));
                outcome = outcome.and(taken);
            }
        }
        outcome.map_err(NotLoaded::Failed)
    }

    /// Lets the engine's reads go first, for a while: it may read all the time.
    pub(super) fn give_way(&self) {
        let began = Instant::now();
        while self.engine_reads.load(Relaxed) > 0 && began.elapsed() < GIVEN_WAY {
            std::thread::sleep(GIVEN_WAY_STEP);
        }
    }

    /// Gives an absent expert a slot and loads it.
    pub(super) fn bring(&self, id: ExpertId) -> Result<(), StoreError> {
        // The engine does not wait for the lock meanwhile.
        self.prepare();
        let address = {
            let mut books = lock(&self.books);
            if books.state(id) != State::Absent {
                return Ok(());
            }
            books.take_slot(id);
            books.address(id)
        };
        let bringing = Bringing {
            store: self,
            id,
            ended: false,
        };
        bringing.end(match address {
            Some(address) => self.load(id, address),
            None => Err(NotLoaded::Failed("it has no slot".to_owned())),
        })
    }

    /// Reads parts of experts from all over the files and times it, bytes a second; `None` for a model that has
    /// none.
    pub(super) fn measure_reads(&self) -> io::Result<Option<f64>> {
        let parts = self.geometry.layers.iter().flat_map(|layer| &layer.parts);
        let Some(slice_bytes) = parts.map(|part| part.slice_bytes).max() else {
            return Ok(None);
        };
        let read_bytes = slice_bytes.next_multiple_of(self.files.align);
        let (mut reader, _) = Reader::new(Arc::clone(&self.files), self.options);
        time_reads(&mut reader, &self.files, read_bytes, MEASURED_FOR).map(Some)
    }
}
