//! The real program on real models: what it prints, how it exits, and what it leaves locked.

use super::support::{
    self, Ran, THREADS, greedy, program, run, run_with_input, unevictable_bytes, wait_until,
    within, without_privilege,
};
use hotpin::governor::Entry;
use hotpin::model::ModelMap;
use hotpin::profile::Profile;
use hotpin_controllers::{Ceiling, PinLimit, Reason};
use serde_json::Value;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;

const PROMPT: &str = "Tell me about the sea.";

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

/// A folder with a profile of the model in which every layer's low indices are hot.
struct Place {
    folder: tempfile::TempDir,
    map: ModelMap,
}

impl Place {
    fn new(model: &Path) -> Self {
        let map = ModelMap::open(model).expect("model map");
        let folder = tempfile::tempdir().expect("temp dir");
        support::low_profile(&map)
            .save(&folder.path().join("p.toml"))
            .expect("save");
        Self { folder, map }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn journal(&self) -> Vec<Entry> {
        let text = std::fs::read_to_string(self.at("j")).expect("journal");
        let parse = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        text.lines().map(parse).collect()
    }
}

#[test]
fn greedy_text_is_the_same_each_time_and_ends_before_a_stop_text() {
    let name = "greedy_text_is_the_same_each_time_and_ends_before_a_stop_text";
    let Some(model) = support::moe(name) else {
        return;
    };
    let whole = run(greedy(&model, PROMPT, "16", &["--policy", "off"])).success();
    let words: Vec<&str> = whole.split_whitespace().collect();
    assert!(words.len() >= 4, "{whole:?}");
    let read = run_with_input(greedy(&model, "-", "16", &["--capacity", "100MB"]), PROMPT);
    assert_eq!(
        read.success(),
        whole,
        "the prompt from stdin, under another policy"
    );
    let stop = format!("{} {}", words[2], words[3]);
    let at = whole.find(&stop).expect("the words are in it");
    let cut = run(greedy(
        &model,
        PROMPT,
        "16",
        &["--stop", "no such text", "--stop", &stop],
    ));
    assert_eq!(cut.success(), format!("{}\n", &whole[..at]));
}

#[test]
fn a_journal_parses_back_and_names_ceiling_and_reasons() {
    let name = "a_journal_parses_back_and_names_ceiling_and_reasons";
    let Some(model) = support::moe(name) else {
        return;
    };
    let place = Place::new(&model);
    let (journal, profile) = (place.at("j"), place.at("p.toml"));
    let more = [
        "--capacity",
        "100MB",
        "--profile",
        text(&profile),
        "--journal",
        text(&journal),
    ];
    run(greedy(&model, PROMPT, "12", &more)).success();
    let entries = place.journal();
    let first = &entries[0];
    assert_eq!(first.binding, Ceiling::Configured);
    assert_eq!(first.ceilings["configured"], 100_000_000);
    assert_eq!(first.ceilings["model"], place.map.expert_bytes());
    assert_eq!(first.capacity_bytes, 100_000_000);
    assert_eq!(first.pin_limit, PinLimit::Share);
    // They are read while the session runs, and told as they are pinned.
    let pinned = entries.iter().flat_map(|entry| &entry.pinned);
    let profiled: Vec<_> = pinned.filter(|c| c.reason == Reason::Profile).collect();
    assert!(!profiled.is_empty());
    assert!(profiled.iter().all(|change| change.expert < 4));
    let mut last_s = -1.0;
    for entry in &entries {
        assert!(entry.t_s > last_s, "time runs forward");
        last_s = entry.t_s;
        assert!(entry.capacity_bytes <= 100_000_000);
        assert!(entry.pin_budget_bytes <= entry.capacity_bytes);
        assert!(entry.pinned_bytes <= entry.pin_budget_bytes);
        let kept = serde_json::to_value(entry).expect("JSON");
        assert_eq!(serde_json::from_value::<Entry>(kept).expect("back"), *entry);
    }
}

#[test]
fn who_may_lock_little_gets_the_same_text_and_is_told() {
    let name = "who_may_lock_little_gets_the_same_text_and_is_told";
    let Some(model) = support::moe(name) else {
        return;
    };
    let place = Place::new(&model);
    let (journal, profile) = (place.at("j"), place.at("p.toml"));
    let stock = run(greedy(&model, PROMPT, "8", &["--policy", "off"])).success();
    for limit_bytes in [8 << 20, 64 << 10] {
        let more = [
            "--policy",
            "adaptive",
            "--profile",
            text(&profile),
            "--journal",
            text(&journal),
        ];
        let ran = without_privilege(limit_bytes, &greedy(&model, PROMPT, "8", &more));
        assert!(
            ran.stderr.contains("dense weights are not locked"),
            "{}",
            ran.stderr
        );
        assert!(ran.stderr.contains("RLIMIT_MEMLOCK"), "{}", ran.stderr);
        assert_eq!(ran.success(), stock);
        let entries = place.journal();
        assert_eq!(entries[0].pin_limit, PinLimit::Memlock);
        assert!(
            entries
                .iter()
                .all(|entry| entry.pinned_bytes <= limit_bytes)
        );
        let pins = entries.iter().any(|entry| entry.pinned_bytes > 0);
        assert_eq!(
            pins,
            limit_bytes > place.map.shape().layer_expert_bytes(0),
            "{limit_bytes}"
        );
    }
}

#[test]
fn an_ordinary_user_gets_the_same_text_and_is_told() {
    let name = "an_ordinary_user_gets_the_same_text_and_is_told";
    let Some(model) = support::moe(name) else {
        return;
    };
    if !support::root(name) {
        return;
    }
    let all = support::for_everybody(&model);
    let stock = run(greedy(&model, PROMPT, "40", &["--policy", "off"])).success();
    for limit_bytes in [8 << 20, 64 << 10] {
        for store in ["auto", "mapped", "direct"] {
            let args = greedy(&all.model, PROMPT, "40", &["--store", store]);
            let output = all.as_nobody(limit_bytes, &args).output();
            let ran = Ran::of(&output.expect("util-linux is installed"));
            for words in [
                "dense weights are not locked",
                "the program itself is not locked",
            ] {
                assert!(ran.stderr.contains(words), "{store}: {}", ran.stderr);
            }
            assert_eq!(ran.success(), stock, "{store}, {limit_bytes}");
        }
    }
}

#[test]
fn a_killed_program_leaves_nothing_locked() {
    let name = "a_killed_program_leaves_nothing_locked";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(parent) = support::cgroups(name) else {
        return;
    };
    // A group of its own and a file of its own: other tests lock and unlock meanwhile, and a page counts
    // in the group that read it first.
    let group = parent.run_group(4 << 30).expect("group");
    let join = group.join();
    let own = support::Copy::of(&model);
    let copy = &own.model;
    let place = Place::new(copy);
    let profile = place.at("p.toml");
    let args = [
        "run",
        text(copy),
        "--raw",
        "-p",
        PROMPT,
        "-n",
        "100000",
        "-c",
        "8192",
        "--temp",
        "0",
        "-t",
        THREADS,
        "--capacity",
        "200MB",
        "--profile",
        text(&profile),
    ];
    let mut child = within(&join, &program(args))
        .stdout(Stdio::null())
        .spawn()
        .expect("start");
    // Large folios that lie in part outside what is locked would not be counted here.
    wait_until("pins, each of them out of reclaim's reach", || {
        assert_eq!(
            child.try_wait().expect("wait"),
            None,
            "it runs until it is killed"
        );
        let locked = support::locked_by(child.id());
        locked > 100 << 20 && unevictable_bytes(&join) > locked / 10 * 9
    });
    child.kill().expect("kill");
    child.wait().expect("wait");
    // Unlocked pages may stand in a core's batch of list moves for a moment.
    wait_until("nothing locked is left", || {
        unevictable_bytes(&join) < 1 << 20
    });
}

#[test]
fn a_prompt_that_does_not_fit_the_context_is_a_plain_error() {
    let name = "a_prompt_that_does_not_fit_the_context_is_a_plain_error";
    let Some(model) = support::moe(name) else {
        return;
    };
    let long = "word ".repeat(400);
    run(greedy(&model, &long, "4", &[]))
        .failure(1, &["hotpin:", "context is full", "holds 256", "-c"]);
}

#[test]
fn senseless_arguments_exit_with_2_before_the_model_is_touched() {
    let check = |args: &[&str], words: &[&str]| run(args).failure(2, words);
    check(&[], &["Usage"]);
    check(&["run"], &["--prompt"]);
    check(
        &["run", "m", "-p", "x", "--policy", "clever"],
        &["clever", "adaptive"],
    );
    check(&["run", "m", "-p", "x", "--temp=-1"], &["--temp"]);
    check(&["run", "m", "-p", "x", "--top-p", "0"], &["--top-p"]);
    check(&["run", "m", "-p", "x", "--stop", ""], &["--stop"]);
    check(
        &["run", "m", "-p", "x", "--capacity", "1G"],
        &["--capacity", "GiB"],
    );
    check(
        &["run", "m", "-p", "x", "--reserve", "lots"],
        &["--reserve", "lots"],
    );
    check(&["run", "m", "-p", "x", "--tick-ms", "1"], &["--tick-ms"]);
    check(&["profile", "m", "-o", "p"], &["--prompts"]);
}

#[test]
fn readers_that_go_away_end_the_program_quietly() {
    let Some(model) = support::moe("readers_that_go_away_end_the_program_quietly") else {
        return;
    };
    let gone = |args: &[String]| {
        let mut child = program(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start");
        let mut first = [0; 10];
        let mut stdout = child.stdout.take().expect("stdout");
        stdout.read_exact(&mut first).expect("ten bytes");
        drop(stdout);
        Ran::of(&child.wait_with_output().expect("wait")).success();
    };
    gone(&greedy(&model, PROMPT, "100000", &["--policy", "fetch"]));
    gone(&["inspect".to_owned(), text(&model).to_owned()]);
    // Both streams into one pipe that is closed before anything is said: it must not end in a panic's
    // exit code, though nobody would see its message.
    let (reader, writer) = std::io::pipe().expect("pipe");
    let mut command = program(greedy(&model, PROMPT, "4", &["--policy", "fetch"]));
    command
        .stdout(writer.try_clone().expect("clone"))
        .stderr(writer);
    let mut child = command.spawn().expect("start");
    drop(command);
    drop(reader);
    assert_eq!(child.wait().expect("wait").code(), Some(0));
}

fn inspected(model: &Path) -> Value {
    serde_json::from_str(&run(["inspect", text(model), "--json"]).success()).expect("JSON")
}

#[test]
fn inspect_tells_the_numbers_of_a_moe_model() {
    let Some(model) = support::moe("inspect_tells_the_numbers_of_a_moe_model") else {
        return;
    };
    let report = inspected(&model);
    let number = |key: &str| {
        report[key]
            .as_u64()
            .unwrap_or_else(|| panic!("{key} in {report}"))
    };
    assert_eq!(report["is_moe"], true);
    assert_eq!(
        (
            number("layers"),
            number("moe_layers"),
            number("total_experts")
        ),
        (30, 30, 240)
    );
    let only = |n: u64| serde_json::json!({"min": n, "max": n});
    assert_eq!(report["experts"], only(8));
    assert_eq!(report["top_k"], only(2));
    // Three matrices of 576 x 1536 weights at Q4_0, 18 bytes for 32.
    let expert_bytes = 3 * 576 * 1536 / 32 * 18;
    assert_eq!(report["bytes_per_expert"], only(expert_bytes));
    assert_eq!(number("token_cycle_bytes"), 60 * expert_bytes);
    assert_eq!(number("expert_bytes"), 240 * expert_bytes);
    let sum = number("dense_bytes") + number("expert_bytes") + number("idle_bytes");
    assert_eq!(number("total_bytes"), sum);
    let file = std::fs::metadata(&model).expect("metadata").len();
    assert_eq!(report["files"][0]["bytes"], file);
    assert!(sum < file, "the header takes some");
    assert!(report["fit"].is_object(), "{report}");
}

#[test]
fn a_dense_model_runs_and_has_nothing_to_pin() {
    let Some(model) = support::dense("a_dense_model_runs_and_has_nothing_to_pin") else {
        return;
    };
    let ran = run(greedy(&model, PROMPT, "4", &[]));
    assert!(ran.stderr.contains("nothing to pin"), "{}", ran.stderr);
    assert!(ran.success().trim().len() > 1);
    let report = inspected(&model);
    assert_eq!(report["is_moe"], false);
    assert!(
        report["experts"].is_null() && report["top_k"].is_null(),
        "{report}"
    );
    let args = [
        "profile",
        text(&model),
        "--prompts",
        text(&model),
        "-o",
        "/nonexistent/p",
    ];
    run(args).failure(1, &["dense model", "no experts"]);
}

#[test]
fn a_profile_is_counted_accepted_and_refused_for_another_model() {
    let name = "a_profile_is_counted_accepted_and_refused_for_another_model";
    let Some(model) = support::moe(name) else {
        return;
    };
    let place = Place::new(&model);
    let (made, prompts) = (place.at("made.toml"), place.at("prose.txt"));
    std::fs::write(&prompts, support::TEXT).expect("write");
    let args = [
        "profile",
        text(&model),
        "--prompts",
        text(&prompts),
        "--skip-tokens",
        "10",
        "--tokens",
        "80",
        "-o",
        text(&made),
        "-t",
        THREADS,
        "-c",
        "256",
    ];
    let said = run(args).success();
    assert!(said.contains("80 tokens"), "{said}");
    let profile = Profile::load(&made, &place.map).expect("profile");
    assert_eq!(profile.tokens, 80);
    for (layer, counted) in profile.layer.iter().enumerate() {
        let top_k = u64::from(place.map.shape().top_k_in(layer));
        assert_eq!(
            counted.counts.iter().sum::<u64>(),
            80 * top_k,
            "block {}",
            counted.block
        );
    }
    let with = |path: &Path| {
        let more = [
            "--policy",
            "static",
            "--capacity",
            "100MB",
            "--profile",
            text(path),
        ];
        run(greedy(&model, PROMPT, "2", &more))
    };
    with(&made).success();
    let refused = |edited: &Profile, words: &[&str]| {
        let path = place.at("other.toml");
        edited.save(&path).expect("save");
        with(&path).failure(1, words);
    };
    let mut other = profile.clone();
    other.model = "Another Model".into();
    other.fingerprint = "0123456789abcdef0123456789abcdef".into();
    let ours = format!("\"{}\" (", place.map.name());
    refused(
        &other,
        &[
            "\"Another Model\"",
            "0123456789ab",
            "30 MoE layers of 8 experts",
            &ours,
        ],
    );
    let mut smaller = profile.clone();
    smaller.layer.truncate(29);
    refused(
        &smaller,
        &["29 MoE layers of 8 experts", "30 MoE layers of 8 experts"],
    );
    let mut newer = profile;
    newer.version = 99;
    refused(&newer, &["version 99"]);
    std::fs::write(place.at("other.toml"), "not = [a profile").expect("write");
    with(&place.at("other.toml")).failure(1, &["other.toml", "could not be read"]);
    with(&place.at("missing.toml")).failure(1, &["missing.toml"]);
    let without = greedy(&model, PROMPT, "2", &["--policy", "static"]);
    run(without).failure(1, &["static needs a profile"]);
}

#[test]
fn files_that_are_no_whole_model_are_plain_errors() {
    let Some(model) = support::moe("files_that_are_no_whole_model_are_plain_errors") else {
        return;
    };
    let folder = tempfile::tempdir().expect("temp dir");
    let bad = folder.path().join("bad.gguf");
    let check = |words: &[&str]| {
        run(["inspect", text(&bad)]).failure(1, &[&["bad.gguf"], words].concat());
        run(greedy(&bad, PROMPT, "2", &[])).failure(1, &[&["bad.gguf"], words].concat());
    };
    check(&["No such file"]);
    std::fs::write(&bad, "Dear reader, this is no model.").expect("write");
    check(&["GGUF"]);
    std::fs::write(&bad, "").expect("write");
    check(&[]);
    let mut whole = std::fs::File::open(&model).expect("open");
    let mut start = vec![0; 8 << 20];
    whole.read_exact(&mut start).expect("read");
    for len in [10, 5000, start.len()] {
        std::fs::write(&bad, &start[..len]).expect("write");
        check(&[]);
    }
    std::fs::remove_file(&bad).expect("remove");
    std::fs::create_dir(&bad).expect("directory");
    check(&["irectory"]);
}
