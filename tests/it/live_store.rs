//! The store's books against the kernel's: what is locked, to the page.

use super::support::{self, Draw, Loaded, NEVER, locked_bytes};
use hotpin::plant::Rig;
use hotpin::store::{ExpertStore, Layout};
use hotpin_controllers::{ExpertId, PolicyKind, Residence};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A store that nobody else acts on, and what should be locked.
struct Books {
    rig: Rig<'static>,
    store: Arc<dyn ExpertStore>,
    layout: Layout,
    /// Numbers of the pages from the first byte of weights to the last.
    model: Range<usize>,
    pinned: BTreeSet<usize>,
    before: u64,
}

impl Books {
    fn open(loaded: &Loaded, policy: PolicyKind) -> Self {
        let before = locked_bytes();
        let rig = loaded.rig(policy, Some(0), NEVER);
        let store = rig.store.clone().expect("store");
        let layout =
            Layout::new(loaded.map, rig.session.learned().expect("tapped")).expect("layout");
        let slices = layout.slices().iter().map(|s| pages(s.address, s.len));
        let dense = layout
            .dense()
            .iter()
            .map(|&(address, len)| pages(address, len));
        let all: Vec<Range<usize>> = slices.chain(dense).collect();
        let first = all.iter().map(|range| range.start).min().expect("weights");
        let end = all.iter().map(|range| range.end).max().expect("weights");
        let model = first..end;
        Self {
            rig,
            store,
            layout,
            model,
            pinned: BTreeSet::new(),
            before,
        }
    }

    fn toggle(&mut self, index: usize) {
        let id = ExpertId(u32::try_from(index).expect("small"));
        if self.pinned.remove(&index) {
            assert!(self.store.unpin(id));
            assert!(!self.store.unpin(id), "unpinned twice");
        } else {
            self.pinned.insert(index);
            assert!(self.store.pin(id).expect("pin"));
            assert!(!self.store.pin(id).expect("pin again"), "pinned twice");
        }
    }

    fn ranges(&self, index: usize) -> impl Iterator<Item = Range<usize>> {
        let id = ExpertId(u32::try_from(index).expect("small"));
        self.layout
            .slices_of(id)
            .map(|i| pages(self.layout.slices()[i].address, self.layout.slices()[i].len))
    }

    /// For each page of the model whether it has to be locked now: dense weights and pinned slices,
    /// each page once.
    fn expected(&self) -> Vec<bool> {
        let dense = self
            .layout
            .dense()
            .iter()
            .map(|&(address, len)| pages(address, len));
        let mut locked = vec![false; self.model.len()];
        for range in dense.chain(self.pinned.iter().flat_map(|&index| self.ranges(index))) {
            locked[range.start - self.model.start..range.end - self.model.start].fill(true);
        }
        locked
    }

    fn check_total(&self) {
        let pages = self.expected().into_iter().filter(|&locked| locked).count();
        let expected = pages as u64 * page_bytes() as u64;
        assert_eq!(
            self.store.locked_bytes(),
            expected,
            "what the store says of itself"
        );
        assert_eq!(
            locked_bytes() - self.before,
            expected,
            "{} pinned",
            self.pinned.len()
        );
    }

    fn check_books(&self) {
        let shape = self.layout.shape();
        let bytes: u64 = self
            .pinned
            .iter()
            .map(|&i| shape.bytes(ExpertId(u32::try_from(i).expect("small"))))
            .sum();
        assert_eq!(self.store.held().pinned_bytes, bytes);
        let mut residence = vec![Residence::Absent; shape.total_experts()];
        self.store.residence_into(&mut residence);
        for (index, found) in residence.iter().enumerate() {
            assert_eq!(
                *found == Residence::Pinned,
                self.pinned.contains(&index),
                "expert {index}"
            );
        }
    }

    /// Every page of the model is locked or not as expected, by the flags of the mapping that it is
    /// in; a mapping that is locked is wholly resident.
    fn check_ranges(&self) {
        let mut locked = vec![false; self.model.len()];
        for mapping in mappings() {
            let inside =
                mapping.pages.start.max(self.model.start)..mapping.pages.end.min(self.model.end);
            if !mapping.locked || inside.is_empty() {
                continue;
            }
            assert_eq!(
                mapping.resident_bytes,
                (mapping.pages.len() * page_bytes()) as u64,
                "{mapping:?}"
            );
            locked[inside.start - self.model.start..inside.end - self.model.start].fill(true);
        }
        let expected = self.expected();
        let wrong = (0..locked.len())
            .filter(|&page| locked[page] != expected[page])
            .count();
        assert_eq!(
            wrong, 0,
            "pages of the model that are locked and should not be, or the reverse"
        );
    }

    fn close(self) {
        drop(self.store);
        drop(self.rig);
        assert_eq!(locked_bytes(), self.before, "left locked");
    }
}

#[derive(Debug)]
struct Mapping {
    pages: Range<usize>,
    locked: bool,
    resident_bytes: u64,
}

fn page_bytes() -> usize {
    hotpin::store::residency::page_bytes().expect("page size")
}

/// Numbers of the pages that a range of addresses touches.
fn pages(address: usize, len: usize) -> Range<usize> {
    address / page_bytes()..(address + len).div_ceil(page_bytes())
}

