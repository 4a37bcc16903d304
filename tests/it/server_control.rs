//! What a server tells of its control loop, and what may be changed in it.

use super::client::{Answer, Server};
use super::support;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};

const CHAT: &str = "/v1/chat/completions";

fn ask(server: &Server, most: u32) -> Value {
    let body = json!({"messages": [{"role": "user", "content": "Tell me about the sea."}],
        "temperature": 0, "max_tokens": most});
    server.post(CHAT, &body).json()
}

/// The names and types that dashboards and alerts are built on. With a key, since controls are tested
/// with it, under a capacity that makes the loop work.
const GOLDEN: [(&str, &str); 25] = [
    ("hotpin_binding_ceiling", "gauge"),
    ("hotpin_cached_prompt_tokens_total", "counter"),
    ("hotpin_capacity_bytes", "gauge"),
    ("hotpin_ceiling_bytes", "gauge"),
    ("hotpin_decode_token_seconds", "histogram"),
    ("hotpin_degraded", "gauge"),
    ("hotpin_drift_events_total", "counter"),
    ("hotpin_expert_hits_total", "counter"),
    ("hotpin_expert_misses_total", "counter"),
    ("hotpin_fetch_bytes_total", "counter"),
    ("hotpin_generated_tokens_total", "counter"),
    ("hotpin_locked_bytes", "gauge"),
    ("hotpin_major_faults_total", "counter"),
    ("hotpin_mlock_errors_total", "counter"),
    ("hotpin_pinned_bytes", "gauge"),
    ("hotpin_pressure_stall_seconds_total", "counter"),
    ("hotpin_program_locked_bytes", "gauge"),
    ("hotpin_prompt_tokens_total", "counter"),
    ("hotpin_requests_queued", "gauge"),
    ("hotpin_requests_running", "gauge"),
    ("hotpin_requests_total", "counter"),
    ("hotpin_stall_seconds_total", "counter"),
    ("hotpin_swaps_total", "counter"),
    ("hotpin_tick_seconds", "histogram"),
    ("hotpin_transit_bytes", "gauge"),
];

/// Types by name, and values by name and labels, of an exposition.
fn parsed(text: &str) -> (BTreeMap<String, String>, BTreeMap<String, f64>) {
    let (mut types, mut values) = (BTreeMap::new(), BTreeMap::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("name and type");
            assert!(
                types.insert(name.to_owned(), kind.to_owned()).is_none(),
                "{name} twice"
            );
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').expect("name and value");
            let value: f64 = value.parse().unwrap_or_else(|e| panic!("{e}: {line}"));
            assert!(
                values.insert(name.to_owned(), value).is_none(),
                "{name} twice"
            );
        }
    }
    (types, values)
}

#[test]
fn metrics_have_the_agreed_names_and_types_and_agree_with_the_state() {
    let name = "metrics_have_the_agreed_names_and_types_and_agree_with_the_state";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--capacity", "120MB"]);
    ask(&server, 12);
    let answer = server.get("/metrics");
    assert_eq!(answer.status, 200);
    assert!(
        answer.head.contains("text/plain; version=0.0.4"),
        "{}",
        answer.head
    );
    let (mut types, values) = parsed(&answer.body);
    // Not known on every machine: PSI may be absent.
    types.insert(
        "hotpin_pressure_stall_seconds_total".into(),
        "counter".into(),
    );
    let golden: BTreeMap<String, String> = GOLDEN
        .iter()
        .map(|(n, t)| ((*n).into(), (*t).into()))
        .collect();
    assert_eq!(types, golden);
    let value = |name: &str| {
        values
            .get(name)
            .copied()
            .unwrap_or_else(|| panic!("no {name}"))
    };
    assert!((value("hotpin_ceiling_bytes{ceiling=\"configured\"}") - 120e6).abs() < 1.0);
    assert!(value("hotpin_pinned_bytes") + value("hotpin_transit_bytes") <= 120e6);
    let binds: f64 = values
        .iter()
        .filter(|(name, _)| name.starts_with("hotpin_binding_ceiling"))
        .map(|(_, value)| value)
        .sum();
    assert!((binds - 1.0).abs() < f64::EPSILON, "one ceiling binds");
    let misses = value("hotpin_expert_misses_total");
    assert!(misses > 0.0 && value("hotpin_fetch_bytes_total") > 0.0);
    let count = value("hotpin_decode_token_seconds_count");
    assert!(
        (value("hotpin_decode_token_seconds_bucket{le=\"+Inf\"}") - count).abs() < f64::EPSILON
    );
    assert!((value("hotpin_generated_tokens_total") - 12.0).abs() < f64::EPSILON);
    assert!(
        (count - 11.0).abs() < f64::EPSILON,
        "times between two tokens: {count}"
    );
    let mut before = 0.0;
    for line in answer
        .body
        .lines()
        .filter(|l| l.starts_with("hotpin_decode_token_seconds_bucket"))
    {
        let now: f64 = line
            .rsplit(' ')
            .next()
            .expect("value")
            .parse()
            .expect("number");
        assert!(now >= before, "{line}");
        before = now;
    }
}

