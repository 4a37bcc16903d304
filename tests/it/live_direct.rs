//! Store `direct` under the real engine: the same bits, whatever it may keep and however it reads,
//! and an error where the bytes are not the file's.

use super::support::{self, Loaded, NEVER, bits, forced_hash};
use hotpin::engine::EngineError;
use hotpin::governor::Fill;
use hotpin::plant::Rig;
use hotpin::store::{DirectOptions, Fault, Limitation, StoreKind};
use hotpin_controllers::{ExpertId, PolicyKind, Residence};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

const TICK: Duration = Duration::from_millis(20);

fn direct(
    loaded: &Loaded,
    policy: PolicyKind,
    limit_bytes: Option<u64>,
    tick: Duration,
    how: DirectOptions,
) -> Rig<'static> {
    let mut options = loaded.rig_options(policy, limit_bytes, tick);
    options.store = StoreKind::Direct;
    options.direct = how;
    Rig::assemble(loaded.model, loaded.map, options, &mut |_, _| {}).expect("rig")
}

#[test]
fn direct_computes_stock_bits_under_every_policy_however_little_it_may_keep() {
    let name = "direct_computes_stock_bits_under_every_policy_however_little_it_may_keep";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let tokens = loaded.tokens(102);
    let stock = bits(&mut loaded.rig(PolicyKind::Off, None, TICK), &tokens, 24);
    let all = loaded.map.shape().total_bytes();
    let verified = DirectOptions {
        verify: true,
        ..DirectOptions::default()
    };
    let cases = [
        (PolicyKind::Fetch, all * 3 / 10, verified),
        (PolicyKind::Static, all * 3 / 10, DirectOptions::default()),
        (PolicyKind::Lru, all * 3 / 10, verified),
        (PolicyKind::Lru, 0, DirectOptions::default()),
        (PolicyKind::Adaptive, all, DirectOptions::default()),
        (PolicyKind::Adaptive, all * 3 / 10, verified),
        (PolicyKind::Adaptive, 2 * loaded.expert_bytes(), verified),
    ];
    for (policy, limit_bytes, how) in cases {
        let what = format!("{policy} with {limit_bytes} bytes");
        let mut rig = direct(&loaded, policy, Some(limit_bytes), TICK, how);
        assert_eq!(bits(&mut rig, &tokens, 24), stock, "{what}");
        let status = rig.governor.as_ref().expect("governor").status();
        assert_eq!(status.failed, None, "{what}");
        let totals = rig.counters.totals();
        assert_eq!(totals.misses > 0, limit_bytes < all, "{what}: {totals:?}");
        let used = rig.session.arena_use().expect("an arena");
        // Nothing is looked at while everything is there; else experts are computed as they come.
        assert_eq!(
            used.home_decodes > 0,
            limit_bytes >= all,
            "{what}: {used:?}"
        );
        assert_eq!(used.split_layers > 0, limit_bytes < all, "{what}: {used:?}");
        check_books(&loaded, &rig, &what);
    }
}

/// Totals in the books are the sums over the experts.
fn check_books(loaded: &Loaded, rig: &Rig<'_>, what: &str) {
    let store = rig.store.as_ref().expect("store");
    let shape = loaded.map.shape();
    let mut residence = vec![Residence::Absent; shape.total_experts()];
    store.residence_into(&mut residence);
    let sum = |wanted: Residence| -> u64 {
        (0..residence.len())
            .filter(|&i| residence[i] == wanted)
            .map(|i| shape.bytes(ExpertId(u32::try_from(i).expect("small"))))
            .sum()
    };
    let held = store.held();
    assert_eq!(held.pinned_bytes, sum(Residence::Pinned), "{what}");
    assert_eq!(held.transit_bytes, sum(Residence::Transit), "{what}");
}

#[test]
fn what_an_arena_says_is_locked_is_what_the_kernel_has_locked() {
    let name = "what_an_arena_says_is_locked_is_what_the_kernel_has_locked";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let before = support::locked_bytes();
    let tokens = loaded.tokens(40);
    let how = DirectOptions::default();
    let all = loaded.map.shape().total_bytes();
    let mut rig = direct(&loaded, PolicyKind::Lru, Some(all / 2), NEVER, how);
    let store = rig.store.clone().expect("store");
    for (capacity, used) in [(all / 2, 8), (all / 6, 16), (all, 40), (0, 40)] {
        store.set_capacity(capacity);
        forced_hash(&mut rig.session, &tokens[..used]);
        assert_eq!(support::locked_bytes() - before, store.locked_bytes());
    }
    store.unlock_all();
    assert_eq!((support::locked_bytes(), store.locked_bytes()), (before, 0));
}

