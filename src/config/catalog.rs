//! The options that a file may set, taken from the command line's own definition, and what became of
//! each.

use super::file::{Given, LAWS, Place};
use super::{Config, ConfigError, laws};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use std::fmt;
use std::path::PathBuf;

/// Headings of the command line that are sections of the file.
const SECTIONS: [&str; 5] = ["engine", "control", "generation", "server", "log"];
/// Verbs that take settings from the file.
pub const VERBS: [&str; 9] = [
    "serve", "run", "bench", "profile", "inspect", "plan", "doctor", "top", "explain",
];
/// How alike two keys must be for one to be meant by the other.
const ALIKE: f64 = 0.85;

/// An option that a file may set.
#[derive(Debug, Clone)]
pub struct Setting {
    /// The key, dotted: `server.port`.
    pub key: String,
    /// The option.
    pub arg: Arg,
    /// Verbs that take it; all of them, when it is there for every verb.
    pub verbs: Vec<&'static str>,
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Nobody said.
    Default,
    /// A file.
    File(Place),
    /// A variable of the environment.
    Environment(String),
    /// The command line.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(place) => place.fmt(f),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => f.write_str(name),
        }
    }
}

/// A value in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Not set.
    Unset,
    /// One value.
    One(String),
    /// A list.
    List(Vec<String>),
}

/// A setting in force, and who said so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effective {
    /// The key, dotted.
    pub key: String,
    /// The value.
    pub value: Value,
    /// Where it comes from.
    pub origin: Origin,
}

/// Whether an option takes several values.
fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// The key of an option; `None` for what no file sets.
fn key_of(arg: &Arg) -> Option<String> {
    if matches!(arg.get_action(), ArgAction::Count) {
        return None;
    }
    if arg.is_positional() {
        return (arg.get_id() == "model").then(|| "model".to_owned());
    }
    let section = arg.get_help_heading()?.to_ascii_lowercase();
    if !SECTIONS.contains(&section.as_str()) || is_secret(arg) {
        return None;
    }
    let name = arg.get_long()?.replace('-', "_");
    let name = name
        .strip_prefix(&format!("{section}_"))
        .unwrap_or(&name)
        .to_owned();
    Some(format!("{section}.{name}"))
}

/// Secrets are in no file that is read for settings.
fn is_secret(arg: &Arg) -> bool {
    arg.is_hide_env_values_set()
}

/// Every option that a file may set, in the order of the command line.
#[must_use]
pub fn settings(command: &Command) -> Vec<Setting> {
    let mut found: Vec<Setting> = Vec::new();
    let mut add = |arg: &Arg, verbs: &[&'static str]| {
        let Some(key) = key_of(arg) else { return };
        match found.iter_mut().find(|setting| setting.key == key) {
            Some(setting) => setting.verbs.extend(verbs),
            None => found.push(Setting {
                key,
                arg: arg.clone(),
                verbs: verbs.to_vec(),
            }),
        }
    };
    for verb in VERBS {
        for arg in command
            .find_subcommand(verb)
            .into_iter()
            .flat_map(Command::get_arguments)
        {
            add(arg, &[verb]);
        }
    }
    for arg in command.get_arguments() {
        add(arg, &VERBS);
    }
    found
}

/// Checks that every key is there and takes its value.
pub(super) fn check(given: &[Given], command: &Command) -> Result<(), ConfigError> {
    let settings = settings(command);
    for one in given {
        let Some(setting) = settings.iter().find(|setting| setting.key == one.key) else {
            return Err(ConfigError::Unknown {
                place: one.place.clone(),
                key: one.key.clone(),
                hint: hint(&one.key, &settings),
            });
        };
        if let Some(why) = refusal(setting, &one.values, command) {
            return Err(ConfigError::Value {
                place: one.place.clone(),
                key: one.key.clone(),
                value: super::text::literal(&Value::List(one.values.clone())),
                why,
            });
        }
    }
    Ok(())
}

fn hint(key: &str, settings: &[Setting]) -> String {
    if key == "server.api_key" {
        return "keep the key in a file of its own and give `server.api_key_file`".into();
    }
    let likeness = |setting: &Setting| {
        let name = |key: &str| key.rsplit('.').next().unwrap_or(key).to_owned();
        strsim::jaro_winkler(&setting.key, key)
            .max(strsim::jaro_winkler(&name(&setting.key), &name(key)))
    };
    settings
        .iter()
        .map(|setting| (likeness(setting), setting))
        .filter(|(likeness, _)| *likeness > ALIKE)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map_or_else(
            || "`hotpin config init -` prints all that there are".into(),
            |(_, setting)| format!("perhaps `{}` is meant", setting.key),
        )
}

