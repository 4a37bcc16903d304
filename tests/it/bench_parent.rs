//! `hotpin bench`'s parent against children written in sh.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Parser;
use hotpin::bench::{BenchArgs, BenchError, ChildCommand, Hooks, run_bench};
use serde_json::Value;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    bench: BenchArgs,
}

/// A model file, a workload of two domains and a child, all fake.
struct Bench {
    dir: tempfile::TempDir,
    system_root: PathBuf,
}

/// Finds its policy in the order; `answer POLICY TOK_S HASH` prints a result.
const PRELUDE: &str = r#"
order=$(cat)
policy=$(printf '%s' "$order" | sed 's/.*"policy":"\([a-z]*\)".*/\1/')
tokens=$(printf '%s' "$order" | sed 's/.*"tokens":\([0-9]*\).*/\1/')
echo "$policy" >> "$LOG"
segment() {
  printf '{"name":"%s","tokens":%s,"seconds":%s,"tok_s":%s,' "$1" "$tokens" "$2" "$3"
  printf '"hit_ratio":0.5,"pinned_hit_ratio":null,"read_bytes_per_token":1000,'
  printf '"stall_ms_per_token":null,"major_faults_per_token":1.5}'
}
answer() {
  printf '{"policy":"%s","store":"mapped","load_s":1,"ttft_ms":null,' "$1"
  printf '"peak_memory_bytes":null,"pinned_bytes":null,"resident_at_start_bytes":null,'
  printf '"segments":[%s,%s],' "$(segment prose $((150 / $2)) "$2")" \
    "$(segment zh $((300 / $2)) $(($2 / 2)))"
  printf '"logits_sha256":"%s","capacity_bytes":null,"notes":["%s"]}\n' "$3" "$4"
}
"#;

impl Bench {
    fn new(script: &str) -> Self {
        // Beside the build, on a disk: a tmpfs never lets pages go, so no run could start cold.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("temp dir");
        let at = |name: &str| dir.path().join(name);
        fs::write(at("m.gguf"), vec![1_u8; 1 << 20]).expect("model");
        fs::create_dir(at("texts")).expect("texts");
        fs::write(at("texts/prose.txt"), "It was.").expect("text");
        fs::write(at("texts/zh.txt"), "你好").expect("text");
        fs::write(at("p.toml"), "").expect("profile");
        fs::write(at("log"), "").expect("log");
        let log = format!(
            "LOG='{}'\nDIR='{}'\n",
            at("log").display(),
            dir.path().display()
        );
        fs::write(at("child.sh"), log + PRELUDE + script).expect("script");
        Self {
            dir,
            system_root: "/".into(),
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs the verb with JSON to a file; gives the exit code and the JSON.
    fn run(&self, args: &[&str]) -> Result<(u8, Value), BenchError> {
        let json = self.at("out.json");
        let hooks = Hooks {
            child: ChildCommand {
                program: "/bin/sh".into(),
                args: vec![self.at("child.sh").into()],
            },
            system_root: self.system_root.clone(),
            shards: &|model: &Path| Ok(vec![model.to_path_buf()]),
            demo_workload: &[],
            read_ahead_kb: &|_| Some(128),
            engine: serde_json::json!({"n_batch": 512}),
        };
        let mut line = vec!["bench".into(), self.at("m.gguf").display().to_string()];
        line.extend(["--workload".into(), self.at("texts").display().to_string()]);
        line.extend(["--json".into(), json.display().to_string()]);
        line.extend(args.iter().map(|arg| (*arg).to_owned()));
        let cli = Cli::try_parse_from(line).expect("arguments parse");
        let code = run_bench(&cli.bench, &hooks)?;
        let text = fs::read_to_string(&json).expect("report was written");
        Ok((code, serde_json::from_str(&text).expect("report is JSON")))
    }

    fn log(&self) -> Vec<String> {
        fs::read_to_string(self.at("log"))
            .expect("log")
            .lines()
            .map(str::to_owned)
            .collect()
    }
}

const FAIR: &str = r#"
case $policy in off) answer off 10 aa hello;; *) answer "$policy" 30 aa hello;; esac
"#;

