//! The real server on a real model, through OpenAI's interface.

use super::client::{Answer, Server};
use super::support::{self, greedy, run};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::path::Path;

const PROMPT: &str = "Tell me about the sea.";
const CHAT: &str = "/v1/chat/completions";

fn chat(extra: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0, "max_tokens": 16});
    let map = body.as_object_mut().expect("object");
    for (name, value) in extra.as_object().expect("object") {
        map.insert(name.clone(), value.clone());
    }
    body
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"]
        .as_str()
        .expect("content")
}

fn streamed(chunks: &[Value]) -> String {
    chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect()
}

#[test]
fn a_chat_is_answered_as_by_the_command_line_whole_and_in_a_stream() {
    let name = "a_chat_is_answered_as_by_the_command_line_whole_and_in_a_stream";
    let Some(model) = support::moe(name) else {
        return;
    };
    let expected = run(greedy(&model, PROMPT, "16", &[])).success();
    let server = Server::start(&model, &["--capacity", "100MB"]);
    let whole = server.post(CHAT, &chat(&json!({}))).json();
    assert_eq!(format!("{}\n", content(&whole)), expected);
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 16);
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let prompt_tokens = whole["usage"]["prompt_tokens"].as_u64().expect("count");
    assert_eq!(whole["usage"]["total_tokens"], prompt_tokens + 16);
    let extra =
        json!({"stream": true, "stream_options": {"include_usage": true}, "cache_prompt": false});
    let chunks = server.post(CHAT, &chat(&extra)).chunks();
    assert_eq!(format!("{}\n", streamed(&chunks)), expected);
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let (usage, rest) = chunks.split_last().expect("chunks");
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 16);
    let last = &rest[rest.len() - 1]["choices"][0];
    assert_eq!(last["finish_reason"], "length");
    assert!(
        rest.iter()
            .all(|c| c["object"] == "chat.completion.chunk" && c["usage"].is_null())
    );
}

#[test]
fn the_next_turn_does_not_decode_the_history_again() {
    let name = "the_next_turn_does_not_decode_the_history_again";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &[]);
    let first = server.post(CHAT, &chat(&json!({}))).json();
    let used = first["usage"]["total_tokens"].as_u64().expect("count");
    let next = json!({"messages": [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": content(&first)},
        {"role": "user", "content": "Go on."}]});
    let warm = server.post(CHAT, &chat(&next)).json();
    let cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .expect("count");
    // All but the last token, which was chosen and not decoded.
    assert_eq!(cached, used - 1);
    let mut cold = next.clone();
    cold["cache_prompt"] = json!(false);
    let cold = server.post(CHAT, &chat(&cold)).json();
    assert_eq!(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(content(&warm), content(&cold));
}

#[test]
fn requests_that_run_together_are_answered_alike() {
    let name = "requests_that_run_together_are_answered_alike";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--parallel", "3"]);
    let ask = |i: usize| {
        let extra = json!({"max_tokens": 8 + 8 * i, "seed": i, "temperature": 0.7,
            "messages": [{"role": "user", "content": format!("Count to {i}.")}]});
        let answer = server.post(CHAT, &chat(&extra)).json();
        (
            content(&answer).to_owned(),
            answer["usage"]["completion_tokens"].clone(),
        )
    };
    let together: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..5).map(|i| scope.spawn(move || ask(i))).collect();
        threads
            .into_iter()
            .map(|t| t.join().expect("thread"))
            .collect()
    });
    for (i, (text, tokens)) in together.iter().enumerate() {
        assert!(!text.is_empty());
        let most = 8 + 8 * i as u64;
        assert!(
            tokens.as_u64().is_some_and(|n| (1..=most).contains(&n)),
            "{tokens} of {most}"
        );
    }
    assert_eq!(server.state("/now/requests/finished"), 5);
    assert_eq!(server.state("/now/requests/running"), 0);
    // What was decoded together with others is in the scores like anything else: once a token and layer.
    let decoded = server
        .state("/now/totals/decode_tokens")
        .as_u64()
        .expect("count");
    let told: u64 = together
        .iter()
        .map(|(_, n)| n.as_u64().expect("count"))
        .sum();
    assert!(
        decoded <= told && decoded + 5 >= told,
        "{decoded} of {told}"
    );
}

