//! `hotpin bench --calibrate`: measures what the simulator's plant needs to know of a machine.
//!
//! No policy runs. One child decodes with everything in memory; another, in a cgroup of the size to
//! be simulated, brings cold experts in, locks and drops them, without an engine.

use super::cgroup::CgroupParent;
use super::plan::Plan;
use super::protocol::{CgroupJoin, ChildError};
use super::residency::make_cold;
use super::{BenchError, Hooks};
use crate::bench::measure::Passed;
use crate::engine::{EngineOptions, Model, Poll, Session};
use crate::model::ModelMap;
use crate::sensors::{Roots, readahead_request_bytes};
use crate::store::probe::{Arrival, Probe};
use anyhow::{Context, Result, ensure};
use hotpin_controllers::ExpertId;
use procfs::Current;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Tokens decoded before those that are timed, and those.
const WARM_TOKENS: usize = 32;
const TIMED_TOKENS: usize = 96;
/// Batches timed for each number of experts.
const FETCHES_A_SIZE: usize = 24;
const FAULTS_A_SIZE: usize = 12;
/// Batches timed page by page, and locked and dropped.
const PAGEWISE: usize = 6;
const LOCKS: usize = 24;
/// Batches whose room is made before reads with room are timed.
const ROOM_BATCHES: usize = 8;
/// Batches beyond the group's limit that are read before anything is timed.
const FILL_PERCENT: u64 = 110;
/// Memory of the group where none is asked for, percent of the model.
const DEFAULT_PERCENT: u64 = 45;

/// What a child is to measure.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Phase {
    Compute,
    Memory,
}

/// One measurement, as the parent orders it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    phase: Phase,
    model: PathBuf,
    text: PathBuf,
    threads: u32,
    engine: serde_json::Value,
    cgroup: Option<CgroupJoin>,
    memory_bytes: u64,
}

/// The engine with everything in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Compute {
    /// Seconds a token while idle threads spin.
    spinning_s: f64,
    /// Seconds a token while they sleep soon.
    quiet_s: f64,
    /// Memory beside expert bytes: dense weights, KV, buffers, program.
    engine_bytes: u64,
    /// All memory of the machine.
    host_bytes: u64,
}

/// Experts through the page cache of a full group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Memory {
    fetch_latency_s: f64,
    fetch_bytes_per_s: f64,
    roomy_latency_s: f64,
    roomy_bytes_per_s: f64,
    fault_latency_s: f64,
    fault_bytes_per_s: f64,
    fault_amplification: f64,
    page_bytes_per_s: f64,
    lock_s_per_byte: f64,
    unlock_s_per_byte: f64,
    evict_s_per_byte: f64,
}

/// Measures and writes `out`, a machine for `hotpin-sim scenario recorded`.
///
/// # Errors
/// [`BenchError`] when a child fails, a cgroup cannot be made, or the file cannot be written.
pub fn calibrate(plan: &Plan, hooks: &Hooks<'_>, out: &Path) -> Result<String, BenchError> {
    let failed = |error: anyhow::Error| BenchError::Model(format!("calibration: {error:#}"));
    let Some(text) = plan.workload.first() else {
        return Err(BenchError::Usage(
            "--calibrate decodes a text, and --prompts gives none".to_owned(),
        ));
    };
    let memory_bytes = plan
        .memory_bytes
        .unwrap_or(plan.model_bytes.saturating_mul(DEFAULT_PERCENT) / 100);
    let mut order = Order {
        phase: Phase::Compute,
        model: plan.model.clone(),
        text: text.path.clone(),
        threads: plan.threads,
        engine: plan.engine.clone(),
        cgroup: None,
        memory_bytes,
    };
    let compute: Compute = ask(hooks, &order).map_err(failed)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(BenchError::Signals)?;
    runtime.block_on(make_cold(&plan.shards))?;
    let place = CgroupParent::find(&hooks.system_root).map_err(BenchError::NoLimit)?;
    let group = place.run_group(memory_bytes).map_err(BenchError::NoLimit)?;
    order.phase = Phase::Memory;
    order.cgroup = Some(group.join());
    let memory: Memory = ask(hooks, &order).map_err(failed)?;
    let document = document(plan, memory_bytes, &compute, &memory);
    crate::files::write_whole(out, &document).map_err(|source| BenchError::io(out, source))?;
    Ok(document)
}

