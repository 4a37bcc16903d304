//! Store `direct`: experts in slots of an anonymous arena, read with `O_DIRECT` through io_uring.
//!
//! Nothing of an expert passes through the page cache, so what is held is exactly what the books
//! say. An expert that is evicted leaves its memory to the next one: no fault, no zeroing, no
//! reclaim. The graph is pointed at slots by the engine (`engine::arena`), which waits for each
//! matmul's own part of what was routed.
//!
//! The engine's thread fetches, waits and evicts (`reading`). The governor's pins, unpins, resizes,
//! and loads what it pins through a reader of its own (`loading`). Both meet at the books.

mod arena;
mod books;
mod files;
mod foresight;
mod geometry;
mod loading;
mod reader;
mod reading;
mod slices;
mod sums;
mod trial;

use self::books::{Books, State};
use self::files::ModelFiles;
use self::geometry::Geometry;
use self::loading::Loader;
use self::reader::Reader;
use self::reading::Engine;
use self::sums::Sums;
pub use self::trial::{DiskTrial, try_disk};
use super::dense::Dense;
use super::layout::Layout;
use super::ranks::Ranks;
use super::{DenseLock, ExpertStore, Fetched, LeaveOff, Limitation, Limited, StoreError, Warmed};
use crate::engine::Learned;
use crate::model::ModelMap;
use crate::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use crate::sync::{Mutex, MutexGuard};
use hotpin_controllers::{ExpertId, Held, Residence};
use nix::errno::Errno;
use std::io;
use std::sync::{Arc, PoisonError};

/// How a direct store reads. The defaults are what it falls back from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectOptions {
    /// Read with `O_DIRECT`.
    pub direct: bool,
    /// Read through io_uring.
    pub uring: bool,
    /// Compare the CRC-32 of every slice that was read with the one of the file's bytes, taken once, by a second
    /// path: through the page cache.
    pub verify: bool,
    /// Lock the dense weights.
    pub lock_dense: bool,
    /// What goes wrong, in tests.
    pub fault: Option<Fault>,
}

/// Something that goes wrong on purpose, to see it caught.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The kernel delivers half of each read.
    ShortRead,
    /// The file ends early.
    EarlyEnd,
    /// The device reports an error.
    ReadError,
    /// One bit of each slice is wrong.
    BitFlip,
    /// The device reports an error once, for the first part of an expert.
    ReadErrorOnce,
    /// The governor's side panics when it loads an expert and has asked for so many parts of it.
    LoaderPanic(usize),
    /// The kernel refuses so many calls, for want of memory.
    Refused(u32),
    /// Matmuls start before their bytes are there.
    SkipWait,
}

impl Default for DirectOptions {
    fn default() -> Self {
        Self {
            direct: true,
            uring: true,
            verify: false,
            lock_dense: true,
            fault: None,
        }
    }
}

/// The store over an anonymous arena.
#[derive(Debug)]
pub struct DirectStore {
    // Readers before books: they write into the arena until they are dropped.
    engine: Mutex<Engine>,
    loader: Mutex<Loader>,
    books: Mutex<Books>,
    geometry: Geometry,
    files: Arc<ModelFiles>,
    layout: Layout,
    ranks: Ranks,
    shortfall_bytes: AtomicU64,
    waited_ns: AtomicU64,
    /// Reads of the engine that are outstanding.
    engine_reads: AtomicUsize,
    /// The expert for which the engine is about to take the loader.
    awaited: AtomicU32,
    dense: Dense,
    options: DirectOptions,
    limitations: Vec<Limited>,
    /// For `--verify`.
    sums: Sums,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DirectStore {
    /// Lays out the arena and opens the files. `piece_bytes` is the readahead request for locking
    /// the dense weights, as for the mapped store.
    ///
    /// # Errors
    /// [`StoreError::Open`] when a file or the address space cannot be had.
    ///
    /// # Safety
    /// The mapping that `layout` describes must outlive the store.
    pub unsafe fn new(
        map: &ModelMap,
        learned: &Learned,
        layout: Layout,
        options: DirectOptions,
        piece_bytes: usize,
    ) -> Result<(Self, DenseLock), StoreError> {
        let open = |source: io::Error| StoreError::Open {
            cause: source.to_string(),
        };
        let files = Arc::new(ModelFiles::open(map.shards(), options.direct).map_err(open)?);
        let geometry = Geometry::new(map, learned, files.align);
        let (reader, no_uring) = Reader::new(Arc::clone(&files), options);
        let (loader, _) = Reader::new(Arc::clone(&files), options);
        let books = Books::new(&geometry).map_err(open)?;
        let experts = map.shape().total_experts();
        let (dense, lock) = Dense::new(&layout, piece_bytes, options.lock_dense);
        let mut limitations = Vec::new();
        if let Some(why) = &files.not_direct {
            let said = format!("experts are read through the page cache: {why}");
            limitations.push((Limitation::NoDirectIo, said));
        }
        if let Some(why) = no_uring {
            let said = format!(
                "experts are read without io_uring, so reading and computing do not overlap: {why}"
            );
            limitations.push((Limitation::NoUring, said));
        }
        let store = Self {
            engine: Mutex::new(Engine::new(reader, experts, geometry.most_parts)),
            loader: Mutex::new(Loader::new(loader)),
            books: Mutex::new(books),
            ranks: Ranks::new(experts),
            shortfall_bytes: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
            engine_reads: AtomicUsize::new(0),
            awaited: AtomicU32::new(loading::NOBODY),
            dense,
            options,
            limitations,
            sums: Sums::new(&geometry),
            geometry,
            files,
            layout,
        };
        Ok((store, lock))
    }

    /// What this store has to do without.
    #[must_use]
    pub fn limitations(&self) -> &[Limited] {
        &self.limitations
    }

    fn not_locked(&self, id: ExpertId, books: &Books) -> StoreError {
        let bytes = self.geometry.shape.bytes(id);
        self.shortfall_bytes.fetch_add(bytes, Relaxed);
        StoreError::Lock {
            bytes,
            errno: books.lock_error().unwrap_or(Errno::EAGAIN),
            advice: "the arena is not locked: raise RLIMIT_MEMLOCK or grant CAP_IPC_LOCK",
        }
    }
}

impl ExpertStore for DirectStore {
    fn fetch(&self, experts: &[ExpertId]) -> Result<Fetched, StoreError> {
        self.fetch_layer(experts)
            .map_err(|cause| StoreError::Load { cause })
    }

