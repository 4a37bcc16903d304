//! `hotpin-sim show`: what a recording holds, and what its controllers saw and decided.

use super::replay::read;
use super::signals::{self, Panel};
use anyhow::{Context, Result, ensure};
use clap::Args;
use hotpin_controllers::trace::{Phase, Tick, Trace};
use serde::Serialize;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

const MIB: f64 = 1_048_576.0;

/// Prompts and ticks that the tables show at most.
const TABLE_LINES: usize = 30;

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The trace [default: the one of gpt-oss-20b that ships with the program].
    #[arg(long, value_name = "FILE", env = "HOTPIN_SIM_TRACE")]
    trace: Option<PathBuf>,
    /// Draw every recorded signal over time, as SVG.
    #[arg(long, value_name = "OUT.svg")]
    chart: Option<PathBuf>,
    /// Print JSON, with every tick.
    #[arg(long)]
    json: bool,
}

/// A trace in numbers.
#[derive(Debug, Serialize)]
struct Summary<'a> {
    model: &'a str,
    architecture: &'a str,
    layers: usize,
    experts: usize,
    routed_per_token: u32,
    expert_bytes: u64,
    dense_bytes: u64,
    decode_tokens: usize,
    prefill_tokens: usize,
    /// First token and label of each prompt.
    prompts: &'a [(usize, String)],
    /// Tokens before each tick, and the tick.
    ticks: &'a [(usize, Tick)],
}

pub fn run(args: &ShowArgs) -> Result<()> {
    let (trace, name) = read(args.trace.as_deref())?;
    if let Some(path) = &args.chart {
        ensure!(
            trace.ticks().len() > 1,
            "{name} has no ticks to draw: it was imported, or recorded without control"
        );
        chart(path, trace.ticks()).with_context(|| format!("writing {}", path.display()))?;
    }
    let summary = summary(&trace);
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &summary)?;
        writeln!(out)?;
        return Ok(());
    }
    write_summary(&mut out, &name, &summary)?;
    prompts(&mut out, &summary, trace.tokens())?;
    ticks(&mut out, trace.ticks())?;
    Ok(())
}

fn summary(trace: &Trace) -> Summary<'_> {
    let header = &trace.header;
    let decoded = (0..trace.tokens())
        .filter(|&token| trace.phase(token) == Phase::Decode)
        .count();
    Summary {
        model: &header.model,
        architecture: &header.architecture,
        layers: header.shape.layers(),
        experts: header.shape.total_experts(),
        routed_per_token: header.shape.routed_per_token(),
        expert_bytes: header.shape.total_bytes(),
        dense_bytes: header.dense_bytes,
        decode_tokens: decoded,
        prefill_tokens: trace.tokens() - decoded,
        prompts: trace.prompts(),
        ticks: trace.ticks(),
    }
}

fn write_summary(out: &mut impl Write, name: &str, summary: &Summary<'_>) -> io::Result<()> {
    writeln!(
        out,
        "{name}: {} ({}), {} experts in {} layers, {} routed a token",
        summary.model,
        if summary.architecture.is_empty() {
            "architecture unknown"
        } else {
            summary.architecture
        },
        summary.experts,
        summary.layers,
        summary.routed_per_token
    )?;
    writeln!(
        out,
        "{} tokens decoded, {} of prompts; {} prompts, {} ticks",
        summary.decode_tokens,
        summary.prefill_tokens,
        summary.prompts.len(),
        summary.ticks.len()
    )
}

fn prompts(out: &mut impl Write, summary: &Summary<'_>, tokens: usize) -> io::Result<()> {
    if summary.prompts.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{:>9} {:>8}  prompt", "token", "tokens")?;
    let ends = summary.prompts.iter().skip(1).map(|(at, _)| *at);
    let ends = ends.chain(std::iter::once(tokens));
    for ((at, label), end) in summary.prompts.iter().zip(ends).take(TABLE_LINES) {
        // Labels are free text of whoever recorded.
        let label: String = label.chars().filter(|c| !c.is_control()).collect();
        writeln!(out, "{at:>9} {:>8}  {label}", end - at)?;
    }
    if summary.prompts.len() > TABLE_LINES {
        let more = summary.prompts.len() - TABLE_LINES;
        writeln!(out, "{:>9} {more} more", "...")?;
    }
    Ok(())
}

