//! Settings: `hotpin.toml`, its drop-ins, the environment and flags, in this order of precedence.
//!
//! Every option is defined once, as an argument of the command line ([`args`]). A file's key is that
//! argument's long name below the heading that `-h` shows it under, and its value takes the place of
//! the argument's default, so that clap itself lets the environment and flags win. The control laws'
//! own settings, below `laws`, are `AdaptiveConfig`'s fields.
#![forbid(unsafe_code)]

pub mod args;
mod catalog;
mod error;
mod file;
mod laws;
mod text;

pub use catalog::{Effective, Origin, Setting, VERBS, Value, effective, relaxed, settings};
pub use error::ConfigError;
pub use file::{Given, Place};
pub use laws::Laws;
pub use text::{literal, show, template};

use clap::Command;
use std::path::{Path, PathBuf};

/// What the files say, checked against the options that there are.
#[derive(Debug, Clone, Default)]
pub struct Config {
    files: Vec<PathBuf>,
    given: Vec<Given>,
    laws: Laws,
}

/// The file below a folder of settings.
const NAME: &str = "hotpin/hotpin.toml";

impl Config {
    /// Reads the named file, or the one in its usual place, and its drop-ins. A usual place without a
    /// file is no error; a named file that is missing is.
    ///
    /// # Errors
    /// [`ConfigError`]: what cannot be read, parsed, or meant, and where it stands.
    pub fn read(named: Option<&Path>, command: &Command) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let Some(main) = named.map(Path::to_owned).or_else(usual_file) else {
            return Ok(config);
        };
        if named.is_some() || main.exists() {
            config.add(&main)?;
        }
        for drop_in in file::drop_ins(&main)? {
            config.add(&drop_in)?;
        }
        catalog::check(&config.given, command)?;
        config.laws.check()?;
        Ok(config)
    }

    fn add(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text = file::read(path)?;
        self.given.extend(file::parse(path, &text)?);
        self.laws.add(path, &text)?;
        self.files.push(path.to_owned());
        Ok(())
    }

    /// The files read, in order; later ones win.
    #[must_use]
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Keys given, the control laws' not counted.
    #[must_use]
    pub fn given(&self) -> &[Given] {
        &self.given
    }

    /// Settings of the control laws.
    #[must_use]
    pub const fn laws(&self) -> &Laws {
        &self.laws
    }

    /// Puts the files' values in the place of the options' defaults.
    #[must_use]
    pub fn apply(&self, command: Command) -> Command {
        catalog::apply(&self.given, command)
    }
}

/// Where the settings of a user, or else of the machine, are expected: the first place that has a file
/// or drop-ins.
fn usual_file() -> Option<PathBuf> {
    let machine = Path::new("/etc").join(NAME);
    user_file()
        .into_iter()
        .chain([machine])
        .find(|path| path.exists() || file::drop_in_folder(path).is_dir())
}

/// Where a user's own settings belong.
#[must_use]
pub fn user_file() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    set("XDG_CONFIG_HOME")
        .map(PathBuf::from)
        .or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".config")))
        .map(|folder| folder.join(NAME))
}
