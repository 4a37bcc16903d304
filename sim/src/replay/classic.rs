//! Policies that know nothing of layers and tokens: SLRU, W-TinyLFU, ARC and S3-FIFO.
//!
//! All admit what was missed and differ in what goes for it.

use super::lists::Lists;

/// A cache that is asked for one expert after the other.
pub(super) trait Cache {
    /// True when the expert is there; it is, afterwards.
    fn access(&mut self, id: u32) -> bool;
}

/// Share of a segmented cache that is protected, as in Caffeine.
fn protected(capacity: usize) -> usize {
    capacity * 4 / 5
}

/// Segmented LRU (Karedla, Love and Wherry 1994): what is used again is protected from what is not.
#[derive(Debug)]
pub(super) struct Slru {
    lists: Lists<2>,
    capacity: usize,
}

const PROBATION: usize = 0;
const PROTECTED: usize = 1;

impl Slru {
    pub fn new(experts: usize, capacity: usize) -> Self {
        Self {
            lists: Lists::new(experts),
            capacity,
        }
    }
}

impl Cache for Slru {
    fn access(&mut self, id: u32) -> bool {
        if self.lists.list_of(id).is_some() {
            promote(&mut self.lists, id, self.capacity);
            return true;
        }
        if self.lists.len(PROBATION) + self.lists.len(PROTECTED) == self.capacity {
            evict_segmented(&mut self.lists);
        }
        self.lists.put(PROBATION, id);
        false
    }
}

/// Moves a used expert to the protected segment of a segmented cache of `capacity` experts.
fn promote<const N: usize>(lists: &mut Lists<N>, id: u32, capacity: usize) {
    lists.put(PROTECTED, id);
    if lists.len(PROTECTED) > protected(capacity)
        && let Some(oldest) = lists.oldest(PROTECTED)
    {
        lists.put(PROBATION, oldest);
    }
}

fn evict_segmented<const N: usize>(lists: &mut Lists<N>) {
    if lists.take_oldest(PROBATION).is_none() {
        lists.take_oldest(PROTECTED);
    }
}

/// W-TinyLFU (Einziger, Friedman and Manes 2017): a small window in front of a segmented cache, into
/// which only what is used more often than its next victim passes. Uses are counted exactly, up to
/// 15, where the paper has a sketch: there are few experts.
#[derive(Debug)]
pub(super) struct TinyLfu {
    lists: Lists<3>,
    window: usize,
    main: usize,
    uses: Vec<u8>,
    counted: usize,
    /// Uses after which all counts are halved: ten times the capacity.
    sample: usize,
}

const WINDOW: usize = 2;
const MOST_USES: u8 = 15;

impl TinyLfu {
    pub fn new(experts: usize, capacity: usize) -> Self {
        // One percent, as in the paper.
        let window = (capacity / 100).max(1);
        Self {
            lists: Lists::new(experts),
            window,
            main: capacity - window,
            uses: vec![0; experts],
            counted: 0,
            sample: 10 * capacity,
        }
    }

    fn count(&mut self, id: u32) {
        let uses = &mut self.uses[id as usize];
        if *uses < MOST_USES {
            *uses += 1;
        }
        self.counted += 1;
        if self.counted >= self.sample {
            self.counted /= 2;
            for uses in &mut self.uses {
                *uses /= 2;
            }
        }
    }

    /// The oldest of the window meets the next victim of the main cache.
    fn contest(&mut self) {
        let Some(candidate) = self.lists.take_oldest(WINDOW) else {
            return;
        };
        if self.lists.len(PROBATION) + self.lists.len(PROTECTED) < self.main {
            self.lists.put(PROBATION, candidate);
            return;
        }
        let victim = self.lists.oldest(PROBATION);
        let Some(victim) = victim.or_else(|| self.lists.oldest(PROTECTED)) else {
            return;
        };
        if self.uses[candidate as usize] > self.uses[victim as usize] {
            self.lists.remove(victim);
            self.lists.put(PROBATION, candidate);
        }
    }
}

impl Cache for TinyLfu {
    fn access(&mut self, id: u32) -> bool {
        self.count(id);
        match self.lists.list_of(id) {
            Some(WINDOW) => self.lists.put(WINDOW, id),
            Some(_) => promote(&mut self.lists, id, self.main),
            None => {
                self.lists.put(WINDOW, id);
                if self.lists.len(WINDOW) > self.window {
                    self.contest();
                }
                return false;
            }
        }
        true
    }
}

/// ARC (Megiddo and Modha 2003): what was used once and what was used again share the cache, in
/// proportions that hits on what was evicted from either shift.
#[derive(Debug)]
pub(super) struct Arc {
    lists: Lists<4>,
    capacity: usize,
    /// Size wanted for what was used once.
    once: usize,
}

