//! The command line: arguments, verbs, and what they print.

mod bench;
mod common;
mod demo;
mod inspect;
mod journal;
mod profile;
mod run;
mod serve;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Exit code of a run that failed.
const FAILED: u8 = 1;
/// Exit code of arguments that make no sense.
const MISUSED: u8 = 2;

/// Runs Mixture-of-Experts GGUF models larger than RAM, keeping the hot experts locked in memory.
#[derive(Debug, Parser)]
#[command(name = "hotpin", version, propagate_version = true)]
pub struct Cli {
    /// More detail on stderr; twice for llama.cpp's own log
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Generate text
    Run(run::RunArgs),
    /// Serve a model over HTTP, with OpenAI's interface
    Serve(Box<serve::ServeArgs>),
    /// Say what a model file holds and whether it fits this machine
    Inspect(inspect::InspectArgs),
    /// Count expert use over prompts, as a starting point for the pinned set
    Profile(profile::ProfileArgs),
    /// Compare policies on a model: each run a fresh process, in turns, hashes compared
    Bench(Box<bench::BenchArgs>),
    /// Sum up a journal of decisions, or draw it
    Journal(journal::JournalArgs),
    /// Make demo material
    #[command(subcommand)]
    Demo(demo::DemoVerb),
    /// One run of a benchmark, ordered on stdin by `hotpin bench`
    #[command(hide = true)]
    BenchChild,
    /// One measurement of a calibration, ordered on stdin by `hotpin bench`
    #[command(hide = true)]
    CalibrateChild,
}

impl Cli {
    /// Runs the verb. Errors go to stderr, results to stdout.
    #[must_use]
    pub fn execute(self) -> ExitCode {
        init_log(self.verbose);
        let outcome = match self.verb {
            Verb::Run(args) => run::execute(&args),
            Verb::Serve(args) => serve::execute(&args),
            Verb::Inspect(args) => inspect::execute(&args),
            Verb::Profile(args) => profile::execute(&args),
            Verb::Bench(args) => bench::execute(&args),
            Verb::Journal(args) => journal::execute(&args),
            Verb::Demo(verb) => demo::execute(verb),
            Verb::CalibrateChild => Ok(crate::bench::calibrate::execute()),
            Verb::BenchChild => Ok(crate::bench::measure::execute()),
        };
        match outcome {
            Ok(code) => code,
            Err(error) => {
                common::note(&format!("hotpin: {error:#}"));
                let misused = error.downcast_ref::<common::Usage>().is_some();
                ExitCode::from(if misused { MISUSED } else { FAILED })
            }
        }
    }
}

fn init_log(verbose: u8) {
    let default = match verbose {
        0 => "warn,llama.cpp=error",
        1 => "info,llama.cpp=warn",
        _ => "debug",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("HOTPIN_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .log_internal_errors(false)
        .without_time()
        .init();
}

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }
}
