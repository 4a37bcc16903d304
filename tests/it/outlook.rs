//! `hotpin plan` on the test model: what it promises is what a session then does.

use super::support::{self, from_environment, greedy, program, run, within};
use hotpin::governor::Entry;
use hotpin::model::ModelMap;
use hotpin::sensors::{Roots, system_summary};
use serde_json::Value;
use std::path::Path;

const PROMPT: &str = "Tell me about the sea.";

fn plan(model: &Path, more: &[&str]) -> Value {
    let model = model.to_str().expect("UTF-8");
    let args = [&["plan", model, "--json"], more].concat();
    serde_json::from_str(&run(args).success()).expect("JSON")
}

fn number(value: &Value, pointer: &str) -> f64 {
    let found = value.pointer(pointer).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("{pointer} in {value}"))
}

#[test]
fn advice_changes_with_memory_and_names_where_it_crawls() {
    let name = "advice_changes_with_memory_and_names_where_it_crawls";
    let Some(model) = support::moe(name) else {
        return;
    };
    let map = ModelMap::open(&model).expect("model map");
    let advice = |memory: u64| {
        let report = plan(&model, &["--memory", &format!("{memory}")]);
        report["advice"].as_str().expect("advice").to_owned()
    };
    let report = plan(&model, &["--memory", "250MB"]);
    assert_eq!(report["advice"], "control_pays");
    assert_eq!(report["from"], "nothing");
    assert!(report["tok_s"].is_null(), "no calibration: {report}");
    let crawls = report["crawls_below_bytes"].as_u64().expect("bytes");
    let cycle = map.token_cycle_bytes() + map.dense_bytes();
    assert_eq!(crawls, cycle + (64 << 20));
    assert_eq!(advice(crawls), "control_pays");
    assert_eq!(advice(crawls - 1), "below_token_cycle");
    assert_eq!(advice(20_000_000), "below_token_cycle");
    let whole = map.dense_bytes() + map.expert_bytes() + (64 << 20);
    assert_eq!(advice(whole), "fits");
    assert_eq!(advice(whole - 1), "control_pays");
    // Who may lock little is told, and is promised no more than that.
    let folder = tempfile::tempdir().expect("folder");
    let profile = folder.path().join("p").display().to_string();
    let saved = support::low_profile(&map).save(Path::new(&profile));
    saved.expect("save");
    let words = |more: &[&str]| {
        let model = model.to_str().expect("UTF-8");
        let plan = [
            &["plan", model, "--memory", "250MB", "--profile", &profile],
            more,
        ]
        .concat();
        plan.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let little = support::without_privilege(8 << 20, &words(&["--json"])).success();
    let little: Value = serde_json::from_str(&little).expect("JSON");
    assert_eq!(
        little["pinned_bytes"], 0,
        "it does not even hold the dense weights"
    );
    assert_eq!(little["lock_limit_bytes"], 8 << 20);
    if system_summary(&Roots::default()).memlock_bytes.is_none() {
        let enough = run(words(&["--json"])).success();
        let enough: Value = serde_json::from_str(&enough).expect("JSON");
        assert!(enough["lock_limit_bytes"].is_null(), "{enough}");
        assert!(number(&enough, "/pinned_bytes") > 50e6, "{enough}");
    }
    let said = run(["plan", model.to_str().expect("UTF-8"), "--memory", "250MB"]).success();
    for words in [
        "Control pays",
        "crawls below",
        "--profile or --trace",
        "--calibrate",
    ] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
}

#[test]
fn an_even_router_and_a_dense_model_are_told_apart_from_those_that_pay() {
    let name = "an_even_router_and_a_dense_model_are_told_apart_from_those_that_pay";
    let (Some(model), Some(dense)) = (support::moe(name), support::dense(name)) else {
        return;
    };
    let map = ModelMap::open(&model).expect("model map");
    let folder = tempfile::tempdir().expect("temp dir");
    let profile = |name: &str, made: hotpin::profile::Profile| {
        let path = folder.path().join(name);
        made.save(&path).expect("save");
        path.to_str().expect("UTF-8").to_owned()
    };
    let even = vec![250; map.shape().total_experts()];
    let even = profile("even", hotpin::profile::Profile::new(&map, &even, 1000));
    let skewed = profile("skewed", support::low_profile(&map));
    let with = |path: &str| plan(&model, &["--memory", "250MB", "--profile", path]);
    assert_eq!(with(&even)["advice"], "uniform");
    let report = with(&skewed);
    assert_eq!(report["advice"], "control_pays");
    assert!(number(&report, "/pinned_bytes") > 0.0);
    let (low, high) = (
        number(&report, "/hit_ratio/low"),
        number(&report, "/hit_ratio/high"),
    );
    let share = number(&report, "/capacity_bytes") / number(&report, "/fit/expert_bytes");
    assert!(low > share * 0.9 && low < high, "{report}");
    assert!(high > share * 1.2, "{report}");
    let report = plan(&dense, &["--memory", "1GB"]);
    assert_eq!(report["advice"], "dense");
    assert!(report["hit_ratio"].is_null(), "{report}");
}

/// What is promised for a group is held against a session in that group: capacity of its first
/// tick, and the hits of the whole of it.
#[test]
fn what_is_promised_is_what_a_session_then_does() {
    let name = "what_is_promised_is_what_a_session_then_does";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(parent) = support::cgroups(name) else {
        return;
    };
    let own = support::Copy::of(&model);
    let at = |name: &str| own.folder.path().join(name).display().to_string();
    let map = ModelMap::open(&own.model).expect("model map");
    support::low_profile(&map)
        .save(Path::new(&at("p")))
        .expect("save");
    let memory = from_environment("HOTPIN_TEST_PLAN_BYTES", 300_000_000);
    let group = parent.run_group(memory).expect("group");
    let more = [
        "--profile",
        &at("p"),
        "--journal",
        &at("j"),
        "--record",
        &at("t"),
        "--store",
        "direct",
    ];
    let args = greedy(&own.model, PROMPT, "120", &more);
    let ran = within(&group.join(), &program(args))
        .output()
        .expect("start");
    assert!(ran.status.success(), "{ran:?}");
    let text = std::fs::read_to_string(at("j")).expect("journal");
    let entries = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("entry"));
    let entries: Vec<Entry> = entries.collect();
    let capacity_bytes = entries.first().expect("line").capacity_bytes;
    // They are read beside the session.
    let pinned_bytes = entries.iter().map(|entry| entry.pinned_bytes).max();
    let promised = plan(
        &own.model,
        &["--memory", &memory.to_string(), "--profile", &at("p")],
    );
    // Buffers, and the program where the group pays for it, are known only to a calibration; they take less than
    // this.
    let capacity = number(&promised, "/capacity_bytes");
    #[expect(clippy::cast_precision_loss)]
    let (had, pinned) = (capacity_bytes as f64, pinned_bytes.expect("line") as f64);
    assert!(
        had <= capacity && had > capacity - 90e6,
        "{had} of {capacity}"
    );
    let promised_pins = number(&promised, "/pinned_bytes");
    assert!(
        pinned <= promised_pins && pinned > promised_pins * 0.5,
        "{pinned} of {promised_pins}"
    );

    let stderr = String::from_utf8_lossy(&ran.stderr);
    let hits: f64 = stderr
        .split("experts: ")
        .nth(1)
        .and_then(|rest| rest.split('%').next())
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| panic!("no hit ratio in {stderr}"));
    // With what it had, and from its own recording.
    let buffers = capacity - had;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let left = (memory - buffers as u64).to_string();
    let report = plan(&own.model, &["--memory", &left, "--trace", &at("t")]);
    assert_eq!(report["from"], "trace");
    let (low, high) = (
        number(&report, "/hit_ratio/low") * 100.0,
        number(&report, "/hit_ratio/high") * 100.0,
    );
    // The prompt counts in the session's ratio and not in the replay.
    assert!(
        hits > low - 10.0 && hits < high + 10.0,
        "{hits}, {low} to {high}"
    );
    let calibration = own.folder.path().join("c");
    std::fs::write(
        &calibration,
        "engine_bytes = 60000000\ncompute_quiet_s = 0.02\nroomy_bytes_per_s = 1e9\n",
    )
    .expect("write");
    let more = [
        "--memory",
        "300MB",
        "--calibration",
        calibration.to_str().expect("UTF-8"),
    ];
    let report = plan(&own.model, &more);
    assert!(number(&report, "/tok_s/low") < number(&report, "/tok_s/high"));
    assert!(number(&report, "/tok_s/high") <= 50.0);
}

#[test]
fn files_that_do_not_belong_are_refused_by_name() {
    let name = "files_that_do_not_belong_are_refused_by_name";
    let Some(model) = support::moe(name) else {
        return;
    };
    let model = model.to_str().expect("UTF-8");
    let folder = tempfile::tempdir().expect("temp dir");
    let bad = folder.path().join("bad");
    std::fs::write(&bad, "engine_bytes = -1\n").expect("write");
    let bad = bad.to_str().expect("UTF-8");
    run(["plan", model, "--calibration", bad]).failure(1, &["is no calibration"]);
    run(["plan", model, "--trace", bad]).failure(1, &["not a hotpin trace"]);
    run(["plan", model, "--profile", bad]).failure(1, &["could not be read"]);
    run(["plan", model, "--memory", "lots"]).failure(2, &["--memory"]);
    let traces = Path::new(env!("CARGO_MANIFEST_DIR")).join("sim/traces/gpt-oss-20b.trace");
    let trace = traces.to_str().expect("UTF-8");
    run(["plan", model, "--trace", trace]).failure(1, &["another model"]);
}
