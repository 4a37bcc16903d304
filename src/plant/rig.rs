//! A session with everything that regulates it, put together in the order that is safe and taken
//! apart in the reverse one.

use super::fixed::FixedPool;
use super::parked::Again;
use super::{Counters, Feeder, VramFeed, VramLink, VramSize, dense_on_device, pool_layout};
use crate::engine::{
    EngineError, EngineOptions, ExpertArena, Learned, MemorySource, Model, Placement, Poll, Session,
};
use crate::governor::{
    DenseWeights, Fill, Governor, GovernorOptions, Journal, OnFailure, Regulated, STUCK_AFTER,
    VramPart,
};
use crate::model::ModelMap;
use crate::sensors::{Roots, Sensors, readahead_request_bytes, system_summary};
use crate::size::format_bytes;
use crate::store::program::{self, ProgramLockError};
use crate::store::{
    DenseLock, DirectOptions, DirectStore, ExpertStore, Layout, LayoutError, Limitation, Limited,
    MappedStore, Speeds, StoreError, StoreKind, TransitKeeper,
};
use crate::trace::{Recorder, Recording};
use hotpin_controllers::config::{AdaptiveConfig, VramConfig};
use hotpin_controllers::policy::{BuildError, PolicyKind, build};
use hotpin_controllers::{ExpertId, Moment};
use std::sync::Arc;
use std::time::Duration;

/// Readahead request where the device does not tell what it accepts; every device accepts this.
const UNKNOWN_DEVICE_PIECE_BYTES: usize = 128 << 10;
/// What the link to a device is measured with, each way.
const LINK_BYTES: usize = 64 << 20;

/// Time between ticks, where none is asked for.
const TICK: Duration = Duration::from_millis(100);

/// What to regulate a session with.
#[derive(Debug)]
pub struct RigOptions {
    /// The policy.
    pub policy: PolicyKind,
    /// Where experts live.
    pub store: StoreKind,
    /// How store `direct` reads.
    pub direct: DirectOptions,
    /// Engine settings; `poll` is chosen by policy.
    pub engine: EngineOptions,
    /// Settings of the control laws.
    pub control: AdaptiveConfig,
    /// Starting counts, indexed by expert.
    pub profile: Option<Vec<f32>>,
    /// Time between ticks.
    pub tick: Duration,
    /// The journal.
    pub journal: Journal,
    /// Records routing.
    pub recorder: Option<Recorder>,
    /// What becomes of the session when its governor fails.
    pub on_failure: OnFailure,
    /// When the session begins. `static`, which never reads what it does not pin, begins when all is pinned, and so
    /// does a session that may not lock all that it wants to.
    pub fill: Fill,
    /// Whether the program itself is kept in memory, as far as there is room: whoever gives memory back must not wait
    /// for the disk to read how.
    pub keep_program: bool,
    /// The tier in the memory of the device that the model is on, if it is on any.
    pub vram: VramOptions,
}

impl RigOptions {
    /// Settings that are what nobody asked otherwise for: no profile, no journal, nothing recorded, a session that
    /// begins when it is filled, a program that is left to the kernel.
    #[must_use]
    pub fn new(policy: PolicyKind, store: StoreKind, engine: EngineOptions) -> Self {
        Self {
            policy,
            store,
            direct: DirectOptions::default(),
            engine,
            control: AdaptiveConfig::default(),
            profile: None,
            tick: TICK,
            journal: Journal::new(None),
            recorder: None,
            on_failure: OnFailure::default(),
            fill: Fill::Before,
            keep_program: false,
            vram: VramOptions::default(),
        }
    }
}

/// How much of a device's memory is for experts that come and go.
#[derive(Debug, Default)]
pub struct VramOptions {
    /// The memory.
    pub size: VramSize,
    /// Who knows how much is free; the device itself by default.
    pub source: Option<Arc<dyn MemorySource>>,
    /// Whether whoever runs the session loads the model anew where the law orders that
    /// ([`Rig::move_due`]).
    pub moves: bool,
}

