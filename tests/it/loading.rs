//! Experts that store `direct` reads for the governor, without an engine.

use super::arena::{BLOCKING, EXPERTS, store};
use super::support;
use hotpin::engine::ExpertArena;
use hotpin::store::{DirectOptions, DirectStore, ExpertStore, Fault, Limitation, Warmed};
use hotpin_controllers::{ExpertId, Residence};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

const LAST_PART: &str = "blk.0.ffn_down_exps.weight";

/// Room for all experts.
fn give_room(store: &DirectStore, expert_bytes: u64) {
    store.set_capacity(u64::from(EXPERTS) * (expert_bytes + 8192));
}

/// What a graph does with an expert.
fn use_expert(store: &DirectStore, id: ExpertId) -> Result<(), String> {
    store.fetch(&[id]).map_err(|e| e.to_string())?;
    store.wait(0, LAST_PART)?;
    let mut residence = vec![Residence::Absent; EXPERTS as usize];
    store.residence_into(&mut residence);
    assert_eq!(residence[id.index()], Residence::Transit);
    Ok(())
}

/// Keeps a thread on a processor of its own, the first or the second, where there are two: the one that wakes up does not
/// take the place of the other.
fn run_apart(second: bool) {
    let this = Pid::from_raw(0);
    let all = sched_getaffinity(this).expect("processors");
    let mut may = (0..CpuSet::count()).filter(|&cpu| all.is_set(cpu).unwrap_or(false));
    if let Some(cpu) = may.nth(usize::from(second)) {
        let mut one = CpuSet::new();
        one.set(cpu).expect("a processor");
        sched_setaffinity(this, &one).expect("a processor");
    }
}

/// The governor goes on from one expert to the next while the engine waits for the first of them.
#[test]
fn the_engine_waits_for_no_other_expert_than_the_one_it_needs() {
    let _alone = support::alone();
    let folder = tempfile::tempdir().expect("folder");
    let (store, expert_bytes, _mapping) = store(folder.path(), BLOCKING);
    give_room(&store, expert_bytes);
    let loaded = AtomicU32::new(0);
    let is_loading = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let engine = scope.spawn(|| {
            run_apart(false);
            while !is_loading.load(SeqCst) {
                std::thread::yield_now();
            }
            use_expert(&store, ExpertId(0)).expect("expert");
            loaded.load(SeqCst)
        });
        let governor = scope.spawn(|| {
            run_apart(true);
            for expert in 0..EXPERTS {
                // A slow disk: this is asked between two parts of an expert.
                let mut leave_off = || {
                    let first = !is_loading.swap(true, SeqCst);
                    std::thread::sleep(Duration::from_millis(if first { 100 } else { 3 }));
                    false
                };
                if store.warm_unless(ExpertId(expert), &mut leave_off) == Warmed::Done {
                    loaded.fetch_add(1, SeqCst);
                }
            }
        });
        let before = engine.join().expect("engine");
        governor.join().expect("governor");
        assert!(before <= 2, "{before} experts came before it");
    });
}

/// The kernel lacks memory for a moment, for the governor's reads and for the engine's.
#[test]
fn calls_that_the_kernel_refuses_for_a_moment_are_made_again() {
    let _alone = support::alone();
    let name = "calls_that_the_kernel_refuses_for_a_moment_are_made_again";
    // Two or three times for an expert: one more than what is borne in a row, and more.
    for refused in [1, 2, 50] {
        let Some((store, _folder, _mapping)) = refusing(name, refused) else {
            return;
        };
        for expert in 0..4 {
            assert!(store.pin(ExpertId(expert)).expect("pin"), "{refused}");
        }
        use_expert(&store, ExpertId(7)).expect("expert");
    }
}

/// Longer than that it is an error, and nothing is lost by it.
#[test]
fn what_the_kernel_refuses_for_long_is_read_when_it_no_longer_does() {
    let _alone = support::alone();
    let name = "what_the_kernel_refuses_for_long_is_read_when_it_no_longer_does";
    let Some((store, _folder, _mapping)) = refusing(name, 13_000) else {
        return;
    };
    let (wanted, routed) = (ExpertId(3), ExpertId(7));
    let refused = |error: &str| {
        assert!(
            error.contains("Resource temporarily unavailable"),
            "{error}"
        );
    };
    std::thread::scope(|scope| {
        let pinned = scope.spawn(|| store.pin(wanted));
        refused(&use_expert(&store, routed).expect_err("refused"));
        let pinned = pinned.join().expect("a pin");
        refused(&pinned.expect_err("refused").to_string());
    });
    // Whoever needs it finds it being loaded, and cannot read it either.
    refused(&use_expert(&store, wanted).expect_err("refused"));
    let mut tries = 0;
    while !store.pin(wanted).unwrap_or(false) {
        tries += 1;
        assert!(tries < 5000, "it never comes");
    }
    assert!(tries > 0);
    while let Err(error) = use_expert(&store, routed) {
        refused(&error);
        tries += 1;
        assert!(tries < 10_000, "it never comes");
    }
}

/// A decode that is given up, or a wrong guess, leaves an expert behind that nobody waits for. Once the engine rests,
/// the governor can have it.
#[test]
fn what_the_engine_was_reading_when_it_stopped_can_be_had() {
    let _alone = support::alone();
    for uring in [true, false] {
        let folder = tempfile::tempdir().expect("folder");
        let options = DirectOptions { uring, ..BLOCKING };
        let (store, expert_bytes, _mapping) = store(folder.path(), options);
        give_room(&store, expert_bytes);
        let left_behind = ExpertId(2);
        store.fetch(&[left_behind]).expect("fetch");
        assert!(!store.pin(left_behind).expect("pin"), "the engine reads it");
        store.rest(&mut || true);
        assert!(!store.pin(left_behind).expect("pin"), "it was left off");
        store.rest(&mut || false);
        assert!(store.pin(left_behind).expect("pin"), "io_uring {uring}");
        // Nobody gives way to reads that have ended, which takes 40 ms each time.
        let began = Instant::now();
        for expert in 3..EXPERTS {
            let warmed = store.warm_unless(ExpertId(expert), &mut || false);
            assert_eq!(warmed, Warmed::Done);
        }
        assert!(began.elapsed() < (EXPERTS - 3) * Duration::from_millis(40));
        // Nothing is in use that others would have to wait for.
        assert!(store.unpin(left_behind));
        store.set_capacity(0);
        assert_eq!(store.held().transit_bytes, 0);
    }
}

/// A store whose readers are refused so many calls each; `None`, said, without io_uring.
fn refusing(name: &str, calls: u32) -> Option<(DirectStore, tempfile::TempDir, memmap2::Mmap)> {
    let folder = tempfile::tempdir().expect("folder");
    let options = DirectOptions {
        uring: true,
        fault: Some(Fault::Refused(calls)),
        ..BLOCKING
    };
    let (store, expert_bytes, mapping) = store(folder.path(), options);
    let mut limitations = store.limitations().iter();
    if limitations.any(|(limit, _)| *limit == Limitation::NoUring) {
        eprintln!("SKIPPED {name}: there is no io_uring here");
        return None;
    }
    give_room(&store, expert_bytes);
    Some((store, folder, mapping))
}
