//! `hotpin plan`: what a model would do in so much memory.

use super::common;
use super::inspect;
use crate::config::args::size;
use crate::model::{Memory, ModelMap};
use crate::outlook::{Evidence, Outlook, Rates};
use crate::profile::Profile;
use crate::sensors::{Roots, system_summary};
use anyhow::{Context, Result, ensure};
use clap::Args;
use hotpin_controllers::AdaptiveConfig;
use hotpin_controllers::trace::Trace;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(super) struct PlanArgs {
    /// The model, a GGUF file (the first one if it is split)
    #[arg(env = "HOTPIN_MODEL")]
    model: PathBuf,
    /// Memory of the whole program, as a cgroup would limit it [default: what is available now]
    #[arg(long, env = "HOTPIN_MEMORY", value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// Expert counts, made by `hotpin profile` or kept by --learn
    #[arg(long, env = "HOTPIN_PROFILE", value_name = "FILE")]
    profile: Option<PathBuf>,
    /// A session recorded with --record; tells more than a profile
    #[arg(long, env = "HOTPIN_TRACE", value_name = "FILE")]
    trace: Option<PathBuf>,
    /// This machine's figures, measured by `hotpin bench MODEL --calibrate FILE`
    #[arg(long, env = "HOTPIN_CALIBRATION", value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn execute(args: &PlanArgs) -> Result<ExitCode> {
    let map = ModelMap::open(&args.model)?;
    let evidence = evidence(args, &map)?;
    let rates = args.calibration.as_deref().map(Rates::load).transpose()?;
    let memory = match args.memory {
        Some(bytes) => Memory {
            available_bytes: bytes,
            reserve_bytes: AdaptiveConfig::default().capacity.cgroup_reserve_bytes,
        },
        None => inspect::memory().context("the memory there is is not known: give --memory")?,
    };
    let memlock_bytes = system_summary(&Roots::default()).memlock_bytes;
    let outlook = Outlook::new(&map, memory, memlock_bytes, &evidence, rates.as_ref())?;
    common::say_report(&outlook, args.json)?;
    Ok(ExitCode::SUCCESS)
}

fn evidence(args: &PlanArgs, map: &ModelMap) -> Result<Evidence> {
    if let Some(path) = &args.trace {
        return Ok(Evidence::Trace(Box::new(trace(path, map)?)));
    }
    let Some(path) = &args.profile else {
        return Ok(Evidence::Nothing);
    };
    let profile = Profile::load(path, map)?;
    Ok(Evidence::Profile(profile.counts(), profile.tokens))
}

/// As much of a trace as there is: the session may still be running, or have been killed.
fn trace(path: &Path, map: &ModelMap) -> Result<Trace> {
    let shown = || format!("trace {}", path.display());
    let bytes = std::fs::read(path).with_context(shown)?;
    let (trace, cut) = Trace::recover(&bytes).with_context(shown)?;
    if let Some(cut) = cut {
        common::note(&format!(
            "hotpin: {}: {cut}; what is before it is used",
            shown()
        ));
    }
    ensure!(
        trace.header.shape == *map.shape(),
        "{} was recorded from another model, {}",
        shown(),
        trace.header.model
    );
    Ok(trace)
}
