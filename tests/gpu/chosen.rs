//! The whole program on a device, which by itself changes where experts are, by what it measured.

use crate::client::Server;
use crate::program::program;
use crate::support::toy;
use hotpin::demo::{ToyArgs, build_toy};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Settings for toy sizes and times: whatever is faster at all is faster enough, and each arrangement is timed by
/// a few tokens.
const LAWS: &str = "
[vram]
reserve_bytes = 1048576
quiet_hold_s = 0.2
quiet_hold_max_s = 0.4
rise_filter_s = 0.0
dwell_s = 2.0
confirm_s = 0.2
retry_s = 0.2
slack_share = 0.0
margin_share = 0.000001
trial_share = 0.0
trial_tokens = 8.0
payback_s = 86400.0
";
/// Longest that anything here takes.
const PATIENCE: Duration = Duration::from_secs(150);

/// Every token is routed to all four experts of each layer, and all of them are a little less than the two MiB of which
/// the law gives a pool one: it misses every time, whole layers fit. And experts on the processor are slow, since
/// there are four threads for each: so that whole layers are the cheapest on any machine.
fn model(folder: &Path) -> PathBuf {
    let output = folder.join("all.gguf");
    build_toy(&ToyArgs {
        layers: 4,
        experts: 4,
        top_k: 4,
        width: 128,
        expert_width: 288,
        seed: 1,
        output: output.clone(),
        force: false,
    })
    .expect("toy");
    output
}

/// The tokens of an answer, streamed: their bytes, which need not be text.
fn answer(server: &Server) -> Vec<Value> {
    // Longer than any batch that a pool serves.
    let prompt = "A card holds what was used last, and asks for what it lacks.";
    let body = json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": 32,
        "temperature": 0, "stream": true, "cache_prompt": false, "logprobs": true});
    let mut connection = server.connect();
    let request = server.request("POST", "/v1/chat/completions", Some(&body.to_string()));
    connection.write_all(request.as_bytes()).expect("write");
    let mut tokens = Vec::new();
    for line in BufReader::new(connection).lines() {
        let line = line.expect("read");
        let Some(event) = line
            .strip_prefix("data: ")
            .and_then(|data| serde_json::from_str::<Value>(data).ok())
        else {
            continue;
        };
        assert!(event["error"].is_null(), "{event}");
        let content = event["choices"][0]["logprobs"]["content"].as_array();
        let told = content.into_iter().flatten();
        tokens.extend(told.map(|token| token["bytes"].clone()));
    }
    tokens
}

