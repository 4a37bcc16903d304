//! A buffered reader that knows the file's length and its own position, so that nothing is read,
//! skipped or allocated beyond the file, and every error can say where it happened.

use super::error::ModelError;
use std::io::{BufReader, ErrorKind, Read, Seek};
use std::path::{Path, PathBuf};

/// A header may not reach beyond this offset (1 GiB; the largest real ones are tens of MiB).
pub const MAX_HEADER_BYTES: u64 = 1 << 30;

const BUFFER_BYTES: usize = 64 << 10;

/// The bounded reader.
#[derive(Debug)]
pub(super) struct Source<R> {
    inner: BufReader<R>,
    path: PathBuf,
    position: u64,
    file_bytes: u64,
}

impl<R: Read + Seek> Source<R> {
    /// Reads `inner` from its start; `file_bytes` is its length.
    pub(super) fn new(inner: R, path: &Path, file_bytes: u64) -> Self {
        // A small file needs no larger buffer than itself.
        let buffer = usize::try_from(file_bytes).map_or(BUFFER_BYTES, |n| n.clamp(1, BUFFER_BYTES));
        Self {
            inner: BufReader::with_capacity(buffer, inner),
            path: path.to_owned(),
            position: 0,
            file_bytes,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    fn remaining(&self) -> u64 {
        self.file_bytes.saturating_sub(self.position)
    }

    /// Refuses `count` items of at least `item_bytes` each that cannot all be in the file.
    pub(super) fn check_room(
        &self,
        count: u64,
        item_bytes: u64,
        what: &str,
    ) -> Result<(), ModelError> {
        let bytes = count.saturating_mul(item_bytes);
        if bytes > self.remaining() {
            return Err(self.truncated(what, bytes));
        }
        if self.position.saturating_add(bytes) > MAX_HEADER_BYTES {
            return Err(ModelError::Limit {
                path: self.path.clone(),
                offset: self.position,
                what: format!("the end of the header (at {what})"),
                value: self.position.saturating_add(bytes),
                limit: MAX_HEADER_BYTES,
            });
        }
        Ok(())
    }

    /// The next `N` bytes.
    pub(super) fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ModelError> {
        let mut out = [0u8; N];
        self.fill(&mut out, what)?;
        Ok(out)
    }

    /// Fills `out` with the next bytes.
    pub(super) fn fill(&mut self, out: &mut [u8], what: &str) -> Result<(), ModelError> {
        let len = out.len() as u64;
        self.check_room(len, 1, what)?;
        match self.inner.read_exact(out) {
            Ok(()) => {
                self.position += len;
                Ok(())
            }
            // The file shrank since it was opened.
            Err(source) if source.kind() == ErrorKind::UnexpectedEof => {
                Err(self.truncated(what, len))
            }
            Err(source) => Err(ModelError::Io {
                path: self.path.clone(),
                action: "read the header",
                source,
            }),
        }
    }

    /// Passes over `count` bytes.
    pub(super) fn skip(&mut self, count: u64, what: &str) -> Result<(), ModelError> {
        self.check_room(count, 1, what)?;
        let step = i64::try_from(count).map_err(|_| self.truncated(what, count))?;
        self.inner
            .seek_relative(step)
            .map_err(|source| ModelError::Io {
                path: self.path.clone(),
                action: "seek in the header",
                source,
            })?;
        self.position += count;
        Ok(())
    }

    /// A little-endian 32-bit number.
    pub(super) fn u32(&mut self, what: &str) -> Result<u32, ModelError> {
        Ok(u32::from_le_bytes(self.bytes(what)?))
    }

    /// A little-endian 64-bit number.
    pub(super) fn u64(&mut self, what: &str) -> Result<u64, ModelError> {
        Ok(u64::from_le_bytes(self.bytes(what)?))
    }

    /// A text of at most `limit_bytes`, read into `out`.
    pub(super) fn text_into(
        &mut self,
        out: &mut Vec<u8>,
        limit_bytes: u64,
        what: &str,
    ) -> Result<(), ModelError> {
        let at = self.position;
        let length = self.u64(what)?;
        if length > limit_bytes {
            return Err(ModelError::Limit {
                path: self.path.clone(),
                offset: at,
                what: format!("the length of {what}"),
                value: length,
                limit: limit_bytes,
            });
        }
        self.check_room(length, 1, what)?;
        out.clear();
        // At most `limit_bytes`, a small constant, and no more than the file still has.
        out.resize(usize::try_from(length).unwrap_or(0), 0);
        self.fill(out, what)
    }

    /// The error for an item of `bytes` bytes at the current position that the file does not have.
    pub(super) fn truncated(&self, what: &str, bytes: u64) -> ModelError {
        ModelError::Truncated {
            path: self.path.clone(),
            offset: self.position,
            what: what.to_owned(),
            needed_bytes: self.position.saturating_add(bytes),
            file_bytes: self.file_bytes,
        }
    }

    /// The error for something wrong at `offset`.
    pub(super) fn bad(&self, offset: u64, what: String) -> ModelError {
        ModelError::Header {
            path: self.path.clone(),
            offset,
            what,
            fix: "the file is corrupt or made by a broken converter: download or convert it again",
        }
    }

    /// The error for a count beyond its limit.
    pub(super) fn beyond(&self, offset: u64, what: &str, value: u64, limit: u64) -> ModelError {
        ModelError::Limit {
            path: self.path.clone(),
            offset,
            what: what.to_owned(),
            value,
            limit,
        }
    }
}
