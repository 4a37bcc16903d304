//! What is read between ticks because the first decision wanted it, and memory that is made ready.

use super::{Shared, act};
use crate::store::{ExpertStore, Warmed};
use hotpin_controllers::{Action, ExpertId};
use std::time::Instant;

/// An expert to read when there is time.
#[derive(Debug)]
enum Wanted {
    /// To be pinned as well.
    Pin(Action),
    /// For transit.
    Warm(ExpertId),
}

impl Wanted {
    fn expert(&self) -> ExpertId {
        match self {
            Self::Pin(action) => action.expert,
            Self::Warm(expert) => *expert,
        }
    }
}

/// What is still to be read, best first.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    wanted: std::vec::IntoIter<Wanted>,
    /// What was pinned since the last tick.
    pub(super) pinned: Vec<Action>,
}

impl Ahead {
    /// What is to be pinned, and then whatever ranks above the lowest; what is there by then is passed over.
    pub(super) fn new(pins: impl Iterator<Item = Action>, ranks: &[f32]) -> Self {
        let others = act::best_first(ranks).into_iter().map(Wanted::Warm);
        let wanted: Vec<_> = pins.map(Wanted::Pin).chain(others).collect();
        Self {
            wanted: wanted.into_iter(),
            pinned: Vec::new(),
        }
    }

    /// Nothing more is wanted.
    pub(super) fn forget(&mut self) {
        self.wanted = Vec::new().into_iter();
    }

    /// Reads what is wanted and makes memory ready, a little at a time, until it is time to wake up. False when it
    /// is time to stop.
    pub(super) fn work(&mut self, store: &dyn ExpertStore, wake: Instant, shared: &Shared) -> bool {
        let mut is_due = || Instant::now() >= wake;
        while !is_due() {
            if shared.stops_before(Instant::now()) {
                return false;
            }
            let Some(wanted) = self.wanted.as_slice().first() else {
                if store.prepare() {
                    continue;
                }
                break;
            };
            match store.warm_unless(wanted.expert(), &mut is_due) {
                Warmed::Done => {}
                Warmed::UnderWay | Warmed::NotYet => break,
                Warmed::NoRoom => {
                    self.forget();
                    continue;
                }
            }
            if let Wanted::Pin(action) = wanted {
                // What cannot be locked now is told by the tick that tries again.
                match store.pin_unless(action.expert, &mut is_due) {
                    Ok(true) => self.pinned.push(*action),
                    Ok(false) if is_due() => break,
                    _ => {}
                }
            }
            self.wanted.next();
        }
        true
    }
}
