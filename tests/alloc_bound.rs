//! Opening a model never allocates more than its file's size plus a constant, whatever its header
//! claims. A binary of its own, since it replaces the allocator to count.

#[path = "it/gguf_writer.rs"]
#[allow(
    dead_code,
    reason = "shared with the other test binary, which uses all of it"
)]
mod gguf_writer;

use gguf_writer::{ARRAY, Gguf, TEXT, U8, moe, text};
use hotpin::model::ModelMap;
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

thread_local! {
    /// Bytes held by this thread, and the most it held; counted per thread, since the test harness
    /// and other tests allocate meanwhile.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn count(bytes: isize) {
    // A thread that is ending has no counter left, and needs none.
    let _ = HELD.try_with(|held| {
        let (now, peak) = held.get();
        held.set((now + bytes, peak.max(now + bytes)));
    });
}

struct Counting;

// SAFETY: every call is passed on to `System` unchanged, and `count` neither allocates (its cell is
// const-initialised and has no destructor) nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller keeps `alloc`'s contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: `at` came from `System` by `alloc` above, with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Room beyond the file's size for files whose tables are not extreme.
const SLACK_BYTES: u64 = 1 << 20;
/// Room for the largest accepted table of tensors: MAX_TENSORS entries in every index kept of them.
const TABLE_BYTES: u64 = 16 << 20;

/// Opens `path`, whatever comes of it; the most bytes held meanwhile.
fn peak_of_opening(path: &Path) -> u64 {
    let (before, _) = HELD.get();
    HELD.set((before, before));
    let opened = ModelMap::open(path);
    let (_, peak) = HELD.get();
    drop(opened);
    (peak - before).cast_unsigned() as u64
}

fn check(path: &Path, limit_bytes: u64) -> u64 {
    let peak = peak_of_opening(path);
    assert!(
        peak <= limit_bytes,
        "held {peak} bytes, limit {limit_bytes}"
    );
    peak
}

fn header(tensors: u64, keys: u64) -> Vec<u8> {
    [
        &b"GGUF\x03\0\0\0"[..],
        &tensors.to_le_bytes(),
        &keys.to_le_bytes(),
    ]
    .concat()
}

/// A sparse file of `len` bytes that starts with `bytes`: its size is no bound, so limits must be.
fn sparse(dir: &Path, bytes: &[u8], len: u64) -> std::path::PathBuf {
    let path = dir.join("sparse.gguf");
    std::fs::write(&path, bytes).unwrap();
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(len)
        .unwrap();
    path
}

#[test]
fn the_counter_counts() {
    let (before, _) = HELD.get();
    let block = std::hint::black_box(vec![1u8; 12_345]);
    assert_eq!(HELD.get().0 - before, 12_345);
    drop(block);
    assert_eq!(HELD.get().0, before);
}

#[test]
fn a_sound_model_stays_within_its_size() {
    let dir = tempfile::tempdir().unwrap();
    let path = moe(48, 1, 128, 8).write(dir.path(), "m.gguf");
    let size = std::fs::metadata(&path).unwrap().len();
    assert!(check(&path, size) > 0);
}

#[test]
fn claims_that_a_sparse_file_has_room_for() {
    const FILE_BYTES: u64 = 1 << 40;
    let dir = tempfile::tempdir().unwrap();
    let claim = |element: u32| {
        let raw = [&element.to_le_bytes()[..], &(1u64 << 38).to_le_bytes()].concat();
        Gguf::new().raw("general.name", ARRAY, &raw).build()
    };
    let long_text = Gguf::new()
        .raw("general.name", TEXT, &(1u64 << 39).to_le_bytes())
        .build();
    let long_key = [header(0, 1), (1u64 << 39).to_le_bytes().to_vec()].concat();
    let cases = [
        header(1 << 30, 0),
        header(0, 1 << 30),
        claim(U8),
        claim(TEXT),
        long_text,
        long_key,
    ];
    for bytes in cases {
        check(&sparse(dir.path(), &bytes, FILE_BYTES), SLACK_BYTES);
    }
}

#[test]
fn many_experts_of_nearly_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let experts = 1 << 16;
    let path = Gguf::model("a", "a", 1)
        .u32("a.expert_count", experts)
        .u32("a.expert_used_count", 1)
        .experts(
            "blk.0.ffn_up_exps.weight",
            &[1, 1, experts.into()],
            gguf_writer::F16,
            0,
        )
        .experts(
            "blk.0.ffn_down_exps.weight",
            &[1, 1, experts.into()],
            gguf_writer::F16,
            0,
        )
        .write(dir.path(), "m.gguf");
    let size = std::fs::metadata(&path).unwrap().len();
    check(&path, size + SLACK_BYTES);
    assert!(
        ModelMap::open(&path)
            .unwrap_err()
            .to_string()
            .contains("too small")
    );
}

#[test]
fn the_largest_table_of_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let count = 1u64 << 15;
    let mut bytes = Gguf::model("a", "a", 1).build();
    bytes[8..16].copy_from_slice(&count.to_le_bytes());
    for index in 0..count {
        text(&mut bytes, &format!("t{index}"));
        bytes.extend(1u32.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
    }
    bytes.resize(bytes.len() + 64, 0);
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(ModelMap::open(&path).unwrap().tensors().len(), 1 << 15);
    check(&path, bytes.len() as u64 + TABLE_BYTES);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_stay_within_their_size(
        hits in prop::collection::vec((0usize..3000, prop_oneof![any::<u64>(), Just(u64::MAX), 0u64..1 << 20]), 1..5),
        keep in 0usize..40_000,
    ) {
        let mut bytes = moe(2, 1, 4, 2).build();
        for (at, number) in hits {
            bytes.iter_mut().skip(at).zip(number.to_le_bytes()).for_each(|(b, new)| *b = new);
        }
        bytes.truncate(keep.max(24));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, &bytes).unwrap();
        let peak = peak_of_opening(&path);
        prop_assert!(peak <= bytes.len() as u64 + SLACK_BYTES);
    }
}
