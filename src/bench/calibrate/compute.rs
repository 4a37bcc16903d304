//! The engine with everything in memory, and the store `direct`.

use super::Order;
use super::batches::Batches;
use crate::bench::measure::Passed;
use crate::engine::{EngineOptions, Model, Poll, Session, Token};
use crate::model::ModelMap;
use crate::plant::{Rig, RigOptions};
use crate::store::StoreKind;
use crate::time::seconds;
use anyhow::{Context, Result, ensure};
use hotpin_controllers::PolicyKind;
use procfs::Current;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Tokens decoded before those that are timed, and those.
const WARM_TOKENS: usize = 32;
const TIMED_TOKENS: usize = 96;
/// Experts read into memory that the arena did not have before.
const FRESH_READS: usize = 96;
/// The arena holds one expert in so many while its reads are timed: some of what a layer needs is there then, as
/// in a session, and a disk that is fast only in bursts is asked for no more than there.
const ARENA_SHARE: u64 = 3;
/// Matmuls of a layer's experts, each of which waits for its own part.
const PARTS: f64 = 3.0;
/// Longer than a calibration: nothing is decided meanwhile.
const NO_TICK: Duration = Duration::from_secs(3600);

/// The engine with everything in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Compute {
    /// Seconds a token while idle threads spin.
    pub(super) spinning_s: f64,
    /// Seconds a token while they sleep soon.
    pub(super) quiet_s: f64,
    /// Memory beside expert bytes: dense weights, KV, buffers, program.
    pub(super) engine_bytes: u64,
    /// All memory of the machine.
    pub(super) host_bytes: u64,
    /// The store `direct`, where it works.
    pub(super) direct: Option<Direct>,
}

/// The store `direct`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Direct {
    /// Seconds a token with everything in its arena.
    pub(super) compute_s: f64,
    /// Its reads.
    pub(super) bytes_per_s: f64,
    /// Seconds a byte, beyond the read, of memory that the arena uses for the first time.
    pub(super) fresh_s_per_byte: f64,
    /// Seconds a byte of a token's time that are neither a wait for it nor computing as with everything in
    /// the arena: reads are begun and taken in, what arrives is computed apart.
    pub(super) handling_s_per_byte: f64,
}

/// Decodes with everything in memory, once with each way to wait.
pub(super) fn measure(order: &Order) -> Result<Compute> {
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
    let engine_bytes = map.dense_bytes() + kib(status.rssanon) + kib(status.vmpte);
    Ok(Compute {
        spinning_s,
        quiet_s,
        engine_bytes,
        host_bytes: procfs::Meminfo::current()?.mem_total,
        direct: direct(order, engine_bytes, passed, &map, &tokens)?,
    })
}

/// The store `direct`: a token with everything in its arena, its reads while the engine waits for them,
/// and what memory costs that the arena uses for the first time. `None` where it does not work.
fn direct(
    order: &Order,
    engine_bytes: u64,
    passed: Passed,
    map: &ModelMap,
    tokens: &[Token],
) -> Result<Option<Direct>> {
    if !map.is_moe() {
        return Ok(None);
    }
    let model = Model::open(map.path(), |_| true)?;
    let engine = EngineOptions {
        threads: order.threads,
        ..passed.engine
    };
    let options = RigOptions {
        control: passed.control,
        tick: NO_TICK,
        ..RigOptions::new(PolicyKind::Fetch, StoreKind::Direct, engine)
    };
    let Ok(mut rig) = Rig::assemble(&model, map, options, &mut |_, _| {}) else {
        return Ok(None);
    };
    let Some(store) = rig
        .store
        .clone()
        .filter(|_| rig.store_kind == StoreKind::Direct)
    else {
        return Ok(None);
    };
    let mut batches = Batches::new(map);
    let (mut fresh, mut fresh_bytes) = (Duration::ZERO, 0);
    for id in (0..FRESH_READS).flat_map(|_| batches.next(1)) {
        let started = Instant::now();
        // Where nothing may be locked, it has been read all the same.
        let _ = store.pin(id);
        fresh += started.elapsed();
        store.unpin(id);
        fresh_bytes += map.shape().bytes(id);
    }
    // The first pass reads what it uses.
    let mut took = Vec::with_capacity(tokens.len());
    for _ in 0..2 {
        took.clear();
        rig.session.clear();
        for &token in tokens {
            let started = Instant::now();
            rig.session.decode(&[token])?;
            took.push(started.elapsed());
        }
    }
    let compute_s = median_s(&mut took[WARM_TOKENS..]);
    store.set_capacity(map.shape().total_bytes() / ARENA_SHARE);
    rig.session.clear();
    for &token in &tokens[..WARM_TOKENS] {
        rig.session.decode(&[token])?;
    }
    let waiting_layers = |rig: &Rig<'_>| rig.counters.missed()[1..].iter().sum::<u64>();
    let before = (rig.counters.totals(), waiting_layers(&rig));
    for &token in &tokens[WARM_TOKENS..] {
        rig.session.decode(&[token])?;
    }
    let starved = rig.counters.totals().since(&before.0);
    let waited = waiting_layers(&rig) - before.1;
    let read_bytes = starved.fetch_bytes as f64;
    // While one part is computed, the next is read: that time is no stall.
    let cycle_bytes = map.shape().token_cycle_bytes() as f64;
    let share = cycle_bytes / (cycle_bytes + engine_bytes as f64);
    let layer_s = compute_s * share / map.shape().layers() as f64;
    let hidden_s = layer_s * (1.0 - 1.0 / PARTS) * waited as f64;
    let stall_s = seconds(starved.stall_ns);
    let bytes_per_s = read_bytes / (stall_s + hidden_s);
    let computing_s = seconds(starved.decode_ns) - stall_s;
    let handling_s = (computing_s - compute_s * TIMED_TOKENS as f64).max(0.0);
    let fresh_s_per_byte = fresh.as_secs_f64() / fresh_bytes.max(1) as f64;
    Ok(Some(Direct {
        compute_s,
        bytes_per_s,
        fresh_s_per_byte: (fresh_s_per_byte - 1.0 / bytes_per_s).max(0.0),
        handling_s_per_byte: handling_s / read_bytes.max(1.0),
    }))
}

/// Every token computes as much as the next: what takes longer was interrupted.
fn median_s(took: &mut [Duration]) -> f64 {
    took.sort_unstable();
    took.get(took.len() / 2).map_or(0.0, Duration::as_secs_f64)
}
