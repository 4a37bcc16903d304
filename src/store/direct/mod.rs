//! Store `direct`: experts in slots of an anonymous arena, read with `O_DIRECT` through io_uring.
//!
//! Nothing of an expert passes through the page cache, so what is held is exactly what the books
//! say. An expert that is evicted leaves its memory to the next one: no fault, no zeroing, no
//! reclaim. The graph is pointed at slots by the engine (`engine::arena`), which waits for each
//! matmul's own part of what was routed.
//!
//! The engine's thread fetches, waits and evicts. The governor's pins, unpins, resizes, and loads
//! what it pins through a reader of its own. Both meet at the books.

mod arena;
mod books;
mod files;
mod foresight;
mod geometry;
mod reader;
mod trial;

use self::arena::Arena;
use self::books::{Books, State};
use self::files::ModelFiles;
use self::foresight::{Foresight, MOST_OUTSTANDING};
use self::geometry::Geometry;
use self::reader::{Done, Read, Reader};
pub use self::trial::{DiskTrial, try_disk};
use super::dense::Dense;
use super::layout::Layout;
use super::ranks::Ranks;
use super::{DenseLock, ExpertStore, Fetched, Limitation, Limited, StoreError};
use crate::engine::{ExpertArena, Guess, Learned, Window};
use crate::model::ModelMap;
use hotpin_controllers::{ExpertId, Held, Residence};
use nix::errno::Errno;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Missing experts of a layer up to which they are read one after the other.
const MOST_ONE_BY_ONE: usize = 16;

/// Experts that are read at once to measure bandwidth, how often, and from one to the next: a prime,
/// so that they lie all over the file.
const MEASURED_AT_ONCE: usize = 8;
const MEASURED_BATCHES: usize = 16;
const MEASURED_STRIDE: usize = 7919;

/// How a direct store reads. The defaults are what it falls back from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectOptions {
    /// Read with `O_DIRECT`.
    pub direct: bool,
    /// Read through io_uring.
    pub uring: bool,
    /// Compare every slice that was read with the file's bytes through the page cache.
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
    loader: Mutex<Reader>,
    books: Mutex<Books>,
    /// Told when the governor's load of an expert ended.
    loads: Condvar,
    geometry: Geometry,
    files: Arc<ModelFiles>,
    layout: Layout,
    ranks: Ranks,
    shortfall_bytes: AtomicU64,
    waited_ns: AtomicU64,
    dense: Dense,
    verify: bool,
    fault: Option<Fault>,
    limitations: Vec<Limited>,
}

/// The engine's side: its reads and what they are for.
#[derive(Debug)]
struct Engine {
    reader: Reader,
    ended: Vec<Done>,
    /// The experts of the layer that was routed last.
    routed: Vec<ExpertId>,
    /// Those of them that the governor is loading.
    foreign: Vec<ExpertId>,
    /// Those of them that were read for this layer, to be verified.
    fresh: Vec<ExpertId>,
    /// For each part of each expert whether a read is outstanding.
    pending: Vec<bool>,
    /// Outstanding reads of each expert.
    left: Vec<u8>,
    /// Why a read failed, by expert.
    failed: Vec<(ExpertId, String)>,
    foresight: Foresight,
}

/// Why the governor's side could not load an expert.
enum NotLoaded {
    /// Its reads have ended.
    Failed(String),
    /// Some of its reads may still be under way, so its slot must not be used for anything else.
    StillReading(String),
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
            engine: Mutex::new(Engine {
                reader,
                ended: Vec::new(),
                routed: Vec::new(),
                foreign: Vec::new(),
                fresh: Vec::new(),
                pending: vec![false; experts * geometry.most_parts],
                left: vec![0; experts],
                failed: Vec::new(),
                foresight: Foresight::default(),
            }),
            loader: Mutex::new(loader),
            books: Mutex::new(books),
            loads: Condvar::new(),
            ranks: Ranks::new(experts),
            shortfall_bytes: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
            dense,
            verify: options.verify,
            fault: options.fault,
            limitations,
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