#[test]
fn every_way_of_reading_gives_the_same_bits() {
    let Some(loaded) = support::loaded("every_way_of_reading_gives_the_same_bits") else {
        return;
    };
    let tokens = loaded.tokens(102);
    let limit = Some(loaded.map.shape().total_bytes() / 5);
    let stock = bits(&mut loaded.rig(PolicyKind::Off, None, TICK), &tokens, 8);
    let default = DirectOptions::default();
    let ways = [
        DirectOptions {
            uring: false,
            ..default
        },
        DirectOptions {
            direct: false,
            ..default
        },
        DirectOptions {
            direct: false,
            uring: false,
            verify: true,
            ..default
        },
        // The rest of what came short is read.
        DirectOptions {
            fault: Some(Fault::ShortRead),
            verify: true,
            ..default
        },
    ];
    for way in ways {
        let mut rig = direct(&loaded, PolicyKind::Lru, limit, TICK, way);
        assert_eq!(bits(&mut rig, &tokens, 8), stock, "{way:?}");
        let limited = |wanted| rig.limitations.iter().any(|(limit, _)| *limit == wanted);
        assert_eq!(limited(Limitation::NoDirectIo), !way.direct, "{way:?}");
        assert_eq!(limited(Limitation::NoUring), !way.uring, "{way:?}");
    }
}

#[test]
fn wrong_bytes_stop_the_decode_and_never_become_tokens() {
    let name = "wrong_bytes_stop_the_decode_and_never_become_tokens";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let tokens = loaded.tokens(4);
    let cases = [
        (Fault::BitFlip, true, "not what the file has"),
        (Fault::SkipWait, true, "not what the file has"),
        (Fault::EarlyEnd, false, "the file ends"),
        (Fault::ReadError, false, "Input/output error"),
    ];
    for (fault, verify, words) in cases {
        for uring in [true, false] {
            let how = DirectOptions {
                fault: Some(fault),
                verify,
                uring,
                ..DirectOptions::default()
            };
            // Nothing is loaded ahead, so the engine is the first to read.
            let mut rig = direct(&loaded, PolicyKind::Fetch, Some(0), NEVER, how);
            match rig.session.decode(&tokens[..1]) {
                Err(EngineError::Poisoned(cause)) => {
                    assert!(cause.contains(words), "{fault:?}: {cause}");
                }
                other => panic!("{fault:?}, io_uring {uring}: {other:?}"),
            }
            drop(rig);
        }
    }
}

#[test]
fn a_context_goes_on_after_a_decode_that_failed() {
    let Some(loaded) = support::loaded("a_context_goes_on_after_a_decode_that_failed") else {
        return;
    };
    let tokens = loaded.tokens(102);
    let mut plain = loaded.rig(PolicyKind::Off, None, TICK);
    let stock = forced_hash(&mut plain.session, &tokens[..6]);
    let limit = Some(loaded.map.shape().total_bytes() / 5);
    let mut rig = direct(
        &loaded,
        PolicyKind::Lru,
        limit,
        NEVER,
        DirectOptions::default(),
    );
    rig.session.decode(&tokens[..1]).expect("decode");
    rig.session.poison().set("from outside".into());
    assert!(rig.session.decode(&tokens[1..2]).is_err());
    assert_eq!(forced_hash(&mut rig.session, &tokens[..6]), stock);
}

