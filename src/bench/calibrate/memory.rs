//! Cold experts through the page cache of a full group.

use super::Order;
use super::batches::{Batches, bytes_of};
use crate::model::ModelMap;
use crate::sensors::{Roots, readahead_request_bytes};
use crate::store::probe::{Arrival, Probe};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Everything is timed this often, in turns: disks that others share are faster at one time than at another.
const PASSES: usize = 6;
/// Batches timed in a pass for each number of experts.
const FETCHES_A_SIZE: usize = 12;
const FAULTS_A_SIZE: usize = 6;
/// Experts faulted in while nothing is cached. They are no neighbours.
const ALONE: usize = 24;
/// Batches timed in a pass page by page, and locked and dropped.
const PAGEWISE: usize = 3;
const LOCKS: usize = 8;
/// Batches whose room is made before reads with room are timed.
const ROOM_BATCHES: usize = 8;
/// Batches beyond the group's limit that are read before anything is timed.
const FILL_PERCENT: u64 = 110;

/// Experts through the page cache of a full group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Memory {
    pub(super) fetch_latency_s: f64,
    pub(super) fetch_bytes_per_s: f64,
    pub(super) roomy_latency_s: f64,
    pub(super) roomy_bytes_per_s: f64,
    pub(super) fault_latency_s: f64,
    pub(super) fault_bytes_per_s: f64,
    pub(super) fault_amplification: f64,
    pub(super) page_bytes_per_s: f64,
    pub(super) lock_s_per_byte: f64,
    pub(super) unlock_s_per_byte: f64,
    pub(super) evict_s_per_byte: f64,
}

/// Moves experts through the page cache.
pub(super) fn measure(order: &Order) -> Result<Memory> {
    if let Some(cgroup) = &order.cgroup {
        std::fs::write(&cgroup.procs, std::process::id().to_string())
            .with_context(|| format!("joining {}", cgroup.procs.display()))?;
    }
    let map = ModelMap::open(&order.model)?;
    ensure!(map.is_moe(), "a dense model has no experts to move");
    let probe = Probe::open(&map)?;
    let mut mover = Mover {
        batches: Batches::new(&map),
        probe: &probe,
        threads: order.threads as usize,
        map: &map,
    };
    let piece_bytes = readahead_request_bytes(&Roots::default(), map.path())
        .ok()
        .and_then(|bytes| usize::try_from(bytes).ok())
        .unwrap_or(128 << 10);
    let fetched = Arrival::Fetched(piece_bytes);
    let top_k = map.shape().top_k_in(0) as usize;
    // Nothing is cached yet, so that all that is read around an expert shows.
    let read_before = read_bytes()?;
    let mut used_bytes = 0;
    for _ in 0..ALONE {
        used_bytes += mover.arrive(1, Arrival::Faulted)?.1;
    }
    let fault_amplification = (read_bytes()? - read_before) as f64 / used_bytes.max(1) as f64;
    let mut filled_bytes = 0;
    while filled_bytes < order.memory_bytes / 100 * FILL_PERCENT {
        filled_bytes += mover.arrive(top_k, fetched)?.1;
    }
    let (mut fetches, mut roomy, mut faults) = (Line::default(), Line::default(), Line::default());
    let mut pagewise = (Duration::ZERO, 0);
    let mut locking = (0, [Duration::ZERO; 3]);
    for _ in 0..PASSES {
        mover.sample(&mut fetches, top_k, FETCHES_A_SIZE, fetched, Room::Full)?;
        mover.sample(
            &mut faults,
            top_k,
            FAULTS_A_SIZE,
            Arrival::Faulted,
            Room::Full,
        )?;
        for _ in 0..PAGEWISE {
            let (took, bytes) = mover.arrive(1, Arrival::PageByPage)?;
            pagewise = (pagewise.0 + took, pagewise.1 + bytes);
        }
        mover.lock(&mut locking, top_k, fetched)?;
        // Room for the first, so that no read has to wait for the kernel.
        for _ in 0..ROOM_BATCHES {
            let experts = mover.batches.next(top_k);
            probe.arrive(&experts, fetched, mover.threads)?;
            let _ = probe.evict(&experts);
        }
        mover.sample(&mut roomy, top_k, FETCHES_A_SIZE, fetched, Room::Made)?;
    }
    let (fetch_latency_s, fetch_bytes_per_s) = fetches.fit();
    let (roomy_latency_s, roomy_bytes_per_s) = roomy.fit();
    let (fault_latency_s, fault_bytes_per_s) = faults.fit();
    let locks = locking
        .1
        .map(|sum| sum.as_secs_f64() / locking.0.max(1) as f64);
    Ok(Memory {
        fetch_latency_s,
        fetch_bytes_per_s,
        roomy_latency_s,
        roomy_bytes_per_s,
        fault_latency_s,
        fault_bytes_per_s,
        fault_amplification: fault_amplification.max(1.0),
        page_bytes_per_s: pagewise.1 as f64 / pagewise.0.as_secs_f64(),
        lock_s_per_byte: locks[0],
        unlock_s_per_byte: locks[1],
        evict_s_per_byte: locks[2],
    })
}

/// Bytes that this process has read from disks.
fn read_bytes() -> Result<u64> {
    Ok(procfs::process::Process::myself()?.io()?.read_bytes)
}

