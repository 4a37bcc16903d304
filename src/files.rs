//! Files written whole or not at all.

use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// A temporary file is nobody's once its process is gone and it is so old.
const ABANDONED_AFTER: Duration = Duration::from_secs(60);

/// The folder that a file is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Writes a file so that a reader sees the old one or all of the new one, also after a crash of the
/// machine; makes its folder.
pub(crate) fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let dir = folder_of(path);
    std::fs::create_dir_all(dir)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    remove_abandoned(dir, &name);
    // Temporary files are private by default; a report is as open as the user's umask makes it.
    let mode = std::fs::Permissions::from_mode(0o666);
    let prefix = format!(".{name}.{}-", std::process::id());
    let mut file = tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".tmp")
        .permissions(mode)
        .tempfile_in(dir)?;
    file.write_all(text.as_bytes())?;
    // The name must not reach the disk before the contents.
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Removes what processes that were killed while they wrote `name` have left. What cannot be removed is
/// only in the way of nobody.
fn remove_abandoned(dir: &Path, name: &str) {
    let prefix = format!(".{name}.");
    let now = SystemTime::now();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let owner = file
            .to_str()
            .and_then(|file| file.strip_prefix(&prefix)?.strip_suffix(".tmp"))
            .and_then(|rest| rest.split_once('-')?.0.parse::<u32>().ok());
        let Some(owner) = owner else { continue };
        let modified = entry.metadata().and_then(|metadata| metadata.modified());
        let age = modified.map(|then| now.duration_since(then).unwrap_or_default());
        let old = age.is_ok_and(|age| age >= ABANDONED_AFTER);
        if old && !Path::new(&format!("/proc/{owner}")).exists() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap().flatten();
        let mut names: Vec<String> = entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn what_killed_writers_left_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        // No process has the largest number that fits.
        let gone = format!(".p.toml.{}-abc.tmp", u32::MAX);
        let young = format!(".p.toml.{}-new.tmp", u32::MAX);
        let ours = format!(".p.toml.{}-abc.tmp", std::process::id());
        let kept = [
            young,
            ours,
            ".other.toml.1-a.tmp".into(),
            "p.toml.old".into(),
        ];
        for name in kept.iter().chain([&gone]) {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        let then = SystemTime::now() - 2 * ABANDONED_AFTER;
        for name in kept[1..].iter().chain([&gone]) {
            let mut options = std::fs::File::options();
            let file = options.write(true).open(dir.path().join(name)).unwrap();
            file.set_modified(then).unwrap();
        }
        write_whole(&dir.path().join("p.toml"), "whole").unwrap();
        let mut expect: Vec<String> = kept.into_iter().chain(["p.toml".into()]).collect();
        expect.sort();
        assert_eq!(names(dir.path()), expect);
    }

    #[test]
    fn a_file_that_cannot_be_written_leaves_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.toml");
        write_whole(&path, "old").unwrap();
        // A folder cannot be replaced by a file.
        let folder = dir.path().join("folder");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("in it"), "x").unwrap();
        assert!(write_whole(&folder, "new").is_err());
        assert_eq!(names(dir.path()), ["folder", "p.toml"]);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
    }
}