/// A decision for another arrangement.
#[derive(Debug)]
struct Chosen {
    rule: String,
    from: String,
    to: String,
    /// What a token was expected to take, ms: in a pool, with whole layers, on the processor.
    expected: [(&'static str, Option<f64>); 3],
}

/// The decisions of a journal: of each order the first tick that gave it.
fn chosen(journal: &Path) -> Vec<Chosen> {
    let text = std::fs::read_to_string(journal).expect("journal");
    let mut all: Vec<Chosen> = Vec::new();
    for line in text.lines() {
        let entry: Value = serde_json::from_str(line).expect("JSON");
        let tier = &entry["vram"];
        let word = |key: &str| tier[key].as_str().expect("a word").to_owned();
        let (from, to) = (word("arrangement"), word("wanted"));
        let again = all
            .last()
            .is_some_and(|last| (&last.from, &last.to) == (&from, &to));
        if from != to && !again {
            let ms = |kind: &str| tier[format!("{kind}_ms")].as_f64();
            all.push(Chosen {
                rule: word("rule"),
                from,
                to,
                expected: ["reload", "static", "cpu"].map(|kind| (kind, ms(kind))),
            });
        }
    }
    all
}

#[test]
fn the_law_chooses_what_it_measured_to_be_cheapest_and_answers_go_on() {
    let name = "the_law_chooses_what_it_measured_to_be_cheapest_and_answers_go_on";
    let Some(_alone) = toy(name) else { return };
    let folder = tempfile::tempdir().expect("folder");
    let model = model(folder.path());
    let (laws, journal) = (
        folder.path().join("laws.toml"),
        folder.path().join("journal.jsonl"),
    );
    std::fs::write(&laws, LAWS).expect("write");
    let processors = std::thread::available_parallelism().expect("known").get();
    let threads = (4 * processors).to_string();
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let (laws, log) = (text(&laws), text(&journal));
    let args = [
        "--vram",
        "auto",
        "-t",
        &threads,
        "--tick-ms",
        "20",
        "--control",
        &laws,
        "--journal",
        &log,
    ];
    let server = Server::start(&model, &args);
    let over = AtomicBool::new(false);
    let began = Instant::now();
    let (told, metrics, explained, answers) = std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut answers = Vec::new();
            // Bounded, since a failure beside it says nothing here.
            while !over.load(Relaxed) && began.elapsed() < 2 * PATIENCE {
                answers.push(answer(&server));
            }
            answers
        });
        let told = loop {
            let tier = server.state("/now/tick/vram");
            if tier["arrangement"] == "static" {
                break tier;
            }
            assert!(began.elapsed() < PATIENCE, "{tier}\n{}", server.stderr());
            std::thread::sleep(Duration::from_millis(50));
        };
        let metrics = server.get("/metrics").body;
        let explained = program(["explain", "3", "0", "--server"])
            .arg(format!("http://{}", server.address))
            .output()
            .expect("explain");
        over.store(true, Relaxed);
        let mut answers = asking.join().expect("answers");
        // One that lives through no change.
        answers.push(answer(&server));
        (told, metrics, explained, answers)
    });
    server.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(server.wait(), Some(0));
    eprintln!("{answers:?}\n{:#?}", chosen(&journal));
    let whole = answers.last().expect("an answer");
    assert_eq!(whole.len(), 32);
    assert!(answers.iter().all(|answer| answer == whole));
    assert_eq!(told["static_layers"], json!([0, 1, 2, 3]), "{told}");
    for line in [
        "hotpin_vram_arrangement{arrangement=\"static\"} 1".to_owned(),
        format!("hotpin_vram_static_bytes {}", told["static_bytes"]),
        "hotpin_vram_pool_bytes 0".to_owned(),
    ] {
        assert!(metrics.contains(&line), "no {line:?} in {metrics}");
    }
    let said = String::from_utf8_lossy(&explained.stdout);
    for words in ["as all of its layer", "of whole layers' experts for good"] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    check_choices(&chosen(&journal));
    let summed = program(["journal", &log]).output().expect("journal");
    let said = String::from_utf8_lossy(&summed.stdout);
    let line = said.lines().find(|line| line.starts_with("vram: "));
    let line = line.expect("a line of the tier");
    assert!(line.contains("(0 refused)"), "{line}");
    eprintln!("{line}");
}

/// Whatever was chosen for its time was the cheapest by the numbers of that tick, whole layers among it; before
/// that a pool was begun with, and the processor was tried.
fn check_choices(decisions: &[Chosen]) {
    let rules: Vec<&str> = decisions.iter().map(|d| d.rule.as_str()).collect();
    assert_eq!(rules[..2], ["start", "trial"], "{decisions:?}");
    assert!(rules.contains(&"static"), "{decisions:?}");
    for decision in decisions {
        if !matches!(decision.rule.as_str(), "reload" | "static" | "cpu") {
            continue;
        }
        let known = decision.expected.iter();
        let cheapest = known
            .filter_map(|&(kind, ms)| Some((kind, ms?)))
            .min_by(|a, b| a.1.total_cmp(&b.1));
        let (kind, _) = cheapest.expect("times were known");
        // The way back from a trial is to the pool, where that is cheaper than the processor.
        if (decision.from.as_str(), decision.to.as_str()) == ("cpu", "reload") {
            let [(_, reload), _, (_, cpu)] = decision.expected;
            assert!(reload < cpu, "{decision:?}");
        } else {
            assert_eq!(kind, decision.to, "{decision:?}");
        }
    }
}
