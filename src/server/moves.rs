//! A served model that is loaded anew: experts of whole layers go to the device's memory for good, or come
//! back, where the control law finds that to pay. Requests that run wait meanwhile, and go on.

use super::app::App;
use super::job::Failure;
use super::queue::End;
use super::scheduler::{Desk, Scheduler, Stopped};
use crate::engine::{Model, Placement};
use crate::model::ModelMap;
use crate::plant::{Parked, Resumed};
use std::sync::Arc;
use std::time::Instant;

/// Loads the model with other weights on the device. The second argument is called meanwhile, and says whether to
/// go on.
pub type Load<'a> = dyn Fn(&Placement, &mut dyn FnMut() -> bool) -> Result<Model, String> + 'a;

/// What stays while models come and go.
pub struct Moves<'a> {
    /// Who is served.
    pub app: &'a App,
    /// The model's map.
    pub map: &'a ModelMap,
    /// The vocabulary that requests are prepared with.
    pub words: &'a Arc<Model>,
    /// How the model is loaded.
    pub load: &'a Load<'a>,
}

impl std::fmt::Debug for Moves<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Moves").finish_non_exhaustive()
    }
}

/// Nothing that can be served was left of a model.
#[derive(Debug, thiserror::Error)]
#[error("the model was given up to be loaded anew, and cannot be had again: {0}")]
pub struct Lost(String);

/// A session that stopped so that its model is loaded anew.
#[derive(Debug)]
pub struct Due {
    parked: Parked,
    desk: Desk,
    to: Placement,
    /// The model, where it fits beside the one that there is and was loaded already.
    early: Option<Model>,
}

/// A model that was loaded anew, for the session that stopped.
struct Next {
    model: Arc<Model>,
    waiting: Waiting,
}

/// Requests that wait for a model.
struct Waiting {
    parked: Parked,
    desk: Desk,
    /// Why it will not be what was ordered.
    refused: Option<String>,
    /// What else may be loaded, the last first.
    left: Vec<Placement>,
}

impl Moves<'_> {
    /// Serves until told to stop, or until the model has to go to be loaded anew ([`Self::follow`]).
    pub fn serve(&self, resumed: Resumed<'_>, mut desk: Option<Desk>) -> Option<Due> {
        let Resumed { mut rig, mut lost } = resumed;
        let link = rig.vram_link();
        loop {
            let mut scheduler = Scheduler::new(
                &mut rig.session,
                Arc::clone(&self.app.queue),
                Arc::clone(&self.app.stats),
            )
            .recorded(rig.recording.clone())
            .moving(Arc::clone(self.words), link.clone())
            .resumed(desk.take(), lost.take().as_deref());
            let Stopped::Moves(order) = scheduler.run() else {
                return None;
            };
            let waiting = scheduler.leave();
            let began = Instant::now();
            let to = rig.placement_of(self.map, order.to);
            // Side by side where both fit: what cannot be had then changes nothing.
            let early = match order.both_fit.then(|| self.load(&to, &waiting)) {
                Some(Err(why)) => {
                    rig.refuse_move(order, began, why);
                    desk = Some(waiting);
                    continue;
                }
                Some(Ok(model)) => Some(model),
                None => None,
            };
            return rig.park(order, began).map(|parked| Due {
                parked,
                desk: waiting,
                to,
                early,
            });
        }
    }

    /// Goes on after `old` had to go, with one model after the other, until told to stop. Where what was ordered
    /// cannot be had, the model comes back as it was, or without experts on the device.
    ///
    /// # Errors
    /// [`Lost`] when it cannot be had at all; who waited has been told.
    pub fn follow(&self, old: Arc<Model>, due: Option<Due>) -> Result<(), Lost> {
        let Some(due) = due else { return Ok(()) };
        let mut next = self.replace(old, due)?;
        while let Some(Next { model, waiting }) = next {
            next = self.go_on(model, waiting)?;
        }
        Ok(())
    }

    /// Gives up `old` for the model that is due.
    fn replace(&self, old: Arc<Model>, due: Due) -> Result<Option<Next>, Lost> {
        let back = old.placement().clone();
        let bare = back.clone().with_experts([]);
        let mut left = vec![bare, back, due.to];
        let early = due.early.inspect(|_| {
            left.pop();
        });
        left.dedup();
        let waiting = Waiting {
            parked: due.parked,
            desk: due.desk,
            refused: None,
            left,
        };
        drop(old);
        match early {
            Some(model) => Ok(Some(Next {
                model: Arc::new(model),
                waiting,
            })),
            None => self.load_next(waiting, None),
        }
    }

    /// Goes on with what was loaded, until the next time.
    fn go_on(&self, model: Arc<Model>, waiting: Waiting) -> Result<Option<Next>, Lost> {
        let Waiting {
            parked,
            desk,
            refused,
            left,
        } = waiting;
        let mut desk = Some(desk);
        let served = parked
            .resume(&model, self.map, refused.clone())
            .map(|resumed| self.serve(resumed, desk.take()));
        let (parked, error) = match served {
            Ok(None) => return Ok(None),
            Ok(Some(due)) => return self.replace(model, due),
            Err(failed) => *failed,
        };
        drop(model);
        let Some(desk) = desk else {
            return Ok(None);
        };
        let waiting = Waiting {
            parked,
            desk,
            refused,
            left,
        };
        self.load_next(waiting, Some(error.to_string()))
    }

    /// Loads the next of what is left, after the one before `failed`.
    fn load_next(
        &self,
        mut waiting: Waiting,
        mut failed: Option<String>,
    ) -> Result<Option<Next>, Lost> {
        loop {
            if self.is_over(&waiting.desk) {
                let (queue, stats) = (&self.app.queue, &self.app.stats);
                waiting.desk.close(queue, stats, &Failure::Shutdown);
                return Ok(None);
            }
            if let Some(why) = &failed {
                tracing::warn!("the model cannot be loaded anew: {why}");
                waiting.refused.get_or_insert_with(|| why.clone());
            }
            let Some(placement) = waiting.left.pop() else {
                self.app.queue.close(End::Now);
                let lost = Lost(failed.unwrap_or_default());
                let failure = Failure::Engine(lost.to_string());
                let (queue, stats) = (&self.app.queue, &self.app.stats);
                waiting.desk.close(queue, stats, &failure);
                return Err(lost);
            };
            match self.load(&placement, &waiting.desk) {
                Ok(model) => {
                    let model = Arc::new(model);
                    return Ok(Some(Next { model, waiting }));
                }
                Err(why) => failed = Some(why),
            }
        }
    }

    fn load(&self, placement: &Placement, waiting: &Desk) -> Result<Model, String> {
        (self.load)(placement, &mut || {
            // The engine's thread is at work.
            self.app.stats.round();
            !self.is_over(waiting)
        })
    }

    /// Whether nobody is to be served any more.
    fn is_over(&self, waiting: &Desk) -> bool {
        match self.app.queue.end() {
            None => false,
            Some(End::Drained) => waiting.is_idle(),
            Some(End::Now) => true,
        }
    }
}
