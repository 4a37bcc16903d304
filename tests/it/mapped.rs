//! Pages of store `mapped`, without an engine.

use super::support;
use crate::arena::{EXPERTS, one_layer};
use crate::gguf_writer::F32;
use crate::warmed::learned;
use hotpin::model::ModelMap;
use hotpin::store::{DenseLock, ExpertStore, Layout, MappedStore, TransitKeeper};
use hotpin_controllers::{ExpertId, Residence};
use nix::sys::resource::{UsageWho, getrusage};
use nix::unistd::{Uid, setfsuid};
use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A model of one layer in a file that nobody has read yet.
struct Cold {
    store: MappedStore,
    map: ModelMap,
    path: PathBuf,
    _mapping: memmap2::Mmap,
    _folder: tempfile::TempDir,
}

impl Cold {
    fn new() -> Self {
        // On a disk, and open to everybody.
        let folder = tempfile::tempdir_in("/var/tmp").expect("folder");
        // Dense, and the last of the file.
        let file = one_layer("cold").hole("output.weight", &[64, 4000], F32);
        let path = file.write(folder.path(), "model.gguf");
        let map = ModelMap::open(&path).expect("map");
        let opened = File::open(&path).expect("open");
        // SAFETY: what is cut off the file is read by nobody.
        let mapping = unsafe { memmap2::Mmap::map(&opened) }.expect("map");
        let learned = learned(&map, mapping.as_ptr() as usize);
        let layout = Layout::new(&map, &learned).expect("layout");
        // SAFETY: the mapping is dropped after the store.
        let (store, _) =
            unsafe { MappedStore::new(layout, TransitKeeper::Store, false, 128 << 10) };
        store.set_capacity(map.shape().total_bytes());
        Self {
            store,
            map,
            path,
            _mapping: mapping,
            _folder: folder,
        }
    }

    fn residence(&self, id: ExpertId) -> Residence {
        let mut residence = vec![Residence::Absent; EXPERTS as usize];
        self.store.residence_into(&mut residence);
        residence[id.index()]
    }
}

/// Of a file that belongs to somebody else and may not be written, the kernel says that all of it is in memory.
/// Experts are read ahead all the same, and not page by page by the lock call.
#[test]
fn what_is_locked_of_a_file_of_somebody_else_is_read_ahead() {
    let _alone = support::alone();
    let name = "what_is_locked_of_a_file_of_somebody_else_is_read_ahead";
    if !support::root(name) {
        return;
    }
    let cold = Cold::new();
    let pages = cold.map.shape().bytes(ExpertId(0)) / 4096;
    // For this thread alone, and with the right to lock.
    let faults = std::thread::scope(|scope| {
        let nobody = scope.spawn(|| {
            setfsuid(Uid::from_raw(65_534));
            let faults = || {
                let usage = getrusage(UsageWho::RUSAGE_THREAD).expect("usage");
                usage.major_page_faults() + usage.minor_page_faults()
            };
            let before = faults();
            for expert in [2, 9, 17] {
                assert!(cold.store.pin(ExpertId(expert)).expect("pin"));
            }
            faults() - before
        });
        nobody.join().expect("pins")
    });
    // What is in the page cache is mapped 16 pages at a time, what is not is read one by one.
    let faults = u64::try_from(faults).expect("a count");
    eprintln!("{faults} faults for 3 experts of {pages} pages");
    assert!(
        faults < 3 * pages / 4,
        "{faults} faults for 3 experts of {pages} pages"
    );
}

/// An expert of which a part cannot be read, since the file was cut, and dense weights beyond its end: they are
/// waited for, and the others are pinned in the same ticks.
#[test]
fn pages_that_never_come_keep_no_other_expert_from_being_pinned() {
    let _alone = support::alone();
    let cold = Cold::new();
    let (store, shape) = (&cold.store, cold.map.shape());
    let (good, lacking) = (ExpertId(0), ExpertId(EXPERTS - 1));
    let slice = cold
        .map
        .expert_slices(lacking)
        .iter()
        .max_by_key(|s| s.offset);
    let file = File::options().write(true).open(&cold.path).expect("open");
    file.set_len(slice.expect("parts").offset).expect("cut");
    let tick = || {
        let began = Instant::now();
        let mut is_late = || began.elapsed() > Duration::from_millis(100);
        let _ = store.pin_unless(lacking, &mut is_late).expect("pin");
        !is_late() && store.pin_unless(good, &mut is_late).expect("pin")
    };
    std::thread::scope(|scope| {
        let warmed = scope.spawn(|| {
            let began = Instant::now();
            let mut is_late = || began.elapsed() > Duration::from_secs(20);
            let warmed = store.warm_dense(&mut is_late);
            (warmed, began.elapsed())
        });
        let began = Instant::now();
        while !tick() {
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "it is not pinned"
            );
        }
        let took = began.elapsed();
        assert!(
            took > Duration::from_secs(4),
            "a slow disk is waited for: {took:?}"
        );
        // From now on in every tick.
        for _ in 0..10 {
            assert!(store.unpin(good));
            assert!(tick(), "it was the other's turn again");
            assert_eq!(cold.residence(lacking), Residence::Absent);
        }
        let (warmed, took) = warmed.join().expect("dense weights");
        assert!(warmed, "after {took:?}");
        assert!(took > Duration::from_secs(4), "{took:?}");
    });
    assert_eq!(store.held().pinned_bytes, shape.bytes(good));
    assert_eq!(store.held().transit_bytes, 0);
    store.unlock_all();
    let locked = store.set_dense_locked(true);
    assert!(matches!(locked, DenseLock::Failed(_)), "{locked:?}");
}