/// Why a session could not be put together.
#[derive(Debug, thiserror::Error)]
pub enum RigError {
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The policy.
    #[error(transparent)]
    Policy(#[from] BuildError),
    /// Store `direct` with a model on a device.
    #[error(
        "--store direct: llama.cpp copies experts to the graphics device out of the model file's mapping, which store direct does not fill; use --store mapped with --gpu-layers"
    )]
    DirectOnDevice,
    /// Experts that the device does not compute with.
    #[error("--gpu-experts: {0}; leave that block's experts on the host")]
    TooLarge(String),
    /// Which node selects experts is not known.
    #[error(
        "--gpu-layers: block {block} of this model has several nodes of the router's name, and on a device it cannot be told which of them selects the experts; run it on the CPU"
    )]
    UnclearRouter {
        /// The block.
        block: u32,
    },
    /// A pool of a fixed size that cannot be.
    #[error("--vram {bytes}: {cause}")]
    NoPool {
        /// Bytes asked for.
        bytes: u64,
        /// The cause.
        cause: String,
    },
    /// The governor's thread.
    #[error("the governor's thread could not be started: {0}")]
    Thread(#[from] std::io::Error),
}

/// A session, its store and its governor. Fields are dropped in this order: the governor stops
/// before the engine does, and the store unlocks last.
#[derive(Debug)]
pub struct Rig<'m> {
    /// The running governor; `None` under `off` and for dense models.
    pub governor: Option<Governor>,
    /// The engine.
    pub session: Session<'m>,
    /// The engine's counters.
    pub counters: Arc<Counters>,
    /// The store, where there is one.
    pub store: Option<Arc<dyn ExpertStore>>,
    /// Which store it is; `Mapped` without one.
    pub store_kind: StoreKind,
    /// Why this store, where it was chosen by measurement.
    pub chosen: Option<String>,
    /// Where prompts are announced, when the session is recorded.
    pub recording: Option<Recording>,
    /// What this session has to do without.
    pub limitations: Vec<Limited>,
    /// What else the user should know about how it runs.
    pub notes: Vec<String>,
    /// With what it is put together again over a model that was loaded anew.
    pub(super) again: Option<Again>,
    /// The pool that nobody regulates.
    pub(super) fixed_pool: Option<FixedPool>,
}

/// How idle threads wait under a policy: see docs/control.md.
fn poll_of(policy: PolicyKind) -> Poll {
    match policy {
        PolicyKind::Off => Poll::Spin,
        PolicyKind::Adaptive => Poll::Follow,
        PolicyKind::Fetch | PolicyKind::Static | PolicyKind::Lru => Poll::Quiet,
    }
}

/// Who keeps transit in budget under a policy.
pub(super) fn keeper_of(policy: PolicyKind) -> TransitKeeper {
    match policy {
        PolicyKind::Adaptive | PolicyKind::Lru => TransitKeeper::Store,
        PolicyKind::Off | PolicyKind::Fetch | PolicyKind::Static => TransitKeeper::Kernel,
    }
}

/// Before llama.cpp would abort.
pub(super) fn check_placed(model: &Model, map: &ModelMap) -> Result<(), RigError> {
    let Some(device) = model.device() else {
        return Ok(());
    };
    super::check_placed(map, model.placement(), device).map_err(RigError::TooLarge)
}

