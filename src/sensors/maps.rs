//! Number of mappings of this process.

use std::fs::File;
use std::io::Read;

use super::error::SensorError;
use super::roots::Roots;

/// Mappings that this process has now: the lines of `/proc/self/maps`. The kernel walks every
/// mapping for it, so it is not for each tick.
///
/// # Errors
/// When the file cannot be read.
pub fn map_count(roots: &Roots) -> Result<u64, SensorError> {
    const CHUNK_BYTES: usize = 64 << 10;
    let path = roots.in_proc("self/maps");
    let failed = |e| SensorError::io(&path, e);
    let mut file = File::open(&path).map_err(failed)?;
    let mut chunk = vec![0u8; CHUNK_BYTES];
    let mut lines = 0u64;
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return Ok(lines),
            Ok(n) => {
                let newlines = chunk[..n].iter().map(|&byte| u64::from(byte == b'\n'));
                lines += newlines.sum::<u64>();
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(failed(e)),
        }
    }
}
