//! Times the memory calls of the store on a model's file, away from any engine or policy.

use super::pages::{self, PageRange};
use crate::model::ModelMap;
use hotpin_controllers::ExpertId;
use memmap2::{Advice, Mmap};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

/// How an expert's bytes come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Exact-range readahead, as a fetch does it, in pieces of at most so many bytes.
    Fetched(usize),
    /// Page faults with the kernel's own readahead.
    Faulted,
    /// Page faults, one page each.
    PageByPage,
}

/// A mapping of a model of its own.
#[derive(Debug)]
pub struct Probe<'m> {
    map: &'m ModelMap,
    shards: Vec<(File, Mmap)>,
}

impl<'m> Probe<'m> {
    /// Maps every shard.
    ///
    /// # Errors
    /// When a file cannot be opened or mapped.
    pub fn open(map: &'m ModelMap) -> io::Result<Self> {
        let shards = map
            .shards()
            .iter()
            .map(|shard| {
                let file = File::open(&shard.path)?;
                // SAFETY: read only, and as for the engine's own mapping the model file is not
                // changed while it is in use; every access is bounds-checked against its length.
                let mapping = unsafe { Mmap::map(&file)? };
                Ok((file, mapping))
            })
            .collect::<io::Result<_>>()?;
        Ok(Self { map, shards })
    }

    /// Brings experts in and touches every page of them with `threads` threads; returns the time
    /// until the last is there. Slice by slice, as the graph uses them.
    ///
    /// # Errors
    /// When the kernel refuses an advice.
    pub fn arrive(
        &self,
        experts: &[ExpertId],
        how: Arrival,
        threads: usize,
    ) -> io::Result<Duration> {
        let parts = self.parts(experts);
        for slices in &parts {
            let advice = if how == Arrival::Faulted {
                Advice::Normal
            } else {
                Advice::Random
            };
            for slice in slices {
                self.advise(slice, advice)?;
            }
        }
        let started = Instant::now();
        if let Arrival::Fetched(piece_bytes) = how {
            for slice in parts.iter().flatten() {
                pages::will_need(slice.outer(), piece_bytes)?;
            }
        }
        for slices in &parts {
            thread::scope(|scope| {
                for number in 0..threads {
                    scope.spawn(move || {
                        for slice in slices {
                            slice.touch(number, threads);
                        }
                    });
                }
            });
        }
        Ok(started.elapsed())
    }

    /// Whether no page of the experts is in the page cache.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn is_cold(&self, experts: &[ExpertId]) -> io::Result<bool> {
        let mut scratch = Vec::new();
        for slice in self.parts(experts).iter().flatten() {
            if pages::resident_pages(slice.outer(), &mut scratch)? > 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Locks resident experts.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn lock(&self, experts: &[ExpertId]) -> io::Result<Duration> {
        let parts = self.parts(experts);
        let started = Instant::now();
        for slice in parts.iter().flatten() {
            pages::lock(slice.outer())?;
        }
        Ok(started.elapsed())
    }

    /// Unlocks experts.
    #[must_use]
    pub fn unlock(&self, experts: &[ExpertId]) -> Duration {
        let parts = self.parts(experts);
        let started = Instant::now();
        for slice in parts.iter().flatten() {
            pages::unlock(slice.outer());
        }
        started.elapsed()
    }

    /// Drops experts from the page cache.
    #[must_use]
    pub fn evict(&self, experts: &[ExpertId]) -> Duration {
        let parts = self.parts(experts);
        let started = Instant::now();
        for slice in parts.iter().flatten() {
            let inner = PageRange::inner(slice.bytes.as_ptr() as usize, slice.bytes.len());
            let offset = slice.offset + (inner.start() - slice.bytes.as_ptr() as usize) as u64;
            pages::drop_cached(inner, self.shards[slice.shard].0.as_fd(), offset);
        }
        started.elapsed()
    }

    fn advise(&self, slice: &Slice<'_>, advice: Advice) -> io::Result<()> {
        let page = pages::page_bytes();
        let start = usize::try_from(slice.offset).unwrap_or(0) & !(page - 1);
        let len = slice.outer().len();
        let mapping = &self.shards[slice.shard].1;
        mapping.advise_range(advice, start, len.min(mapping.len() - start))
    }

    /// Slices by their place in the expert: all gates, then all ups, and so on.
    fn parts(&self, experts: &[ExpertId]) -> Vec<Vec<Slice<'_>>> {
        let mut parts: Vec<Vec<Slice<'_>>> = Vec::new();
        for &id in experts {
            for (part, slice) in self.map.expert_slices(id).iter().enumerate() {
                let shard = slice.shard as usize;
                // The map was checked against the files' sizes when it was opened.
                let range = usize::try_from(slice.offset)
                    .ok()
                    .zip(usize::try_from(slice.len).ok());
                let bytes =
                    range.and_then(|(start, len)| self.shards[shard].1.get(start..start + len));
                let Some(bytes) = bytes else { continue };
                if parts.len() <= part {
                    parts.resize_with(part + 1, Vec::new);
                }
                parts[part].push(Slice {
                    bytes,
                    shard,
                    offset: slice.offset,
                });
            }
        }
        parts
    }
}

/// A slice in the mapping.
#[derive(Debug)]
struct Slice<'a> {
    bytes: &'a [u8],
    shard: usize,
    offset: u64,
}

impl Slice<'_> {
    fn outer(&self) -> PageRange {
        PageRange::outer(self.bytes.as_ptr() as usize, self.bytes.len())
    }

    /// Reads a byte of each of one thread's pages. Threads take turns page by page, since the
    /// engine deals out a matrix in chunks of few rows: all of them wait in the same place.
    fn touch(&self, number: usize, threads: usize) {
        let page = pages::page_bytes();
        let sum = self
            .bytes
            .iter()
            .skip(number * page)
            .step_by(threads.max(1) * page)
            .fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        std::hint::black_box(sum);
    }
}
