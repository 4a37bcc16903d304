//! One part of one expert: asked for, brought to its place, compared with the file.

use super::reader::{Read, Reader};
use super::{DirectStore, Fault};
use hotpin_controllers::ExpertId;

impl DirectStore {
    /// Queues the read of one part of an expert into its slot at `address`. Returns the slice's
    /// bytes.
    pub(super) fn queue(
        &self,
        reader: &mut Reader,
        id: ExpertId,
        part: usize,
        address: usize,
    ) -> u64 {
        let extent = self.geometry.extent(id, part);
        let read = Read {
            owner: (id.0, u8::try_from(part).unwrap_or(u8::MAX)),
            shard: extent.shard,
            offset: extent.offset,
            address: address + extent.at,
            len: extent.len,
            least: extent.skip + extent.slice_bytes,
        };
        // SAFETY: the range lies in a slot that the books gave to this expert for loading; nobody
        // else reads or writes it before the expert is marked as loaded, and the arena outlives
        // the readers.
        unsafe { reader.push(read) };
        extent.slice_bytes as u64
    }

    /// Takes in a part that was just read: brings it to its tensor's phase and, where that is asked
    /// for, compares it with the file.
    ///
    /// # Errors
    /// In words, when it is not what the file has.
    pub(super) fn settle(&self, id: ExpertId, part: usize, address: usize) -> Result<(), String> {
        let extent = self.geometry.extent(id, part);
        let (from, to) = (address + extent.at + extent.skip, address + extent.slice_at);
        if from != to {
            // SAFETY: both ranges lie in the part's area of a slot that is being loaded, so that the
            // books leave it where it is.
            unsafe {
                std::ptr::copy(from as *const u8, to as *mut u8, extent.slice_bytes);
            }
        }
        if self.options.fault == Some(Fault::BitFlip) {
            // SAFETY: as above.
            unsafe { *(to as *mut u8) ^= 1 };
        }
        if self.options.verify {
            self.check(id, part, address)?;
        }
        Ok(())
    }

    /// Compares a slice in memory with what the file has, by their check sums.
    pub(super) fn check(&self, id: ExpertId, part: usize, address: usize) -> Result<(), String> {
        let extent = self.geometry.extent(id, part);
        let offset = extent.offset + extent.skip as u64;
        let file = &self.files.shards[extent.shard].cached;
        let expected = self
            .sums
            .expected(
                self.geometry.slice(id, part),
                file,
                (offset, extent.slice_bytes),
            )
            .map_err(|e| format!("verifying at offset {offset}: {e}"))?;
        // SAFETY: the slice lies in the expert's slot, and no read into it is outstanding.
        let found = unsafe {
            std::slice::from_raw_parts((address + extent.slice_at) as *const u8, extent.slice_bytes)
        };
        if crc32fast::hash(found) == expected {
            return Ok(());
        }
        let (layer, index) = self.geometry.shape.place(id);
        Err(format!(
            "expert {index} of MoE layer {layer}, part {part}: what is in memory is not what the file has at offset {offset}"
        ))
    }
}
