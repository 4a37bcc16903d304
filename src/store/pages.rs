//! The memory calls, each over a checked page range. Every other module of the store is safe code.

use nix::errno::Errno;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;

/// Size of a page in bytes.
pub(super) fn page_bytes() -> usize {
    static PAGE: OnceLock<usize> = OnceLock::new();
    *PAGE.get_or_init(|| {
        nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
            .ok()
            .flatten()
            .and_then(|n| usize::try_from(n).ok())
            .unwrap_or(4096)
    })
}

/// A range of whole pages of a file mapping, the model's or the program's.
///
/// Built only from the layout, which checked that the addresses belong to a mapping that lives as
/// long as the store, and from where the kernel says the program is, which stays and is only locked,
/// unlocked and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageRange {
    start: usize,
    len: usize,
}

impl PageRange {
    /// The pages that `address..address + len` touches.
    pub(super) fn outer(address: usize, len: usize) -> Self {
        let mask = page_bytes() - 1;
        let start = address & !mask;
        let end = (address + len + mask) & !mask;
        Self {
            start,
            len: end - start,
        }
    }

    /// The pages that lie wholly inside `address..address + len`; may be empty.
    pub(super) fn inner(address: usize, len: usize) -> Self {
        let mask = page_bytes() - 1;
        let start = (address + mask) & !mask;
        let end = (address + len) & !mask;
        Self {
            start,
            len: end.saturating_sub(start),
        }
    }

    /// The same range without its first or last page.
    pub(super) fn without(self, first: bool, last: bool) -> Self {
        let page = page_bytes();
        let cut = page * (usize::from(first) + usize::from(last));
        if cut >= self.len {
            return Self {
                start: self.start,
                len: 0,
            };
        }
        Self {
            start: self.start + if first { page } else { 0 },
            len: self.len - cut,
        }
    }

    pub(super) fn start(self) -> usize {
        self.start
    }

    pub(super) fn len(self) -> usize {
        self.len
    }

    pub(super) fn is_empty(self) -> bool {
        self.len == 0
    }

    fn ptr(self) -> *mut c_void {
        self.start as *mut c_void
    }

    /// The range in pieces of at most `bytes`.
    pub(super) fn pieces(self, bytes: usize) -> impl Iterator<Item = Self> {
        (0..self.len).step_by(bytes).map(move |at| Self {
            start: self.start + at,
            len: bytes.min(self.len - at),
        })
    }
}

/// Bytes that the ranges cover together, each page once.
pub(super) fn union_bytes(ranges: impl Iterator<Item = PageRange>) -> u64 {
    let mut ranges: Vec<PageRange> = ranges.filter(|range| !range.is_empty()).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let (mut bytes, mut end) = (0, 0);
    for range in ranges {
        let last = range.start + range.len;
        bytes += last.saturating_sub(range.start.max(end));
        end = end.max(last);
    }
    bytes as u64
}

fn advise(range: PageRange, advice: libc::c_int) -> Result<(), Errno> {
    if range.is_empty() {
        return Ok(());
    }
    // SAFETY: the range is whole pages of a file mapping that outlives the store; every advice used
    // here leaves the contents that a later read sees unchanged. Pages that are discarded are only those
    // of the model, which nobody can write to.
    Errno::result(unsafe { libc::madvise(range.ptr(), range.len, advice) }).map(drop)
}

/// Starts reading the range into the page cache, in pieces of at most `piece_bytes`.
pub(super) fn will_need(range: PageRange, piece_bytes: usize) -> Result<(), Errno> {
    range
        .pieces(piece_bytes)
        .try_for_each(|piece| advise(piece, libc::MADV_WILLNEED))
}

/// Turns fault-time readahead off for the range: what is read is what is asked for.
pub(super) fn random(range: PageRange) -> Result<(), Errno> {
    advise(range, libc::MADV_RANDOM)
}

/// Unmaps the range; its pages stay in the page cache.
pub(super) fn unmap(range: PageRange) -> Result<(), Errno> {
    advise(range, libc::MADV_DONTNEED)
}

/// Drops every clean page of the file that nobody maps.
pub(super) fn drop_file(file: BorrowedFd<'_>) {
    // SAFETY: plain system call on a borrowed descriptor; it takes no pointers.
    let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// Locks the range. The kernel flags the area before it reads it, so after a failure the range is
/// unlocked again.
pub(super) fn lock(range: PageRange) -> Result<(), Errno> {
    if range.is_empty() {
        return Ok(());
    }
    // SAFETY: as for `advise`; locking changes no contents.
    or_unlocked(range, unsafe { libc::mlock(range.ptr(), range.len) })
}

/// Locks what is there of the range, and every other page of it as soon as it is. After a failure nothing of the
/// range is locked.
pub(super) fn lock_on_fault(range: PageRange) -> Result<(), Errno> {
    if range.is_empty() {
        return Ok(());
    }
    // SAFETY: as for `advise`; locking changes no contents.
    or_unlocked(range, unsafe {
        libc::mlock2(range.ptr(), range.len, libc::MLOCK_ONFAULT)
    })
}

/// What came of a call that locks; after a failure the range is unlocked.
fn or_unlocked(range: PageRange, code: libc::c_int) -> Result<(), Errno> {
    let result = Errno::result(code).map(drop);
    if result.is_err() {
        unlock(range);
    }
    result
}

/// Reads the range and maps it, page by page.
pub(super) fn populate_read(range: PageRange) -> Result<(), Errno> {
    advise(range, libc::MADV_POPULATE_READ)
}

/// What to do about a lock that was refused.
pub(super) fn advice(errno: Errno) -> &'static str {
    match errno {
        Errno::EPERM => "this user may lock nothing: raise RLIMIT_MEMLOCK or grant CAP_IPC_LOCK",
        Errno::ENOMEM => "over RLIMIT_MEMLOCK or vm.max_map_count: raise `ulimit -l` or the sysctl",
        Errno::EAGAIN => "the system had no memory to lock at that moment; it is tried again later",
        _ => "unexpected; please report it",
    }
}

