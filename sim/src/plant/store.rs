//! The store's books, and what the kernel made of them.
//!
//! Follows the live stores: transit is evicted by rank when a fetch exceeds the budget, and a routed
//! expert's rank rises at once. Under `mapped` the books may call an expert resident that the kernel
//! has reclaimed, and the policies that leave transit to the kernel know pins only. Under `direct`
//! the kernel takes nothing.

use super::lists::PageLists;
use super::to_bytes;
use hotpin_controllers::{ExpertId, Held, ModelShape, Residence};

/// Eviction goes this share of the budget further, so that it is not done for every fetch.
const EVICT_AHEAD_SHARE: u64 = 64;

/// Factor on the rank of an expert for each use until the policy's ranks are published again.
const USE_RANK: f32 = 1.4;

/// Who keeps transit within its budget, as in the live store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// The kernel, by last use: the books call everything absent that is not locked.
    Kernel,
    /// The store, by the policy's ranks; the kernel takes what it must behind its back.
    Store,
    /// The store `direct`, by the policy's ranks, in memory that is its own.
    Arena,
}

/// What a routed expert cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// It was there.
    Hit,
    /// It was there, and the books did not know.
    Cached,
    /// The books said so, the kernel had dropped it: it faults in page by page.
    Phantom,
    /// It must be fetched; `before` when it had been resident at some time.
    Miss { before: bool },
}

/// Residency of every expert.
#[derive(Debug)]
pub(crate) struct Store {
    keeper: Keeper,
    bytes: Vec<u64>,
    /// What an expert takes up in the page cache, with what was read around it.
    cached_bytes: Vec<u64>,
    residence: Vec<Residence>,
    /// Absent by the books, and in the page cache.
    cached: Vec<bool>,
    lists: PageLists,
    unbooked_bytes: u64,
    /// Transit by the books that the kernel dropped.
    gone: Vec<bool>,
    last_use: Vec<u64>,
    uses: u64,
    ranks: Vec<f32>,
    capacity_bytes: u64,
    pinned_bytes: u64,
    transit_bytes: u64,
    gone_bytes: u64,
    most_held_bytes: u64,
    victims: Vec<(f32, u32)>,
}

impl Store {
    /// A store with nothing in it. With `readahead`, what a used byte brings into the page cache, expert
    /// ranges are as the loader left them; without, they are advised to be read at random, and read
    /// exactly.
    pub fn new(shape: &ModelShape, keeper: Keeper, readahead: Option<f64>) -> Self {
        let experts = shape.total_experts();
        let bytes = (0..shape.layers()).flat_map(|layer| {
            let count = shape.experts_in(layer) as usize;
            std::iter::repeat_n(shape.layer_expert_bytes(layer), count)
        });
        let bytes: Vec<u64> = bytes.collect();
        let amplification = readahead.unwrap_or(1.0);
        let cached_bytes: Vec<u64> = bytes
            .iter()
            .map(|&bytes| to_bytes(bytes as f64 * amplification))
            .collect();
        Self {
            lists: PageLists::new(&cached_bytes, readahead.is_some()),
            cached_bytes,
            bytes,
            keeper,
            residence: vec![Residence::Absent; experts],
            cached: vec![false; experts],
            unbooked_bytes: 0,
            gone: vec![false; experts],
            last_use: vec![0; experts],
            uses: 0,
            ranks: vec![0.0; experts],
            capacity_bytes: 0,
            pinned_bytes: 0,
            transit_bytes: 0,
            gone_bytes: 0,
            most_held_bytes: 0,
            victims: Vec::new(),
        }
    }

    /// Loading as llama.cpp does it read the whole file in order: what fits of its end is in the page
    /// cache.
    pub fn load(&mut self, room_bytes: u64) {
        for id in (0..self.bytes.len())
            .rev()
            .filter_map(|id| u32::try_from(id).ok())
        {
            let id = ExpertId(id);
            if self.unbooked_bytes + self.cached_bytes[id.index()] > room_bytes {
                return;
            }
            self.enter_cache(id);
        }
    }

    pub fn residence(&self) -> &[Residence] {
        &self.residence
    }

