//! What a bench will do, checked before anything runs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::protocol::{Task, WorkloadText};

/// Policies in the order that help and errors list them.
pub const POLICIES: [&str; 5] = ["off", "fetch", "static", "lru", "adaptive"];
/// The policy that the others are compared with, when it runs.
pub const BASELINE: &str = "off";

/// Why a workload cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// A file or directory could not be read or written.
    #[error("cannot use {}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Nothing there.
    #[error("{} holds no NAME.txt", dir.display())]
    NoTexts {
        /// The directory.
        dir: PathBuf,
    },
    /// A domain that is not there.
    #[error("no domain `{name}`; there are: {}", known.join(", "))]
    UnknownDomain {
        /// What was asked for.
        name: String,
        /// What there is.
        known: Vec<String>,
    },
    /// A domain asked for twice.
    #[error("domain `{name}` is asked for twice")]
    Twice {
        /// Its name.
        name: String,
    },
    /// A text with nothing in it.
    #[error("{} is empty", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// A checked bench.
#[derive(Debug)]
pub struct Plan {
    /// The model as it was given.
    pub model: PathBuf,
    /// All files of the model.
    pub shards: Vec<PathBuf>,
    /// Their bytes.
    pub model_bytes: u64,
    /// What a child decodes.
    pub task: Task,
    /// Texts, for [`Task::Forced`].
    pub workload: Vec<WorkloadText>,
    /// Chunks of each text, for [`Task::Perplexity`].
    pub chunks: Option<u32>,
    /// Prompts, for [`Task::Generate`].
    pub prompts: Vec<String>,
    /// Tokens decoded before those of each text, not timed.
    pub warmup_tokens: u32,
    /// Tokens for each text or prompt.
    pub tokens: u32,
    /// Limit of each run in bytes.
    pub memory_bytes: Option<u64>,
    /// Policies to compare, in the order asked.
    pub policies: Vec<String>,
    /// Store, as asked.
    pub store: String,
    /// Profile for policies that start from one.
    pub profile: Option<PathBuf>,
    /// Runs of each policy.
    pub repeats: u32,
    /// Compute threads.
    pub threads: u32,
    /// Bound of one run.
    pub timeout: Duration,
    /// Directory for traces.
    pub record: Option<PathBuf>,
    /// Directory for journals.
    pub journal: Option<PathBuf>,
    /// Leave the model in the page cache between runs.
    pub warm: bool,
    /// Run without a limit where no cgroup can be made.
    pub no_cgroup: bool,
    /// Show the children's stderr.
    pub verbose: bool,
    /// Engine settings passed on to the children.
    pub engine: serde_json::Value,
}

/// One run of the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Index into the policies.
    pub policy: usize,
    /// Repeat, from 0.
    pub repeat: u32,
}

/// The order of runs: A B C, C B A, A B C, ... so that a machine that slowly gets warmer, fuller or
/// busier does not favour a policy.
#[must_use]
pub fn schedule(policies: usize, repeats: u32) -> Vec<Slot> {
    let mut slots = Vec::new();
    for repeat in 0..repeats {
        let forward = (0..policies).map(|policy| Slot { policy, repeat });
        if repeat % 2 == 0 {
            slots.extend(forward);
        } else {
            slots.extend(forward.rev());
        }
    }
    slots
}

