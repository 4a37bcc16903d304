//! Other programs in the same memory: what is held gives way to them, they are not killed, and the text is
//! the same. The long forms, outside of cgroups, are `scripts/hogs.py`.

use super::support::{
    self, Answering, Copy, cgroups, clean, greedy, program, run, wait_until, within,
};
use hotpin::bench::cgroup::RunCgroup;
use hotpin::bench::protocol::CgroupJoin;
use hotpin::governor::Entry;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

const PROMPT: &str = "Tell me about the sea.";
const MIB: u64 = 1 << 20;

/// A session in a group with room for the whole model and little more, which answers.
fn session(join: &CgroupJoin, own: &Copy, store: &str, journal: &Path) -> Answering {
    let profile = own.folder.path().join("p");
    let map = hotpin::model::ModelMap::open(&own.model).expect("model map");
    support::low_profile(&map).save(&profile).expect("save");
    let (profile, journal) = (profile.display().to_string(), journal.display().to_string());
    let more = [
        "--store",
        store,
        "--journal",
        &journal,
        "--profile",
        &profile,
    ];
    let args = support::with_context(greedy(&own.model, PROMPT, "4000", &more));
    Answering::begin(within(join, &program(args)), 40)
}

/// The hog of `scripts`, in a group.
fn hog(join: &CgroupJoin, gib: f64, hold_s: f64, rate: f64, shape: &str) -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/hog.py");
    let mut command = Command::new("python3");
    command.arg(script).args([
        gib.to_string(),
        hold_s.to_string(),
        rate.to_string(),
        shape.to_owned(),
    ]);
    within(join, &command)
}

/// What a hog said of itself at its end.
fn told(output: &Output) -> Value {
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(text.lines().last().expect("line")).expect("JSON")
}

fn begins_alike(said: &str, stock: &str, what: &str) {
    let common = said.len().min(stock.trim_end().len());
    assert!(common >= 40, "{what}: {said}");
    assert_eq!(said[..common], stock[..common], "{what}");
}

fn no_kill(group: &RunCgroup, what: &str) {
    assert_eq!(group.oom_kills(), Some(0), "{what}");
}

/// The least and the last capacity of a journal.
fn capacities(journal: &Path) -> (u64, u64) {
    let text = std::fs::read_to_string(journal).expect("journal");
    let entries: Vec<Entry> = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    let least = entries.iter().map(|entry| entry.capacity_bytes).min();
    let last = entries.last().map(|entry| entry.capacity_bytes);
    (least.expect("entries"), last.expect("entries"))
}

#[test]
fn a_hog_gets_its_memory_and_the_session_goes_on() {
    let name = "a_hog_gets_its_memory_and_the_session_goes_on";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(parent) = cgroups(name) else {
        return;
    };
    let stock = run(greedy(&model, PROMPT, "100", &["--policy", "off"])).success();
    let own = Copy::of(&model);
    for (store, shape) in [("mapped", "ramp"), ("direct", "sawtooth")] {
        own.evict();
        let group = parent.run_group(620_000_000).expect("group");
        let join = group.join();
        let journal = own.folder.path().join(store);
        let run = session(&join, &own, store, &journal);
        wait_until("most of the model is held", || run.locked() > 250 * MIB);
        // 300 MiB of a group of 591 of which 387 are held: the session has to give back 100 at least.
        let output = hog(&join, 0.3, 1.0, 0.2, shape).output().expect("start");
        let hog = told(&output);
        assert_eq!(hog["touched_bytes"], 306 * MIB, "{hog}");
        assert_eq!(hog["stopped"], false, "{hog}");
        wait_until("it takes memory again", || run.locked() > 250 * MIB);
        begins_alike(&run.cut_off(40), &stock, store);
        let (least, last) = capacities(&journal);
        assert!(
            least < 300 * MIB && last > least,
            "{store}: {least} to {last}"
        );
        no_kill(&group, store);
    }
}

/// Forks copy no arena, and a storm of them that comes and goes takes nothing down.
#[test]
fn a_storm_of_forks_and_a_reader_of_files_take_nothing_down() {
    let name = "a_storm_of_forks_and_a_reader_of_files_take_nothing_down";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(parent) = cgroups(name) else {
        return;
    };
    let stock = run(greedy(&model, PROMPT, "100", &["--policy", "off"])).success();
    let own = Copy::of(&model);
    let other = Copy::of(&model);
    let group = parent.run_group(620_000_000).expect("group");
    let join = group.join();
    let journal = own.folder.path().join("j");
    let run = session(&join, &own, "auto", &journal);
    wait_until("most of the model is held", || run.locked() > 250 * MIB);
    let storm = "for i in $(seq 8); do for j in 1 2 3 4; do head -c 16M /dev/zero | tail -c 1 >/dev/null & done; wait; done";
    let mut forks = Command::new("sh");
    forks.args(["-c", storm]);
    clean(&mut forks);
    let forks = within(&join, &forks).output().expect("start");
    assert!(forks.status.success(), "{forks:?}");
    let mut dd = Command::new("dd");
    dd.arg(format!("if={}", other.model.display()));
    dd.args(["of=/dev/null", "bs=1M", "status=none"]);
    let dd = within(&join, &dd).output().expect("start");
    assert!(dd.status.success(), "{dd:?}");
    assert!(
        run.locked() > 200 * MIB,
        "page cache that can be dropped is no claim"
    );
    begins_alike(&run.cut_off(40), &stock, "forks and dd");
    no_kill(&group, "forks and dd");
}

#[test]
fn two_sessions_share_a_group_and_neither_starves() {
    let name = "two_sessions_share_a_group_and_neither_starves";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(parent) = cgroups(name) else {
        return;
    };
    let stock = run(greedy(&model, PROMPT, "100", &["--policy", "off"])).success();
    let first = Copy::of(&model);
    let second = Copy::of(&model);
    for (what, other) in [("the same model", &first), ("another file", &second)] {
        first.evict();
        second.evict();
        let group = parent.run_group(620_000_000).expect("group");
        let join = group.join();
        let journals = [first.folder.path().join("a"), first.folder.path().join("b")];
        let one = session(&join, &first, "direct", &journals[0]);
        wait_until("most of the model is held", || one.locked() > 250 * MIB);
        let two = session(&join, other, "direct", &journals[1]);
        let both = one.locked() + two.locked();
        assert!(both < 600 * MIB, "{what}: {both} locked together");
        wait_until("the second has locks, too", || two.locked() > 0);
        begins_alike(&one.cut_off(40), &stock, what);
        begins_alike(&two.cut_off(40), &stock, what);
        no_kill(&group, what);
    }
}
