//! Experts in VRAM: the pool's miss-ratio curve on a recorded routing, and the law on a simulated card.

use hotpin_controllers::config::VramConfig;
use hotpin_controllers::trace::Trace;
use hotpin_controllers::vram::{
    Arrangement, DeviceLayout, LayerLayout, Pool, PoolLayout, TensorLayout, Tracker, VramFigures,
    VramRule,
};
use hotpin_sim::whatif::{
    CardTick, Hardware, Hog, ModelSizes, Script, Sequence, Setup, Source, Strategy, evaluate,
    timeline,
};
use std::collections::BTreeSet;
use std::sync::Arc;

const TRACE: &[u8] = include_bytes!("../traces/gpt-oss-20b.trace");

/// Layers, experts, and experts of a token of the trace.
const SHAPE: (usize, u32, u32) = (24, 32, 4);

fn layout() -> PoolLayout {
    let tensor = TensorLayout {
        ggml_type: 0,
        columns: 0,
        rows: 0,
        expert_bytes: 1 << 20,
    };
    let layer = LayerLayout {
        device: Some(0),
        experts: SHAPE.1,
        top_k: SHAPE.2,
        tensors: vec![tensor; 3],
    };
    let device = DeviceLayout {
        alignment_bytes: 128,
        split: 1.0,
        most_bank_bytes: None,
        offload_tokens: None,
    };
    PoolLayout::new(vec![layer; SHAPE.0], vec![device]).unwrap()
}

/// Least recently used out, over all layers.
struct Lru {
    slots: usize,
    now: u64,
    used_at: Vec<Option<u64>>,
    order: BTreeSet<(u64, usize)>,
    hits: u64,
}

impl Lru {
    fn access(&mut self, expert: usize) {
        self.now += 1;
        if let Some(at) = self.used_at[expert].replace(self.now) {
            self.hits += 1;
            self.order.remove(&(at, expert));
        } else if self.order.len() == self.slots {
            let (_, oldest) = self.order.pop_first().unwrap();
            self.used_at[oldest] = None;
        }
        self.order.insert((self.now, expert));
    }
}

/// The curve is that of the pool within three points, and LRU's is not: that is why ghosts of the pool
/// itself make it. `cargo test --release -p hotpin-sim --test vram -- --nocapture` prints both.
#[test]
fn the_curve_of_a_recorded_routing_is_the_pools() {
    let tokens = 6000;
    let trace = Arc::new(Trace::decode(TRACE).unwrap());
    let shape = trace.header.shape.clone();
    let source = Source::Trace(trace);
    let mut sequence = Sequence::new(&source, &shape, 1, 0, 1);
    let layout = layout();
    let sizes = (2..=38).map(|n| layout.full_bytes() * n / 40);
    let mut pools: Vec<Pool> = sizes
        .map(|bytes| Pool::new(&layout, bytes).unwrap())
        .collect();
    let mut lrus: Vec<Lru> = pools
        .iter()
        .map(|pool| Lru {
            slots: layout.plan(pool.bytes()).unwrap().groups[0].slots as usize,
            now: 0,
            used_at: vec![None; shape.total_experts()],
            order: BTreeSet::new(),
            hits: 0,
        })
        .collect();
    let config = VramConfig {
        half_life_tokens: 1e6,
        ..VramConfig::default()
    };
    let mut tracker = Tracker::new(layout, Arrangement::Cpu, &config);
    for _ in 0..tokens {
        let token = sequence.next_token().to_vec();
        for (layer, ids) in token.chunks(SHAPE.2 as usize).enumerate() {
            let base = shape.id(layer, 0).0;
            let own: Vec<i32> = ids.iter().map(|id| (id - base).cast_signed()).collect();
            tracker.route(layer, &own, 1);
            for pool in &mut pools {
                pool.route(layer, &own, 1);
            }
            for lru in &mut lrus {
                ids.iter().for_each(|&id| lru.access(id as usize));
            }
        }
        tracker.decoded(1, 1, true);
    }
    let mut figures = VramFigures::default();
    tracker.figures(&mut figures);
    let accesses = (tokens * SHAPE.0 as u64) as f64 * f64::from(SHAPE.2);
    let (mut worst, mut worst_lru) = (0.0f64, 0.0f64);
    for (pool, lru) in pools.iter().zip(&lrus) {
        let counts = pool.totals().counts();
        assert!((counts.hits + counts.misses) as f64 <= accesses);
        let exact = counts.hits as f64 / accesses;
        let told = figures.curve.hit_ratio(pool.bytes()).unwrap();
        let by_lru = lru.hits as f64 / accesses;
        eprintln!(
            "{:3} slots: pool {exact:.4}, curve {told:.4}, LRU {by_lru:.4}",
            lru.slots
        );
        worst = worst.max((told - exact).abs());
        worst_lru = worst_lru.max((by_lru - exact).abs());
    }
    eprintln!("largest error {worst:.4}, of LRU {worst_lru:.4}");
    assert!(worst < 0.03, "{worst}");
    assert!(worst_lru > 3.0 * worst, "{worst_lru} {worst}");
}

