//! Clients that make mistakes, and clients that mean harm.

use super::client::{Answer, Server};
use super::support::{self, run};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";

fn short() -> Value {
    json!({"messages": [{"role": "user", "content": "Hi."}], "temperature": 0, "max_tokens": 2})
}

#[test]
fn mistakes_are_told_and_the_server_goes_on() {
    let name = "mistakes_are_told_and_the_server_goes_on";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--max-body", "64KiB"]);
    for body in ["", "{", "[]", "nul", "{\"messages\": [}", "\u{0}"] {
        let request = server.request("POST", CHAT, Some(body));
        server
            .send(&request)
            .refused(400, &["invalid_request_error"]);
    }
    let deep = "[".repeat(20_000);
    server
        .send(&server.request("POST", CHAT, Some(&deep)))
        .refused(400, &["JSON"]);
    let large = json!({"messages": [{"role": "user", "content": "x".repeat(70_000)}]});
    server.post(CHAT, &large).refused(413, &["65536"]);
    server.get(CHAT).refused(405, &["GET"]);
    server.get("/v2/models").refused(404, &["/v2/models"]);
    server
        .get("/v1/models/x")
        .refused(404, &["model_not_found"]);
    let models = server.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "test-8x2-q4_0");
    let form = server
        .request("POST", CHAT, Some("{}"))
        .replace("application/json", "text/plain");
    server.send(&form).refused(415, &["application/json"]);
    let evil = server
        .request("GET", "/v1/models", None)
        .replace(&server.address, "evil.example");
    server.send(&evil).refused(403, &["localhost"]);
    let page = server.get("/");
    assert_eq!(page.status, 200);
    assert!(
        page.head.contains("content-security-policy"),
        "{}",
        page.head
    );
    assert!(
        !page.head.contains("access-control-allow-origin"),
        "{}",
        page.head
    );
    server.post(CHAT, &short()).json();
}

#[test]
fn a_wrong_key_opens_nothing_but_health() {
    let name = "a_wrong_key_opens_nothing_but_health";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--api-key", "right"]);
    server.post(CHAT, &short()).json();
    let wrong = |request: &str| server.send(&request.replace("Bearer right", "Bearer wrong"));
    let body = short().to_string();
    for request in [
        server.request("POST", CHAT, Some(&body)),
        server.request("GET", "/v1/models", None),
        server.request("GET", "/metrics", None),
        server.request("GET", "/api/state", None),
        server.request("POST", "/api/control/pause", None),
    ] {
        wrong(&request).refused(401, &["invalid_api_key"]);
    }
    assert_eq!(wrong(&server.request("GET", "/health", None)).status, 200);
    assert!(!server.stderr().contains("right"), "the key is in no log");
}

