//! The program's own pages: its code, constants and libraries. They are pages of files like any other, so that a
//! group which is short takes them back first of all, and then whoever is to give memory back waits for the disk
//! to read how that is done.

use super::pages::{self, PageRange};
use crate::size::format_bytes;
use nix::errno::Errno;
use procfs::process::{MMPermissions, MMapPath, MemoryMap, Process};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most that is kept: the program first, of which its code alone where the whole is more, then its libraries.
/// What is for devices may be many times as much, and does nothing for whoever gives memory back.
const MOST_BYTES: u64 = 64 << 20;
/// The program is left to the kernel where it is more than this part of what there is for the model, as a divisor.
const LEAST_DIVISOR: u64 = 8;

/// A program that is to be kept.
struct Program {
    /// Where it is; empty before it was to be kept, and where it cannot be.
    ranges: Vec<PageRange>,
    /// All of it, or nothing.
    is_locked: bool,
}

static PROGRAM: Mutex<Program> = Mutex::new(Program {
    ranges: Vec::new(),
    is_locked: false,
});

impl Program {
    /// Its size, in whole pages.
    fn bytes(&self) -> u64 {
        pages::union_bytes(self.ranges.iter().copied())
    }
}

/// Why the program's pages are left to the kernel. The program works without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramLockError {
    /// What may be locked is for the model.
    #[error(
        "it has {}, and {} may be locked beside the dense weights",
        format_bytes(*.program_bytes),
        format_bytes(*.limit_bytes)
    )]
    LockLimit {
        /// Size of the program and its libraries.
        program_bytes: u64,
        /// What the system lets be locked beside the dense weights.
        limit_bytes: u64,
    },
    /// What there is of memory is for the model.
    #[error(
        "it has {}, and {} of memory are available",
        format_bytes(*.program_bytes),
        format_bytes(*.available_bytes)
    )]
    Memory {
        /// Size of the program and its libraries.
        program_bytes: u64,
        /// What is available.
        available_bytes: u64,
    },
    /// Its code alone is too much.
    #[error("its code alone has more than {}", format_bytes(MOST_BYTES))]
    Size,
    /// `/proc/self/maps` does not tell where they are.
    #[error("/proc/self/maps cannot be read")]
    Unknown,
    /// The kernel refused.
    #[error("{}: {}", .0.desc(), pages::advice(*.0))]
    Refused(Errno),
}

/// Locks the program and its libraries, page by page as they are used, and starts to read what is not there.
/// `limit_bytes` is what the system lets be locked beside the dense weights, `available_bytes` what there is of
/// memory, `None` for any number.
///
/// Returns the bytes, which the kernel counts as `VmLck` whether they were used or not.
///
/// # Errors
/// When nothing is locked, and why.
pub fn keep(
    limit_bytes: Option<u64>,
    available_bytes: Option<u64>,
) -> Result<u64, ProgramLockError> {
    let mut program = program();
    if program.is_locked {
        return Ok(program.bytes());
    }
    let maps = Process::myself().and_then(|this| this.maps());
    let ranges = code(&maps.map_err(|_| ProgramLockError::Unknown)?.0)?;
    let program_bytes = pages::union_bytes(ranges.iter().copied());
    let is_much = |bytes: &u64| program_bytes > bytes / LEAST_DIVISOR;
    if let Some(limit_bytes) = limit_bytes.filter(is_much) {
        return Err(ProgramLockError::LockLimit {
            program_bytes,
            limit_bytes,
        });
    }
    if let Some(available_bytes) = available_bytes.filter(is_much) {
        return Err(ProgramLockError::Memory {
            program_bytes,
            available_bytes,
        });
    }
    lock(&ranges).map_err(ProgramLockError::Refused)?;
    *program = Program {
        ranges,
        is_locked: true,
    };
    Ok(program_bytes)
}

/// Unlocks a program that is kept, for those who need the memory, or locks it again. Without [`keep`] before it
/// nothing happens.
pub fn set_locked(wanted: bool) {
    let mut program = program();
    if wanted == program.is_locked || program.ranges.is_empty() {
        return;
    }
    program.is_locked = wanted;
    if !wanted {
        program
            .ranges
            .iter()
            .for_each(|&range| pages::unlock(range));
    } else if let Err(errno) = lock(&program.ranges) {
        tracing::warn!("the program could not be locked again: {}", errno.desc());
        // It is not tried again.
        *program = Program {
            ranges: Vec::new(),
            is_locked: false,
        };
    }
}

/// Bytes of the program and its libraries that are locked as they are used.
pub fn locked_bytes() -> u64 {
    let program = program();
    if program.is_locked {
        program.bytes()
    } else {
        0
    }
}

/// Bytes that are to be kept and are not locked at this moment.
pub(crate) fn unlocked_bytes() -> u64 {
    let program = program();
    if program.is_locked {
        0
    } else {
        program.bytes()
    }
}

