//! The governor's side: experts that are loaded because they are to be pinned, and the disk's speed.
//!
//! One expert is loaded at a time. Whoever wants it can leave off while it is read, as the governor does when it
//! can wait no longer; its reads go on, and who looks next takes them in: the governor's next pin or tick, or the
//! engine when the expert is routed.

use super::books::State;
use super::reader::{Done, Reader, Wait};
use super::trial::time_reads;
use super::{DirectStore, Fault, lock};
use crate::store::{ExpertStore, LeaveOff, StoreError};
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering::Relaxed;
use hotpin_controllers::ExpertId;
use std::io;
use std::sync::{Arc, TryLockError};
use std::time::{Duration, Instant};

/// How long the disk's speed is measured.
const MEASURED_FOR: Duration = Duration::from_millis(60);

/// How long reads that nobody waits for let the engine's go first, and how often they look.
const GIVEN_WAY: Duration = Duration::from_millis(40);
const GIVEN_WAY_STEP: Duration = Duration::from_micros(500);

/// How long reads are waited for before it is asked whether to leave off.
const STEP: Duration = Duration::from_millis(2);

/// The governor's reads and what they are for.
#[derive(Debug)]
pub(super) struct Loader {
    reader: Reader,
    ended: Vec<Done>,
    load: Option<Load>,
}

/// An expert that is being read.
#[derive(Debug)]
struct Load {
    id: ExpertId,
    /// Of its slot, which it keeps until it was read.
    address: usize,
    /// Outstanding reads.
    left: usize,
    /// Why one of them failed.
    failed: Option<String>,
}

impl Loader {
    pub(super) fn new(reader: Reader) -> Self {
        Self {
            reader,
            ended: Vec::new(),
            load: None,
        }
    }

    fn is_loading(&self, id: ExpertId) -> bool {
        self.load.as_ref().is_some_and(|load| load.id == id)
    }
}

/// Looks after the loader. Whatever happens meanwhile, the engine is told of an expert that will not come.
struct Minding<'a> {
    store: &'a DirectStore,
    loader: MutexGuard<'a, Loader>,
}

impl Drop for Minding<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.give_up();
        }
    }
}

impl Minding<'_> {
    /// Leaves the expert as being read for good: some reads may still be under way, so its slot must not be used
    /// for anything else.
    fn give_up(&mut self) {
        self.loader.load = None;
    }

    /// Gives an absent expert a slot and begins to read it.
    fn begin(&mut self, id: ExpertId) -> Result<(), StoreError> {
        let store = self.store;
        let mut books = lock(&store.books);
        if books.state(id) != State::Absent {
            return Ok(());
        }
        books.take_slot(id);
        let Some(address) = books.address(id) else {
            books.drop_expert(id);
            let cause = "it has no slot".to_owned();
            return Err(StoreError::Load { cause });
        };
        drop(books);
        let loader = &mut *self.loader;
        let parts = store.geometry.parts(id);
        loader.load = Some(Load {
            id,
            address,
            left: parts,
            failed: None,
        });
        assert!(
            store.options.fault != Some(Fault::LoaderPanic),
            "a load was to panic"
        );
        for part in 0..parts {
            store.queue(&mut loader.reader, id, part, address);
        }
        Ok(())
    }

    /// Takes in reads that have ended, and with the last of an expert that one.
    ///
    /// # Errors
    /// When it could not be read, or it will not be known whether it was.
    fn take_in(&mut self, wait: Wait) -> Result<(), StoreError> {
        let loader = &mut *self.loader;
        if let Err(error) = loader.reader.reap(wait, &mut loader.ended) {
            self.give_up();
            let cause = format!("waiting for reads failed: {error}");
            return Err(StoreError::Load { cause });
        }
        let Some(load) = &mut loader.load else {
            loader.ended.clear();
            return Ok(());
        };
        // Others are late reads of an expert that was given up.
        let ended = loader.ended.drain(..);
        for done in ended.filter(|done| done.owner.0 == load.id.0) {
            let part = usize::from(done.owner.1);
            let taken = done
                .result
                .and_then(|()| self.store.settle(load.id, part, load.address));
            if let Err(cause) = taken {
                load.failed.get_or_insert(cause);
            }
            load.left -= 1;
        }
        if load.left > 0 {
            return Ok(());
        }
        let mut books = lock(&self.store.books);
        let Some(load) = loader.load.take() else {
            return Ok(());
        };
        match load.failed {
            None => {
                books.loaded(load.id);
                Ok(())
            }
            Some(cause) => {
                books.drop_expert(load.id);
                Err(StoreError::Load { cause })
            }
        }
    }

    /// Waits until nothing is being loaded; false when that was left off.
    fn finish(&mut self, leave_off: LeaveOff<'_>) -> Result<bool, StoreError> {
        while self.loader.load.is_some() {
            self.take_in(Wait::AtMost(STEP))?;
            if self.loader.load.is_some() && leave_off() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl DirectStore {
    /// The loader, unless the engine is waiting for what it loads.
    fn minding(&self) -> Option<Minding<'_>> {
        let loader = match self.loader.try_lock() {
            Ok(loader) => loader,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let store = self;
        Some(Minding { store, loader })
    }

    /// Takes in what has ended of a load that was left off.
    pub(super) fn take_in_load(&self) {
        if let Some(Err(error)) = self.minding().map(|mut minding| minding.take_in(Wait::Not)) {
            tracing::warn!("an expert that was to be pinned could not be read: {error}");
        }
    }

    /// Waits for an expert that the governor's side has begun to load.
    ///
    /// # Errors
    /// In words, when it does not come.
    pub(super) fn await_load(&self, id: ExpertId) -> Result<(), String> {
        let loader = lock(&self.loader);
        let store = self;
        let mut minding = Minding { store, loader };
        while minding.loader.is_loading(id) {
            minding.take_in(Wait::ForOne).map_err(|e| e.to_string())?;
        }
        match lock(&self.books).state(id) {
            // It was given up.
            State::Loading => {
                Err("an expert that was to be pinned can no longer be read".to_owned())
            }
            State::Absent => Err("an expert that was to be pinned could not be read".to_owned()),
            State::Transit | State::Pinned => Ok(()),
        }
    }

    /// Lets the engine's reads go first, for a while: it may read all the time.
    pub(super) fn give_way(&self, leave_off: LeaveOff<'_>) {
        let began = Instant::now();
        while self.engine_reads.load(Relaxed) > 0 && began.elapsed() < GIVEN_WAY && !leave_off() {
            std::thread::sleep(GIVEN_WAY_STEP);
        }
    }

    /// Gives an absent expert a slot and loads it. False when that was left off, or something else is still
    /// being loaded.
    ///
    /// # Errors
    /// [`StoreError::Load`]
    pub(super) fn bring(&self, id: ExpertId, leave_off: LeaveOff<'_>) -> Result<bool, StoreError> {
        let Some(mut minding) = self.minding() else {
            return Ok(false);
        };
        if !minding.loader.is_loading(id) {
            if !minding.finish(leave_off)? {
                return Ok(false);
            }
            // The engine does not wait for the lock of the books meanwhile.
            self.prepare();
            minding.begin(id)?;
        }
        minding.finish(leave_off)
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
