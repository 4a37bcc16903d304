//! One part of one expert in the mapping of its file.

use super::pages::PageRange;

/// One contiguous piece of an expert: its part of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceAt {
    /// Address in this process.
    pub address: usize,
    /// Length in bytes.
    pub len: usize,
    /// Which of the model's files.
    pub shard: usize,
    /// Offset in that file, bytes.
    pub offset: u64,
}

impl SliceAt {
    /// The pages that the slice touches.
    pub(super) fn outer(&self) -> PageRange {
        PageRange::outer(self.address, self.len)
    }

    /// The pages that hold nothing but this slice.
    pub(super) fn inner(&self) -> PageRange {
        PageRange::inner(self.address, self.len)
    }
}