fn document(plan: &Plan, memory_bytes: u64, compute: &Compute, memory: &Memory) -> String {
    format!(
        "# Measured by `hotpin bench --calibrate` with {model}, {threads} threads, in a group of \
         {memory_bytes} bytes.\n\
         host_bytes = {host_bytes}\n\
         engine_bytes = {engine_bytes}         # dense weights, KV, buffers, program\n\
         compute_s = {spinning:.6}             # a token with everything in memory, idle threads spin\n\
         compute_quiet_s = {quiet:.6}          # the same, idle threads sleep soon\n\
         fetch_bytes_per_s = {fetch:.4e}       # exact ranges by readahead, in the full group, until touched\n\
         fetch_latency_s = {fetch_latency:.6}\n\
         roomy_bytes_per_s = {roomy:.4e}       # the same where room was made before, so that nothing is reclaimed\n\
         roomy_latency_s = {roomy_latency:.6}\n\
         fault_bytes_per_s = {fault:.4e}       # page faults with the kernel's readahead\n\
         fault_latency_s = {fault_latency:.6}\n\
         fault_amplification = {amplification:.3}  # bytes read for a byte used\n\
         page_bytes_per_s = {page:.4e}         # page faults of one page each\n\
         lock_s_per_byte = {lock:.3e}          # resident experts\n\
         unlock_s_per_byte = {unlock:.3e}\n\
         evict_s_per_byte = {evict:.3e}\n",
        host_bytes = compute.host_bytes,
        model = plan.model.display(),
        threads = plan.threads,
        engine_bytes = compute.engine_bytes,
        spinning = compute.spinning_s,
        quiet = compute.quiet_s,
        fetch = memory.fetch_bytes_per_s,
        fetch_latency = memory.fetch_latency_s,
        roomy = memory.roomy_bytes_per_s,
        roomy_latency = memory.roomy_latency_s,
        fault = memory.fault_bytes_per_s,
        fault_latency = memory.fault_latency_s,
        amplification = memory.fault_amplification,
        page = memory.page_bytes_per_s,
        lock = memory.lock_s_per_byte,
        unlock = memory.unlock_s_per_byte,
        evict = memory.evict_s_per_byte,
    )
}

/// Starts a child, gives it its order, and reads its answer.
fn ask<T: for<'de> Deserialize<'de>>(hooks: &Hooks<'_>, order: &Order) -> Result<T> {
    let mut child = Command::new(&hooks.child.program)
        .arg("calibrate-child")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {}", hooks.child.program.display()))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(&serde_json::to_vec(order)?)?;
    }
    let output = child.wait_with_output()?;
    if let Ok(ChildError { error }) = serde_json::from_slice(&output.stdout) {
        anyhow::bail!("{error}");
    }
    ensure!(
        output.status.success(),
        "the child ended with {}",
        output.status
    );
    serde_json::from_slice(&output.stdout).context("the child's answer is not valid")
}

/// The child: reads one order from stdin and prints one line of JSON.
#[must_use]
pub fn execute() -> ExitCode {
    let answer = order().and_then(|order| match order.phase {
        Phase::Compute => Ok(serde_json::to_string(&compute(&order)?)?),
        Phase::Memory => Ok(serde_json::to_string(&memory(&order)?)?),
    });
    let (line, code) = match answer {
        Ok(line) => (line, ExitCode::SUCCESS),
        Err(error) => {
            let error = ChildError {
                error: format!("{error:#}"),
            };
            let line = serde_json::to_string(&error).unwrap_or_default();
            (line, ExitCode::FAILURE)
        }
    };
    if writeln!(std::io::stdout(), "{line}").is_err() {
        return ExitCode::FAILURE;
    }
    code
}

fn order() -> Result<Order> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    serde_json::from_str(&text).context("the order is not valid")
}

