//! Which expert is in which slot, and who may have whose.
//!
//! All of it is behind one lock that is held for bookkeeping only, never for a read: engine and
//! governor both change slots, and an expert that the engine uses at this moment must not lose its
//! own, or the sums would be of another expert's weights.

mod ahead;
mod fresh;
mod homes;
mod swapped;

use super::arena::Arena;
use super::geometry::Geometry;
use hotpin_controllers::{ExpertId, Held, ModelShape, Residence};
use std::collections::BTreeSet;
use std::io;

/// An expert's slot where it has none.
const NO_SLOT: u32 = u32::MAX;

/// No expert is in a slot.
const NO_EXPERT: u32 = u32::MAX;

/// Bytes moved in one go, unless one expert has more: the lock is held meanwhile, about a millisecond
/// for 8 MB.
const MOST_MOVED_BYTES: usize = 96 << 20;

/// What is in an expert's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It has no slot.
    Absent,
    /// Reads into its slot are under way.
    Loading,
    /// Resident, first to go.
    Transit,
    /// Resident, locked, and kept.
    Pinned,
}

/// Slots of one size.
#[derive(Debug)]
struct Pool {
    arena: Arena,
    /// Slots below `next` without an expert. The lowest is taken first, which keeps the arena short.
    free: BTreeSet<u32>,
    /// The expert in each slot below `next`.
    owners: Vec<u32>,
    /// The end of the slots that have been used.
    next: u32,
    /// The end of those whose memory was made ready before.
    ready: u32,
    used: usize,
    /// Slots that experts may have. What one token uses of a layer may exceed it for a moment, and so
    /// may two experts of a layer that is computed piece by piece.
    budget: usize,
    /// Bytes of the class over bytes of the model.
    share: f64,
}

impl Pool {
    /// As many slots as fit so many bytes of memory.
    fn set_budget(&mut self, bytes: usize) {
        let bytes = bytes.saturating_sub(self.arena.waste_bytes(self.next.max(self.ready)));
        self.budget = (bytes / self.arena.slot_bytes()).min(self.arena.slots());
    }
}

/// The books.
#[derive(Debug)]
pub(super) struct Books {
    states: Vec<State>,
    slots: Vec<u32>,
    /// The slot of each expert where there is room for all.
    homes: Vec<u32>,
    classes: Vec<u16>,
    bytes: Vec<u64>,
    pools: Vec<Pool>,
    in_use: Vec<ExpertId>,
    spared: Vec<bool>,
    victims: Vec<(f32, u32)>,
    pinned_bytes: u64,
    transit_bytes: u64,
    may_pin: bool,
    /// The engine uses everything.
    held: bool,
    /// Memory that may still be taken fresh.
    fresh_bytes: u64,
}

impl Books {
    /// Empty books; address space is reserved, memory is not.
    ///
    /// # Errors
    /// When address space is refused.
    pub(super) fn new(geometry: &Geometry) -> io::Result<Self> {
        let shape: &ModelShape = &geometry.shape;
        let experts = shape.total_experts();
        let ids = || (0..experts).map(expert_id);
        let bytes_of = |class: &super::geometry::Class| (class.slot_bytes * class.experts) as f64;
        let total: f64 = geometry.classes.iter().map(bytes_of).sum();
        let pools = geometry
            .classes
            .iter()
            .map(|class| {
                Ok(Pool {
                    arena: Arena::reserve(class.slot_bytes, class.experts)?,
                    free: BTreeSet::new(),
                    owners: Vec::new(),
                    next: 0,
                    ready: 0,
                    used: 0,
                    budget: 0,
                    share: bytes_of(class) / total.max(1.0),
                })
            })
            .collect::<io::Result<Vec<_>>>()?;
        let classes: Vec<u16> = ids()
            .map(|id| u16::try_from(geometry.class(id)).unwrap_or(u16::MAX))
            .collect();
        let mut members = vec![0; geometry.classes.len()];
        let homes = classes
            .iter()
            .map(|&class| {
                let member = &mut members[usize::from(class)];
                *member += 1;
                *member - 1
            })
            .collect();
        Ok(Self {
            states: vec![State::Absent; experts],
            slots: vec![NO_SLOT; experts],
            homes,
            classes,
            bytes: ids().map(|id| shape.bytes(id)).collect(),
            pools,
            in_use: Vec::new(),
            spared: vec![false; experts],
            victims: Vec::new(),
            pinned_bytes: 0,
            transit_bytes: 0,
            may_pin: true,
            held: false,
            fresh_bytes: u64::MAX,
        })
    }

