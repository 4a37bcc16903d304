//! What of memory that could not be locked was swapped out. An expert is read from the model's file in less time
//! than its pages take to come back one by one, so it is given up, and its memory with it: what the books hold is in
//! RAM.

use super::{Books, Pool, State, expert_id, holds_nothing};
use crate::store::pages::{self, PageRange};
use hotpin_controllers::ExpertId;

/// An expert of which this part or more was swapped out is given up. Less is soon back.
const GONE_PART: usize = 8;

/// An expert whose memory may have been swapped out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store::direct) struct Unlocked {
    id: ExpertId,
    slot: u32,
    pages: PageRange,
}

impl Unlocked {
    /// Whether too much of it is not in RAM. The kernel looks at each page, so no lock should be held.
    pub(in crate::store::direct) fn is_gone(&self, scratch: &mut Vec<u8>) -> bool {
        let all = self.pages.len() / pages::page_bytes();
        let resident = pages::resident_pages(self.pages, scratch).unwrap_or(all);
        (all - resident) * GONE_PART > all
    }
}

impl Books {
    /// Experts at rest whose memory is not locked.
    pub(in crate::store::direct) fn unlocked(&self) -> Vec<Unlocked> {
        let experts = (0..self.states.len()).filter(|&index| self.states[index] == State::Transit);
        let unlocked = |index: usize| {
            let (id, slot) = (expert_id(index), self.slots[index]);
            let arena = &self.pools[usize::from(self.classes[index])].arena;
            let bytes = usize::try_from(self.bytes[index]).unwrap_or(usize::MAX);
            let pages = PageRange::inner(arena.address(slot), bytes.min(arena.slot_bytes()));
            let may_go = self.rests(index) && !arena.is_locked(slot);
            may_go.then_some(Unlocked { id, slot, pages })
        };
        experts.filter_map(unlocked).collect()
    }

    /// Gives an expert up, and its memory. Returns its bytes; 0 where it has been moved or used meanwhile.
    pub(in crate::store::direct) fn give_up(&mut self, unlocked: &Unlocked) -> u64 {
        let index = unlocked.id.index();
        let is_there = self.states[index] == State::Transit && self.slots[index] == unlocked.slot;
        if !is_there || !self.rests(index) || self.is_held() {
            return 0;
        }
        self.drop_expert(unlocked.id);
        let Pool { arena, owners, .. } = &mut self.pools[usize::from(self.classes[index])];
        arena.release(unlocked.slot, |slot| holds_nothing(owners, slot));
        self.bytes[index]
    }
}
