//! Store `mapped`: the loader's own file mapping, with experts fetched by exact-range readahead and
//! pinned with `mlock`. Safe by construction: a fetch that comes too late is only a slow page fault.
//!
//! An expert is absent, in transit (in the page cache, by the books) or pinned. Each change is one
//! compare-and-swap that exactly one thread wins, so engine and governor never wait for each other.

use super::boundary::Boundaries;
use super::coming::{Came, Coming};
use super::dense::{Dense, DenseLock};
use super::layout::Layout;
use super::pages::{self, PageRange};
use super::ranks::Ranks;
use super::{ExpertStore, Fetched, LeaveOff, StoreError, Warmed};
use crate::sync::atomic::{
    AtomicU8, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use crate::sync::{Mutex, MutexGuard};
use hotpin_controllers::{ExpertId, Held, Residence};
use nix::errno::Errno;
use std::os::fd::AsFd;
use std::sync::PoisonError;

const ABSENT: u8 = 0;
const TRANSIT: u8 = 1;
const PINNED: u8 = 2;
/// The governor is reading, locking or evicting it.
const BUSY: u8 = 3;
/// It is used from a device's memory: nothing is done for it here.
const ELSEWHERE: u8 = 4;

/// Bounds on one readahead request. The upper one is what the kernel cuts its own work into.
const LEAST_PIECE_BYTES: usize = 64 << 10;
const MOST_PIECE_BYTES: usize = 2 << 20;

/// Evicting goes on below the budget by this share of it, so that not every fetch has to choose.
const EVICT_AHEAD_SHARE: u64 = 64;

/// Who keeps transit within its budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransitKeeper {
    /// The kernel's page reclaim: nothing is evicted by us and residency is unknown.
    Kernel,
    /// The store: it evicts by score before the kernel has to reclaim.
    Store,
}

/// The store over the loader's file mapping.
#[derive(Debug)]
pub struct MappedStore {
    layout: Layout,
    keeper: TransitKeeper,
    piece_bytes: usize,
    /// Bytes of all experts, and of the smallest.
    total_bytes: u64,
    smallest_bytes: u64,
    states: Vec<AtomicU8>,
    ranks: Ranks,
    capacity_bytes: AtomicU64,
    pinned_bytes: AtomicU64,
    transit_bytes: AtomicU64,
    shortfall_bytes: AtomicU64,
    /// Only the governor locks and unlocks, so this is never contended.
    boundaries: Mutex<Boundaries>,
    /// The engine's scratch for choosing victims.
    victims: Mutex<Vec<(f32, u32)>>,
    /// Those whose pins have to wait for their pages. Of the governor's side only.
    coming: Mutex<Coming<ExpertId>>,
    dense: Dense,
}

