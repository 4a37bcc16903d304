//! The state that engine and governor share, through the orders in which their threads may go on: every
//! order with so many preemptions, and every value that the memory model lets a load see. The stores, the
//! feeder and the counters are the real ones, over a small file. `make loom` runs it.

#[path = "../it/gguf_writer.rs"]
#[expect(dead_code, reason = "other tests write other files")]
mod gguf_writer;
#[path = "../it/warmed.rs"]
mod warmed;

mod direct;
mod flags;
mod mapped;

use gguf_writer::{F16, Gguf, Q8_0};
use hotpin::engine::Learned;
use hotpin::model::ModelMap;
use hotpin::store::{ExpertStore, Layout};
use hotpin_controllers::{ExpertId, Residence};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Experts of the only layer, and what each byte of them is: this, plus the expert's number.
const EXPERTS: u32 = 3;
const PARTS: [(&str, u8); 3] = [("gate", 0x10), ("up", 0x40), ("down", 0x80)];

/// A model of one layer in memory, each part of an expert little more than two pages long.
struct Small {
    map: ModelMap,
    learned: Learned,
    _mapping: memmap2::Mmap,
    _folder: tempfile::TempDir,
}

/// What was locked before the model that runs now.
static BEFORE: AtomicU64 = AtomicU64::new(0);

/// Alone: locked memory is counted for the whole process.
fn small() -> (&'static Small, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    static SMALL: OnceLock<Small> = OnceLock::new();
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let small = SMALL.get_or_init(|| {
        // In memory: what is resident there stays so, and every run of a model is like the others.
        let folder = tempfile::tempdir_in("/dev/shm").expect("folder");
        let mut file = Gguf::model("testmoe", "small", 1)
            .u32("testmoe.expert_count", EXPERTS)
            .u32("testmoe.expert_used_count", 2)
            .tensor("token_embd.weight", &[64, 10], F16);
        for (part, tag) in PARTS {
            let name = tensor(part);
            file = file.experts(&name, &[64, 124, EXPERTS.into()], Q8_0, tag);
        }
        let path = file.write(folder.path(), "model.gguf");
        let map = ModelMap::open(&path).expect("map");
        let file = std::fs::File::open(&path).expect("open");
        // SAFETY: nobody changes the file, and the mapping is never dropped.
        let mapping = unsafe { memmap2::Mmap::map(&file) }.expect("map");
        Small {
            learned: warmed::learned(&map, mapping.as_ptr() as usize),
            map,
            _mapping: mapping,
            _folder: folder,
        }
    });
    (small, alone)
}

impl Small {
    fn layout(&self) -> Layout {
        Layout::new(&self.map, &self.learned).expect("layout")
    }
}

fn tensor(part: &str) -> String {
    format!("blk.0.ffn_{part}_exps.weight")
}

/// Runs `body` in every order with at most so many preemptions.
fn explore(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.max_branches = 100_000;
    // A model that failed never dropped its store.
    BEFORE.store(kernel_locked_bytes(), Relaxed);
    let runs = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&runs);
    model.check(move || {
        counted.fetch_add(1, Relaxed);
        body();
    });
    let runs = runs.load(Relaxed);
    eprintln!("{runs} orders");
    assert!(runs > 1, "there was nothing to explore");
}

/// No total exceeds all that there is.
fn check_bounds(store: &dyn ExpertStore, map: &ModelMap) {
    let held = store.held();
    let all = map.shape().total_bytes();
    assert!(held.pinned_bytes <= all, "{held:?} of {all}");
    assert!(held.transit_bytes <= all, "{held:?} of {all}");
}

/// Totals are the sums over the experts, and the kernel has locked what the books say.
fn check_books(store: &dyn ExpertStore, map: &ModelMap) {
    let shape = map.shape();
    let mut residence = vec![Residence::Absent; shape.total_experts()];
    store.residence_into(&mut residence);
    let sum = |wanted| -> u64 {
        (0..EXPERTS)
            .map(ExpertId)
            .filter(|id| residence[id.index()] == wanted)
            .map(|id| shape.bytes(id))
            .sum()
    };
    let held = store.held();
    assert_eq!(held.pinned_bytes, sum(Residence::Pinned), "{residence:?}");
    assert_eq!(held.transit_bytes, sum(Residence::Transit), "{residence:?}");
    let locked = kernel_locked_bytes() - BEFORE.load(Relaxed);
    assert_eq!(locked, store.locked_bytes(), "{residence:?}");
}

fn kernel_locked_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|line| line.starts_with("VmLck:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse::<u64>().ok()).expect("VmLck") << 10
}
