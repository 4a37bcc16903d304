//! A rig between two loads of its model: experts of whole layers go to the device's memory for good, or
//! come back, which a loaded model cannot do. What was learned, the sequences, the journal and whoever
//! watches stay.

use super::rig::{check_placed, keeper_of, make_mapped};
use super::{Counters, Feeder, Move, Moved, Rig, RigError, VramFeed, VramLink};
use crate::engine::{EngineOptions, Kept, Model, Placement, Session};
use crate::governor::Suspended;
use crate::model::ModelMap;
use crate::store::{DenseLock, ExpertStore, Limited, StoreKind};
use crate::time::nanos;
use crate::trace::{Recorder, Recording};
use hotpin_controllers::PolicyKind;
use hotpin_controllers::vram::{Arrangement, PoolLayout};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long somebody may look at a store before it is said that this is waited for.
const LOOK: Duration = Duration::from_secs(5);
const LOOK_STEP: Duration = Duration::from_millis(1);

/// With what a rig is put together again.
#[derive(Debug)]
pub(super) struct Again {
    pub(super) engine: EngineOptions,
    pub(super) policy: PolicyKind,
    pub(super) link: Arc<VramLink>,
    /// Of the model with all experts on the host.
    pub(super) layout: PoolLayout,
}

/// What of a rig outlives its model.
#[derive(Debug)]
pub struct Parked {
    kept: Kept,
    recorder: Option<Recorder>,
    vram: Option<VramFeed>,
    governor: Option<Suspended>,
    counters: Arc<Counters>,
    recording: Option<Recording>,
    limitations: Vec<Limited>,
    notes: Vec<String>,
    again: Again,
    asked: Arrangement,
    before: Arrangement,
    pool_limit_bytes: u64,
    began: Instant,
}

/// A rig that goes on.
#[derive(Debug)]
pub struct Resumed<'m> {
    /// The rig.
    pub rig: Rig<'m>,
    /// Why its sequences are empty, when they could not be put back.
    pub lost: Option<String>,
}

impl<'m> Rig<'m> {
    /// The order to load the model anew, if there is one. It may be followed between any two decodes:
    /// [`Self::park`], another model with [`Self::placement_of`] what was ordered, [`Parked::resume`].
    #[must_use]
    pub fn move_due(&self) -> Option<Move> {
        self.again.as_ref().and_then(|again| again.link.move_due())
    }

    /// Says that an order to load the model anew could not be followed; the rig stays what it is. Nothing was decoded
    /// since `began`.
    pub fn refuse_move(&self, order: Move, began: Instant, why: String) {
        if let Some(again) = &self.again {
            again.link.refuse(order.to, nanos(began.elapsed()), why);
        }
    }

    /// Where engine and governor meet over the device's memory, where there is such a tier.
    #[must_use]
    pub fn vram_link(&self) -> Option<Arc<VramLink>> {
        self.again.as_ref().map(|again| Arc::clone(&again.link))
    }

    /// How the model is loaded for an arrangement.
    #[must_use]
    pub fn placement_of(&self, map: &ModelMap, arrangement: Arrangement) -> Placement {
        let base = self.session.model().placement().clone();
        let (Some(again), Arrangement::Static { bytes }) = (&self.again, arrangement) else {
            return base.with_experts([]);
        };
        let layers = again.layout.static_layers(bytes);
        base.with_experts(layers.into_iter().map(|layer| map.layers()[layer].block))
    }

    /// Takes the rig apart, so that its model can go: for `order`, which is carried out by
    /// [`Parked::resume`]. Nothing is decoded since `began`. `None`, and the rig is gone, where nothing of it is on
    /// a device.
    #[must_use]
    pub fn park(self, order: Move, began: Instant) -> Option<Parked> {
        // What is not parked is taken apart in the rig's own order.
        self.again.as_ref()?;
        let Self {
            governor,
            mut session,
            counters,
            store,
            recording,
            limitations,
            notes,
            again,
            ..
        } = self;
        let again = again?;
        let pool_limit_bytes = session.pool_limit_bytes();
        let kept = session.give_up();
        let sink = session.take_sink();
        drop(session);
        let feeder =
            sink.and_then(|sink| (sink as Box<dyn std::any::Any>).downcast::<Feeder>().ok());
        let (recorder, vram) = feeder.map_or((None, None), |feeder| feeder.into_parts());
        let governor = governor.and_then(crate::governor::Governor::suspend);
        if let Some(store) = store {
            end(&store);
        }
        Some(Parked {
            before: again.link.applied(),
            asked: order.to,
            kept,
            recorder,
            vram,
            governor,
            counters,
            recording,
            limitations,
            notes,
            again,
            pool_limit_bytes,
            began,
        })
    }
}

