//! `hotpin-sim scenario recorded`: predicts a recorded session, beside what was measured.

use anyhow::{Context, Result, ensure};
use clap::Args;
use hotpin_controllers::PolicyKind;
use hotpin_controllers::trace::Trace;
use hotpin_sim::plant::{Calibrated, CalibratedError, Report, Scenario, StoreKind};
use hotpin_sim::scenarios;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, Args)]
pub struct RecordedArgs {
    /// The machine, as `hotpin bench --calibrate` wrote it.
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,
    /// The session, as `--record` wrote it.
    #[arg(long, value_name = "FILE", env = "HOTPIN_SIM_TRACE")]
    trace: Option<PathBuf>,
    /// The starting profile, as `hotpin profile` wrote it.
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Limit of the session's cgroup, bytes, such as 2500e6 [default: none].
    #[arg(long, value_name = "BYTES")]
    memory: Option<f64>,
    /// Where experts live: mapped or direct.
    #[arg(long, value_name = "NAME", default_value = "mapped")]
    store: StoreKind,
    /// Reports of `hotpin bench --json` on the same session, to compare with.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    measured: Vec<PathBuf>,
}

/// The part of a profile that the plant needs.
#[derive(Debug, Deserialize)]
struct Profile {
    layer: Vec<LayerCounts>,
}

#[derive(Debug, Deserialize)]
struct LayerCounts {
    counts: Vec<f32>,
}

/// The part of a bench's report that is compared.
#[derive(Debug, Deserialize)]
struct Bench {
    runs: Vec<BenchRun>,
}

#[derive(Debug, Deserialize)]
struct BenchRun {
    policy: String,
    store: String,
    tok_s: f64,
}

/// One policy's line.
#[derive(Debug, Serialize)]
struct Line {
    policy: &'static str,
    tok_s: f64,
    hit_ratio: f64,
    read_bytes_per_token: f64,
    stall_ms_per_token: f64,
    /// Median of the reports; `null` without any.
    measured_tok_s: Option<f64>,
    deviation: Option<f64>,
}

/// What a session needs to be predicted.
struct Session {
    machine: Calibrated,
    trace: Arc<Trace>,
    profile: Option<Vec<f32>>,
    memory_bytes: Option<u64>,
    store: StoreKind,
}

impl Session {
    fn scenario(&self, kind: PolicyKind) -> Result<Scenario, CalibratedError> {
        let profile = self.profile.clone();
        scenarios::recorded(
            &self.machine,
            kind,
            self.store,
            self.memory_bytes,
            &self.trace,
            profile,
        )
    }
}

impl RecordedArgs {
    fn session(&self) -> Result<Session> {
        let machine = self.machine.as_deref().context(
            "`recorded` needs --machine FILE; `hotpin bench MODEL --calibrate FILE` writes one",
        )?;
        let trace = self.trace.as_deref().context(
            "`recorded` needs --trace FILE; `hotpin bench MODEL --record DIR` writes one",
        )?;
        let machine = Calibrated::parse(&read_text(machine)?)
            .with_context(|| machine.display().to_string())?;
        let bytes = fs::read(trace).with_context(|| format!("reading {}", trace.display()))?;
        Ok(Session {
            machine,
            trace: Arc::new(Trace::decode(&bytes).with_context(|| trace.display().to_string())?),
            profile: self.profile.as_deref().map(read_profile).transpose()?,
            memory_bytes: self.memory.map(bytes_of).transpose()?,
            store: self.store,
        })
    }

    /// The session under one policy.
    pub fn report(&self, kind: PolicyKind) -> Result<Report> {
        Ok(self.session()?.scenario(kind)?.run_kind(kind)?)
    }

    /// The session under the adaptive policy, where one is given.
    pub fn scenario(&self) -> Result<Option<Scenario>> {
        if self.machine.is_none() && self.trace.is_none() {
            return Ok(None);
        }
        Ok(Some(self.session()?.scenario(PolicyKind::Adaptive)?))
    }
}

pub fn run(args: &RecordedArgs, only: Option<PolicyKind>, json: bool) -> Result<()> {
    let session = args.session()?;
    let measured = measured(&args.measured)?;
    let mut lines = Vec::new();
    for kind in PolicyKind::ALL {
        if only.is_some_and(|only| only != kind)
            || kind == PolicyKind::Static && session.profile.is_none()
        {
            continue;
        }
        let report = session.scenario(kind)?.run_kind(kind)?;
        let tokens = report.tokens.max(1) as f64;
        let stall_s: f64 = report.ticks.iter().map(|tick| tick.stall_s).sum();
        let mut samples: Vec<f64> = measured
            .iter()
            .filter(|run| run.policy == kind.label())
            .filter(|run| kind == PolicyKind::Off || run.store == session.store.label())
            .map(|run| run.tok_s)
            .collect();
        let measured_tok_s = median(&mut samples);
        lines.push(Line {
            policy: kind.label(),
            tok_s: report.tok_s,
            hit_ratio: report.hit_ratio,
            read_bytes_per_token: report.bytes_fetched as f64 / tokens,
            stall_ms_per_token: stall_s / tokens * 1e3,
            measured_tok_s,
            deviation: measured_tok_s.map(|measured| report.tok_s / measured - 1.0),
        });
    }
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, &lines)?;
        writeln!(out)?;
        return Ok(());
    }
    table(&mut out, &lines)
}

fn table(out: &mut impl Write, lines: &[Line]) -> Result<()> {
    writeln!(
        out,
        "{:<10} {:>8} {:>9} {:>10} {:>6} {:>12} {:>10}",
        "policy", "tok/s", "measured", "deviation", "hits", "read, MB/tok", "stall, ms"
    )?;
    for line in lines {
        let number = |value: Option<f64>, scale: f64, unit: &str| {
            value.map_or_else(
                || "-".to_owned(),
                |value| format!("{:.2}{unit}", value * scale),
            )
        };
        writeln!(
            out,
            "{:<10} {:>8.2} {:>9} {:>10} {:>6.3} {:>12.1} {:>10.1}",
            line.policy,
            line.tok_s,
            number(line.measured_tok_s, 1.0, ""),
            number(line.deviation, 100.0, "%"),
            line.hit_ratio,
            line.read_bytes_per_token / 1e6,
            line.stall_ms_per_token
        )?;
    }
    Ok(())
}

fn read_text(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

fn read_profile(path: &Path) -> Result<Vec<f32>> {
    let profile: Profile =
        toml::from_str(&read_text(path)?).with_context(|| path.display().to_string())?;
    Ok(profile
        .layer
        .into_iter()
        .flat_map(|layer| layer.counts)
        .collect())
}

fn measured(paths: &[PathBuf]) -> Result<Vec<BenchRun>> {
    let mut runs = Vec::new();
    for path in paths {
        let bench: Bench =
            serde_json::from_str(&read_text(path)?).with_context(|| path.display().to_string())?;
        runs.extend(bench.runs);
    }
    Ok(runs)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the range is checked first"
)]
fn bytes_of(bytes: f64) -> Result<u64> {
    ensure!(
        (1.0..1e18).contains(&bytes),
        "--memory {bytes}: must be a number of bytes, such as 2500e6"
    );
    Ok(bytes as u64)
}

fn median(samples: &mut [f64]) -> Option<f64> {
    samples.sort_unstable_by(f64::total_cmp);
    let middle = samples.len() / 2;
    let upper = *samples.get(middle)?;
    Some(if samples.len().is_multiple_of(2) {
        f64::midpoint(samples[middle - 1], upper)
    } else {
        upper
    })
}