impl MappedStore {
    /// Takes over the mapping: expert ranges get no fault-time readahead, dense weights are locked
    /// first when `lock_dense`.
    ///
    /// `piece_bytes` is the largest readahead request that the kernel does not cut short.
    ///
    /// # Safety
    /// The mapping that `layout` describes must outlive the store: it is locked, advised and dropped
    /// by address.
    #[must_use]
    pub unsafe fn new(
        layout: Layout,
        keeper: TransitKeeper,
        lock_dense: bool,
        piece_bytes: usize,
    ) -> (Self, DenseLock) {
        for &(address, len) in layout.expert_tensors() {
            // Advice that is refused costs speed only.
            let _ = pages::random(PageRange::inner(address, len));
        }
        let (dense, lock) = Dense::new(&layout, piece_bytes, lock_dense);
        let experts = layout.shape().total_experts();
        let here = || (0..experts).map(expert_id).filter(|&id| layout.is_here(id));
        let boundaries = Boundaries::new(layout.slices(), layout.dense(), dense.is_locked());
        let store = Self {
            keeper,
            piece_bytes: piece_bytes.clamp(LEAST_PIECE_BYTES, MOST_PIECE_BYTES)
                & !(pages::page_bytes() - 1),
            total_bytes: here().map(|id| layout.shape().bytes(id)).sum(),
            smallest_bytes: (0..layout.shape().layers())
                .map(|layer| layout.shape().layer_expert_bytes(layer))
                .min()
                .map_or(1, |bytes| bytes.max(1)),
            states: (0..experts)
                .map(|index| layout.is_here(expert_id(index)))
                .map(|here| AtomicU8::new(if here { ABSENT } else { ELSEWHERE }))
                .collect(),
            ranks: Ranks::new(experts),
            capacity_bytes: AtomicU64::new(0),
            pinned_bytes: AtomicU64::new(0),
            transit_bytes: AtomicU64::new(0),
            shortfall_bytes: AtomicU64::new(0),
            boundaries: Mutex::new(boundaries),
            victims: Mutex::new(Vec::with_capacity(experts)),
            coming: Mutex::new(Coming::new()),
            dense,
            layout,
        };
        (store, lock)
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    fn bytes(&self, id: ExpertId) -> u64 {
        self.layout.shape().bytes(id)
    }

    fn state(&self, id: ExpertId) -> u8 {
        self.states[id.index()].load(Acquire)
    }

    /// One state change; false when somebody else was first.
    fn change(&self, id: ExpertId, from: u8, to: u8) -> bool {
        self.states[id.index()]
            .compare_exchange(from, to, AcqRel, Acquire)
            .is_ok()
    }

    /// Puts an absent expert into transit; false when somebody else was first. Its bytes are counted before
    /// it is there: whoever takes it away at once takes them off again.
    fn enter_transit(&self, id: ExpertId) -> bool {
        self.transit_bytes.fetch_add(self.bytes(id), AcqRel);
        let entered = self.change(id, ABSENT, TRANSIT);
        if !entered {
            self.transit_bytes.fetch_sub(self.bytes(id), AcqRel);
        }
        entered
    }

    /// Bytes that transit may hold.
    fn transit_budget(&self) -> u64 {
        self.capacity_bytes
            .load(Relaxed)
            .saturating_sub(self.pinned_bytes.load(Relaxed))
    }

    fn drop_pages(&self, id: ExpertId) {
        for i in self.layout.slices_of(id) {
            let slice = self.layout.slices()[i];
            let inner = slice.inner();
            let offset = slice.offset + (inner.start() - slice.address) as u64;
            pages::drop_cached(inner, self.layout.file(slice.shard).as_fd(), offset);
        }
    }

    /// Whether every page that is the expert's own is resident; `None` when that cannot be known.
    fn is_resident(&self, id: ExpertId, scratch: &mut Vec<u8>) -> Option<bool> {
        for i in self.layout.slices_of(id) {
            let inner = self.layout.slices()[i].inner();
            if inner.is_empty() {
                continue;
            }
            let resident = pages::resident_pages(inner, scratch).ok()?;
            if resident * pages::page_bytes() != inner.len() {
                return Some(false);
            }
        }
        Some(true)
    }

    /// Reads what is missing of an expert and waits for it, unless that is left off. Locking would read a cold range
    /// page by page, and could not be left off. It is asked for in any case: of a file that may only be read the
    /// kernel says that all of it is there.
    fn come(&self, id: ExpertId, leave_off: LeaveOff<'_>) -> Result<Came, StoreError> {
        let mut scratch = Vec::new();
        let missing = || {
            let slices = self.layout.slices_of(id);
            let ranges = slices.map(|i| self.layout.slices()[i].outer());
            ranges
                .map(|range| pages::missing_pages(range, &mut scratch))
                .sum()
        };
        let ask = || self.read_ahead(&[id]).map(drop);
        let mut coming = self.coming.lock().unwrap_or_else(PoisonError::into_inner);
        coming.come(id, ask, missing, leave_off)
    }

    /// Evicts the lowest-scored transit until it is within `budget`, sparing `keep`.
    fn evict_to(&self, budget: u64, keep: &[ExpertId]) {
        if self.transit_bytes.load(Relaxed) <= budget {
            return;
        }
        let Ok(mut victims) = self.victims.try_lock() else {
            return;
        };
        let goal = budget - budget / EVICT_AHEAD_SHARE;
        victims.clear();
        for (index, state) in self.states.iter().enumerate() {
            if state.load(Relaxed) == TRANSIT {
                victims.push((self.ranks.of(index), expert_id(index).0));
            }
        }
        let excess = self.transit_bytes.load(Relaxed).saturating_sub(goal);
        let wanted = usize::try_from(excess / self.smallest_bytes + 1).unwrap_or(usize::MAX);
        let wanted = wanted.saturating_add(keep.len());
        if wanted < victims.len() {
            victims.select_nth_unstable_by(wanted, |a, b| a.0.total_cmp(&b.0));
            victims.truncate(wanted + 1);
        }
        victims.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        for &(_, id) in victims.iter() {
            if self.transit_bytes.load(Relaxed) <= goal {
                break;
            }
            let id = ExpertId(id);
            if !keep.contains(&id) && self.change(id, TRANSIT, BUSY) {
                self.transit_bytes.fetch_sub(self.bytes(id), AcqRel);
                self.drop_pages(id);
                self.states[id.index()].store(ABSENT, Release);
            }
        }
    }

    /// Starts reading the experts, part by part in the order in which the graph uses them.
    fn read_ahead(&self, experts: &[ExpertId]) -> Result<u64, StoreError> {
        let mut bytes = 0u64;
        let parts = experts
            .iter()
            .map(|&id| self.layout.slices_of(id).len())
            .max()
            .unwrap_or(0);
        for part in 0..parts {
            for &id in experts {
                let Some(slice) = self.layout.slices_of(id).nth(part) else {
                    continue;
                };
                let slice = &self.layout.slices()[slice];
                pages::will_need(slice.outer(), self.piece_bytes).map_err(|errno| {
                    StoreError::Read {
                        bytes: slice.len,
                        errno,
                    }
                })?;
                bytes += slice.len as u64;
            }
        }
        Ok(bytes)
    }

    fn boundaries(&self) -> MutexGuard<'_, Boundaries> {
        self.boundaries
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the slices of an expert that is `BUSY` for us. After a failure none is locked.
    fn lock_slices(&self, id: ExpertId) -> Result<(), Errno> {
        let mut boundaries = self.boundaries();
        let slices = self.layout.slices_of(id);
        for i in slices.clone() {
            if let Err(errno) = pages::lock(self.layout.slices()[i].outer()) {
                // `lock` unlocked the whole range, which may have held neighbours' pages.
                for done in slices.start..i {
                    let pages = self.layout.slices()[done].outer();
                    pages::unlock(boundaries.unlock(done, pages));
                }
                self.relock_neighbours(i);
                return Err(errno);
            }
            boundaries.lock(i);
        }
        Ok(())
    }

    /// After a failed lock of slice `i` unlocked its pages: locks again what neighbours own of them.
    fn relock_neighbours(&self, i: usize) {
        let lost = self.layout.slices()[i].outer();
        let meets = |range: PageRange| {
            range.start() < lost.start() + lost.len() && lost.start() < range.start() + range.len()
        };
        for (index, state) in self.states.iter().enumerate() {
            if state.load(Acquire) != PINNED {
                continue;
            }
            for j in self.layout.slices_of(expert_id(index)) {
                let range = self.layout.slices()[j].outer();
                if meets(range) {
                    let _ = pages::lock(range);
                }
            }
        }
        for &range in self.dense.locked_ranges() {
            if meets(range) {
                let _ = pages::lock(range);
            }
        }
    }
}

impl ExpertStore for MappedStore {
    fn fetch(&self, experts: &[ExpertId]) -> Result<Fetched, StoreError> {
        let mut found = Fetched::default();
        // Top-k of a decode fits; prefill unions spill to the heap.
        let mut missing = Vec::new();
        for &id in experts {
            self.ranks.raise(id);
            match self.state(id) {
                PINNED => {
                    found.hits += 1;
                    found.pinned_hits += 1;
                }
                TRANSIT => found.hits += 1,
                ELSEWHERE => {}
                _ => {
                    found.misses += 1;
                    missing.push(id);
                }
            }
        }
        if missing.is_empty() {
            return Ok(found);
        }
        found.bytes = self.read_ahead(&missing)?;
        if self.keeper == TransitKeeper::Store {
            for &id in &missing {
                self.enter_transit(id);
            }
            // After the reads were started, so that choosing and dropping overlaps with them.
            self.evict_to(self.transit_budget(), experts);
        }
        Ok(found)
    }