    fn is_complete(&self) -> bool {
        lock(&self.books).hold()
    }

    fn release(&self) {
        lock(&self.books).release();
    }

    fn rest(&self, leave_off: LeaveOff<'_>) {
        lock(&self.books).use_only(&[]);
        self.take_in_left_behind(leave_off);
    }

    fn start_tick(&self) {
        self.shortfall_bytes.store(0, Relaxed);
        self.take_in_load();
    }

    fn pin_unless(&self, id: ExpertId, leave_off: LeaveOff<'_>) -> Result<bool, StoreError> {
        {
            let mut books = lock(&self.books);
            match books.state(id) {
                State::Pinned => return Ok(false),
                // Unless the engine reads it.
                State::Loading => {}
                State::Transit if books.pin(id) => return Ok(true),
                State::Transit => return Err(self.not_locked(id, &books)),
                State::Absent => books.make_room(id, 1, &|index| self.ranks.of(index)),
            }
        }
        if !self.bring(id, leave_off)? {
            return Ok(false);
        }
        let mut books = lock(&self.books);
        // The engine may have evicted it at once; then it was not worth much.
        match books.state(id) {
            State::Transit if books.pin(id) => Ok(true),
            State::Transit => Err(self.not_locked(id, &books)),
            _ => Ok(false),
        }
    }

    fn unpin(&self, id: ExpertId) -> bool {
        lock(&self.books).unpin(id)
    }

    fn clear_loaded(&self, _planned: &[ExpertId]) {
        // Experts are never read through the mapping again.
        self.dense.forget_loaded(&self.layout);
    }

    fn warm_unless(&self, id: ExpertId, leave_off: LeaveOff<'_>) -> Warmed {
        {
            let books = lock(&self.books);
            match books.state(id) {
                State::Transit | State::Pinned => return Warmed::Done,
                State::Absent if !books.has_budget(id) => return Warmed::NoRoom,
                State::Absent if !books.has_room(id) => return Warmed::NotYet,
                State::Absent | State::Loading => {}
            }
        }
        self.give_way(leave_off);
        match self.bring(id, leave_off) {
            Ok(false) => Warmed::UnderWay,
            // What cannot be read now is read when it is used, and fails then.
            Ok(true) | Err(_) => Warmed::Done,
        }
    }

    fn prepare(&self) -> bool {
        let Some(unready) = lock(&self.books).unready() else {
            return false;
        };
        let populated = unready.populate().is_ok();
        if populated {
            lock(&self.books).ready(unready);
        }
        populated
    }

    fn allow_fresh(&self, bytes: u64) {
        lock(&self.books).allow_fresh(bytes);
    }

    fn set_capacity(&self, bytes: u64) {
        lock(&self.books).set_capacity(bytes, &|index| self.ranks.of(index));
    }

    fn publish_ranks(&self, ranks: &[f32]) {
        self.ranks.publish(ranks);
    }

    fn trim(&self) {}

    fn audit(&self) -> Option<u64> {
        // The kernel takes milliseconds to look through gigabytes; nobody waits for the books meanwhile.
        let unlocked = lock(&self.books).unlocked();
        let mut scratch = Vec::new();
        let gone = unlocked
            .iter()
            .filter(|unlocked| unlocked.is_gone(&mut scratch));
        Some(gone.map(|gone| lock(&self.books).give_up(gone)).sum())
    }

    fn held(&self) -> Held {
        Held {
            lock_shortfall_bytes: self.shortfall_bytes.load(Relaxed),
            ..lock(&self.books).held()
        }
    }

    fn private_transit_bytes(&self) -> u64 {
        let books = lock(&self.books);
        books
            .memory_bytes()
            .saturating_sub(books.held().pinned_bytes)
    }

    fn waited_ns(&self) -> Option<u64> {
        Some(self.waited_ns.load(Relaxed))
    }

    fn read_bandwidth(&self) -> Option<f64> {
        self.measure_reads().ok().flatten()
    }

    fn locked_bytes(&self) -> u64 {
        let dense = self.dense.locked_ranges().iter().copied();
        lock(&self.books).locked_bytes() + super::pages::union_bytes(dense)
    }

    fn check_unchanged(&self) -> Result<(), String> {
        self.layout.check_unchanged()
    }

    fn residence_into(&self, out: &mut [Residence]) {
        lock(&self.books).residence_into(out);
    }

    fn warm_dense(&self, leave_off: LeaveOff<'_>) -> bool {
        self.dense.warm(leave_off)
    }

    fn set_dense_locked(&self, lock: bool) -> DenseLock {
        self.dense.set(lock)
    }

    fn unlock_all(&self) {
        lock(&self.books).unlock_all();
        self.dense.unlock();
    }
}

impl Drop for DirectStore {
    fn drop(&mut self) {
        self.unlock_all();
    }
}
