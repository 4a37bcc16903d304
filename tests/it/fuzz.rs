//! Damaged text and bytes into every reader of files: an error or a value, never a panic. Deterministic;
//! `HOTPIN_TEST_FUZZ` asks for more rounds. What `make fuzz` found is replayed.

use super::support::{Draw, from_environment};
use std::path::{Path, PathBuf};

#[path = "../../fuzz/readers.rs"]
mod readers;

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
    let settings = "model = \"m.gguf\"\n[server]\nport = 9090\n[control]\ncapacity = \"8GiB\"\n\
        reserve = \"1GiB\"\ntick_ms = 50\n[laws.pins]\ngate_tokens = 16.0\n[generation]\ntemp = 0.5\n";
    check(settings.as_bytes(), 1, rounds(1), readers::config);
    let calibration = "engine_bytes = 108373248\ncompute_quiet_s = 0.0183\nroomy_bytes_per_s = 1.1e9\n\
        direct_compute_s = 0.017\ndirect_bytes_per_s = 2.1e9\n";
    check(calibration.as_bytes(), 2, rounds(1), readers::journal);
    let entry = include_bytes!("../data/journal-entry.json");
    check(entry, 3, rounds(1), readers::journal);
}

#[test]
fn traces_are_read_as_far_as_they_are_whole() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("sim/traces/demo-64x4.trace");
    let good = std::fs::read(path).expect("trace");
    check(&good, 4, rounds(8), readers::trace);
}

/// One file of a recorded machine is damaged at a time. Whatever it says, sensors and doctor give an
/// answer, and no memory is made of nothing.
#[test]
fn damaged_files_of_the_kernel_give_an_answer() {
    let mut draw = Draw(5);
    let mut counted = 0;
    for _ in 0..rounds(1) {
        let (machine, file) = (draw.below(256), draw.below(256));
        let (machine, file) = (machine.to_le_bytes()[0], file.to_le_bytes()[0]);
        let mut bytes = readers::kernel_file(machine, file);
        damage(&mut bytes, &mut draw);
        let input = [&[machine, file], &bytes[..]].concat();
        counted += u64::from(readers::kernel(&input));
    }
    assert!(
        counted > rounds(2),
        "{counted} of {} had a cgroup",
        rounds(1)
    );
}

fn corpus(target: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target);
    let files = std::fs::read_dir(folder).expect("corpus");
    files.map(|entry| entry.expect("entry").path()).collect()
}

#[test]
fn what_fuzzing_found_is_read_or_refused() {
    for (target, read) in readers::ALL {
        let files = corpus(target);
        let good = files
            .iter()
            .filter(|path| read(&std::fs::read(path).expect("read")));
        let good = good.count();
        eprintln!("{target}: {good} of {} inputs are sound", files.len());
        assert!(good > 0 && good < files.len(), "{target} has only one kind");
    }
}