    pub(super) fn state(&self, id: ExpertId) -> State {
        self.states[id.index()]
    }

    pub(super) fn slot(&self, id: ExpertId) -> Option<u32> {
        let slot = self.slots[id.index()];
        (slot != NO_SLOT).then_some(slot)
    }

    /// Address of slot 0 and slot size of a class.
    pub(super) fn arena(&self, class: usize) -> (usize, usize) {
        let arena = &self.pools[class].arena;
        (arena.address(0), arena.slot_bytes())
    }

    /// Bytes of all arenas that are locked.
    pub(super) fn locked_bytes(&self) -> u64 {
        let arenas = self.pools.iter().map(|pool| &pool.arena);
        arenas.map(|arena| arena.locked_bytes() as u64).sum()
    }

    /// Address of an expert's slot.
    pub(super) fn address(&self, id: ExpertId) -> Option<usize> {
        let pool = &self.pools[usize::from(self.classes[id.index()])];
        Some(pool.arena.address(self.slot(id)?))
    }

    /// Names the experts that the engine uses from now on: they keep their slots.
    pub(super) fn use_only(&mut self, experts: &[ExpertId]) {
        for &id in &self.in_use {
            self.spared[id.index()] = false;
        }
        self.in_use.clear();
        self.in_use.extend_from_slice(experts);
        for &id in experts {
            self.spared[id.index()] = true;
        }
    }

    /// Lets an expert lose its slot that the engine has used for the last time.
    pub(super) fn spare_no_more(&mut self, id: ExpertId) {
        self.spared[id.index()] = false;
    }

    /// Makes room for `wanted` more experts of the class of `like`, in the budget and in memory, as far as what
    /// may go allows.
    pub(super) fn make_room(&mut self, like: ExpertId, wanted: usize, rank: &dyn Fn(usize) -> f32) {
        let class = self.classes[like.index()];
        let pool = &self.pools[usize::from(class)];
        let excess = (pool.used + wanted).saturating_sub(pool.budget);
        let lacking = self.lacking_slots(usize::from(class), wanted);
        self.evict(class, excess.max(lacking), rank);
    }

    /// Evicts the `count` lowest-ranked experts in transit.
    fn evict(&mut self, class: u16, count: usize, rank: &dyn Fn(usize) -> f32) {
        if count == 0 || self.is_held() {
            return;
        }
        let mut victims = std::mem::take(&mut self.victims);
        victims.clear();
        for (index, state) in self.states.iter().enumerate() {
            if *state == State::Transit && self.classes[index] == class && !self.spared[index] {
                victims.push((rank(index), expert_id(index).0));
            }
        }
        if count < victims.len() {
            victims.select_nth_unstable_by(count, |a, b| a.0.total_cmp(&b.0));
            victims.truncate(count);
        }
        for &(_, id) in &victims {
            self.drop_expert(ExpertId(id));
        }
        self.victims = victims;
    }

    /// Takes an expert's slot away; its memory stays for the next one.
    pub(super) fn drop_expert(&mut self, id: ExpertId) {
        let index = id.index();
        match self.states[index] {
            State::Absent => return,
            State::Pinned => self.pinned_bytes -= self.bytes[index],
            State::Loading => {}
            State::Transit => self.transit_bytes -= self.bytes[index],
        }
        let pool = &mut self.pools[usize::from(self.classes[index])];
        pool.free.insert(self.slots[index]);
        pool.owners[self.slots[index] as usize] = NO_EXPERT;
        pool.used -= 1;
        self.slots[index] = NO_SLOT;
        self.states[index] = State::Absent;
    }

