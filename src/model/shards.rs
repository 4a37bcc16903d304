//! The files of a model: one, or shards named `NAME-00001-of-00003.gguf`.
//!
//! A shard's siblings are looked for beside the path as it was given, then, when that was a symbolic
//! link, beside what it points to.

use super::error::ModelError;
use super::gguf::{self, Header};
use std::path::{Path, PathBuf};

/// Most shards of one model.
pub const MAX_SHARDS: u64 = 4096;

const KEY_SHARD_COUNT: &str = "split.count";
const KEY_SHARD_NUMBER: &str = "split.no";
const KEY_ALL_TENSORS: &str = "split.tensors.count";
const RECONVERT: &str = "download the model again, or split it again with a current gguf-split";

/// Reads the headers of all files of the model at `path`, in shard order.
///
/// The first header's path is the one to load the model from.
///
/// # Errors
/// When a file cannot be read (see [`gguf::read_file`]), `path` is a shard other than the first, or
/// a shard is missing or not the one its name says.
pub fn read_all(path: &Path, keep: fn(&str) -> bool) -> Result<Vec<Header>, ModelError> {
    let first = gguf::read_file(path, keep)?;
    let count = first.metadata.uint(KEY_SHARD_COUNT)?.unwrap_or(1);
    if count <= 1 {
        return Ok(vec![first]);
    }
    if count > MAX_SHARDS {
        return Err(ModelError::Model {
            path: path.to_owned(),
            what: format!(
                "the header says that there are {count} shards, and at most {MAX_SHARDS} are read"
            ),
            fix: RECONVERT,
        });
    }
    check_is_first(&first, count)?;
    let paths = locate(path, count)?;
    let mut tensors = first.tensors.len() as u64;
    let mut headers = vec![first];
    headers[0].path.clone_from(&paths[0]);
    for (index, path) in paths.iter().enumerate().skip(1) {
        let header = gguf::read_file(path, keep)?;
        check_sibling(&headers, &header, index as u64, count)?;
        tensors = tensors.saturating_add(header.tensors.len() as u64);
        if tensors > gguf::MAX_TENSORS {
            return Err(ModelError::Model {
                path: path.clone(),
                what: format!(
                    "the shards up to this one hold {tensors} tensors, and at most {} are read",
                    gguf::MAX_TENSORS
                ),
                fix: RECONVERT,
            });
        }
        headers.push(header);
    }
    check_tensor_count(&headers)?;
    Ok(headers)
}

fn check_is_first(header: &Header, count: u64) -> Result<(), ModelError> {
    match header.metadata.uint(KEY_SHARD_NUMBER)? {
        Some(0) => Ok(()),
        Some(index) => Err(ModelError::NotFirstShard {
            path: header.path.clone(),
            number: index.saturating_add(1),
            count,
            first: first_of(&header.path, index, count),
        }),
        None => Err(ModelError::Model {
            path: header.path.clone(),
            what: format!(
                "the header says that there are {count} shards, but not which of them this is"
            ),
            fix: RECONVERT,
        }),
    }
}

fn suffix(index: u64, count: u64) -> String {
    format!("-{:05}-of-{count:05}.gguf", index.saturating_add(1))
}

/// The path of shard `wanted`, when `path` is named as shard `index` of `count`.
fn sibling(path: &Path, index: u64, wanted: u64, count: u64) -> Option<PathBuf> {
    let stem = path
        .file_name()?
        .to_str()?
        .strip_suffix(&suffix(index, count))?;
    Some(path.with_file_name(format!("{stem}{}", suffix(wanted, count))))
}

/// The first shard of the model that `path` belongs to, as far as names tell.
fn first_of(path: &Path, index: u64, count: u64) -> Option<PathBuf> {
    let real = std::fs::canonicalize(path).ok();
    let candidates = [Some(path), real.as_deref()];
    let named = candidates
        .iter()
        .flatten()
        .filter_map(|path| sibling(path, index, 0, count));
    let named: Vec<PathBuf> = named.collect();
    named
        .iter()
        .find(|path| path.is_file())
        .or(named.first())
        .cloned()
}

