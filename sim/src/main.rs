//! `hotpin-sim`: routing traces and control loops without a machine.
#![forbid(unsafe_code)]

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