    /// Gives an absent expert a slot to be read into. There is one for every expert of the class, so
    /// this cannot fail; what exceeds the budget is one layer's least, and is given back later.
    pub(super) fn take_slot(&mut self, id: ExpertId) {
        debug_assert_eq!(self.states[id.index()], State::Absent);
        let class = usize::from(self.classes[id.index()]);
        let may_be_fresh = self.affords_fresh(class);
        let own = self.own_slot(id);
        let slot = own.unwrap_or_else(|| self.pools[class].next_slot(may_be_fresh));
        self.pools[class].open(slot);
        self.take(class, slot);
        let pool = &mut self.pools[class];
        pool.used += 1;
        pool.owners[slot as usize] = id.0;
        self.slots[id.index()] = slot;
        self.states[id.index()] = State::Loading;
    }

    /// Marks an expert that was being read as resident.
    pub(super) fn loaded(&mut self, id: ExpertId) {
        if self.states[id.index()] == State::Loading {
            self.states[id.index()] = State::Transit;
            self.transit_bytes += self.bytes[id.index()];
        }
    }

    /// Ends the load of an expert that could not be read. One that the engine uses keeps its slot, so that it is read
    /// again where the engine was told that it is.
    pub(super) fn not_loaded(&mut self, id: ExpertId) {
        if !self.spared[id.index()] {
            self.drop_expert(id);
        }
    }

    /// Pins an expert in transit. False when its slot is not locked.
    pub(super) fn pin(&mut self, id: ExpertId) -> bool {
        let index = id.index();
        if !self.may_pin || self.states[index] != State::Transit {
            return false;
        }
        let arena = &mut self.pools[usize::from(self.classes[index])].arena;
        // There may not have been the memory when the slot was taken.
        arena.take(self.slots[index], true);
        if !arena.is_locked(self.slots[index]) {
            return false;
        }
        self.states[index] = State::Pinned;
        self.transit_bytes -= self.bytes[index];
        self.pinned_bytes += self.bytes[index];
        true
    }

    /// Unpins an expert; it stays in transit.
    pub(super) fn unpin(&mut self, id: ExpertId) -> bool {
        let index = id.index();
        if self.states[index] != State::Pinned {
            return false;
        }
        self.states[index] = State::Transit;
        self.pinned_bytes -= self.bytes[index];
        self.transit_bytes += self.bytes[index];
        true
    }

