//! A server whose control loop has ended before its time.

use super::in_process::begin;
use super::support;
use hotpin::server::{End, Scheduler};
use hotpin_controllers::PolicyKind;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::sync::Arc;

#[test]
fn a_loop_that_has_ended_is_told_takes_no_orders_and_requests_are_still_served() {
    let name = "a_loop_that_has_ended_is_told_takes_no_orders_and_requests_are_still_served";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let mut rig = loaded.rig(PolicyKind::Fetch, None, support::NEVER);
    let governor = loaded.doomed_governor(&rig, 3);
    support::wait_until("the governor to fail", || {
        governor.status().failed.is_some()
    });
    let (app, http, client) = begin(loaded.map, &rig, governor.monitor());
    for (path, body) in [
        ("/api/control/pause", ""),
        ("/api/control/resume", ""),
        ("/api/control/capacity", "{\"bytes\": 1000000}"),
    ] {
        let answer = client.ask("POST", path, body);
        answer.refused(409, &["loop_ended", "without control"]);
    }
    let state = client.ask("GET", "/api/state", "").json();
    let failed = state["now"]["failed"].as_str().expect("failed");
    assert!(failed.contains("panicked"), "{failed}");
    assert_eq!(state["now"]["paused"], false, "no order was taken");
    assert_eq!(client.ask("GET", "/health", "").status, 200);
    let metrics = client.ask("GET", "/metrics", "");
    assert!(metrics.body.contains("hotpin_pinned_bytes"), "{metrics:?}");
    let ended = "hotpin_degraded{state=\"loop_ended\"} 1";
    assert!(metrics.body.contains(ended), "{metrics:?}");
    assert!(
        metrics
            .body
            .contains("hotpin_degraded{state=\"tick_stuck\"} 0")
    );
    assert_eq!(state["now"]["degraded"][0]["state"], "loop_ended");
    // Without ticks, events go on by the clock and say why.
    let events = BufReader::new(client.begin("GET", "/api/events", ""));
    let said = events
        .lines()
        .map(|line| line.expect("read"))
        .filter(|line| line.contains("\"failed\":\"the governor"))
        .take(2)
        .count();
    assert_eq!(said, 2);
    let queue = Arc::clone(&app.queue);
    let body = json!({"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3, "temperature": 0});
    let asking = std::thread::spawn(move || {
        let answer = client.ask("POST", "/v1/chat/completions", &body.to_string());
        queue.close(End::Drained);
        answer
    });
    Scheduler::new(
        &mut rig.session,
        Arc::clone(&app.queue),
        Arc::clone(&app.stats),
    )
    .run();
    let answer: Value = asking.join().expect("answer").json();
    let tokens = answer["usage"]["completion_tokens"].as_u64();
    assert!(tokens.is_some_and(|n| (1..=3).contains(&n)), "{answer}");
    http.stop();
    drop(governor);
}
