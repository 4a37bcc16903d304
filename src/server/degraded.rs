//! What this session has to do without, by name: sensors, store, control.

use super::app::Ready;
use crate::governor::Status;
use crate::sensors::Degraded;
use crate::store::Limitation;
use serde::Serialize;
use std::collections::BTreeMap;

/// The loop has ended before its time.
const LOOP_ENDED: &str = "loop_ended";
/// A tick does not end.
const TICK_STUCK: &str = "tick_stuck";

/// A state that is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InForce {
    /// Its name.
    pub state: &'static str,
    /// Why, in words.
    pub reason: String,
}

/// The states that are in force now.
pub(super) fn in_force(ready: &Ready, status: Option<&Status>) -> Vec<InForce> {
    let of_store = ready.limitations.iter().map(|(limitation, said)| InForce {
        state: limitation.name(),
        reason: said.clone(),
    });
    let sensors = status.into_iter().flat_map(|status| &status.degraded);
    let of_sensors = sensors.map(|degraded| InForce {
        state: degraded.state.name(),
        reason: degraded.reason.clone(),
    });
    let of_loop = [
        (LOOP_ENDED, status.and_then(|s| s.failed.as_ref())),
        (TICK_STUCK, status.and_then(|s| s.stuck.as_ref())),
    ];
    let of_loop = of_loop.into_iter().filter_map(|(state, reason)| {
        let reason = reason?.clone();
        Some(InForce { state, reason })
    });
    of_store.chain(of_sensors).chain(of_loop).collect()
}

/// For every state whether it is in force.
pub(super) fn flags(in_force: &[InForce]) -> BTreeMap<&'static str, bool> {
    let sensors = Degraded::ALL.into_iter().map(Degraded::name);
    let store = Limitation::ALL.into_iter().map(Limitation::name);
    let all = sensors.chain(store).chain([LOOP_ENDED, TICK_STUCK]);
    let is = |name: &str| in_force.iter().any(|state| state.state == name);
    all.map(|name| (name, is(name))).collect()
}