/// Why an option does not take these values; `None` when it does.
fn refusal(setting: &Setting, values: &[String], command: &Command) -> Option<String> {
    if !is_list(&setting.arg) && values.len() != 1 {
        return Some("it takes one value".into());
    }
    let Some(long) = setting.arg.get_long() else {
        return values
            .iter()
            .any(String::is_empty)
            .then(|| "it must not be empty".into());
    };
    let verb = setting.verbs.first()?;
    // Alone among all options of its verb, so that clap knows what each of them is.
    let alone = relaxed(command.clone(), true);
    let flags = values.iter().map(|value| format!("--{long}={value}"));
    let args = ["hotpin", verb].map(str::to_owned).into_iter().chain(flags);
    alone.try_get_matches_from(args).err().map(|e| reason(&e))
}

/// A parse error without the name of the flag, which is not what the user wrote.
fn reason(error: &clap::Error) -> String {
    if let Some(source) = std::error::Error::source(error) {
        return source.to_string();
    }
    if error.kind() == ErrorKind::InvalidValue
        && let Some(ContextValue::Strings(known)) = error.get(ContextKind::ValidValue)
        && !known.is_empty()
    {
        return format!("it must be one of {}", known.join(", "));
    }
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.trim_start_matches("error: ").to_owned()
}

/// The command with nothing required, and without the environment on demand.
pub fn relaxed(mut command: Command, alone: bool) -> Command {
    let ease = move |arg: Arg| {
        let arg = arg.required(false);
        if alone {
            arg.env(None::<&'static str>)
        } else {
            arg
        }
    };
    command = command.mut_args(ease);
    for verb in VERBS {
        if command.find_subcommand(verb).is_some() {
            command = command.mut_subcommand(verb, |sub| sub.mut_args(ease));
        }
    }
    command
}

/// Puts given values in the place of defaults.
pub(super) fn apply(given: &[Given], mut command: Command) -> Command {
    let fill = |arg: Arg| {
        let Some(key) = key_of(&arg) else { return arg };
        match given.iter().rfind(|one| one.key == key) {
            Some(one) => arg.required(false).default_values(one.values.clone()),
            None => arg,
        }
    };
    command = command.mut_args(fill);
    for verb in VERBS {
        if command.find_subcommand(verb).is_some() {
            command = command.mut_subcommand(verb, |sub| sub.mut_args(fill));
        }
    }
    command
}

/// What a verb runs with, the control laws' settings included. `command` is the one with the files'
/// values, and `matches` are what it made of the arguments.
///
/// # Errors
/// [`ConfigError`] for the file that `--control` names.
pub fn effective(
    config: &Config,
    command: &Command,
    matches: &ArgMatches,
) -> Result<Vec<Effective>, ConfigError> {
    let Some((verb, matches)) = matches.subcommand() else {
        return Ok(Vec::new());
    };
    let mut found: Vec<Effective> = settings(command)
        .iter()
        .filter(|setting| setting.verbs.contains(&verb))
        .map(|setting| of(setting, matches, config))
        .collect();
    let mut laws = config.laws().clone();
    let control = matches.try_get_one::<PathBuf>("control").ok().flatten();
    if let Some(path) = control {
        laws.add_control_file(path)?;
    }
    for (key, value) in laws::keys(&laws.check()?) {
        let origin = laws
            .place(&key)
            .cloned()
            .map_or(Origin::Default, Origin::File);
        found.push(Effective {
            key: format!("{LAWS}.{key}"),
            value: value.map_or(Value::Unset, Value::One),
            origin,
        });
    }
    Ok(found)
}

fn of(setting: &Setting, matches: &ArgMatches, config: &Config) -> Effective {
    let id = setting.arg.get_id().as_str();
    let raw: Vec<String> = matches
        .try_get_raw(id)
        .ok()
        .flatten()
        .into_iter()
        .flatten()
        .map(|value| value.to_string_lossy().into_owned())
        .collect();
    let given = config.given().iter().rfind(|one| one.key == setting.key);
    let origin = match matches.value_source(id) {
        Some(ValueSource::CommandLine) => Origin::Flag(
            setting
                .arg
                .get_long()
                .map_or_else(|| "argument".into(), |long| format!("--{long}")),
        ),
        Some(ValueSource::EnvVariable) => Origin::Environment(
            setting
                .arg
                .get_env()
                .map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        ),
        _ => given.map_or(Origin::Default, |one| Origin::File(one.place.clone())),
    };
    let value = if is_list(&setting.arg) {
        Value::List(raw)
    } else {
        raw.into_iter().next_back().map_or(Value::Unset, Value::One)
    };
    Effective {
        key: setting.key.clone(),
        value,
        origin,
    }
}
