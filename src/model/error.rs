//! Everything that can be wrong with a model file, each told with the path, the place and the way
//! out.

use std::path::PathBuf;

/// Why a model could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The operating system refused an operation.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The path is a directory, a pipe, a device or the like.
    #[error("{}: this is a {found}, not a model file; pass the path of a .gguf file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// The file does not start with GGUF's magic.
    #[error("{}: this is not a GGUF file but {found}; {fix}", path.display())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// What it looks like.
        found: &'static str,
        /// What to do.
        fix: &'static str,
    },
    /// A GGUF version or byte order that is not read here.
    #[error("{}, byte 4: {what}; versions 2 and 3 in little-endian order are read: convert the model again with a current converter", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// What was found.
        what: String,
    },
    /// The file ends before what its header promises.
    #[error(
        "{}, byte {offset}: {what} needs the file to have at least {needed_bytes} bytes, but it has \
         {file_bytes}; it is truncated or corrupt: complete or repeat the download",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Where the missing item starts, bytes.
        offset: u64,
        /// The missing item.
        what: String,
        /// Bytes that the file would have to have.
        needed_bytes: u64,
        /// Bytes that it has.
        file_bytes: u64,
    },
    /// A number in the header is beyond what any real model has.
    #[error(
        "{}, byte {offset}: {what} is {value}, and at most {limit} is accepted; the header is corrupt: \
         repeat the download",
        path.display()
    )]
    Limit {
        /// The file.
        path: PathBuf,
        /// Where the number stands, bytes.
        offset: u64,
        /// What it counts.
        what: String,
        /// Its value.
        value: u64,
        /// The largest accepted value.
        limit: u64,
    },
    /// The header contradicts itself or the format.
    #[error("{}, byte {offset}: {what}; {fix}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Where, bytes.
        offset: u64,
        /// What is wrong.
        what: String,
        /// What to do.
        fix: &'static str,
    },
    /// The header is sound GGUF, but not a language model's that can be mapped.
    #[error("{}: {what}; {fix}", path.display())]
    Model {
        /// The file (the first shard of a split model).
        path: PathBuf,
        /// What is wrong.
        what: String,
        /// What to do.
        fix: &'static str,
    },
    /// A shard was given that is not the first.
    #[error(
        "{}: this is shard {number} of {count}; pass the first shard{}",
        path.display(),
        first.as_ref().map(|first| format!(": {}", first.display())).unwrap_or_default()
    )]
    NotFirstShard {
        /// The shard given.
        path: PathBuf,
        /// Its number, from 1.
        number: u64,
        /// Shards in all.
        count: u64,
        /// The first shard, if the file's name tells it.
        first: Option<PathBuf>,
    },
    /// A shard's name does not say where its siblings are.
    #[error(
        "{}: the header says this is shard 1 of {count}, but the name does not end in \
         {expected_suffix}, so the other shards cannot be found; rename the shards back",
        path.display()
    )]
    ShardName {
        /// The shard given.
        path: PathBuf,
        /// Shards in all.
        count: u64,
        /// How the name would have to end.
        expected_suffix: String,
    },
    /// A shard is absent.
    #[error(
        "{}: shard {number} of {count} is missing{}; put all shards into one directory",
        path.display(),
        also.as_ref().map(|also| format!(" (nor is it at {})", also.display())).unwrap_or_default()
    )]
    MissingShard {
        /// Where it was looked for.
        path: PathBuf,
        /// Where else it was looked for.
        also: Option<PathBuf>,
        /// Its number, from 1.
        number: u64,
        /// Shards in all.
        count: u64,
    },
    /// A shard is not the one that its name says.
    #[error(
        "{}: expected shard {number} of {count} by its name, but {what}; the shards are swapped or \
         from different models: download them again",
        path.display()
    )]
    WrongShard {
        /// The shard.
        path: PathBuf,
        /// Its number by name, from 1.
        number: u64,
        /// Shards in all.
        count: u64,
        /// What its header says instead.
        what: String,
    },
}

/// A name from a file made safe to print: control characters escaped, cut at 80 characters.
pub(crate) fn shown(name: &str) -> String {
    const LONGEST: usize = 80;
    let mut out: String = name
        .chars()
        .take(LONGEST)
        .flat_map(char::escape_debug)
        .collect();
    if name.chars().nth(LONGEST).is_some() {
        out.push_str("...");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn hostile_names_are_escaped_and_cut() {
        assert_eq!(shown("blk.0.ffn_up_exps"), "blk.0.ffn_up_exps");
        assert_eq!(shown("a\u{1b}[31m\n"), "a\\u{1b}[31m\\n");
        assert!(shown(&"x".repeat(5000)).len() < 100);
    }
}