impl<'m> Rig<'m> {
    /// Creates the session, learns the graph, locks the dense weights, makes the first decision and
    /// starts the loop. `progress` is told bytes pinned and bytes planned.
    ///
    /// # Errors
    /// [`RigError`], see there.
    pub fn assemble(
        model: &'m Model,
        map: &ModelMap,
        options: RigOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, RigError> {
        check_placed(model, map)?;
        let mut engine = options.engine.clone();
        engine.poll = poll_of(options.policy);
        let tapped = options.policy != PolicyKind::Off && map.is_moe();
        if !tapped {
            engine.poll = Poll::Spin;
        }
        let mut session = Session::new(model, &engine, tapped)?;
        session.warm_up()?;
        if options.store == StoreKind::Direct && model.device().is_some() {
            return Err(RigError::DirectOnDevice);
        }
        if tapped && options.store != StoreKind::Mapped && model.device().is_none() {
            // An arena is not page cache, which would give way to buffers that grow later.
            session.touch_buffers()?;
        }
        let counters = Arc::new(Counters::new(map.shape().total_experts()));
        let mut rig = Self {
            governor: None,
            session,
            counters,
            store: None,
            store_kind: StoreKind::Mapped,
            chosen: None,
            recording: None,
            limitations: Vec::new(),
            notes: Vec::new(),
            again: None,
            fixed_pool: None,
        };
        if !map.is_moe() {
            rig.notes.push("this is a dense model: every weight is used for every token, so there is nothing to pin".into());
            return Ok(rig);
        }
        if tapped {
            rig.regulate(map, options, progress)?;
        } else if let Some(device) = model.device() {
            rig.fix_pool(map, device, options.vram.size)?;
        }
        Ok(rig)
    }

    /// The tier in the device's memory: the engine's side of it and the governor's.
    fn vram(&mut self, map: &ModelMap, options: &RigOptions) -> Option<(VramFeed, VramPart)> {
        let device = self.session.model().device()?;
        let placement = self.session.model().placement().clone();
        let limit_bytes = match options.vram.size {
            VramSize::Off => return None,
            VramSize::Bytes(bytes) => Some(bytes),
            VramSize::Auto => options.control.vram.limit_bytes,
        };
        let layout = match pool_layout(map, &placement, device) {
            Ok(layout) => layout,
            Err(error) => {
                self.notes.push(format!(
                    "no experts come and go in {}: {error}",
                    device.name()
                ));
                return None;
            }
        };
        let (least_bytes, most_bytes) = (layout.least_bytes(), layout.largest_bytes());
        if let Some(bytes) = limit_bytes.filter(|&bytes| bytes > 0) {
            let said = if bytes < least_bytes {
                Some(format!(
                    "less than a token's experts need, {}: they stay on the CPU",
                    format_bytes(least_bytes)
                ))
            } else {
                (bytes > most_bytes).then(|| {
                    format!(
                        "{} has room in its largest tensors for {} of it",
                        device.name(),
                        format_bytes(most_bytes)
                    )
                })
            };
            self.notes
                .extend(said.map(|said| format!("--vram {}: {said}", format_bytes(bytes))));
        }
        if !options.vram.moves && placement.experts().is_empty() {
            self.notes.push(
                "whole layers' experts stay on the host: only `hotpin serve` loads the model anew to place them, and --gpu-experts places them at the start".into(),
            );
        }
        self.session.limit_pool(most_bytes);
        let link = Arc::new(VramLink::default());
        let config = VramConfig {
            limit_bytes,
            ..options.control.vram.clone()
        };
        let feed = VramFeed::new(
            layout.clone(),
            &config,
            map.shape().clone(),
            Arc::clone(&link),
        );
        let part = VramPart {
            link,
            // Whole layers are placed when a model is loaded; what the user placed stays where it is.
            can_move: options.vram.moves && placement.experts().is_empty(),
            source: options
                .vram
                .source
                .clone()
                .unwrap_or_else(|| Arc::new(device)),
            link_bytes_per_s: device
                .measure_link(LINK_BYTES)
                .ok()
                .map(|link| link.upload_bytes_per_s),
            dense_bytes: dense_on_device(map, &placement),
            context_bytes: self.session.device_bytes(),
            load_ns: self.session.model().load_ns() + self.session.made_ns(),
            layout,
            config,
        };
        self.again = Some(Again {
            engine: self.session.options().clone(),
            policy: options.policy,
            link: Arc::clone(&part.link),
            layout: part.layout.clone(),
        });
        Some((feed, part))
    }

    fn regulate(
        &mut self,
        map: &ModelMap,
        options: RigOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), RigError> {
        let policy = build(
            options.policy,
            map.shape(),
            &options.control,
            options.profile.as_deref(),
        )?;
        let vram = self.vram(map, &options).unzip();
        let Some(learned) = self.session.learned() else {
            return Ok(());
        };
        if let Some(&block) = learned.unclear_blocks.first() {
            return Err(RigError::UnclearRouter { block });
        }
        let placement = self.session.model().placement();
        let layout = Layout::placed(map, learned, placement)?;
        let experts = (0..map.shape().total_experts()).filter_map(|id| u32::try_from(id).ok());
        let slices_per_expert = experts
            .map(|id| layout.slices_of(ExpertId(id)).len())
            .max()
            .unwrap_or(0);
        let mut dense = DenseWeights::new(layout.dense_bytes(), &options.control.capacity);
        let now = Moment::default();
        let room = dense.fit(&Sensors::open(&Roots::default(), now).sample(now));
        let made = make_store(map, learned, placement, &options, room)?;
        dense.note(&made.dense);
        // The little that may be locked then goes to what is to be pinned, not to what is read first.
        let locks_refused = matches!(made.dense, DenseLock::Failed(_));
        let not_locked = match &made.dense {
            DenseLock::Locked(_) => None,
            DenseLock::Skipped => Some(format!(
                "their {} do not fit beside the reserve",
                format_bytes(dense.bytes)
            )),
            DenseLock::Failed(error) => Some(error.to_string()),
        };
        if let Some(why) = not_locked {
            let said = format!("dense weights are not locked: {why}");
            self.limitations.push((Limitation::DenseUnlocked, said));
        }
        if options.keep_program
            && let Err(error) = keep_program(&dense)
        {
            let said = format!("the program itself is not locked: {error}");
            self.limitations.push((Limitation::ProgramUnlocked, said));
        }
        self.limitations.extend(made.limitations);
        self.chosen = made.chosen;
        self.store_kind = made.kind;
        self.recording = options.recorder.as_ref().map(Recorder::recording);
        let store = made.store;
        let blocks: Vec<u32> = map.layers().iter().map(|l| l.block).collect();
        let regulated = Regulated {
            store: Arc::clone(&store),
            counters: Arc::clone(&self.counters),
            shape: map.shape().clone(),
        };
        let governor = Governor::start(
            GovernorOptions {
                tick: options.tick,
                roots: Roots::default(),
                dense,
                slices_per_expert,
                recording: self.recording.clone(),
                on_failure: options.on_failure,
                fill: match options.policy {
                    _ if locks_refused => Fill::Before,
                    PolicyKind::Adaptive | PolicyKind::Lru => options.fill,
                    PolicyKind::Off | PolicyKind::Fetch | PolicyKind::Static => Fill::Before,
                },
                stuck_after: STUCK_AFTER,
                vram: vram.1,
            },
            regulated,
            policy,
            options.journal,
            progress,
        )?;
        let feeder = Feeder::new(
            Arc::clone(&self.counters),
            Arc::clone(&store),
            map.shape().clone(),
            &blocks,
            options.recorder,
        )
        .with_vram(vram.0);
        self.session.route_to(Box::new(feeder), made.arena);
        self.governor = Some(governor);
        self.store = Some(store);
        Ok(())
    }
}

/// Keeps the program in memory where that leaves enough to the model, whose dense weights come first. It stays so
/// while the model is loaded anew, and until the process ends.
fn keep_program(dense: &DenseWeights) -> Result<u64, ProgramLockError> {
    let system = system_summary(&Roots::default());
    let limit_bytes = system.memlock_bytes;
    let beside_dense = limit_bytes.map(|limit| limit.saturating_sub(dense.bytes));
    program::keep(beside_dense, system.usable_bytes())
}

/// A store, ready to be regulated.
struct Made {
    store: Arc<dyn ExpertStore>,
    /// The same store as the engine uses it, where experts are not in the model's tensors.
    arena: Option<Arc<dyn ExpertArena>>,
    kind: StoreKind,
    dense: DenseLock,
    limitations: Vec<Limited>,
    /// Why it was chosen, where it was chosen by measurement.
    chosen: Option<String>,
}

/// Makes the store that was asked for. `Auto` takes `direct` where this machine lets it read as it is
/// meant to, what it holds stays in memory, locked or for want of swap, and the page cache is not measured to
/// be much faster; else `mapped`, whose pages can be dropped and read again.
///
/// Dense weights are locked when `lock_dense`.
fn make_store(
    map: &ModelMap,
    learned: &Learned,
    placement: &Placement,
    options: &RigOptions,
    lock_dense: bool,
) -> Result<Made, RigError> {
    let direct = DirectOptions {
        lock_dense: lock_dense && options.direct.lock_dense,
        ..options.direct
    };
    let piece_bytes = piece_bytes(map);
    let why = match options.store {
        StoreKind::Mapped => None,
        StoreKind::Auto if placement.uses_device() => None,
        StoreKind::Direct => return Ok(make_direct(map, learned, direct, piece_bytes)?),
        StoreKind::Auto => match make_direct(map, learned, direct, piece_bytes) {
            Ok(mut made)
                if made.limitations.is_empty() && stays(&made.dense, &Roots::default()) =>
            {
                let threads = usize::try_from(options.engine.threads).unwrap_or(1);
                let speeds = Speeds::measure(map, made.store.as_ref(), piece_bytes, threads);
                if !speeds.prefer_mapped() {
                    made.chosen = Some(format!("store direct: {speeds}"));
                    return Ok(made);
                }
                Some(speeds.to_string())
            }
            Ok(made) => Some(match made.dense {
                DenseLock::Failed(error) => {
                    format!("its memory cannot be locked and may be swapped out: {error}")
                }
                DenseLock::Locked(_) | DenseLock::Skipped => {
                    let said: Vec<String> = made.limitations.into_iter().map(|(_, s)| s).collect();
                    said.join("; ")
                }
            }),
            Err(error) => Some(error.to_string()),
        },
    };
    let limitation = why.map(|why| {
        let said = format!("store mapped, since direct would not do its best here: {why}");
        (Limitation::MappedInstead, said)
    });
    let (store, dense) = make_mapped(
        map,
        learned,
        placement,
        keeper_of(options.policy),
        lock_dense,
    )?;
    Ok(Made {
        store,
        arena: None,
        kind: StoreKind::Mapped,
        dense,
        limitations: limitation.into_iter().collect(),
        chosen: None,
    })
}

/// Store `mapped` over a loaded model.
pub(super) fn make_mapped(
    map: &ModelMap,
    learned: &Learned,
    placement: &Placement,
    keeper: TransitKeeper,
    lock_dense: bool,
) -> Result<(Arc<dyn ExpertStore>, DenseLock), RigError> {
    let layout = Layout::placed(map, learned, placement)?;
    let piece_bytes = piece_bytes(map);
    #[expect(
        unsafe_code,
        reason = "only here is it known that the model outlives the store"
    )]
    // SAFETY: the mapping belongs to the model, which the rig's lifetime keeps alive longer than the
    // session; the store is dropped with the rig, or when the rig is parked, after the governor's thread
    // was joined. Others hold it for a look only (`Monitor::store`).
    let (store, dense) = unsafe { MappedStore::new(layout, keeper, lock_dense, piece_bytes) };
    Ok((Arc::new(store), dense))
}

