//! Tries out how this store would read a model's files here, without an engine.

use super::DirectOptions;
use super::arena::Arena;
use super::files::ModelFiles;
use super::reader::{Done, FEW_IN_FLIGHT, Read, Reader, Wait};
use crate::model::ModelMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// From one read to the next, in reads: a prime, so that they lie all over the files.
const STRIDE: u64 = 7919;
/// Bytes of a read where the model has no experts to take the size from.
const DENSE_READ_BYTES: usize = 1 << 20;

/// What was found.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskTrial {
    /// Why reads go through the page cache, when they do.
    pub not_direct: Option<String>,
    /// Why reads go without io_uring, when they do.
    pub not_uring: Option<String>,
    /// Bytes of one read.
    pub read_bytes: usize,
    /// Bytes a second; `None` when reads go through the page cache, whose speed says nothing of the
    /// disk's.
    pub bytes_per_s: Option<f64>,
}

/// Opens the model's files as the store does, and reads slices from all over them for about `duration`.
///
/// # Errors
/// When a file cannot be opened, or a read fails.
pub fn try_disk(
    map: &ModelMap,
    options: DirectOptions,
    duration: Duration,
) -> io::Result<DiskTrial> {
    let files = Arc::new(ModelFiles::open(map.shards(), options.direct)?);
    let (mut reader, not_uring) = Reader::new(Arc::clone(&files), options);
    let slice_bytes = map
        .layers()
        .iter()
        .flat_map(|layer| &layer.parts)
        .filter_map(|part| usize::try_from(part.slice_bytes).ok())
        .max();
    let read_bytes = slice_bytes
        .unwrap_or(DENSE_READ_BYTES)
        .next_multiple_of(files.align);
    let not_direct = files.not_direct.clone();
    let bytes_per_s = match not_direct {
        Some(_) => None,
        None => Some(time_reads(&mut reader, &files, read_bytes, duration)?),
    };
    Ok(DiskTrial {
        not_direct,
        not_uring,
        read_bytes,
        bytes_per_s,
    })
}

/// Bytes a second of reads of `read_bytes` at multiples of it, all over the files, into memory of their own.
///
/// # Errors
/// When that memory cannot be had or a read fails.
pub(super) fn time_reads(
    reader: &mut Reader,
    files: &ModelFiles,
    read_bytes: usize,
    duration: Duration,
) -> io::Result<f64> {
    let at_once = u32::try_from(FEW_IN_FLIGHT).unwrap_or(1);
    let room = Arena::reserve(read_bytes, FEW_IN_FLIGHT)?;
    let sizes = files
        .shards
        .iter()
        .map(|shard| Ok(shard.file.metadata()?.len()));
    let sizes: Vec<u64> = sizes.collect::<io::Result<_>>()?;
    let in_file = |bytes: u64| (bytes / read_bytes as u64).max(1);
    let reads: u64 = sizes.iter().map(|&bytes| in_file(bytes)).sum();
    let place = |number: u64| {
        let mut at = number.wrapping_mul(STRIDE) % reads.max(1);
        for (shard, &bytes) in sizes.iter().enumerate() {
            if at < in_file(bytes) {
                let offset = at * read_bytes as u64;
                let least = (bytes - offset).min(read_bytes as u64);
                return Some((shard, offset, usize::try_from(least).unwrap_or(read_bytes)));
            }
            at -= in_file(bytes);
        }
        None
    };
    let mut free: Vec<u32> = (0..at_once).collect();
    let mut ended: Vec<Done> = Vec::new();
    let (mut number, mut bytes, mut started) = (0_u64, 0_usize, Instant::now());
    loop {
        // The first reads touch the memory.
        if number == u64::from(at_once) {
            (bytes, started) = (0, Instant::now());
        }
        let over = number > u64::from(at_once) && started.elapsed() >= duration;
        while !over && let Some(slot) = free.pop() {
            let Some((shard, offset, least)) = place(number) else {
                return Err(io::Error::other("the model has no file"));
            };
            number += 1;
            let read = Read {
                owner: (slot, 0),
                shard,
                offset,
                address: room.address(slot),
                len: read_bytes,
                least,
            };
            // SAFETY: the slot is free, and `drain` below waits for every read before `room` goes.
            unsafe { reader.push(read) };
            bytes += least;
        }
        if reader.outstanding() == 0 {
            break;
        }
        let reaped = reader.reap(Wait::ForOne, &mut ended);
        let failed = ended.iter().find_map(|done| done.result.clone().err());
        if let Some(error) = reaped.err().or_else(|| failed.map(io::Error::other)) {
            reader.drain();
            return Err(error);
        }
        free.extend(ended.drain(..).map(|done| done.owner.0));
    }
    #[expect(clippy::cast_precision_loss, reason = "some GB")]
    let bytes = bytes as f64;
    Ok(bytes / started.elapsed().as_secs_f64().max(1e-9))
}