const ONCE: usize = 0;
const AGAIN: usize = 1;
const GONE_ONCE: usize = 2;
const GONE_AGAIN: usize = 3;

impl Arc {
    pub fn new(experts: usize, capacity: usize) -> Self {
        Self {
            lists: Lists::new(experts),
            capacity,
            once: 0,
        }
    }

    /// Makes room for one, which `GONE_AGAIN` remembers or does not.
    fn replace(&mut self, gone_again: bool) {
        let once = self.lists.len(ONCE);
        let from_once = once > 0 && (once > self.once || (gone_again && once == self.once));
        let (from, to) = if from_once || self.lists.len(AGAIN) == 0 {
            (ONCE, GONE_ONCE)
        } else {
            (AGAIN, GONE_AGAIN)
        };
        if let Some(victim) = self.lists.oldest(from) {
            self.lists.put(to, victim);
        }
    }

    fn make_room_for_new(&mut self) {
        let len = |list| self.lists.len(list);
        let first = len(ONCE) + len(GONE_ONCE);
        let total = first + len(AGAIN) + len(GONE_AGAIN);
        if first == self.capacity {
            if self.lists.len(ONCE) < self.capacity {
                self.lists.take_oldest(GONE_ONCE);
                self.replace(false);
            } else {
                self.lists.take_oldest(ONCE);
            }
        } else if total >= self.capacity {
            if total == 2 * self.capacity {
                self.lists.take_oldest(GONE_AGAIN);
            }
            self.replace(false);
        }
    }
}

impl Cache for Arc {
    fn access(&mut self, id: u32) -> bool {
        let (gone_once, gone_again) = (self.lists.len(GONE_ONCE), self.lists.len(GONE_AGAIN));
        match self.lists.list_of(id) {
            Some(ONCE | AGAIN) => {
                self.lists.put(AGAIN, id);
                return true;
            }
            Some(GONE_ONCE) => {
                let step = (gone_again / gone_once.max(1)).max(1);
                self.once = (self.once + step).min(self.capacity);
                self.replace(false);
                self.lists.put(AGAIN, id);
            }
            Some(_) => {
                let step = (gone_once / gone_again.max(1)).max(1);
                self.once = self.once.saturating_sub(step);
                self.replace(true);
                self.lists.put(AGAIN, id);
            }
            None => {
                self.make_room_for_new();
                self.lists.put(ONCE, id);
            }
        }
        false
    }
}

/// S3-FIFO (Yang et al. 2023): three queues; a tenth of the cache is on trial, what is used there
/// moves on, what is not is remembered and may come back past the trial.
#[derive(Debug)]
pub(super) struct S3Fifo {
    lists: Lists<3>,
    capacity: usize,
    small: usize,
    uses: Vec<u8>,
}

const SMALL: usize = 0;
const MAIN: usize = 1;
const GHOST: usize = 2;

impl S3Fifo {
    pub fn new(experts: usize, capacity: usize) -> Self {
        Self {
            lists: Lists::new(experts),
            capacity,
            small: (capacity / 10).max(1),
            uses: vec![0; experts],
        }
    }

    fn evict(&mut self) {
        while self.lists.len(SMALL) + self.lists.len(MAIN) >= self.capacity {
            let from_small = self.lists.len(SMALL) >= self.small || self.lists.len(MAIN) == 0;
            let list = if from_small { SMALL } else { MAIN };
            let Some(oldest) = self.lists.oldest(list) else {
                return;
            };
            let uses = &mut self.uses[oldest as usize];
            match (from_small, *uses) {
                (true, 2..) => {
                    *uses = 0;
                    self.lists.put(MAIN, oldest);
                }
                (true, _) => {
                    self.lists.put(GHOST, oldest);
                    if self.lists.len(GHOST) > self.capacity - self.small {
                        self.lists.take_oldest(GHOST);
                    }
                }
                (false, 1..) => {
                    *uses -= 1;
                    self.lists.put(MAIN, oldest);
                }
                (false, 0) => self.lists.remove(oldest),
            }
        }
    }
}

impl Cache for S3Fifo {
    fn access(&mut self, id: u32) -> bool {
        let list = self.lists.list_of(id);
        if matches!(list, Some(SMALL | MAIN)) {
            let uses = &mut self.uses[id as usize];
            *uses = (*uses + 1).min(3);
            return true;
        }
        self.lists.remove(id);
        self.evict();
        self.uses[id as usize] = 0;
        self.lists
            .put(if list.is_some() { MAIN } else { SMALL }, id);
        false
    }
}
