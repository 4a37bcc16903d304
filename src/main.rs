//! The `hotpin` program.
#![forbid(unsafe_code)]

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    hotpin::cli::Cli::parse().execute()
}
