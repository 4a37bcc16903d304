//! `hotpin top` in a terminal, and `hotpin explain`, against a real server.

use super::client::{PATIENCE, Server};
use super::support::{self, program, run};
use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// `hotpin top` in a terminal of its own.
struct Top {
    child: Child,
    terminal: File,
    shown: Arc<Mutex<String>>,
}

fn size(columns: u16, rows: u16) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

impl Top {
    fn start(args: &[&str]) -> Self {
        let pty = openpty(&size(100, 30), None).expect("terminal");
        let slave = || File::from(pty.slave.try_clone().expect("terminal"));
        let child = program(["top"].iter().chain(args))
            .env("TERM", "xterm-256color")
            .stdin(slave())
            .stdout(slave())
            .stderr(slave())
            .spawn()
            .expect("start");
        let terminal = File::from(pty.master);
        let shown = Arc::new(Mutex::new(String::new()));
        let (mut reader, copy) = (terminal.try_clone().expect("terminal"), Arc::clone(&shown));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = reader.read(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..length]);
                copy.lock().expect("text").push_str(&text);
            }
        });
        Self {
            child,
            terminal,
            shown,
        }
    }

    /// Waits until this was written since the last call.
    fn shows(&self, word: &str) {
        let began = Instant::now();
        loop {
            let mut shown = self.shown.lock().expect("text");
            if shown.contains(word) {
                shown.clear();
                return;
            }
            assert!(began.elapsed() < PATIENCE, "no {word:?} in {shown:?}");
            drop(shown);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    fn press(&mut self, keys: &str) {
        self.terminal.write_all(keys.as_bytes()).expect("write");
    }

    fn resize(&self, columns: u16, rows: u16) {
        let size = size(columns, rows);
        // SAFETY: the descriptor is open, and `size` is what this request reads.
        let done = unsafe { libc::ioctl(self.terminal.as_raw_fd(), libc::TIOCSWINSZ, &size) };
        assert_eq!(done, 0);
        let pid = i32::try_from(self.child.id()).expect("pid");
        kill(nix::unistd::Pid::from_raw(pid), Signal::SIGWINCH).expect("signal");
    }

    fn end(mut self) {
        self.press("q");
        let began = Instant::now();
        while self.child.try_wait().expect("wait").is_none() {
            assert!(began.elapsed() < PATIENCE, "it does not end");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(self.child.wait().expect("wait").code(), Some(0));
        self.shows("\u{1b}[?1049l");
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn top_shows_a_server_steers_it_and_outlives_it() {
    let name = "top_shows_a_server_steers_it_and_outlives_it";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--capacity", "120MB", "--api-key", "k"]);
    let url = format!("http://{}", server.address);
    let mut top = Top::start(&["--server", &url, "--api-key", "k"]);
    top.shows("test-8x2-q4_0");
    top.press("\u{1b}[B\r");
    top.shows("scores");
    top.press("x");
    top.press("p");
    top.shows("Paused");
    assert_eq!(server.state("/now/paused"), true);
    top.press("p");
    let began = Instant::now();
    while server.state("/now/paused") == true {
        assert!(began.elapsed() < PATIENCE);
    }
    top.resize(50, 12);
    top.shows("explains");
    top.resize(25, 3);
    top.shows("tok/s");
    top.resize(110, 40);
    top.shows("Journal");
    drop(server);
    top.shows("Trying");
    top.end();
}

#[test]
fn top_and_explain_say_what_keeps_them_from_working() {
    run(["top"]).failure(2, &["terminal"]);
    run(["explain", "0", "0", "--server", "localhost:1"]).failure(2, &["http://127.0.0.1:8080"]);
    // Nobody listens on a port that was just closed.
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = free.local_addr().expect("address");
    drop(free);
    let url = format!("http://{address}");
    run(["explain", "0", "0", "--server", &url]).failure(1, &["no server answers at", &url]);
    let name = "top_and_explain_say_what_keeps_them_from_working";
    let Some(model) = support::moe(name) else {
        return;
    };
    let server = Server::start(&model, &["--capacity", "120MB", "--api-key", "k"]);
    let url = format!("http://{}", server.address);
    let folder = tempfile::tempdir().expect("folder");
    let key = folder.path().join("key");
    std::fs::write(&key, "k\n").expect("write");
    let key = key.to_str().expect("UTF-8");
    let explain = |place: [&str; 2], more: &[&str]| {
        let fixed = ["explain", place[0], place[1], "--server", &url];
        run(fixed.iter().chain(more))
    };
    explain(["0", "0"], &[]).failure(1, &["API key"]);
    explain(["0", "0"], &["--api-key", "wrong"]).failure(1, &["API key"]);
    explain(["99", "0"], &["--api-key", "k"]).failure(1, &["no expert 0 in MoE layer 99"]);
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4});
    server.post("/v1/chat/completions", &body).json();
    let text = explain(["1", "2"], &["--api-key-file", key]).success();
    assert!(text.starts_with("Expert 2 of MoE layer 1 scores"), "{text}");
    let json = explain(["1", "2"], &["--api-key", "k", "--json"]).success();
    let answer: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(
        (&answer["layer"], &answer["expert"]),
        (&json!(1), &json!(2))
    );
}
