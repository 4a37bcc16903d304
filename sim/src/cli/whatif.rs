//! `hotpin-sim whatif`.

use anyhow::{Context, Result};
use clap::Args;
use hotpin_controllers::trace::Trace;
use hotpin_sim::whatif::{
    BreakEven, Comparison, DescriptionError, Hardware, Kind, Locality, ModelSizes, Outcome, Setup,
    Source, break_even, compare, published,
};
use serde::Serialize;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, Args)]
pub struct WhatIfArgs {
    /// rtx-3090, 2x-rtx-3090, rtx-4090, rtx-5090, laptop-32gb, or a TOML file.
    #[arg(long, value_name = "NAME", default_value = "rtx-3090")]
    machine: String,
    /// gpt-oss-20b, gpt-oss-120b, qwen3-30b-a3b, qwen3-235b-a22b, or a TOML file.
    #[arg(long, value_name = "NAME", default_value = "gpt-oss-120b")]
    model: String,
    /// A trace of the model [default: routing is drawn with the locality of gpt-oss-20b's trace].
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Sequences decoded together.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    sequences: u32,
    /// Tokens of context of each sequence; its KV takes VRAM.
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    context: u32,
    /// Tokens of a prefill batch.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    prefill: u32,
    /// Steps that are decoded and counted, after two thirds as many that are not.
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = clap::value_parser!(u64).range(3..=1_000_000))]
    steps: u64,
    /// Bandwidth of the bus instead of the machine's, bytes per second.
    #[arg(long, value_name = "RATE")]
    bus: Option<f64>,
    /// Look for the locality at which each cache draws level with the best static placement.
    #[arg(long, conflicts_with = "trace")]
    break_even: bool,
    /// Show what others have measured beside what the model says, and nothing else.
    #[arg(long)]
    published: bool,
    /// Seed of the routing.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Output {
    machine: String,
    model: String,
    /// The locality drawn with; `null` for a trace.
    locality: Option<Locality>,
    sequences: u32,
    context: u32,
    results: Vec<Outcome>,
    break_even: Vec<BreakEven>,
}

pub fn run(args: &WhatIfArgs) -> Result<()> {
    let mut out = io::stdout().lock();
    if args.published {
        let points = published()?;
        if args.json {
            serde_json::to_writer_pretty(&mut out, &points)?;
            writeln!(out)?;
            return Ok(());
        }
        return comparisons(&mut out, &points);
    }
    let setup = setup(args)?;
    let results = compare(&setup)?;
    let mut levels = Vec::new();
    if args.break_even {
        for outcome in &results {
            if outcome.strategy.caches() && outcome.figures.is_some() {
                levels.push(break_even(&setup, outcome.strategy)?);
            }
        }
    }
    let output = Output {
        machine: setup.hardware.name.clone(),
        model: setup.model.name.clone(),
        locality: match &setup.source {
            Source::Drawn(locality) => Some(*locality),
            Source::Trace(_) => None,
        },
        sequences: args.sequences,
        context: args.context,
        results,
        break_even: levels,
    };
    if args.json {
        serde_json::to_writer_pretty(&mut out, &output)?;
        writeln!(out)?;
        return Ok(());
    }
    table(&mut out, &output)
}

fn setup(args: &WhatIfArgs) -> Result<Setup> {
    let mut hardware = described(&args.machine, Hardware::preset, Hardware::parse)?;
    if let (Some(link), Some(bytes_per_s)) = (&mut hardware.link, args.bus) {
        anyhow::ensure!(
            bytes_per_s.is_finite() && bytes_per_s >= 1.0,
            "--bus {bytes_per_s}: must be at least 1 byte per second"
        );
        link.bytes_per_s = bytes_per_s;
    }
    let model = described(&args.model, ModelSizes::preset, ModelSizes::parse)?;
    let mut setup = Setup {
        sequences: args.sequences,
        context: args.context,
        warm_up_steps: args.steps / 3 * 2,
        steps: args.steps,
        prefill_tokens: args.prefill,
        seed: args.seed,
        ..Setup::new(hardware, model)
    };
    if let Some(path) = &args.trace {
        let bytes = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        let trace = Trace::decode(&bytes).with_context(|| path.display().to_string())?;
        setup.source = Source::Trace(Arc::new(trace));
    }
    Ok(setup)
}