/// Bytes of one readahead request that the disk of a model's file takes.
fn piece_bytes(map: &ModelMap) -> usize {
    readahead_request_bytes(&Roots::default(), map.path())
        .ok()
        .and_then(|bytes| usize::try_from(bytes).ok())
        .unwrap_or(UNKNOWN_DEVICE_PIECE_BYTES)
}

/// Whether memory that we hold stays in RAM.
fn stays(dense: &DenseLock, roots: &Roots) -> bool {
    match dense {
        DenseLock::Locked(_) | DenseLock::Skipped => true,
        DenseLock::Failed(_) => system_summary(roots).swap_total_bytes == Some(0),
    }
}

fn make_direct(
    map: &ModelMap,
    learned: &Learned,
    options: DirectOptions,
    piece_bytes: usize,
) -> Result<Made, StoreError> {
    let layout = Layout::new(map, learned).map_err(|e| StoreError::Open {
        cause: e.to_string(),
    })?;
    #[expect(
        unsafe_code,
        reason = "only here is it known that the model outlives the store"
    )]
    // SAFETY: as in `make_store`.
    let (store, dense) = unsafe { DirectStore::new(map, learned, layout, options, piece_bytes) }?;
    let limitations = store.limitations().to_vec();
    let store = Arc::new(store);
    let arena: Arc<dyn ExpertArena> = Arc::clone(&store) as _;
    Ok(Made {
        store,
        arena: Some(arena),
        kind: StoreKind::Direct,
        dense,
        limitations,
        chosen: None,
    })
}
