//! The program's own pages: its code, constants and libraries. They are pages of files like any other, so that a
//! group which is short takes them back first of all, and then whoever is to give memory back waits for the disk
//! to read how that is done.

use super::pages::{self, PageRange};
use nix::errno::Errno;
use procfs::process::{MMapPath, Process};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What is there of a program, as shipped, is read at once up to so many bytes; code for devices may be many
/// times as much, and is locked as it is used.
const READ_AHEAD_BYTES: usize = 64 << 20;
/// The program is left to the kernel where it is more than this part of what may be locked, as a divisor.
const LEAST_DIVISOR: u64 = 8;

/// Where the program is, once it was to be kept.
static PROGRAM: OnceLock<Vec<PageRange>> = OnceLock::new();
/// Bytes of it that are locked, in whole pages.
static LOCKED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Why the program's pages are left to the kernel. The program works without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramLockError {
    /// What there is, is for experts.
    #[error("{program_bytes} bytes of program are too many where {most_bytes} may be locked")]
    Room {
        /// Size of the program and its libraries.
        program_bytes: u64,
        /// What may be locked.
        most_bytes: u64,
    },
    /// `/proc/self/maps` does not tell where they are.
    #[error("/proc/self/maps cannot be read")]
    Unknown,
    /// The kernel refused.
    #[error("{}: {}", .0.desc(), pages::advice(*.0))]
    Refused(Errno),
}

/// Locks every page that is mapped of a file, as it is used, and starts to read what is not there. To be called
/// before a model is mapped; what is mapped later, as drivers of devices are, is not locked. `most_bytes` is what
/// this user may lock and the machine has, `None` for any number.
///
/// Returns the bytes, which the kernel counts as `VmLck` whether they were used or not.
///
/// # Errors
/// When nothing is locked, and why.
pub fn keep(most_bytes: Option<u64>) -> Result<u64, ProgramLockError> {
    let ranges = mapped_of_files().ok_or(ProgramLockError::Unknown)?;
    let program_bytes = pages::union_bytes(ranges.iter().copied());
    if let Some(most_bytes) = most_bytes.filter(|most| program_bytes > most / LEAST_DIVISOR) {
        return Err(ProgramLockError::Room {
            program_bytes,
            most_bytes,
        });
    }
    lock(PROGRAM.get_or_init(|| ranges)).map_err(ProgramLockError::Refused)?;
    Ok(locked_bytes())
}

/// Unlocks a program that is kept, for those who need the memory, or locks it again. Without [`keep`] before it
/// nothing happens.
pub(crate) fn set_locked(wanted: bool) {
    let Some(ranges) = PROGRAM.get() else {
        return;
    };
    if wanted {
        if let Err(errno) = lock(ranges) {
            tracing::warn!("the program could not be locked again: {}", errno.desc());
        }
    } else {
        LOCKED_BYTES.store(0, Relaxed);
        ranges.iter().for_each(|&range| pages::unlock(range));
    }
}

/// Bytes of the program and its libraries that are locked as they are used.
pub fn locked_bytes() -> u64 {
    LOCKED_BYTES.load(Relaxed)
}

fn lock(ranges: &'static [PageRange]) -> Result<(), Errno> {
    for (at, &range) in ranges.iter().enumerate() {
        if let Err(errno) = pages::lock_on_fault(range) {
            ranges[..at].iter().for_each(|&range| pages::unlock(range));
            return Err(errno);
        }
    }
    LOCKED_BYTES.store(pages::union_bytes(ranges.iter().copied()), Relaxed);
    // Nobody waits for it. Where no thread can be had, pages come as they are used.
    let _ = std::thread::Builder::new()
        .name("program".to_owned())
        .spawn(|| read(ranges));
    Ok(())
}

/// Where pages of files are mapped in this process.
fn mapped_of_files() -> Option<Vec<PageRange>> {
    let maps = Process::myself().and_then(|this| this.maps()).ok()?;
    maps.into_iter()
        .filter(|map| matches!(map.pathname, MMapPath::Path(_)))
        .map(|map| {
            let (start, end) = map.address;
            let start = usize::try_from(start).ok()?;
            Some(PageRange::outer(start, usize::try_from(end).ok()? - start))
        })
        .collect()
}

fn read(ranges: &[PageRange]) {
    let mut left = READ_AHEAD_BYTES;
    for &range in ranges {
        let Some(after) = left.checked_sub(range.len()) else {
            continue;
        };
        left = after;
        // A kernel before 5.14 does not know the call; pages come as they are used then.
        let _ = pages::populate_read(range);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_and_its_libraries_are_found() {
        let ranges = mapped_of_files().expect("maps");
        let code = the_program_and_its_libraries_are_found as fn() as usize;
        let constant = std::ptr::from_ref(&LEAST_DIVISOR).addr();
        let of_library = libc::getpid as unsafe extern "C" fn() -> libc::pid_t as usize;
        for (what, address) in [
            ("code", code),
            ("constant", constant),
            ("library", of_library),
        ] {
            let within = |range: &&PageRange| {
                (range.start()..range.start() + range.len()).contains(&address)
            };
            assert_eq!(ranges.iter().filter(within).count(), 1, "{what}");
        }
        let on_stack = std::ptr::from_ref(&ranges).addr();
        let on_heap = ranges.as_ptr().addr();
        for address in [on_stack, on_heap] {
            let within =
                |range: &PageRange| (range.start()..range.start() + range.len()).contains(&address);
            assert!(!ranges.iter().any(within));
        }
    }

    #[test]
    fn little_room_is_left_to_experts() {
        let error = keep(Some(8 << 20)).expect_err("8 MiB");
        let ProgramLockError::Room {
            program_bytes,
            most_bytes: 8_388_608,
        } = error
        else {
            panic!("{error}");
        };
        assert!(program_bytes > 1 << 20, "{program_bytes}");
        assert_eq!(locked_bytes(), 0);
        set_locked(true);
        assert_eq!(locked_bytes(), 0, "it was not to be kept");
    }
}
