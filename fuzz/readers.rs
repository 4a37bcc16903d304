//! The readers of files, each over bytes that anybody may have made: an error or something sound, never a
//! panic. Fuzzed by `fuzz_targets`; `tests/it/fuzz.rs` replays what that found.

use clap::CommandFactory;
use hotpin::cli::Cli;
use hotpin::config::Config;
use hotpin::doctor::{Facts, Report, Subject};
use hotpin::governor::Entry;
use hotpin::model::{Demand, ModelMap};
use hotpin::outlook::Rates;
use hotpin::profile::Profile;
use hotpin::sensors::{Roots, Sensors};
use hotpin_controllers::trace::Trace;
use hotpin_controllers::{ExpertId, Moment};
use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};

/// Whether some bytes are sound.
pub type Reader = fn(&[u8]) -> bool;

/// Every reader by the name of its target.
#[allow(dead_code, reason = "a target needs only its own")]
pub const ALL: [(&str, Reader); 6] = [
    ("config", config),
    ("journal", journal),
    ("kernel", kernel),
    ("model_map", model_map),
    ("profile", profile),
    ("trace", trace),
];

/// A file of this thread that holds `bytes`, in memory where the machine has such a place.
fn with_file<T>(bytes: &[u8], read: impl FnOnce(&Path) -> T) -> T {
    thread_local! {
        static FOLDER: tempfile::TempDir = folder();
    }
    FOLDER.with(|folder| {
        let path = folder.path().join("input");
        fs::write(&path, bytes).expect("write");
        read(&path)
    })
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .expect("a folder")
}

/// A settings file: what it gives becomes the defaults of the command line, which may refuse them.
pub fn config(bytes: &[u8]) -> bool {
    thread_local! {
        static COMMAND: clap::Command = Cli::command();
    }
    COMMAND.with(|command| {
        let read = with_file(bytes, |path| Config::read(Some(path), command));
        let Ok(config) = read else { return false };
        let mut given = config.apply(command.clone());
        let _ = given.try_get_matches_from_mut(["hotpin", "config", "check"]);
        true
    })
}

/// A line of a journal, and a calibration.
pub fn journal(bytes: &[u8]) -> bool {
    let entry = serde_json::from_slice::<Entry>(bytes);
    if let Ok(entry) = &entry {
        let again = serde_json::to_vec(entry).expect("what was read can be written");
        serde_json::from_slice::<Entry>(&again).expect("what was written can be read");
    }
    let rates = with_file(bytes, Rates::load);
    entry.is_ok() || rates.is_ok()
}

/// A model file: every expert's bytes are inside it, and no two experts share any.
pub fn model_map(bytes: &[u8]) -> bool {
    let Ok(map) = with_file(bytes, ModelMap::open) else {
        return false;
    };
    let mut ranges: Vec<(u32, u64, u64)> = Vec::new();
    for expert in 0..map.shape().total_experts() {
        let id = ExpertId(u32::try_from(expert).expect("fewer than 2^32 experts"));
        let slices = map.expert_slices(id);
        let sum: u64 = slices.iter().map(|slice| slice.len).sum();
        assert_eq!(sum, map.shape().bytes(id), "expert {expert}");
        ranges.extend(slices.iter().map(|s| (s.shard, s.offset, s.offset + s.len)));
    }
    let dense = map.dense_ranges().iter().chain(map.idle_ranges());
    let dense = dense.map(|r| (r.shard, r.offset, r.offset + r.len));
    for (shard, _, end) in ranges.iter().copied().chain(dense) {
        assert!(end <= map.shards()[shard as usize].file_bytes);
    }
    ranges.retain(|(_, start, end)| start < end);
    ranges.sort_unstable();
    for two in ranges.windows(2) {
        let apart = two[0].0 != two[1].0 || two[0].2 <= two[1].1;
        assert!(apart, "two experts share bytes: {two:?}");
    }
    let demand = Demand::of(&map);
    assert!(demand.token_cycle_bytes <= demand.expert_bytes);
    true
}

