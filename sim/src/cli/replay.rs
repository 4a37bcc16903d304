//! `hotpin-sim replay`.

use anyhow::{Context, Result};
use clap::Args;
use hotpin_controllers::trace::Trace;
use hotpin_sim::capacity::Capacity;
use hotpin_sim::replay::{DEFAULT_PROFILE_SHARE, Replay, ReplayPolicy, ReplayResult};
use serde::Serialize;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// A trace, as `hotpin-sim import` writes it.
    #[arg(long, value_name = "FILE", env = "HOTPIN_SIM_TRACE")]
    trace: PathBuf,
    /// Experts cached over all layers: counts, or percentages rounded down.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "15%,25%,40%,50%"
    )]
    capacity: Vec<Capacity>,
    /// Policies to run, of static, lru, lfu-decay, belady; or all.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "all"
    )]
    policy: Vec<Chosen>,
    /// Tokens from which `static` takes its experts [default: the first tenth of the trace].
    #[arg(long, value_name = "N")]
    profile_tokens: Option<usize>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
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
    let path = args.trace.display();
    let bytes = fs::read(&args.trace).with_context(|| format!("reading {path}"))?;
    let trace = Trace::decode(&bytes).with_context(|| path.to_string())?;
    let replay = Replay::new(&trace).with_context(|| path.to_string())?;
    let profile_tokens = args
        .profile_tokens
        .unwrap_or_else(|| replay.tokens().div_ceil(DEFAULT_PROFILE_SHARE));
    let results = replay.run(&policies(&args.policy), &args.capacity, profile_tokens)?;
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &Output { results })?;
        writeln!(out)?;
        return Ok(());
    }
    writeln!(
        out,
        "{} tokens decoded, {} experts, {} accesses a token",
        replay.tokens(),
        replay.experts(),
        trace.header.shape.routed_per_token()
    )?;
    writeln!(
        out,
        "{:>8}  {:<10} {:>9} {:>10}",
        "experts", "policy", "hit ratio", "gap closed"
    )?;
    for result in results {
        let gap = result
            .gap_closed
            .map_or_else(|| "-".to_owned(), |gap| format!("{gap:.3}"));
        writeln!(
            out,
            "{:>8}  {:<10} {:>9.4} {gap:>10}",
            result.capacity_experts, result.policy, result.hit_ratio
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