#[test]
fn completions_stop_report_likelihoods_and_take_tokens() {
    let name = "completions_stop_report_likelihoods_and_take_tokens";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &[]);
    let body = json!({"prompt": "The sea is", "temperature": 0, "max_tokens": 12, "logprobs": 3});
    let whole = server.post("/v1/completions", &body).json();
    let text = whole["choices"][0]["text"]
        .as_str()
        .expect("text")
        .to_owned();
    let logprobs = &whole["choices"][0]["logprobs"];
    let tokens: String = logprobs["tokens"]
        .as_array()
        .expect("tokens")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    assert_eq!(tokens, text);
    for (i, top) in logprobs["top_logprobs"]
        .as_array()
        .expect("top")
        .iter()
        .enumerate()
    {
        let top = top.as_object().expect("object");
        assert_eq!(top.len(), 3);
        let best = top
            .values()
            .filter_map(Value::as_f64)
            .fold(f64::MIN, f64::max);
        assert_eq!(
            logprobs["token_logprobs"][i].as_f64(),
            Some(best),
            "greedy takes the likeliest"
        );
    }
    let words: Vec<&str> = text.split_whitespace().collect();
    let stop = format!("{} {}", words[2], words[3]);
    let cut = json!({"prompt": "The sea is", "temperature": 0, "max_tokens": 12, "stop": stop});
    let cut = server.post("/v1/completions", &cut).json();
    let at = text.find(&stop).expect("the words are in it");
    assert_eq!(cut["choices"][0]["text"], text[..at]);
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
    let strange = server.post("/v1/completions", &json!({"prompt": [5, 99_999_999]}));
    strange.refused(400, &["no token 99999999"]);
    let seeded = json!({"prompt": [5, 6, 7], "seed": 11, "temperature": 1.0, "max_tokens": 8});
    let twice = [0, 1]
        .map(|_| server.post("/v1/completions", &seeded).json()["choices"][0]["text"].clone());
    assert_eq!(twice[0], twice[1], "equal seeds, equal texts");
}

#[test]
fn a_forced_tool_call_and_a_schema_are_kept() {
    let name = "a_forced_tool_call_and_a_schema_are_kept";
    let Some(model) = support::moe(name) else {
        return;
    };
    let template = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat/hermes.jinja");
    let template = template.to_str().expect("UTF-8 path");
    let server = Server::start(&model, &["--chat-template", template]);
    let tool = json!({"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"], "additionalProperties": false}}});
    let extra = json!({"tools": [tool], "tool_choice": "required", "max_tokens": 96,
        "cache_prompt": false});
    let whole = server.post(CHAT, &chat(&extra)).json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["function"]["name"], "get_weather");
    let arguments: Value =
        serde_json::from_str(call["function"]["arguments"].as_str().expect("text")).expect("JSON");
    assert!(arguments["city"].is_string(), "{arguments}");
    let mut stream = chat(&extra);
    stream["stream"] = json!(true);
    let chunks = server.post(CHAT, &stream).chunks();
    let said: String = chunks
        .iter()
        .filter_map(|c| c["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"].as_str())
        .collect();
    assert_eq!(said, call["function"]["arguments"].as_str().expect("text"));
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"], "additionalProperties": false});
    let extra = json!({"max_tokens": 96, "response_format": {"type": "json_schema",
        "json_schema": {"name": "x", "schema": schema}}});
    let whole = server.post(CHAT, &chat(&extra)).json();
    let answer: Value =
        serde_json::from_str(content(&whole)).unwrap_or_else(|e| panic!("{e}: {whole}"));
    assert!(
        answer["n"].is_i64() && answer["ok"].is_boolean(),
        "{answer}"
    );
    let bad = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x",
        "schema": {"type": "nonsense"}}}});
    server.post(CHAT, &chat(&bad)).refused(400, &["nonsense"]);
    // The model's own template knows no tools, and a call that nobody would see is not promised.
    let plain = Server::start(&model, &[]);
    plain
        .post(CHAT, &chat(&json!({"tools": [tool]})))
        .refused(400, &["tools", "--chat-template"]);
}

