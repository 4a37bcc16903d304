//! Experts in a graphics device's memory: the shadow of llama.cpp's pool, which the tap drives, and what
//! engine and governor tell each other about it.

use crate::engine::{BankRow, Device, Placement, Repooled};
use crate::model::{ModelMap, MoeLayer, Role, TensorKind};
use crate::size::{SizeError, format_bytes, parse_size};
use hotpin_controllers::config::VramConfig;
use hotpin_controllers::vram::{
    Arrangement, DeviceLayout, LayerLayout, LayoutError, PoolLayout, PoolTotals, Routed,
    TensorLayout, Tracker, VramFigures,
};
use hotpin_controllers::{ExpertId, ModelShape};
use serde::{Deserialize, Serialize};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Decodes between two copies of the shadow's figures for the governor.
const PUBLISH_EVERY: u32 = 4;
/// Changes that wait for the governor; older ones are forgotten.
const MOST_CHANGES: usize = 64;
/// No order.
const NONE: u64 = u64::MAX;
/// llama.cpp computes large batches on the device from so many tokens on.
const OFFLOAD_TOKENS: u32 = 32;
/// Share by which llama.cpp's own count of uses may differ from the shadow's, in parts per hundred.
const AGREES_PERCENT: u64 = 1;

/// Memory of a device that is for experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum VramSize {
    /// What the control laws find right.
    #[default]
    Auto,
    /// Exactly this much, as long as it fits.
    Bytes(u64),
    /// None.
    Off,
}

impl TryFrom<String> for VramSize {
    type Error = SizeError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<VramSize> for String {
    fn from(size: VramSize) -> Self {
        match size {
            VramSize::Auto => "auto".into(),
            VramSize::Off => "off".into(),
            VramSize::Bytes(bytes) => bytes.to_string(),
        }
    }
}

impl FromStr for VramSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            // A share would be one of a device that is not known yet.
            size => Ok(match parse_size(size, None)? {
                0 => Self::Off,
                bytes => Self::Bytes(bytes),
            }),
        }
    }
}

/// A change for which the model is loaded anew, with other experts on the device for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// What there is to be; a pool is made by a further order.
    pub to: Arrangement,
    /// Old and new fit into the device's memory side by side.
    pub both_fit: bool,
}

/// What came of a [`Move`].
#[derive(Debug, Clone, PartialEq)]
pub struct Moved {
    /// What there was to be.
    pub asked: Arrangement,
    /// What there was.
    pub before: Arrangement,
    /// What there is.
    pub now: Arrangement,
    /// What llama.cpp counted of the pool that went.
    pub ended: Option<crate::engine::PoolTotals>,
    /// Bytes of the sequences that were saved and put back.
    pub state_bytes: u64,
    /// Time for which nothing was decoded, ns.
    pub took_ns: u64,
    /// Why it is not what was asked for.
    pub refused: Option<String>,
}

/// A change that was tried.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// Of the pool: another context.
    Pool(Repooled),
    /// Of what is on the device for good: another model.
    Placed(Moved),
}

/// What engine and governor tell each other. The engine never waits for the other side.
#[derive(Debug)]
pub struct VramLink {
    order_bytes: AtomicU64,
    pool_bytes: AtomicU64,
    /// Bytes of whole layers' experts that the law was given, while they are on the device.
    static_bytes: AtomicU64,
    /// Whether `placement` has an order: looked at before each token.
    moves: AtomicBool,
    placement: Mutex<Option<Move>>,
    published: Mutex<Published>,
}

/// What the engine's side leaves for whoever asks.
#[derive(Debug, Default)]
pub struct Published {
    /// The shadow's figures.
    pub figures: VramFigures,
    /// Experts that are stable in the pool, by id.
    pub covered: Vec<bool>,
    /// What came of orders since the governor looked last.
    pub changes: Vec<Outcome>,
}

impl Default for VramLink {
    fn default() -> Self {
        Self {
            order_bytes: AtomicU64::new(NONE),
            pool_bytes: AtomicU64::new(0),
            static_bytes: AtomicU64::new(0),
            moves: AtomicBool::new(false),
            placement: Mutex::default(),
            published: Mutex::default(),
        }
    }
}

impl VramLink {
    /// Asks for a pool of `bytes`, 0 for none, from the next decode on, and for nothing else any more.
    pub fn order(&self, bytes: u64) {
        self.set_move(None);
        self.order_bytes.store(bytes, Relaxed);
    }