    fn is_complete(&self) -> bool {
        // A page that is gone all the same is read by a fault.
        let held = self.pinned_bytes.load(Relaxed) + self.transit_bytes.load(Relaxed);
        held == self.total_bytes
    }

    fn start_tick(&self) {
        self.shortfall_bytes.store(0, Release);
    }

    fn pin_unless(&self, id: ExpertId, leave_off: LeaveOff<'_>) -> Result<bool, StoreError> {
        let from = self.state(id);
        if matches!(from, PINNED | BUSY | ELSEWHERE) || !self.change(id, from, BUSY) {
            return Ok(false);
        }
        let bytes = self.bytes(id);
        if from == TRANSIT {
            self.transit_bytes.fetch_sub(bytes, AcqRel);
        }
        let came = self.come(id, leave_off);
        let otherwise = match came {
            // What was left off is being read, as after a fetch.
            Ok(Came::UnderWay) if self.keeper == TransitKeeper::Store => TRANSIT,
            Ok(Came::Never) => ABSENT,
            _ => from,
        };
        let locked = match came {
            Ok(Came::Here) => {
                let locked = self.lock_slices(id).map(|()| true);
                locked.map_err(|errno| StoreError::Lock {
                    bytes,
                    errno,
                    advice: pages::advice(errno),
                })
            }
            Ok(Came::UnderWay | Came::Never) => Ok(false),
            Err(error) => Err(error),
        };
        if let Ok(true) = locked {
            self.pinned_bytes.fetch_add(bytes, AcqRel);
            self.states[id.index()].store(PINNED, Release);
            return locked;
        }
        if locked.is_err() {
            self.shortfall_bytes.fetch_add(bytes, AcqRel);
        }
        if otherwise == TRANSIT {
            self.transit_bytes.fetch_add(bytes, AcqRel);
        }
        self.states[id.index()].store(otherwise, Release);
        locked
    }

