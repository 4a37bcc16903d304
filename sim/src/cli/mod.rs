//! The verbs. Exit codes: 0 done, 1 failed, 2 usage.

mod chart;
mod import;
mod recorded;
mod replay;
mod scenario;
mod show;
mod signals;
mod sweep;
mod whatif;

use clap::{Parser, Subcommand};
use std::io::{self, Write};
use std::process::ExitCode;

/// Replays routing traces and runs hotpin's controllers against a simulated machine.
#[derive(Debug, Parser)]
#[command(name = "hotpin-sim", version, about)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Turn raw expert ids of a foreign recording into a trace.
    Import(import::ImportArgs),
    /// Hit ratios of cache policies over a trace.
    Replay(replay::ReplayArgs),
    /// What a recording holds: prompts, and what its controllers saw and decided.
    Show(show::ShowArgs),
    /// Run the control loop against a scripted disturbance in virtual time.
    Scenario(Box<scenario::ScenarioArgs>),
    /// Search over the options of the control laws, robust over scenarios and a recorded session.
    Sweep(Box<sweep::SweepArgs>),
    /// What if experts were swapped into VRAM on the fly?
    Whatif(whatif::WhatIfArgs),
}

/// Parses the command line and runs the verb.
pub fn main() -> ExitCode {
    let outcome = match Cli::parse().verb {
        Verb::Import(args) => import::run(&args),
        Verb::Replay(args) => replay::run(&args),
        Verb::Show(args) => show::run(&args),
        Verb::Scenario(args) => scenario::run(&args),
        Verb::Sweep(args) => sweep::run(&args),
        Verb::Whatif(args) => whatif::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // A reader that has seen enough, such as `head`, is no failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "hotpin-sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}
