//! Carrying out a decision.

use super::observe::Plant;
use crate::store::{ExpertStore, StoreError, Warmed};
use hotpin_controllers::{Action, Decision, ExpertId, ModelShape};
use std::time::{Duration, Instant};

/// What came of a decision.
#[derive(Debug, Clone, Default)]
pub(super) struct Acted {
    pub(super) pinned: Vec<Action>,
    pub(super) unpinned: Vec<Action>,
    pub(super) lock_errors: u32,
    pub(super) last_error: Option<String>,
    /// Names of the errors of failed lock calls.
    pub(super) errnos: Vec<String>,
    pub(super) pinned_bytes: u64,
    pub(super) transit_bytes: u64,
    /// Transit that an audit found gone, bytes.
    pub(super) lost_bytes: Option<u64>,
    /// When everything beyond the capacity had been given back; `None` where that was nothing.
    pub(super) given_back: Option<Instant>,
    /// Where memory had run short: from the last look that found enough until then.
    pub(super) yielded: Option<Duration>,
}

/// Unpins, pins, and publishes what the engine ranks transit by. Memory is released before more is
/// locked, and nothing more is locked once `must_stop` says so.
pub(super) fn carry_out(
    store: &dyn ExpertStore,
    shape: &ModelShape,
    decision: &Decision,
    ranks: &[f32],
    plant: &Plant,
    progress: Option<&mut dyn FnMut(u64, u64)>,
    must_stop: &mut dyn FnMut() -> bool,
) -> Acted {
    let mut acted = Acted::default();
    store.start_tick();
    store.publish_ranks(ranks);
    let kept_before = kept_bytes(store);
    for action in &decision.unpin {
        if store.unpin(action.expert) {
            acted.unpinned.push(*action);
        }
    }
    // After unpinning: what is pinned is not given back, and others may wait for it.
    store.set_capacity(decision.capacity_bytes);
    acted.given_back = (kept_bytes(store) < kept_before).then(Instant::now);
    let first = progress.is_some();
    if first {
        let planned: Vec<_> = decision.pin.iter().map(|a| a.expert).collect();
        store.clear_loaded(&planned);
    }
    pin_all(store, shape, decision, &mut acted, progress, must_stop);
    if first {
        warm_transit(store, ranks, must_stop);
    }
    let change = plant.change();
    if change.decode_tokens == 0 && change.prefill_tokens == 0 {
        store.trim();
    }
    if plant.is_suspect() {
        acted.lost_bytes = store.audit();
    }
    let held = store.held();
    acted.pinned_bytes = held.pinned_bytes;
    acted.transit_bytes = held.transit_bytes;
    acted
}

/// What is held that others cannot have before it is given back: transit in the page cache they can.
fn kept_bytes(store: &dyn ExpertStore) -> u64 {
    store.held().pinned_bytes + store.private_transit_bytes()
}

/// Fills transit with what ranks next after the pins, so that the first tokens do not wait for it.
/// Without a profile all ranks are alike and nothing is worth reading ahead.
fn warm_transit(store: &dyn ExpertStore, ranks: &[f32], must_stop: &mut dyn FnMut() -> bool) {
    let _ = best_first(ranks).into_iter().all(|id| {
        !must_stop()
            && matches!(
                store.warm_unless(id, must_stop),
                Warmed::Done | Warmed::UnderWay
            )
    });
}

/// Experts that rank above the lowest, best first.
pub(super) fn best_first(ranks: &[f32]) -> Vec<ExpertId> {
    let least = ranks.iter().copied().fold(f32::INFINITY, f32::min);
    let mut order: Vec<usize> = (0..ranks.len()).filter(|&e| ranks[e] > least).collect();
    order.sort_unstable_by(|&a, &b| ranks[b].total_cmp(&ranks[a]));
    let id = |index| u32::try_from(index).ok().map(ExpertId);
    order.into_iter().map_while(id).collect()
}