    /// Queues the reads of an expert's parts `parts` into its slot at `address`.
    fn queue(&self, reader: &mut Reader, id: ExpertId, part: usize, address: usize) -> u64 {
        let extent = self.geometry.extent(id, part);
        let read = Read {
            owner: (id.0, u8::try_from(part).unwrap_or(u8::MAX)),
            shard: extent.shard,
            offset: extent.offset,
            address: address + extent.at,
            len: extent.len,
            least: extent.skip + extent.slice_bytes,
        };
        // SAFETY: the range lies in a slot that the books gave to this expert for loading; nobody
        // else reads or writes it before the expert is marked as loaded, and the arena outlives
        // the readers.
        unsafe { reader.push(read) };
        extent.slice_bytes as u64
    }

    /// Brings a slice that was just read to its tensor's phase.
    fn settle(&self, id: ExpertId, part: usize, address: usize) {
        let extent = self.geometry.extent(id, part);
        let (from, to) = (address + extent.at + extent.skip, address + extent.slice_at);
        if from != to {
            // SAFETY: both ranges lie in the part's area of a slot that is being loaded.
            unsafe {
                std::ptr::copy(from as *const u8, to as *mut u8, extent.slice_bytes);
            }
        }
        if self.fault == Some(Fault::BitFlip) {
            // SAFETY: as above.
            unsafe { *(to as *mut u8) ^= 1 };
        }
    }

    /// Compares a slice in memory with the file.
    fn check(&self, id: ExpertId, part: usize, address: usize) -> Result<(), String> {
        use std::os::unix::fs::FileExt;
        let extent = self.geometry.extent(id, part);
        let mut expected = vec![0_u8; extent.slice_bytes];
        let offset = extent.offset + extent.skip as u64;
        self.files.shards[extent.shard]
            .cached
            .read_exact_at(&mut expected, offset)
            .map_err(|e| format!("verifying at offset {offset}: {e}"))?;
        // SAFETY: the slice lies in the expert's slot, and no read into it is outstanding.
        let found = unsafe {
            std::slice::from_raw_parts((address + extent.slice_at) as *const u8, extent.slice_bytes)
        };
        if found == expected {
            return Ok(());
        }
        let (layer, index) = self.geometry.shape.place(id);
        Err(format!(
            "expert {index} of MoE layer {layer}, part {part}: what is in memory is not what the file has at offset {offset}"
        ))
    }

    /// Takes in reads that ended.
    fn take_in(&self, engine: &mut Engine, wait: bool) -> Result<(), String> {
        let Engine {
            reader,
            ended,
            pending,
            left,
            failed,
            ..
        } = engine;
        reader
            .reap(wait, ended)
            .map_err(|e| format!("waiting for reads failed: {e}"))?;
        for done in ended.drain(..) {
            let (id, part) = (ExpertId(done.owner.0), usize::from(done.owner.1));
            pending[id.index() * self.geometry.most_parts + part] = false;
            left[id.index()] = left[id.index()].saturating_sub(1);
            let mut books = lock(&self.books);
            match (done.result, books.address(id)) {
                (Ok(()), Some(address)) => self.settle(id, part, address),
                (Err(cause), _) => failed.push((id, cause)),
                (Ok(()), None) => failed.push((id, "its slot was lost".to_owned())),
            }
            if left[id.index()] > 0 {
                continue;
            }
            if failed.iter().any(|(expert, _)| *expert == id) {
                books.drop_expert(id);
            } else {
                books.loaded(id);
            }
        }
        Ok(())
    }

    /// Loads an expert that has a slot, on the governor's side.
    fn load(&self, id: ExpertId, address: usize) -> Result<(), NotLoaded> {
        let mut reader = lock(&self.loader);
        for part in 0..self.geometry.parts(id) {
            self.queue(&mut reader, id, part, address);
        }
        let mut ended = Vec::new();
        let mut failure = None;
        while reader.outstanding() > 0 {
            reader
                .reap(true, &mut ended)
                .map_err(|e| NotLoaded::StillReading(format!("waiting for reads failed: {e}")))?;
            // Others are late reads of an expert that was given up.
            for done in ended.drain(..).filter(|done| done.owner.0 == id.0) {
                match done.result {
                    Ok(()) => self.settle(id, usize::from(done.owner.1), address),
                    Err(cause) => failure = Some(cause),
                }
            }
        }
        if let Some(cause) = failure {
            return Err(NotLoaded::Failed(cause));
        }
        if self.verify {
            (0..self.geometry.parts(id))
                .try_for_each(|part| self.check(id, part, address))
                .map_err(NotLoaded::Failed)?;
        }
        Ok(())
    }

