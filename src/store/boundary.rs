//! Ownership of pages that two neighbours share.
//!
//! Slices are not page-aligned: where one ends and the next begins they share a page, and small
//! slices share a page with many. Such a page stays locked while any owner is locked.

use super::pages::{PageRange, page_bytes};
use super::slice::SliceAt;
use std::collections::HashMap;

/// Index of a shared page; `NONE` when the page belongs to one owner alone.
const NONE: u32 = u32::MAX;

/// Counts of locked owners for every shared page.
#[derive(Debug)]
pub(super) struct Boundaries {
    /// For every slice: its first and last page, if shared.
    ends: Vec<(u32, u32)>,
    /// Locked owners of every shared page.
    owners: Vec<u32>,
}

impl Boundaries {
    /// Finds shared pages among slices and dense ranges (`address`, `len`). Dense ranges are
    /// counted as locked owners when `dense_locked`.
    pub(super) fn new(slices: &[SliceAt], dense: &[(usize, usize)], dense_locked: bool) -> Self {
        let page = page_bytes();
        let mut touched: HashMap<usize, u32> = HashMap::with_capacity(2 * slices.len());
        let ends_of =
            |address: usize, len: usize| (address / page, (address + len.max(1) - 1) / page);
        let all = slices
            .iter()
            .map(|s| (s.address, s.len))
            .chain(dense.iter().copied());
        for (address, len) in all {
            let (first, last) = ends_of(address, len);
            *touched.entry(first).or_default() += 1;
            if last != first {
                *touched.entry(last).or_default() += 1;
            }
        }
        let mut index: HashMap<usize, u32> = HashMap::new();
        let mut number = |at: usize| {
            if touched.get(&at).is_none_or(|&n| n < 2) {
                return NONE;
            }
            let next = u32::try_from(index.len()).unwrap_or(NONE);
            *index.entry(at).or_insert(next)
        };
        let ends = slices
            .iter()
            .map(|s| {
                let (first, last) = ends_of(s.address, s.len);
                (
                    number(first),
                    if last == first { NONE } else { number(last) },
                )
            })
            .collect();
        let mut owners = vec![0; index.len()];
        if dense_locked {
            for &(address, len) in dense {
                let (first, last) = ends_of(address, len);
                let mut count = |at| {
                    if let Some(&i) = index.get(&at) {
                        owners[i as usize] += 1;
                    }
                };
                count(first);
                if last != first {
                    count(last);
                }
            }
        }
        Self { ends, owners }
    }

    /// Counts a slice as locked.
    pub(super) fn lock(&mut self, slice: usize) {
        let (first, last) = self.ends[slice];
        for end in [first, last] {
            if end != NONE {
                self.owners[end as usize] += 1;
            }
        }
    }

    /// Counts a slice as unlocked and returns the pages of it that nobody else needs locked.
    pub(super) fn unlock(&mut self, slice: usize, pages: PageRange) -> PageRange {
        let (first, last) = self.ends[slice];
        let mut still_owned = |end: u32| {
            if end == NONE {
                return false;
            }
            let owners = &mut self.owners[end as usize];
            *owners = owners.saturating_sub(1);
            *owners > 0
        };
        let (keep_first, keep_last) = (still_owned(first), still_owned(last));
        pages.without(keep_first, keep_last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slice(address: usize, len: usize) -> SliceAt {
        SliceAt {
            address,
            len,
            shard: 0,
            offset: address as u64,
        }
    }

    #[test]
    fn a_shared_page_stays_until_its_last_owner_leaves() {
        let p = page_bytes();
        // Two slices that meet in the middle of page 2.
        let slices = [slice(p, p + p / 2), slice(2 * p + p / 2, p)];
        let mut b = Boundaries::new(&slices, &[], false);
        b.lock(0);
        b.lock(1);
        let r = b.unlock(0, PageRange::outer(slices[0].address, slices[0].len));
        assert_eq!(r, PageRange::outer(p, p), "page 2 still belongs to slice 1");
        let r = b.unlock(1, PageRange::outer(slices[1].address, slices[1].len));
        assert_eq!(r, PageRange::outer(2 * p, 2 * p));
    }

    #[test]
    fn locked_dense_neighbours_keep_their_page() {
        let p = page_bytes();
        let slices = [slice(p / 2, p)];
        let mut b = Boundaries::new(&slices, &[(0, p / 2)], true);
        b.lock(0);
        let r = b.unlock(0, PageRange::outer(slices[0].address, slices[0].len));
        assert_eq!(r, PageRange::outer(p, p), "page 0 holds dense weights");
    }

    proptest! {
        /// Against the plain model: a page is locked while any slice that touches it is.
        #[test]
        fn agrees_with_a_page_by_page_model(
            lens in proptest::collection::vec(1usize..9000, 1..40),
            toggles in proptest::collection::vec(any::<prop::sample::Index>(), 1..200),
        ) {
            let p = page_bytes();
            let mut at = p;
            let slices: Vec<_> = lens.iter().map(|&len| { let s = slice(at, len); at += len; s }).collect();
            let mut b = Boundaries::new(&slices, &[], false);
            let mut locked = vec![false; slices.len()];
            let mut kernel = vec![false; at / p + 2];
            for toggle in toggles {
                let i = toggle.index(slices.len());
                let pages = PageRange::outer(slices[i].address, slices[i].len);
                if locked[i] {
                    let r = b.unlock(i, pages);
                    for page in kernel.iter_mut().skip(r.start() / p).take(r.len() / p) { *page = false; }
                } else {
                    b.lock(i);
                    for page in kernel.iter_mut().skip(pages.start() / p).take(pages.len() / p) { *page = true; }
                }
                locked[i] = !locked[i];
                for (n, &is_locked) in kernel.iter().enumerate() {
                    let wanted = slices.iter().zip(&locked).any(|(s, &l)| {
                        l && s.address / p <= n && n <= (s.address + s.len - 1) / p
                    });
                    prop_assert_eq!(is_locked, wanted, "page {}", n);
                }
            }
        }
    }
}
