//! How much of a file is in the page cache.
//!
//! `mincore` tells the truth only to a caller who owns the file or may write it: anybody else is
//! told that every page is resident, so that the cache cannot be used to spy. The same check is made
//! here first, and where it fails residency is unknown, by name.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use memmap2::{Mmap, MmapOptions};
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::{AccessFlags, SysconfVar, faccessat, geteuid, sysconf};

/// Bit of CAP_FOWNER in the capability masks of `/proc/self/status`.
const CAP_FOWNER_BIT: u32 = 3;
/// The uid that stands for owners outside this user namespace; CAP_FOWNER does not cover them.
const OVERFLOW_UID: u32 = 65_534;
/// Pages asked for by one `mincore` call: a 256 KiB answer for 1 GiB of 4 KiB pages.
const PAGES_PER_CALL: usize = 256 * 1024;

/// Pages of a file in the page cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Residency {
    /// The kernel answered truthfully.
    Known {
        /// Pages in the page cache.
        resident_pages: u64,
        /// Pages of the file.
        total_pages: u64,
    },
    /// The kernel would call every page resident, whatever is true.
    Unknown {
        /// Why, in words for the user.
        reason: String,
    },
}

/// Counts the pages of `path` that are in the page cache.
///
/// # Errors
/// When the file cannot be opened, mapped or asked about.
pub fn file_residency(path: &Path) -> io::Result<Residency> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if let Some(reason) = untruthful(path, metadata.uid()) {
        return Ok(Residency::Unknown { reason });
    }
    if metadata.len() == 0 {
        return Ok(Residency::Known {
            resident_pages: 0,
            total_pages: 0,
        });
    }
    // SAFETY: the mapping is never read through: only its address range is given to mincore, which
    // does not touch the pages, so a file that shrinks meanwhile cannot fault or alias anything.
    let mapping = unsafe { MmapOptions::new().map(&file)? };
    count_resident(&mapping, page_bytes()?)
}

/// Size of a page in bytes.
///
/// # Errors
/// When the system does not say.
pub fn page_bytes() -> io::Result<usize> {
    let answer = sysconf(SysconfVar::PAGE_SIZE).map_err(io::Error::from)?;
    answer
        .and_then(|bytes| usize::try_from(bytes).ok())
        .filter(|bytes| bytes.is_power_of_two())
        .ok_or_else(|| io::Error::other("the system does not tell its page size"))
}

fn count_resident(mapping: &Mmap, page_bytes: usize) -> io::Result<Residency> {
    let total_pages = mapping.len().div_ceil(page_bytes);
    let mut answer = vec![0_u8; total_pages.min(PAGES_PER_CALL)];
    let mut resident_pages = 0_u64;
    for (index, chunk) in mapping.chunks(PAGES_PER_CALL * page_bytes).enumerate() {
        let pages = chunk.len().div_ceil(page_bytes);
        let offset = index * PAGES_PER_CALL * page_bytes;
        // SAFETY: the range lies inside the live mapping and starts on a page boundary (mmap's
        // address plus a multiple of the page size); `answer` holds at least `pages` bytes.
        let status = unsafe {
            let start = mapping.as_ptr().add(offset).cast_mut().cast::<c_void>();
            libc::mincore(start, chunk.len(), answer.as_mut_ptr())
        };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        let here = answer[..pages]
            .iter()
            .filter(|&&page| page & 1 == 1)
            .count();
        resident_pages += here as u64;
    }
    Ok(Residency::Known {
        resident_pages,
        total_pages: total_pages as u64,
    })
}

/// The kernel's own condition for a truthful `mincore` (owner, capable over the owner, or allowed to
/// write), as a reason why it does not hold.
fn untruthful(path: &Path, owner_uid: u32) -> Option<String> {
    let me = geteuid().as_raw();
    let truthful = me == owner_uid
        || (owner_uid != OVERFLOW_UID && has_cap_fowner())
        || faccessat(AT_FDCWD, path, AccessFlags::W_OK, AtFlags::AT_EACCESS).is_ok();
    (!truthful).then(|| {
        format!(
            "{} belongs to uid {owner_uid} and uid {me} may not write it, so the kernel reports \
             every page of it as resident",
            path.display()
        )
    })
}

fn has_cap_fowner() -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else {
        return false;
    };
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> CAP_FOWNER_BIT & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn an_empty_file_has_no_pages() {
        let file = tempfile::NamedTempFile::new().expect("temp file");
        let found = file_residency(file.path()).expect("residency");
        assert_eq!(
            found,
            Residency::Known {
                resident_pages: 0,
                total_pages: 0
            }
        );
    }

    #[test]
    fn a_file_just_written_is_resident_and_the_last_page_counts() {
        let mut file = tempfile::NamedTempFile::new().expect("temp file");
        let page = page_bytes().expect("page size");
        file.write_all(&vec![1; 5 * page + 1]).expect("write");
        let found = file_residency(file.path()).expect("residency");
        assert_eq!(
            found,
            Residency::Known {
                resident_pages: 6,
                total_pages: 6
            }
        );
    }

    #[test]
    fn a_missing_file_is_an_error() {
        assert!(file_residency(Path::new("/nonexistent/model.gguf")).is_err());
    }
}
