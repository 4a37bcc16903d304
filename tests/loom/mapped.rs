//! Store `mapped`: one compare-and-swap a change, and totals that never disagree with it.

use super::{check_books, check_bounds, explore, small};
use hotpin::store::{ExpertStore, MappedStore, TransitKeeper};
use hotpin_controllers::ExpertId;
use loom::thread;
use std::sync::Arc;

const A: ExpertId = ExpertId(0);
const B: ExpertId = ExpertId(1);
const C: ExpertId = ExpertId(2);

/// Two threads over a store with room for `room` experts, in every order.
fn beside(
    preemptions: usize,
    room: u64,
    engine: impl Fn(&MappedStore) + Copy + Send + Sync + 'static,
    governor: impl Fn(&MappedStore) + Copy + Send + Sync + 'static,
) {
    let (small, _alone) = small();
    explore(preemptions, move || {
        // SAFETY: the mapping is never dropped.
        let (store, _) =
            unsafe { MappedStore::new(small.layout(), TransitKeeper::Store, false, 128 << 10) };
        let store = Arc::new(store);
        store.set_capacity(room * small.map.shape().bytes(A));
        let other = Arc::clone(&store);
        let thread = thread::spawn(move || {
            engine(&other);
        });
        check_bounds(&*store, &small.map);
        governor(&store);
        check_bounds(&*store, &small.map);
        thread.join().expect("engine");
        check_books(&*store, &small.map);
        store.unlock_all();
        check_books(&*store, &small.map);
    });
}

fn fetch(store: &MappedStore, id: ExpertId) {
    let found = store.fetch(&[id]).expect("fetch");
    assert_eq!(found.hits + found.misses, 1);
    assert!(found.pinned_hits <= found.hits);
}

#[test]
fn an_expert_that_is_fetched_and_pinned_at_once_is_counted_once() {
    beside(
        4,
        3,
        |store| fetch(store, A),
        |store| {
            store.pin(A).expect("pin");
        },
    );
}

#[test]
fn totals_stay_in_bounds_while_experts_come_and_go() {
    beside(
        3,
        1,
        |store| {
            fetch(store, A);
            fetch(store, B);
        },
        |store| {
            let pinned = store.pin(A).expect("pin");
            assert_eq!(store.unpin(A), pinned, "only the governor pins and unpins");
            store.trim();
        },
    );
}

#[test]
fn capacity_that_goes_away_leaves_no_expert_behind() {
    beside(
        3,
        2,
        |store| {
            store.fetch(&[A, B]).expect("fetch");
            fetch(store, C);
        },
        |store| {
            store.set_capacity(0);
            store.trim();
            store.warm(C);
        },
    );
}

#[test]
fn everything_can_be_unlocked_while_the_engine_goes_on() {
    beside(
        3,
        3,
        |store| {
            fetch(store, A);
            let _ = store.is_complete();
            store.release();
        },
        |store| {
            store.pin(A).expect("pin");
            store.pin(B).expect("pin");
            store.unlock_all();
            assert_eq!(store.held().pinned_bytes, 0);
        },
    );
}
