//! `hotpin inspect`: what a model file holds, and whether it fits this machine.

use super::common;
use crate::model::{Inspection, Memory, ModelMap};
use crate::sensors::{Roots, Sensors};
use anyhow::Result;
use clap::Args;
use hotpin_controllers::{AdaptiveConfig, Moment};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(super) struct InspectArgs {
    /// The model, a GGUF file (the first one if it is split)
    #[arg(env = "HOTPIN_MODEL")]
    model: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn execute(args: &InspectArgs) -> Result<ExitCode> {
    let map = ModelMap::open(&args.model)?;
    let report = Inspection::new(&map, memory());
    common::say_report(&report, args.json)?;
    Ok(ExitCode::SUCCESS)
}

/// What the machine and every cgroup above us can spare now.
pub(super) fn memory() -> Option<Memory> {
    let now = Moment { ns: 0 };
    let sample = Sensors::open(&Roots::default(), now).sample(now);
    let control = AdaptiveConfig::default().capacity;
    let host = sample
        .host
        .map(|h| (h.available_bytes, control.host_reserve_bytes));
    let cgroup = sample
        .cgroup
        .map(|c| (c.available_bytes, control.cgroup_reserve_bytes));
    host.into_iter()
        .chain(cgroup)
        .min_by_key(|&(available, reserve)| available.saturating_sub(reserve))
        .map(|(available_bytes, reserve_bytes)| Memory {
            available_bytes,
            reserve_bytes,
        })
}
