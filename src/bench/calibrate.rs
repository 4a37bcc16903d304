//! `hotpin bench --calibrate`: measures what the simulator's plant needs to know of a machine.
//!
//! No policy is compared. One child decodes with everything in memory, in the file mapping and in the
//! arena of the store `direct`, and times that store's reads; another, in a cgroup of the size to be
//! simulated, brings cold experts in, locks and drops them, without an engine.

mod batches;
mod compute;
mod memory;

use super::cgroup::CgroupParent;
use super::plan::Plan;
use super::protocol::{CgroupJoin, ChildError};
use super::residency::make_cold;
use super::{BenchError, Hooks};
use anyhow::{Context, Result, ensure};
use compute::{Compute, Direct};
use memory::Memory;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

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
    let document = document + &direct_document(compute.direct);
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
         fault_bytes_per_s = {fault:.4e}       # page faults with the kernel's readahead, bytes read\n\
         fault_latency_s = {fault_latency:.6}\n\
         fault_amplification = {amplification:.3}  # bytes read for a byte used, nothing cached\n\
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

/// The lines about the store `direct`.
fn direct_document(direct: Option<Direct>) -> String {
    direct.map_or_else(String::new, |direct| {
        format!(
            "direct_compute_s = {:.6}         # a token with everything in the arena of the store direct\n\
             direct_bytes_per_s = {:.4e}      # its reads\n\
             direct_fresh_s_per_byte = {:.3e} # beyond the read, of memory used for the first time\n\
             direct_handling_s_per_byte = {:.3e} # of a token's time beside the wait, for each byte read\n",
            direct.compute_s,
            direct.bytes_per_s,
            direct.fresh_s_per_byte,
            direct.handling_s_per_byte
        )
    })
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
        Phase::Compute => Ok(serde_json::to_string(&compute::measure(&order)?)?),
        Phase::Memory => Ok(serde_json::to_string(&memory::measure(&order)?)?),
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
