//! The program's own pages, which are locked while it regulates. Each test is in a process of its own, since what
//! it locks is the process's.

use super::support::{self, locked_bytes};
use hotpin::plant::Rig;
use hotpin::store::program::{self, ProgramLockError};
use hotpin_controllers::PolicyKind;
use nix::errno::Errno;
use nix::sys::resource::{Resource, setrlimit};
use std::time::Duration;

/// As root, in a process of its own.
fn alone(name: &str) -> bool {
    support::root(name) && support::alone_in_process(name, &[])
}

#[test]
fn what_is_locked_of_the_program_is_what_is_said_and_goes_when_it_has_to() {
    let name = "own_code::what_is_locked_of_the_program_is_what_is_said_and_goes_when_it_has_to";
    if !alone(name) {
        return;
    }
    let before = locked_bytes();
    program::set_locked(true);
    assert_eq!(locked_bytes(), before, "nobody wanted it kept");
    let bytes = program::keep(None, None).expect("locks");
    let this = std::env::current_exe().expect("this program");
    assert!(bytes > 10 << 20, "{bytes}");
    for _ in 0..2 {
        assert_eq!(locked_bytes() - before, bytes);
        assert_eq!(program::locked_bytes(), bytes);
        support::wait_until("all of the code is there", || {
            let (mapped, there) = support::code_of(std::process::id(), &this);
            mapped > 1 << 20 && there == mapped
        });
        program::set_locked(false);
        assert_eq!((locked_bytes(), program::locked_bytes()), (before, 0));
        program::set_locked(true);
    }
    assert_eq!(program::keep(None, None), Ok(bytes), "a second time");
    assert_eq!(locked_bytes() - before, bytes);
}

#[test]
fn what_the_kernel_refuses_leaves_nothing_of_the_program_locked() {
    let name = "own_code::what_the_kernel_refuses_leaves_nothing_of_the_program_locked";
    let without = [
        "setpriv",
        "--bounding-set=-ipc_lock",
        "--inh-caps=-ipc_lock",
    ];
    if !support::root(name) || !support::alone_in_process(name, &without) {
        return;
    }
    // The first mapping fits, the one of the code does not.
    let limit = 8 << 20;
    setrlimit(Resource::RLIMIT_MEMLOCK, limit, limit).expect("limit");
    let this = std::env::current_exe().expect("this program");
    assert!(support::code_of(std::process::id(), &this).0 > limit);
    let refused = Err(ProgramLockError::Refused(Errno::ENOMEM));
    assert_eq!(program::keep(None, None), refused);
    assert_eq!((locked_bytes(), program::locked_bytes()), (0, 0));
    program::set_locked(true);
    assert_eq!(locked_bytes(), 0);
}

#[test]
fn what_is_locked_is_what_the_store_and_the_program_say() {
    let name = "own_code::what_is_locked_is_what_the_store_and_the_program_say";
    if !alone(name) {
        return;
    }
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let before = locked_bytes();
    let tick = Duration::from_millis(20);
    let mut options = loaded.rig_options(PolicyKind::Adaptive, Some(100 << 20), tick);
    options.keep_program = true;
    let rig = Rig::assemble(loaded.model, loaded.map, options, &mut |_, _| {}).expect("rig");
    let store = rig.store.as_ref().expect("store");
    let governor = rig.governor.as_ref().expect("governor");
    assert!(program::locked_bytes() > 10 << 20);
    support::wait_until("experts are pinned", || store.held().pinned_bytes > 0);
    governor.monitor().pause(true);
    support::wait_until("books that are the kernel's", || {
        locked_bytes() - before == store.locked_bytes() + program::locked_bytes()
    });
}

#[test]
fn a_governor_that_panics_leaves_nothing_of_the_program_locked() {
    let name = "own_code::a_governor_that_panics_leaves_nothing_of_the_program_locked";
    if !alone(name) {
        return;
    }
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let before = locked_bytes();
    program::keep(None, None).expect("locks");
    let rig = loaded.rig(PolicyKind::Fetch, None, Duration::from_secs(3600));
    assert!(locked_bytes() > before + program::locked_bytes());
    let governor = loaded.doomed_governor(&rig, 2);
    support::wait_until("the governor to fail", || {
        governor.status().failed.is_some()
    });
    assert_eq!((locked_bytes(), program::locked_bytes()), (before, 0));
}
