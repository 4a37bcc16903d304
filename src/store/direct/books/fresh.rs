//! Memory that is taken for the first time, or again after it was given back. How much of it there may be is
//! said anew at each look at what the machine has left: the budget is as old as the last tick, and whoever else
//! takes memory since then would find it gone twice. What may not be taken fresh comes from an eviction, which
//! leaves its memory.

use super::{Books, NO_EXPERT, Pool};
use hotpin_controllers::ExpertId;

impl Pool {
    /// Whether a slot has all of its memory.
    pub(super) fn is_backed(&self, slot: u32) -> bool {
        self.arena.lacking(slot).is_none()
    }

    /// Slots without an expert that have memory, lowest first.
    fn backed(&self) -> impl Iterator<Item = u32> {
        let ready = self.next..self.ready;
        let free = self.free.iter().copied().chain(ready);
        free.filter(|&slot| self.is_backed(slot))
    }

    /// Counts a slot among those that have been used. False when somebody is in it.
    pub(super) fn open(&mut self, slot: u32) -> bool {
        debug_assert!((slot as usize) < self.arena.slots());
        while self.next <= slot {
            self.free.insert(self.next);
            self.owners.push(NO_EXPERT);
            self.next += 1;
        }
        self.free.remove(&slot)
    }

    /// The slot to take next: the lowest, which keeps the arena short, or the lowest that has memory.
    pub(super) fn next_slot(&self, may_be_fresh: bool) -> u32 {
        let lowest = self.free.first().copied().unwrap_or(self.next);
        if may_be_fresh {
            return lowest;
        }
        self.backed().next().unwrap_or(lowest)
    }
}

impl Books {
    /// Lets so many bytes of fresh memory be taken until this is said again.
    pub(in crate::store::direct) fn allow_fresh(&mut self, bytes: u64) {
        self.fresh_bytes = bytes;
    }

    /// Whether the next slot of a class may be one without memory.
    pub(super) fn affords_fresh(&self, class: usize) -> bool {
        self.fresh_slots(class) > 0
    }

    fn fresh_slots(&self, class: usize) -> usize {
        let slot_bytes = self.pools[class].arena.slot_bytes().max(1) as u64;
        usize::try_from(self.fresh_bytes / slot_bytes).unwrap_or(usize::MAX)
    }

    /// Of `wanted` slots of a class, how many can only be had by evicting somebody.
    pub(super) fn lacking_slots(&self, class: usize, wanted: usize) -> usize {
        let lacking = wanted.saturating_sub(self.fresh_slots(class));
        lacking - self.pools[class].backed().take(lacking).count()
    }

    /// Whether the class of an expert has room within its budget.
    pub(in crate::store::direct) fn has_budget(&self, id: ExpertId) -> bool {
        let pool = &self.pools[usize::from(self.classes[id.index()])];
        pool.used < pool.budget
    }

    /// The same, and in memory.
    pub(in crate::store::direct) fn has_room(&self, id: ExpertId) -> bool {
        let class = usize::from(self.classes[id.index()]);
        self.has_budget(id) && self.lacking_slots(class, 1) == 0
    }

    /// Takes a slot into use, and counts what memory is fresh.
    pub(super) fn take(&mut self, class: usize, slot: u32) {
        let arena = &mut self.pools[class].arena;
        let before_bytes = arena.memory_bytes();
        arena.take(slot, self.may_pin);
        let fresh_bytes = arena.memory_bytes() - before_bytes;
        self.fresh_bytes = self.fresh_bytes.saturating_sub(fresh_bytes);
    }
}