/// A prompt of several micro-batches, of which llama.cpp computes the later ones with the graph of the
/// first, and on more threads than one.
#[test]
fn micro_batches_that_share_a_graph_give_stock_bits() {
    let Some(loaded) = support::loaded("micro_batches_that_share_a_graph_give_stock_bits") else {
        return;
    };
    let tokens = loaded.tokens(102);
    for n_ubatch in [16, 64] {
        let options = |policy, store, limit_bytes| {
            let mut options = loaded.rig_options(policy, limit_bytes, NEVER);
            options.engine.n_ubatch = n_ubatch;
            options.engine.threads = 2;
            options.store = store;
            options
        };
        let assemble = |options| {
            Rig::assemble(loaded.model, loaded.map, options, &mut |_, _| {}).expect("rig")
        };
        let mut plain = assemble(options(PolicyKind::Off, StoreKind::Mapped, None));
        let stock = bits(&mut plain, &tokens, 4);
        let limit = loaded.map.shape().total_bytes() / 5;
        let mut rig = assemble(options(PolicyKind::Lru, StoreKind::Direct, Some(limit)));
        assert_eq!(bits(&mut rig, &tokens, 4), stock, "{n_ubatch}");
        let used = rig.session.arena_use().expect("an arena");
        assert!(used.split_layers > 0, "{n_ubatch}: {used:?}");
    }
}

/// A prompt uses every expert of a layer. They are read and computed a few at a time where there is no
/// room for all of them.
#[test]
fn a_prompt_keeps_to_the_memory_that_there_is() {
    let Some(loaded) = support::loaded("a_prompt_keeps_to_the_memory_that_there_is") else {
        return;
    };
    let tokens = loaded.tokens(100);
    let hash = |rig: &mut Rig<'_>| {
        rig.session.clear();
        rig.session.decode(&tokens).expect("decode");
        let bits = |x: &f32| x.to_bits();
        rig.session.logits().iter().map(bits).collect::<Vec<u32>>()
    };
    let stock = hash(&mut loaded.rig(PolicyKind::Off, None, TICK));
    let shape = loaded.map.shape();
    let layer = u64::from(shape.experts_in(0));
    for verify in [false, true] {
        let how = DirectOptions {
            verify,
            ..DirectOptions::default()
        };
        let mut rig = direct(&loaded, PolicyKind::Lru, Some(0), NEVER, how);
        assert_eq!(hash(&mut rig), stock, "verify {verify}");
        let totals = rig.counters.totals();
        assert!(totals.misses >= layer * 20, "{totals:?}");
        let used = rig.session.arena_use().expect("an arena");
        assert!(used.split_layers > 20, "{used:?}");
        // Three experts at most, in whole huge pages.
        let store = rig.store.as_ref().expect("store");
        let most = 3 * loaded.expert_bytes() + (3 << 20);
        let memory = store.private_transit_bytes();
        assert!(memory <= most, "{memory} of {most}");
        assert!(most < layer * loaded.expert_bytes(), "{most}");
    }
}

/// One read fails, the decode is given up, and the rest of the expert arrives later.
#[test]
fn an_expert_that_lacks_a_part_never_becomes_resident() {
    let Some(loaded) = support::loaded("an_expert_that_lacks_a_part_never_becomes_resident") else {
        return;
    };
    let how = DirectOptions {
        fault: Some(Fault::ReadErrorOnce),
        ..DirectOptions::default()
    };
    let shape = loaded.map.shape();
    let limit = Some(shape.total_bytes() / 5);
    let mut rig = direct(&loaded, PolicyKind::Fetch, limit, NEVER, how);
    let store = Arc::clone(rig.store.as_ref().expect("store"));
    let residence = |id: ExpertId| {
        let mut all = vec![Residence::Absent; shape.total_experts()];
        store.residence_into(&mut all);
        all[id.index()]
    };
    let layer = shape.layers() - 1;
    let absent = |id: &ExpertId| residence(*id) == Residence::Absent;
    let wanted: Vec<ExpertId> = (0..shape.experts_in(layer))
        .map(|index| shape.id(layer, index))
        .filter(absent)
        .take(2)
        .collect();
    let [whole, lacking] = wanted[..] else {
        panic!("two experts that are not resident: {wanted:?}");
    };
    store.fetch(&wanted).expect("fetch");
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(2));
        store.fetch(&[]).expect("fetch");
    }
    assert_eq!(residence(whole), Residence::Transit);
    assert_eq!(residence(lacking), Residence::Absent);
    let tokens = loaded.tokens(102);
    let stock = bits(&mut loaded.rig(PolicyKind::Off, None, TICK), &tokens, 4);
    assert_eq!(bits(&mut rig, &tokens, 4), stock);
}