#[test]
fn only_this_machine_is_served_without_a_key() {
    let name = "only_this_machine_is_served_without_a_key";
    let Some(model) = support::moe(name) else {
        return;
    };
    let path = model.to_str().expect("UTF-8 path");
    run(["serve", path, "--host", "0.0.0.0", "--port", "0"]).failure(2, &["0.0.0.0", "--api-key"]);
    run(["serve", path, "--port", "0", "--api-key", ""]).failure(2, &["empty"]);
    run(["serve", path, "--port", "0", "--parallel", "0"]).failure(2, &["parallel"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = taken.local_addr().expect("address").port().to_string();
    run(["serve", path, "--port", &port]).failure(1, &["listening on", &port]);
}

#[test]
fn slow_clients_are_shown_the_door_and_others_served_meanwhile() {
    let name = "slow_clients_are_shown_the_door_and_others_served_meanwhile";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--receive-time", "2"]);
    let head = server.request("POST", CHAT, Some(&short().to_string()));
    let mut slow: Vec<_> = (0..50)
        .map(|i| {
            let mut connection = server.connect();
            // Half of them stop in the head, half in the body.
            let part = if i % 2 == 0 {
                &head[..30]
            } else {
                &head[..head.len() - 5]
            };
            connection.write_all(part.as_bytes()).expect("write");
            connection
        })
        .collect();
    let began = Instant::now();
    server.post(CHAT, &short()).json();
    for (i, connection) in slow.drain(..).enumerate() {
        let answer = Answer::read(connection);
        assert!(matches!(answer.status, 0 | 408), "{i}: {answer:?}");
    }
    assert!(
        began.elapsed() >= Duration::from_secs(2),
        "they had their time"
    );
    assert_eq!(server.state("/now/requests/cancelled"), 0);
}

#[test]
fn endless_heads_and_headers_are_cut_off() {
    let name = "endless_heads_and_headers_are_cut_off";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &[]);
    let many: String = (0..200).map(|i| format!("x-{i}: y\r\n")).collect();
    for head in [
        format!("GET /health HTTP/1.1\r\nhost: localhost\r\n{many}\r\n"),
        format!(
            "GET /health HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n",
            "y".repeat(300_000)
        ),
        format!(
            "GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n",
            "y".repeat(300_000)
        ),
        "garbage\r\n\r\n".to_owned(),
    ] {
        let mut connection = server.connect();
        // The server may close before all is written.
        let _ = connection.write_all(head.as_bytes());
        let answer = Answer::read(connection);
        assert!(matches!(answer.status, 0 | 400 | 414 | 431), "{answer:?}");
    }
    let mut idle = server.connect();
    idle.write_all(server.request("GET", "/health", None).as_bytes())
        .expect("write");
    let mut all = String::new();
    idle.read_to_string(&mut all).expect("read");
    assert!(all.starts_with("HTTP/1.1 200"), "{all}");
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        prop_oneof![
            Just("user"),
            Just("required"),
            Just("function"),
            Just("json_schema"),
            Just("text")
        ]
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let key = prop_oneof![
            Just("role"),
            Just("content"),
            Just("type"),
            Just("function"),
            Just("name"),
            Just("schema"),
            Just("json_schema"),
            Just("parameters"),
            Just("tool_calls"),
            Just("text"),
        ];
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map(key.prop_map(str::to_owned), inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn request() -> impl Strategy<Value = Vec<u8>> {
    let field = prop_oneof![
        Just("messages"),
        Just("prompt"),
        Just("tools"),
        Just("tool_choice"),
        Just("stop"),
        Just("response_format"),
        Just("stream"),
        Just("stream_options"),
        Just("logprobs"),
        Just("top_logprobs"),
        Just("max_tokens"),
        Just("temperature"),
        Just("top_p"),
        Just("seed"),
        Just("n"),
        Just("logit_bias"),
        Just("chat_template_kwargs"),
        Just("model"),
    ];
    let object = proptest::collection::btree_map(field.prop_map(str::to_owned), json_value(), 0..6)
        .prop_map(|map| {
            Value::Object(map.into_iter().collect())
                .to_string()
                .into_bytes()
        })
        .boxed();
    prop_oneof![
        4 => object.clone(),
        1 => proptest::collection::vec(any::<u8>(), 0..200),
        1 => (object, any::<prop::sample::Index>(), any::<u8>()).prop_map(|(mut bytes, at, byte)| {
            let at = at.index(bytes.len());
            bytes[at] = byte;
            bytes
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever comes in, the answer is a request or an error that names something, never a panic.
    #[test]
    fn parsing_never_panics_and_what_it_takes_is_in_bounds(body in request()) {
        use hotpin::server::openai::{ChatCall, CompletionCall};
        for error in [
            ChatCall::parse(&body).map(|call| {
                assert!(call.chat.messages.as_array().is_some_and(|m| !m.is_empty()));
                call.common
            }),
            CompletionCall::parse(&body).map(|call| call.common),
        ] {
            match error {
                Ok(common) => {
                    assert!((0.0..=2.0).contains(&common.sampling.temperature));
                    assert!(common.sampling.top_p > 0.0 && common.sampling.top_p <= 1.0);
                    assert!(common.stops.iter().all(|stop| !stop.is_empty()));
                    assert!(common.most != Some(0));
                }
                Err(error) => {
                    assert!(!error.message.is_empty());
                    assert!(error.status.is_client_error(), "{error:?}");
                }
            }
        }
    }
}

#[test]
fn a_generation_beyond_its_time_ends_with_an_error() {
    let name = "a_generation_beyond_its_time_ends_with_an_error";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--max-time", "1"]);
    let mut long = json!({"messages": [{"role": "user", "content": "Tell me about the sea."}],
        "temperature": 0, "max_tokens": 400});
    server.post(CHAT, &long).refused(504, &["timeout"]);
    long["stream"] = json!(true);
    let chunks = server.post(CHAT, &long).chunks();
    let last = chunks.last().expect("chunks");
    assert_eq!(last["error"]["code"], "timeout", "{last}");
    assert!(chunks.len() > 2, "what was said until then was sent");
    assert_eq!(server.state("/now/requests/failed"), 2);
}

#[test]
fn other_origins_are_let_in_by_name_only() {
    let name = "other_origins_are_let_in_by_name_only";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(
        &model,
        &["--cors", "http://friend.example", "--api-key", "k"],
    );
    let ask = |origin: &str| {
        let head = format!(
            "OPTIONS {CHAT} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\norigin: {origin}\r\naccess-control-request-method: POST\r\naccess-control-request-headers: authorization, content-type\r\n\r\n",
            server.address
        );
        server.send(&head).head.to_ascii_lowercase()
    };
    let friend = ask("http://friend.example");
    assert!(
        friend.contains("access-control-allow-origin: http://friend.example"),
        "{friend}"
    );
    assert!(friend.contains("authorization"), "{friend}");
    let stranger = ask("http://stranger.example");
    assert!(
        !stranger.contains("access-control-allow-origin"),
        "{stranger}"
    );
}
