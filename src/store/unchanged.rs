//! Whether a model's files are still what they were when their headers were read.

use crate::model::{FileIdentity, Shard};
use std::fs::{File, Metadata};
use std::io;
use std::path::PathBuf;

/// What a file was when its header was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    path: PathBuf,
    identity: FileIdentity,
    bytes: u64,
}

impl Stamp {
    /// The stamp of a shard that was opened once more.
    ///
    /// # Errors
    /// When it is not the file that the header was read from, or that has changed since.
    pub(super) fn new(shard: &Shard, file: &File) -> io::Result<Self> {
        let stamp = Self {
            path: shard.path.clone(),
            identity: shard.identity,
            bytes: shard.file_bytes,
        };
        stamp.check(file).map_err(io::Error::other)?;
        Ok(stamp)
    }

    fn fits(&self, metadata: &Metadata) -> bool {
        FileIdentity::of(metadata) == self.identity && metadata.len() == self.bytes
    }

    /// Fails when the open file has changed since its header was read.
    ///
    /// # Errors
    /// In words for the user.
    pub(super) fn check(&self, file: &File) -> Result<(), String> {
        let path = self.path.display();
        match file.metadata() {
            Ok(metadata) if self.fits(&metadata) => Ok(()),
            Ok(metadata) => Err(format!(
                "{path} has changed while it was in use ({} bytes then, {} now); start again",
                self.bytes,
                metadata.len()
            )),
            Err(error) => Err(format!("{path}: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom, Write};

    fn shard(path: &std::path::Path) -> Shard {
        let metadata = std::fs::metadata(path).unwrap();
        Shard {
            path: path.to_owned(),
            identity: FileIdentity::of(&metadata),
            file_bytes: metadata.len(),
            data_offset: 0,
        }
    }

    #[test]
    fn every_change_of_the_contents_is_seen_and_a_new_name_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m");
        std::fs::write(&path, [7; 100]).unwrap();
        let shard = shard(&path);
        let file = File::open(&path).unwrap();
        let stamp = Stamp::new(&shard, &file).unwrap();
        std::fs::rename(&path, folder.path().join("n")).unwrap();
        assert_eq!(stamp.check(&file), Ok(()));
        std::fs::remove_file(folder.path().join("n")).unwrap();
        assert_eq!(stamp.check(&file), Ok(()), "unlinked, and all there");
        // Another file of the same size in its place.
        std::fs::write(&path, [8; 100]).unwrap();
        assert_eq!(stamp.check(&file), Ok(()));
        let other = File::open(&path).unwrap();
        let error = Stamp::new(&shard, &other).unwrap_err().to_string();
        assert!(error.contains("has changed"), "{error}");
    }

    #[test]
    fn writing_and_cutting_are_told_apart_by_their_sizes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m");
        std::fs::write(&path, [7; 100]).unwrap();
        // Longer ago than the clock of file times is coarse.
        let then = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
        let mut file = File::options().read(true).write(true).open(&path).unwrap();
        file.set_modified(then).unwrap();
        let stamp = Stamp::new(&shard(&path), &file).unwrap();
        file.seek(SeekFrom::Start(10)).unwrap();
        file.write_all(&[9]).unwrap();
        let error = stamp.check(&file).unwrap_err();
        assert!(error.contains("100 bytes then, 100 now"), "{error}");
        file.set_len(40).unwrap();
        let error = stamp.check(&file).unwrap_err();
        assert!(error.contains("100 bytes then, 40 now"), "{error}");
    }
}