/// The governor's side panics before it has asked for any part of an expert, and when one is asked for: the engine
/// needs the expert then, and reads it itself.
#[test]
fn a_load_that_panics_does_not_leave_the_engine_waiting() {
    let name = "a_load_that_panics_does_not_leave_the_engine_waiting";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let tokens = loaded.tokens(102);
    let stock = bits(&mut loaded.rig(PolicyKind::Off, None, TICK), &tokens, 24);
    for (parts, uring) in [(0, true), (1, true), (0, false), (1, false)] {
        let how = DirectOptions {
            fault: Some(Fault::LoaderPanic(parts)),
            verify: true,
            uring,
            ..DirectOptions::default()
        };
        let mut rig = direct(&loaded, PolicyKind::Fetch, Some(0), NEVER, how);
        let store = Arc::clone(rig.store.as_ref().expect("store"));
        // The prompt is routed to every expert of a layer.
        let expert = loaded.map.shape().id(1, 3);
        let pin = || store.pin(expert);
        let pinned = std::panic::catch_unwind(std::panic::AssertUnwindSafe(pin));
        assert!(pinned.is_err(), "{pinned:?}");
        let what = format!("{parts} parts, io_uring {uring}");
        assert_eq!(bits(&mut rig, &tokens, 24), stock, "{what}");
        check_books(&loaded, &rig, &what);
    }
}

/// What the first decision wants is read between ticks; a panic there is the governor's as well.
#[test]
fn a_governor_that_panics_between_ticks_unlocks_everything_and_the_session_goes_on() {
    let name = "a_governor_that_panics_between_ticks_unlocks_everything_and_the_session_goes_on";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let tokens = loaded.tokens(102);
    let stock = bits(&mut loaded.rig(PolicyKind::Off, None, TICK), &tokens, 24);
    let before = support::locked_bytes();
    let how = DirectOptions {
        fault: Some(Fault::LoaderPanic(1)),
        ..DirectOptions::default()
    };
    let mut options = loaded.rig_options(PolicyKind::Adaptive, Some(100 << 20), TICK);
    options.store = StoreKind::Direct;
    options.direct = how;
    options.fill = Fill::Beside;
    let mut rig = Rig::assemble(loaded.model, loaded.map, options, &mut |_, _| {}).expect("rig");
    let failed = || {
        let governor = rig.governor.as_ref().expect("governor");
        governor.status().failed
    };
    support::wait_until("the governor to fail", || failed().is_some());
    let said = failed().expect("failed");
    assert!(said.contains("everything was unlocked"), "{said}");
    assert_eq!(support::locked_bytes(), before);
    assert_eq!(bits(&mut rig, &tokens, 24), stock);
    assert_eq!(support::locked_bytes(), before);
}

/// Whoever wants an expert pinned may leave off while it is read: then it comes later, one at a time, taken in by
/// who looks next, also by the engine when it is routed.
#[test]
fn a_pin_that_is_left_off_is_taken_in_by_whoever_looks_next() {
    let name = "a_pin_that_is_left_off_is_taken_in_by_whoever_looks_next";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let tokens = loaded.tokens(102);
    let stock = bits(&mut loaded.rig(PolicyKind::Off, None, TICK), &tokens, 24);
    let shape = loaded.map.shape();
    for uring in [false, true] {
        let how = DirectOptions {
            verify: true,
            uring,
            ..DirectOptions::default()
        };
        let mut rig = direct(
            &loaded,
            PolicyKind::Fetch,
            Some(shape.total_bytes()),
            NEVER,
            how,
        );
        let store = Arc::clone(rig.store.as_ref().expect("store"));
        let pin_in_a_moment = |id| store.pin_unless(id, &mut || true).expect("pin");
        let pinned = || store.held().pinned_bytes;
        let (first, second) = (shape.id(1, 3), shape.id(2, 5));
        let mut tries = 0;
        while !pin_in_a_moment(first) {
            // Nothing is promised of an expert that is not there.
            assert_eq!(pinned(), 0);
            let mut residence = vec![Residence::Absent; shape.total_experts()];
            store.residence_into(&mut residence);
            assert_ne!(residence[first.index()], Residence::Pinned);
            store.start_tick();
            tries += 1;
            assert!(tries < 10_000, "it never comes");
        }
        // Without io_uring one of its parts is read at a time.
        assert!(uring || tries == 2, "{tries}");
        assert_eq!(pinned(), shape.bytes(first));
        // What was begun comes before what is wanted now.
        assert!(uring || !pin_in_a_moment(second));
        assert!(store.pin(shape.id(2, 6)).expect("pin"));
        assert!(
            store.pin(second).expect("pin"),
            "it is there and not pinned"
        );
        let left_off = shape.id(0, 1);
        let has_come = pin_in_a_moment(left_off);
        assert!(uring || !has_come);
        // The engine comes upon it in its first layer.
        assert_eq!(bits(&mut rig, &tokens, 24), stock, "io_uring: {uring}");
        assert!(has_come || store.pin(left_off).expect("pin"), "it is there");
        let held: u64 = [first, second, shape.id(2, 6), left_off]
            .map(|id| shape.bytes(id))
            .iter()
            .sum();
        assert_eq!(pinned(), held);
    }
}