/// Mappings of this process, from smaps.
fn mappings() -> Vec<Mapping> {
    let text = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let mut found: Vec<Mapping> = Vec::new();
    for line in text.lines() {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        if let Some((start, end)) = first.split_once('-') {
            let page = |hex| usize::from_str_radix(hex, 16).expect("address") / page_bytes();
            found.push(Mapping {
                pages: page(start)..page(end),
                locked: false,
                resident_bytes: 0,
            });
            continue;
        }
        let last = found.last_mut().expect("a mapping before its fields");
        match first {
            "Rss:" => {
                let kb = rest.trim().strip_suffix(" kB").expect("kB");
                last.resident_bytes = kb.parse::<u64>().expect("number") << 10;
            }
            "VmFlags:" => last.locked = rest.split(' ').any(|flag| flag == "lo"),
            _ => {}
        }
    }
    found
}

/// Random pins and unpins; the total after each, the ranges now and then.
fn check_random_order(loaded: &Loaded, policy: PolicyKind, seed: u64) {
    let mut books = Books::open(loaded, policy);
    books.check_total();
    books.check_ranges();
    assert!(
        books.expected().contains(&true),
        "dense weights are locked first"
    );
    let experts = books.layout.shape().total_experts();
    let mut draw = Draw(seed);
    for step in 1..=160 {
        books.toggle(draw.below(experts));
        books.check_total();
        if step % 40 == 0 {
            books.check_books();
            books.check_ranges();
        }
    }
    // Neighbours in the file, which share pages where slices are not page-aligned.
    for index in (0..8).chain([1, 3, 5, 0, 7]) {
        books.toggle(index);
        books.check_total();
    }
    for index in books.pinned.clone() {
        books.toggle(index);
    }
    books.check_total();
    books.check_ranges();
    books.check_books();
    books.close();
}

#[test]
fn locked_pages_are_those_of_the_books_where_the_kernel_keeps_transit() {
    let name = "locked_pages_are_those_of_the_books_where_the_kernel_keeps_transit";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    check_random_order(&loaded, PolicyKind::Fetch, 7);
}

#[test]
fn locked_pages_are_those_of_the_books_where_the_store_keeps_transit() {
    let name = "locked_pages_are_those_of_the_books_where_the_store_keeps_transit";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    check_random_order(&loaded, PolicyKind::Lru, 11);
}

#[test]
fn pins_left_at_the_end_are_unlocked_with_the_store() {
    let Some(loaded) = support::loaded("pins_left_at_the_end_are_unlocked_with_the_store") else {
        return;
    };
    let mut books = Books::open(&loaded, PolicyKind::Fetch);
    (0..20).for_each(|index| books.toggle(index * 3));
    books.check_total();
    books.close();
}

#[test]
fn everything_is_unlocked_on_demand() {
    let Some(loaded) = support::loaded("everything_is_unlocked_on_demand") else {
        return;
    };
    let mut books = Books::open(&loaded, PolicyKind::Fetch);
    (0..20).for_each(|index| books.toggle(index * 5));
    books.store.unlock_all();
    assert_eq!(locked_bytes(), books.before);
    books.pinned.clear();
    books.check_books();
    books.close();
}

/// The engine's thread fetches and evicts while the governor's pins and unpins.
#[test]
fn books_hold_while_two_threads_move_experts() {
    let Some(loaded) = support::loaded("books_hold_while_two_threads_move_experts") else {
        return;
    };
    let mut books = Books::open(&loaded, PolicyKind::Lru);
    let shape = books.layout.shape().clone();
    books.store.set_capacity(shape.total_bytes() / 4);
    let done = AtomicBool::new(false);
    let engine = Arc::clone(&books.store);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut draw = Draw(3);
            while !done.load(Relaxed) {
                let layer = draw.below(shape.layers());
                let first =
                    u32::try_from(draw.below(shape.experts_in(layer) as usize - 1)).expect("small");
                let routed = [shape.id(layer, first), shape.id(layer, first + 1)];
                engine.fetch(&routed).expect("fetch");
            }
        });
        let mut draw = Draw(5);
        for _ in 0..200 {
            let index = draw.below(shape.total_experts());
            let id = ExpertId(u32::try_from(index).expect("small"));
            // Evicting it at that moment, the engine may win; then nothing has changed.
            if books.pinned.contains(&index) {
                assert!(books.store.unpin(id), "only we pin and unpin");
                books.pinned.remove(&index);
            } else if books.store.pin(id).expect("pin") {
                books.pinned.insert(index);
            }
        }
        done.store(true, Relaxed);
    });
    drop(engine);
    books.check_total();
    books.check_books();
    books.check_ranges();
    let held = books.store.held();
    let mut residence = vec![Residence::Absent; shape.total_experts()];
    books.store.residence_into(&mut residence);
    let transit = (0..residence.len()).filter(|&i| residence[i] == Residence::Transit);
    let bytes: u64 = transit
        .map(|i| shape.bytes(ExpertId(u32::try_from(i).expect("small"))))
        .sum();
    assert_eq!(held.transit_bytes, bytes, "transit by total and by expert");
    books.close();
}
