//! A served model that is loaded anew: experts of whole layers go to the device's memory for good, or come
//! back, where the control law finds that to pay. Requests that run wait meanwhile, and go on.

use super::common;
use crate::engine::{Model, Placement};
use crate::model::ModelMap;
use crate::plant::{Parked, Resumed};
use crate::server::{App, Desk, Scheduler, Stopped};
use anyhow::{Context, Result};
use hotpin_controllers::PolicyKind;
use std::sync::Arc;

/// What stays while models come and go.
pub(super) struct Moves<'a> {
    pub(super) app: &'a App,
    pub(super) map: &'a ModelMap,
    pub(super) policy: PolicyKind,
    /// The vocabulary that requests are prepared with.
    pub(super) words: &'a Arc<Model>,
}

/// A session that stopped so that its model is loaded anew.
pub(super) struct Due {
    parked: Parked,
    desk: Desk,
    to: Placement,
    /// The model, where it fits beside the one that there is and was loaded already.
    early: Option<Result<Model>>,
}

/// A model that was loaded anew, for the session that stopped.
pub(super) struct Next {
    model: Arc<Model>,
    parked: Parked,
    desk: Option<Desk>,
    /// Why it is loaded as it was before.
    refused: Option<String>,
    back: Placement,
}

impl Moves<'_> {
    /// Serves until told to stop, or until the model is to be loaded anew.
    pub(super) fn serve(&self, resumed: Resumed<'_>, desk: Option<Desk>) -> Result<Option<Due>> {
        let Resumed { mut rig, lost } = resumed;
        let link = rig.vram_link();
        let mut scheduler = Scheduler::new(
            &mut rig.session,
            Arc::clone(&self.app.queue),
            Arc::clone(&self.app.stats),
        )
        .recorded(rig.recording.clone())
        .moving(Arc::clone(self.words), link)
        .resumed(desk, lost.as_deref());
        let Stopped::Moves(order) = scheduler.run() else {
            return Ok(None);
        };
        let desk = scheduler.leave();
        let to = rig.placement_of(self.map, order.to);
        // Side by side where both fit, so that what there is can be gone back to at once.
        let early = order.both_fit.then(|| self.load(&to));
        let parked = rig.park(order).context("nothing is on a device")?;
        Ok(Some(Due {
            parked,
            desk,
            to,
            early,
        }))
    }

    /// Gives up `old` for the model that is due; goes back to how it was loaded where that cannot be had.
    pub(super) fn load_anew(&self, old: Arc<Model>, due: Option<Due>) -> Result<Option<Next>> {
        let Some(due) = due else { return Ok(None) };
        let back = old.placement().clone();
        let (model, refused) = match due.early {
            Some(Ok(new)) => (Arc::new(new), None),
            Some(Err(error)) => (old, Some(error)),
            None => {
                drop(old);
                match self.load(&due.to) {
                    Ok(new) => (Arc::new(new), None),
                    Err(error) => (Arc::new(self.load(&back)?), Some(error)),
                }
            }
        };
        Ok(Some(Next {
            model,
            parked: due.parked,
            desk: Some(due.desk),
            refused: refused.map(|error| format!("{error:#}")),
            back,
        }))
    }

    /// Goes on with what was loaded, until the next time.
    pub(super) fn go_on(&self, next: Next) -> Result<Option<Next>> {
        let Next {
            model,
            parked,
            mut desk,
            refused,
            back,
        } = next;
        let may_go_back = refused.is_none();
        let served = parked
            .resume(&model, self.map, refused)
            .map(|resumed| self.serve(resumed, desk.take()));
        let (parked, error) = match served {
            Ok(due) => return self.load_anew(model, due?),
            Err(failed) => *failed,
        };
        if !may_go_back {
            return Err(error.into());
        }
        drop(model);
        Ok(Some(Next {
            model: Arc::new(self.load(&back)?),
            parked,
            desk,
            refused: Some(error.to_string()),
            back,
        }))
    }

    fn load(&self, placement: &Placement) -> Result<Model> {
        common::load_watched(self.map, self.policy, placement.clone(), &mut |_| {
            // The engine's thread is at work.
            self.app.stats.round();
            true
        })
    }
}
