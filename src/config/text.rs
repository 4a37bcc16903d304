//! Settings as text: what is in force, and a file with every default.

use super::catalog::{Effective, Value, settings};
use super::file::LAWS;
use super::laws;
use clap::Command;
use hotpin_controllers::AdaptiveConfig;
use hotpin_controllers::config::meaning;

const HEAD: &str = r#"# Settings of hotpin. Every key is shown with its default, commented out.
#
# A flag wins over the environment, that over the files FILE.d/*.toml (the last one in the order of their
# names first), those over this file. `hotpin config show --origin` tells which of them spoke,
# `hotpin config check` finds mistakes. Sizes are written as 8GiB, 2500MB or 40% (of RAM).
# A running server reads the files again on SIGHUP (`systemctl reload`): control.capacity,
# control.reserve, log.level and the laws but for laws.scores then change at once, all others at the
# next start.
"#;

const LAWS_HEAD: &str = "
# The control laws; docs/control.md explains every value and says how it was found.
";

/// A value as TOML, in parentheses where there is none.
#[must_use]
pub fn literal(value: &Value) -> String {
    match value {
        Value::Unset => "(not set)".to_owned(),
        Value::One(text) => scalar(text),
        Value::List(items) if items.len() == 1 => scalar(&items[0]),
        Value::List(items) => {
            let items: Vec<String> = items.iter().map(|item| scalar(item)).collect();
            format!("[{}]", items.join(", "))
        }
    }
}

fn scalar(text: &str) -> String {
    // Numbers and booleans stand as they are, all else in quotes.
    let bare = format!("value = {text}")
        .parse::<toml::Table>()
        .is_ok_and(|table| {
            let kinds = ["integer", "float", "boolean"];
            table.len() == 1 && kinds.contains(&table["value"].type_str())
        });
    if bare {
        text.to_owned()
    } else {
        toml::Value::String(text.to_owned()).to_string()
    }
}

/// What is in force, as a file of settings; with origins, each line says where its value comes from.
#[must_use]
pub fn show(effective: &[Effective], with_origin: bool) -> String {
    let mut out = String::new();
    let mut section = String::new();
    for one in effective {
        enter(&mut section, &one.key, &mut out);
        let name = one.key.rsplit('.').next().unwrap_or(&one.key);
        let line = match &one.value {
            Value::Unset => format!("#{name} ="),
            value => format!("{name} = {}", literal(value)),
        };
        if with_origin {
            out.push_str(&format!("{line:<44} # {}\n", one.origin));
        } else {
            out.push_str(&format!("{line}\n"));
        }
    }
    out
}

/// Starts the section of a key, where it is another one.
fn enter(section: &mut String, key: &str, out: &mut String) {
    let own = key.rsplit_once('.').map_or("", |(section, _)| section);
    if own != section {
        own.clone_into(section);
        out.push_str(&format!("\n[{own}]\n"));
    }
}

/// A file with every key, its meaning and its default, all of it commented out.
#[must_use]
pub fn template(command: &Command) -> String {
    let mut out = HEAD.to_owned();
    let mut section = String::new();
    let mut all = settings(command);
    // Sections in the order in which they come first, the key without one at the top.
    let mut order: Vec<String> = vec![String::new()];
    for setting in &all {
        let own = section_of(&setting.key);
        if !order.iter().any(|known| known == own) {
            order.push(own.to_owned());
        }
    }
    all.sort_by_key(|setting| {
        let own = section_of(&setting.key);
        order.iter().position(|known| known == own)
    });
    for setting in &all {
        if section_of(&setting.key) != section {
            enter(&mut section, &setting.key, &mut out);
        }
        let help = setting.arg.get_help().map(ToString::to_string);
        let verbs = if setting.verbs.contains(&"serve") {
            String::new()
        } else {
            format!(" (hotpin {})", setting.verbs.join(", "))
        };
        out.push_str(&format!(
            "\n# {}{verbs}\n",
            help.unwrap_or_default().replace('\n', " ")
        ));
        let name = setting.key.rsplit('.').next().unwrap_or(&setting.key);
        let defaults: Vec<String> = setting
            .arg
            .get_default_values()
            .iter()
            .map(|value| value.to_string_lossy().into_owned())
            .collect();
        let value = if defaults.is_empty() {
            Value::Unset
        } else {
            Value::List(defaults)
        };
        out.push_str(&line(name, &value));
    }
    out.push_str(LAWS_HEAD);
    for (key, value) in laws::keys(&AdaptiveConfig::default()) {
        let dotted = format!("{LAWS}.{key}");
        if section_of(&dotted) != section {
            enter(&mut section, &dotted, &mut out);
            out.push_str(&comment(section_of(&key)));
        }
        out.push('\n');
        out.push_str(&comment(&key));
        let name = key.rsplit('.').next().unwrap_or(&key);
        out.push_str(&line(name, &value.map_or(Value::Unset, Value::One)));
    }
    out
}

/// The meaning of a law's section or key, as a comment.
fn comment(key: &str) -> String {
    meaning(key)
        .unwrap_or_default()
        .lines()
        // References between fields are no links here.
        .map(|line| format!("# {}\n", line.trim().replace("[`", "`").replace("`]", "`")))
        .collect()
}

/// A key that is commented out, with its default where it has one.
fn line(name: &str, default: &Value) -> String {
    match default {
        Value::Unset => format!("#{name} =\n"),
        value => format!("#{name} = {}\n", literal(value)),
    }
}

fn section_of(key: &str) -> &str {
    key.rsplit_once('.').map_or("", |(section, _)| section)
}

#[cfg(test)]
mod tests {
    use super::{Value, literal};

    #[test]
    fn values_are_written_as_toml() {
        let one = |text: &str| literal(&Value::One(text.into()));
        for bare in ["8080", "0.8", "-1", "true", "1e-6"] {
            assert_eq!(one(bare), bare);
        }
        for text in ["007", "2GiB", "1.2.3", "", "a # b", "1\ny = 2", "x"] {
            let written = format!("key = {}", one(text));
            let table: toml::Table = written.parse().expect(text);
            assert_eq!(table["key"].as_str(), Some(text), "{written}");
        }
        let list = literal(&Value::List(vec!["a".into(), "2".into()]));
        assert_eq!(list, "[\"a\", 2]");
    }
}
