//! What a recording with ticks looks like to `hotpin-sim show`, and the charts of signals.

use hotpin_controllers::trace::{Phase, Tick, TraceEncoder, TraceHeader};
use hotpin_controllers::{
    CgroupMemory, Decision, EngineTotals, Held, HostMemory, LockLimits, ModelShape, Moment,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn scratch(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

fn sim(arguments: &str, dir: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hotpin-sim"))
        .args(arguments.split_whitespace())
        .current_dir(dir)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A second's tick: half of what was routed was there.
fn tick(second: u64, capacity_bytes: u64) -> Tick {
    Tick {
        now: Moment {
            ns: second * 1_000_000_000,
        },
        host: Some(HostMemory {
            total_bytes: 8 << 30,
            available_bytes: 3 << 30,
        }),
        cgroup: Some(CgroupMemory {
            limit_bytes: 4 << 30,
            available_bytes: 2 << 30,
        }),
        pressure: None,
        locks: LockLimits {
            memlock_bytes: None,
            locked_elsewhere_bytes: 0,
            map_budget_bytes: None,
        },
        faults: None,
        engine: Some(EngineTotals {
            decode_tokens: 10 * second,
            stall_ns: 250_000_000 * second,
            hits: 20 * second,
            misses: 20 * second,
            ..EngineTotals::default()
        }),
        held: Held::default(),
        decision: Decision {
            capacity_bytes,
            ..Decision::default()
        },
    }
}

/// Forty tokens of two prompts, with a tick after every ten.
fn recording() -> Vec<u8> {
    let mut encoder = TraceEncoder::new(&TraceHeader {
        model: "toy".to_owned(),
        architecture: "toymoe".to_owned(),
        dense_bytes: 0,
        shape: ModelShape::uniform(2, 8, 1 << 20, 2).unwrap(),
    })
    .unwrap();
    encoder.tick(&tick(0, 1 << 30)).unwrap();
    for token in 0..40u32 {
        if token % 20 == 0 {
            encoder.prompt(&format!("text \u{7} {token}")).unwrap();
        }
        let first = token % 7;
        let routed = [first, first + 1, 8 + first, 9 + first];
        encoder.push(Phase::Decode, &routed).unwrap();
        if token % 10 == 9 {
            let second = u64::from(token / 10) + 1;
            encoder.tick(&tick(second, 1 << 29)).unwrap();
        }
    }
    encoder.finish()
}

#[test]
fn prompts_and_ticks_are_shown_and_drawn() {
    let dir = scratch("show");
    fs::write(dir.join("t"), recording()).unwrap();
    let shown = sim("show --trace t --chart c.svg", &dir);
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    let table = text(&shown.stdout);
    assert!(table.contains("40 tokens decoded, 0 of prompts; 2 prompts, 5 ticks"));
    assert!(table.contains("20       20  text  20"), "{table}");
    assert!(!table.contains('\u{7}'), "labels are printed as plain text");
    let last = table.lines().rfind(|line| line.contains(" 40 ")).unwrap();
    for figure in ["4.0", "2048", "512", "0.500", "0.250"] {
        assert!(last.contains(figure), "{figure} in {last}");
    }
    let chart = fs::read_to_string(dir.join("c.svg")).unwrap();
    for signal in ["capacity", "hits", "waiting for experts", "available"] {
        assert!(chart.contains(signal), "{signal}");
    }
    let json = sim("show --trace t --json", &dir);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["prompts"][1][0], 20);
    assert_eq!(json["ticks"].as_array().unwrap().len(), 5);
    assert_eq!(json["ticks"][4][1]["engine"]["hits"], 80);
}

#[test]
fn a_trace_without_ticks_is_shown_and_not_drawn() {
    let dir = scratch("show-plain");
    let shown = sim("show", &dir);
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    assert!(text(&shown.stdout).contains("0 ticks"));
    let refused = sim("show --chart c.svg", &dir);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("no ticks to draw"));
    assert!(!dir.join("c.svg").exists());
}

#[test]
fn every_signal_of_a_scenario_is_drawn() {
    let dir = scratch("scenario-chart");
    let run = sim("scenario step-hog --chart c.svg --json", &dir);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let chart = fs::read_to_string(dir.join("c.svg")).unwrap();
    let signals = [
        "claimed by others",
        "capacity",
        "pinned",
        "transit",
        "unlocked",
        "tokens",
        "pressure (PSI some)",
        "faults",
    ];
    for signal in signals {
        assert!(chart.contains(signal), "{signal}");
    }
    assert!(!dir.join("c.svg.partial").exists());
}

#[test]
fn a_sweep_says_what_was_tried_and_what_held() {
    let dir = scratch("sweep");
    let run = sim(
        "sweep --knobs capacity.rise_filter_s --seeds 0 --shipped-tokens 30 --json",
        &dir,
    );
    assert!(run.status.success(), "{}", text(&run.stderr));
    let turns: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(turns[0]["name"], "capacity.rise_filter_s");
    assert_eq!(turns[0]["trials"].as_array().unwrap().len(), 3);
    let nothing = sim("sweep --seeds 0 --shipped-tokens 0", &dir);
    assert_eq!(nothing.status.code(), Some(1));
    assert!(text(&nothing.stderr).contains("nothing to judge by"));
}