fn pin_all(
    store: &dyn ExpertStore,
    shape: &ModelShape,
    decision: &Decision,
    acted: &mut Acted,
    mut progress: Option<&mut dyn FnMut(u64, u64)>,
    must_stop: &mut dyn FnMut() -> bool,
) {
    let planned: u64 = decision.pin.iter().map(|a| shape.bytes(a.expert)).sum();
    let mut done = 0;
    for action in &decision.pin {
        // Reading takes its time, in which others may take all that is left.
        if must_stop() {
            tracing::debug!(
                "pinning stopped for this tick: memory runs short, or it takes too long"
            );
            return;
        }
        match store.pin_unless(action.expert, must_stop) {
            Ok(true) => acted.pinned.push(*action),
            Ok(false) => {}
            Err(error) => {
                acted.lock_errors += 1;
                tracing::warn!("pinning stopped for this tick: {error}");
                acted.last_error = Some(error.to_string());
                if let Some(errno) = error.errno() {
                    acted.errnos.push(format!("{errno:?}"));
                }
                // The same limit would refuse the rest as well.
                if matches!(error, StoreError::Lock { .. }) {
                    return;
                }
            }
        }
        done += shape.bytes(action.expert);
        if let Some(progress) = &mut progress {
            progress(done, planned);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{DenseLock, Fetched, LeaveOff};
    use hotpin_controllers::{Held, Reason, Residence};
    use std::sync::Mutex;

    /// Writes down what it is told, in order.
    #[derive(Debug, Default)]
    struct Scribe(Mutex<Vec<String>>);

    impl Scribe {
        fn note(&self, what: String) {
            self.0.lock().unwrap().push(what);
        }
    }

    impl ExpertStore for Scribe {
        fn fetch(&self, _: &[ExpertId]) -> Result<Fetched, StoreError> {
            unreachable!("the engine does that")
        }
        fn is_complete(&self) -> bool {
            false
        }
        fn pin_unless(&self, expert: ExpertId, _: LeaveOff<'_>) -> Result<bool, StoreError> {
            self.note(format!("pin {}", expert.0));
            Ok(true)
        }
        fn unpin(&self, expert: ExpertId) -> bool {
            self.note(format!("unpin {}", expert.0));
            true
        }
        fn clear_loaded(&self, _: &[ExpertId]) {}
        fn warm_unless(&self, _: ExpertId, _: LeaveOff<'_>) -> Warmed {
            Warmed::NoRoom
        }
        fn set_capacity(&self, bytes: u64) {
            self.note(format!("capacity {bytes}"));
        }
        fn publish_ranks(&self, ranks: &[f32]) {
            self.note(format!("{} ranks", ranks.len()));
        }
        fn trim(&self) {
            self.note("trim".into());
        }
        fn audit(&self) -> Option<u64> {
            None
        }
        fn start_tick(&self) {}
        fn held(&self) -> Held {
            Held::default()
        }
        fn check_unchanged(&self) -> Result<(), String> {
            Ok(())
        }
        fn locked_bytes(&self) -> u64 {
            0
        }
        fn residence_into(&self, _: &mut [Residence]) {}
        fn set_dense_locked(&self, _: bool) -> DenseLock {
            DenseLock::Skipped
        }
        fn unlock_all(&self) {}
    }

    fn action(expert: u32) -> Action {
        Action {
            expert: ExpertId(expert),
            reason: Reason::Shrink,
            score: 1.0,
        }
    }

    fn told(decision: &Decision, mut must_stop: impl FnMut() -> bool) -> Vec<String> {
        let store = Scribe::default();
        let shape = ModelShape::uniform(1, 4, 10, 1).unwrap();
        let plant = Plant::new(&shape);
        let ranks = [0.0; 4];
        carry_out(
            &store,
            &shape,
            decision,
            &ranks,
            &plant,
            None,
            &mut must_stop,
        );
        store.0.into_inner().unwrap()
    }

    /// A store gives back what is beyond the capacity and not pinned: whoever needs the memory has it in
    /// the tick that decides so.
    #[test]
    fn memory_is_unpinned_then_given_back_and_only_then_more_is_pinned() {
        let decision = Decision {
            capacity_bytes: 20,
            unpin: vec![action(0), action(1)],
            pin: vec![action(2), action(3)],
            ..Decision::default()
        };
        let first = ["4 ranks", "unpin 0", "unpin 1", "capacity 20"];
        let told_all = told(&decision, || false);
        assert_eq!(told_all, [&first[..], &["pin 2", "pin 3", "trim"]].concat());
        let told_short = told(&decision, || true);
        assert_eq!(told_short, [&first[..], &["trim"]].concat());
    }
}