#[test]
fn a_context_that_does_not_hold_it_is_an_error() {
    let name = "a_context_that_does_not_hold_it_is_an_error";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--max-tokens", "400"]);
    let long = "sea ".repeat(600);
    let body = json!({"messages": [{"role": "user", "content": long}]});
    server
        .post(CHAT, &body)
        .refused(400, &["context_length_exceeded", "512"]);
    server
        .post(CHAT, &chat(&json!({"max_tokens": 401})))
        .refused(400, &["max_tokens", "400"]);
    let most = json!({"prompt": "sea ".repeat(200), "max_tokens": 400});
    server
        .post("/v1/completions", &most)
        .refused(400, &["context_length_exceeded"]);
    server
        .post(CHAT, &chat(&json!({"model": "other"})))
        .refused(404, &["model_not_found", "other"]);
}

#[test]
fn a_client_that_goes_away_frees_its_place() {
    let name = "a_client_that_goes_away_frees_its_place";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--parallel", "1"]);
    for stream in [true, false] {
        let body = chat(&json!({"stream": stream, "max_tokens": 440, "stop": ["no such text"]}));
        let mut connection = server.connect();
        let request = server.request("POST", CHAT, Some(&body.to_string()));
        connection.write_all(request.as_bytes()).expect("write");
        if stream {
            let mut some = [0; 64];
            let _ = connection.read(&mut some).expect("read");
        }
        server.wait_until("/now/requests/running", |running| running == 1);
        drop(connection);
        server.wait_until("/now/requests/running", |running| running == 0);
    }
    assert_eq!(server.state("/now/requests/cancelled"), 2);
    assert_eq!(server.state("/now/requests/finished"), 0);
    server.post(CHAT, &chat(&json!({"max_tokens": 2}))).json();
}

#[test]
fn a_server_that_is_told_to_stop_finishes_what_runs() {
    let name = "a_server_that_is_told_to_stop_finishes_what_runs";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--parallel", "1"]);
    let body = chat(&json!({"stream": true, "max_tokens": 32}));
    let mut running = server.connect();
    let request = server.request("POST", CHAT, Some(&body.to_string()));
    running.write_all(request.as_bytes()).expect("write");
    let mut begun = [0; 16];
    running.read_exact(&mut begun).expect("read");
    server.wait_until("/now/requests/running", |running| running == 1);
    let mut waiting = server.connect();
    waiting.write_all(request.as_bytes()).expect("write");
    server.wait_until("/now/requests/queued", |queued| queued == 1);
    server.signal(Signal::SIGTERM);
    let turned_away = Answer::read(waiting);
    assert!(
        turned_away.body.contains("shutting down"),
        "{turned_away:?}"
    );
    let mut rest = String::new();
    running.read_to_string(&mut rest).expect("read");
    assert!(rest.contains("\"finish_reason\":\"length\""), "{rest}");
    assert!(rest.contains("[DONE]"), "{rest}");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn a_second_signal_ends_streams_at_once_and_cleanly() {
    let name = "a_second_signal_ends_streams_at_once_and_cleanly";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &[]);
    let body = chat(&json!({"stream": true, "max_tokens": 440, "stop": ["no such text"]}));
    let mut running = server.connect();
    let request = server.request("POST", CHAT, Some(&body.to_string()));
    running.write_all(request.as_bytes()).expect("write");
    server.wait_until("/now/requests/running", |running| running == 1);
    server.signal(Signal::SIGINT);
    // Sent again until it is seen: two signals at once may be one.
    let pid = nix::unistd::Pid::from_raw(i32::try_from(server.pid()).expect("pid"));
    let again = std::thread::spawn(move || {
        while nix::sys::signal::kill(pid, Signal::SIGINT).is_ok() {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    });
    let answer = Answer::read(running);
    assert!(answer.body.contains("shutting down"), "{answer:?}");
    assert_eq!(answer.events().last().map(String::as_str), Some("[DONE]"));
    assert_eq!(server.wait(), Some(0));
    again.join().expect("thread");
}
