//! Why settings were refused.

use super::file::Place;
use std::path::PathBuf;

/// Why settings were refused: what, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file could not be read.
    #[error("settings {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is no TOML, or a control law's setting has the wrong type or name.
    #[error("{place}: {detail}")]
    Syntax {
        /// Where.
        place: Place,
        /// What is wrong.
        detail: String,
    },
    /// There is no such section or key.
    #[error("{place}: there is no setting `{key}`; {hint}")]
    Unknown {
        /// Where.
        place: Place,
        /// The key, dotted.
        key: String,
        /// What there is instead.
        hint: String,
    },
    /// A setting cannot have this value.
    #[error("{place}: {key} = {value}: {why}")]
    Value {
        /// Where.
        place: Place,
        /// The key, dotted.
        key: String,
        /// The value, as TOML.
        value: String,
        /// Why not, and what would do.
        why: String,
    },
    /// The control laws' settings contradict each other or are out of range.
    #[error("{places}: laws.{source}")]
    Laws {
        /// Where the values at fault were given.
        places: String,
        /// What is wrong.
        source: hotpin_controllers::ConfigError,
    },
}
