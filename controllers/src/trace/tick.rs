//! One tick of the control loop, as recorded.

use crate::decision::Decision;
use crate::ids::Moment;
use crate::observe::{
    CgroupMemory, EngineTotals, Faults, Held, HostMemory, LockLimits, Observation, Pressure,
};
use serde::{Deserialize, Serialize};

/// What the controllers saw and decided. Counts and residence of single experts are left out: the
/// tokens of the trace have the routing, and the decisions what was locked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tick {
    /// When the sensors were read.
    pub now: Moment,
    /// `/proc/meminfo`.
    pub host: Option<HostMemory>,
    /// The tightest cgroup limit.
    pub cgroup: Option<CgroupMemory>,
    /// Pressure totals.
    pub pressure: Option<Pressure>,
    /// What may be locked.
    pub locks: LockLimits,
    /// Major faults.
    pub faults: Option<Faults>,
    /// Engine totals.
    pub engine: Option<EngineTotals>,
    /// What the store held.
    pub held: Held,
    /// What was decided.
    pub decision: Decision,
}

impl Tick {
    /// What is recorded of one tick.
    #[must_use]
    pub fn new(observation: &Observation<'_>, decision: &Decision) -> Self {
        Self {
            now: observation.now,
            host: observation.host,
            cgroup: observation.cgroup,
            pressure: observation.pressure,
            locks: observation.locks,
            faults: observation.faults,
            engine: observation.engine,
            held: observation.held,
            decision: decision.clone(),
        }
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        // Plain structs with string keys cannot fail to serialise; an empty body would be refused on
        // reading.
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(super) fn from_json(json: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(json)
    }
}
