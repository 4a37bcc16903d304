//! How the records of a block are stored.

use super::TraceError;
use std::borrow::Cow;

const PLAIN: u8 = 0;
#[cfg(feature = "zstd")]
const ZSTD: u8 = 1;

/// The codec used and the bytes to store.
#[cfg(feature = "zstd")]
pub(super) fn compress(records: &[u8], level: i32) -> (u8, Cow<'_, [u8]>) {
    match zstd::bulk::compress(records, level) {
        Ok(stored) if stored.len() < records.len() => (ZSTD, Cow::Owned(stored)),
        _ => (PLAIN, Cow::Borrowed(records)),
    }
}

/// The codec used and the bytes to store.
#[cfg(not(feature = "zstd"))]
pub(super) fn compress(records: &[u8], _level: i32) -> (u8, Cow<'_, [u8]>) {
    (PLAIN, Cow::Borrowed(records))
}

/// The records of a block that begins at `offset`; there are `bytes` of them.
pub(super) fn decompress(
    codec: u8,
    stored: &[u8],
    bytes: usize,
    offset: usize,
) -> Result<Cow<'_, [u8]>, TraceError> {
    let damaged = |problem: String| TraceError::Record {
        offset,
        at: 0,
        problem,
    };
    let records = match codec {
        PLAIN => Cow::Borrowed(stored),
        #[cfg(feature = "zstd")]
        ZSTD => zstd::bulk::decompress(stored, bytes)
            .map(Cow::Owned)
            .map_err(|error| damaged(format!("zstd: {error}")))?,
        _ => return Err(TraceError::Codec { offset, codec }),
    };
    if records.len() == bytes {
        Ok(records)
    } else {
        let held = records.len();
        Err(damaged(format!(
            "{held} bytes of records where {bytes} were announced"
        )))
    }
}
