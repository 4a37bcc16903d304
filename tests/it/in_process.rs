//! A server in the test's own process, over a rig that the test has.

use super::client::{Answer, PATIENCE};
use hotpin::engine::Model;
use hotpin::engine::chat::Chat;
use hotpin::governor::Monitor;
use hotpin::model::ModelMap;
use hotpin::plant::Rig;
use hotpin::server::{App, Http, Key, Limits, ModelInfo, Phase, Ready};
use hotpin_controllers::PolicyKind;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

/// A client in this process.
pub struct Client(pub SocketAddr);

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

    /// An answer, streamed; `watch` is told after each piece how many there were. Returns its text, and what error
    /// ended it.
    pub fn stream(
        &self,
        path: &str,
        body: &Value,
        mut watch: impl FnMut(usize),
    ) -> (String, Option<String>) {
        let answer = BufReader::new(self.begin("POST", path, &body.to_string()));
        let (mut text, mut error, mut pieces) = (String::new(), None, 0);
        for line in answer.lines() {
            let line = line.expect("read");
            let Some(event) = line
                .strip_prefix("data: ")
                .and_then(|data| serde_json::from_str::<Value>(data).ok())
            else {
                continue;
            };
            if let Some(said) = event["error"]["message"].as_str() {
                error = Some(said.to_owned());
            }
            let choice = &event["choices"][0];
            let said = [&choice["delta"]["content"], &choice["text"]];
            text.extend(said.into_iter().filter_map(Value::as_str));
            pieces += 1;
            watch(pieces);
        }
        (text, error)
    }
}

/// What a server over a rig is ready with.
fn ready(map: &ModelMap, rig: &Rig<'_>, monitor: Monitor) -> Ready {
    let model = Arc::new(Model::open_words(map.path()).expect("words"));
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
        shape: Some(map.shape().clone()),
        blocks: map.layers().iter().map(|layer| layer.block).collect(),
        since: Instant::now(),
        model,
    }
}

/// A server in this process over a rig, with its client.
pub fn begin(map: &ModelMap, rig: &Rig<'_>, monitor: Monitor) -> (Arc<App>, Http, Client) {
    let app = Arc::new(App::new(
        "tiny".into(),
        Some(Key::new("k")),
        true,
        Limits::default(),
    ));
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let client = Client(listener.local_addr().expect("address"));
    let http = Http::start(&app, listener, &[]).expect("start");
    app.enter(Phase::Ready(Arc::new(ready(map, rig, monitor))));
    (app, http, client)
}