fn ticks(out: &mut impl Write, ticks: &[(usize, Tick)]) -> io::Result<()> {
    if ticks.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:>8} {:>8} {:>10} {:>9} {:>8} {:>8}  {:<10} {:>6} {:>8} {:>6}",
        "s",
        "token",
        "available",
        "capacity",
        "pinned",
        "transit",
        "binding",
        "hits",
        "stall, s",
        "locked"
    )?;
    let rates = Rates::of(ticks);
    let step = ticks.len().div_ceil(TABLE_LINES).max(1);
    for (index, (token, tick)) in ticks.iter().enumerate().step_by(step) {
        let mib = |bytes: u64| bytes as f64 / MIB;
        let known = |value: f64, digits: usize| {
            if value.is_finite() {
                format!("{value:.digits$}")
            } else {
                "-".to_owned()
            }
        };
        writeln!(
            out,
            "{:>8.1} {token:>8} {:>10} {:>9.0} {:>8.0} {:>8.0}  {:<10} {:>6} {:>8} {:>6}",
            seconds(tick),
            known(available(tick), 0),
            mib(tick.decision.capacity_bytes),
            mib(tick.held.pinned_bytes),
            mib(tick.held.transit_bytes),
            tick.decision.binding.label(),
            known(rates.hits[index], 3),
            known(rates.stall[index], 3),
            tick.decision.pin.len()
        )?;
    }
    writeln!(
        out,
        "(MiB; hits and stall, a share of time, since the tick before; locked: experts ordered)"
    )
}

fn seconds(tick: &Tick) -> f64 {
    tick.now.ns as f64 / 1e9
}

/// What the tightest sensor of memory calls available, MiB; NaN without any.
fn available(tick: &Tick) -> f64 {
    let host = tick.host.map(|host| host.available_bytes);
    let group = tick.cgroup.map(|group| group.available_bytes);
    let least = host.into_iter().chain(group).min();
    least.map_or(f64::NAN, |bytes| bytes as f64 / MIB)
}

/// Differences of totals between ticks; NaN where a total is not known or nothing passed.
#[derive(Debug, Default)]
struct Rates {
    tokens: Vec<f64>,
    hits: Vec<f64>,
    stall: Vec<f64>,
    pressure: Vec<f64>,
    faults: Vec<f64>,
}

impl Rates {
    fn of(ticks: &[(usize, Tick)]) -> Self {
        let mut rates = Self::default();
        for (index, (_, tick)) in ticks.iter().enumerate() {
            let before = index.checked_sub(1).map(|before| &ticks[before].1);
            let passed_s = before.map_or(f64::NAN, |before| seconds(tick) - seconds(before));
            let since = |total: fn(&Tick) -> Option<u64>| -> f64 {
                let change = total(tick)
                    .zip(before.and_then(total))
                    .and_then(|(now, then)| now.checked_sub(then));
                change.map_or(f64::NAN, |change| change as f64)
            };
            let hits = since(|tick| tick.engine.map(|engine| engine.hits));
            let misses = since(|tick| tick.engine.map(|engine| engine.misses));
            let stall_ns = since(|tick| tick.engine.map(|engine| engine.stall_ns));
            let pressure_us = since(|tick| tick.pressure.map(|pressure| pressure.some_total_us));
            let tokens = since(|tick| tick.engine.map(|engine| engine.decode_tokens));
            rates.tokens.push(tokens / passed_s);
            rates.hits.push(hits / (hits + misses));
            rates.stall.push(stall_ns / 1e9 / passed_s);
            rates.pressure.push(pressure_us / 1e6 / passed_s);
            let faults = since(|tick| tick.faults.map(|faults| faults.major));
            rates.faults.push(faults / passed_s);
        }
        rates
    }
}

fn chart(path: &Path, ticks: &[(usize, Tick)]) -> Result<()> {
    let of = |value: fn(&Tick) -> f64| ticks.iter().map(|(_, tick)| value(tick)).collect();
    let at_s: Vec<f64> = of(seconds);
    let rates = Rates::of(ticks);
    let panels = [
        Panel {
            title: "memory, MiB",
            lines: vec![
                ("available", of(available)),
                (
                    "capacity",
                    of(|tick| tick.decision.capacity_bytes as f64 / MIB),
                ),
                (
                    "pin budget",
                    of(|tick| tick.decision.pin_budget_bytes as f64 / MIB),
                ),
                ("pinned", of(|tick| tick.held.pinned_bytes as f64 / MIB)),
                ("transit", of(|tick| tick.held.transit_bytes as f64 / MIB)),
            ],
        },
        Panel {
            title: "experts ordered locked and unlocked",
            lines: vec![
                ("locked", of(|tick| tick.decision.pin.len() as f64)),
                ("unlocked", of(|tick| tick.decision.unpin.len() as f64)),
            ],
        },
        Panel {
            title: "tokens a second",
            lines: vec![("tokens", rates.tokens)],
        },
        Panel {
            title: "shares",
            lines: vec![
                ("hits", rates.hits),
                ("waiting for experts", rates.stall),
                ("pressure (PSI some)", rates.pressure),
                (
                    "drift found",
                    of(|tick| f64::from(u8::from(tick.decision.drift))),
                ),
            ],
        },
        Panel {
            title: "major faults a second",
            lines: vec![("faults", rates.faults)],
        },
    ];
    signals::write(path, &at_s, &panels)
}