    /// Sets the budgets, evicts what exceeds them and gives its memory back.
    pub(super) fn set_capacity(&mut self, bytes: u64, rank: &dyn Fn(usize) -> f32) {
        // Slots are a little larger than experts; who may keep them all may have all slots.
        let keeps_all = bytes >= self.bytes.iter().sum();
        for class in 0..self.pools.len() {
            let pool = &mut self.pools[class];
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "bytes of memory are far below 2^53, and the product is not negative"
            )]
            let share_bytes = (bytes as f64 * pool.share) as usize;
            if keeps_all {
                pool.budget = pool.arena.slots();
                self.fit(class, rank);
            } else {
                // What giving back leaves in pieces of huge pages takes the place of experts.
                for _ in 0..2 {
                    self.pools[class].set_budget(share_bytes);
                    self.fit(class, rank);
                }
            }
            self.bring_home(class);
        }
    }

    /// Evicts what exceeds the budget and gives its memory back.
    fn fit(&mut self, class: usize, rank: &dyn Fn(usize) -> f32) {
        let pool = &self.pools[class];
        let excess = pool.used.saturating_sub(pool.budget);
        self.evict(u16::try_from(class).unwrap_or(u16::MAX), excess, rank);
        if !self.is_held() {
            self.shorten(class);
        }
    }

    /// Gives back memory beyond the budget, from the end of the arena: experts there move to free
    /// slots in front. What is in use or being read stays where it is, and does not keep the others'
    /// memory. Each slot's is given back at once, since somebody may be waiting for it.
    fn shorten(&mut self, class: usize) {
        let mut moves = self.most_moves(class, MOST_MOVED_BYTES);
        let budget = u32::try_from(self.pools[class].budget).unwrap_or(u32::MAX);
        let mut end = budget;
        for slot in (0..self.pools[class].next).rev() {
            if slot < end {
                break;
            }
            if self.pools[class].owners[slot as usize] != NO_EXPERT {
                if moves == 0 || !self.move_to_front(class, slot) {
                    // What stays here takes a place in front.
                    end = end.saturating_sub(1);
                    continue;
                }
                moves -= 1;
            }
            let Pool { arena, owners, .. } = &mut self.pools[class];
            arena.release(slot, |slot| holds_nothing(owners, slot));
        }
        let pool = &mut self.pools[class];
        while pool.next > budget && pool.owners.last() == Some(&NO_EXPERT) {
            pool.owners.pop();
            pool.next -= 1;
            pool.free.remove(&pool.next);
        }
        // Memory beyond the budget that was made ready and is not used goes as well.
        let Pool {
            arena,
            owners,
            ready,
            ..
        } = pool;
        for slot in (budget..*ready).rev() {
            arena.release(slot, |slot| holds_nothing(owners, slot));
        }
        *ready = budget.min(*ready);
    }

    /// Moves the expert of a slot to the first free one with memory, if it rests and that one is further in front.
    fn move_to_front(&mut self, class: usize, slot: u32) -> bool {
        let index = self.pools[class].owners[slot as usize] as usize;
        if !self.rests(index) {
            return false;
        }
        let pool = &mut self.pools[class];
        let mut free = pool.free.range(..slot).copied();
        // One without memory would take as much as moving gives back.
        let Some(to) = free.find(|&to| pool.is_backed(to)) else {
            return false;
        };
        pool.free.remove(&to);
        pool.free.insert(slot);
        pool.arena.take(to, self.may_pin);
        pool.arena.copy(slot, to);
        pool.owners[to as usize] = pool.owners[slot as usize];
        pool.owners[slot as usize] = NO_EXPERT;
        self.slots[index] = to;
        if !pool.arena.is_locked(to) {
            self.unpin(expert_id(index));
        }
        true
    }

    /// Experts of a class that may be moved in one go, for so many bytes: one at least.
    fn most_moves(&self, class: usize, bytes: usize) -> usize {
        (bytes / self.pools[class].arena.slot_bytes().max(1)).max(1)
    }

    /// Bytes of memory that slots have been given.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.pools
            .iter()
            .map(|pool| pool.arena.memory_bytes())
            .sum()
    }

    /// Unlocks everything, for good.
    pub(super) fn unlock_all(&mut self) {
        self.may_pin = false;
        for index in 0..self.states.len() {
            self.unpin(expert_id(index));
        }
        for pool in &mut self.pools {
            pool.arena.unlock();
        }
    }

    pub(super) fn held(&self) -> Held {
        Held {
            pinned_bytes: self.pinned_bytes,
            transit_bytes: self.transit_bytes,
            lock_shortfall_bytes: 0,
        }
    }

    pub(super) fn residence_into(&self, out: &mut [Residence]) {
        for (slot, state) in out.iter_mut().zip(&self.states) {
            *slot = match state {
                State::Pinned => Residence::Pinned,
                State::Transit => Residence::Transit,
                State::Absent | State::Loading => Residence::Absent,
            };
        }
    }

    /// Why memory of slots could not be locked, if that happened.
    pub(super) fn lock_error(&self) -> Option<nix::errno::Errno> {
        self.pools.iter().find_map(|pool| pool.arena.lock_error())
    }
}

/// Whether no expert is in a slot.
fn holds_nothing(owners: &[u32], slot: u32) -> bool {
    let owner = owners.get(slot as usize);
    owner.is_none_or(|&owner| owner == NO_EXPERT)
}

pub(super) fn expert_id(index: usize) -> ExpertId {
    ExpertId(u32::try_from(index).unwrap_or(u32::MAX))
}
