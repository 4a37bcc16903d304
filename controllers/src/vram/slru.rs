//! One group's segmented LRU, as llama.cpp keeps it: slots in two lists, of which hits move to the
//! protected one, at most half of the slots.
//!
//! An expert's key is its layer's number within the group times the experts of a layer, plus its
//! number; 0 to `keys`.

/// No slot, no key.
const NONE: u32 = u32::MAX;

const PROBATION: usize = 0;
const PROTECTED: usize = 1;

/// The distinct experts of one layer of a batch.
#[derive(Clone, Debug, Default)]
pub(super) struct Union {
    /// Generation in which each expert was last seen.
    seen: Vec<u32>,
    generation: u32,
    /// In order of first appearance.
    first: Vec<u32>,
    /// Ascending.
    sorted: Vec<u32>,
}

impl Union {
    /// Takes the experts of a batch. False when one is not below `experts`; nothing is then usable.
    pub fn set(&mut self, ids: &[i32], experts: u32) -> bool {
        if self.seen.len() < experts as usize {
            self.seen.resize(experts as usize, 0);
        }
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            self.seen.fill(0);
            self.generation = 1;
        }
        self.first.clear();
        for &id in ids {
            let Some(expert) = u32::try_from(id).ok().filter(|&id| id < experts) else {
                return false;
            };
            let seen = &mut self.seen[expert as usize];
            if *seen != self.generation {
                *seen = self.generation;
                self.first.push(expert);
            }
        }
        self.sorted.clear();
        self.sorted.extend_from_slice(&self.first);
        self.sorted.sort_unstable();
        true
    }

    pub fn len(&self) -> u32 {
        crate::num::to_u32(self.first.len())
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.sorted.iter().copied()
    }

    fn contains(&self, expert: u32) -> bool {
        self.seen[expert as usize] == self.generation
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    key: u32,
    prev: u32,
    next: u32,
    segment: u32,
}

/// The lists.
#[derive(Clone, Debug)]
pub(super) struct Slru {
    experts: u32,
    slots: Vec<Slot>,
    slot_of: Vec<u32>,
    head: [u32; 2],
    tail: [u32; 2],
    protected: u32,
}

impl Slru {
    pub fn new(layers: usize, experts: u32, slots: u32) -> Self {
        let link = |at: Option<u32>| at.filter(|&at| at < slots).unwrap_or(NONE);
        Self {
            experts,
            slots: (0..slots)
                .map(|at| Slot {
                    key: NONE,
                    prev: link(at.checked_sub(1)),
                    next: link(Some(at + 1)),
                    segment: 0,
                })
                .collect(),
            slot_of: vec![NONE; layers * experts as usize],
            head: [link(Some(0)), NONE],
            tail: [link(slots.checked_sub(1)), NONE],
            protected: 0,
        }
    }

    /// Number of slots.
    pub fn len(&self) -> u32 {
        crate::num::to_u32(self.slots.len())
    }

    /// Whether an expert has a slot.
    pub fn holds(&self, layer: usize, expert: u32) -> bool {
        self.slot_of[self.key(layer, expert)] != NONE
    }

    /// Whether an expert has a slot of the protected half.
    pub fn protects(&self, layer: usize, expert: u32) -> bool {
        let slot = self.slot_of[self.key(layer, expert)];
        slot != NONE && self.slots[slot as usize].segment as usize == PROTECTED
    }

    /// Gives a slot to each expert of a batch; returns how many had one. There must be as many slots.
    /// Calls `evicted` with the layer and number of those that lose theirs.
    pub fn plan(
        &mut self,
        layer: usize,
        union: &Union,
        mut evicted: impl FnMut(usize, u32),
    ) -> u32 {
        let base = self.key(layer, 0);
        let mut hits = 0;
        // Hits are promoted before victims are chosen for misses.
        for &expert in &union.first {
            let slot = self.slot_of[base + expert as usize];
            if slot != NONE {
                self.touch(slot);
                hits += 1;
            }
        }
        if hits == union.len() {
            return hits;
        }
        for &expert in &union.sorted {
            let key = base + expert as usize;
            if self.slot_of[key] != NONE {
                continue;
            }
            let Some(slot) = self.victim(base, union) else {
                return hits;
            };
            let old = self.slots[slot as usize].key;
            if old != NONE {
                self.slot_of[old as usize] = NONE;
                evicted((old / self.experts) as usize, old % self.experts);
            }
            self.slots[slot as usize].key = crate::num::to_u32(key);
            self.slot_of[key] = slot;
            self.shift(slot, PROBATION);
        }
        hits
    }

    fn key(&self, layer: usize, expert: u32) -> usize {
        layer * self.experts as usize + expert as usize
    }

    /// Moves a slot to the most recently used end of a segment.
    fn shift(&mut self, slot: u32, segment: usize) {
        let Slot {
            prev,
            next,
            segment: from,
            ..
        } = self.slots[slot as usize];
        let from = from as usize;
        if from == segment && slot == self.tail[from] {
            return;
        }
        match prev {
            NONE => self.head[from] = next,
            prev => self.slots[prev as usize].next = next,
        }
        match next {
            NONE => self.tail[from] = prev,
            next => self.slots[next as usize].prev = prev,
        }
        let last = self.tail[segment];
        match last {
            NONE => self.head[segment] = slot,
            last => self.slots[last as usize].next = slot,
        }
        self.tail[segment] = slot;
        let entry = &mut self.slots[slot as usize];
        entry.prev = last;
        entry.next = NONE;
        entry.segment = u32::from(segment == PROTECTED);
        self.protected += u32::from(segment == PROTECTED);
        self.protected -= u32::from(from == PROTECTED);
    }

    fn touch(&mut self, slot: u32) {
        self.shift(slot, PROTECTED);
        if self.protected > self.len() / 2 {
            self.shift(self.head[PROTECTED], PROBATION);
        }
    }

    /// The least recently used slot, on probation first, that this batch does not use.
    fn victim(&self, base: usize, union: &Union) -> Option<u32> {
        let uses = |key: u32| {
            let expert = (key as usize).wrapping_sub(base);
            expert < self.experts as usize && union.contains(crate::num::to_u32(expert))
        };
        for segment in [PROBATION, PROTECTED] {
            let mut slot = self.head[segment];
            while slot != NONE {
                let Slot { key, next, .. } = self.slots[slot as usize];
                if key == NONE || !uses(key) {
                    return Some(slot);
                }
                slot = next;
            }
        }
        None
    }
}
