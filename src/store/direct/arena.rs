//! Memory for slots: one anonymous reservation, touched as it is needed, in huge pages where the
//! system has them, locked where it allows that.
//!
//! Physical pages stay with their slot when an expert is evicted, so the next one costs neither
//! fault nor zeroing, and addresses never change.

use nix::errno::Errno;
use std::io;
use std::ptr::NonNull;

/// Size of a huge page; boundaries of locked ranges lie at multiples, so that none is split.
const HUGE_BYTES: usize = 2 << 20;

/// State of a huge page's range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    /// Nothing in it was used since it last had no memory.
    Empty,
    /// It has memory, which may be swapped out.
    Touched,
    /// It has memory that stays.
    Locked,
}

/// Slots of one size.
#[derive(Debug)]
pub(super) struct Arena {
    /// What was mapped.
    mapping: NonNull<libc::c_void>,
    mapped_bytes: usize,
    /// Slot 0, on a huge page's boundary.
    base: usize,
    slot_bytes: usize,
    slots: usize,
    /// What is known of each huge page from `base` on.
    pages: Vec<Page>,
    /// Those that are not empty.
    taken: usize,
    /// Why locking stopped for good, when it did.
    lock_error: Option<Errno>,
}

// SAFETY: the arena owns its mapping; every access through it is by address, ordered by the store.
unsafe impl Send for Arena {}
// SAFETY: as above; shared references only compute addresses.
unsafe impl Sync for Arena {}

impl Arena {
    /// Reserves address space for `slots`; nothing is allocated yet.
    ///
    /// # Errors
    /// When the system refuses the reservation.
    pub(super) fn reserve(slot_bytes: usize, slots: usize) -> io::Result<Self> {
        let too_large = || io::Error::other(format!("{slots} slots of {slot_bytes} bytes"));
        let mapped_bytes = slot_bytes
            .checked_mul(slots)
            .and_then(|bytes| bytes.checked_add(2 * HUGE_BYTES))
            .ok_or_else(too_large)?;
        // SAFETY: a new private anonymous mapping at an address of the kernel's choice.
        let mapping = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapping == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping = NonNull::new(mapping).ok_or_else(too_large)?;
        let base = (mapping.as_ptr() as usize).next_multiple_of(HUGE_BYTES);
        // SAFETY: advice on our own mapping. Where it is refused, pages are small.
        unsafe { libc::madvise(mapping.as_ptr(), mapped_bytes, libc::MADV_HUGEPAGE) };
        // SAFETY: as above. A child process never needs the experts.
        unsafe { libc::madvise(mapping.as_ptr(), mapped_bytes, libc::MADV_DONTFORK) };
        Ok(Self {
            mapping,
            mapped_bytes,
            base,
            slot_bytes,
            slots,
            pages: vec![Page::Empty; (slot_bytes * slots).div_ceil(HUGE_BYTES)],
            taken: 0,
            lock_error: None,
        })
    }

    /// Address of a slot.
    pub(super) fn address(&self, slot: u32) -> usize {
        debug_assert!((slot as usize) < self.slots);
        self.base + slot as usize * self.slot_bytes
    }

    pub(super) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Takes a slot into use: its memory counts from now on. With `lock` it is locked as well, huge
    /// page by huge page, until the system refuses; what was locked by then stays so.
    pub(super) fn take(&mut self, slot: u32, lock: bool) {
        for page in self.pages_of(slot) {
            if self.pages[page] == Page::Empty {
                self.pages[page] = Page::Touched;
                self.taken += 1;
            }
            if lock && self.pages[page] == Page::Touched && self.lock_error.is_none() {
                self.lock(page);
            }
        }
    }

    fn lock(&mut self, page: usize) {
        let address = (self.base + page * HUGE_BYTES) as *const libc::c_void;
        // SAFETY: inside our own mapping, which has room for a huge page beyond the last slot.
        match Errno::result(unsafe { libc::mlock(address, HUGE_BYTES) }) {
            Ok(_) => self.pages[page] = Page::Locked,
            Err(errno) => {
                // The kernel marks the range before it fails.
                // SAFETY: as above.
                unsafe { libc::munlock(address, HUGE_BYTES) };
                // Short of memory at this moment is not refused: the next time it may do.
                if errno != Errno::EAGAIN {
                    self.lock_error = Some(errno);
                }
            }
        }
    }

    /// The huge pages that a slot has a part in.
    fn pages_of(&self, slot: u32) -> std::ops::Range<usize> {
        let start = slot as usize * self.slot_bytes;
        start / HUGE_BYTES..(start + self.slot_bytes).div_ceil(HUGE_BYTES)
    }

