//! `hotpin-sim replay`.

use super::chart;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use hotpin_controllers::trace::Trace;
use hotpin_sim::capacity::Capacity;
use hotpin_sim::replay::{
    DEFAULT_PROFILE_SHARE, Part, Pooling, Replay, ReplayPolicy, ReplayResult,
};
use serde::Serialize;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The trace that ships with the program.
const SHIPPED: &[u8] = include_bytes!("../../traces/gpt-oss-20b.trace");

#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// A trace, recorded by hotpin or imported [default: the one of gpt-oss-20b that ships with the
    /// program].
    #[arg(long, value_name = "FILE", env = "HOTPIN_SIM_TRACE")]
    trace: Option<PathBuf>,
    /// Experts cached: counts, percentages rounded down, or sizes such as 4GiB.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "15%,25%,40%,50%"
    )]
    capacity: Vec<Capacity>,
    /// Policies to run, of static, lru, lfu-decay, slru, w-tinylfu, arc, s3-fifo, adaptive, belady;
    /// or all.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "all"
    )]
    policy: Vec<Chosen>,
    /// Prompts to replay: every second one tells how a choice made on the others holds up.
    #[arg(long, value_name = "PART", value_enum, default_value_t)]
    prompts: Prompts,
    /// A cache for each layer in place of one for all.
    #[arg(long)]
    per_layer: bool,
    /// Tokens from which `static` takes its experts [default: the first tenth of the trace].
    #[arg(long, value_name = "N")]
    profile_tokens: Option<usize>,
    /// Write a chart of hit ratio against capacity, as SVG.
    #[arg(long, value_name = "FILE")]
    chart: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// `--prompts`.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Prompts {
    /// All of them.
    #[default]
    All,
    /// The first, third and so on.
    Even,
    /// The second, fourth and so on.
    Odd,
}

/// One policy or all of them.
#[derive(Clone, Copy, Debug)]
enum Chosen {
    All,
    One(ReplayPolicy),
}

impl std::str::FromStr for Chosen {
    type Err = hotpin_sim::replay::ReplayError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "all" {
            return Ok(Self::All);
        }
        text.parse().map(Self::One)
    }
}

#[derive(Debug, Serialize)]
struct Output {
    results: Vec<ReplayResult>,
}

pub fn run(args: &ReplayArgs) -> Result<()> {
    let (trace, name) = read(args.trace.as_deref())?;
    let part = match args.prompts {
        Prompts::All => Part::All,
        Prompts::Even => Part::Even,
        Prompts::Odd => Part::Odd,
    };
    let replay = Replay::new(&trace, part).with_context(|| name.clone())?;
    let profile_tokens = args
        .profile_tokens
        .unwrap_or_else(|| replay.tokens().div_ceil(DEFAULT_PROFILE_SHARE));
    let pooling = if args.per_layer {
        Pooling::PerLayer
    } else {
        Pooling::Global
    };
    let policies = policies(&args.policy);
    let results = replay.run(&policies, &args.capacity, pooling, profile_tokens)?;
    if let Some(path) = &args.chart {
        chart::write(path, &results, &policies, replay.shape().total_experts())
            .with_context(|| format!("writing {}", path.display()))?;
    }
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &Output { results })?;
        writeln!(out)?;
        return Ok(());
    }
    table(&mut out, &replay, &results)?;
    Ok(())
}

/// The trace and its name. One that a crash cut short is replayed up to there.
pub(super) fn read(path: Option<&Path>) -> Result<(Trace, String)> {
    let Some(path) = path else {
        let trace = Trace::decode(SHIPPED).context("the trace that ships with the program")?;
        return Ok((trace, "the trace of gpt-oss-20b".to_owned()));
    };
    let name = path.display().to_string();
    let bytes = fs::read(path).with_context(|| format!("reading {name}"))?;
    let (trace, ended) = Trace::recover(&bytes).with_context(|| name.clone())?;
    match ended {
        Some(error @ hotpin_controllers::trace::TraceError::Truncated { .. }) => {
            writeln!(
                io::stderr(),
                "{name}: {error}; the {} tokens before it are replayed",
                trace.tokens()
            )?;
        }
        Some(error) => return Err(error).context(name),
        None => {}
    }
    Ok((trace, name))
}

fn table(out: &mut impl Write, replay: &Replay, results: &[ReplayResult]) -> io::Result<()> {
    let shape = replay.shape();
    writeln!(
        out,
        "{} tokens decoded, {} experts, {} accesses a token",
        replay.tokens(),
        shape.total_experts(),
        shape.routed_per_token()
    )?;
    // Traces of unknown sizes say that an expert has 1 byte.
    let sized = shape.total_bytes() > shape.total_experts() as u64;
    let unit = if sized { "MiB" } else { "experts" };
    writeln!(
        out,
        "{:>8}  {:<10} {:>9} {:>10} {:>14} {:>14}",
        "experts",
        "policy",
        "hit ratio",
        "gap closed",
        format!("{unit} read"),
        "replaced"
    )?;
    writeln!(out, "{:>56} {:>14}", "a token", "a token")?;
    for result in results {
        let gap = result
            .gap_closed
            .map_or_else(|| "-".to_owned(), |gap| format!("{gap:.3}"));
        let scale = if sized { 1_048_576.0 } else { 1.0 };
        writeln!(
            out,
            "{:>8}  {:<10} {:>9.4} {gap:>10} {:>14.1} {:>14.1}",
            result.capacity_experts,
            result.policy,
            result.hit_ratio,
            result.read_bytes_per_token / scale,
            result.replaced_per_token,
        )?;
    }
    Ok(())
}

/// The policies named, each once, in the order given.
fn policies(chosen: &[Chosen]) -> Vec<ReplayPolicy> {
    let mut policies = Vec::new();
    for chosen in chosen {
        let named = match chosen {
            Chosen::All => ReplayPolicy::ALL.to_vec(),
            Chosen::One(policy) => vec![*policy],
        };
        for policy in named {
            if !policies.contains(&policy) {
                policies.push(policy);
            }
        }
    }
    policies
}
