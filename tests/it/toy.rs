//! Toy models: made without a source, the same each time, and run.

use super::support::program;
use hotpin::model::ModelMap;

#[test]
fn toys_are_equal_by_seed_and_run() {
    let folder = tempfile::tempdir().expect("folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let make = |name: &str, more: &[&str]| {
        let output = path(name);
        let mut args = vec![
            "demo",
            "toy",
            "--layers",
            "2",
            "--experts",
            "4",
            "--width",
            "128",
        ];
        args.extend(["--expert-width", "64", "-o", &output]);
        args.extend(more);
        program(args).output().expect("toy")
    };
    for (name, seed) in [("a", "1"), ("b", "1"), ("c", "2")] {
        let made = make(name, &["--seed", seed]);
        assert!(
            made.status.success(),
            "{}",
            String::from_utf8_lossy(&made.stderr)
        );
    }
    let bytes = |name: &str| std::fs::read(path(name)).expect("a file");
    assert_eq!(bytes("a"), bytes("b"));
    assert_ne!(bytes("a"), bytes("c"));
    let map = ModelMap::open(path("a").as_ref()).expect("map");
    assert_eq!((map.layers().len(), map.shape().total_experts()), (2, 8));
    assert!(map.total_bytes() <= bytes("a").len() as u64);
    // What is there stays, unless it may be replaced.
    assert!(!make("a", &[]).status.success());
    assert!(make("a", &["--force"]).status.success());
    for wrong in [
        ["--width", "100"],
        ["--expert-width", "40"],
        ["--top-k", "5"],
    ] {
        let output = path("d");
        let mut args = vec!["demo", "toy", "--experts", "4", "-o", &output];
        args.extend(wrong);
        let refused = program(args).output().expect("toy");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            !refused.status.success() && said.contains("out of range"),
            "{said}"
        );
        assert!(said.contains(wrong[0]), "{said}");
    }
    let model = path("a");
    let args = [
        "run",
        model.as_str(),
        "--raw",
        "-p",
        "abc",
        "-n",
        "12",
        "--temp",
        "0",
        "-t",
        "1",
    ];
    let said = program(args).output().expect("run");
    assert!(
        said.status.success(),
        "{}",
        String::from_utf8_lossy(&said.stderr)
    );
    let told = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(told.contains("answer 12 tokens"), "{told}");
    let text = String::from_utf8(said.stdout).expect("it can be read");
    assert!(
        text.bytes().all(|byte| matches!(byte, b' '..=b'~' | b'\n')),
        "{text:?}"
    );
}
