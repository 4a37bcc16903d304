//! The control laws' settings from several files, with the place of each.

use super::file::{LAWS, Place, syntax};
use super::{ConfigError, file};
use hotpin_controllers::AdaptiveConfig;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;
use toml::de::{DeTable, DeValue};

/// Laws' keys that are options as well, and must be given as such.
const OPTIONS: [(&str, &str); 2] = [
    ("capacity.limit_bytes", "control.capacity"),
    ("capacity.host_reserve_bytes", "control.reserve"),
];

/// The laws' settings as given, later files over earlier ones.
#[derive(Debug, Clone, Default)]
pub struct Laws {
    table: toml::Table,
    places: BTreeMap<String, Place>,
}

/// What of a settings file is about laws.
#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    laws: AdaptiveConfig,
}

impl Laws {
    /// Adds the section `laws` of a settings file.
    pub(super) fn add(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        // Names and types are checked here, where their place is known.
        let _: AdaptiveConfig = toml::from_str::<Document>(text)
            .map_err(|error| syntax(path, text, &error))?
            .laws;
        let whole = DeTable::parse(text).map_err(|error| syntax(path, text, &error))?;
        let Some(laws) = whole.get_ref().get(LAWS) else {
            return Ok(());
        };
        if let DeValue::Table(laws) = laws.get_ref() {
            self.note_places(path, text, laws);
        }
        for (key, instead) in OPTIONS {
            if let Some(place) = self.places.get(key) {
                return Err(ConfigError::Unknown {
                    place: place.clone(),
                    key: format!("{LAWS}.{key}"),
                    hint: format!("give `{instead}`"),
                });
            }
        }
        let table: toml::Table =
            toml::from_str(text).map_err(|error| syntax(path, text, &error))?;
        self.merge(table.get(LAWS));
        Ok(())
    }

    /// Adds a file that holds laws' settings and nothing else, as `--control` takes it.
    ///
    /// # Errors
    /// [`ConfigError`]: it cannot be read, or has a key or a type that no law has.
    pub fn add_control_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text = file::read(path)?;
        let wrong = |error: toml::de::Error| syntax(path, &text, &error);
        toml::from_str::<AdaptiveConfig>(&text).map_err(wrong)?;
        let laws = DeTable::parse(&text).map_err(wrong)?;
        self.note_places(path, &text, laws.get_ref());
        let table: toml::Table = toml::from_str(&text).map_err(wrong)?;
        self.merge(Some(&toml::Value::Table(table)));
        Ok(())
    }

    fn note_places(&mut self, path: &Path, text: &str, laws: &DeTable<'_>) {
        for (section, value) in laws {
            let DeValue::Table(table) = value.get_ref() else {
                continue;
            };
            for key in table.keys() {
                self.places.insert(
                    format!("{}.{}", section.get_ref(), key.get_ref()),
                    Place::new(path, text, key.span().start),
                );
            }
        }
    }

    fn merge(&mut self, laws: Option<&toml::Value>) {
        let Some(toml::Value::Table(laws)) = laws else {
            return;
        };
        for (section, values) in laws {
            let own = self
                .table
                .entry(section.clone())
                .or_insert_with(|| toml::Value::Table(toml::Table::new()));
            if let (toml::Value::Table(own), toml::Value::Table(values)) = (own, values) {
                own.extend(values.iter().map(|(k, v)| (k.clone(), v.clone())));
            }
        }
    }

    /// The settings, unchecked; what was not given is as by default.
    #[must_use]
    pub fn raw(&self) -> AdaptiveConfig {
        // Each part was read as this type when it was added.
        AdaptiveConfig::deserialize(self.table.clone()).unwrap_or_default()
    }

    /// The settings, with ranges and relations checked.
    ///
    /// # Errors
    /// [`ConfigError::Laws`], with the places of the values at fault.
    pub fn check(&self) -> Result<AdaptiveConfig, ConfigError> {
        let raw = self.raw();
        match raw.check() {
            Ok(_) => Ok(raw),
            Err(source) => {
                let words = source.to_string();
                let places: Vec<String> = self
                    .places
                    .iter()
                    .filter(|(key, _)| {
                        let name = key.rsplit('.').next().unwrap_or(key);
                        words.contains(key.as_str()) || words.contains(name)
                    })
                    .map(|(_, place)| place.to_string())
                    .collect();
                Err(ConfigError::Laws {
                    places: places.join("; "),
                    source,
                })
            }
        }
    }

    /// Where a key, such as `pins.share`, was given.
    #[must_use]
    pub fn place(&self, key: &str) -> Option<&Place> {
        self.places.get(key)
    }
}

/// Every key of the laws, such as `pins.share`, with its value as TOML; `None` for what is not set.
pub(super) fn keys(config: &AdaptiveConfig) -> Vec<(String, Option<String>)> {
    let mut keys = Vec::new();
    // Unlike TOML, JSON shows those that are not set.
    let Ok(serde_json::Value::Object(sections)) = serde_json::to_value(config) else {
        return keys;
    };
    for (section, fields) in sections {
        let serde_json::Value::Object(fields) = fields else {
            continue;
        };
        for (name, value) in fields {
            let key = format!("{section}.{name}");
            if OPTIONS.iter().any(|(option, _)| *option == key) {
                continue;
            }
            keys.push((key, (!value.is_null()).then(|| value.to_string())));
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::Laws;
    use std::path::Path;

    fn laws(texts: &[&str]) -> Result<Laws, String> {
        let mut laws = Laws::default();
        for (index, text) in texts.iter().enumerate() {
            let name = format!("{index}.toml");
            laws.add(Path::new(&name), text)
                .map_err(|e| e.to_string())?;
        }
        Ok(laws)
    }

    #[test]
    fn later_files_win_key_by_key() {
        let first = "[laws.pins]\nshare = 0.5\ngate_tokens = 8\n";
        let second = "[laws.pins]\nshare = 0.6\n[laws.drift]\nenabled = false\n";
        let both = laws(&[first, second]).expect("laws");
        let config = both.check().expect("checked");
        assert!((config.pins.share - 0.6).abs() < 1e-9);
        assert!((config.pins.gate_tokens - 8.0).abs() < 1e-9);
        assert!(!config.drift.enabled);
        let place = both.place("pins.share").expect("place");
        assert_eq!((place.file.to_str(), place.line), (Some("1.toml"), 2));
        assert_eq!(both.place("pins.gate_tokens").expect("place").line, 3);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let error = |text: &str| {
            laws(&[text])
                .and_then(|laws| laws.check().map_err(|e| e.to_string()))
                .expect_err(text)
        };
        let cases = [
            ("\n[laws.pins]\nshares = 1\n", ["0.toml, line 3", "shares"]),
            ("[laws.pins]\nshare = \"x\"\n", ["0.toml, line 2", "f64"]),
            ("[laws.pins]\n\nshare = 2.0\n", ["line 3", "pins.share = 2"]),
            ("[laws.pin]\nshare = 1\n", ["line 1", "pin"]),
            (
                "[laws.capacity]\nlimit_bytes = 5\n",
                ["line 2", "control.capacity"],
            ),
            (
                "[laws.pressure]\ngrow_threshold = 0.5\n",
                ["line 2", "never comes to rest"],
            ),
        ];
        for (text, words) in cases {
            let error = error(text);
            for word in words {
                assert!(error.contains(word), "no {word:?} in {error}");
            }
        }
    }
}