    /// Takes back an order that was not followed yet.
    pub fn withdraw(&self) {
        self.order_bytes.store(NONE, Relaxed);
        self.set_move(None);
    }

    /// Asks for the model to be loaded anew, and for nothing else any more.
    pub fn order_move(&self, to: Move) {
        self.order_bytes.store(NONE, Relaxed);
        self.set_move(Some(to));
    }

    /// Takes back an order to load the model anew that could not be followed, and tells why. What there is
    /// stays.
    pub(super) fn refuse(&self, asked: Arrangement, took_ns: u64, why: String) {
        let now = self.applied();
        self.withdraw();
        self.published().changes.push(Outcome::Placed(Moved {
            asked,
            before: now,
            now,
            ended: None,
            state_bytes: 0,
            took_ns,
            refused: Some(why),
        }));
    }

    fn set_move(&self, order: Option<Move>) {
        *self.placement() = order;
        self.moves.store(order.is_some(), Relaxed);
    }

    fn placement(&self) -> MutexGuard<'_, Option<Move>> {
        self.placement
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The order to load the model anew, if there is one.
    #[must_use]
    pub fn move_due(&self) -> Option<Move> {
        // Between two tokens nobody waits for a lock in vain.
        if !self.moves.load(Relaxed) {
            return None;
        }
        *self.placement()
    }

    /// Where experts are.
    #[must_use]
    pub fn applied(&self) -> Arrangement {
        match (self.static_bytes.load(Relaxed), self.pool_bytes()) {
            (0, 0) => Arrangement::Cpu,
            (0, pool_bytes) => Arrangement::Reload { pool_bytes },
            (bytes, _) => Arrangement::Static { bytes },
        }
    }

    /// Bytes of the pool that there is.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        self.pool_bytes.load(Relaxed)
    }

    /// What was published last.
    pub fn published(&self) -> MutexGuard<'_, Published> {
        self.published
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine's side: the shadow, on the engine's thread.
#[derive(Debug)]
pub struct VramFeed {
    tracker: Tracker,
    link: Arc<VramLink>,
    shape: ModelShape,
    /// Whether each expert of the layer in hand is in the pool.
    held: Vec<bool>,
    unpublished: u32,
    /// What came of orders that could not be published at once.
    waiting: Vec<Outcome>,
    /// The context is new: its first decode compiles what the device computes with.
    fresh: bool,
}

impl VramFeed {
    /// A shadow of no pool yet.
    #[must_use]
    pub fn new(
        layout: PoolLayout,
        config: &VramConfig,
        shape: ModelShape,
        link: Arc<VramLink>,
    ) -> Self {
        Self {
            tracker: Tracker::new(layout, Arrangement::Cpu, config),
            link,
            shape,
            held: Vec::new(),
            unpublished: 0,
            waiting: Vec::new(),
            fresh: true,
        }
    }

    /// Takes in a layer's routing. Of its distinct experts, leaves those in `fetched` that are used from
    /// host memory: to be copied to the device, or computed with.
    pub fn route(&mut self, layer: usize, ids: &[i32], tokens: usize, fetched: &mut Vec<ExpertId>) {
        // Who is there is asked before the routing changes it.
        let shape = &self.shape;
        self.held.clear();
        if let Some(pool) = self.tracker.pool() {
            let held = |id: &ExpertId| pool.holds(layer, shape.place(*id).1);
            self.held.extend(fetched.iter().map(held));
        }
        if let Routed::Pooled { .. } = self.tracker.route(layer, ids, tokens) {
            let mut held = self.held.iter();
            fetched.retain(|_| !held.next().copied().unwrap_or(false));
        }
    }

    /// Marks the end of a decode, which took `ns`.
    pub fn decoded(&mut self, tokens: usize, ns: u64, sound: bool) {
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        self.tracker.decoded(tokens, ns, sound && !self.fresh);
        self.fresh &= !sound;
        self.unpublished += 1;
        if self.unpublished >= PUBLISH_EVERY {
            self.publish();
        }
    }

    /// Leaves a copy for the governor, unless it is looking at the last one.
    fn publish(&mut self) {
        let Ok(mut published) = self.link.published.try_lock() else {
            return;
        };
        self.unpublished = 0;
        self.tracker.figures(&mut published.figures);
        self.tracker.covered(&mut published.covered);
        published.changes.append(&mut self.waiting);
        let old = published.changes.len().saturating_sub(MOST_CHANGES);
        published.changes.drain(..old);
    }

    /// The order that waits to be followed.
    #[must_use]
    pub fn order(&self) -> Option<u64> {
        Some(self.link.order_bytes.load(Relaxed)).filter(|&bytes| bytes != NONE)
    }

