//! The settings file: what it may say, who wins, and what is said of mistakes.

use super::support::{Ran, program, run};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("folder"))
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
        std::fs::write(&path, text).expect("write");
        path
    }
}

fn with_file(path: &Path, args: &[&str]) -> Vec<String> {
    let path = path.to_str().expect("UTF-8");
    args[..1]
        .iter()
        .chain(&["--config", path])
        .chain(&args[1..])
        .map(|arg| (*arg).to_owned())
        .collect()
}

/// Values and origins in force for a verb with arguments.
fn shown(path: &Path, env: &[(&str, &str)], verb: &[&str]) -> BTreeMap<String, (Value, String)> {
    let mut args = vec!["config", "show", "--json", "--"];
    args.extend(verb);
    let output = program(&args)
        .env("HOTPIN_CONFIG", path)
        .envs(env.iter().copied())
        .output()
        .expect("start");
    let text = Ran::of(&output).success();
    let all: BTreeMap<String, Value> = serde_json::from_str(&text).expect("JSON");
    all.into_iter()
        .map(|(key, entry)| {
            let origin = entry["origin"].as_str().expect("origin").to_owned();
            (key, (entry["value"].clone(), origin))
        })
        .collect()
}

#[test]
fn flags_win_over_the_environment_over_drop_ins_over_the_file_over_defaults() {
    let folder = Folder::new();
    let file = folder.write("h.toml", "[server]\nqueue = 1\n");
    let queue = |env: &[(&str, &str)], verb: &[&str]| {
        let (value, origin) = shown(&file, env, verb)["server.queue"].clone();
        (value.as_str().expect("text").to_owned(), origin)
    };
    let env = [("HOTPIN_QUEUE", "4")];
    let says = |value: &str, origin: String| (value.to_owned(), origin);
    let at = |name: &str, line| format!("{}, line {line}", folder.0.path().join(name).display());
    assert_eq!(queue(&[], &["serve"]), says("1", at("h.toml", 2)));
    // By name: 20 is read after 10, whatever was written first.
    folder.write("h.toml.d/20-b.toml", "# own\n\n[server]\nqueue = 3\n");
    folder.write("h.toml.d/10-a.toml", "[server]\nqueue = 2\nport = 7\n");
    folder.write("h.toml.d/30-c.ignored", "[server]\nqueue = 9\n");
    assert_eq!(
        queue(&[], &["serve"]),
        says("3", at("h.toml.d/20-b.toml", 4))
    );
    let port = &shown(&file, &[], &["serve"])["server.port"];
    assert_eq!(port.0, "7", "keys of earlier drop-ins stay");
    assert_eq!(
        queue(&env, &["serve"]),
        says("4", "environment HOTPIN_QUEUE".into())
    );
    assert_eq!(
        queue(&env, &["serve", "--queue", "5"]),
        says("5", "--queue".into())
    );
    let defaults = shown(Path::new("/dev/null"), &[], &["serve"]);
    assert_eq!(defaults["server.queue"].0, "32");
    assert!(defaults.values().all(|(_, origin)| origin == "default"));
}

#[test]
fn every_default_is_in_the_file_that_init_writes() {
    let folder = Folder::new();
    let text = run(["config", "init", "-"]).success();
    let mut bare = String::new();
    let mut keys = Vec::new();
    let mut section = String::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[') {
            section = format!("{}.", name.trim_end_matches(']'));
            bare.push_str(line);
        } else if let Some((key, value)) = line
            .strip_prefix('#')
            .and_then(|rest| rest.split_once(" ="))
            .filter(|(key, _)| !key.starts_with(' '))
        {
            keys.push(format!("{section}{key}"));
            if !value.is_empty() {
                bare.push_str(&line[1..]);
            }
        }
        bare.push('\n');
    }
    // Each key has a line of comment above it.
    let lines: Vec<&str> = text.lines().collect();
    for pair in lines.windows(2) {
        let is_key = pair[1].starts_with('#') && !pair[1].starts_with("# ");
        assert!(
            !is_key || (pair[0].starts_with("# ") && pair[0].len() > 3) || pair[1] == "#",
            "{pair:?}"
        );
    }
    let untouched = shown(&folder.write("all.toml", &text), &[], &["serve"]);
    assert!(untouched.values().all(|(_, origin)| origin == "default"));
    let file = folder.write("bare.toml", &bare);
    for verb in ["serve", "run", "bench", "profile", "inspect"] {
        let usual = shown(Path::new("/dev/null"), &[], &[verb]);
        let given = shown(&file, &[], &[verb]);
        assert!(usual.contains_key("model"), "{verb}");
        for (key, (value, _)) in &usual {
            assert!(keys.contains(key), "{key} of {verb} is not in the file");
            assert_eq!(given[key].0, *value, "{key}");
            let said = value.is_null() || value.as_array().is_some_and(Vec::is_empty);
            assert_eq!(given[key].1 == "default", said, "{key}: {:?}", given[key]);
        }
    }
    run(with_file(&file, &["config", "check"])).success();
}

