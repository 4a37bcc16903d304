//! The page cache as Linux keeps it without multi-generational reclaim: an inactive and an active
//! list, a second chance for what was used, and refaults that come back as active.
//!
//! Follows `mm/vmscan.c` and `mm/workingset.c`, an expert standing for its pages. Uses through a mapping
//! that was advised to be read at random (`MADV_RANDOM`, as the store `mapped` does with experts) do not
//! count: `vma_has_recency` is false for it, reclaim looks at no accessed bit, and what is left is a queue,
//! first in first out, and the refaults.

use std::collections::VecDeque;

/// Below this size both lists are kept equally long.
const GIB: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    bytes: u64,
    /// Used since it was last looked at.
    accessed: bool,
    /// It was found used once, on the inactive list.
    referenced: bool,
    /// Bytes that had been evicted when it was.
    shadow: Option<u64>,
}

/// Both lists; the newest are in front.
#[derive(Clone, Debug, Default)]
pub(super) struct PageLists {
    entries: Vec<Entry>,
    inactive: VecDeque<usize>,
    active: VecDeque<usize>,
    inactive_bytes: u64,
    active_bytes: u64,
    evicted_bytes: u64,
    /// Uses count.
    recency: bool,
}

impl PageLists {
    /// Empty lists for entries of these sizes. `recency` is whether the kernel sees uses.
    pub fn new(bytes: &[u64], recency: bool) -> Self {
        let entry = |&bytes| Entry {
            bytes,
            ..Entry::default()
        };
        Self {
            entries: bytes.iter().map(entry).collect(),
            recency,
            ..Self::default()
        }
    }

    /// Its pages were read. What comes back while as much as the active list holds has been evicted
    /// would have been a hit in a larger cache, and is active at once.
    pub fn enter(&mut self, id: usize) {
        let entry = &mut self.entries[id];
        let bytes = entry.bytes;
        let distance = entry.shadow.take().map(|then| self.evicted_bytes - then);
        entry.accessed = false;
        entry.referenced = false;
        if distance.is_some_and(|distance| distance <= self.active_bytes) {
            self.active.push_front(id);
            self.active_bytes += bytes;
        } else {
            self.inactive.push_front(id);
            self.inactive_bytes += bytes;
        }
    }

    /// Its pages were used.
    pub fn touch(&mut self, id: usize) {
        self.entries[id].accessed = self.recency;
    }

    /// It was locked.
    pub fn remove(&mut self, id: usize) {
        let bytes = self.entries[id].bytes;
        if let Some(at) = self.inactive.iter().position(|&other| other == id) {
            self.inactive.remove(at);
            self.inactive_bytes -= bytes;
        } else if let Some(at) = self.active.iter().position(|&other| other == id) {
            self.active.remove(at);
            self.active_bytes -= bytes;
        }
    }

    /// The next to go; `None` when nothing is left.
    pub fn evict(&mut self) -> Option<usize> {
        // Each entry is passed over at most twice before it goes.
        for _ in 0..=3 * self.entries.len() {
            self.balance();
            let Some(id) = self.inactive.pop_back() else {
                let id = self.active.pop_back()?;
                self.active_bytes -= self.entries[id].bytes;
                return Some(self.forget(id));
            };
            let entry = &mut self.entries[id];
            if !std::mem::take(&mut entry.accessed) {
                self.inactive_bytes -= entry.bytes;
                return Some(self.forget(id));
            }
            if entry.referenced {
                self.inactive_bytes -= entry.bytes;
                self.active_bytes += entry.bytes;
                self.active.push_front(id);
            } else {
                entry.referenced = true;
                self.inactive.push_front(id);
            }
        }
        None
    }

    fn forget(&mut self, id: usize) -> usize {
        let entry = &mut self.entries[id];
        entry.shadow = Some(self.evicted_bytes);
        self.evicted_bytes += entry.bytes;
        id
    }

    /// Takes from the active list, used or not, until it is no more than so many times as long as the
    /// inactive one.
    fn balance(&mut self) {
        let gib = (self.inactive_bytes + self.active_bytes) / GIB;
        let ratio = (10 * gib).isqrt().max(1);
        while self.inactive_bytes * ratio < self.active_bytes {
            let Some(id) = self.active.pop_back() else {
                return;
            };
            let entry = &mut self.entries[id];
            entry.accessed = false;
            self.active_bytes -= entry.bytes;
            self.inactive_bytes += entry.bytes;
            self.inactive.push_front(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Misses of a sequence of uses in a cache of `room` entries of one byte.
    fn misses(recency: bool, room: usize, uses: impl Iterator<Item = usize>) -> usize {
        let mut lists = PageLists::new(&[1; 32], recency);
        let mut held: Vec<usize> = Vec::new();
        let mut misses = 0;
        for id in uses {
            if !held.contains(&id) {
                misses += 1;
                held.push(id);
                lists.enter(id);
            }
            lists.touch(id);
            while held.len() > room {
                let gone = lists.evict().unwrap();
                assert!(held.contains(&gone), "{gone} was evicted twice");
                held.retain(|&other| other != gone);
            }
        }
        misses
    }

    #[test]
    fn what_is_used_again_survives_what_is_used_once() {
        // Two hot entries among a scan of thirty.
        let uses = (0..600).map(|n| {
            if n % 2 == 0 {
                n / 2 % 2
            } else {
                2 + n / 2 % 30
            }
        });
        let cold = misses(true, 8, uses);
        assert!(cold < 300 + 10, "{cold} misses: the hot ones were lost");
    }

    #[test]
    fn everything_fits_or_goes() {
        assert_eq!(misses(true, 32, (0..320).map(|n| n % 32)), 32);
        let mut lists = PageLists::new(&[1; 3], true);
        for id in 0..3 {
            lists.enter(id);
            lists.touch(id);
        }
        lists.remove(1);
        assert_eq!(std::iter::from_fn(|| lists.evict()).count(), 2);
    }
}
