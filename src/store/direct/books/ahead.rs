//! Memory that is made ready before a slot is used for the first time. Zeroing and locking it takes as long as
//! reading an expert, and longer where a virtual machine's host has to find it first; so the governor's side does
//! it, outside the lock.

use super::Books;
use nix::errno::Errno;

/// Memory that is ready beyond what is in use, unless two slots have more.
const AHEAD_BYTES: usize = 128 << 20;
const LEAST_AHEAD: usize = 2;

/// A slot that lacks memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store::direct) struct Unready {
    class: usize,
    slot: u32,
    address: usize,
    len: usize,
}

impl Unready {
    /// Has the kernel find the memory. What is in it, if somebody uses it by now, stays as it is.
    ///
    /// # Errors
    /// When there is none, or the kernel knows no such advice (before Linux 5.14).
    pub(in crate::store::direct) fn populate(self) -> Result<(), Errno> {
        let address = self.address as *mut libc::c_void;
        // SAFETY: inside an arena's own mapping; the advice changes no byte that was written.
        let done = unsafe { libc::madvise(address, self.len, libc::MADV_POPULATE_WRITE) };
        Errno::result(done).map(drop)
    }
}

impl Books {
    /// The memory to make ready next; `None` when there is enough for now.
    pub(in crate::store::direct) fn unready(&self) -> Option<Unready> {
        self.pools.iter().enumerate().find_map(|(class, pool)| {
            let slot_bytes = pool.arena.slot_bytes();
            let ahead = (AHEAD_BYTES / slot_bytes.max(1)).max(LEAST_AHEAD);
            let most = (pool.used + ahead).min(pool.budget);
            if pool.arena.memory_bytes() >= (most * slot_bytes) as u64 {
                return None;
            }
            let end = u32::try_from(pool.budget).unwrap_or(u32::MAX);
            let slots = pool.free.iter().copied().chain(pool.next..end);
            let (slot, (address, len)) = slots
                .filter(|&slot| slot < end)
                .find_map(|slot| Some((slot, pool.arena.lacking(slot)?)))?;
            (len as u64 <= self.fresh_bytes).then_some(Unready {
                class,
                slot,
                address,
                len,
            })
        })
    }

    /// Takes memory into the books that was made ready, or gives it back if it is no longer wanted.
    pub(in crate::store::direct) fn ready(&mut self, made: Unready) {
        if (made.slot as usize) < self.pools[made.class].budget {
            self.take(made.class, made.slot);
            let pool = &mut self.pools[made.class];
            pool.ready = pool.ready.max(made.slot + 1);
        } else {
            self.pools[made.class].arena.forget(made.slot);
        }
    }
}