#[test]
fn mistakes_are_named_with_file_line_key_and_a_way_out() {
    let folder = Folder::new();
    let key = folder.write("key", "");
    let key_file = format!("[server]\napi_key_file = {:?}\n", key);
    let cases: &[(&str, &[&str])] = &[
        ("[server\n", &["line 1"]),
        (
            "\n[server]\nport = 80800\n",
            &["line 3", "server.port = 80800", "65535"],
        ),
        (
            "[server]\nprot = 1\n",
            &["line 2", "`server.prot`", "`server.port`"],
        ),
        ("[serve]\nport = 1\n", &["line 2", "`server.port`"]),
        ("port = 1\n", &["line 1", "`server.port`"]),
        ("[zzz]\nqqq = 1\n", &["line 2", "zzz.qqq", "config init -"]),
        (
            "[server]\nport = [1, 2]\n",
            &["line 2", "server.port", "one value"],
        ),
        (
            "[server]\nport = { a = 1 }\n",
            &["line 2", "server.port", "table"],
        ),
        ("[server]\napi_key = \"k\"\n", &["line 2", "api_key_file"]),
        (
            "[control]\npolicy = \"best\"\n",
            &["line 2", "control.policy", "adaptive"],
        ),
        (
            "[control]\nstore = \"x\"\n",
            &["line 2", "auto, mapped, direct"],
        ),
        (
            "[control]\ncapacity = \"8G\"\n",
            &["line 2", "capacity", "GiB"],
        ),
        ("[control]\ntick_ms = 1\n", &["line 2", "tick_ms", "10"]),
        (
            "[control]\nverify = \"maybe\"\n",
            &["line 2", "verify", "true"],
        ),
        ("[log]\nlevel = \"a=b=c\"\n", &["line 2", "log.level"]),
        (
            "[laws.pins]\nshare = 2\n",
            &["line 2", "laws.pins.share = 2", "1"],
        ),
        ("[laws.pins]\nshares = 2\n", &["line 2", "shares"]),
        ("[server]\nhost = \"0.0.0.0\"\n", &["0.0.0.0", "--api-key"]),
        (&key_file, &["API key", "empty"]),
    ];
    for (text, words) in cases {
        let file = folder.write("h.toml", text);
        let ran = run(with_file(&file, &["config", "check"]));
        assert!(
            !words[0].starts_with("line") || ran.stderr.contains("h.toml, line"),
            "{}",
            ran.stderr
        );
        ran.failure(2, words);
        // The verbs that use it say the same.
        let ran = run(with_file(&file, &["serve", "/no/model.gguf"]));
        ran.failure(2, words);
    }
    let missing = folder.0.path().join("none.toml");
    run(with_file(&missing, &["config", "check"])).failure(2, &["none.toml", "No such file"]);
    run(["serve", "--help"]).success();
}

#[test]
fn the_file_serves_run_and_bench_and_flags_can_undo_it() {
    let folder = Folder::new();
    let text = "model = \"/no/such.gguf\"\n[engine]\nthreads = 3\nctx_size = 777\n[control]\nstore = \"direct\"\nverify = true\nreserve = \"2GiB\"\n";
    let file = folder.write("h.toml", text);
    for verb in ["serve", "run", "bench"] {
        let all = shown(&file, &[], &[verb]);
        let is = |key: &str, value: &str| assert_eq!(all[key].0, value, "{verb} {key}");
        is("model", "/no/such.gguf");
        is("engine.threads", "3");
        is("engine.ctx_size", "777");
        is("control.store", "direct");
        is("control.verify", "true");
        is("control.reserve", "2GiB");
        let undone = shown(&file, &[], &[verb, "--verify=false", "--store", "mapped"]);
        assert_eq!(undone["control.verify"].0, "false");
        assert_eq!(undone["control.store"].0, "mapped");
    }
    let says = ["/no/such.gguf"];
    run(with_file(&file, &["run", "-p", "x"])).failure(1, &says);
    run(with_file(&file, &["serve"])).failure(1, &says);
    run(with_file(&file, &["inspect"])).failure(1, &says);
    run(["run", "-p", "x"]).failure(2, &["MODEL"]);
}

#[test]
fn the_usual_places_are_optional_and_init_replaces_nothing() {
    let folder = Folder::new();
    let in_home = |args: &[&str]| {
        let output = program(args)
            .env_remove("HOTPIN_CONFIG")
            .env("XDG_CONFIG_HOME", folder.0.path())
            .output();
        Ran::of(&output.expect("start"))
    };
    let text = in_home(&["config", "init"]).success();
    let path = folder.0.path().join("hotpin/hotpin.toml");
    assert_eq!(text.trim(), path.to_str().expect("UTF-8"));
    in_home(&["config", "init"]).failure(2, &["--force"]);
    std::fs::write(&path, "[server]\nport = 9\n").expect("write");
    let shown = in_home(&["config", "show", "--origin"]).success();
    let line = shown.lines().find(|l| l.starts_with("port")).expect("port");
    assert!(
        line.contains("= 9") && line.contains("hotpin.toml, line 2"),
        "{line}"
    );
    in_home(&["config", "init", "--force"]).success();
    in_home(&["config", "check"]).success();
}

#[test]
fn devices_are_refused_by_name_where_the_program_knows_none() {
    if hotpin::engine::gpu_backends().is_some() {
        // `tests/gpu` has what such a program does.
        return;
    }
    for (args, option) in [
        (&["--vram", "auto"][..], "--vram"),
        (&["--vram", "2GiB", "--gpu-layers", "all"], "--vram"),
        (&["--gpu-layers", "3"], "--gpu-layers"),
        (&["--gpu-experts", "all"], "--gpu-experts"),
    ] {
        let mut all = vec!["run", "/no/such/model.gguf", "-p", "x"];
        all.extend(args);
        let output = program(&all).output().expect("run");
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            said.contains(option) && said.contains("make gpu"),
            "{args:?}: {said}"
        );
    }
    // What asks for nothing is taken.
    for args in [&["--vram", "off"][..], &["--gpu-layers", "0"]] {
        let mut all = vec!["run", "/no/such/model.gguf", "-p", "x"];
        all.extend(args);
        let output = program(&all).output().expect("run");
        assert_eq!(output.status.code(), Some(1), "{args:?}");
    }
}
