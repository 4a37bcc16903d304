//! What a crash leaves behind, and what becomes of a session whose control fails.

use super::support::{
    self, Copy, Doomed, Draw, forced_hash, from_environment, locked_bytes, program, run,
    unevictable_bytes, wait_until, within,
};
use hotpin::governor::{Entry, OnFailure, STUCK_AFTER};
use hotpin::model::ModelMap;
use hotpin::profile::Profile;
use hotpin_controllers::trace::Trace;
use hotpin_controllers::{Decision, Observation, Policy, PolicyKind};
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

const PROMPT: &str = "Tell me about the sea.";

/// A session that pins, swaps, and writes everything that a session may write.
struct Session<'a> {
    own: &'a Copy,
    store: &'static str,
}

impl Session<'_> {
    fn args(&self) -> Vec<String> {
        let at = |name: &str| self.own.folder.path().join(name).display().to_string();
        let mut args = support::greedy(&self.own.model, PROMPT, "40", &[]);
        for (flag, value) in [
            ("--store", self.store.to_owned()),
            ("--capacity", "150MB".to_owned()),
            ("--tick-ms", "20".to_owned()),
            ("--profile", at("p")),
            ("--learn", at("l")),
            ("--journal", at("j")),
            ("--record", at("t")),
        ] {
            args.extend([flag.to_owned(), value]);
        }
        args
    }

    /// What was written must be whole, or a whole beginning.
    /// Returns the tokens recorded.
    fn check_files(&self, map: &ModelMap) -> usize {
        let at = |name: &str| self.own.folder.path().join(name);
        if at("l").exists() {
            Profile::load(&at("l"), map).expect("what was learned is whole");
        }
        if let Ok(text) = std::fs::read_to_string(at("j")) {
            let lines: Vec<&str> = text.lines().collect();
            for (number, line) in lines.iter().enumerate() {
                let read = serde_json::from_str::<Entry>(line);
                let last = number + 1 == lines.len();
                assert!(
                    read.is_ok() || last,
                    "line {number} of {}: {line}",
                    lines.len()
                );
            }
        }
        let recorded = std::fs::read(at("t")).map_or(0, |bytes| tokens_of(&bytes));
        for entry in std::fs::read_dir(self.own.folder.path()).expect("folder") {
            let name = entry
                .expect("entry")
                .file_name()
                .into_string()
                .expect("UTF-8");
            let known = ["m.gguf", "p", "l", "j", "t"].contains(&name.as_str());
            // The next writer removes it.
            let unfinished = name.starts_with(".l.") && name.ends_with(".tmp");
            assert!(known || unfinished, "{name} was left behind");
        }
        recorded
    }
}

/// Tokens of a recording. One that was cut gives those of all its whole blocks.
fn tokens_of(bytes: &[u8]) -> usize {
    match Trace::recover(bytes) {
        Ok((trace, _)) => trace.tokens(),
        Err(error) => {
            assert!(bytes.len() < 4096, "{} bytes and {error}", bytes.len());
            0
        }
    }
}

