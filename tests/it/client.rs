//! A server of the real program, and a client that can also misbehave.

use super::program::{THREADS, clean, program};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest that anything here waits; only a hang takes that long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A running server. Dropping it kills it.
pub struct Server {
    child: Child,
    pub address: String,
    key: Option<String>,
    stderr: Arc<Mutex<String>>,
}

impl Server {
    /// Starts a server on a free port and waits until it is ready.
    pub fn start(model: &Path, more: &[&str]) -> Self {
        Self::start_with(model, more, &[])
    }

    /// The same, with variables of the environment.
    pub fn start_with(model: &Path, more: &[&str], env: &[(&str, &str)]) -> Self {
        let server = Self::spawn(model, more, env);
        server.wait_for("ready;");
        server
    }

    /// The same, as soon as it answers.
    pub fn start_unready(model: &Path, more: &[&str]) -> Self {
        Self::spawn(model, more, &[])
    }

    /// The same, ready, where a shell has set this limit of open files (`-n 160`, `-Sn 160`).
    pub fn start_limited(model: &Path, more: &[&str], limit: &str) -> Self {
        let wrapped = |program: Command| {
            let mut shell = Command::new("/bin/sh");
            let script = format!("ulimit {limit} && exec \"$0\" \"$@\"");
            shell.arg("-c").arg(script).arg(program.get_program());
            shell.args(program.get_args()).stdin(Stdio::null());
            clean(&mut shell);
            shell
        };
        let server = Self::spawn_as(model, more, &[], wrapped);
        server.wait_for("ready;");
        server
    }

    fn spawn(model: &Path, more: &[&str], env: &[(&str, &str)]) -> Self {
        Self::spawn_as(model, more, env, |program| program)
    }

    fn spawn_as(
        model: &Path,
        more: &[&str],
        env: &[(&str, &str)],
        wrapped: impl FnOnce(Command) -> Command,
    ) -> Self {
        let model = model.to_str().expect("UTF-8 path");
        let fixed = ["serve", model, "--port", "0", "-c", "512"];
        let threads: &[&str] = if more.contains(&"-t") {
            &[]
        } else {
            &["-t", THREADS]
        };
        let mut child = wrapped(program(fixed.iter().chain(threads).chain(more)))
            .envs(env.iter().copied())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start");
        let stderr = Arc::new(Mutex::new(String::new()));
        let (copy, pipe) = (Arc::clone(&stderr), child.stderr.take().expect("stderr"));
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                let mut text = copy.lock().expect("stderr");
                text.push_str(&line);
                text.push('\n');
            }
        });
        let key = more
            .iter()
            .position(|arg| *arg == "--api-key")
            .map(|at| more[at + 1].to_owned());
        let mut server = Self {
            child,
            address: String::new(),
            key,
            stderr,
        };
        server.wait_for("answers");
        let text = server.stderr();
        let after = text.split("http://").nth(1).expect("address");
        server.address = after.split(' ').next().expect("address").to_owned();
        server
    }

    pub fn stderr(&self) -> String {
        self.stderr.lock().expect("stderr").clone()
    }

    /// Waits until the log says this.
    pub fn wait_for(&self, word: &str) {
        let began = Instant::now();
        while !self.stderr().contains(word) {
            assert!(
                began.elapsed() < PATIENCE,
                "no {word:?} in {}",
                self.stderr()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.pid()).expect("pid"));
        nix::sys::signal::kill(pid, signal).expect("signal");
    }

    /// Waits for the end; returns the exit code.
    pub fn wait(self) -> Option<i32> {
        self.ended().0
    }

    /// Waits for the end; returns the exit code and what was said.
    pub fn ended(mut self) -> (Option<i32>, String) {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                let text = self.stderr();
                assert!(!text.contains("panicked"), "{text}");
                return (status.code(), text);
            }
            assert!(
                began.elapsed() < PATIENCE,
                "it does not end: {}",
                self.stderr()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("connect");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        stream
    }

    /// Head and body of a request as they go over the wire.
    pub fn request(&self, method: &str, path: &str, body: Option<&str>) -> String {
        let body = body.unwrap_or("");
        let key = self
            .key
            .as_ref()
            .map(|key| format!("authorization: Bearer {key}\r\n"))
            .unwrap_or_default();
        format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{key}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        )
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send(&self.request("GET", path, None))
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(&self.request("POST", path, Some(&body.to_string())))
    }

    /// Sends these bytes and reads until the connection ends.
    pub fn send(&self, request: &str) -> Answer {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).expect("write");
        Answer::read(stream)
    }

    /// A value of `/api/state`.
    pub fn state(&self, pointer: &str) -> Value {
        let state = self.get("/api/state").json();
        state
            .pointer(pointer)
            .unwrap_or_else(|| panic!("{pointer} in {state}"))
            .clone()
    }

    /// Waits until a number of `/api/state` has a value.
    pub fn wait_until(&self, pointer: &str, what: impl Fn(u64) -> bool) {
        let began = Instant::now();
        loop {
            let value = self.state(pointer);
            if what(value.as_u64().expect("number")) {
                return;
            }
            assert!(
                began.elapsed() < PATIENCE,
                "{pointer} is {value}: {}",
                self.stderr()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A response.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn read(mut stream: TcpStream) -> Self {
        let mut bytes = Vec::new();
        // A connection that was reset has nothing more to say.
        let _ = stream.read_to_end(&mut bytes);
        let text = String::from_utf8_lossy(&bytes);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|code| code.parse().ok())
            .unwrap_or(0);
        let chunked = head
            .to_ascii_lowercase()
            .contains("transfer-encoding: chunked");
        Self {
            status,
            head: head.to_owned(),
            body: if chunked {
                joined(body)
            } else {
                body.to_owned()
            },
        }
    }

    pub fn json(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// Checks that it is an error in OpenAI's shape that says all of these words.
    pub fn refused(&self, status: u16, words: &[&str]) {
        assert_eq!(self.status, status, "{self:?}");
        let error: Value = serde_json::from_str(&self.body).expect("JSON");
        assert!(error["error"]["message"].is_string(), "{error}");
        for word in words {
            assert!(self.body.contains(word), "no {word:?} in {}", self.body);
        }
    }

    /// The data of server-sent events.
    pub fn events(&self) -> Vec<String> {
        self.body
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .map(str::to_owned)
            .collect()
    }

    /// The chunks of a stream, which must have ended as it should.
    pub fn chunks(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{self:?}");
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{self:?}");
        events
            .iter()
            .map(|event| serde_json::from_str(event).expect("JSON"))
            .collect()
    }
}

/// The content of a chunked body; what is cut off is left out.
fn joined(body: &str) -> String {
    let mut bytes = body.as_bytes();
    let mut out = Vec::new();
    while let Some(end) = bytes.windows(2).position(|w| w == b"\r\n") {
        let size = std::str::from_utf8(&bytes[..end])
            .ok()
            .and_then(|size| usize::from_str_radix(size.trim(), 16).ok());
        let Some(size) = size.filter(|&size| size > 0 && end + 2 + size <= bytes.len()) else {
            break;
        };
        out.extend_from_slice(&bytes[end + 2..end + 2 + size]);
        bytes = bytes.get(end + 4 + size..).unwrap_or(&[]);
    }
    String::from_utf8_lossy(&out).into_owned()
}
