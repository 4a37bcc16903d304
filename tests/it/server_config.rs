//! A server's settings file while it runs, and what it tells systemd.

use super::client::Server;
use super::support;
use nix::sys::signal::Signal;
use serde_json::json;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

const CHAT: &str = "/v1/chat/completions";

/// Writes the file, sends SIGHUP, and waits until the log says each of these.
fn reload(server: &Server, file: &Path, text: &str, says: &[&str]) {
    std::fs::write(file, text).expect("write");
    server.signal(Signal::SIGHUP);
    for words in says {
        server.wait_for(words);
    }
}

#[test]
fn a_reload_changes_what_can_change_and_names_the_rest() {
    let name = "a_reload_changes_what_can_change_and_names_the_rest";
    let Some(model) = support::moe(name) else {
        return;
    };
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("h.toml");
    let first = "[control]\ncapacity = \"120MB\"\n[server]\nqueue = 5\n";
    std::fs::write(&file, first).expect("write");
    let path = file.to_str().expect("UTF-8");
    let server = Server::start(&model, &["--config", path, "--tick-ms", "20"]);
    let capacity = || server.state("/now/tick/capacity_bytes").as_u64();
    assert_eq!(
        server.state("/now/tick/ceilings/configured"),
        120_000_000,
        "the file is in force from the start"
    );
    let second = "[control]\ncapacity = \"60MB\"\nreserve = \"1TiB\"\n[server]\nqueue = 6\n[log]\nlevel = \"info\"\n[laws.pressure]\nintegral_gain_per_s = 0.5\n[laws.scores]\nslow_weight = 0.25\n";
    let says = [
        "control.capacity = \"60MB\"",
        "line 2), was \"120MB\"",
        "control.reserve = \"1TiB\"",
        "log.level = \"info\"",
        "laws.pressure.integral_gain_per_s = 0.5",
        "server.queue = 6",
        "takes effect at the next start; 5 stays",
        "0.5 stays",
    ];
    reload(&server, &file, second, &says);
    // A reserve beyond the machine leaves nothing of the host's memory, so its ceiling is 0 or so.
    server.wait_until("/now/tick/capacity_bytes", |bytes| bytes < 60_000_000);
    assert_eq!(server.state("/now/tick/ceilings/configured"), 60_000_000);
    // A file with a mistake changes nothing.
    let bad = "[control]\ncapacity = \"lots\"\n[log]\nlevel = \"warn\"\n";
    let says = ["reload refused", "h.toml, line 2", "control.capacity"];
    reload(&server, &file, bad, &says);
    assert_eq!(server.state("/now/tick/ceilings/configured"), 60_000_000);
    let contradiction = "[laws.pressure]\ngrow_threshold = 0.9\n";
    reload(&server, &file, contradiction, &["never comes to rest"]);
    // What takes effect at the next start is named again, what is back is not.
    let last = "[server]\nqueue = 6\n";
    let says = [
        "control.capacity = (not set)",
        "control.reserve = (not set)",
    ];
    reload(&server, &file, last, &says);
    server.wait_until("/now/tick/capacity_bytes", |bytes| bytes > 60_000_000);
    assert!(capacity().is_some());
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3});
    server.post(CHAT, &body).json();
    let named = server.stderr().matches("server.queue = 6").count();
    assert_eq!(named, 2, "{}", server.stderr());
}

#[test]
fn systemd_is_told_when_the_server_is_ready_alive_and_stopping() {
    let name = "systemd_is_told_when_the_server_is_ready_alive_and_stopping";
    let Some(model) = support::moe(name) else {
        return;
    };
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("socket");
    let patience = Some(super::client::PATIENCE);
    socket.set_read_timeout(patience).expect("timeout");
    let env = [
        ("NOTIFY_SOCKET", path.to_str().expect("UTF-8")),
        ("WATCHDOG_USEC", "150000"),
    ];
    let server = Server::start_with(&model, &["--log-format", "json"], &env);
    let told = |word: &str| {
        let mut buffer = [0; 512];
        loop {
            let length = socket.recv(&mut buffer).expect("a message");
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            if text.contains(word) {
                return text;
            }
        }
    };
    let ready = told("READY=1");
    assert!(ready.contains("STATUS=serving"), "{ready}");
    for _ in 0..5 {
        told("WATCHDOG=1");
    }
    server.signal(Signal::SIGTERM);
    told("STOPPING=1");
    // The log is one JSON object a line, the words for the user included.
    let text = server.stderr();
    for line in text.lines() {
        let line: serde_json::Value = serde_json::from_str(line).expect(line);
        assert!(line["timestamp"].is_string() && line["level"].is_string());
    }
    assert!(text.contains("ready;"), "{text}");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn the_unit_file_is_one() {
    let unit = include_str!("../../service/hotpin.service");
    for line in [
        "Type=notify",
        "AmbientCapabilities=CAP_IPC_LOCK",
        "LimitMEMLOCK=infinity",
        "LimitNICE=-10",
        "ProcSubset=all",
    ] {
        assert!(unit.lines().any(|own| own == line), "{line}");
    }
    let program = env!("CARGO_BIN_EXE_hotpin");
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("hotpin.service");
    let here = unit.replace("/usr/local/bin/hotpin", program);
    assert!(here.contains(program));
    std::fs::write(&file, here).expect("write");
    let verify = std::process::Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .arg(&file)
        .output();
    let Ok(verify) = verify else {
        eprintln!("SKIPPED the_unit_file_is_one: no systemd-analyze here");
        return;
    };
    let said = String::from_utf8_lossy(&verify.stderr);
    assert!(verify.status.success() && said.trim().is_empty(), "{said}");
}
