//! `hotpin doctor`: checks this machine for a model.

use super::common;
use crate::doctor::{DeviceFact, Facts, Level, Report, Space, Subject};
use crate::model::ModelMap;
use crate::sensors::Roots;
use crate::store::{DirectOptions, try_disk};
use anyhow::Result;
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// How long the disk is read.
const DISK_TIME: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub(super) struct DoctorArgs {
    /// The model, a GGUF file (the first one if it is split)
    #[arg(env = "HOTPIN_MODEL")]
    model: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The exit code is that of a failure when a check failed; warnings are none.
pub(super) fn execute(args: &DoctorArgs) -> Result<ExitCode> {
    let map = ModelMap::open(&args.model)?;
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("hotpin"));
    let subject = Subject::new(&map, program);
    let disk = try_disk(&map, DirectOptions::default(), DISK_TIME).map_err(|e| e.to_string());
    // Journals, traces and profiles are written where the program is started.
    let spaces = Space::at(Path::new(".")).into_iter().collect();
    let mut facts = Facts::read(&Roots::default(), &subject, disk, spaces);
    facts.devices = Some(DeviceFact::all());
    let report = Report::new(&subject, &facts);
    common::say_report(&report, args.json)?;
    Ok(if report.worst == Level::Fail {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
