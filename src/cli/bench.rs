//! `hotpin bench`: the parent, with what it takes from the rest of the program.

use super::common;
use crate::bench::args::BenchTask;
use crate::bench::measure::Passed;
use crate::bench::{self, BenchArgs, ChildCommand, Hooks};
use crate::config::Config;
use crate::model::ModelMap;
use crate::sensors::{Roots, read_ahead_kb};
use crate::workload;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Context beyond the tokens that are decoded: room for a prompt.
const PROMPT_ROOM: u32 = 512;
/// Context of `--task perplexity` where none is given: the chunk of llama.cpp's own tool.
const PERPLEXITY_CHUNK: u32 = 512;

pub(super) fn execute(args: &BenchArgs, config: &Config) -> Result<ExitCode> {
    let needed = match args.task {
        BenchTask::Decode => args.tokens.saturating_add(PROMPT_ROOM).max(1024),
        BenchTask::Perplexity => PERPLEXITY_CHUNK,
    };
    let passed = Passed {
        engine: args.engine.options(needed),
        control: common::control(&args.regulation, config)?,
        tick_ms: args.regulation.tick_ms,
        verify: args.regulation.verify,
        random_capacity: args.random_capacity,
        device: args.regulation.device.clone(),
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
    match bench::run_bench(args, &hooks) {
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