    /// Gives an absent expert a slot and loads it, on the governor's side.
    fn bring(&self, id: ExpertId) -> Result<(), StoreError> {
        let address = {
            let mut books = lock(&self.books);
            if books.state(id) != State::Absent {
                return Ok(());
            }
            books.take_slot(id);
            books.address(id)
        };
        let outcome = match address {
            Some(address) => self.load(id, address),
            None => Err(NotLoaded::Failed("it has no slot".to_owned())),
        };
        let mut books = lock(&self.books);
        let outcome = match outcome {
            Ok(()) => {
                books.loaded(id);
                Ok(())
            }
            Err(NotLoaded::Failed(cause)) => {
                books.drop_expert(id);
                Err(StoreError::Load { cause })
            }
            Err(NotLoaded::StillReading(cause)) => {
                books.give_up(id);
                Err(StoreError::Load { cause })
            }
        };
        drop(books);
        self.loads.notify_all();
        outcome
    }

    /// Reads experts from all over the model into memory of their own and times it.
    fn measure_reads(&self) -> io::Result<Option<f64>> {
        let experts = self.geometry.shape.total_experts();
        let largest = self.geometry.classes.iter().map(|c| c.slot_bytes).max();
        let Some(slot_bytes) = largest.filter(|_| experts > 0) else {
            return Ok(None);
        };
        let room = Arena::reserve(slot_bytes, MEASURED_AT_ONCE)?;
        let mut reader = lock(&self.loader);
        let (mut bytes, mut started, mut ended) = (0, Instant::now(), Vec::new());
        for batch in 0..=MEASURED_BATCHES {
            // The first batch touches the memory.
            if batch == 1 {
                (bytes, started) = (0, Instant::now());
            }
            for slot in 0..MEASURED_AT_ONCE {
                let number = batch * MEASURED_AT_ONCE + slot;
                let id = books::expert_id(number * MEASURED_STRIDE % experts);
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

    /// Reads an expert ahead if it is not resident, the guess is trusted and the disk has time.
    fn weigh(&self, engine: &mut Engine, layer: usize, id: ExpertId, guess: &Guess) {
        let mut books = lock(&self.books);
        let wanted = books.state(id) == State::Absent
            && engine.foresight.weigh(layer, id, guess)
            && engine.reader.outstanding() < MOST_OUTSTANDING;
        if !wanted {
            return;
        }
        books.make_room(id, 1, &|index| self.ranks.of(index));
        if !books.has_room(id) {
            return;
        }
        books.take_slot(id);
        let Some(address) = books.address(id) else {
            return;
        };
        drop(books);
        for part in 0..self.geometry.parts(id) {
            self.queue(&mut engine.reader, id, part, address);
            engine.pending[id.index() * self.geometry.most_parts + part] = true;
            engine.left[id.index()] += 1;
        }
    }

    fn not_locked(&self, id: ExpertId, books: &Books) -> StoreError {
        let bytes = self.geometry.shape.bytes(id);
        self.shortfall_bytes.fetch_add(bytes, Relaxed);
        StoreError::Lock {
            bytes,
            errno: books.lock_error().unwrap_or(Errno::EPERM),
            advice: "the arena is not locked: raise RLIMIT_MEMLOCK or grant CAP_IPC_LOCK",
        }
    }

    fn wait_for_governor(&self, engine: &mut Engine) -> Result<(), String> {
        let mut books = lock(&self.books);
        for id in engine.foreign.drain(..) {
            while books.state(id) == State::Loading {
                if books.is_given_up(id) {
                    return Err("an expert that was to be pinned can no longer be read".to_owned());
                }
                books = self
                    .loads
                    .wait(books)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            if books.state(id) == State::Absent {
                return Err("an expert that was to be pinned could not be read".to_owned());
            }
        }
        Ok(())
    }
}

impl ExpertStore for DirectStore {
    fn fetch(&self, experts: &[ExpertId]) -> Result<Fetched, StoreError> {
        let fail = |cause: String| StoreError::Load { cause };
        let mut engine = lock(&self.engine);
        self.take_in(&mut engine, false).map_err(fail)?;
        engine.failed.clear();
        engine.routed.clear();
        engine.routed.extend_from_slice(experts);
        engine.foreign.clear();
        engine.fresh.clear();
        let mut found = Fetched::default();
        let mut reads = Vec::new();
        {
            let mut books = lock(&self.books);
            books.use_only(experts);
            if let Some(&first) = experts.first() {
                let layer = self.geometry.shape.layer_of(first);
                engine.foresight.judge(layer, experts);
            }
            for &id in experts {
                self.ranks.raise(id);
                match books.state(id) {
                    State::Pinned => {
                        found.hits += 1;
                        found.pinned_hits += 1;
                    }
                    State::Transit => found.hits += 1,
                    State::Loading => {
                        found.misses += 1;
                        if engine.left[id.index()] == 0 {
                            engine.foreign.push(id);
                        }
                    }
                    State::Absent => {
                        found.misses += 1;
                        engine.fresh.push(id);
                    }
                }
            }
            if let Some(&first) = engine.fresh.first() {
                books.make_room(first, engine.fresh.len(), &|index| self.ranks.of(index));
            }
            for &id in &engine.fresh {
                books.take_slot(id);
                if let Some(address) = books.address(id) {
                    reads.push((id, address));
                }
            }
        }
        // In the order in which they are used: a few experts are computed one by one, many part by
        // part.
        let parts = 0..self.geometry.most_parts;
        let mut order: Vec<(usize, usize)> = parts
            .flat_map(|part| (0..reads.len()).map(move |read| (part, read)))
            .filter(|&(part, read)| part < self.geometry.parts(reads[read].0))
            .collect();
        if reads.len() <= MOST_ONE_BY_ONE {
            order.sort_by_key(|&(part, read)| (read, part));
        }
        for (part, read) in order {
            let (id, address) = reads[read];
            found.bytes += self.queue(&mut engine.reader, id, part, address);
            engine.pending[id.index() * self.geometry.most_parts + part] = true;
            engine.left[id.index()] += 1;
        }
        if !reads.is_empty() {
            engine.reader.start().map_err(|e| fail(e.to_string()))?;
        }
        Ok(found)
    }

    fn is_complete(&self) -> bool {
        lock(&self.books).hold()
    }

    fn release(&self) {
        lock(&self.books).release();
    }

    fn start_tick(&self) {
        self.shortfall_bytes.store(0, Relaxed);
    }

    fn pin(&self, id: ExpertId) -> Result<bool, StoreError> {
        {
            let mut books = lock(&self.books);
            match books.state(id) {
                State::Pinned | State::Loading => return Ok(false),
                State::Transit if books.pin(id) => return Ok(true),
                State::Transit => return Err(self.not_locked(id, &books)),
                State::Absent => books.make_room(id, 1, &|index| self.ranks.of(index)),
            }
        }
        self.bring(id)?;
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

    fn warm(&self, id: ExpertId) -> bool {
        {
            let books = lock(&self.books);
            if books.state(id) != State::Absent {
                return true;
            }
            if !books.has_room(id) {
                return false;
            }
        }
        // What cannot be read now is read when it is used, and fails then.
        let _ = self.bring(id);
        true
    }

    fn set_capacity(&self, bytes: u64) {
        lock(&self.books).set_capacity(bytes, &|index| self.ranks.of(index));
    }

    fn publish_ranks(&self, ranks: &[f32]) {
        self.ranks.publish(ranks);
    }

    fn trim(&self) {}

    fn audit(&self) -> Option<u64> {
        None
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

    fn set_dense_locked(&self, lock: bool) -> DenseLock {
        self.dense.set(lock)
    }

    fn unlock_all(&self) {
        lock(&self.books).unlock_all();
        self.dense.unlock();
    }
}

impl ExpertArena for DirectStore {
    fn window(&self, tensor: &str) -> Option<Window> {
        let (layer, at) = self.geometry.place(tensor)?;
        let class = self.geometry.layers[layer].class;
        let (address, stride_bytes) = lock(&self.books).arena(class);
        Some(Window {
            address: address + at,
            stride_bytes,
        })
    }

    fn slot(&self, block: u32, expert: i32) -> Option<u32> {
        let layer = (*self.geometry.layer_of_block.get(block as usize)?)?;
        let index = u32::try_from(expert).ok()?;
        if index >= self.geometry.shape.experts_in(layer) {
            return None;
        }
        lock(&self.books).slot(self.geometry.shape.id(layer, index))
    }

    fn home(&self, block: u32) -> Option<u32> {
        let layer = (*self.geometry.layer_of_block.get(block as usize)?)?;
        Some(lock(&self.books).home(self.geometry.shape.id(layer, 0)))
    }

    fn is_pending(&self, _block: u32, tensor: &str) -> bool {
        let Some(&(_, part)) = self.geometry.by_tensor.get(tensor) else {
            return false;
        };
        let engine = lock(&self.engine);
        !engine.foreign.is_empty()
            || engine
                .routed
                .iter()
                .any(|id| engine.pending[id.index() * self.geometry.most_parts + part])
    }

    fn is_ready(&self, block: u32, expert: i32) -> bool {
        if self.fault == Some(Fault::SkipWait) {
            return true;
        }
        let Some(layer) = self
            .geometry
            .layer_of_block
            .get(block as usize)
            .copied()
            .flatten()
        else {
            return false;
        };
        let Ok(index) = u32::try_from(expert) else {
            return false;
        };
        let id = self.geometry.shape.id(layer, index);
        lock(&self.engine).left[id.index()] == 0
            && matches!(lock(&self.books).state(id), State::Transit | State::Pinned)
    }

    fn wait_for_more(&self) -> Result<bool, String> {
        let mut engine = lock(&self.engine);
        let engine = &mut *engine;
        if !engine.routed.iter().any(|id| engine.left[id.index()] > 0) {
            return Ok(false);
        }
        let started = Instant::now();
        self.take_in(engine, true)?;
        let ns = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited_ns.fetch_add(ns, Relaxed);
        Ok(true)
    }

    fn looks_ahead(&self) -> usize {
        Foresight::layers(lock(&self.engine).reader.outstanding())
    }

    fn foresee(&self, block: u32, guesses: &[Guess]) {
        let Some(layer) = self
            .geometry
            .layer_of_block
            .get(block as usize)
            .copied()
            .flatten()
        else {
            return;
        };
        let mut engine = lock(&self.engine);
        let engine = &mut *engine;
        for guess in guesses {
            let index = u32::try_from(guess.expert)
                .ok()
                .filter(|&index| index < self.geometry.shape.experts_in(layer));
            if let Some(index) = index {
                self.weigh(engine, layer, self.geometry.shape.id(layer, index), guess);
            }
        }
        // A failure to start is met again when the reads are waited for.
        let _ = engine.reader.start();
    }

    fn wait(&self, _block: u32, tensor: &str) -> Result<(), String> {
        let Some(&(_, part)) = self.geometry.by_tensor.get(tensor) else {
            return Ok(());
        };
        let mut engine = lock(&self.engine);
        let engine = &mut *engine;
        let index = |id: &ExpertId| id.index() * self.geometry.most_parts + part;
        let mut started = None;
        while self.fault != Some(Fault::SkipWait)
            && engine.routed.iter().any(|id| engine.pending[index(id)])
        {
            started.get_or_insert_with(Instant::now);
            self.take_in(engine, true)?;
        }
        if !engine.foreign.is_empty() {
            started.get_or_insert_with(Instant::now);
            self.wait_for_governor(engine)?;
        }
        if let Some(started) = started {
            let ns = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.waited_ns.fetch_add(ns, Relaxed);
        }
        let routed_failed = engine
            .failed
            .iter()
            .find(|(id, _)| engine.routed.contains(id));
        if let Some((_, cause)) = routed_failed {
            return Err(cause.clone());
        }
        if self.verify {
            for &id in &engine.fresh {
                let address = lock(&self.books).address(id);
                let address = address.ok_or("a routed expert has no slot")?;
                if part < self.geometry.parts(id) {
                    self.check(id, part, address)?;
                }
            }
        }
        Ok(())
    }
}

impl Drop for DirectStore {
    fn drop(&mut self) {
        self.unlock_all();
    }
}
