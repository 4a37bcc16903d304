//! `hotpin bench`: the parent, with what it takes from the rest of the program.

use super::common::{self, EngineArgs};
use crate::bench::measure::Passed;
use crate::bench::{self, ChildCommand, Hooks};
use crate::model::ModelMap;
use crate::sensors::{Roots, read_ahead_kb};
use crate::workload;
use anyhow::{Context, Result};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Engine settings of the children that `bench` has no flag of its own for.
#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    #[command(flatten)]
    bench: bench::BenchArgs,
    /// Context length in tokens [default: what the longest segment needs]
    #[arg(short = 'c', long, env = "HOTPIN_CTX_SIZE")]
    ctx_size: Option<u32>,
    /// Time between control ticks, milliseconds
    #[arg(long, env = "HOTPIN_TICK_MS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(10..=10_000))]
    tick_ms: u64,
    /// Settings of the control laws, TOML (docs/control.md lists them)
    #[arg(long, env = "HOTPIN_CONTROL", value_name = "FILE")]
    control: Option<PathBuf>,
    /// Most memory for experts, such as 8GiB
    #[arg(long, env = "HOTPIN_CAPACITY", value_name = "SIZE")]
    capacity: Option<String>,
    /// Compare every expert that is read with the file's bytes (store direct); slow
    #[arg(long, env = "HOTPIN_VERIFY")]
    verify: bool,
}

/// Context beyond the tokens that are decoded: room for a prompt.
const PROMPT_ROOM: u32 = 512;

pub(super) fn execute(args: &BenchArgs) -> Result<ExitCode> {
    let mut control = common::read_control(args.control.as_deref())?;
    if let Some(size) = &args.capacity {
        control.capacity.limit_bytes = Some(common::size_of("--capacity", size)?);
    }
    let needed = args.bench.tokens.saturating_add(PROMPT_ROOM).max(1024);
    let passed = Passed {
        engine: EngineArgs::defaults(args.ctx_size.unwrap_or(needed)),
        control,
        tick_ms: args.tick_ms,
        verify: args.verify,
    };
    let texts = workload::built_in();
    let hooks = Hooks {
        child: ChildCommand::bench_child().context("finding this program")?,
        system_root: PathBuf::from("/"),
        shards: &shards,
        demo_workload: &texts,
        read_ahead_kb: &|path: &Path| read_ahead_kb(&Roots::default(), path).ok(),
        engine: serde_json::to_value(passed)?,
    };
    match bench::run_bench(&args.bench, &hooks) {
        Ok(code) => Ok(ExitCode::from(code)),
        Err(error) => {
            common::note(&format!("hotpin: {error}"));
            Ok(ExitCode::from(error.exit_code()))
        }
    }
}

fn shards(path: &Path) -> Result<Vec<PathBuf>, String> {
    let map = ModelMap::open(path).map_err(|e| e.to_string())?;
    Ok(map.shards().iter().map(|s| s.path.clone()).collect())
}
