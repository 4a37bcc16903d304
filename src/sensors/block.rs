//! Readahead of the device that a file lies on. With a large value, page faults read several times
//! what is used.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};

use super::error::SensorError;
use super::roots::Roots;
use super::source::read_once;
use super::text::single_number;

/// `read_ahead_kb` of the device that holds `path`, KiB.
///
/// # Errors
/// When `path` does not exist, or its file system has no readahead setting that can be found.
pub fn read_ahead_kb(roots: &Roots, path: &Path) -> Result<u64, SensorError> {
    let (major, minor) = device_of(path)?;
    read_ahead_kb_of_device(roots, major, minor)
}

/// `read_ahead_kb` of a device by number, KiB: its own queue's, its disk's when it is a partition,
/// or the backing-device entry of a file system without a block device of its own (btrfs, NFS).
///
/// # Errors
/// When there is none of the three.
pub fn read_ahead_kb_of_device(roots: &Roots, major: u64, minor: u64) -> Result<u64, SensorError> {
    read_ahead(roots, major, minor).map(|setting| setting.kb)
}

/// A readahead setting and where it is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadAhead {
    /// `read_ahead_kb`, KiB.
    pub kb: u64,
    /// The file that sets it.
    pub path: PathBuf,
}

/// As [`read_ahead_kb_of_device`], with the file that the value came from.
///
/// # Errors
/// When there is none of the three.
pub fn read_ahead(roots: &Roots, major: u64, minor: u64) -> Result<ReadAhead, SensorError> {
    let backing = roots
        .sys
        .join(format!("class/bdi/{major}:{minor}/read_ahead_kb"));
    let [own, disk] = queue_files(roots, major, minor, "read_ahead_kb");
    let read = |path: PathBuf| {
        let kb = read_once(path.clone(), single_number)?;
        // Without the links, where there are any, it is a name that people know.
        let path = path.canonicalize().unwrap_or(path);
        Ok(ReadAhead { kb, path })
    };
    read(own).or_else(|_| read(disk)).or_else(|_| read(backing))
}

/// Bytes that the kernel accepts in one readahead request on the device that holds `path`: the
/// larger of its request size and its readahead. A larger request is cut short silently.
///
/// # Errors
/// As [`read_ahead_kb`].
pub fn readahead_request_bytes(roots: &Roots, path: &Path) -> Result<u64, SensorError> {
    let (major, minor) = device_of(path)?;
    let request_kb = queue_value(roots, major, minor, "max_sectors_kb");
    let readahead_kb = read_ahead_kb_of_device(roots, major, minor);
    match (request_kb, readahead_kb) {
        (Ok(request), Ok(readahead)) => Ok(request.max(readahead).saturating_mul(1024)),
        (Ok(one), Err(_)) | (Err(_), Ok(one)) => Ok(one.saturating_mul(1024)),
        (Err(error), Err(_)) => Err(error),
    }
}

/// Numbers of the device that holds `path`.
///
/// # Errors
/// When `path` does not exist.
pub fn device_of(path: &Path) -> Result<(u64, u64), SensorError> {
    let device = fs::metadata(path)
        .map_err(|e| SensorError::io(path, e))?
        .dev();
    Ok((major(device), minor(device)))
}

/// A setting of the device's own queue, or of its disk's where it is a partition.
fn queue_value(roots: &Roots, major: u64, minor: u64, name: &str) -> Result<u64, SensorError> {
    let [own, disk] = queue_files(roots, major, minor, name);
    read_once(own, single_number).or_else(|_| read_once(disk, single_number))
}

/// Where a device's own queue and its disk's have a setting.
fn queue_files(roots: &Roots, major: u64, minor: u64, name: &str) -> [PathBuf; 2] {
    let block = roots.sys.join(format!("dev/block/{major}:{minor}"));
    ["queue", "../queue"].map(|queue| block.join(queue).join(name))
}