fn program() -> MutexGuard<'static, Program> {
    PROGRAM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All or nothing.
fn lock(ranges: &[PageRange]) -> Result<(), Errno> {
    for (at, &range) in ranges.iter().enumerate() {
        if let Err(errno) = pages::lock_on_fault(range) {
            ranges[..at].iter().for_each(|&range| pages::unlock(range));
            return Err(errno);
        }
    }
    let ranges = ranges.to_vec();
    // Nobody waits for it. Where no thread can be had, or on a kernel before 5.14, pages come as they are used.
    let _ = std::thread::Builder::new()
        .name("program".to_owned())
        .spawn(move || {
            ranges
                .iter()
                .try_for_each(|&range| pages::populate_read(range))
        });
    Ok(())
}

/// What is mapped of files that have code, file by file, the program before its libraries, as long as it is not too
/// much. These stay where they are for as long as the process lives.
fn code(maps: &[MemoryMap]) -> Result<Vec<PageRange>, ProgramLockError> {
    let mut files: Vec<&Path> = Vec::new();
    for map in maps {
        let MMapPath::Path(path) = &map.pathname else {
            continue;
        };
        // Devices and what was deleted are mapped by path as well.
        let is_code = map.perms.contains(MMPermissions::EXECUTE) && path.is_file();
        if is_code && !files.contains(&path.as_path()) {
            files.push(path);
        }
    }
    let of = |file: &Path, perms: MMPermissions| {
        let mapped = maps.iter().filter(|map| {
            map.perms.contains(perms)
                && matches!(&map.pathname, MMapPath::Path(path) if path == file)
        });
        let ranges: Vec<PageRange> = mapped.filter_map(range_of).collect();
        let bytes = pages::union_bytes(ranges.iter().copied());
        (ranges, bytes)
    };
    let mut files = files.into_iter();
    let program = files.next().ok_or(ProgramLockError::Unknown)?;
    let whole = of(program, MMPermissions::READ);
    let (mut kept, bytes) = if whole.1 <= MOST_BYTES {
        whole
    } else {
        of(program, MMPermissions::EXECUTE)
    };
    let mut left = MOST_BYTES
        .checked_sub(bytes)
        .ok_or(ProgramLockError::Size)?;
    for file in files {
        let (ranges, bytes) = of(file, MMPermissions::READ);
        if let Some(after) = left.checked_sub(bytes) {
            left = after;
            kept.extend(ranges);
        }
    }
    Ok(kept)
}

fn range_of(map: &MemoryMap) -> Option<PageRange> {
    let start = usize::try_from(map.address.0).ok()?;
    let end = usize::try_from(map.address.1).ok()?;
    Some(PageRange::outer(start, end - start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_and_its_libraries_are_found_and_nothing_else() {
        let mut model = tempfile::NamedTempFile::new().expect("file");
        std::io::Write::write_all(&mut model, &[1; 8192]).expect("write");
        // SAFETY: nobody changes the file.
        let mapped = unsafe { memmap2::Mmap::map(model.as_file()) }.expect("map");
        let maps = Process::myself()
            .and_then(|this| this.maps())
            .expect("maps")
            .0;
        let ranges = code(&maps).expect("code");
        let holders = |address: usize| {
            let within = |range: &&PageRange| {
                (range.start()..range.start() + range.len()).contains(&address)
            };
            ranges.iter().filter(within).count()
        };
        let this = the_program_and_its_libraries_are_found_and_nothing_else as fn() as usize;
        let of_library = libc::getpid as unsafe extern "C" fn() -> libc::pid_t as usize;
        assert_eq!(holders(this), 1, "code");
        assert_eq!(
            holders(std::ptr::from_ref(&LEAST_DIVISOR).addr()),
            1,
            "constant"
        );
        assert_eq!(holders(of_library), 1, "library");
        assert_eq!(holders(std::ptr::from_ref(&ranges).addr()), 0, "stack");
        assert_eq!(holders(ranges.as_ptr().addr()), 0, "heap");
        assert_eq!(holders(mapped.as_ptr().addr()), 0, "model");
    }

    #[test]
    fn little_room_is_left_to_the_model() {
        let error = keep(Some(8 << 20), None).expect_err("8 MiB of limit");
        let ProgramLockError::LockLimit {
            program_bytes,
            limit_bytes: 8_388_608,
        } = error
        else {
            panic!("{error}");
        };
        assert!(program_bytes > 1 << 20, "{program_bytes}");
        let little = ProgramLockError::Memory {
            program_bytes,
            available_bytes: 8 * program_bytes - 1,
        };
        assert_eq!(keep(None, Some(8 * program_bytes - 1)), Err(little));
        set_locked(true);
        assert_eq!(
            (locked_bytes(), unlocked_bytes()),
            (0, 0),
            "it was not to be kept"
        );
    }
}
