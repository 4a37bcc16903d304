//! `hotpin config`: the settings file, made, checked and shown.

use super::Cli;
use super::common::{self, Usage};
use super::serve::ServeArgs;
use crate::config::{self, Config, Effective, Value};
use anyhow::{Context, Result};
use clap::{Args, Command, CommandFactory, FromArgMatches, Subcommand};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Debug, Subcommand)]
pub(super) enum ConfigVerb {
    /// Write a settings file with every default, commented out
    Init(InitArgs),
    /// Check the settings files; exit code 2 when something is wrong
    Check,
    /// Print the settings in force
    Show(ShowArgs),
}

#[derive(Debug, Args)]
pub(super) struct InitArgs {
    /// File to write; `-` prints it [default: ~/.config/hotpin/hotpin.toml]
    file: Option<PathBuf>,
    /// Replace a file that is there
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    /// Say where each value comes from
    #[arg(long)]
    origin: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// A verb and its arguments, as in `hotpin config show -- serve MODEL --port 9000` [default: serve]
    #[arg(last = true, value_name = "VERB ARGS")]
    command: Vec<OsString>,
}

pub(super) fn execute(verb: &ConfigVerb, named: Option<&Path>) -> Result<ExitCode> {
    let command = Cli::command();
    match verb {
        ConfigVerb::Init(args) => init(args, &command),
        ConfigVerb::Check => check(&Config::read(named, &command)?, command),
        ConfigVerb::Show(args) => show(args, &Config::read(named, &command)?, command),
    }
}

fn init(args: &InitArgs, command: &Command) -> Result<ExitCode> {
    let text = config::template(command);
    if args.file.as_deref() == Some(Path::new("-")) {
        common::say(text.trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    let path = match &args.file {
        Some(path) => path.clone(),
        None => config::user_file()
            .context("neither XDG_CONFIG_HOME nor HOME is set: name a file to write")?,
    };
    if path.exists() && !args.force {
        let why = format!("{} is there already; --force replaces it", path.display());
        return Err(Usage(why).into());
    }
    crate::files::write_whole(&path, &text).with_context(|| path.display().to_string())?;
    common::say(&path.display().to_string())?;
    Ok(ExitCode::SUCCESS)
}

/// Checks what can be checked without a model: keys, values, and whether a server would start.
fn check(config: &Config, command: Command) -> Result<ExitCode> {
    let command = config::relaxed(config.apply(command), false);
    // A model, so that there is one.
    let matches = command
        .try_get_matches_from(["hotpin", "serve", "MODEL"])
        .map_err(|error| Usage(first_line(&error)))?;
    if let Some((_, matches)) = matches.subcommand() {
        ServeArgs::from_arg_matches(matches)?.check(config)?;
    }
    let files: Vec<String> = config
        .files()
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    common::say(&if files.is_empty() {
        "no settings file; every setting has its default".to_owned()
    } else {
        format!("{}: nothing wrong", files.join(", "))
    })?;
    Ok(ExitCode::SUCCESS)
}

fn show(args: &ShowArgs, config: &Config, command: Command) -> Result<ExitCode> {
    let command = config::relaxed(config.apply(command), false);
    let mut words = args.command.clone();
    if words.is_empty() {
        words.push("serve".into());
    }
    let verb = words[0].to_string_lossy().into_owned();
    if !config::VERBS.contains(&verb.as_str()) {
        let verbs = config::VERBS.join(", ");
        return Err(Usage(format!("{verb:?} takes no settings; these do: {verbs}")).into());
    }
    let matches = command
        .clone()
        .try_get_matches_from(std::iter::once("hotpin".into()).chain(words))
        .map_err(|error| Usage(first_line(&error)))?;
    let effective = config::effective(config, &command, &matches)?;
    let text = if args.json {
        serde_json::to_string_pretty(&json(&effective))?
    } else {
        config::show(&effective, args.origin)
            .trim_start()
            .to_owned()
    };
    common::say(text.trim_end())?;
    Ok(ExitCode::SUCCESS)
}

fn json(effective: &[Effective]) -> serde_json::Value {
    effective
        .iter()
        .map(|one| {
            let value = match &one.value {
                Value::Unset => serde_json::Value::Null,
                Value::One(text) => text.as_str().into(),
                Value::List(items) => items.as_slice().into(),
            };
            let entry = serde_json::json!({"value": value, "origin": one.origin.to_string()});
            (one.key.clone(), entry)
        })
        .collect::<serde_json::Map<_, _>>()
        .into()
}

fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.trim_start_matches("error: ").to_owned()
}
