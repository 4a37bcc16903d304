//! Files that are kept open and read again from their start.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::error::{ParseError, SensorError};

/// The most that is read of one file. `mountinfo` of a host with thousands of containers stays
/// below a megabyte.
pub(crate) const LARGEST_FILE_BYTES: usize = 4 << 20;

/// A buffer's first size; every file but `mountinfo` fits.
const FIRST_BUFFER_BYTES: usize = 16 << 10;

/// One file of `/proc` or `/sys`, opened at the first read and kept open.
///
/// `/proc/self` is resolved when the file is opened, so a process that forks opens its own anew.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    file: Option<File>,
}

impl Source {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, file: None }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file anew where it is open, so that the next read sees one that has been put in its place.
    /// While the path exists but cannot be opened, as where the process has no descriptor left, the open file
    /// goes on being read: a sensor is not given up for a look at whether it has moved.
    pub(crate) fn reopen(&mut self) {
        if self.file.is_none() {
            return;
        }
        match File::open(&self.path) {
            Ok(file) => self.file = Some(file),
            Err(error) if is_gone(&error) => self.file = None,
            Err(_) => {}
        }
    }

    /// Reads the whole file into `buffer`.
    ///
    /// A file that was open and fails (its cgroup has been removed and made again) is opened once
    /// more before the error counts.
    pub(crate) fn read<'b>(
        &mut self,
        buffer: &'b mut Vec<u8>,
    ) -> Result<Cow<'b, str>, SensorError> {
        let was_open = self.file.is_some();
        let length = match self.read_once(buffer) {
            Err(SensorError::Io { .. }) if was_open => self.read_once(buffer)?,
            other => other?,
        };
        Ok(String::from_utf8_lossy(&buffer[..length]))
    }

    fn read_once(&mut self, buffer: &mut Vec<u8>) -> Result<usize, SensorError> {
        let file = match self.file.take() {
            Some(file) => file,
            None => File::open(&self.path).map_err(|e| SensorError::io(&self.path, e))?,
        };
        let length = read_from_start(&file, &self.path, buffer)?;
        self.file = Some(file);
        Ok(length)
    }
}

/// Whether nothing is at the path any more.
fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

/// Fills `buffer` from offset 0 and returns how much of it is text. The buffer only grows.
fn read_from_start(file: &File, path: &Path, buffer: &mut Vec<u8>) -> Result<usize, SensorError> {
    if buffer.is_empty() {
        buffer.resize(FIRST_BUFFER_BYTES, 0);
    }
    let mut length = 0;
    loop {
        if length == buffer.len() {
            if length >= LARGEST_FILE_BYTES {
                let limit_bytes = LARGEST_FILE_BYTES;
                return Err(SensorError::TooLong {
                    path: path.to_owned(),
                    limit_bytes,
                });
            }
            buffer.resize(length * 2, 0);
        }
        match file.read_at(&mut buffer[length..], length as u64) {
            Ok(0) => return Ok(length),
            Ok(n) => length += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(SensorError::io(path, e)),
        }
    }
}

/// A source with the parser of its text.
#[derive(Debug)]
pub(crate) struct Sensor<T> {
    source: Source,
    parse: fn(&str) -> Result<T, ParseError>,
}

impl<T> Sensor<T> {
    pub(crate) fn new(path: PathBuf, parse: fn(&str) -> Result<T, ParseError>) -> Self {
        Self {
            source: Source::new(path),
            parse,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.source.path()
    }

    /// As [`Source::reopen`].
    pub(crate) fn reopen(&mut self) {
        self.source.reopen();
    }

    /// Reads and parses the file.
    pub(crate) fn read(&mut self, buffer: &mut Vec<u8>) -> Result<T, SensorError> {
        let parse = self.parse;
        let parsed = parse(&self.source.read(buffer)?);
        parsed.map_err(|e| SensorError::parse(self.source.path(), e))
    }
}

/// Reads a file once, without keeping it open.
pub(crate) fn read_once<T>(
    path: PathBuf,
    parse: fn(&str) -> Result<T, ParseError>,
) -> Result<T, SensorError> {
    Sensor::new(path, parse).read(&mut Vec::new())
}
