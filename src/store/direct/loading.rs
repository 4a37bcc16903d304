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

/// The engine waits for nobody's load.
pub(super) const NOBODY: u32 = u32::MAX;

/// How long the engine is given to take the loader before it is asked for again.
const HANDED_OVER: Duration = Duration::from_micros(500);

/// How long reads are waited for before it is asked whether to leave off.
pub(super) const STEP: Duration = Duration::from_millis(2);

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
    /// Why it will not be there when its reads have ended.
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

/// Looks after the loader. Whatever happens meanwhile, an expert that is being read is taken in or dropped when all of
/// its reads have ended, and not before: its slot must not be used for anything else until then.
struct Minding<'a> {
    store: &'a DirectStore,
    loader: MutexGuard<'a, Loader>,
}

impl Drop for Minding<'_> {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(load) = &mut self.loader.load
        {
            // Not all of it may have been asked for, and what has ended may be lost.
            let cause = || "whoever loaded it panicked".to_owned();
            load.failed.get_or_insert_with(cause);
        }
    }
}

impl Minding<'_> {
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
        let failed = None;
        loader.load = Some(Load {
            id,
            address,
            failed,
        });
        for part in 0..store.geometry.parts(id) {
            assert!(
                store.options.fault != Some(Fault::LoaderPanic(part)),
                "a load was to panic"
            );
            store.queue(&mut loader.reader, id, part, address);
        }
        Ok(())
    }

    /// Takes in reads that have ended, and with the last of an expert that one.
    ///
    /// # Errors
    /// When it could not be read; or when it cannot be known now which reads have ended, and then it goes on being
    /// loaded.
    fn take_in(&mut self, wait: Wait) -> Result<(), StoreError> {
        let Loader {
            reader,
            ended,
            load: under_way,
        } = &mut *self.loader;
        let Some(load) = under_way else {
            return Ok(());
        };
        let reaped = reader.reap(wait, ended);
        for done in ended.drain(..) {
            if load.failed.is_some() {
                continue;
            }
            let part = usize::from(done.owner.1);
            let taken = done
                .result
                .and_then(|()| self.store.settle(load.id, part, load.address));
            load.failed = taken.err();
        }
        // A load that ended in a panic may have no read left.
        if reader.outstanding() > 0 {
            return reaped.map_err(|error| StoreError::Load {
                cause: format!("waiting for reads failed: {error}; they are waited for again"),
            });
        }
        let mut books = lock(&self.store.books);
        let id = load.id;
        match under_way.take().and_then(|load| load.failed) {
            None => {
                books.loaded(id);
                Ok(())
            }
            Some(cause) => {
                books.not_loaded(id);
                Err(StoreError::Load { cause })
            }
        }
    }

    /// Waits until nothing is being loaded; false when that was left off, also because the engine needs another expert
    /// than this one.
    fn finish(&mut self, leave_off: LeaveOff<'_>) -> Result<bool, StoreError> {
        while let Some(load) = &self.loader.load {
            let awaited = self.store.awaited.load(Relaxed);
            if awaited != NOBODY && awaited != load.id.0 {
                return Ok(false);
            }
            self.take_in(Wait::AtMost(STEP))?;
            if self.loader.load.is_some() && leave_off() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl DirectStore {
    /// The loader, unless the engine is waiting for what it loads, or is about to: locks go to whoever comes first,
    /// and the governor would take this one again before the engine has woken up.
    fn minding(&self) -> Option<Minding<'_>> {
        if self.is_awaited() {
            std::thread::sleep(HANDED_OVER);
            if self.is_awaited() {
                return None;
            }
        }
        let loader = match self.loader.try_lock() {
            Ok(loader) => loader,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let store = self;
        Some(Minding { store, loader })
    }

    fn is_awaited(&self) -> bool {
        self.awaited.load(Relaxed) != NOBODY
    }

    /// Takes in what has ended of a load that was left off.
    pub(super) fn take_in_load(&self) {
        if let Some(Err(error)) = self.minding().map(|mut minding| minding.take_in(Wait::Not)) {
            tell(&error);
        }
    }

    /// Waits for an expert that the governor's side has begun to load. False when it did not come: the engine uses it,
    /// so that it has kept its slot and can be read by the engine itself.
    ///
    /// # Errors
    /// In words, when it is not known whether it comes.
    pub(super) fn await_load(&self, id: ExpertId) -> Result<bool, String> {
        let state = || lock(&self.books).state(id);
        if state() != State::Loading {
            return Ok(true);
        }
        self.awaited.store(id.0, Relaxed);
        let loader = lock(&self.loader);
        self.awaited.store(NOBODY, Relaxed);
        let store = self;
        let mut minding = Minding { store, loader };
        while minding.loader.is_loading(id) {
            match minding.take_in(Wait::ForOne) {
                Ok(()) => {}
                Err(error) if minding.loader.is_loading(id) => return Err(error.to_string()),
                Err(error) => tell(&error),
            }
        }
        Ok(state() != State::Loading)
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
            match minding.finish(leave_off) {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(error) if minding.loader.load.is_some() => return Err(error),
                // That was another one.
                Err(error) => tell(&error),
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

/// Says of an expert that nobody asks for at this moment that it could not be read.
fn tell(error: &StoreError) {
    tracing::warn!("an expert that was to be pinned could not be read: {error}");
}