    /// Address and bytes of the first run of a slot's huge pages that have no memory; `None` where all have.
    pub(super) fn lacking(&self, slot: u32) -> Option<(usize, usize)> {
        let mut pages = self.pages_of(slot);
        let first = pages.find(|&page| self.pages[page] == Page::Empty)?;
        let more = pages.take_while(|&page| self.pages[page] == Page::Empty);
        let len = (1 + more.count()) * HUGE_BYTES;
        Some((self.base + first * HUGE_BYTES, len))
    }

    /// Gives back what memory a slot was found that nobody took into use.
    pub(super) fn forget(&mut self, slot: u32) {
        for page in self.pages_of(slot) {
            if self.pages[page] == Page::Empty {
                let address = (self.base + page * HUGE_BYTES) as *mut libc::c_void;
                // SAFETY: pages of our own mapping in which no slot is used.
                unsafe { libc::madvise(address, HUGE_BYTES, libc::MADV_DONTNEED) };
            }
        }
    }

    /// Whether the slot's memory is locked.
    pub(super) fn is_locked(&self, slot: u32) -> bool {
        let mut pages = self.pages_of(slot);
        pages.all(|page| self.pages[page] == Page::Locked)
    }

    /// Bytes of memory that slots have been given.
    pub(super) fn memory_bytes(&self) -> u64 {
        (self.taken * HUGE_BYTES) as u64
    }

    /// Bytes of memory beyond what those of the slots `0..end` need that have all of theirs: parts of
    /// huge pages that are kept for the sake of other parts.
    pub(super) fn waste_bytes(&self, end: u32) -> usize {
        let has_memory = |slot: &u32| {
            let mut pages = self.pages_of(*slot);
            pages.all(|page| self.pages[page] != Page::Empty)
        };
        let whole = (0..end).filter(has_memory).count();
        (self.taken * HUGE_BYTES).saturating_sub(whole * self.slot_bytes)
    }

    /// Bytes that are locked.
    pub(super) fn locked_bytes(&self) -> usize {
        let locked = self.pages.iter().filter(|page| **page == Page::Locked);
        locked.count() * HUGE_BYTES
    }

    /// Why not everything is locked.
    pub(super) fn lock_error(&self) -> Option<Errno> {
        self.lock_error
    }

    /// Unlocks everything, for good.
    pub(super) fn unlock(&mut self) {
        // SAFETY: our own mapping.
        unsafe { libc::munlock(self.mapping.as_ptr(), self.mapped_bytes) };
        for page in &mut self.pages {
            if *page == Page::Locked {
                *page = Page::Touched;
            }
        }
        self.lock_error.get_or_insert(Errno::EPERM);
    }

    /// Copies one slot's contents to another.
    pub(super) fn copy(&self, from: u32, to: u32) {
        let (from, to) = (self.address(from) as *const u8, self.address(to) as *mut u8);
        // SAFETY: two distinct slots of our own mapping; the store's books say that no read into
        // either is under way and that the engine uses neither.
        unsafe { std::ptr::copy_nonoverlapping(from, to, self.slot_bytes) };
    }

    /// Exchanges two slots' contents.
    pub(super) fn swap(&self, a: u32, b: u32) {
        debug_assert_ne!(a, b);
        let (a, b) = (self.address(a) as *mut u8, self.address(b) as *mut u8);
        // SAFETY: as for `copy`.
        unsafe { std::ptr::swap_nonoverlapping(a, b, self.slot_bytes) };
    }

    /// Gives back the memory of a slot that holds nothing, but for huge pages that it shares with one that
    /// is not free. Touching it again costs a fault.
    pub(super) fn release(&mut self, slot: u32, is_free: impl Fn(u32) -> bool) {
        for page in self.pages_of(slot) {
            let unused = self.slots_of(page).all(&is_free);
            if self.pages[page] == Page::Empty || !unused {
                continue;
            }
            let address = (self.base + page * HUGE_BYTES) as *mut libc::c_void;
            // SAFETY: a whole page of our own mapping that holds no expert, and no read into it is under
            // way. Locked pages cannot be given back.
            unsafe {
                libc::munlock(address, HUGE_BYTES);
                libc::madvise(address, HUGE_BYTES, libc::MADV_DONTNEED);
            }
            self.taken -= 1;
            self.pages[page] = Page::Empty;
        }
    }

    /// The slots that have a part in a huge page.
    fn slots_of(&self, page: usize) -> impl Iterator<Item = u32> {
        let first = page * HUGE_BYTES / self.slot_bytes;
        let end = ((page + 1) * HUGE_BYTES).div_ceil(self.slot_bytes);
        (first..end.min(self.slots)).map_while(|slot| u32::try_from(slot).ok())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: `reserve` mapped it; the readers that write into it were dropped before.
        unsafe { libc::munmap(self.mapping.as_ptr(), self.mapped_bytes) };
    }
}
