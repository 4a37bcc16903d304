//! Commands that mend what a check found, as a shell takes them.

use super::facts::{Facts, Subject};
use crate::sensors::Container;
use std::path::Path;

/// A path as one word of a shell.
pub(super) fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%,=".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

impl Subject {
    /// A command that only root may give.
    pub(super) fn by_root(&self, command: &str) -> String {
        if self.root {
            command.to_owned()
        } else {
            format!("sudo {command}")
        }
    }

    /// Writes a value into a file of the kernel's.
    pub(super) fn write(&self, value: impl std::fmt::Display, file: &Path) -> String {
        let file = quoted(file);
        if self.root {
            format!("echo {value} > {file}")
        } else {
            format!("echo {value} | sudo tee {file}")
        }
    }

    /// Sets a variable of the kernel.
    pub(super) fn sysctl(&self, name: &str, value: impl std::fmt::Display) -> String {
        self.by_root(&format!("sysctl -w {name}={value}"))
    }

    /// What finds the programs that hold most memory.
    pub(super) fn list_programs() -> String {
        "ps -eo rss,pid,comm --sort=-rss | head".to_owned()
    }
}

/// A command for the host of our container, where we are in one.
pub(super) fn from_outside(facts: &Facts, docker: &str) -> Option<String> {
    let name = facts.host.hostname.as_deref().unwrap_or("CONTAINER");
    let tool = match facts.host.container? {
        Container::Docker => "docker",
        Container::Podman => "podman",
    };
    Some(format!("{tool} {docker}").replace("{name}", name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_one_word_of_a_shell() {
        assert_eq!(quoted(Path::new("/a/b-1.gguf")), "/a/b-1.gguf");
        assert_eq!(quoted(Path::new("/my models/x")), "'/my models/x'");
        assert_eq!(quoted(Path::new("it's")), r"'it'\''s'");
        assert_eq!(quoted(Path::new("$(reboot)")), "'$(reboot)'");
    }
}