#[test]
fn runs_are_interleaved_and_reported_as_agreed() {
    let bench = Bench::new(FAIR);
    let chart = bench.at("chart.svg").display().to_string();
    let args = [
        "--policies",
        "off,fetch,adaptive",
        "--repeats",
        "3",
        "--chart",
        &chart,
    ];
    let (code, json) = bench.run(&args).expect("report");
    assert_eq!(code, 0);
    let order = [
        "off", "fetch", "adaptive", "adaptive", "fetch", "off", "off", "fetch", "adaptive",
    ];
    assert_eq!(bench.log(), order);
    assert_eq!(json["runs"].as_array().map(Vec::len), Some(3));
    assert_eq!(json["runs"][0]["policy"], "off");
    assert_eq!(json["runs"][0]["segments"][1]["name"], "zh");
    assert_eq!(json["runs"][0]["logits_sha256"], "aa");
    assert_eq!(json["runs"][0]["resident_at_start_bytes"], 0);
    assert!(json["runs"][0]["pinned_bytes"].is_null() && json["memory_bytes"].is_null());
    assert_eq!(json["samples"].as_array().map(Vec::len), Some(9));
    assert_eq!(json["ratios"][1]["segments"][0]["of_medians"], 3.0);
    assert_eq!(json["read_ahead_kb"], 128);
    assert_eq!(
        json["notes"],
        serde_json::json!(["off: hello", "fetch: hello", "adaptive: hello"])
    );
    assert!(
        fs::read_to_string(&chart)
            .expect("chart")
            .starts_with("<svg")
    );
    let mode = fs::metadata(bench.at("out.json"))
        .expect("report")
        .permissions()
        .mode();
    assert_ne!(mode & 0o044, 0, "readable by others");
}