/// The program is killed at moments from its first instruction to beyond its last. Its long form, 100
/// times, is asked for by `HOTPIN_TEST_KILLS`.
#[test]
fn killed_at_any_moment_it_leaves_nothing_locked_and_no_broken_file() {
    let name = "killed_at_any_moment_it_leaves_nothing_locked_and_no_broken_file";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(parent) = support::cgroups(name) else {
        return;
    };
    let kills = from_environment("HOTPIN_TEST_KILLS", 8);
    let group = parent.run_group(4 << 30).expect("group");
    let join = group.join();
    let own = Copy::of(&model);
    let map = ModelMap::open(&own.model).expect("model map");
    support::low_profile(&map)
        .save(&own.folder.path().join("p"))
        .expect("save");
    let stock = run(support::greedy(&model, PROMPT, "40", &["--policy", "off"])).success();
    let sessions = ["mapped", "direct"].map(|store| Session { own: &own, store });
    let began = Instant::now();
    let whole = within(&join, &program(sessions[0].args())).output();
    let mut whole_ms = usize::try_from(began.elapsed().as_millis()).expect("small");
    assert_eq!(
        String::from_utf8_lossy(&whole.expect("start").stdout),
        stock
    );
    let mut draw = Draw(kills);
    let (mut alive, mut locked, mut recorded) = (0, 0, 0);
    let least = usize::try_from(kills).expect("small");
    let mut done = 0;
    for kill in 0..4 * least {
        // Where the machine was busier or idler than before, they may have come before the first token, or too late.
        if kill >= least && recorded > 0 && locked > 0 && alive * 2 >= kills {
            break;
        }
        done += 1;
        let session = &sessions[kill % 2];
        let mut child = within(&join, &program(session.args()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("start");
        // The machine may be slower or faster by now; some kills come too late, and that is a moment too.
        let moment_ms = draw.below((whole_ms * 11 / 10).max(1));
        std::thread::sleep(Duration::from_millis(moment_ms as u64));
        locked += u64::from(support::locked_by(child.id()) > 0);
        let ended = child.try_wait().expect("wait").is_some();
        alive += u64::from(!ended);
        if ended {
            whole_ms = whole_ms.min(moment_ms);
        }
        child.kill().expect("kill");
        child.wait().expect("wait");
        wait_until("nothing locked is left", || {
            unevictable_bytes(&join) < 1 << 20
        });
        recorded += session.check_files(&map);
    }
    eprintln!(
        "{done} kills: {alive} while it ran, {locked} with memory locked; {recorded} tokens recorded"
    );
    assert!(recorded > 0);
    assert!(
        alive * 2 >= kills,
        "{alive} of {done} kills hit a running program"
    );
    assert!(locked > 0, "no kill hit one that had memory locked");
    for session in &sessions {
        let text = within(&join, &program(session.args()))
            .output()
            .expect("start");
        assert_eq!(
            text.status.code(),
            Some(0),
            "the next start is clean: {text:?}"
        );
        assert_eq!(
            String::from_utf8_lossy(&text.stdout),
            stock,
            "{}",
            session.store
        );
        assert!(session.check_files(&map) >= 40, "the recording is whole");
    }
    assert_eq!(group.oom_kills(), Some(0));
}

/// A policy whose tick does not end until it is let go.
struct Caught {
    ticks: u32,
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.open.lock().expect("gate") = true;
        self.changed.notify_all();
    }
}

impl Policy for Caught {
    fn name(&self) -> &'static str {
        "caught"
    }

    fn tick(&mut self, _: &Observation<'_>, out: &mut Decision) {
        out.clear();
        self.ticks += 1;
        if self.ticks == 3 {
            let open = self.gate.open.lock().expect("gate");
            let _open = self
                .gate
                .changed
                .wait_while(open, |open| !*open)
                .expect("gate");
        }
    }

    fn scores(&self) -> &[f32] {
        &[]
    }
}

#[test]
fn a_tick_that_does_not_end_is_named_and_the_session_goes_on_or_ends_as_configured() {
    let name = "a_tick_that_does_not_end_is_named_and_the_session_goes_on_or_ends_as_configured";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let tokens = loaded.tokens(4);
    for on_failure in [OnFailure::GoOn, OnFailure::Stop] {
        let mut rig = loaded.rig(PolicyKind::Fetch, None, support::NEVER);
        let healthy = forced_hash(&mut rig.session, &tokens);
        let gate = Arc::new(Gate::default());
        let caught = Caught {
            ticks: 0,
            gate: Arc::clone(&gate),
        };
        let limit = Duration::from_millis(200);
        let governor = loaded.governor(&rig, Box::new(caught), on_failure, limit);
        wait_until("the watchdog", || governor.status().stuck.is_some());
        let said = governor.status().stuck.expect("stuck");
        assert!(said.contains("has not ended for 0.2 s"), "{said}");
        if on_failure == OnFailure::GoOn {
            assert_eq!(forced_hash(&mut rig.session, &tokens), healthy);
            let ticks = governor.status().ticks;
            gate.open();
            wait_until("the watchdog to take it back", || {
                governor.status().stuck.is_none()
            });
            wait_until("more ticks", || governor.status().ticks > ticks + 2);
            assert_eq!(rig.counters.halted(), None);
        } else {
            let error = rig.session.decode(&tokens[..1]).expect_err("halted");
            assert!(error.to_string().contains("has not ended"), "{error}");
            gate.open();
        }
        drop(governor);
    }
}

