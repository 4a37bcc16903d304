//! The machine's memory as the kernel keeps it: who claims what, reclaim, and its pressure counters.

use super::Machine;
use super::store::Store;

const PAGE_BYTES: u64 = 4096;

/// Counters that the kernel keeps, and what is left.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Memory {
    /// Bytes claimed by other processes now.
    pub others_bytes: u64,
    /// PSI `some` total, seconds.
    pub stall_s: f64,
    /// Pages reclaimed directly by allocating tasks.
    pub direct_reclaim_pages: u64,
    /// Bytes that nobody could give: the machine would swap, or kill somebody.
    pub shortage_bytes: u64,
}

impl Memory {
    /// Bytes that cannot be reclaimed besides expert pins.
    fn claimed_bytes(&self, machine: &Machine) -> u64 {
        self.others_bytes + machine.dense_bytes
    }

    /// `MemAvailable`: page cache counts, pins do not.
    pub fn host_available_bytes(&self, machine: &Machine, pinned_bytes: u64) -> u64 {
        machine
            .host_bytes
            .saturating_sub(self.claimed_bytes(machine) + pinned_bytes)
    }

    /// Limit - usage + reclaimable of our cgroup, which holds nobody else.
    pub fn cgroup_available_bytes(machine: &Machine, limit_bytes: u64, pinned_bytes: u64) -> u64 {
        limit_bytes.saturating_sub(machine.dense_bytes + pinned_bytes)
    }

    /// Makes room: background reclaim down to the watermark costs nobody time, reclaim of what is
    /// wanted at once stalls whoever asked. Transit goes by last use, behind the store's back.
    pub fn reclaim(&mut self, machine: &Machine, store: &mut Store) {
        let held_bytes = store.pinned_bytes() + store.cached_bytes();
        let used_bytes = self.claimed_bytes(machine) + held_bytes;
        let mut direct_bytes = used_bytes.saturating_sub(machine.host_bytes);
        if let Some(limit_bytes) = machine.cgroup_bytes {
            let group_bytes = machine.dense_bytes + held_bytes;
            // A cgroup has no background reclaim.
            direct_bytes = direct_bytes.max(group_bytes.saturating_sub(limit_bytes));
        }
        let watermark_bytes = machine.host_bytes / super::WATERMARK_SHARE;
        let wanted_bytes = (used_bytes + watermark_bytes)
            .saturating_sub(machine.host_bytes)
            .max(direct_bytes);
        if wanted_bytes == 0 {
            self.shortage_bytes = 0;
            return;
        }
        let freed_bytes = store.reclaim(wanted_bytes);
        let direct_freed_bytes = freed_bytes.min(direct_bytes);
        self.direct_reclaim_pages += direct_freed_bytes / PAGE_BYTES;
        self.stall_s += direct_freed_bytes as f64 / machine.reclaim_bytes_per_s;
        self.shortage_bytes = direct_bytes - direct_freed_bytes;
    }

    /// Lets `elapsed_s` pass under the present shortage: the tasks that want those bytes stall, and
    /// scan for pages that are not there.
    pub fn pass(&mut self, machine: &Machine, elapsed_s: f64) {
        let scale_bytes = machine.host_bytes as f64 * super::THRASH_SHARE;
        let share = (self.shortage_bytes as f64 / scale_bytes).min(1.0);
        self.stall_s += share * elapsed_s;
        let scanned_bytes = super::to_bytes(share * elapsed_s * machine.reclaim_bytes_per_s);
        self.direct_reclaim_pages += scanned_bytes / PAGE_BYTES;
    }
}