/// Unlocks the range.
pub(super) fn unlock(range: PageRange) {
    if range.is_empty() {
        return;
    }
    // SAFETY: as for `lock`.
    let result = unsafe { libc::munlock(range.ptr(), range.len) };
    debug_assert_eq!(
        result, 0,
        "munlock fails only on ranges that are not mapped"
    );
}

/// Unmaps the range and drops its clean pages from the page cache. `offset` is where the range
/// lies in `file`. Pages that other processes map stay.
pub(super) fn drop_cached(range: PageRange, file: BorrowedFd<'_>, offset: u64) {
    if range.is_empty() || unmap(range).is_err() {
        return;
    }
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(range.len)) else {
        return;
    };
    // SAFETY: plain system call on a borrowed descriptor; it takes no pointers.
    let _ =
        unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, len, libc::POSIX_FADV_DONTNEED) };
}

/// Resident pages of the range, by `mincore`. `scratch` is reused between calls.
pub(super) fn resident_pages(range: PageRange, scratch: &mut Vec<u8>) -> Result<usize, Errno> {
    let pages = range.len / page_bytes();
    scratch.clear();
    scratch.resize(pages, 0);
    // SAFETY: `scratch` has one byte a page of the range, which is mapped.
    Errno::result(unsafe { libc::mincore(range.ptr(), range.len, scratch.as_mut_ptr()) })?;
    Ok(scratch.iter().filter(|&&b| b & 1 == 1).count())
}

/// Pages of the range that are not resident, so that locking it would read them; 0 where that cannot be known.
pub(super) fn missing_pages(range: PageRange, scratch: &mut Vec<u8>) -> usize {
    let resident = resident_pages(range, scratch);
    resident.map_or(0, |resident| range.len / page_bytes() - resident)
}

#[cfg(test)]
mod tests {
    use super::{PageRange, page_bytes, union_bytes};

    #[test]
    fn ranges_round_outwards_and_inwards() {
        let p = page_bytes();
        let outer = PageRange::outer(p + 10, 2 * p);
        assert_eq!((outer.start(), outer.len()), (p, 3 * p));
        let inner = PageRange::inner(p + 10, 2 * p);
        assert_eq!((inner.start(), inner.len()), (2 * p, p));
        assert!(PageRange::inner(p + 10, 20).is_empty());
        let whole = PageRange::outer(p, p);
        assert_eq!((whole.start(), whole.len()), (p, p));
        assert_eq!(PageRange::inner(p, p), whole);
    }

    #[test]
    fn without_cuts_shared_ends() {
        let p = page_bytes();
        let range = PageRange::outer(p, 3 * p);
        assert_eq!(range.without(true, false), PageRange::outer(2 * p, 2 * p));
        assert_eq!(range.without(false, true), PageRange::outer(p, 2 * p));
        assert_eq!(range.without(true, true), PageRange::outer(2 * p, p));
        assert!(PageRange::outer(p, p).without(true, false).is_empty());
        assert!(PageRange::outer(p, 2 * p).without(true, true).is_empty());
    }

    #[test]
    fn pages_of_several_ranges_count_once() {
        let p = page_bytes();
        let ranges = [
            PageRange::outer(5 * p, 2 * p),
            PageRange::outer(p, 3 * p),
            PageRange::outer(2 * p, p),
            PageRange::outer(3 * p, 2 * p),
            PageRange::inner(p, 10),
        ];
        // Pages 1 to 4, and 5 and 6.
        assert_eq!(union_bytes(ranges.into_iter()), 6 * p as u64);
        assert_eq!(union_bytes(std::iter::empty()), 0);
    }

    #[test]
    fn pieces_cover_the_range() {
        let p = page_bytes();
        let range = PageRange::outer(0, 10 * p);
        let pieces: Vec<_> = range.pieces(4 * p).collect();
        assert_eq!(pieces.len(), 3);
        assert_eq!(pieces.iter().map(|r| r.len()).sum::<usize>(), range.len());
        assert_eq!(pieces[2], PageRange::outer(8 * p, 2 * p));
    }
}