/// Decodes with everything in memory, once with each way to wait.
fn compute(order: &Order) -> Result<Compute> {
    let map = ModelMap::open(&order.model)?;
    // Loading reads the whole file.
    let model = Model::load(map.path(), |_| true)?;
    let passed: Passed = serde_json::from_value(order.engine.clone())?;
    let content =
        std::fs::read_to_string(&order.text).with_context(|| order.text.display().to_string())?;
    let mut tokens = model.tokenize(&content, false, false)?;
    let wanted = WARM_TOKENS + TIMED_TOKENS;
    ensure!(
        tokens.len() >= wanted,
        "{} has {} tokens, {wanted} are needed",
        order.text.display(),
        tokens.len()
    );
    tokens.truncate(wanted);
    let token_s = |poll| -> Result<f64> {
        let options = EngineOptions {
            threads: order.threads,
            poll,
            ..passed.engine.clone()
        };
        let mut session = Session::new(&model, &options, false)?;
        session.warm_up()?;
        let mut took = Vec::with_capacity(tokens.len());
        for &token in &tokens {
            let started = Instant::now();
            session.decode(&[token])?;
            took.push(started.elapsed());
        }
        Ok(median_s(&mut took[WARM_TOKENS..]))
    };
    // The first pass maps what it uses.
    token_s(Poll::Quiet)?;
    let spinning_s = token_s(Poll::Spin)?;
    let quiet_s = token_s(Poll::Quiet)?;
    let status = procfs::process::Process::myself()?.status()?;
    let kib = |kib: Option<u64>| kib.unwrap_or(0) * 1024;
    Ok(Compute {
        spinning_s,
        quiet_s,
        engine_bytes: map.dense_bytes() + kib(status.rssanon) + kib(status.vmpte),
        host_bytes: procfs::Meminfo::current()?.mem_total,
    })
}

/// Every token computes as much as the next: what takes longer was interrupted.
fn median_s(took: &mut [Duration]) -> f64 {
    took.sort_unstable();
    took.get(took.len() / 2).map_or(0.0, Duration::as_secs_f64)
}

