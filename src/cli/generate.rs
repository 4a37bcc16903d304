//! `hotpin completions` and `hotpin man`: made from the command line's own definition.

use super::Cli;
use super::common;
use anyhow::{Context, Result};
use clap::{Args, Command, CommandFactory};
use clap_complete::Shell;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(super) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

#[derive(Debug, Args)]
pub(super) struct ManArgs {
    /// Folder for the pages; it is made where it is missing
    dir: PathBuf,
}

/// The command without what is hidden, which some shells would offer.
fn visible() -> Command {
    let all = Cli::command();
    let shown = all.get_subcommands().filter(|verb| !verb.is_hide_set());
    Command::new("hotpin")
        .version(env!("CARGO_PKG_VERSION"))
        .args(all.get_arguments())
        .subcommands(shown)
}

pub(super) fn completions(args: &CompletionsArgs) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut visible(), "hotpin", &mut script);
    match std::io::stdout().write_all(&script) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}

pub(super) fn man(args: &ManArgs) -> Result<ExitCode> {
    let what = || args.dir.display().to_string();
    std::fs::create_dir_all(&args.dir).with_context(what)?;
    clap_mangen::generate_to(Cli::command(), &args.dir).with_context(what)?;
    common::say(&what())?;
    Ok(ExitCode::SUCCESS)
}
