//! Everything at home: with room for all experts, each has a slot of its own, a layer's side by side
//! in their order. A layer's slots then look like the model's own tensor, and the engine may use
//! them without asking which expert is where.

use super::{Books, NO_EXPERT, NO_SLOT, State, expert_id};
use hotpin_controllers::ExpertId;

/// Bytes of experts brought home in one go, unless one has more; the lock is held meanwhile.
const MOST_HOMECOMING_BYTES: usize = 12 << 20;

impl Books {
    /// The slot that is an expert's own.
    pub(in crate::store::direct) fn home(&self, id: ExpertId) -> u32 {
        self.homes[id.index()]
    }

    /// Takes everything in use until [`Self::release`], if everything is resident and at home.
    pub(in crate::store::direct) fn hold(&mut self) -> bool {
        let over = self.pools.iter().any(|pool| pool.used > pool.budget);
        self.held = !over
            && (0..self.states.len()).all(|index| {
                matches!(self.states[index], State::Transit | State::Pinned)
                    && self.slots[index] == self.homes[index]
            });
        self.held
    }

    /// Ends what [`Self::hold`] began.
    pub(in crate::store::direct) fn release(&mut self) {
        self.held = false;
    }

    /// Whether nothing may be evicted or moved now.
    pub(super) const fn is_held(&self) -> bool {
        self.held
    }

    /// The slot for an expert that is to be read: its own where there is room for all of its class
    /// and nobody else is in it.
    pub(super) fn own_slot(&self, id: ExpertId) -> Option<u32> {
        let home = self.home(id);
        let class = usize::from(self.classes[id.index()]);
        let may_be_fresh = self.affords_fresh(class);
        let pool = &self.pools[class];
        if pool.budget < pool.arena.slots() || !(may_be_fresh || pool.is_backed(home)) {
            return None;
        }
        let is_free = pool
            .owners
            .get(home as usize)
            .is_none_or(|&owner| owner == NO_EXPERT);
        is_free.then_some(home)
    }

    /// Brings some of the experts of a class home that are elsewhere, once there is room for all.
    pub(super) fn bring_home(&mut self, class: usize) {
        let pool = &self.pools[class];
        if self.held || pool.budget < pool.arena.slots() {
            return;
        }
        let mut left = self.most_moves(class, MOST_HOMECOMING_BYTES);
        for index in 0..self.states.len() {
            if left == 0 {
                break;
            }
            if usize::from(self.classes[index]) == class && self.go_home(class, index) {
                left -= 1;
            }
        }
    }

    /// Whether an expert may change its slot.
    pub(super) fn rests(&self, index: usize) -> bool {
        matches!(self.states[index], State::Transit | State::Pinned) && !self.spared[index]
    }

    /// Whether an expert may be in a slot: a pinned one stays in locked memory.
    fn may_be_in(&self, class: usize, index: usize, slot: u32) -> bool {
        self.states[index] != State::Pinned || self.pools[class].arena.is_locked(slot)
    }

    fn go_home(&mut self, class: usize, index: usize) -> bool {
        let (from, to) = (self.slots[index], self.homes[index]);
        if from == NO_SLOT || from == to || !self.rests(index) {
            return false;
        }
        let pool = &self.pools[class];
        let owner = pool.owners.get(to as usize).copied();
        match owner {
            Some(owner) if owner != NO_EXPERT => {
                let other = owner as usize;
                if !self.rests(other)
                    || !self.may_be_in(class, index, to)
                    || !self.may_be_in(class, other, from)
                {
                    return false;
                }
                let pool = &mut self.pools[class];
                pool.arena.swap(from, to);
                pool.owners[from as usize] = owner;
                pool.owners[to as usize] = expert_id(index).0;
                self.slots[other] = from;
            }
            Some(_) => {
                if !self.affords_fresh(class) && !self.pools[class].is_backed(to) {
                    return false;
                }
                self.take(class, to);
                if !self.may_be_in(class, index, to) {
                    return false;
                }
                let pool = &mut self.pools[class];
                pool.free.remove(&to);
                pool.arena.copy(from, to);
                pool.owners[from as usize] = NO_EXPERT;
                pool.free.insert(from);
                pool.owners[to as usize] = expert_id(index).0;
            }
            None => return false,
        }
        self.slots[index] = to;
        true
    }
}
