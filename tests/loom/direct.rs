//! Store `direct`: an expert that the engine uses has its own bytes, whatever the governor does meanwhile.

use super::{EXPERTS, PARTS, check_books, check_bounds, explore, small, tensor};
use hotpin::engine::ExpertArena;
use hotpin::store::{DirectOptions, DirectStore, ExpertStore, Fault};
use hotpin_controllers::ExpertId;
use loom::thread;
use std::sync::Arc;

/// Reads run when they are waited for, so that every run of a model is like the others.
const OPTIONS: DirectOptions = DirectOptions {
    direct: false,
    uring: false,
    verify: true,
    lock_dense: false,
    fault: None,
};

fn id(expert: i32) -> ExpertId {
    ExpertId(u32::try_from(expert).expect("an expert"))
}

/// What a graph does with a layer: the bytes of each part of each expert are waited for and looked at.
fn use_layer(store: &DirectStore, experts: &[i32]) -> Result<(), String> {
    let ids: Vec<ExpertId> = experts.iter().map(|&expert| id(expert)).collect();
    store.fetch(&ids).map_err(|e| e.to_string())?;
    store.begin_all()?;
    for (part, tag) in PARTS {
        store.wait(0, &tensor(part))?;
        for &expert in experts {
            let slot = store.slot(0, expert).expect("a slot");
            look_at(
                store,
                part,
                slot,
                tag + u8::try_from(expert).expect("small"),
            );
        }
    }
    Ok(())
}

/// The first and the last byte of a part in a slot.
fn look_at(store: &DirectStore, part: &str, slot: u32, expected: u8) {
    let window = store.window(&tensor(part)).expect("a window");
    let at = window.address + slot as usize * window.stride_bytes;
    for byte in [0, 64 * 124 / 32 * 34 - 1] {
        // SAFETY: inside a slot that the engine uses, whose reads have ended.
        let found = unsafe { *((at + byte) as *const u8) };
        assert_eq!(found, expected, "byte {byte} of {part} in slot {slot}");
    }
}

/// Two threads over a store with room for `room` experts, in every order.
fn beside(
    preemptions: usize,
    room: u64,
    options: DirectOptions,
    engine: impl Fn(&DirectStore) + Copy + Send + Sync + 'static,
    governor: impl Fn(&DirectStore) + Copy + Send + Sync + 'static,
) {
    let (small, _alone) = small();
    explore(preemptions, move || {
        let (map, learned) = (&small.map, &small.learned);
        // SAFETY: the mapping is never dropped.
        let made = unsafe { DirectStore::new(map, learned, small.layout(), options, 128 << 10) };
        let store = Arc::new(made.expect("store").0);
        store.set_capacity(room * map.shape().bytes(ExpertId(0)) + 40_000);
        let other = Arc::clone(&store);
        let thread = thread::spawn(move || engine(&other));
        check_bounds(&*store, map);
        governor(&store);
        check_bounds(&*store, map);
        thread.join().expect("engine");
        check_bounds(&*store, map);
        store.unlock_all();
        check_books(&*store, map);
    });
}

#[test]
fn an_expert_in_use_keeps_its_bytes_while_others_are_pinned_and_room_goes_away() {
    beside(
        2,
        2,
        OPTIONS,
        |store| {
            use_layer(store, &[0, 1]).expect("experts");
            use_layer(store, &[2]).expect("expert");
        },
        |store| {
            let _ = store.pin(id(1));
            store.set_capacity(0);
            store.unpin(id(1));
        },
    );
}

#[test]
fn what_the_governor_is_loading_is_waited_for() {
    beside(
        3,
        3,
        OPTIONS,
        |store| use_layer(store, &[0]).expect("expert"),
        |store| {
            let _ = store.pin(id(0));
        },
    );
}

#[test]
fn what_the_governor_left_off_is_taken_in_by_who_needs_it() {
    beside(
        3,
        3,
        OPTIONS,
        |store| use_layer(store, &[0]).expect("expert"),
        |store| {
            let mut leave_off = || true;
            let _ = store.pin_unless(id(0), &mut leave_off);
            store.start_tick();
            let _ = store.pin_unless(id(1), &mut leave_off);
            store.set_capacity(0);
        },
    );
}

/// Panics are not told apart by thread in a model; `live_direct` has the load that panics.
#[test]
fn a_load_that_fails_ends_the_wait_for_it() {
    let options = DirectOptions {
        fault: Some(Fault::ReadError),
        ..OPTIONS
    };
    beside(
        3,
        3,
        options,
        |store| {
            let error = use_layer(store, &[0]).expect_err("nothing can be read");
            assert!(error.contains("read"), "{error}");
        },
        |store| {
            // The engine may be at it.
            assert!(!store.pin(id(0)).unwrap_or(false), "nothing can be read");
        },
    );
}

#[test]
fn what_was_granted_until_its_release_stays_where_it_is() {
    beside(
        3,
        3,
        OPTIONS,
        |store| {
            for expert in 0..i32::try_from(EXPERTS).expect("small") {
                use_layer(store, &[expert]).expect("expert");
            }
            if store.is_complete() {
                for expert in 0..EXPERTS {
                    let (part, tag) = PARTS[0];
                    look_at(
                        store,
                        part,
                        expert,
                        tag + u8::try_from(expert).expect("small"),
                    );
                }
            }
            store.release();
        },
        |store| {
            store.set_capacity(0);
            store.set_capacity(u64::MAX);
        },
    );
}
