//! Many clients at once, and clients that take nothing: memory stays bounded and the others are served.

use super::client::{Answer, PATIENCE, Server};
use super::support::{self, kb_line};
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

const CHAT: &str = "/v1/chat/completions";
const MIB: u64 = 1 << 20;

fn chat(most: u32) -> Value {
    json!({"messages": [{"role": "user", "content": "Tell me about the sea."}],
        "temperature": 0, "max_tokens": most})
}

/// Memory once what is made ready beside the start is there.
fn settled_bytes(server: &Server) -> u64 {
    let began = Instant::now();
    let mut before = memory_bytes(server);
    loop {
        std::thread::sleep(std::time::Duration::from_millis(500));
        let now = memory_bytes(server);
        if now.abs_diff(before) < MIB {
            return now;
        }
        assert!(began.elapsed() < PATIENCE, "memory grows on");
        before = now;
    }
}

/// Memory that is the server's own: its share of the model's file is not in it.
fn memory_bytes(server: &Server) -> u64 {
    kb_line(format!("/proc/{}/status", server.pid()), "RssAnon").expect("RssAnon")
}

/// Sockets that the server has open.
fn sockets(server: &Server) -> usize {
    let files = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("fd");
    files
        .filter_map(|file| std::fs::read_link(file.ok()?.path()).ok())
        .filter(|target| target.to_string_lossy().starts_with("socket:"))
        .count()
}

#[test]
fn a_crowd_is_served_or_told_to_come_back() {
    let name = "a_crowd_is_served_or_told_to_come_back";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--parallel", "2", "--queue", "6"]);
    server.post(CHAT, &chat(3)).json();
    let before = settled_bytes(&server);
    let request = server.request("POST", CHAT, Some(&chat(3).to_string()));
    let mut connections: Vec<_> = (0..200).map(|_| server.connect()).collect();
    for connection in &mut connections {
        connection.write_all(request.as_bytes()).expect("write");
    }
    let during = memory_bytes(&server);
    let answers: Vec<Answer> = connections.into_iter().map(Answer::read).collect();
    let served = answers.iter().filter(|a| a.status == 200).count();
    let refused: Vec<_> = answers.iter().filter(|a| a.status == 429).collect();
    assert_eq!(served + refused.len(), 200, "nothing else happens");
    // As many as may wait; the two that run may have been taken from those.
    assert!(served >= 6, "{served} were served");
    for answer in &refused {
        answer.refused(429, &["queue_full", "rate_limit_error"]);
        let head = answer.head.to_ascii_lowercase();
        let after = head.split("retry-after: ").nth(1).expect("Retry-After");
        let seconds: u64 = after
            .lines()
            .next()
            .expect("value")
            .parse()
            .expect("seconds");
        assert!((1..=600).contains(&seconds), "{answer:?}");
    }
    for answer in answers.iter().filter(|a| a.status == 200) {
        assert_eq!(answer.json()["usage"]["completion_tokens"], 3);
    }
    assert_eq!(server.state("/now/requests/finished"), served + 1);
    assert_eq!(server.state("/now/requests/refused"), refused.len());
    let after = memory_bytes(&server);
    eprintln!("memory of 200 connections: {before} bytes before, {during} during, {after} after");
    // A connection takes no more than its buffers; what is refused is not kept.
    assert!(during < before + 32 * MIB, "{before} {during}");
    assert!(after < before + 16 * MIB, "{before} {after}");
}

