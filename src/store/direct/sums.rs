//! Check sums of what the file has in each slice: the second path of `--verify`. A slice is read once, through the
//! page cache; after that every fetch of it is compared at the speed of memory.

use super::geometry::Geometry;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

/// Bytes read at a time.
const PIECE_BYTES: usize = 256 << 10;

/// CRC-32 of each slice, as far as it was asked for.
#[derive(Debug)]
pub(super) struct Sums(Vec<OnceLock<u32>>);

impl Sums {
    /// None taken yet.
    pub(super) fn new(geometry: &Geometry) -> Self {
        let slices = geometry.shape.total_experts() * geometry.most_parts;
        Self((0..slices).map(|_| OnceLock::new()).collect())
    }

    /// The sum of a slice by its number, which is `len` bytes at `offset` of `file`.
    ///
    /// # Errors
    /// When the file cannot be read there.
    pub(super) fn expected(
        &self,
        slice: usize,
        file: &File,
        (offset, len): (u64, usize),
    ) -> io::Result<u32> {
        let sum = &self.0[slice];
        if let Some(known) = sum.get() {
            return Ok(*known);
        }
        let mut hasher = crc32fast::Hasher::new();
        let mut piece = vec![0; PIECE_BYTES.min(len)];
        let mut done = 0;
        while done < len {
            let piece = &mut piece[..PIECE_BYTES.min(len - done)];
            file.read_exact_at(piece, offset + done as u64)?;
            hasher.update(piece);
            done += piece.len();
        }
        Ok(*sum.get_or_init(|| hasher.finalize()))
    }
}
