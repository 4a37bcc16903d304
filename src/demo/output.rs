//! The target file: written beside its final place and moved there when it is complete.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use tempfile::NamedTempFile;

use super::error::Error;

/// Bytes after which the file is flushed and dropped from the page cache: a model of many gigabytes
/// must not push everything else out of memory.
const FLUSH_BYTES: u64 = 64 << 20;

/// A file that vanishes unless it is finished.
#[derive(Debug)]
pub(super) struct Output {
    file: NamedTempFile,
    target: PathBuf,
    replace: bool,
    written_bytes: u64,
    flushed_bytes: u64,
}

/// The folder that a file lies in.
pub(super) fn folder_of(path: &Path) -> &Path {
    path.parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Refuses a target that must not be written.
pub(super) fn check_target(source: &Path, target: &Path, replace: bool) -> Result<(), Error> {
    if same_file(source, target) {
        return Err(Error::SameFile {
            path: target.to_owned(),
        });
    }
    if target.symlink_metadata().is_ok() && !replace {
        return Err(Error::Exists {
            path: target.to_owned(),
        });
    }
    Ok(())
}

fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Refuses to start when the folder's disk has less than `needed_bytes` free for this user.
pub(super) fn check_space(folder: &Path, needed_bytes: u64) -> Result<(), Error> {
    let disk = nix::sys::statvfs::statvfs(folder).map_err(|errno| Error::Io {
        path: folder.to_owned(),
        source: errno.into(),
    })?;
    let available_bytes = disk.blocks_available().saturating_mul(disk.fragment_size());
    if available_bytes < needed_bytes {
        return Err(Error::Space {
            folder: folder.to_owned(),
            needed_bytes,
            available_bytes,
        });
    }
    Ok(())
}

impl Output {
    /// Starts a file in the folder of `target`.
    pub(super) fn create(target: &Path, replace: bool) -> Result<Self, Error> {
        let folder = folder_of(target);
        let file = tempfile::Builder::new()
            .prefix(".hotpin-demo-")
            .suffix(".partial")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder)
            .map_err(Error::io(folder))?;
        let target = target.to_owned();
        Ok(Self {
            file,
            target,
            replace,
            written_bytes: 0,
            flushed_bytes: 0,
        })
    }

    /// Appends bytes.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file
            .as_file_mut()
            .write_all(bytes)
            .map_err(Error::io(&self.target))?;
        self.written_bytes += bytes.len() as u64;
        if self.written_bytes - self.flushed_bytes >= FLUSH_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    /// Bytes written so far.
    pub(super) const fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Flushes the file and moves it to its target.
    pub(super) fn finish(mut self) -> Result<(), Error> {
        self.flush()?;
        self.file
            .as_file()
            .sync_all()
            .map_err(Error::io(&self.target))?;
        let moved = if self.replace {
            self.file.persist(&self.target)
        } else {
            self.file.persist_noclobber(&self.target)
        };
        let target = self.target;
        moved.map_err(|failed| match failed.error.kind() {
            std::io::ErrorKind::AlreadyExists => Error::Exists {
                path: target.clone(),
            },
            _ => Error::Io {
                path: target.clone(),
                source: failed.error,
            },
        })?;
        let folder = folder_of(&target);
        File::open(folder)
            .and_then(|f| f.sync_all())
            .map_err(Error::io(folder))
    }

    fn flush(&mut self) -> Result<(), Error> {
        let file = self.file.as_file();
        file.sync_data().map_err(Error::io(&self.target))?;
        // Only advice: a file system that ignores it costs page cache, not correctness.
        let _ = posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        self.flushed_bytes = self.written_bytes;
        Ok(())
    }
}