#[test]
fn bodies_together_have_a_bound() {
    let name = "bodies_together_have_a_bound";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--max-body", "1MiB", "--receive-time", "60"]);
    server.post(CHAT, &chat(3)).json();
    let before = settled_bytes(&server);
    // Each sends all but the end of a body of 1 MiB, in turns, and stays.
    let body = chat(3).to_string();
    let body = format!("{}{body}", " ".repeat((1 << 20) - body.len()));
    let request = server.request("POST", CHAT, Some(&body));
    let (head, part) = request.split_once("\r\n\r\n").expect("head");
    let mut connections: Vec<TcpStream> = (0..200).map(|_| server.connect()).collect();
    for connection in &mut connections {
        connection.set_nonblocking(true).expect("nonblocking");
        let _ = connection.write(format!("{head}\r\n\r\n").as_bytes());
    }
    let mut at = vec![0; connections.len()];
    let began = Instant::now();
    // What the server does not read stays with the client, so nothing more can be written in the end.
    let mut quiet = 0;
    while quiet < 20 && began.elapsed() < PATIENCE {
        let mut moved = false;
        for (connection, at) in connections.iter_mut().zip(&mut at) {
            let rest = &part.as_bytes()[*at..part.len() - 1];
            if let Ok(written @ 1..) = connection.write(rest) {
                *at += written;
                moved = true;
            }
        }
        quiet = if moved { 0 } else { quiet + 1 };
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let during = memory_bytes(&server);
    eprintln!("memory of 200 bodies of 1 MiB: {before} bytes before, {during} during");
    // 16 bodies of the greatest length, and what growing buffers leave.
    assert!(during < before + 64 * MIB, "{before} {during}");
    server.get("/health").json();
    drop(connections);
    server.post(CHAT, &chat(3)).json();
}

#[test]
fn who_reads_nothing_holds_up_nobody() {
    let name = "who_reads_nothing_holds_up_nobody";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--parallel", "2"]);
    server.post(CHAT, &chat(3)).json();
    let before = settled_bytes(&server);
    let mut long = chat(440);
    long["stream"] = json!(true);
    long["logprobs"] = json!(true);
    long["top_logprobs"] = json!(20);
    let request = server.request("POST", CHAT, Some(&long.to_string()));
    let deaf: Vec<TcpStream> = (0..4)
        .map(|_| {
            let mut connection = server.connect();
            setsockopt(&connection, sockopt::RcvBuf, &4096).expect("buffer");
            connection.write_all(request.as_bytes()).expect("write");
            connection
        })
        .collect();
    server.wait_until("/now/requests/running", |running| running == 2);
    let answer = server.post(CHAT, &chat(3)).json();
    assert_eq!(answer["usage"]["completion_tokens"], 3, "others are served");
    server.wait_until("/now/requests/running", |running| running == 0);
    assert_eq!(
        server.state("/now/requests/finished"),
        6,
        "places are freed"
    );
    let during = memory_bytes(&server);
    drop(deaf);
    let after = memory_bytes(&server);
    eprintln!("memory with deaf clients: {before} bytes before, {during} during, {after} after");
    assert!(during < before + 32 * MIB, "{before} {during}");
}

#[test]
fn who_takes_nothing_of_an_answer_is_cut_off() {
    let name = "who_takes_nothing_of_an_answer_is_cut_off";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--send-time", "1"]);
    let open = sockets(&server);
    let before = settled_bytes(&server);
    let page = server.get("/").body.len();
    // More pages than the kernel's buffers hold, asked for at once and not read.
    let asked = (32 << 20) / page;
    let one = format!("GET / HTTP/1.1\r\nhost: {}\r\n\r\n", server.address);
    let mut deaf = server.connect();
    setsockopt(&deaf, sockopt::RcvBuf, &4096).expect("buffer");
    let mut writer = deaf.try_clone().expect("clone");
    // The server stops reading when it cannot answer, and closes then.
    let asking = std::thread::spawn(move || {
        let _ = writer.write_all(one.repeat(asked).as_bytes());
    });
    let began = Instant::now();
    while sockets(&server) == open {
        assert!(began.elapsed() < PATIENCE, "it never came in");
    }
    let mut most = 0;
    while sockets(&server) > open {
        most = most.max(memory_bytes(&server));
        assert!(began.elapsed() < PATIENCE, "it is still there");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    asking.join().expect("thread");
    let mut rest = Vec::new();
    let _ = deaf.read_to_end(&mut rest);
    assert!(rest.len() < asked * page, "it was cut off in the middle");
    assert!(most < before + 8 * MIB, "{before} {most}");
    server.get("/health").json();
}

/// Files that the server has open.
fn files(server: &Server) -> usize {
    let files = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("fd");
    files.count()
}

/// Soft and hard limit of open files.
fn file_limits(server: &Server) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{}/limits", server.pid())).expect("limits");
    let line = text.lines().find(|line| line.starts_with("Max open files"));
    let words = line.expect("Max open files").split_whitespace();
    words.skip(3).take(2).map(str::to_owned).collect()
}

#[test]
fn connections_leave_files_for_sensors() {
    let name = "connections_leave_files_for_sensors";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start_limited(&model, &[], "-Sn 160");
    let [soft, hard] = &file_limits(&server)[..] else {
        panic!("two limits");
    };
    assert_eq!(soft, hard, "raised as far as it may be");
    drop(server);

    let server = Server::start_limited(&model, &[], "-n 160");
    assert!(
        server
            .stderr()
            .contains("32 connections at once instead of 1024"),
        "{}",
        server.stderr()
    );
    server.post(CHAT, &chat(3)).json();
    let before = files(&server);
    // More than there are files for; others than the first wait until those go.
    let held: Vec<TcpStream> = (0..150).map(|_| server.connect()).collect();
    let began = Instant::now();
    let mut most = 0;
    // Sensors are opened anew each second.
    while began.elapsed().as_secs_f64() < 2.5 {
        most = most.max(files(&server));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    eprintln!("files of 150 connections: {before} before, {most} at most");
    assert!(most >= 32 + before - 8, "{before} {most}: they came in");
    assert!(most <= 32 + before + 8, "{before} {most}");
    drop(held);
    server.post(CHAT, &chat(3)).json();
    let said = server.stderr();
    assert!(!said.contains("could not be taken"), "{said}");
    let degraded = server.get("/api/state").json()["now"]["degraded"].to_string();
    assert!(!degraded.contains("no_meminfo"), "{degraded}");
}