/// Whether the group has room for what is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// The kernel reclaims for every read.
    Full,
    /// As much was dropped before, as a store does that keeps its transit.
    Made,
}

/// Brings batches in and times them.
struct Mover<'a> {
    batches: Batches,
    probe: &'a Probe<'a>,
    threads: usize,
    map: &'a ModelMap,
}

impl Mover<'_> {
    /// The next `count` experts of one layer; time and bytes.
    fn arrive(&mut self, count: usize, how: Arrival) -> Result<(Duration, u64)> {
        let experts = self.batches.next(count);
        let took = self.probe.arrive(&experts, how, self.threads)?;
        Ok((took, bytes_of(self.map, &experts)))
    }

    /// Times `repeats` batches of each of 1 to `top_k` experts.
    fn sample(
        &mut self,
        line: &mut Line,
        top_k: usize,
        repeats: usize,
        how: Arrival,
        room: Room,
    ) -> Result<()> {
        for _ in 0..repeats {
            for count in 1..=top_k {
                let experts = self.batches.next(count);
                let read_before = read_bytes()?;
                let took = self.probe.arrive(&experts, how, self.threads)?;
                let bytes = match how {
                    // With what is read around them, as far as it was not there.
                    Arrival::Faulted => read_bytes()? - read_before,
                    _ => bytes_of(self.map, &experts),
                };
                line.add(count, bytes as f64, took.as_secs_f64());
                if room == Room::Made {
                    // What is read next finds as much room as this took, and some from the start.
                    let _ = self.probe.evict(&experts);
                }
            }
        }
        Ok(())
    }

    /// Bytes of resident experts that were locked, unlocked and dropped, and the time of each.
    fn lock(
        &mut self,
        (bytes, sums): &mut (u64, [Duration; 3]),
        top_k: usize,
        how: Arrival,
    ) -> Result<()> {
        for _ in 0..LOCKS {
            let experts = self.batches.next(top_k);
            self.probe.arrive(&experts, how, self.threads)?;
            sums[0] += self.probe.lock(&experts)?;
            sums[1] += self.probe.unlock(&experts);
            sums[2] += self.probe.evict(&experts);
            *bytes += bytes_of(self.map, &experts);
        }
        Ok(())
    }
}

/// Times of batches by how many experts each has.
#[derive(Debug, Default)]
struct Line {
    /// For each number of experts: batches, bytes, seconds.
    sums: Vec<(f64, f64, f64)>,
}

impl Line {
    fn add(&mut self, experts: usize, bytes: f64, seconds: f64) {
        if self.sums.len() < experts {
            self.sums.resize(experts, (0.0, 0.0, 0.0));
        }
        let sum = &mut self.sums[experts - 1];
        *sum = (sum.0 + 1.0, sum.1 + bytes, sum.2 + seconds);
    }

    /// Latency and bandwidth: a straight line through the means, by least squares. Not the medians: a token waits
    /// for slow reads too.
    fn fit(&self) -> (f64, f64) {
        let timed = self.sums.iter().filter(|sum| sum.0 > 0.0);
        let points: Vec<_> = timed.map(|sum| (sum.1 / sum.0, sum.2 / sum.0)).collect();
        straight_line(&points)
    }
}

/// Latency and bandwidth of a line through (bytes, seconds); no latency where the line says less
/// than none.
fn straight_line(points: &[(f64, f64)]) -> (f64, f64) {
    let n = points.len().max(1) as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (bytes, seconds) = (mean(|p| p.0), mean(|p| p.1));
    let spread: f64 = points.iter().map(|p| (p.0 - bytes).powi(2)).sum();
    let product: f64 = points.iter().map(|p| (p.0 - bytes) * (p.1 - seconds)).sum();
    let slope = product / spread;
    let latency_s = seconds - slope * bytes;
    if slope > 0.0 && latency_s >= 0.0 {
        return (latency_s, 1.0 / slope);
    }
    (0.0, bytes / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_timed_in_turns_makes_one_line() {
        let mut line = Line::default();
        for slow in [1.0, 3.0] {
            for experts in 1..=4 {
                let bytes = experts as f64 * 3e6;
                line.add(experts, bytes, slow * (1e-4 + bytes / 8e8));
            }
        }
        let (latency_s, bytes_per_s) = line.fit();
        assert!((latency_s - 2e-4).abs() < 1e-9 && (bytes_per_s - 4e8).abs() < 1.0);
    }

    #[test]
    fn a_line_gives_latency_and_bandwidth() {
        let points: Vec<(f64, f64)> = (1..=4)
            .map(|k| (f64::from(k) * 3e6, 2e-4 + f64::from(k) * 3e6 / 8e8))
            .collect();
        let (latency_s, bytes_per_s) = straight_line(&points);
        assert!((latency_s - 2e-4).abs() < 1e-9 && (bytes_per_s - 8e8).abs() < 1.0);
        // Slower for one than for two: no latency can be told.
        let (latency_s, bytes_per_s) = straight_line(&[(1e6, 2e-3), (2e6, 2e-3)]);
        assert_eq!(latency_s, 0.0);
        assert!((bytes_per_s - 7.5e8).abs() < 1.0);
    }
}