/// Moves experts through the page cache.
fn memory(order: &Order) -> Result<Memory> {
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
    let mut filled_bytes = 0;
    while filled_bytes < order.memory_bytes / 100 * FILL_PERCENT {
        filled_bytes += mover.arrive(top_k, fetched)?.1;
    }
    let (fetch_latency_s, fetch_bytes_per_s) =
        mover.line(top_k, FETCHES_A_SIZE, fetched, Room::Full)?;
    // Room for the first, so that no read has to wait for the kernel.
    for _ in 0..ROOM_BATCHES {
        let experts = mover.batches.next(top_k, &map);
        probe.arrive(&experts, fetched, mover.threads)?;
        let _ = probe.evict(&experts);
    }
    let (roomy_latency_s, roomy_bytes_per_s) =
        mover.line(top_k, FETCHES_A_SIZE, fetched, Room::Made)?;
    let read_before = read_bytes()?;
    let moved_before = mover.batches.moved_bytes;
    let (fault_latency_s, fault_bytes_per_s) =
        mover.line(top_k, FAULTS_A_SIZE, Arrival::Faulted, Room::Full)?;
    let moved = mover.batches.moved_bytes - moved_before;
    let fault_amplification = (read_bytes()? - read_before) as f64 / moved.max(1) as f64;
    let mut pagewise = (Duration::ZERO, 0);
    for _ in 0..PAGEWISE {
        let (took, bytes) = mover.arrive(1, Arrival::PageByPage)?;
        pagewise = (pagewise.0 + took, pagewise.1 + bytes);
    }
    let locks = mover.locks(top_k, fetched)?;
    Ok(Memory {
        fetch_latency_s,
        fetch_bytes_per_s,
        roomy_latency_s,
        roomy_bytes_per_s,
        fault_latency_s,
        fault_bytes_per_s,
        fault_amplification,
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
        let experts = self.batches.next(count, self.map);
        let took = self.probe.arrive(&experts, how, self.threads)?;
        Ok((took, bytes_of(self.map, &experts)))
    }

    /// Latency and bandwidth over batches of 1 to `top_k` experts: a straight line through the
    /// means, by least squares.
    fn line(
        &mut self,
        top_k: usize,
        repeats: usize,
        how: Arrival,
        room: Room,
    ) -> Result<(f64, f64)> {
        let mut points = Vec::new();
        let mut sizes: Vec<Vec<(f64, f64)>> = vec![Vec::new(); top_k];
        for _ in 0..repeats {
            for (index, samples) in sizes.iter_mut().enumerate() {
                let experts = self.batches.next(index + 1, self.map);
                let took = self.probe.arrive(&experts, how, self.threads)?;
                let bytes = bytes_of(self.map, &experts);
                samples.push((bytes as f64, took.as_secs_f64()));
                if room == Room::Made {
                    // What is read next finds as much room as this took, and some from the start.
                    let _ = self.probe.evict(&experts);
                }
            }
        }
        for samples in &mut sizes {
            // Not the median: a token waits for slow reads too.
            let count = samples.len().max(1) as f64;
            let sums = samples.iter().fold((0.0, 0.0), |sums, sample| {
                (sums.0 + sample.0, sums.1 + sample.1)
            });
            points.push((sums.0 / count, sums.1 / count));
        }
        Ok(straight_line(&points))
    }

    /// Seconds a byte to lock, unlock and drop resident experts.
    fn locks(&mut self, top_k: usize, how: Arrival) -> Result<[f64; 3]> {
        let mut sums = [Duration::ZERO; 3];
        let mut bytes = 0;
        for _ in 0..LOCKS {
            let experts = self.batches.next(top_k, self.map);
            self.probe.arrive(&experts, how, self.threads)?;
            sums[0] += self.probe.lock(&experts)?;
            sums[1] += self.probe.unlock(&experts);
            sums[2] += self.probe.evict(&experts);
            bytes += bytes_of(self.map, &experts);
        }
        Ok(sums.map(|sum| sum.as_secs_f64() / bytes.max(1) as f64))
    }
}

fn bytes_of(map: &ModelMap, experts: &[ExpertId]) -> u64 {
    experts.iter().map(|&id| map.shape().bytes(id)).sum()
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

/// Every expert of the model in a fixed order that follows no pattern of the file, again and again:
/// in a group smaller than the model each is cold when its turn comes.
#[derive(Debug)]
struct Batches {
    layers: Vec<Vec<ExpertId>>,
    /// Next layer and, in each, the next expert.
    layer: usize,
    next: Vec<usize>,
    moved_bytes: u64,
}

impl Batches {
    fn new(map: &ModelMap) -> Self {
        let shape = map.shape();
        let layers: Vec<Vec<ExpertId>> = (0..shape.layers())
            .map(|layer| {
                let count = shape.experts_in(layer);
                let stride = stride(count);
                (0..count)
                    .map(|at| shape.id(layer, (at * stride) % count))
                    .collect()
            })
            .collect();
        Self {
            next: vec![0; layers.len()],
            layers,
            layer: 0,
            moved_bytes: 0,
        }
    }

    fn next(&mut self, count: usize, map: &ModelMap) -> Vec<ExpertId> {
        let layer = self.layer;
        self.layer = (self.layer + 1) % self.layers.len();
        let experts = &self.layers[layer];
        let start = self.next[layer];
        self.next[layer] = (start + count) % experts.len();
        let batch: Vec<ExpertId> = (0..count.min(experts.len()))
            .map(|at| experts[(start + at) % experts.len()])
            .collect();
        self.moved_bytes += bytes_of(map, &batch);
        batch
    }
}

/// A step that visits every one of `count` and goes far each time.
fn stride(count: u32) -> u32 {
    let common = |a: u32, b: u32| {
        let (mut a, mut b) = (a, b);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (count * 5 / 13..count)
        .find(|&step| common(step.max(1), count) == 1)
        .unwrap_or(1)
        .max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn strides_visit_every_expert() {
        for count in [1, 2, 8, 32, 64, 128, 384] {
            let step = stride(count);
            let seen: std::collections::HashSet<u32> =
                (0..count).map(|at| (at * step) % count).collect();
            assert_eq!(seen.len(), count as usize, "{count} by {step}");
        }
    }
}
