//! A cold start: the model's pages out of the page cache, and the proof of it.
//!
//! Page cache is charged to whoever touched it first. A run that starts with the model's pages
//! resident reads them for nothing and outside its own cgroup, and its figures mean nothing.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::store::residency::{Residency, file_residency, page_bytes};

/// Evictions tried before a run is refused.
const MAX_TRIES: u32 = 5;
/// Pause between tries: pages under write-back or on their way out need a moment.
const PAUSE_BETWEEN_TRIES: Duration = Duration::from_millis(200);
/// A run is refused while more than this part of the model is resident, in percent.
const MAX_RESIDENT_PERCENT: u64 = 1;
/// Processes named in a refusal.
const MAX_HOLDERS: usize = 5;

/// Why a run cannot start cold.
#[derive(Debug, thiserror::Error)]
pub enum ResidencyError {
    /// A shard could not be opened, synced, evicted or asked about.
    #[error("cannot evict {}: {source}", path.display())]
    Io {
        /// The shard.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The pages stay.
    #[error(
        "{resident_bytes} of the model's {total_bytes} bytes stay in the page cache after \
         {MAX_TRIES} evictions, more than {MAX_RESIDENT_PERCENT}%: {holders}"
    )]
    StillResident {
        /// Bytes that stay.
        resident_bytes: u64,
        /// The model's bytes.
        total_bytes: u64,
        /// Who holds them, as far as can be told.
        holders: String,
    },
}

/// The model's residency over all shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartState {
    /// Counted.
    Known {
        /// Bytes in the page cache.
        resident_bytes: u64,
        /// The model's bytes, whole pages.
        total_bytes: u64,
    },
    /// Not to be known; the reason is for the report.
    Unknown {
        /// Why.
        reason: String,
    },
}

impl StartState {
    /// Resident bytes, if known.
    #[must_use]
    pub fn resident_bytes(&self) -> Option<u64> {
        match self {
            Self::Known { resident_bytes, .. } => Some(*resident_bytes),
            Self::Unknown { .. } => None,
        }
    }

    fn is_cold(&self) -> bool {
        match self {
            Self::Known {
                resident_bytes,
                total_bytes,
            } => {
                u128::from(*resident_bytes) * 100
                    <= u128::from(*total_bytes) * u128::from(MAX_RESIDENT_PERCENT)
            }
            Self::Unknown { .. } => true,
        }
    }
}

/// Counts the model's resident bytes and changes nothing.
///
/// # Errors
/// [`ResidencyError::Io`].
pub fn measure(shards: &[PathBuf]) -> Result<StartState, ResidencyError> {
    let mut resident_bytes = 0;
    let mut total_bytes = 0;
    for path in shards {
        let failed = |source| ResidencyError::Io {
            path: path.clone(),
            source,
        };
        let page = page_bytes().map_err(failed)? as u64;
        match file_residency(path).map_err(failed)? {
            Residency::Known {
                resident_pages,
                total_pages,
            } => {
                resident_bytes += resident_pages * page;
                total_bytes += total_pages * page;
            }
            Residency::Unknown { reason } => return Ok(StartState::Unknown { reason }),
        }
    }
    Ok(StartState::Known {
        resident_bytes,
        total_bytes,
    })
}

/// Evicts every shard from the page cache, and says what is left.
///
/// # Errors
/// [`ResidencyError`]: more than 1% stays resident, or a shard cannot be reached.
pub async fn make_cold(shards: &[PathBuf]) -> Result<StartState, ResidencyError> {
    for attempt in 1..=MAX_TRIES {
        for path in shards {
            evict(path).map_err(|source| ResidencyError::Io {
                path: path.clone(),
                source,
            })?;
        }
        let state = measure(shards)?;
        if state.is_cold() {
            return Ok(state);
        }
        if attempt == MAX_TRIES {
            return Err(refusal(&state, shards));
        }
        tokio::time::sleep(PAUSE_BETWEEN_TRIES).await;
    }
    measure(shards)
}

/// Dirty pages cannot be dropped, so a model just written is synced first.
fn evict(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    Ok(posix_fadvise(
        &file,
        0,
        0,
        PosixFadviseAdvice::POSIX_FADV_DONTNEED,
    )?)
}

fn refusal(state: &StartState, shards: &[PathBuf]) -> ResidencyError {
    let (resident_bytes, total_bytes) = match state {
        StartState::Known {
            resident_bytes,
            total_bytes,
        } => (*resident_bytes, *total_bytes),
        StartState::Unknown { .. } => (0, 0),
    };
    ResidencyError::StillResident {
        resident_bytes,
        total_bytes,
        holders: holders(shards),
    }
}

/// Names the processes that map a shard: mapped and locked pages are what fadvise cannot drop.
fn holders(shards: &[PathBuf]) -> String {
    let paths: Vec<PathBuf> = shards
        .iter()
        .filter_map(|p| p.canonicalize().ok())
        .collect();
    let mut found = Vec::new();
    let mut unreadable = 0_usize;
    for process in procfs::process::all_processes()
        .into_iter()
        .flatten()
        .flatten()
    {
        let maps = match process.maps() {
            Ok(maps) => maps,
            Err(procfs::ProcError::PermissionDenied(_)) => {
                unreadable += 1;
                continue;
            }
            Err(_) => continue,
        };
        let maps_a_shard = maps.iter().any(
            |map| matches!(&map.pathname, procfs::process::MMapPath::Path(p) if paths.contains(p)),
        );
        if maps_a_shard && found.len() < MAX_HOLDERS {
            let name = process
                .stat()
                .map_or_else(|_| "?".to_owned(), |stat| stat.comm);
            found.push(format!("{name} (pid {})", process.pid));
        }
    }
    match (found.is_empty(), unreadable) {
        (false, _) => format!("mapped by {}; stop it first", found.join(", ")),
        (true, 0) => "no process maps it; it may be on tmpfs, or just being written or read".into(),
        (true, n) => format!("no process that may be looked at maps it, {n} may not be"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Not under /tmp, which may be a tmpfs, where pages are never evicted.
    fn on_disk(bytes: usize) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).expect("file");
        file.write_all(&vec![7; bytes]).expect("write");
        file
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_written_file_is_made_cold() {
        let file = on_disk(8 << 20);
        let shards = [file.path().to_path_buf()];
        let before = measure(&shards).expect("measure").resident_bytes();
        assert_eq!(before, Some(8 << 20));
        let after = make_cold(&shards).await.expect("cold");
        assert!(
            after.is_cold() && after.resident_bytes() <= Some((8 << 20) / 100),
            "{after:?}"
        );
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_missing_shard_is_named() {
        let error = make_cold(&["/nonexistent/a.gguf".into()])
            .await
            .expect_err("missing");
        assert!(error.to_string().contains("/nonexistent/a.gguf"), "{error}");
    }

    #[test]
    fn one_percent_is_cold_and_more_is_not() {
        let state = |resident_bytes| StartState::Known {
            resident_bytes,
            total_bytes: 1_000,
        };
        assert!(state(10).is_cold());
        assert!(!state(11).is_cold());
        assert!(
            StartState::Unknown {
                reason: String::new()
            }
            .is_cold()
        );
    }
}