    fn unpin(&self, id: ExpertId) -> bool {
        if !self.change(id, PINNED, BUSY) {
            return false;
        }
        let mut boundaries = self.boundaries();
        for i in self.layout.slices_of(id) {
            pages::unlock(boundaries.unlock(i, self.layout.slices()[i].outer()));
        }
        let bytes = self.bytes(id);
        self.pinned_bytes.fetch_sub(bytes, AcqRel);
        let to = match self.keeper {
            TransitKeeper::Store => {
                self.transit_bytes.fetch_add(bytes, AcqRel);
                TRANSIT
            }
            TransitKeeper::Kernel => ABSENT,
        };
        self.states[id.index()].store(to, Release);
        true
    }

    fn clear_loaded(&self, planned: &[ExpertId]) {
        if self.keeper == TransitKeeper::Kernel {
            return;
        }
        if planned.len() == self.states.len() {
            return;
        }
        self.dense.forget_loaded(&self.layout);
    }

    fn warm_unless(&self, id: ExpertId, _: LeaveOff<'_>) -> Warmed {
        let bytes = self.bytes(id);
        let held = self.transit_bytes.load(Relaxed);
        if self.keeper == TransitKeeper::Kernel || held + bytes > self.transit_budget() {
            return Warmed::NoRoom;
        }
        if self.enter_transit(id) {
            // What cannot be read ahead is read when it is used.
            let _ = self.read_ahead(&[id]);
        }
        Warmed::Done
    }

    fn set_capacity(&self, bytes: u64) {
        self.capacity_bytes.store(bytes, Relaxed);
    }

    fn publish_ranks(&self, ranks: &[f32]) {
        self.ranks.publish(ranks);
    }

    fn trim(&self) {
        if self.keeper == TransitKeeper::Store {
            self.evict_to(self.transit_budget(), &[]);
        }
    }

    fn audit(&self) -> Option<u64> {
        if self.keeper == TransitKeeper::Kernel {
            return None;
        }
        let mut gone = 0;
        let mut scratch = Vec::new();
        for index in 0..self.states.len() {
            let id = expert_id(index);
            if self.state(id) != TRANSIT {
                continue;
            }
            if !self.is_resident(id, &mut scratch)? && self.change(id, TRANSIT, ABSENT) {
                self.transit_bytes.fetch_sub(self.bytes(id), AcqRel);
                gone += self.bytes(id);
            }
        }
        Some(gone)
    }

    fn held(&self) -> Held {
        Held {
            pinned_bytes: self.pinned_bytes.load(Acquire),
            transit_bytes: self.transit_bytes.load(Acquire),
            lock_shortfall_bytes: self.shortfall_bytes.load(Acquire),
        }
    }

    fn locked_bytes(&self) -> u64 {
        // The governor changes nothing meanwhile.
        let _boundaries = self.boundaries();
        let pinned = (0..self.states.len())
            .map(expert_id)
            .filter(|&id| self.state(id) == PINNED)
            .flat_map(|id| self.layout.slices_of(id))
            .map(|i| self.layout.slices()[i].outer());
        pages::union_bytes(pinned.chain(self.dense.locked_ranges().iter().copied()))
    }

    fn check_unchanged(&self) -> Result<(), String> {
        self.layout.check_unchanged()
    }

    fn residence_into(&self, out: &mut [Residence]) {
        for (slot, state) in out.iter_mut().zip(&self.states) {
            *slot = match state.load(Relaxed) {
                PINNED => Residence::Pinned,
                TRANSIT => Residence::Transit,
                _ => Residence::Absent,
            };
        }
    }

    fn warm_dense(&self, leave_off: LeaveOff<'_>) -> bool {
        self.dense.warm(leave_off)
    }

    fn set_dense_locked(&self, lock: bool) -> DenseLock {
        let mut boundaries = self.boundaries();
        let outcome = self.dense.set(lock);
        let locked = self.dense.is_locked();
        *boundaries = Boundaries::new(self.layout.slices(), self.layout.dense(), locked);
        outcome
    }

    fn unlock_all(&self) {
        for index in 0..self.states.len() {
            self.unpin(expert_id(index));
        }
        self.dense.unlock();
    }
}

impl Drop for MappedStore {
    fn drop(&mut self) {
        self.unlock_all();
    }
}

fn expert_id(index: usize) -> ExpertId {
    ExpertId(u32::try_from(index).unwrap_or(u32::MAX))
}