#[test]
fn the_state_names_every_expert_and_the_journal_can_be_paged() {
    let name = "the_state_names_every_expert_and_the_journal_can_be_paged";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--capacity", "120MB", "--tick-ms", "20"]);
    ask(&server, 16);
    let state = server.get("/api/state").json();
    assert_eq!(state["phase"], "ready");
    assert_eq!(state["model"]["policy"], "adaptive");
    assert_eq!(state["model"]["n_ctx"], 512);
    let layers = state["layers"].as_array().expect("layers");
    let experts: u64 = layers
        .iter()
        .map(|l| l["experts"].as_u64().expect("count"))
        .sum();
    let map = &state["now"]["experts"];
    let residence = map["residence"].as_str().expect("residence");
    assert_eq!(residence.len() as u64, experts);
    assert_eq!(map["score"].as_str().expect("score").len() as u64, experts);
    let bytes = layers[0]["expert_bytes"].as_u64().expect("bytes");
    let pinned = residence.bytes().filter(|&b| b == b'P').count() as u64 * bytes;
    assert!(pinned <= 120_000_000, "{pinned}");
    assert!(
        residence.contains('t') || residence.contains('P'),
        "{residence}"
    );
    assert_eq!(state["recent_requests"][0]["completion_tokens"], 16);
    let text = state.to_string();
    assert!(!text.contains("sea"), "nothing that was said is in it");
    check_paging(&server);
    check_explanations(&server, residence);
}

fn check_paging(server: &Server) {
    let mut numbers = Vec::new();
    let mut before = String::new();
    loop {
        let page = server.get(&format!("/api/journal?limit=3{before}")).json();
        let entries = page["entries"].as_array().expect("entries");
        let mut part: Vec<u64> = entries
            .iter()
            .map(|e| e["number"].as_u64().expect("number"))
            .collect();
        assert!(!part.is_empty() && part.len() <= 3);
        assert!(entries.iter().all(|e| e["entry"]["binding"].is_string()));
        part.extend(numbers);
        numbers = part;
        match page["before"].as_u64() {
            Some(number) => before = format!("&before={number}"),
            None => break,
        }
    }
    let all: Vec<u64> = (0..numbers.len() as u64).collect();
    assert_eq!(numbers, all, "every entry once, in order");
    server.get("/api/journal?limit=0").refused(400, &["limit"]);
    server
        .get("/api/journal?limits=3")
        .refused(400, &["limits"]);
}

fn check_explanations(server: &Server, residence: &str) {
    // The loop goes on, so the expert may have moved since; the words and the place must agree.
    let index = residence
        .find('P')
        .or_else(|| residence.find('t'))
        .expect("some expert");
    let path = format!("/api/explain/{}/{}", index / 8, index % 8);
    let told = server.get(&path).json();
    let place = told["residence"].as_str().expect("residence");
    let text = told["text"].as_str().expect("text");
    let words = match place {
        "pinned" => "is pinned",
        "transit" => "in memory and not locked",
        _ => "evicted at",
    };
    assert!(text.contains(words), "{place}: {text}");
    if place == "pinned" {
        assert!(text.contains("because"), "{text}");
        assert!(told["pinned"]["reason"].is_string(), "{told}");
    }
    for path in [
        "/api/explain/30/0",
        "/api/explain/0/8",
        "/api/explain/x/0",
        "/api/explain/-1/0",
    ] {
        server
            .get(path)
            .refused(404, &["no_such_expert", "count from 0 to 29"]);
    }
}