/// Everything is at home most of the time, and nobody asks for routing then; capacity that falls a
/// third takes many away in the middle of it.
#[test]
fn decodes_at_home_bear_capacity_that_comes_and_goes() {
    let Some(loaded) = support::loaded("decodes_at_home_bear_capacity_that_comes_and_goes") else {
        return;
    };
    let tokens = loaded.tokens(102);
    let stock = bits(&mut loaded.rig(PolicyKind::Off, None, TICK), &tokens, 24);
    let shape = loaded.map.shape();
    let all = shape.total_bytes();
    let how = DirectOptions::default();
    let mut rig = direct(&loaded, PolicyKind::Fetch, Some(all), NEVER, how);
    let store = Arc::clone(rig.store.as_ref().expect("store"));
    let done = AtomicBool::new(false);
    let mut falls = 0_u64;
    std::thread::scope(|scope| {
        let disturbing = scope.spawn(|| {
            let mut falls = 0_u64;
            while !done.load(Relaxed) {
                store.set_capacity(all);
                for index in 0..shape.total_experts() {
                    store.warm(ExpertId(u32::try_from(index).expect("small")));
                }
                // As a governor's ticks do: each brings some of them home.
                for _ in 0..60 {
                    store.set_capacity(all);
                    std::thread::sleep(Duration::from_millis(2));
                }
                std::thread::sleep(Duration::from_millis(60));
                store.set_capacity(all / 100 * 60);
                falls += 1;
                std::thread::sleep(Duration::from_millis(30));
            }
            falls
        });
        for round in 0..6 {
            assert_eq!(bits(&mut rig, &tokens, 24), stock, "round {round}");
        }
        done.store(true, Relaxed);
        falls = disturbing.join().expect("the disturbing thread");
    });
    let used = rig.session.arena_use().expect("an arena");
    assert!(
        falls > 5 && used.home_decodes > 10 && used.split_layers > 10,
        "{falls} {used:?}"
    );
}

/// Memory is made ready before slots are used, within the budget, and given back with it.
#[test]
fn memory_is_ready_before_it_is_used() {
    let Some(loaded) = support::loaded("memory_is_ready_before_it_is_used") else {
        return;
    };
    let tokens = loaded.tokens(102);
    let stock = bits(&mut loaded.rig(PolicyKind::Off, None, TICK), &tokens, 24);
    let all = loaded.map.shape().total_bytes();
    let mut rig = direct(
        &loaded,
        PolicyKind::Fetch,
        Some(all),
        NEVER,
        DirectOptions::default(),
    );
    let store = Arc::clone(rig.store.as_ref().expect("store"));
    while store.prepare() {}
    let ready = store.private_transit_bytes();
    assert!(ready > 0 && ready <= 160 << 20, "{ready} bytes are ready");
    let held = store.held();
    assert_eq!(
        (held.pinned_bytes, held.transit_bytes),
        (0, 0),
        "and nothing is in them"
    );
    store.set_capacity(0);
    assert_eq!(store.private_transit_bytes(), 0, "all was given back");
    assert!(!store.prepare(), "nothing is wanted");
    store.set_capacity(all);
    while store.prepare() {}
    assert_eq!(bits(&mut rig, &tokens, 24), stock);
    // What the last layer used stays where it is until the next one is routed.
    let small = 8 * loaded.expert_bytes();
    store.set_capacity(small);
    assert_eq!(bits(&mut rig, &tokens, 24), stock);
    store.set_capacity(small);
    while store.prepare() {}
    let held = store.private_transit_bytes();
    assert!(
        held <= small + 4 * loaded.expert_bytes(),
        "{held} of {small} bytes"
    );
    check_books(&loaded, &rig, "after it was given back");
}

