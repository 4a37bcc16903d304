//! The dense weights in the loader's mapping: locked before any expert, under every store.

use super::coming::{Came, Coming};
use super::layout::Layout;
use super::pages::{self, PageRange};
use super::{LeaveOff, StoreError};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::Acquire, Ordering::Release};
use std::os::fd::AsFd;
use std::sync::PoisonError;

/// Bytes of the weights that are asked for and waited for together.
const WARMED_BYTES: usize = 8 << 20;

/// Outcome of locking the dense weights.
#[derive(Debug)]
pub enum DenseLock {
    /// Locked, bytes.
    Locked(u64),
    /// Not asked for.
    Skipped,
    /// Could not be locked; the session goes on without.
    Failed(StoreError),
}

/// The dense weights of a layout and whether they are locked.
#[derive(Debug)]
pub(super) struct Dense {
    ranges: Vec<PageRange>,
    piece_bytes: usize,
    locked: AtomicBool,
    /// By address. Of the governor's side only.
    coming: Mutex<Coming<usize>>,
}

impl Dense {
    /// The dense weights of `layout`, locked when `lock`. `piece_bytes` is the largest readahead request
    /// that the kernel does not cut short.
    pub(super) fn new(layout: &Layout, piece_bytes: usize, lock: bool) -> (Self, DenseLock) {
        let dense = Self {
            ranges: layout
                .dense()
                .iter()
                .map(|&(address, len)| PageRange::outer(address, len))
                .collect(),
            piece_bytes,
            locked: AtomicBool::new(false),
            coming: Mutex::new(Coming::new()),
        };
        let outcome = if lock {
            dense.lock()
        } else {
            DenseLock::Skipped
        };
        (dense, outcome)
    }

    pub(super) fn is_locked(&self) -> bool {
        self.locked.load(Acquire)
    }

    /// What is locked, in pages; nothing where the weights are not.
    pub(super) fn locked_ranges(&self) -> &[PageRange] {
        if self.is_locked() { &self.ranges } else { &[] }
    }

    /// Reads and locks the weights, all or none.
    fn lock(&self) -> DenseLock {
        let mut bytes = 0u64;
        for &range in &self.ranges {
            // Locking reads what is missing; reading ahead first is only faster.
            let _ = pages::will_need(range, self.piece_bytes);
            if let Err(errno) = pages::lock(range) {
                for &done in &self.ranges {
                    pages::unlock(done);
                }
                self.locked.store(false, Release);
                return DenseLock::Failed(StoreError::Lock {
                    bytes: range.len() as u64,
                    errno,
                    advice: pages::advice(errno),
                });
            }
            bytes += range.len() as u64;
        }
        self.locked.store(true, Release);
        DenseLock::Locked(bytes)
    }

    /// Reads what of the weights is not there, unless that is left off: false then. Where some of it does not come
    /// it is for the lock call to tell what can be had.
    pub(super) fn warm(&self, leave_off: LeaveOff<'_>) -> bool {
        let mut scratch = Vec::new();
        let mut coming = self.coming.lock().unwrap_or_else(PoisonError::into_inner);
        let pieces = self
            .ranges
            .iter()
            .flat_map(|range| range.pieces(WARMED_BYTES));
        let mut pieces = pieces.peekable();
        while let Some(piece) = pieces.next() {
            if pages::missing_pages(piece, &mut scratch) == 0 {
                continue;
            }
            // One is read while the one before it is waited for. What cannot be read is told by who locks it.
            let ask = || {
                for &piece in [Some(&piece), pieces.peek()].into_iter().flatten() {
                    let _ = pages::will_need(piece, self.piece_bytes);
                }
                Ok(())
            };
            let missing = || pages::missing_pages(piece, &mut scratch);
            match coming.come(piece.start(), ask, missing, leave_off) {
                Ok(Came::Here) => {}
                Ok(Came::UnderWay) => return false,
                Ok(Came::Never) | Err(_) => return true,
            }
        }
        true
    }

    /// Locks or unlocks the weights.
    pub(super) fn set(&self, lock: bool) -> DenseLock {
        if lock {
            return self.lock();
        }
        self.unlock();
        DenseLock::Skipped
    }

    pub(super) fn unlock(&self) {
        if self.locked.swap(false, AcqRel) {
            for &range in &self.ranges {
                pages::unlock(range);
            }
        }
    }

    /// Drops everything that loading read of the files of `layout`, and locks the dense weights again, if
    /// they were locked, in pages of their own.
    pub(super) fn forget_loaded(&self, layout: &Layout) {
        let locked = self.is_locked();
        for &range in self.locked_ranges() {
            pages::unlock(range);
            let _ = pages::unmap(range);
        }
        for &(address, len) in layout.expert_tensors() {
            // Advice that is refused leaves pages mapped, which the file-wide drop then spares.
            let _ = pages::unmap(PageRange::inner(address, len));
        }
        for file in layout.files() {
            pages::drop_file(file.as_fd());
        }
        if locked && let DenseLock::Failed(error) = self.lock() {
            tracing::warn!("dense weights are no longer locked: {error}");
        }
    }
}