#[test]
fn controls_need_the_key_and_take_effect() {
    let name = "controls_need_the_key_and_take_effect";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--api-key", "k", "--tick-ms", "20"]);
    let capacity = |bytes: &Value| server.post("/api/control/capacity", &json!({"bytes": bytes}));
    assert_eq!(capacity(&json!("60MB")).json()["bytes"], 60_000_000);
    server.wait_until("/now/tick/capacity_bytes", |bytes| bytes <= 60_000_000);
    assert_eq!(server.state("/now/tick/binding"), "configured");
    assert_eq!(server.state("/now/set_capacity_bytes"), 60_000_000);
    server.wait_until("/now/tick/pinned_bytes", |bytes| bytes <= 60_000_000);
    server.post("/api/control/pause", &json!({})).json();
    assert_eq!(server.state("/now/paused"), true);
    let ticks = server.state("/now/number").as_u64().expect("ticks");
    server.wait_until("/now/number", |now| now > ticks + 1);
    let pinned = server.state("/now/tick/pinned_bytes");
    ask(&server, 12);
    assert_eq!(
        server.state("/now/tick/pinned_bytes"),
        pinned,
        "nothing moves while it is paused"
    );
    assert_eq!(capacity(&json!(10_000_000)).json()["bytes"], 10_000_000);
    server.wait_until("/now/tick/pinned_bytes", |bytes| bytes <= 10_000_000);
    server.post("/api/control/resume", &json!({})).json();
    assert_eq!(server.state("/now/paused"), false);
    assert_eq!(capacity(&Value::Null).json()["bytes"], Value::Null);
    for bad in [json!("much"), json!(-1), json!(1.5), json!([1])] {
        capacity(&bad).refused(400, &["bytes"]);
    }
    server
        .post("/api/control/capacity", &json!({"byte": 1}))
        .refused(400, &["byte"]);
}

#[test]
fn events_come_with_every_tick_and_the_map_only_when_it_changed() {
    let name = "events_come_with_every_tick_and_the_map_only_when_it_changed";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--tick-ms", "20"]);
    let mut stream = server.connect();
    let request = server.request("GET", "/api/events?experts=true", None);
    stream.write_all(request.as_bytes()).expect("write");
    let mut told = BufReader::new(stream)
        .lines()
        .map_while(Result::ok)
        .filter_map(|line| -> Option<Value> {
            line.strip_prefix("data: ")
                .map(|d| serde_json::from_str(d).expect("JSON"))
        });
    let mut ticks: Vec<Value> = told.by_ref().take(5).collect();
    assert_eq!(ticks.len(), 5);
    assert!(ticks[0]["experts"]["residence"].is_string(), "{}", ticks[0]);
    // A server that has just started is filled for some seconds.
    let settled = |tick: &Value| tick.get("experts").is_none();
    while !ticks.last().is_some_and(settled) {
        assert!(ticks.len() < 3000, "an idle server's map does not change");
        ticks.extend(told.next());
    }
    let numbers: Vec<u64> = ticks
        .iter()
        .map(|t| t["number"].as_u64().expect("number"))
        .collect();
    assert!(numbers.windows(2).all(|w| w[0] < w[1]), "{numbers:?}");
    server.get("/api/events?expert=1").refused(400, &["expert"]);
}

#[test]
fn health_follows_the_model_and_an_unregulated_server_says_so() {
    let name = "health_follows_the_model_and_an_unregulated_server_says_so";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start_unready(&model, &["--policy", "off"]);
    loop {
        let models: Answer = server.get("/v1/models");
        let health = server.get("/health");
        if health.status == 200 {
            break;
        }
        assert_eq!((models.status, health.status), (503, 503));
    }
    assert_eq!(ask(&server, 2)["usage"]["completion_tokens"], 2);
    assert_eq!(server.state("/now/tick"), Value::Null);
    assert_eq!(server.state("/model/store"), Value::Null);
    server.get("/api/journal").refused(404, &["not_regulated"]);
    server
        .get("/api/explain/0/0")
        .refused(404, &["not_regulated"]);
    assert!(
        server
            .get("/metrics")
            .body
            .contains("hotpin_generated_tokens_total 2")
    );
}
