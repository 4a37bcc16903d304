//! The toy model on the device, and a sink that follows its pool.

use hotpin::demo::{ToyArgs, build_toy};
use hotpin::engine::{
    Device, EngineOptions, GpuLayers, Model, PoolTotals, Repooled, RouteSink, Routed, Session,
    Token,
};
use hotpin::engine::{Pass, Placement};
use hotpin::model::ModelMap;
use hotpin::plant::{VramFeed, VramLink, pool_layout};
use hotpin_controllers::config::VramConfig;
use hotpin_controllers::vram::{PoolCounts, PoolLayout};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The toy model: 4 layers of 8 experts, top-2, of which each has 3 parts of 17,408 bytes.
pub struct Toy {
    pub map: ModelMap,
    pub device: Device,
    /// On the device, experts on the host.
    pub model: Model,
    _folder: tempfile::TempDir,
}

/// Whoever holds it is alone with the device.
pub struct Alone {
    pub toy: &'static Toy,
    _alone: MutexGuard<'static, ()>,
}

/// The toy, made once a process. `None`, said, where there is no device; `HOTPIN_TEST_GPU=1` forbids
/// that.
pub fn toy(test: &str) -> Option<Alone> {
    static ALONE: Mutex<()> = Mutex::new(());
    static TOY: OnceLock<Option<Toy>> = OnceLock::new();
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let made = TOY.get_or_init(|| {
        let device = match Device::first() {
            Ok(device) => device,
            Err(error) => {
                let must = std::env::var_os("HOTPIN_TEST_GPU").is_some_and(|v| v == "1");
                assert!(!must, "{error}");
                eprintln!("{error}");
                return None;
            }
        };
        let folder = tempfile::tempdir().expect("a folder");
        let output = folder.path().join("toy.gguf");
        build_toy(&ToyArgs {
            layers: 4,
            experts: 8,
            top_k: 2,
            width: 128,
            expert_width: 128,
            seed: 1,
            output: output.clone(),
            force: false,
        })
        .expect("toy");
        let map = ModelMap::open(&output).expect("map");
        let placement = Placement::new(&map, GpuLayers::All);
        let model = Model::open_placed(&output, placement, |_| true).expect("model");
        Some(Toy {
            map,
            device,
            model,
            _folder: folder,
        })
    });
    let Some(toy) = made else {
        eprintln!("SKIPPED {test}: no graphics device");
        return None;
    };
    Some(Alone { toy, _alone: alone })
}

impl Toy {
    pub fn layout(&self) -> PoolLayout {
        pool_layout(&self.map, self.model.placement(), self.device).expect("layout")
    }

    pub fn tokens(&self, count: usize) -> Vec<Token> {
        let text =
            "A pool holds what was used last; what it lacks is copied. 0123456789 ".repeat(8);
        let mut tokens = self.model.tokenize(&text, false, false).expect("tokens");
        tokens.truncate(count);
        assert_eq!(tokens.len(), count);
        tokens
    }

    /// A session whose pool is followed.
    pub fn followed(&self, options: &EngineOptions) -> (Session<'_>, Followed) {
        let layout = self.layout();
        let mut session = Session::new(&self.model, options, true).expect("session");
        session.warm_up().expect("warm-up");
        session.limit_pool(layout.largest_bytes());
        let followed = Followed {
            link: Arc::default(),
            ends: Arc::default(),
            fetched: Arc::default(),
            layout: layout.clone(),
        };
        let feed = VramFeed::new(
            layout,
            &VramConfig::default(),
            self.map.shape().clone(),
            Arc::clone(&followed.link),
        );
        let sink = Sink {
            feed,
            map: self.map.clone(),
            ends: Arc::clone(&followed.ends),
            fetched: Arc::clone(&followed.fetched),
        };
        session.route_to(Box::new(sink), None);
        (session, followed)
    }
}

/// What a followed session's sink leaves.
pub struct Followed {
    pub link: Arc<VramLink>,
    /// Totals of each pool that ended: the shadow's and llama.cpp's.
    pub ends: Arc<Mutex<Vec<End>>>,
    /// Distinct experts that the RAM tier was asked for.
    pub fetched: Arc<AtomicU64>,
    pub layout: PoolLayout,
}

/// Totals of a pool that ended.
#[derive(Clone, Debug)]
pub struct End {
    pub own: hotpin_controllers::vram::PoolTotals,
    pub theirs: Option<PoolTotals>,
}

impl Followed {
    pub fn ends(&self) -> Vec<End> {
        self.ends
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

struct Sink {
    feed: VramFeed,
    map: ModelMap,
    ends: Arc<Mutex<Vec<End>>>,
    fetched: Arc<AtomicU64>,
}

impl RouteSink for Sink {
    fn routed(&mut self, routed: &Routed<'_>) -> Result<(), String> {
        let layer = self
            .map
            .layer_of_block(routed.block)
            .ok_or("a block without experts")?;
        let shape = self.map.shape();
        let mut distinct = Vec::new();
        for &expert in routed.experts {
            let id = shape.id(layer, u32::try_from(expert).map_err(|e| e.to_string())?);
            if !distinct.contains(&id) {
                distinct.push(id);
            }
        }
        self.feed
            .route(layer, routed.experts, routed.tokens, &mut distinct);
        self.fetched.fetch_add(distinct.len() as u64, Relaxed);
        Ok(())
    }

    fn decoded(&mut self, _: Pass, tokens: usize, _: u64, decode_ns: u64) {
        self.feed.decoded(tokens, decode_ns, true);
    }

    fn streams(&self) -> bool {
        false
    }

    fn pool_order(&mut self) -> Option<u64> {
        self.feed.order()
    }

    fn repooled(&mut self, outcome: &Repooled) {
        if let Some(&own) = self.feed.tracker().totals() {
            let end = End {
                own,
                theirs: outcome.ended,
            };
            self.ends
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(end);
        }
        self.feed.repooled(outcome);
    }
}

pub fn options() -> EngineOptions {
    EngineOptions {
        threads: 2,
        n_ctx: 512,
        n_batch: 64,
        n_ubatch: 64,
        ..EngineOptions::default()
    }
}

/// The bits of a row of logits.
pub fn bits(logits: &[f32]) -> Vec<u32> {
    assert!(!logits.is_empty() && logits.iter().all(|l| l.is_finite()));
    logits.iter().map(|l| l.to_bits()).collect()
}

/// Hits and misses, small and large together.
pub fn sums(small: PoolCounts, large: PoolCounts) -> (u64, u64) {
    (small.hits + large.hits, small.misses + large.misses)
}
