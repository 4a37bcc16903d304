//! The program itself: import, replay and scenario, what they print and what they refuse.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A directory of its own for each test.
fn scratch(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

fn sim(arguments: &str, dir: &PathBuf) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hotpin-sim"))
        .args(arguments.split_whitespace())
        .current_dir(dir)
        .output()
        .unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_raw_recording_becomes_hit_ratios() {
    let dir = scratch("import");
    let raw: Vec<u8> = (0..40u8)
        .flat_map(|token| [token % 4, 4, 5, token % 3])
        .collect();
    fs::write(dir.join("raw"), raw).unwrap();
    let csv = "category,repetition,n_tokens,offset_tokens\na,False,30,0\nb,True,10,30\n";
    fs::write(dir.join("segments.csv"), csv).unwrap();
    let import = "import --raw raw --layers 2 --experts 6 --top-k 2 -o t \
                  --segments segments.csv --drop-repetition";
    let imported = sim(import, &dir);
    assert!(imported.status.success(), "{}", stderr(&imported));
    assert!(String::from_utf8_lossy(&imported.stdout).contains("30 of 40 tokens"));
    let replayed = sim(
        "replay --trace t --capacity 50%,12 --policy lru,belady --json",
        &dir,
    );
    assert!(replayed.status.success(), "{}", stderr(&replayed));
    let json: serde_json::Value = serde_json::from_slice(&replayed.stdout).unwrap();
    let results = json["results"].as_array().unwrap();
    assert_eq!(results.len(), 4);
    assert_eq!(results[0]["policy"], "lru");
    assert_eq!(results[0]["capacity_experts"], 6);
    assert_eq!(results[1]["gap_closed"], 1.0);
    assert_eq!(
        results[2]["hits"],
        120 - 9,
        "each of the nine experts misses once"
    );
    assert_eq!(results[2]["gap_closed"], serde_json::Value::Null);
    assert_eq!(results[3]["accesses"], 120);
}

#[test]
fn refusals_say_what_to_do() {
    let dir = scratch("refusals");
    fs::write(dir.join("a.xz"), b"\xfd7zXZ\0\0\x04").unwrap();
    let compressed = sim(
        "import --raw a.xz --layers 2 --experts 4 --top-k 2 -o t",
        &dir,
    );
    assert_eq!(compressed.status.code(), Some(1));
    assert!(
        stderr(&compressed).contains("damaged"),
        "{}",
        stderr(&compressed)
    );
    assert!(!dir.join("t").exists());
    let foreign = sim("replay --trace a.xz", &dir);
    assert_eq!(foreign.status.code(), Some(1));
    assert!(stderr(&foreign).contains("not a hotpin trace"));
    for usage in [
        "replay --trace a.xz --policy best",
        "replay --trace a.xz --capacity 2GB2",
        "scenario flood",
        "",
    ] {
        assert_eq!(sim(usage, &dir).status.code(), Some(2), "{usage}");
    }
    assert!(stderr(&sim("scenario flood", &dir)).contains("step-hog"));
}

#[test]
fn a_scenario_reports_every_tick() {
    let dir = scratch("scenario");
    let output = sim("scenario steady --seed 5 --json", &dir);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["seed"], 5);
    assert_eq!(json["policy"], "adaptive");
    assert_eq!(json["ticks"].as_array().unwrap().len(), 1200);
    let table = String::from_utf8(sim("scenario steady", &dir).stdout).unwrap();
    assert!(table.contains("reversals"), "{table}");
}

#[test]
fn whatif_answers_in_json_and_refuses_by_name() {
    let dir = scratch("whatif");
    let output = sim("whatif --steps 60 --json", &dir);
    assert!(output.status.success(), "{}", stderr(&output));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["machine"], "rtx-3090");
    let results = json["results"].as_array().unwrap();
    assert_eq!(results.len(), 8);
    assert_eq!(results[2]["strategy"], "reload-lru");
    assert!(results[2]["figures"]["tok_s"].as_f64().unwrap() > 0.0);
    assert_eq!(results[2]["impossible"], serde_json::Value::Null);
    let unknown = sim("whatif --machine abacus", &dir);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(stderr(&unknown).contains("laptop-32gb"));
    fs::write(dir.join("m.toml"), "name = \"m\"\nlayers = 0\n").unwrap();
    let broken = sim("whatif --model m.toml", &dir);
    assert!(stderr(&broken).contains("m.toml"), "{}", stderr(&broken));
}

/// What `replay --json` says of the trace that ships with the program.
fn shipped(arguments: &str) -> Vec<serde_json::Value> {
    let dir = scratch("shipped");
    let output = sim(&format!("replay --json {arguments}"), &dir);
    assert!(output.status.success(), "{}", stderr(&output));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    json["results"].as_array().unwrap().clone()
}

#[test]
fn the_shipped_trace_gives_the_reference_values() {
    let results = shipped("--policy lru,belady");
    let ratios: Vec<String> = results
        .iter()
        .map(|result| format!("{:.4}", result["hit_ratio"].as_f64().unwrap()))
        .collect();
    let expected = [
        "0.4409", "0.6861", "0.6133", "0.8287", "0.8271", "0.9322", "0.9088", "0.9659",
    ];
    assert_eq!(ratios, expected);
}

#[test]
fn adaptive_closes_the_gap_on_prompts_that_it_was_not_chosen_on() {
    let results = shipped("--policy adaptive --prompts odd");
    for (result, (experts, bar)) in
        results
            .iter()
            .zip([(115, 0.40), (192, 0.46), (307, 0.40), (384, 0.34)])
    {
        assert_eq!(result["capacity_experts"], experts);
        let closed = result["gap_closed"].as_f64().unwrap();
        assert!(closed >= bar, "{experts}: {closed}");
    }
}

#[test]
fn recorded_sessions_and_sweeps_say_what_they_need() {
    let dir = scratch("recorded");
    let output = sim("scenario recorded", &dir);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("--calibrate"),
        "{}",
        stderr(&output)
    );
    fs::write(dir.join("m.toml"), "host_bytes = 1\n").unwrap();
    let output = sim("scenario recorded --machine m.toml --trace none", &dir);
    assert!(stderr(&output).contains("m.toml"), "{}", stderr(&output));
    let output = sim("sweep --knobs pins.sharing", &dir);
    assert!(
        stderr(&output).contains("pins.share"),
        "{}",
        stderr(&output)
    );
    let output = sim(
        "sweep --knobs pins.share --seeds 0 --shipped-tokens 0",
        &dir,
    );
    assert!(stderr(&output).contains("--seeds"), "{}", stderr(&output));
}