/// Takes texts from a directory of `NAME.txt`: the domains asked for in that order, or all of them
/// alphabetically.
///
/// # Errors
/// [`WorkloadError`].
pub fn read_workload(dir: &Path, domains: &[String]) -> Result<Vec<WorkloadText>, WorkloadError> {
    let failed = |path: &Path, source| WorkloadError::Io {
        path: path.to_path_buf(),
        source,
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(|error| failed(dir, error))? {
        let path = entry.map_err(|error| failed(dir, error))?.path();
        let is_text = path.extension().is_some_and(|extension| extension == "txt");
        if let Some(name) = path.file_stem().and_then(|stem| stem.to_str())
            && is_text
        {
            found.push(WorkloadText {
                name: name.to_owned(),
                path,
            });
        }
    }
    if found.is_empty() {
        return Err(WorkloadError::NoTexts {
            dir: dir.to_path_buf(),
        });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    let chosen = if domains.is_empty() {
        found
    } else {
        pick(&found, domains)?
    };
    for text in &chosen {
        let bytes = fs::metadata(&text.path)
            .map_err(|error| failed(&text.path, error))?
            .len();
        if bytes == 0 {
            return Err(WorkloadError::Empty {
                path: text.path.clone(),
            });
        }
    }
    Ok(chosen)
}

fn pick(found: &[WorkloadText], domains: &[String]) -> Result<Vec<WorkloadText>, WorkloadError> {
    let mut chosen: Vec<WorkloadText> = Vec::new();
    for name in domains {
        if chosen.iter().any(|text| &text.name == name) {
            return Err(WorkloadError::Twice { name: name.clone() });
        }
        let text = found
            .iter()
            .find(|text| &text.name == name)
            .ok_or_else(|| {
                let known = found.iter().map(|text| text.name.clone()).collect();
                WorkloadError::UnknownDomain {
                    name: name.clone(),
                    known,
                }
            })?;
        chosen.push(text.clone());
    }
    Ok(chosen)
}

/// Writes built-in texts as a workload directory.
///
/// # Errors
/// [`WorkloadError::Io`].
pub fn write_workload(dir: &Path, texts: &[(&str, &str)]) -> Result<(), WorkloadError> {
    for (name, text) in texts {
        let path = dir.join(format!("{name}.txt"));
        fs::write(&path, text).map_err(|source| WorkloadError::Io { path, source })?;
    }
    Ok(())
}

/// Reads prompts from a file, one a line; empty lines are skipped.
///
/// # Errors
/// [`WorkloadError`].
pub fn read_prompts(path: &Path) -> Result<Vec<String>, WorkloadError> {
    let text = fs::read_to_string(path).map_err(|source| WorkloadError::Io {
        path: path.to_path_buf(),
        source,
    })?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let prompts: Vec<String> = lines.map(str::to_owned).collect();
    if prompts.is_empty() {
        return Err(WorkloadError::Empty {
            path: path.to_path_buf(),
        });
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_second_repeat_runs_backwards() {
        let order: Vec<usize> = schedule(3, 3).iter().map(|slot| slot.policy).collect();
        assert_eq!(order, [0, 1, 2, 2, 1, 0, 0, 1, 2]);
        assert_eq!(
            schedule(2, 2)[2],
            Slot {
                policy: 1,
                repeat: 1
            }
        );
        assert!(schedule(0, 5).is_empty());
    }

    #[test]
    fn domains_come_alphabetically_or_as_asked() {
        let dir = tempfile::tempdir().expect("dir");
        write_workload(dir.path(), &[("zh", "x"), ("prose", "x"), ("empty", "")]).expect("texts");
        fs::write(dir.path().join("notes.md"), "x").expect("write");
        let check = |domains: &[&str], expect: Result<&[&str], &str>| {
            let domains: Vec<String> = domains.iter().map(|d| (*d).to_owned()).collect();
            match (read_workload(dir.path(), &domains), expect) {
                (Ok(texts), Ok(names)) => {
                    let got: Vec<&str> = texts.iter().map(|t| t.name.as_str()).collect();
                    assert_eq!(got, names);
                }
                (Err(error), Err(part)) => {
                    assert!(error.to_string().contains(part), "{error}");
                }
                (got, expect) => panic!("{got:?} where {expect:?} was expected"),
            }
        };
        check(&["zh", "prose"], Ok(&["zh", "prose"]));
        check(&[], Err("empty.txt is empty"));
        check(&["rust"], Err("there are: empty, prose, zh"));
        check(&["../zh"], Err("no domain `../zh`"));
        check(&["zh", "zh"], Err("twice"));
    }

    #[test]
    fn prompts_are_lines() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("p.txt");
        fs::write(&path, "One?\n\n  Two. \n").expect("write");
        assert_eq!(read_prompts(&path).expect("prompts"), ["One?", "Two."]);
        fs::write(&path, "\n").expect("write");
        assert!(read_prompts(&path).is_err());
    }
}
