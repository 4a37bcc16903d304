//! The metadata of a GGUF header: the few values that are kept, and typed access to them.

use super::error::{ModelError, shown};
use std::path::{Path, PathBuf};

/// Longest text that is kept, bytes; a longer one is [`Value::Skipped`].
pub const MAX_KEPT_TEXT_BYTES: u64 = 4096;
/// Most elements of an array that are kept; a longer one is [`Value::Skipped`].
pub const MAX_KEPT_ELEMENTS: u64 = 4096;

/// One metadata value. Integers of every width are one type, since writers disagree on widths.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any integer that is not negative.
    Uint(u64),
    /// A negative integer.
    Negative(i64),
    /// Either float width.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// Text; control characters are replaced, so that it is safe to print.
    Text(String),
    /// An array of integers, none of them negative.
    Uints(Vec<u64>),
    /// Anything that was passed over: long texts, and arrays that are long, of texts, of floats or
    /// with a negative element.
    Skipped {
        /// GGUF's name of the type, of the elements for an array.
        kind: &'static str,
        /// Bytes of a text, elements of an array.
        count: u64,
    },
}

impl Value {
    fn describe(&self) -> String {
        match self {
            Self::Uint(n) => format!("the number {n}"),
            Self::Negative(n) => format!("the number {n}"),
            Self::Float(x) => format!("the number {x}"),
            Self::Bool(b) => format!("{b}"),
            Self::Text(text) => format!("the text '{}'", shown(text)),
            Self::Uints(list) => format!("a list of {} numbers", list.len()),
            Self::Skipped { kind, count } => format!("{kind} x {count}"),
        }
    }
}

/// A number that is the same for all layers, or given layer by layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PerLayer {
    /// The same for all.
    Same(u64),
    /// By block index.
    Each(Vec<u64>),
}

impl PerLayer {
    /// The number for one block; `None` when the list is too short.
    #[must_use]
    pub fn at(&self, block: u32) -> Option<u64> {
        match self {
            Self::Same(n) => Some(*n),
            Self::Each(list) => list.get(block as usize).copied(),
        }
    }

    /// The largest number.
    #[must_use]
    pub fn max(&self) -> u64 {
        match self {
            Self::Same(n) => *n,
            Self::Each(list) => list.iter().copied().max().unwrap_or(0),
        }
    }
}

/// The kept metadata of one file.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    path: PathBuf,
    entries: Vec<(String, Value)>,
}

impl Metadata {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            entries: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, key: String, value: Value) {
        self.entries.push((key, value));
    }

    /// Number of kept values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing was kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The value of a key, if it was kept.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value)
    }

    /// A text; `None` when the key is absent.
    ///
    /// # Errors
    /// When the key holds something else.
    pub fn text(&self, key: &str) -> Result<Option<&str>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.mismatch(key, "a text", other)),
        }
    }

    /// A number that is not negative; `None` when the key is absent.
    ///
    /// # Errors
    /// When the key holds something else.
    pub fn uint(&self, key: &str) -> Result<Option<u64>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Uint(n)) => Ok(Some(*n)),
            Some(other) => Err(self.mismatch(key, "a number, zero or more", other)),
        }
    }

    /// A number for all layers or one for each; `None` when the key is absent.
    ///
    /// # Errors
    /// When the key holds something else.
    pub fn per_layer(&self, key: &str) -> Result<Option<PerLayer>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Uint(n)) => Ok(Some(PerLayer::Same(*n))),
            Some(Value::Uints(list)) => Ok(Some(PerLayer::Each(list.clone()))),
            Some(other) => Err(self.mismatch(key, "a number or a list of numbers", other)),
        }
    }

    fn mismatch(&self, key: &str, expected: &str, found: &Value) -> ModelError {
        ModelError::Model {
            path: self.path.clone(),
            what: format!(
                "metadata '{}' should be {expected}, but is {}",
                shown(key),
                found.describe()
            ),
            fix: "convert the model again with a current converter",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let mut metadata = Metadata::new(Path::new("m.gguf"));
        metadata.push("n".into(), Value::Uint(7));
        metadata.push("list".into(), Value::Uints(vec![0, 8]));
        metadata.push("name".into(), Value::Text("x".into()));
        metadata
    }

    #[test]
    fn typed_access() {
        let m = metadata();
        assert_eq!(m.uint("n").unwrap(), Some(7));
        assert_eq!(m.uint("absent").unwrap(), None);
        assert_eq!(m.text("name").unwrap(), Some("x"));
        assert_eq!(m.per_layer("n").unwrap().unwrap().at(900), Some(7));
        let list = m.per_layer("list").unwrap().unwrap();
        assert_eq!(
            (list.at(0), list.at(1), list.at(2), list.max()),
            (Some(0), Some(8), None, 8)
        );
    }

    #[test]
    fn a_wrong_type_is_named() {
        let error = metadata().uint("name").unwrap_err().to_string();
        assert!(
            error.contains("'name'") && error.contains("the text 'x'"),
            "{error}"
        );
        assert!(metadata().text("n").is_err());
        assert!(metadata().per_layer("name").is_err());
    }
}