/// A profile of a small model: as many counts as it has experts.
pub fn profile(bytes: &[u8]) -> bool {
    thread_local! {
        static MAP: ModelMap = small_model();
    }
    MAP.with(|map| {
        let Ok(profile) = with_file(bytes, |path| Profile::load(path, map)) else {
            return false;
        };
        assert_eq!(profile.counts().len(), map.shape().total_experts());
        assert!(profile.counts().iter().all(|count| count.is_finite()));
        true
    })
}

/// The model whose profiles are in the corpus.
fn small_model() -> ModelMap {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = path
        .ancestors()
        .map(|folder| folder.join("fuzz/corpus/model_map/small"));
    let path = path
        .into_iter()
        .find(|path| path.exists())
        .expect("the corpus");
    ModelMap::open(&path).expect("a model")
}

/// A recording: what was recovered names no expert beyond the model's.
pub fn trace(bytes: &[u8]) -> bool {
    let Ok((trace, cut)) = Trace::recover(bytes) else {
        return false;
    };
    let experts = trace.header.shape.total_experts();
    assert!(trace.routed().iter().all(|&id| (id as usize) < experts));
    cut.is_none()
}

/// Recorded machines, and their files in order of names.
struct Machines {
    roots: tempfile::TempDir,
    files: Vec<Vec<PathBuf>>,
}

const MACHINES: [&str; 3] = ["v2-user-slice", "v1-docker", "hybrid"];

impl Machines {
    fn new() -> Self {
        let roots = folder();
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let here = here
            .ancestors()
            .map(|folder| folder.join("tests/data/sensors"));
        let here = here.into_iter().find(|path| path.exists()).expect("trees");
        let files = MACHINES.map(|machine| {
            let (from, to) = (here.join(machine), roots.path().join(machine));
            let mut files = Vec::new();
            copy(&from, &to, &mut files);
            files.sort();
            files
        });
        Self {
            files: files.into(),
            roots,
        }
    }

    fn file(&self, machine: u8, file: u8) -> (&'static str, &Path) {
        let machine = usize::from(machine) % MACHINES.len();
        let files = &self.files[machine];
        (MACHINES[machine], &files[usize::from(file) % files.len()])
    }
}

fn copy(from: &Path, to: &Path, files: &mut Vec<PathBuf>) {
    fs::create_dir_all(to).expect("folder");
    for entry in fs::read_dir(from).expect("folder") {
        let entry = entry.expect("entry");
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() {
            copy(&from, &to, files);
        } else {
            fs::copy(from, &to).expect("copy");
            files.push(to);
        }
    }
}

thread_local! {
    static MACHINES_HERE: RefCell<Machines> = RefCell::new(Machines::new());
}

/// What the file that two bytes choose says on the recorded machine.
#[allow(dead_code, reason = "targets are given it by the corpus")]
pub fn kernel_file(machine: u8, file: u8) -> Vec<u8> {
    MACHINES_HERE.with_borrow(|machines| fs::read(machines.file(machine, file).1).expect("read"))
}

/// A file of the kernel, in the place of one of a recorded machine, which the first two bytes choose:
/// sensors and doctor give an answer, and no memory is made of nothing.
pub fn kernel(bytes: &[u8]) -> bool {
    let &[machine, file, ref text @ ..] = bytes else {
        return false;
    };
    MACHINES_HERE.with_borrow(|machines| {
        let (machine, path) = machines.file(machine, file);
        let good = fs::read(path).expect("read");
        fs::write(path, text).expect("write");
        let sound = look(&machines.roots.path().join(machine));
        fs::write(path, good).expect("write");
        sound
    })
}

fn look(machine: &Path) -> bool {
    let roots = Roots::under(machine);
    let now = Moment::default();
    let sample = Sensors::open(&roots, now).sample(now);
    if let Some(cgroup) = &sample.cgroup {
        assert!(cgroup.available_bytes <= cgroup.limit_bytes, "{cgroup:?}");
    }
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
    let facts = Facts::read(&roots, &subject, Err("not tried".into()), Vec::new());
    let report = Report::new(&subject, &facts);
    assert!(report.checks.len() >= 10, "{report}");
    sample.cgroup.is_some()
}
