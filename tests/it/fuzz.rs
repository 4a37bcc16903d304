//! Damaged text and bytes into every reader of files: an error or a value, never a panic. Deterministic;
//! `HOTPIN_TEST_FUZZ` asks for more rounds.

use super::support::{Draw, copy_tree, from_environment, recorded_tree};
use clap::CommandFactory;
use hotpin::cli::Cli;
use hotpin::config::Config;
use hotpin::doctor::{Facts, Report, Space, Subject};
use hotpin::governor::Entry;
use hotpin::model::Demand;
use hotpin::outlook::Rates;
use hotpin::sensors::{Roots, Sensors};
use hotpin_controllers::Moment;
use hotpin_controllers::trace::Trace;
use std::path::{Path, PathBuf};

/// What replaces numbers: bounds, signs, and what is no number.
const ODD: [&str; 12] = [
    "0",
    "-1",
    "18446744073709551615",
    "18446744073709551616",
    "9223372036854771712",
    "1e309",
    "nan",
    "max",
    "",
    "0x10",
    "٣",
    "1 2",
];

/// Damages bytes in one of the ways in which files are damaged.
fn damage(bytes: &mut Vec<u8>, draw: &mut Draw) {
    if bytes.is_empty() {
        return;
    }
    let at = draw.below(bytes.len());
    match draw.below(7) {
        0 => bytes.truncate(at),
        1 => bytes[at] ^= 1 << draw.below(8),
        2 => {
            let end = (at + draw.below(64)).min(bytes.len());
            bytes.drain(at..end);
        }
        3 => {
            let end = (at + draw.below(64)).min(bytes.len());
            let piece = bytes[at..end].to_vec();
            let to = draw.below(bytes.len());
            bytes.splice(to..to, piece);
        }
        4 => bytes[at] = 0,
        5 => bytes[at..].iter_mut().take(8).for_each(|byte| *byte = 0xff),
        _ => replace_number(bytes, at, ODD[draw.below(ODD.len())]),
    }
}

/// Puts something odd in the place of the number at or after `at`.
fn replace_number(bytes: &mut Vec<u8>, at: usize, odd: &str) {
    let is_digit = |byte: &u8| byte.is_ascii_digit();
    let Some(start) = bytes[at..].iter().position(is_digit).map(|n| at + n) else {
        return;
    };
    let length = bytes[start..]
        .iter()
        .take_while(|byte| is_digit(byte))
        .count();
    bytes.splice(start..start + length, odd.bytes());
}

fn rounds(share: u64) -> u64 {
    from_environment("HOTPIN_TEST_FUZZ", 400) / share
}

/// Damages `good` in every round and hands it on; returns how often the reader refused it.
fn check(good: &[u8], seed: u64, rounds: u64, mut read: impl FnMut(&[u8]) -> bool) {
    assert!(read(good), "what is whole is read");
    let mut draw = Draw(seed);
    let mut refused = 0;
    for _ in 0..rounds {
        let mut bytes = good.to_vec();
        for _ in 0..=draw.below(3) {
            damage(&mut bytes, &mut draw);
        }
        refused += u64::from(!read(&bytes));
    }
    assert!(refused > 0, "nothing in {rounds} rounds was refused");
}

#[test]
fn settings_journals_and_calibrations_are_read_or_refused() {
    let folder = tempfile::tempdir().expect("temp dir");
    let file = folder.path().join("hotpin.toml");
    let settings = "model = \"m.gguf\"\n[server]\nport = 9090\n[control]\ncapacity = \"8GiB\"\n\
        reserve = \"1GiB\"\ntick_ms = 50\n[laws.pins]\ngate_tokens = 16.0\n[generation]\ntemp = 0.5\n";
    let command = Cli::command();
    check(settings.as_bytes(), 1, rounds(1), |bytes| {
        std::fs::write(&file, bytes).expect("write");
        Config::read(Some(&file), &command).is_ok()
    });
    let calibration = "engine_bytes = 108373248\ncompute_quiet_s = 0.0183\nroomy_bytes_per_s = 1.1e9\n\
        direct_compute_s = 0.017\ndirect_bytes_per_s = 2.1e9\n";
    check(calibration.as_bytes(), 2, rounds(1), |bytes| {
        std::fs::write(&file, bytes).expect("write");
        Rates::load(&file).is_ok()
    });
    let entry = include_bytes!("../data/journal-entry.json");
    check(entry, 3, rounds(1), |bytes| {
        serde_json::from_slice::<Entry>(bytes).is_ok()
    });
}

#[test]
fn traces_are_read_as_far_as_they_are_whole() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("sim/traces/demo-64x4.trace");
    let good = std::fs::read(path).expect("trace");
    check(&good, 4, rounds(8), |bytes| match Trace::recover(bytes) {
        Ok((trace, cut)) => {
            let shape = &trace.header.shape;
            let experts = u32::try_from(shape.total_experts()).expect("small");
            assert!(trace.routed().iter().all(|&id| id < experts));
            cut.is_none()
        }
        Err(_) => false,
    });
}

fn files_below(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("folder") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            files_below(&path, out);
        } else {
            out.push(path);
        }
    }
}

/// One file of a recorded machine is damaged at a time. Whatever it says, sensors and doctor give an
/// answer, and no memory is made of nothing.
#[test]
fn damaged_files_of_the_kernel_give_an_answer() {
    for (seed, case) in ["v2-user-slice", "v1-docker", "hybrid", "v2-hidden"]
        .iter()
        .enumerate()
    {
        let directory = tempfile::tempdir().expect("temp dir");
        copy_tree(&recorded_tree(case), directory.path());
        let roots = Roots::under(directory.path());
        let mut files = Vec::new();
        files_below(directory.path(), &mut files);
        files.sort();
        let mut draw = Draw(seed as u64);
        let now = Moment::default();
        let subject = Subject {
            model: "/m".into(),
            demand: Demand {
                dense_bytes: 1 << 30,
                expert_bytes: 1 << 34,
                token_cycle_bytes: 1 << 28,
            },
            slices: 1000,
            device: Some((8, 0)),
            program: "/hotpin".into(),
            root: false,
        };
        for _ in 0..rounds(4) {
            let file = &files[draw.below(files.len())];
            let good = std::fs::read(file).expect("read");
            let mut bytes = good.clone();
            damage(&mut bytes, &mut draw);
            std::fs::write(file, &bytes).expect("write");
            let sample = Sensors::open(&roots, now).sample(now);
            if let Some(cgroup) = sample.cgroup {
                assert!(
                    cgroup.available_bytes <= cgroup.limit_bytes,
                    "{case}: {cgroup:?}"
                );
            }
            let spaces: Vec<Space> = Vec::new();
            let facts = Facts::read(&roots, &subject, Err("not tried".into()), spaces);
            let report = Report::new(&subject, &facts);
            assert!(report.checks.len() >= 10, "{report}");
            std::fs::write(file, &good).expect("write");
        }
    }
}
