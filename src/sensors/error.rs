//! Why a sensor could not be read.

use std::io;
use std::path::{Path, PathBuf};

/// What is wrong with one item of a file's text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The item is not in the file.
    #[error("missing")]
    Missing,
    /// The item's value is not a number of the expected form.
    #[error("`{text}` is not a number")]
    NotANumber {
        /// The start of the text found instead.
        text: String,
    },
    /// The value does not fit in 64 bits once converted to bytes.
    #[error("`{text}` is too large")]
    TooLarge {
        /// The text found.
        text: String,
    },
    /// The line does not have the form that the kernel documents.
    #[error("malformed line `{text}`")]
    Malformed {
        /// The start of the line.
        text: String,
    },
}

/// A parse failure inside some text, before the path is known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {item}: {problem}")]
pub struct ParseError {
    /// Line, counted from 1; the number of lines when an item is missing.
    pub line: usize,
    /// The item that was looked for, as the kernel spells it.
    pub item: String,
    /// What is wrong with it.
    pub problem: Problem,
}

impl ParseError {
    /// The item occurs nowhere in `text`.
    pub(crate) fn missing(text: &str, item: &str) -> Self {
        Self {
            line: text.lines().count(),
            item: item.to_owned(),
            problem: Problem::Missing,
        }
    }

    /// The line is not of the documented form.
    pub(crate) fn malformed(line: usize, item: &str, text: &str) -> Self {
        let problem = Problem::Malformed {
            text: excerpt(text),
        };
        Self {
            line,
            item: item.to_owned(),
            problem,
        }
    }
}

/// A file that could not be read or understood.
#[derive(Debug, thiserror::Error)]
pub enum SensorError {
    /// The file could not be opened or read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file is longer than any of its kind.
    #[error("{}: more than {limit_bytes} bytes", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The most that is read, bytes.
        limit_bytes: usize,
    },
    /// The text is not what the kernel documents.
    #[error("{}: {source}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line, item and what is wrong.
        source: ParseError,
    },
}

impl SensorError {
    /// Whether the file does not exist, as opposed to being unreadable or malformed.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Io { path, .. } | Self::TooLong { path, .. } | Self::Parse { path, .. } => path,
        }
    }

    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn parse(path: &Path, source: ParseError) -> Self {
        Self::Parse {
            path: path.to_owned(),
            source,
        }
    }
}

/// The start of some text, short enough for a message.
pub(crate) fn excerpt(text: &str) -> String {
    const EXCERPT_CHARS: usize = 40;
    text.chars().take(EXCERPT_CHARS).collect()
}