/// The paths of all shards, from a directory in which none is missing.
fn locate(path: &Path, count: u64) -> Result<Vec<PathBuf>, ModelError> {
    let real = std::fs::canonicalize(path).ok().filter(|real| real != path);
    let mut gaps: Vec<(u64, PathBuf)> = Vec::new();
    for base in [Some(path), real.as_deref()].into_iter().flatten() {
        if sibling(base, 0, 0, count).is_none() {
            continue;
        }
        let paths: Vec<PathBuf> = (0..count)
            .filter_map(|wanted| sibling(base, 0, wanted, count))
            .collect();
        match paths.iter().position(|path| !path.exists()) {
            None => return Ok(paths),
            Some(gap) => gaps.push((gap as u64, paths[gap].clone())),
        }
    }
    let mut gaps = gaps.into_iter();
    match gaps.next() {
        None => Err(ModelError::ShardName {
            path: path.to_owned(),
            count,
            expected_suffix: suffix(0, count),
        }),
        Some((index, missing)) => Err(ModelError::MissingShard {
            also: gaps
                .find(|(other, path)| *other == index && *path != missing)
                .map(|(_, path)| path),
            path: missing,
            number: index.saturating_add(1),
            count,
        }),
    }
}

fn check_sibling(
    earlier: &[Header],
    header: &Header,
    index: u64,
    count: u64,
) -> Result<(), ModelError> {
    let wrong = |what: String| ModelError::WrongShard {
        path: header.path.clone(),
        number: index.saturating_add(1),
        count,
        what,
    };
    if let Some(twin) = earlier
        .iter()
        .find(|other| other.identity == header.identity)
    {
        return Err(wrong(format!(
            "it is the same file as {}",
            twin.path.display()
        )));
    }
    match header.metadata.uint(KEY_SHARD_NUMBER)? {
        Some(number) if number == index => {}
        Some(number) => {
            return Err(wrong(format!(
                "its header says shard {}",
                number.saturating_add(1)
            )));
        }
        None => return Err(wrong("its header does not say which shard it is".into())),
    }
    match header.metadata.uint(KEY_SHARD_COUNT)? {
        Some(own) if own != count => {
            return Err(wrong(format!(
                "its header says that there are {own} shards"
            )));
        }
        _ => {}
    }
    // Later shards need not repeat the model's metadata; when they do, it must agree.
    for key in [super::KEY_ARCHITECTURE, super::KEY_NAME] {
        let (mine, theirs) = (header.metadata.text(key)?, earlier[0].metadata.text(key)?);
        if mine.is_some() && mine != theirs {
            return Err(wrong(format!(
                "its {key} is '{}' and the first shard's is '{}'",
                mine.unwrap_or_default(),
                theirs.unwrap_or_default()
            )));
        }
    }
    Ok(())
}

fn check_tensor_count(headers: &[Header]) -> Result<(), ModelError> {
    let found: usize = headers.iter().map(|header| header.tensors.len()).sum();
    match headers[0].metadata.uint(KEY_ALL_TENSORS)? {
        Some(expected) if expected != found as u64 => Err(ModelError::Model {
            path: headers[0].path.clone(),
            what: format!(
                "the header says that the shards hold {expected} tensors, but they hold {found}"
            ),
            fix: "the shards are from different models, or damaged: download them again",
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siblings_are_named_by_number() {
        let path = Path::new("/m/big-00002-of-00003.gguf");
        assert_eq!(
            sibling(path, 1, 0, 3),
            Some("/m/big-00001-of-00003.gguf".into())
        );
        assert_eq!(sibling(path, 0, 1, 3), None);
        assert_eq!(sibling(Path::new("/m/big.gguf"), 0, 1, 3), None);
        assert_eq!(sibling(Path::new("/"), 0, 1, 3), None);
    }
}
