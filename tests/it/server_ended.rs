//! A server whose control loop has ended before its time.

use super::client::{Answer, PATIENCE};
use super::support;
use hotpin::engine::Model;
use hotpin::engine::chat::Chat;
use hotpin::plant::Rig;
use hotpin::server::{App, End, Http, Key, Limits, ModelInfo, Phase, Ready, Scheduler};
use hotpin_controllers::PolicyKind;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

/// A client in this process.
pub struct Client(SocketAddr);

impl Client {
    pub fn begin(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.0).expect("connect");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\nauthorization: Bearer k\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.0,
            body.len()
        );
        stream.write_all(request.as_bytes()).expect("write");
        stream
    }

    pub fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        Answer::read(self.begin(method, path, body))
    }
}

/// What a server over a rig is ready with.
fn ready(loaded: &support::Loaded, rig: &Rig<'_>, monitor: hotpin::governor::Monitor) -> Ready {
    // The server's own handle of the model, which renders and tokenises prompts.
    let model = Arc::new(Model::load(loaded.map.path(), |_| true).expect("load"));
    Ready {
        chat: Chat::new(&model, None).expect("template"),
        n_ctx: rig.session.n_ctx(),
        info: ModelInfo {
            id: "tiny".into(),
            file_bytes: 0,
            architecture: String::new(),
            expert_bytes: 0,
            token_cycle_bytes: 0,
            policy: PolicyKind::Adaptive,
            store: None,
            n_ctx: rig.session.n_ctx(),
            parallel: 1,
            n_batch: 512,
            n_ubatch: 512,
            threads: 1,
        },
        monitor: Some(monitor),
        limitations: rig.limitations.clone(),
        counters: Arc::clone(&rig.counters),
        shape: Some(loaded.map.shape().clone()),
        blocks: loaded
            .map
            .layers()
            .iter()
            .map(|layer| layer.block)
            .collect(),
        since: Instant::now(),
        model,
    }
}

/// A server in this process over a rig, with its client.
pub fn begin(
    loaded: &support::Loaded,
    rig: &Rig<'_>,
    monitor: hotpin::governor::Monitor,
) -> (Arc<App>, Http, Client) {
    let app = Arc::new(App::new(
        "tiny".into(),
        Some(Key::new("k")),
        true,
        Limits::default(),
    ));
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let client = Client(listener.local_addr().expect("address"));
    let http = Http::start(&app, listener, &[]).expect("start");
    app.enter(Phase::Ready(Arc::new(ready(loaded, rig, monitor))));
    (app, http, client)
}

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
    let (app, http, client) = begin(&loaded, &rig, governor.monitor());
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
