//! The `hotpin` program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    hotpin::cli::main()
}