    pub fn bytes(&self, id: ExpertId) -> u64 {
        self.bytes[id.index()]
    }

    pub fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    /// Transit by the books.
    pub fn transit_bytes(&self) -> u64 {
        self.transit_bytes
    }

    /// Transit that is really in memory.
    pub fn cached_bytes(&self) -> u64 {
        self.transit_bytes - self.gone_bytes + self.unbooked_bytes
    }

    pub fn held(&self) -> Held {
        Held {
            pinned_bytes: self.pinned_bytes,
            transit_bytes: self.transit_bytes,
            lock_shortfall_bytes: 0,
        }
    }

    pub fn set_capacity(&mut self, bytes: u64) {
        self.capacity_bytes = bytes;
    }

    pub fn publish_ranks(&mut self, ranks: &[f32]) {
        self.ranks.copy_from_slice(ranks);
    }

    /// An expert is routed: finds out what it costs, and makes it resident.
    pub fn access(&mut self, id: ExpertId) -> Access {
        let index = id.index();
        let before = self.last_use[index] > 0;
        self.uses += 1;
        self.last_use[index] = self.uses;
        self.ranks[index] = self.ranks[index].max(1.0) * USE_RANK;
        match self.residence[index] {
            Residence::Pinned => Access::Hit,
            Residence::Transit if self.gone[index] => {
                self.gone[index] = false;
                self.gone_bytes -= self.bytes[index];
                Access::Phantom
            }
            Residence::Transit => Access::Hit,
            Residence::Absent if self.cached[index] => {
                self.lists.touch(index);
                Access::Cached
            }
            Residence::Absent if self.keeper == Keeper::Kernel => {
                self.enter_cache(id);
                self.lists.touch(index);
                Access::Miss { before }
            }
            Residence::Absent => {
                self.residence[index] = Residence::Transit;
                self.transit_bytes += self.bytes[index];
                Access::Miss { before }
            }
        }
    }

    /// Whether an expert is really in memory.
    pub fn is_resident(&self, id: ExpertId) -> bool {
        let index = id.index();
        self.cached[index] || self.residence[index] != Residence::Absent && !self.gone[index]
    }

    /// Evicts the lowest-ranked transit until it fits beside the pins, sparing `keep`. What the kernel
    /// keeps is not in transit by the books.
    pub fn evict(&mut self, keep: &[u32]) {
        let budget_bytes = self.capacity_bytes.saturating_sub(self.pinned_bytes);
        if self.transit_bytes <= budget_bytes {
            return;
        }
        let ahead_bytes = match self.keeper {
            // A slot is reused at once.
            Keeper::Arena => 0,
            Keeper::Kernel | Keeper::Store => budget_bytes / EVICT_AHEAD_SHARE,
        };
        let goal_bytes = budget_bytes - ahead_bytes;
        let mut victims = std::mem::take(&mut self.victims);
        victims.clear();
        for (id, index) in (0u32..).zip(0..self.residence.len()) {
            if self.residence[index] == Residence::Transit && !keep.contains(&id) {
                victims.push((self.ranks[index], id));
            }
        }
        victims.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for &(_, id) in &victims {
            if self.transit_bytes <= goal_bytes {
                break;
            }
            self.leave_transit(ExpertId(id), Residence::Absent);
        }
        self.victims = victims;
    }

    /// Bytes held beyond the most that ever were, when it was last asked: memory used for the first time.
    pub fn fresh_bytes(&mut self) -> u64 {
        let held_bytes = self.pinned_bytes + self.transit_bytes;
        let fresh_bytes = held_bytes.saturating_sub(self.most_held_bytes);
        self.most_held_bytes += fresh_bytes;
        fresh_bytes
    }

    /// Locks an expert whose bytes have been read. False when it is locked already.
    pub fn pin(&mut self, id: ExpertId) -> bool {
        match self.residence[id.index()] {
            Residence::Pinned => return false,
            Residence::Transit => self.leave_transit(id, Residence::Pinned),
            Residence::Absent => {
                self.leave_cache(id.index());
                self.residence[id.index()] = Residence::Pinned;
            }
        }
        self.pinned_bytes += self.bytes(id);
        true
    }