    /// Begins anew with the pool that there is now.
    pub fn repooled(&mut self, outcome: &Repooled) {
        self.check(outcome.ended.as_ref());
        let arrangement = match outcome.bytes {
            0 => Arrangement::Cpu,
            pool_bytes => Arrangement::Reload { pool_bytes },
        };
        self.tracker.arranged(arrangement);
        let slots: Vec<u32> = outcome.slots.iter().map(|group| group.slots).collect();
        let planned: Vec<u32> = self.tracker.layout().plan(outcome.bytes).map_or_else(
            |_| Vec::new(),
            |plan| plan.groups.iter().map(|g| g.slots).collect(),
        );
        if slots != planned {
            tracing::warn!("llama.cpp made a pool of {slots:?} slots, not {planned:?}");
        }
        self.fresh = true;
        self.link.pool_bytes.store(outcome.bytes, Relaxed);
        // A refusal is told once; the governor decides what follows.
        let _ = self
            .link
            .order_bytes
            .compare_exchange(outcome.asked_bytes, NONE, Relaxed, Relaxed);
        self.waiting.push(Outcome::Pool(outcome.clone()));
        self.publish();
    }

    /// Begins anew over a model that was loaded anew, or over the old one when that failed.
    pub fn moved(&mut self, outcome: Moved) {
        self.check(outcome.ended.as_ref());
        self.tracker.arranged(outcome.now);
        self.fresh = true;
        let (pool_bytes, static_bytes) = match outcome.now {
            Arrangement::Cpu => (0, 0),
            Arrangement::Reload { pool_bytes } => (pool_bytes, 0),
            Arrangement::Static { bytes } => (0, bytes),
        };
        self.link.pool_bytes.store(pool_bytes, Relaxed);
        self.link.static_bytes.store(static_bytes, Relaxed);
        self.link.withdraw();
        self.waiting.push(Outcome::Placed(outcome));
        self.publish();
    }

    /// Compares llama.cpp's count of a pool that ended with the shadow's.
    fn check(&self, ended: Option<&crate::engine::PoolTotals>) {
        if let (Some(own), Some(theirs)) = (self.tracker.totals(), ended)
            && !agree(own, theirs)
        {
            tracing::warn!("the pool was used otherwise than its shadow says: {theirs:?}, {own:?}");
        }
    }

    /// The shadow.
    #[must_use]
    pub const fn tracker(&self) -> &Tracker {
        &self.tracker
    }
}

/// Whether llama.cpp's totals are the shadow's.
fn agree(own: &PoolTotals, theirs: &crate::engine::PoolTotals) -> bool {
    let close = |a: u64, b: u64| a.abs_diff(b) * 100 <= AGREES_PERCENT * a.max(b);
    [(own.small, theirs.small), (own.large, theirs.large)]
        .iter()
        .all(|(own, theirs)| close(own.hits, theirs.hits) && close(own.misses, theirs.misses))
        && close(own.copied.slices, theirs.copied)
}

/// How llama.cpp would lay out a pool for a model that is loaded as `placement` says.
///
/// # Errors
/// [`LayoutError`]: no layer's experts can be in a pool.
pub fn pool_layout(
    map: &ModelMap,
    placement: &Placement,
    device: Device,
) -> Result<PoolLayout, LayoutError> {
    let layers: Vec<LayerLayout> = map
        .layers()
        .iter()
        .map(|layer| layer_layout(map, placement, layer))
        .collect();
    let offload = std::env::var("GGML_OP_OFFLOAD_MIN_BATCH").ok();
    let most_bank_bytes = layers
        .iter()
        .filter(|layer| layer.device.is_some())
        .flat_map(|layer| {
            let most = layers_slots(&layers, layer);
            let bounds = |tensor: &TensorLayout| bank_bytes(device, *tensor, most);
            layer.tensors.iter().filter_map(bounds).collect::<Vec<_>>()
        })
        .min();
    PoolLayout::new(
        layers,
        vec![DeviceLayout {
            alignment_bytes: device.alignment_bytes(),
            split: 1.0,
            most_bank_bytes,
            offload_tokens: Some(
                offload
                    .and_then(|tokens| tokens.parse().ok())
                    .unwrap_or(OFFLOAD_TOKENS),
            ),
        }],
    )
}

/// Most slots that layers like this one could fill.
fn layers_slots(layers: &[LayerLayout], like: &LayerLayout) -> u64 {
    let alike = layers.iter().filter(|layer| layer.tensors == like.tensors);
    alike.map(|layer| u64::from(layer.experts)).sum::<u64>() + 1
}