#[test]
fn the_child_gets_the_whole_order() {
    let bench = Bench::new(r#"printf '%s' "$order" > "$DIR/order"; answer "$policy" 10 aa x"#);
    let record = bench.at("traces").display().to_string();
    let profile = bench.at("p.toml").display().to_string();
    let args = [
        "--policies",
        "static",
        "--repeats",
        "1",
        "--tokens",
        "7",
        "--threads",
        "3",
    ];
    let more = [
        "--record",
        &record,
        "--profile",
        &profile,
        "--domains",
        "prose,zh",
    ];
    bench.run(&[&args[..], &more[..]].concat()).expect("report");
    let order = fs::read_to_string(bench.at("order")).expect("order");
    let order: Value = serde_json::from_str(&order).expect("order is JSON");
    assert_eq!(order["tokens"], 7);
    assert_eq!(order["threads"], 3);
    assert_eq!(order["task"], "forced");
    assert_eq!(order["engine"]["n_batch"], 512);
    assert_eq!(order["workload"][1]["name"], "zh");
    assert_eq!(order["profile"], profile);
    assert_eq!(order["record"], format!("{record}/001-static-1.trace"));
    assert!(order["cgroup"].is_null() && order["journal"].is_null());
}

#[test]
fn different_hashes_fail_loudly() {
    let bench = Bench::new(r#"answer "$policy" 10 "hash-of-$policy" x"#);
    let args = ["--policies", "off,fetch", "--repeats", "2"];
    let (code, json) = bench.run(&args).expect("report");
    assert_eq!(code, 1);
    assert_eq!(json["hashes_equal"], false);
    assert_eq!(
        json["hashes"]["hash-of-off"],
        serde_json::json!(["off #1", "off #2"])
    );
    assert!(
        json["verdict"]
            .as_str()
            .is_some_and(|text| text.contains("OUTPUTS DIFFER"))
    );
}

#[test]
fn a_policy_that_fails_is_left_out_and_the_others_go_on() {
    let script = r#"
    [ "$policy" = off ] || { echo '{"error":"the router is missing"}'; exit 1; }
    answer off 10 aa x"#;
    let bench = Bench::new(script);
    let (code, json) = bench
        .run(&["--policies", "off,fetch", "--repeats", "2"])
        .expect("report");
    assert_eq!(code, 1);
    assert_eq!(bench.log(), ["off", "fetch", "off"]);
    assert_eq!(json["failures"][0]["error"], "the router is missing");
    assert_eq!(json["runs"].as_array().map(Vec::len), Some(1));
}

#[test]
fn what_a_broken_child_did_is_said() {
    let check = |script: &str, args: &[&str], expect: &[&str]| {
        let bench = Bench::new(script);
        let args = [&["--policies", "off", "--repeats", "1"], args].concat();
        let error = bench.run(&args).expect_err("no figures").to_string();
        for part in expect {
            assert!(error.contains(part), "no `{part}` in: {error}");
        }
    };
    check(
        "echo oh >&2; echo no >&2; exit 3",
        &[],
        &["exit code 3", "oh\nno"],
    );
    check("kill -SEGV $$", &[], &["signal 11 SIGSEGV"]);
    check("kill -KILL $$", &[], &["signal 9", "out of memory"]);
    check("exit 0", &[], &["0 lines on stdout"]);
    check("echo '{}'; echo '{}'", &[], &["2 lines on stdout"]);
    check("echo nonsense", &[], &["not valid"]);
    check("answer lru 10 aa x", &[], &["`lru` where `off`"]);
    check("head -c 2000000 /dev/zero", &[], &["bytes on stdout"]);
    check(
        "echo stuck >&2; sleep 600",
        &["--run-timeout", "1"],
        &["within 1 s", "stuck"],
    );
}

#[test]
fn arguments_that_cannot_be_meant_exit_with_2() {
    let check = |args: &[&str], expect: &str| {
        let error = Bench::new(FAIR).run(args).expect_err("refused");
        assert!(error.to_string().contains(expect), "{error}");
        assert_eq!(error.exit_code(), 2, "{error}");
    };
    check(&["--policies", "static"], "--profile");
    check(&["--policies", "off,off"], "twice");
    check(
        &["--policies", "off", "--domains", "rust"],
        "there are: prose, zh",
    );
    check(&["--policies", "off", "--memory", "lots"], "--memory");
    check(&["--policies", "off", "--chart", "a.png"], "SVG");
    check(&["--target-tok-s", "0"], "above 0");
}

#[test]
fn without_a_cgroup_a_limit_is_refused_or_the_report_says_there_was_none() {
    let mut bench = Bench::new(FAIR);
    bench.system_root = bench.at("no-system");
    let args = ["--policies", "off", "--repeats", "1", "--memory", "500MB"];
    let error = bench.run(&args).expect_err("refused").to_string();
    assert!(error.contains("--no-cgroup"), "{error}");
    assert!(bench.log().is_empty());
    let (code, json) = bench
        .run(&[&args[..], &["--no-cgroup"]].concat())
        .expect("report");
    assert_eq!(code, 0);
    assert!(json["memory_bytes"].is_null());
    assert!(
        json["notes"][0]
            .as_str()
            .is_some_and(|note| note.contains("NO MEMORY LIMIT"))
    );
}

#[test]
fn a_target_is_bisected_and_its_bracket_told() {
    // A fake v2 tree stands in for the kernel's: nothing is limited, but the limits are written.
    let script = r#"
    memory=$(printf '%s' "$order" | sed 's/.*"memory_bytes":\([0-9]*\).*/\1/')
    echo "$memory" >> "$DIR/probes"
    if [ "$memory" -ge 400000000 ]; then answer adaptive 20 aa x; else answer adaptive 4 aa x; fi"#;
    let mut bench = Bench::new(script);
    bench.system_root = bench.at("system");
    let at = |name: &str| bench.at("system").join(name);
    fs::create_dir_all(at("proc/self")).expect("proc");
    fs::create_dir_all(at("sys/fs/cgroup")).expect("sys");
    fs::write(
        at("proc/self/mountinfo"),
        "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    )
    .expect("mountinfo");
    fs::write(at("proc/self/cgroup"), "0::/\n").expect("cgroup");
    fs::write(at("sys/fs/cgroup/cgroup.controllers"), "memory\n").expect("controllers");
    fs::write(at("sys/fs/cgroup/cgroup.subtree_control"), "memory\n").expect("control");
    let args = ["--target-tok-s", "10", "--memory", "1GB", "--repeats", "2"];
    let (code, json) = bench.run(&args).expect("report");
    assert_eq!(code, 0);
    let search = &json["searches"][0];
    let found = search["memory_bytes"].as_u64().expect("found");
    let fails = search["fails_at_bytes"].as_u64().expect("a bracket");
    assert!((400_000_000..420_000_000).contains(&found), "{found}");
    assert!((380_000_000..400_000_000).contains(&fails), "{fails}");
    assert!(
        json["verdict"]
            .as_str()
            .is_some_and(|text| text.contains("`adaptive` reaches 10"))
    );
}

/// Joins its cgroup as a real child does.
const JOIN: &str = r#"
procs=$(printf '%s' "$order" | sed 's/.*"procs":"\([^"]*\)".*/\1/')
echo $$ > "$procs"
dirname "$procs" >> "$DIR/groups"
"#;

/// True when this process can make memory cgroups here; says so when it cannot.
fn can_make_cgroups(test: &str) -> bool {
    match hotpin::bench::cgroup::CgroupParent::find(Path::new("/")) {
        Ok(_) => true,
        Err(error) => {
            eprintln!("SKIPPED {test}: {error}");
            false
        }
    }
}

#[test]
fn a_real_cgroup_limits_measures_and_goes_away() {
    if !can_make_cgroups("a_real_cgroup_limits_measures_and_goes_away") {
        return;
    }
    let script = format!(r#"{JOIN} cat "$DIR/m.gguf" > /dev/null; answer "$policy" 10 aa x"#);
    let bench = Bench::new(&script);
    let args = [
        "--policies",
        "off,fetch",
        "--repeats",
        "1",
        "--memory",
        "64MiB",
    ];
    let (code, json) = bench.run(&args).expect("report");
    assert_eq!(code, 0, "{json}");
    assert_eq!(json["memory_bytes"], 64 << 20);
    if let Some(peak) = json["runs"][0]["peak_memory_bytes"].as_u64() {
        assert!(
            (1 << 20..=64 << 20).contains(&peak),
            "the page cache counts: {peak}"
        );
    }
    let groups = fs::read_to_string(bench.at("groups")).expect("groups");
    assert_eq!(groups.lines().count(), 2);
    for group in groups.lines() {
        assert!(!Path::new(group).exists(), "{group} is left");
    }
}

#[test]
fn an_oom_kill_is_called_that() {
    if !can_make_cgroups("an_oom_kill_is_called_that") {
        return;
    }
    // tail keeps a line without end in memory.
    let bench = Bench::new(&format!("{JOIN} exec tail -n 1 /dev/zero"));
    let args = ["--policies", "off", "--repeats", "1", "--memory", "32MiB"];
    let error = bench.run(&args).expect_err("killed").to_string();
    assert!(
        error.contains("out of memory: the kernel killed it"),
        "{error}"
    );
    assert!(error.contains("33554432 bytes"), "{error}");
}

#[test]
fn a_child_that_does_not_join_is_found_out() {
    if !can_make_cgroups("a_child_that_does_not_join_is_found_out") {
        return;
    }
    let bench = Bench::new(r#"answer "$policy" 10 aa x"#);
    let args = ["--policies", "off", "--repeats", "1", "--memory", "64MiB"];
    let error = bench.run(&args).expect_err("not joined").to_string();
    assert!(error.contains("never joined its cgroup"), "{error}");
}

#[test]
fn a_child_killed_for_time_leaves_no_cgroup_and_no_process() {
    if !can_make_cgroups("a_child_killed_for_time_leaves_no_cgroup_and_no_process") {
        return;
    }
    let bench = Bench::new(&format!(r#"{JOIN} sleep 600 & echo $! > "$DIR/pid"; wait"#));
    let args = [
        "--policies",
        "off",
        "--repeats",
        "1",
        "--memory",
        "64MiB",
        "--run-timeout",
        "1",
    ];
    let error = bench.run(&args).expect_err("killed").to_string();
    assert!(error.contains("within 1 s"), "{error}");
    let group = fs::read_to_string(bench.at("groups")).expect("group");
    assert!(!Path::new(group.trim()).exists(), "{group} is left");
    let pid = fs::read_to_string(bench.at("pid")).expect("pid");
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    assert!(
        stat.is_empty() || stat.contains(") Z "),
        "still runs: {stat}"
    );
}

#[test]
fn a_model_held_in_memory_is_refused_and_its_holder_named() {
    let bench = Bench::new(FAIR);
    // A running program maps its own file, and the kernel does not drop pages that are mapped.
    fs::copy("/bin/sleep", bench.at("m.gguf")).expect("model");
    let mut holder = Command::new(bench.at("m.gguf"))
        .arg("600")
        .spawn()
        .expect("holder");
    let refused = bench.run(&["--policies", "off", "--repeats", "1"]);
    holder.kill().expect("killed");
    holder.wait().expect("reaped");
    let text = refused.expect_err("refused").to_string();
    assert!(text.contains("stay in the page cache"), "{text}");
    assert!(text.contains(&format!("(pid {})", holder.id())), "{text}");
    assert!(bench.log().is_empty());
    bench
        .run(&["--policies", "off", "--repeats", "1"])
        .expect("let go");
}

/// Not under the test harness's other threads: the signal goes to the whole process.
#[test]
#[ignore = "run as a process of its own by an_interrupt_cleans_up_and_keeps_what_was_measured"]
fn interrupted_in_its_second_run() {
    let Some(dir) = std::env::var_os("HOTPIN_TEST_DIR").map(PathBuf::from) else {
        return;
    };
    let script = format!(
        r#"{JOIN}
        [ "$policy" = off ] || {{ kill -INT "$PPID"; sleep 600; }}
        answer off 10 aa x"#
    );
    let bench = Bench::new(&script);
    let args = [
        "--policies",
        "off,fetch",
        "--repeats",
        "2",
        "--memory",
        "64MiB",
    ];
    let (code, json) = bench.run(&args).expect("a report of one run");
    assert_eq!(code, 1);
    assert_eq!(json["samples"].as_array().map(Vec::len), Some(1));
    assert!(
        json["failures"][0]["error"]
            .as_str()
            .is_some_and(|e| e.contains("SIGINT")),
        "{json}"
    );
    fs::copy(bench.at("groups"), dir.join("groups")).expect("groups");
}

#[test]
fn an_interrupt_cleans_up_and_keeps_what_was_measured() {
    if !can_make_cgroups("an_interrupt_cleans_up_and_keeps_what_was_measured") {
        return;
    }
    let dir = tempfile::tempdir().expect("temp dir");
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args([
            "--ignored",
            "--exact",
            "bench_parent::interrupted_in_its_second_run",
        ])
        .env("HOTPIN_TEST_DIR", dir.path())
        .output()
        .expect("ran");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    let groups = fs::read_to_string(dir.path().join("groups")).expect("groups");
    assert_eq!(groups.lines().count(), 2);
    for group in groups.lines() {
        assert!(!Path::new(group).exists(), "{group} is left");
    }
}
