//! The command line: arguments, verbs, and what they print.

mod bench;
mod common;
mod config;
mod demo;
mod doctor;
mod generate;
mod inspect;
mod journal;
mod log;
mod plan;
mod profile;
mod reload;
mod remote;
mod run;
mod serve;

use crate::config::{Config, ConfigError, Effective, VERBS, effective, relaxed};
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Exit code of a run that failed.
const FAILED: u8 = 1;
/// Exit code of arguments that make no sense.
const MISUSED: u8 = 2;

/// Runs Mixture-of-Experts GGUF models larger than RAM, keeping the hot experts locked in memory.
#[derive(Debug, Parser)]
#[command(name = "hotpin", version, propagate_version = true)]
pub struct Cli {
    /// File of settings, with drop-ins in FILE.d [default: ~/.config/hotpin/hotpin.toml, else
    /// /etc/hotpin/hotpin.toml]
    #[arg(long, global = true, env = "HOTPIN_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    log: log::LogArgs,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Generate text
    Run(Box<run::RunArgs>),
    /// Serve a model over HTTP, with OpenAI's interface
    Serve(Box<serve::ServeArgs>),
    /// Say what a model file holds and whether it fits this machine
    Inspect(inspect::InspectArgs),
    /// Check this machine for a model, and say how to mend what is amiss
    Doctor(doctor::DoctorArgs),
    /// Say what a model would do in so much memory: pins, hits, speed, and whether control pays
    Plan(plan::PlanArgs),
    /// Count expert use over prompts, as a starting point for the pinned set
    Profile(profile::ProfileArgs),
    /// Compare policies on a model: each run a fresh process, in turns, hashes compared
    Bench(Box<crate::bench::BenchArgs>),
    /// Sum up a journal of decisions, or draw it
    Journal(journal::JournalArgs),
    /// Watch a running server in the terminal
    Top(remote::RemoteArgs),
    /// Ask a running server why an expert is where it is
    Explain(remote::ExplainArgs),
    /// Make, check and show the settings file
    #[command(subcommand)]
    Config(config::ConfigVerb),
    /// Print a script that completes hotpin's arguments in a shell
    Completions(generate::CompletionsArgs),
    /// Write manual pages
    Man(generate::ManArgs),
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

/// What the program was called with, and everything that settings files add to it.
struct Invocation {
    argv: Vec<OsString>,
    cli: Cli,
    config: Config,
    /// The command with the files' values, and what it made of the arguments.
    command: Command,
    matches: ArgMatches,
}

/// Why a command line was not understood.
#[derive(Debug, thiserror::Error)]
enum InvocationError {
    #[error(transparent)]
    Arguments(#[from] clap::Error),
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl Invocation {
    /// Reads arguments, environment and settings files.
    fn read(argv: Vec<OsString>) -> Result<Self, InvocationError> {
        let plain = Cli::command();
        // Which verb, and which file? What a file may provide is not missed yet.
        let early = relaxed(plain.clone(), false).try_get_matches_from(&argv)?;
        let config = match early.subcommand() {
            Some((verb, matches)) if VERBS.contains(&verb) => {
                let named = matches.get_one::<PathBuf>("config");
                Config::read(named.map(PathBuf::as_path), &plain)?
            }
            _ => Config::default(),
        };
        let mut command = config.apply(plain);
        let matches = command.try_get_matches_from_mut(&argv)?;
        let cli = Cli::from_arg_matches(&matches)?;
        Ok(Self {
            argv,
            cli,
            config,
            command,
            matches,
        })
    }

    /// What is in force, and who said so.
    fn effective(&self) -> Result<Vec<Effective>, ConfigError> {
        effective(&self.config, &self.command, &self.matches)
    }

    /// The level of the log.
    fn log_level(&self) -> &str {
        let source = self
            .matches
            .subcommand()
            .and_then(|(_, matches)| matches.value_source("log_level"));
        self.cli.log.level(source == Some(ValueSource::CommandLine))
    }
}

/// The program. Errors go to stderr, results to stdout.
#[must_use]
pub fn main() -> ExitCode {
    let invocation = match Invocation::read(std::env::args_os().collect()) {
        Ok(invocation) => invocation,
        Err(InvocationError::Arguments(error)) => error.exit(),
        Err(error) => {
            log::note(&format!("hotpin: {error}"));
            return ExitCode::from(MISUSED);
        }
    };
    crate::engine::end_on_lost_page();
    let _written = log::init(invocation.log_level(), invocation.cli.log.log_format);
    match execute(&invocation) {
        Ok(code) => code,
        Err(error) => {
            log::note(&format!("hotpin: {}", told(&error)));
            let misused = error.is::<common::Usage>() || error.is::<ConfigError>();
            ExitCode::from(if misused { MISUSED } else { FAILED })
        }
    }
}

/// An error with its causes, as far as they are not in its own words already.
fn told(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn execute(invocation: &Invocation) -> anyhow::Result<ExitCode> {
    let config = &invocation.config;
    match &invocation.cli.verb {
        Verb::Run(args) => run::execute(args, config),
        Verb::Serve(args) => serve::execute(args, invocation),
        Verb::Inspect(args) => inspect::execute(args),
        Verb::Doctor(args) => doctor::execute(args),
        Verb::Plan(args) => plan::execute(args),
        Verb::Profile(args) => profile::execute(args),
        Verb::Bench(args) => bench::execute(args, config),
        Verb::Journal(args) => journal::execute(args),
        Verb::Top(args) => remote::top(args, config),
        Verb::Explain(args) => remote::explain(args, config),
        Verb::Config(verb) => config::execute(verb, invocation.cli.config.as_deref()),
        Verb::Completions(args) => generate::completions(args),
        Verb::Man(args) => generate::man(args),
        Verb::Demo(verb) => demo::execute(verb),
        Verb::CalibrateChild => Ok(crate::bench::calibrate::execute()),
        Verb::BenchChild => Ok(crate::bench::measure::execute()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Cli, told};
    use clap::CommandFactory;

    #[test]
    fn causes_are_told_once() {
        let inner = || std::io::Error::other("no disk");
        let apart = anyhow::Error::new(inner()).context("reading m");
        assert_eq!(told(&apart), "reading m: no disk");
        let within = anyhow::Error::new(inner()).context("reading m failed: no disk");
        assert_eq!(told(&within), "reading m failed: no disk");
    }

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }
}
