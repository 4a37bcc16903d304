//! The governor's side: experts that are loaded because they are to be pinned, and the disk's speed.

use super::arena::Arena;
use super::books::{State, expert_id};
use super::reader::Reader;
use super::{DirectStore, Fault, lock};
use crate::store::StoreError;
use hotpin_controllers::ExpertId;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Experts that are read at once to measure bandwidth, how often, and from one to the next: a prime,
/// so that they lie all over the file.
const MEASURED_AT_ONCE: usize = 8;
const MEASURED_BATCHES: usize = 16;
const MEASURED_STRIDE: usize = 7919;
/// Memory for measuring, unless one expert has more.
const MEASURED_BYTES: usize = 256 << 20;

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

    /// Gives an absent expert a slot and loads it.
    pub(super) fn bring(&self, id: ExpertId) -> Result<(), StoreError> {
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

    /// Reads experts from all over the model into memory of their own and times it.
    pub(super) fn measure_reads(&self) -> io::Result<Option<f64>> {
        let experts = self.geometry.shape.total_experts();
        let largest = self.geometry.classes.iter().map(|c| c.slot_bytes).max();
        let Some(slot_bytes) = largest.filter(|&bytes| experts > 0 && bytes > 0) else {
            return Ok(None);
        };
        let at_once = (MEASURED_BYTES / slot_bytes).clamp(1, MEASURED_AT_ONCE);
        let room = Arena::reserve(slot_bytes, at_once)?;
        // A reader of its own, made after the memory and gone before it, whatever fails.
        let (mut reader, _) = Reader::new(Arc::clone(&self.files), self.options);
        let (mut bytes, mut started, mut ended) = (0, Instant::now(), Vec::new());
        for batch in 0..=MEASURED_BATCHES {
            // The first batch touches the memory.
            if batch == 1 {
                (bytes, started) = (0, Instant::now());
            }
            for slot in 0..at_once {
                let number = batch * at_once + slot;
                let id = expert_id(number * MEASURED_STRIDE % experts);
                let address = room.address(u32::try_from(slot).unwrap_or(0));
                for part in 0..self.geometry.parts(id) {
                    bytes += self.queue(&mut reader, id, part, address);
                }
            }
            while reader.outstanding() > 0 {
                reader.reap(true, &mut ended)?;
            }
            if ended.drain(..).any(|done| done.result.is_err()) {
                return Ok(None);
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "some hundred MB")]
        let bytes = bytes as f64;
        Ok(Some(bytes / started.elapsed().as_secs_f64().max(1e-9)))
    }
}