#[test]
fn a_governor_that_panics_ends_a_session_that_is_to_end_with_it() {
    let name = "a_governor_that_panics_ends_a_session_that_is_to_end_with_it";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let before = locked_bytes();
    let tokens = loaded.tokens(2);
    let mut rig = loaded.rig(PolicyKind::Fetch, None, support::NEVER);
    rig.session.decode(&tokens[..1]).expect("decode");
    let doomed = Doomed {
        ticks: 0,
        fails_at: 3,
        scores: vec![0.0; loaded.map.shape().total_experts()],
    };
    let governor = loaded.governor(&rig, Box::new(doomed), OnFailure::Stop, STUCK_AFTER);
    wait_until("the governor to fail", || {
        governor.status().failed.is_some()
    });
    assert_eq!(locked_bytes(), before);
    for _ in 0..2 {
        rig.session.clear();
        let error = rig.session.decode(&tokens).expect_err("halted");
        let said = error.to_string();
        assert!(said.contains("panicked") && said.contains("ends"), "{said}");
        assert_eq!(rig.session.position(), 0, "nothing was added");
    }
}

#[test]
fn what_cannot_be_written_is_said_and_leaves_nothing_half() {
    let name = "what_cannot_be_written_is_said_and_leaves_nothing_half";
    let Some(model) = support::moe(name) else {
        return;
    };
    if !support::root(name) {
        return;
    }
    let stock = run(support::greedy(&model, PROMPT, "30", &["--policy", "off"])).success();
    let folder = tempfile::tempdir().expect("temp dir");
    // A file system that is full, seen by the program alone. What is in it afterwards is listed.
    let script = r#"
        mount -t tmpfs -o size=4k none "$0" && head -c 4096 /dev/zero >"$0/.full" || exit 99
        "$@"; code=$?
        cd "$0" && for f in * .*; do [ -f "$f" ] && [ -s "$f" ] && [ "$f" != .full ] && echo "left: $f $(stat -c %s "$f")" >&2; done
        exit $code"#;
    let where_it_is_full = |args: &[String]| {
        let mut command = std::process::Command::new("unshare");
        command.args(["-m", "sh", "-c", script]).arg(folder.path());
        command.arg(env!("CARGO_BIN_EXE_hotpin")).args(args);
        support::clean(&mut command);
        support::Ran::of(&command.stdin(Stdio::null()).output().expect("start"))
    };
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (journal, trace) = (at("j"), at("t"));
    let more = ["--tick-ms", "10", "--capacity", "150MB"];
    let logs = [["--journal", &journal], ["--record", &trace]];
    for log in logs {
        let args = support::greedy(&model, PROMPT, "30", &[&more[..], &log[..]].concat());
        let ran = where_it_is_full(&args);
        let words = [log[1], "No space left on device"];
        for word in words {
            assert!(ran.stderr.contains(word), "no {word} in {}", ran.stderr);
        }
        assert_eq!(ran.success(), stock, "{log:?}");
    }
    let learned = at("l");
    let args = support::greedy(&model, PROMPT, "30", &["--learn", &learned]);
    let ran = where_it_is_full(&args);
    assert_eq!(ran.stdout, stock);
    assert!(!ran.stderr.contains("left: "), "{}", ran.stderr);
    ran.failure(1, &["No space left on device"]);
    let prompts = folder.path().with_extension("txt");
    std::fs::write(&prompts, support::TEXT).expect("write");
    let profile = ["profile", &text(&model), "--prompts", &text(&prompts), "-o"];
    let args: Vec<String> = [
        &profile[..],
        &[&at("p"), "--tokens", "40", "-t", "1", "-c", "256"],
    ]
    .concat()
    .iter()
    .map(|arg| (*arg).to_owned())
    .collect();
    let ran = where_it_is_full(&args);
    std::fs::remove_file(&prompts).expect("remove");
    assert!(!ran.stderr.contains("left: "), "{}", ran.stderr);
    ran.failure(1, &["No space left on device"]);
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
