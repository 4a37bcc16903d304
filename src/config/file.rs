//! One file of settings: its keys and values as text, each with the line that it stands on.

use super::ConfigError;
use std::fmt;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// The section that holds the control laws' settings.
pub(super) const LAWS: &str = "laws";
/// Longest file that is read, bytes.
const MOST_BYTES: u64 = 1 << 20;
/// Most drop-ins.
const MOST_DROP_INS: usize = 256;

/// A line of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1.
    pub line: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, line {}", self.file.display(), self.line)
    }
}

impl Place {
    pub(super) fn new(file: &Path, text: &str, at: usize) -> Self {
        let before = text.as_bytes().get(..at).unwrap_or(text.as_bytes());
        Self {
            file: file.to_owned(),
            line: 1 + before.iter().filter(|&&byte| byte == b'\n').count(),
        }
    }
}

/// A key with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// The key, dotted: `server.port`, or `model`.
    pub key: String,
    /// The values: one, or those of a list. Scalars are in the form that flags take.
    pub values: Vec<String>,
    /// Where it stands.
    pub place: Place,
}

impl Given {
    fn new(key: String, place: Place, value: &DeValue<'_>) -> Result<Self, ConfigError> {
        match values(value) {
            Some(values) => Ok(Self { key, values, place }),
            None => Err(ConfigError::Value {
                place,
                key,
                value: format!("a {}", value.type_str()),
                why: "give a text, a number, true or false, or a list of these".into(),
            }),
        }
    }
}

/// Reads a file.
pub(super) fn read(path: &Path) -> Result<String, ConfigError> {
    let fail = |source| ConfigError::Io {
        path: path.to_owned(),
        source,
    };
    let length = std::fs::metadata(path).map_err(fail)?.len();
    if length > MOST_BYTES {
        return Err(fail(std::io::Error::other(format!(
            "{length} bytes are more than the {MOST_BYTES} that are read"
        ))));
    }
    std::fs::read_to_string(path).map_err(fail)
}

/// `FILE.d`, the folder of a file's drop-ins.
pub(super) fn drop_in_folder(main: &Path) -> PathBuf {
    let mut name = main.as_os_str().to_owned();
    name.push(".d");
    PathBuf::from(name)
}

/// The files `*.toml` of the drop-in folder, by name. Without the folder there are none.
pub(super) fn drop_ins(main: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let folder = drop_in_folder(main);
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let fail = |source| ConfigError::Io {
        path: folder.clone(),
        source,
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "toml")
        {
            files.push(path);
        }
    }
    if files.len() > MOST_DROP_INS {
        return Err(fail(std::io::Error::other(format!(
            "{} drop-ins are more than {MOST_DROP_INS}",
            files.len()
        ))));
    }
    files.sort();
    Ok(files)
}

/// The keys of a file, the control laws' left out.
pub(super) fn parse(path: &Path, text: &str) -> Result<Vec<Given>, ConfigError> {
    let document = DeTable::parse(text).map_err(|error| syntax(path, text, &error))?;
    let mut given = Vec::new();
    for (name, value) in document.get_ref() {
        let section = name.get_ref();
        let place = Place::new(path, text, name.span().start);
        match value.get_ref() {
            _ if section == LAWS => {}
            DeValue::Table(table) => {
                for (key, value) in table {
                    let place = Place::new(path, text, key.span().start);
                    let key = format!("{section}.{}", key.get_ref());
                    given.push(Given::new(key, place, value.get_ref())?);
                }
            }
            value => given.push(Given::new(section.to_string(), place, value)?),
        }
    }
    Ok(given)
}

/// What is wrong with a file's TOML, and where.
pub(super) fn syntax(path: &Path, text: &str, error: &toml::de::Error) -> ConfigError {
    ConfigError::Syntax {
        place: Place::new(path, text, error.span().map_or(0, |span| span.start)),
        detail: error.message().replace('\n', ", "),
    }
}

/// A value as flags take it; `None` for what no flag takes.
fn values(value: &DeValue<'_>) -> Option<Vec<String>> {
    match value {
        DeValue::Array(items) => items.iter().map(|item| scalar(item.get_ref())).collect(),
        other => scalar(other).map(|value| vec![value]),
    }
}

fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .ok()
            .map(|number| number.to_string()),
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        DeValue::Boolean(value) => Some(value.to_string()),
        DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}