    /// Unlocks an expert; it stays as transit. False when it was not locked.
    pub fn unpin(&mut self, id: ExpertId) -> bool {
        if self.residence[id.index()] != Residence::Pinned {
            return false;
        }
        self.pinned_bytes -= self.bytes(id);
        match self.keeper {
            Keeper::Kernel => {
                self.residence[id.index()] = Residence::Absent;
                self.enter_cache(id);
            }
            Keeper::Store | Keeper::Arena => {
                self.residence[id.index()] = Residence::Transit;
                self.transit_bytes += self.bytes(id);
            }
        }
        true
    }

    /// Fills transit with what ranks next after the pins, as the live governor does before the first
    /// token. Without a profile all ranks are alike and nothing is worth reading ahead.
    pub fn warm(&mut self) {
        if self.keeper == Keeper::Kernel {
            return;
        }
        let least = self.ranks.iter().copied().fold(f32::INFINITY, f32::min);
        let mut order: Vec<usize> = (0..self.ranks.len())
            .filter(|&index| self.ranks[index] > least)
            .collect();
        order.sort_by(|&a, &b| self.ranks[b].total_cmp(&self.ranks[a]));
        let budget_bytes = self.capacity_bytes.saturating_sub(self.pinned_bytes);
        for index in order {
            if self.residence[index] != Residence::Absent {
                continue;
            }
            if self.transit_bytes + self.bytes[index] > budget_bytes {
                return;
            }
            self.residence[index] = Residence::Transit;
            self.transit_bytes += self.bytes[index];
        }
    }

    /// Whether pinning the expert has to read it.
    pub fn must_read(&self, id: ExpertId) -> bool {
        match self.residence[id.index()] {
            Residence::Absent => !self.cached[id.index()],
            Residence::Transit => self.gone[id.index()],
            Residence::Pinned => false,
        }
    }

    /// The kernel drops at least `wanted` bytes if there are as many: transit that a store keeps by
    /// last use, without telling its books; what is left to the kernel by its lists; nothing of an
    /// arena. Returns what was dropped.
    pub fn reclaim(&mut self, wanted_bytes: u64) -> u64 {
        if self.keeper == Keeper::Arena {
            return 0;
        }
        if self.keeper == Keeper::Kernel {
            let mut freed_bytes = 0;
            while freed_bytes < wanted_bytes {
                let Some(index) = self.lists.evict() else {
                    break;
                };
                self.cached[index] = false;
                self.unbooked_bytes -= self.cached_bytes[index];
                freed_bytes += self.cached_bytes[index];
            }
            return freed_bytes;
        }
        let mut order: Vec<usize> = (0..self.residence.len())
            .filter(|&index| self.residence[index] == Residence::Transit && !self.gone[index])
            .collect();
        order.sort_unstable_by_key(|&index| self.last_use[index]);
        let mut freed_bytes = 0;
        for index in order {
            if freed_bytes >= wanted_bytes {
                break;
            }
            self.gone[index] = true;
            self.gone_bytes += self.bytes[index];
            freed_bytes += self.bytes[index];
        }
        freed_bytes
    }

    /// Corrects the books on transit.
    pub fn audit(&mut self) {
        for (id, index) in (0u32..).zip(0..self.residence.len()) {
            if self.gone[index] {
                self.leave_transit(ExpertId(id), Residence::Absent);
            }
        }
    }

    fn enter_cache(&mut self, id: ExpertId) {
        self.cached[id.index()] = true;
        self.lists.enter(id.index());
        self.unbooked_bytes += self.cached_bytes[id.index()];
    }

    fn leave_cache(&mut self, index: usize) {
        if std::mem::take(&mut self.cached[index]) {
            self.lists.remove(index);
            self.unbooked_bytes -= self.cached_bytes[index];
        }
    }

    fn leave_transit(&mut self, id: ExpertId, to: Residence) {
        let index = id.index();
        if std::mem::take(&mut self.gone[index]) {
            self.gone_bytes -= self.bytes[index];
        }
        self.transit_bytes -= self.bytes[index];
        self.residence[index] = to;
    }
}
