//! Time to have a layer's routed experts in memory, by each way of reading them: all of them missing, and
//! all of them there. On a real model: `HOTPIN_BENCH_MODEL`, else the one that `make test` makes.
//!
//! What is missing is read from the disk, but for `direct/page_cache`, which finds it in the page cache
//! after the first round.

use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use hotpin::engine::{EngineOptions, ExpertArena, Learned, Model, Session};
use hotpin::model::ModelMap;
use hotpin::store::{DirectOptions, DirectStore, ExpertStore, Layout, MappedStore, TransitKeeper};
use hotpin_controllers::ExpertId;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Bytes of a readahead request, as of a disk with the kernel's default settings.
const PIECE_BYTES: usize = 128 << 10;
const PAGE_BYTES: usize = 4096;

fn model_path() -> Option<PathBuf> {
    let cache = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    let path = std::env::var_os("HOTPIN_BENCH_MODEL").map_or_else(
        || Some(cache()?.join("hotpin/models/test-8x2-q4_0.gguf")),
        |path| Some(PathBuf::from(path)),
    )?;
    path.is_file().then_some(path)
}

/// The experts of one token, layer by layer.
struct Routing(Vec<Vec<ExpertId>>);

impl Routing {
    fn of(map: &ModelMap, learned: &Learned) -> Self {
        let shape = map.shape();
        let ids = |layer| (0..learned.top_k).map(move |expert| (layer, expert));
        let layer = |layer| {
            let each = ids(layer)
                .filter_map(|(layer, expert)| Some(shape.id(layer, u32::try_from(expert).ok()?)));
            each.collect()
        };
        Self((0..shape.layers()).map(layer).collect())
    }

    /// Bytes of two layers' routed experts: what the stores may keep, so that each layer is missing when
    /// its turn comes again.
    fn room(&self, map: &ModelMap) -> u64 {
        let bytes = |ids: &Vec<ExpertId>| ids.iter().map(|&id| map.shape().bytes(id)).sum::<u64>();
        2 * self.0.iter().map(bytes).max().unwrap_or(0)
    }

    fn layer_bytes(&self, map: &ModelMap) -> u64 {
        self.0[0].iter().map(|&id| map.shape().bytes(id)).sum()
    }
}

/// Times `have` for one layer after the other.
fn layers(
    group: &mut BenchmarkGroup<'_, criterion::measurement::WallTime>,
    name: &str,
    routing: &Routing,
    have: impl Fn(&[ExpertId]),
) {
    let mut turn = 0;
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|times| {
            let mut spent = Duration::ZERO;
            for _ in 0..times {
                let ids = &routing.0[turn % routing.0.len()];
                turn += 1;
                let began = Instant::now();
                have(ids);
                spent += began.elapsed();
            }
            spent
        });
    });
}

fn fetch_direct(store: &DirectStore, ids: &[ExpertId]) {
    store.fetch(ids).expect("reads begin");
    store.begin_all().expect("reads begin");
    while store.wait_for_more().expect("reads end") {}
}

/// Every page of the experts is read by the processor, as a multiplication would.
fn touch(layout: &Layout, ids: &[ExpertId]) {
    for slice in ids.iter().flat_map(|&id| layout.slices_of(id)) {
        let slice = &layout.slices()[slice];
        for at in (0..slice.len).step_by(PAGE_BYTES) {
            // SAFETY: the address is inside the model's mapping, which outlives this call.
            black_box(unsafe { std::ptr::read_volatile((slice.address + at) as *const u8) });
        }
    }
}

fn fetch(c: &mut Criterion) {
    let Some(path) = model_path() else {
        eprintln!("no model: make test makes one, or HOTPIN_BENCH_MODEL names one");
        return;
    };
    let map = ModelMap::open(&path).expect("the model's headers");
    let model = Model::open(&path, |_| true).expect("the model");
    let mut session = Session::new(&model, &EngineOptions::default(), true).expect("a session");
    session.warm_up().expect("warm-up");
    let learned = session.learned().expect("a MoE model");
    let layout = || Layout::new(&map, learned).expect("a layout");
    let routing = Routing::of(&map, learned);
    let mut group = c.benchmark_group("fetch");
    group.sample_size(20);
    group.throughput(Throughput::Bytes(routing.layer_bytes(&map)));

    let defaults = DirectOptions {
        lock_dense: false,
        ..DirectOptions::default()
    };
    let ways = [
        ("direct/io_uring", defaults),
        (
            "direct/preadv",
            DirectOptions {
                uring: false,
                ..defaults
            },
        ),
        (
            "direct/page_cache",
            DirectOptions {
                direct: false,
                ..defaults
            },
        ),
    ];
    for (name, options) in ways {
        // SAFETY: the model outlives the store.
        let made = unsafe { DirectStore::new(&map, learned, layout(), options, PIECE_BYTES) };
        let (store, _) = made.expect("a store");
        store.set_capacity(routing.room(&map));
        layers(&mut group, name, &routing, |ids| fetch_direct(&store, ids));
    }
    {
        // SAFETY: the model outlives the store.
        let (store, _) =
            unsafe { MappedStore::new(layout(), TransitKeeper::Store, false, PIECE_BYTES) };
        store.set_capacity(routing.room(&map));
        let layout = layout();
        layers(&mut group, "mapped", &routing, |ids| {
            store.fetch(ids).expect("readahead begins");
            touch(&layout, ids);
        });
    }
    // SAFETY: the model outlives the store.
    let made = unsafe { DirectStore::new(&map, learned, layout(), defaults, PIECE_BYTES) };
    let (store, _) = made.expect("a store");
    store.set_capacity(map.shape().total_bytes());
    routing.0.iter().for_each(|ids| fetch_direct(&store, ids));
    layers(&mut group, "direct/resident", &routing, |ids| {
        fetch_direct(&store, ids);
    });
    group.finish();
}

criterion_group!(benches, fetch);
criterion_main!(benches);
