//! Memory of store `direct`, without an engine.

use super::support;
use crate::gguf_writer::{F16, Gguf, Q8_0};
use crate::warmed::learned;
use hotpin::model::ModelMap;
use hotpin::store::{DirectOptions, DirectStore, ExpertStore, Layout};
use hotpin_controllers::ExpertId;
use std::path::Path;

pub const EXPERTS: u32 = 24;

/// Reads run when they are waited for.
pub const BLOCKING: DirectOptions = DirectOptions {
    direct: false,
    uring: false,
    verify: false,
    lock_dense: false,
    fault: None,
};

/// One layer of experts that are larger than a huge page and no multiple of one.
pub fn one_layer(name: &str) -> Gguf {
    let mut file = Gguf::model("testmoe", name, 1)
        .u32("testmoe.expert_count", EXPERTS)
        .u32("testmoe.expert_used_count", 2)
        .hole("token_embd.weight", &[64, 10], F16);
    for part in ["gate", "up", "down"] {
        let name = format!("blk.0.ffn_{part}_exps.weight");
        file = file.hole(&name, &[1024, 900, EXPERTS.into()], Q8_0);
    }
    file
}

/// A store over such a layer.
pub fn store(folder: &Path, options: DirectOptions) -> (DirectStore, u64, memmap2::Mmap) {
    let path = one_layer("arena").write(folder, "model.gguf");
    let map = ModelMap::open(&path).expect("map");
    let file = std::fs::File::open(&path).expect("open");
    // SAFETY: nobody changes the file, and the mapping is given to whoever has the store.
    let mapping = unsafe { memmap2::Mmap::map(&file) }.expect("map");
    let learned = learned(&map, mapping.as_ptr() as usize);
    let layout = Layout::new(&map, &learned).expect("layout");
    // SAFETY: as above.
    let made = unsafe { DirectStore::new(&map, &learned, layout, options, 128 << 10) };
    (
        made.expect("store").0,
        map.shape().bytes(ExpertId(0)),
        mapping,
    )
}

/// Bytes of memory that the arena has.
fn memory_bytes(store: &DirectStore) -> u64 {
    store.private_transit_bytes() + store.held().pinned_bytes
}

/// Others need memory while a layer is computed whose experts lie at the end of the arena: all the rest is
/// given back at once.
#[test]
fn experts_in_use_at_the_end_do_not_keep_the_memory_of_the_others() {
    let _alone = support::alone();
    let folder = tempfile::tempdir().expect("folder");
    let (store, expert_bytes, _mapping) = store(folder.path(), BLOCKING);
    store.set_capacity(u64::from(EXPERTS) * (expert_bytes + 8192));
    for expert in 0..EXPERTS {
        assert!(store.warm(ExpertId(expert)), "there is room");
    }
    let before = memory_bytes(&store);
    assert!(before >= u64::from(EXPERTS) * expert_bytes, "{before}");
    let used = [ExpertId(EXPERTS - 1), ExpertId(EXPERTS - 2)];
    assert_eq!(store.fetch(&used).expect("fetch").hits, 2);
    store.set_capacity(8 * expert_bytes);
    let after = memory_bytes(&store);
    // The two keep one slot's memory beside them free for the next experts.
    let most = 9 * expert_bytes;
    assert!(
        after <= most,
        "{before} before, {after} after, {most} at most"
    );
    // They are where they were, and give way when others are used.
    assert_eq!(store.fetch(&used).expect("fetch").hits, 2);
    store.fetch(&[]).expect("nothing");
    store.set_capacity(4 * expert_bytes);
    assert!(memory_bytes(&store) <= 4 * expert_bytes);
}

/// Between two looks at memory others may have taken what the budget was made from: what may not be taken fresh
/// comes from experts that go, for the engine and for the governor.
#[test]
fn memory_that_may_not_be_taken_fresh_comes_from_experts_that_go() {
    let _alone = support::alone();
    let folder = tempfile::tempdir().expect("folder");
    let (store, expert_bytes, _mapping) = store(folder.path(), BLOCKING);
    store.set_capacity(u64::from(EXPERTS) * (expert_bytes + 8192));
    for expert in 0..6 {
        assert!(store.warm(ExpertId(expert)), "there is room");
    }
    let before = memory_bytes(&store);
    store.allow_fresh(0);
    assert!(!store.prepare(), "nothing is made ready");
    assert!(!store.warm(ExpertId(6)), "no room in memory");
    let routed = [ExpertId(7), ExpertId(8)];
    assert_eq!(store.fetch(&routed).expect("fetch").misses, 2);
    assert_eq!(memory_bytes(&store), before);
    assert!(store.pin(ExpertId(9)).expect("pin"));
    assert_eq!(memory_bytes(&store), before);
    let four = 4 * (expert_bytes + 8192);
    store.allow_fresh(four);
    let more = (10..EXPERTS).filter(|&expert| store.warm(ExpertId(expert)));
    assert!((2..=4).contains(&more.count()));
    let grown = memory_bytes(&store) - before;
    // The last slot may end within a huge page.
    assert!(grown > 0 && grown <= four + (4 << 20), "{grown}");
    store.allow_fresh(u64::MAX);
    for expert in 10..EXPERTS {
        assert!(store.warm(ExpertId(expert)), "there is room again");
    }
}
