//! `hotpin doctor`: what of this machine helps or hinders a model, and what to do about it.
//!
//! Facts are read first, below injectable roots; each check is a function of them, so that every
//! verdict can be had from a recorded tree.
#![forbid(unsafe_code)]

mod device;
mod disk;
mod facts;
mod locks;
mod machine;
mod memory;
mod remedy;

pub use device::DeviceFact;
pub use facts::{Facts, Space, Subject};

use serde::Serialize;
use std::fmt;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// It works, but slower or with less in memory than this machine could.
    Warn,
    /// The model cannot run here, or every token will wait for the disk.
    Fail,
}

impl Level {
    /// The word in the report.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it came out.
    pub level: Level,
    /// What was found and what that means.
    pub said: String,
    /// The command that mends it, or finds what is in the way; `None` when nothing has to be done.
    pub fix: Option<String>,
}

impl Check {
    fn ok(name: &'static str, said: impl Into<String>) -> Self {
        Self {
            name,
            level: Level::Ok,
            said: said.into(),
            fix: None,
        }
    }

    fn warn(name: &'static str, said: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            name,
            level: Level::Warn,
            said: said.into(),
            fix: Some(fix.into()),
        }
    }

    fn fail(name: &'static str, said: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            level: Level::Fail,
            ..Self::warn(name, said, fix)
        }
    }
}

/// The whole report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The model's first file.
    pub model: String,
    /// The worst of all checks.
    pub worst: Level,
    /// The checks.
    pub checks: Vec<Check>,
}

impl Report {
    /// Judges what was read.
    #[must_use]
    pub fn new(subject: &Subject, facts: &Facts) -> Self {
        let mut checks = memory::checks(subject, facts);
        checks.extend(locks::checks(subject, facts));
        checks.extend(machine::checks(subject, facts));
        checks.extend(disk::checks(subject, facts));
        checks.extend(device::checks(facts));
        let worst = checks.iter().map(|check| check.level).max();
        Self {
            model: subject.model.display().to_string(),
            worst: worst.unwrap_or(Level::Ok),
            checks,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.model)?;
        for check in &self.checks {
            let label = check.level.label();
            writeln!(f, "{label:<5} {:<16} {}", check.name, check.said)?;
            if let Some(fix) = &check.fix {
                writeln!(f, "{:22} -> {fix}", "")?;
            }
        }
        let count = |level| self.checks.iter().filter(|c| c.level == level).count();
        write!(
            f,
            "{} ok, {} warn, {} fail",
            count(Level::Ok),
            count(Level::Warn),
            count(Level::Fail)
        )
    }
}
