//! What ends a decode, and the counters. What ends a session is in a `OnceLock`, which is std's own.

use super::{EXPERTS, check_books, explore, small};
use hotpin::engine::{Pass, Poison, RouteSink, Routed};
use hotpin::plant::{Counters, Feeder};
use hotpin::store::{ExpertStore, MappedStore, TransitKeeper};
use hotpin_controllers::ExpertId;
use loom::thread;
use std::sync::Arc;

#[test]
fn of_several_failures_one_cause_is_told_and_no_decode_after_it_is_blamed() {
    explore(4, || {
        let poison = Arc::new(Poison::default());
        let setters = ["a", "b"].map(|cause| {
            let poison = Arc::clone(&poison);
            thread::spawn(move || poison.set(cause.into()))
        });
        let during = poison.take();
        for setter in setters {
            setter.join().expect("setter");
        }
        let after = poison.take();
        let told: Vec<String> = during.into_iter().chain(after).collect();
        assert!(!told.is_empty(), "a failure was lost");
        assert!(told.iter().all(|cause| cause == "a" || cause == "b"));
        assert!(!poison.is_set() && poison.take().is_none(), "told once");
    });
}

fn feeder(small: &super::Small, counters: &Arc<Counters>) -> Feeder {
    // SAFETY: the mapping is never dropped.
    let (store, _) =
        unsafe { MappedStore::new(small.layout(), TransitKeeper::Store, false, 128 << 10) };
    store.set_capacity(u64::MAX);
    let store: Arc<dyn ExpertStore> = Arc::new(store);
    let shape = small.map.shape().clone();
    Feeder::new(Arc::clone(counters), store, shape, &[0], None)
}

fn decode(feeder: &mut Feeder, expert: i32) {
    let routed = Routed {
        block: 0,
        experts: &[expert],
        tokens: 1,
        batch_tokens: 1,
        pass: Pass::Next,
        since_last_ns: 5,
    };
    feeder.routed(&routed).expect("routed");
    feeder.decoded(Pass::Next, 1, 5, 10);
}

/// No total is ahead of what was done, and at the end all of it is there.
#[test]
fn counters_are_never_ahead_and_lose_nothing() {
    let (small, _alone) = small();
    explore(2, move || {
        let counters = Arc::new(Counters::new(EXPERTS as usize));
        let mut feeder = feeder(small, &counters);
        let thread = thread::spawn(move || decode(&mut feeder, 0));
        let during = counters.totals();
        assert!(during.decode_tokens <= 1 && during.decode_ns <= 10);
        assert!(during.hits == 0 && during.misses <= 1);
        thread.join().expect("engine");
        let end = counters.totals();
        assert_eq!((end.decode_tokens, end.hits, end.misses), (1, 0, 1));
        let mut decoded = [0; EXPERTS as usize];
        counters.decode_into(&mut decoded);
        assert_eq!(decoded, [1, 0, 0]);
        assert_eq!(counters.missed()[1], 1);
    });
}

/// The engine's side of everything at once, beside a governor that pins what it uses.
#[test]
fn a_feeder_and_a_governor_agree_on_the_books() {
    let (small, _alone) = small();
    explore(2, move || {
        let counters = Arc::new(Counters::new(EXPERTS as usize));
        // SAFETY: the mapping is never dropped.
        let (store, _) =
            unsafe { MappedStore::new(small.layout(), TransitKeeper::Store, false, 128 << 10) };
        let store: Arc<dyn ExpertStore> = Arc::new(store);
        store.set_capacity(2 * small.map.shape().bytes(ExpertId(0)));
        let shape = small.map.shape().clone();
        let mut feeder = Feeder::new(Arc::clone(&counters), Arc::clone(&store), shape, &[0], None);
        let thread = thread::spawn(move || {
            decode(&mut feeder, 0);
            decode(&mut feeder, 1);
        });
        store.publish_ranks(&[3.0, 2.0, 1.0]);
        store.pin(ExpertId(0)).expect("pin");
        store.start_tick();
        thread.join().expect("engine");
        let totals = counters.totals();
        assert_eq!(totals.hits + totals.misses, 2);
        check_books(&*store, &small.map);
    });
}