/// Says which of the layers whose experts a placement puts on the device have too large a tensor for it: there
/// llama.cpp would abort the process.
///
/// # Errors
/// What it is, in words.
pub fn check_placed(map: &ModelMap, placement: &Placement, device: Device) -> Result<(), String> {
    let placed = |layer: &&MoeLayer| placement.experts().contains(&layer.block);
    for layer in map.layers().iter().filter(placed) {
        for tensor in tensors_of(map, layer) {
            let experts = u64::from(layer.experts);
            if !device.multiplies(row_of(&tensor), experts) {
                return Err(format!(
                    "{} computes with no tensor as large as one of the experts of block {}, {}",
                    device.name(),
                    layer.block,
                    format_bytes(tensor.expert_bytes * experts)
                ));
            }
        }
    }
    Ok(())
}

const fn row_of(tensor: &TensorLayout) -> BankRow {
    BankRow {
        ty: tensor.ggml_type,
        columns: tensor.columns,
        rows: tensor.rows,
    }
}

/// Bytes that a bank of this tensor may have at most; `None` where the device sets no bound that
/// matters.
fn bank_bytes(device: Device, tensor: TensorLayout, most: u64) -> Option<u64> {
    let slots = device.most_slots(row_of(&tensor), most);
    // One byte less than the first size that is refused.
    (slots < most).then(|| ((slots + 1) * tensor.expert_bytes).saturating_sub(1))
}

/// The tensors of a layer's routed experts that are multiplied by.
fn tensors_of(map: &ModelMap, layer: &MoeLayer) -> Vec<TensorLayout> {
    layer
        .parts
        .iter()
        .filter(|part| part.weight && part.role != Role::Other)
        .map(|part| {
            let info = &map.tensors()[part.tensor as usize].info;
            TensorLayout {
                ggml_type: info.ty.id,
                columns: info.dims().first().copied().unwrap_or(1),
                rows: info.dims().get(1).copied().unwrap_or(1),
                expert_bytes: part.slice_bytes,
            }
        })
        .collect()
}

fn layer_layout(map: &ModelMap, placement: &Placement, layer: &MoeLayer) -> LayerLayout {
    let pooled = placement.holds_block(layer.block) && !placement.experts().contains(&layer.block);
    LayerLayout {
        device: pooled.then_some(0),
        experts: layer.experts,
        top_k: layer.top_k,
        tensors: tensors_of(map, layer),
    }
}

/// Bytes of a model's dense weights that are on the device.
#[must_use]
pub fn dense_on_device(map: &ModelMap, placement: &Placement) -> u64 {
    map.tensors()
        .iter()
        .filter(|t| t.kind == TensorKind::Dense && !placement.on_host(&t.info.name))
        .map(|t| t.info.bytes)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::{Arrangement, Move, NONE, Outcome, Relaxed, VramLink};

    #[test]
    fn a_later_order_takes_the_place_of_an_earlier_one() {
        let link = VramLink::default();
        let there = Move {
            to: Arrangement::Static { bytes: 5 },
            both_fit: true,
        };
        let ordered = |link: &VramLink| (link.order_bytes.load(Relaxed), link.move_due());
        link.order(7);
        link.order_move(there);
        assert_eq!(ordered(&link), (NONE, Some(there)));
        // Others need the memory: what was to be loaded must not be.
        link.order(3);
        assert_eq!(ordered(&link), (3, None));
        link.order_move(there);
        link.withdraw();
        assert_eq!(ordered(&link), (NONE, None));
    }

    #[test]
    fn what_is_refused_is_told_and_changes_nothing() {
        let link = VramLink::default();
        link.pool_bytes.store(9, Relaxed);
        let asked = Arrangement::Static { bytes: 5 };
        link.order_move(Move {
            to: asked,
            both_fit: true,
        });
        link.refuse(asked, 11, "no room".into());
        assert_eq!(link.move_due(), None);
        assert_eq!(link.applied(), Arrangement::Reload { pool_bytes: 9 });
        let told = std::mem::take(&mut link.published().changes);
        let [Outcome::Placed(moved)] = &told[..] else {
            panic!("{told:?}");
        };
        assert_eq!((moved.asked, moved.took_ns), (asked, 11));
        assert_eq!((moved.now, moved.before), (link.applied(), link.applied()));
        assert_eq!(moved.refused.as_deref(), Some("no room"));
    }
}