/// A preset by name, or the file of that name.
fn described<T>(
    name: &str,
    preset: fn(&str) -> Result<T, DescriptionError>,
    parse: fn(&str) -> Result<T, DescriptionError>,
) -> Result<T> {
    if !Path::new(name).exists() {
        return Ok(preset(name)?);
    }
    let text = fs::read_to_string(name).with_context(|| format!("reading {name}"))?;
    parse(&text).with_context(|| name.to_owned())
}

fn table(out: &mut impl Write, output: &Output) -> Result<()> {
    writeln!(
        out,
        "{} on {}: {} sequence(s), {} tokens of context\n",
        output.model, output.machine, output.sequences, output.context
    )?;
    writeln!(
        out,
        "{:<16} {:>8} {:>6} {:>6} {:>8} {:>8} | {:>7} {:>7} {:>7} {:>7} {:>7} | {:>9}",
        "strategy",
        "tok/s",
        "VRAM",
        "RAM",
        "bus",
        "disk",
        "dense",
        "card",
        "cpu",
        "bus",
        "disk",
        "prefill"
    )?;
    for outcome in &output.results {
        let name = outcome.strategy.label();
        let Some(figures) = &outcome.figures else {
            let why = outcome.impossible.as_deref().unwrap_or("does not fit");
            writeln!(out, "{name:<16} {why}")?;
            continue;
        };
        let ratio = |ratio: Option<f64>| {
            ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"))
        };
        let ms = figures.step_s;
        writeln!(
            out,
            "{name:<16} {:>8.2} {:>6} {:>6} {:>8.1} {:>8.1} | {:>7.2} {:>7.2} {:>7.2} {:>7.2} \
             {:>7.2} | {:>9.1}",
            figures.tok_s,
            ratio(figures.vram_hit_ratio),
            ratio(figures.ram_hit_ratio),
            figures.bus_bytes_per_token / 1e6,
            figures.disk_bytes_per_token / 1e6,
            ms.dense * 1e3,
            ms.card_experts * 1e3,
            ms.cpu_experts * 1e3,
            ms.bus_wait * 1e3,
            ms.disk_wait * 1e3,
            figures.prefill_tok_s
        )?;
    }
    writeln!(
        out,
        "(hits in VRAM and RAM; MB a token over bus and disk | ms of a step | tok/s of a prompt)"
    )?;
    for level in &output.break_even {
        break_even_line(out, level)?;
    }
    Ok(())
}

fn break_even_line(out: &mut impl Write, level: &BreakEven) -> Result<()> {
    let (name, against) = (level.strategy.label(), level.against.label());
    let theirs = format!("{against} ({:.1} tok/s)", level.against_tok_s);
    match level.at {
        None => writeln!(out, "{name} never reaches {theirs}"),
        Some(at) if at.always => writeln!(
            out,
            "{name} beats {theirs} even under a uniform router: {:.1} tok/s at {:.0}% hits",
            at.tok_s,
            at.hit_ratio * 100.0
        ),
        Some(at) => writeln!(
            out,
            "{name} draws level with {theirs} at {:.0}% hits, where {:.0}% of a token's experts were \
             the last token's",
            at.hit_ratio * 100.0,
            at.reuse * 100.0
        ),
    }?;
    Ok(())
}

fn comparisons(out: &mut impl Write, points: &[Comparison]) -> Result<()> {
    writeln!(
        out,
        "{:<58} {:>9} {:>9} {:>9}",
        "point", "published", "model", "deviation"
    )?;
    for point in points {
        let (published, deviation) = match point.published {
            None => ("-".to_owned(), "taken".to_owned()),
            Some(published) if point.kind == Kind::Fitted => {
                (format!("{published:.2}"), "fitted".to_owned())
            }
            Some(published) if point.kind == Kind::Below => {
                let holds = if point.model < published {
                    "holds"
                } else {
                    "broken"
                };
                (format!("< {published:.2}"), holds.to_owned())
            }
            Some(published) => {
                let deviation = (point.model / published - 1.0) * 100.0;
                (format!("{published:.2}"), format!("{deviation:+.1}%"))
            }
        };
        writeln!(
            out,
            "{:<58} {published:>9} {:>9.2} {deviation:>9}",
            point.what, point.model
        )?;
    }
    writeln!(out, "\nAssumed:")?;
    let mut said = Vec::new();
    for point in points {
        if !said.contains(&point.assumed) {
            writeln!(out, "- {}", point.assumed)?;
            said.push(point.assumed);
        }
    }
    Ok(())
}