fn question(sequences: u32) -> Setup {
    let hardware = Hardware::preset("rtx-3090").unwrap();
    let mut setup = Setup::new(hardware, ModelSizes::preset("gpt-oss-120b").unwrap());
    setup.sequences = sequences;
    setup.context = 2048;
    setup.warm_up_steps = 100;
    setup.steps = 150;
    setup
}

fn pool_bytes(tick: &CardTick) -> u64 {
    match tick.arrangement {
        Arrangement::Reload { pool_bytes } => pool_bytes,
        Arrangement::Cpu | Arrangement::Static { .. } => 0,
    }
}

/// Changes of arrangement between ticks.
fn changes(ticks: &[CardTick]) -> usize {
    ticks
        .windows(2)
        .filter(|pair| pair[0].arrangement != pair[1].arrangement)
        .count()
}

/// Guards against a card that others cannot use, and against one that is never taken back.
#[test]
fn a_hog_on_the_card_is_yielded_to_and_comes_to_nothing() {
    let mut setup = question(1);
    setup.config.vram.allow_cpu = false;
    setup.config.vram.allow_static = false;
    setup.script = Script {
        hogs: vec![Hog {
            from_s: 40.0,
            until_s: 80.0,
            bytes: 8e9,
        }],
        active: Vec::new(),
    };
    let ticks = timeline(&setup, Strategy::Regulated, 200.0).unwrap();
    let at = |s: f64| ticks.iter().find(|tick| tick.at_s >= s).unwrap();
    let (before, during, after) = (at(39.0), at(60.0), ticks.last().unwrap());
    assert!(
        pool_bytes(before) - pool_bytes(during) > 7_700_000_000,
        "{during:?}"
    );
    assert!(
        pool_bytes(after) as f64 > 0.9 * pool_bytes(before) as f64,
        "{after:?}"
    );
    let short = ticks.iter().filter(|tick| tick.short_bytes > 0.0);
    let last_short_s = short.map(|tick| tick.at_s).fold(0.0, f64::max);
    assert!(last_short_s < 45.0, "{last_short_s}");
    let yields = ticks
        .iter()
        .filter(|tick| tick.rule == VramRule::Yield)
        .count();
    assert!((1..=7).contains(&yields), "{yields}");
    assert!(
        changes(&ticks) <= yields + 4,
        "{} {yields}",
        changes(&ticks)
    );
}

/// One topic, sixteen, one: the card is as fast as the better of the fixed arrangements each time.
#[test]
fn the_arrangement_follows_the_width_of_batches() {
    let mut setup = question(16);
    setup.script.active = vec![(0.0, 1), (100.0, 16), (300.0, 1)];
    let ticks = timeline(&setup, Strategy::Regulated, 500.0).unwrap();
    let at = |s: f64| {
        ticks
            .iter()
            .find(|tick| tick.at_s >= s)
            .unwrap_or(ticks.last().unwrap())
    };
    let speed = |from: f64, to: f64| {
        let (from, to) = (at(from), at(to));
        (to.tokens - from.tokens) as f64 / (to.at_s - from.at_s)
    };
    let labels = [90.0, 290.0, 490.0].map(|s| at(s).arrangement.label());
    assert_eq!(
        labels,
        ["reload", "static", "reload"],
        "{}",
        changes(&ticks)
    );
    assert!(changes(&ticks) <= 8, "{}", changes(&ticks));
    let fixed = |strategy, active| {
        let mut setup = question(16);
        setup.script.active = vec![(0.0, active)];
        evaluate(&setup, strategy).unwrap().tok_s
    };
    let narrow = fixed(Strategy::PoolSlru, 1);
    assert!(
        speed(60.0, 95.0) > 0.85 * narrow,
        "{} {narrow}",
        speed(60.0, 95.0)
    );
    let wide = fixed(Strategy::CpuExperts, 16);
    assert!(wide > 1.2 * fixed(Strategy::PoolSlru, 16));
    assert!(
        speed(240.0, 295.0) > 0.9 * wide,
        "{} {wide}",
        speed(240.0, 295.0)
    );
}