/// What a profile names is read while the engine already decodes, and pinned as it comes.
#[test]
fn a_session_begins_at_once_and_is_filled_beside() {
    let Some(loaded) = support::loaded("a_session_begins_at_once_and_is_filled_beside") else {
        return;
    };
    let tokens = loaded.tokens(102);
    let stock = bits(&mut loaded.rig(PolicyKind::Off, None, TICK), &tokens, 24);
    let shape = loaded.map.shape();
    let half = shape.total_bytes() / 2;
    let mut options = loaded.rig_options(PolicyKind::Adaptive, Some(half), TICK);
    options.store = StoreKind::Direct;
    options.fill = Fill::Beside;
    // The last ones of each layer, which the text does not prefer.
    let rank = |index| f32::from(u8::from(index % 8 >= 4)) * 100.0 + 1.0;
    options.profile = Some((0..shape.total_experts()).map(rank).collect());
    let mut rig = Rig::assemble(loaded.model, loaded.map, options, &mut |_, _| {}).expect("rig");
    let store = Arc::clone(rig.store.as_ref().expect("store"));
    assert!(
        store.held().pinned_bytes < half / 4,
        "it was not waited for"
    );
    assert_eq!(bits(&mut rig, &tokens, 24), stock);
    let until = std::time::Instant::now() + Duration::from_secs(60);
    let filled = || {
        let held = store.held();
        held.pinned_bytes > half / 4 && held.pinned_bytes + held.transit_bytes > half / 10 * 9
    };
    while !filled() {
        assert!(std::time::Instant::now() < until, "{:?}", store.held());
        std::thread::sleep(Duration::from_millis(20));
    }
    check_books(&loaded, &rig, "after the start");
}

/// Capacity jumps between next to nothing and everything, and experts are pinned and unpinned at
/// random, while the engine decodes. `HOTPIN_SOAK_TOKENS` makes it longer.
#[test]
fn capacity_may_change_at_any_time_without_a_wrong_bit() {
    let name = "capacity_may_change_at_any_time_without_a_wrong_bit";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let wanted = std::env::var("HOTPIN_SOAK_TOKENS").ok();
    let wanted = wanted.map_or(300, |text| text.parse().expect("a number of tokens"));
    let tokens = loaded.tokens(102);
    let stock = bits(&mut loaded.rig(PolicyKind::Off, None, TICK), &tokens, 24);
    let shape = loaded.map.shape();
    let all = shape.total_bytes();
    let how = DirectOptions {
        verify: true,
        ..DirectOptions::default()
    };
    let mut rig = direct(&loaded, PolicyKind::Adaptive, Some(all), NEVER, how);
    let store = Arc::clone(rig.store.as_ref().expect("store"));
    let experts = u64::try_from(shape.total_experts()).expect("small");
    let done = AtomicBool::new(false);
    let (mut decoded, mut changes) = (0, 0_u64);
    std::thread::scope(|scope| {
        let disturbing = scope.spawn(|| {
            let mut random = 88_172_645_463_325_252_u64;
            let mut next = |below: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % below
            };
            let mut changes = 0_u64;
            while !done.load(Relaxed) {
                let id = ExpertId(u32::try_from(next(experts)).expect("small"));
                match next(4) {
                    0 => store.set_capacity(all / 100 * next(120)),
                    1 => store.set_capacity(all),
                    2 => drop(store.pin(id)),
                    _ => drop(store.unpin(id)),
                }
                changes += 1;
                std::thread::sleep(Duration::from_millis(2));
            }
            changes
        });
        while decoded < wanted {
            assert_eq!(bits(&mut rig, &tokens, 24), stock, "after {decoded} tokens");
            decoded += tokens.len();
        }
        done.store(true, Relaxed);
        changes = disturbing.join().expect("the disturbing thread");
    });
    let used = rig.session.arena_use().expect("an arena");
    assert!(
        changes > 100 && used.split_layers > 100,
        "{changes} {used:?}"
    );
    store.set_capacity(all);
    check_books(&loaded, &rig, "after the soak");
    let held = store.held();
    let bytes = held.pinned_bytes + store.private_transit_bytes();
    assert!(bytes <= all + all / 50, "{bytes} held of {all}");
}