/// Unlocks all that a store holds, and waits until nobody else has it: the mapping that it is over goes. Nobody can
/// reach it any more; who has it already, such as a look for the metrics, is done soon.
fn end(store: &Arc<dyn ExpertStore>) {
    store.unlock_all();
    let mut say_at = Instant::now() + LOOK;
    while Arc::strong_count(store) > 1 {
        if Instant::now() >= say_at {
            tracing::error!("somebody holds the store of a model that goes; it waits for that");
            say_at += LOOK;
        }
        std::thread::sleep(LOOK_STEP);
    }
}

impl Parked {
    /// Goes on over `model`, which is loaded as was ordered, or, where that was `refused`, as it was.
    ///
    /// # Errors
    /// What is parked, and why it does not go on over this model: another may do.
    pub fn resume<'m>(
        self,
        model: &'m Model,
        map: &ModelMap,
        refused: Option<String>,
    ) -> Result<Resumed<'m>, Box<(Self, RigError)>> {
        match self.rebuild(model, map) {
            Ok((session, store, dense)) => Ok(self.connect(map, session, store, &dense, refused)),
            Err(error) => Err(Box::new((self, error))),
        }
    }

    /// A session and a store over another load of the model.
    fn rebuild<'m>(
        &self,
        model: &'m Model,
        map: &ModelMap,
    ) -> Result<(Session<'m>, Arc<dyn ExpertStore>, DenseLock), RigError> {
        check_placed(model, map)?;
        let mut session = Session::new(model, &self.again.engine, true)?;
        session.warm_up()?;
        session.limit_pool(self.pool_limit_bytes);
        let lock_dense = self.governor.as_ref().is_some_and(Suspended::dense_locked);
        let Some(learned) = session.learned() else {
            unreachable!("the session has a tap");
        };
        let (store, dense) = make_mapped(
            map,
            learned,
            model.placement(),
            keeper_of(self.again.policy),
            lock_dense,
        )?;
        Ok((session, store, dense))
    }

    fn connect<'m>(
        self,
        map: &ModelMap,
        mut session: Session<'m>,
        store: Arc<dyn ExpertStore>,
        dense: &DenseLock,
        refused: Option<String>,
    ) -> Resumed<'m> {
        let placed = !session.model().placement().experts().is_empty();
        let whole = if refused.is_none() {
            self.asked
        } else {
            self.before
        };
        // A pool is made by the next order.
        let now = match whole {
            Arrangement::Static { .. } if placed => whole,
            Arrangement::Static { .. } | Arrangement::Cpu | Arrangement::Reload { .. } => {
                Arrangement::Cpu
            }
        };
        let lost = session.take_over(&self.kept).err();
        // Before the governor decides again.
        let vram = self.vram.map(|mut vram| {
            vram.moved(Moved {
                asked: self.asked,
                before: self.before,
                now,
                ended: self.kept.ended,
                state_bytes: self.kept.state_bytes,
                took_ns: nanos(self.began.elapsed()),
                refused,
            });
            vram
        });
        let governor = self.governor.and_then(|suspended| {
            let resumed = suspended.resume(Arc::clone(&store), dense);
            // Nobody would give memory back any more.
            resumed
                .map_err(|e| self.counters.halt(RigError::Thread(e).to_string()))
                .ok()
        });
        let blocks: Vec<u32> = map.layers().iter().map(|l| l.block).collect();
        let feeder = Feeder::new(
            Arc::clone(&self.counters),
            Arc::clone(&store),
            map.shape().clone(),
            &blocks,
            self.recorder,
        )
        .with_vram(vram);
        session.route_to(Box::new(feeder), None);
        let rig = Rig {
            governor,
            session,
            counters: self.counters,
            store: Some(store),
            store_kind: StoreKind::Mapped,
            chosen: None,
            recording: self.recording,
            limitations: self.limitations,
            notes: self.notes,
            again: Some(self.again),
            fixed_pool: None,
        };
        Resumed { rig, lost }
    }
}
