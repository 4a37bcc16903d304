//! The machine's limits at a glance, for `inspect` and `doctor`.

use std::path::{Path, PathBuf};

use hotpin_controllers::Moment;
use serde::Serialize;

use super::degraded::{Degraded, DegradedReason};
use super::live::Sensors;
use super::roots::Roots;

/// What the machine gives this process. Unknown values are `None`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SystemSummary {
    /// Physical memory, bytes.
    pub total_bytes: Option<u64>,
    /// Memory that new work could use without swapping, bytes, host-wide.
    pub available_bytes: Option<u64>,
    /// Memory locked by all processes, bytes.
    pub mlocked_bytes: Option<u64>,
    /// Swap space, bytes.
    pub swap_total_bytes: Option<u64>,
    /// Limit of the tightest cgroup level, bytes; `None` when no level has a limit.
    pub cgroup_limit_bytes: Option<u64>,
    /// What that level still has, bytes.
    pub cgroup_available_bytes: Option<u64>,
    /// Directory of that level.
    pub cgroup_path: Option<PathBuf>,
    /// Bytes that we may lock; `None` when unlimited or unknown.
    pub memlock_bytes: Option<u64>,
    /// `CAP_IPC_LOCK` is held and counts.
    pub ipc_lock: bool,
    /// Pressure stall information can be read.
    pub psi: bool,
    /// `vm.max_map_count`, mappings.
    pub max_map_count: Option<u64>,
    /// What cannot be told, and why.
    pub degraded: Vec<DegradedReason>,
}

impl SystemSummary {
    /// Bytes that this process could use: the lesser of the host's available memory and the
    /// tightest cgroup's; `None` when neither is known.
    #[must_use]
    pub fn usable_bytes(&self) -> Option<u64> {
        self.available_bytes
            .into_iter()
            .chain(self.cgroup_available_bytes)
            .min()
    }
}

/// Reads the machine's limits once.
#[must_use]
pub fn system_summary(roots: &Roots) -> SystemSummary {
    let now = Moment::default();
    let mut sensors = Sensors::open(roots, now);
    let sample = sensors.sample(now);
    let meminfo = sensors.meminfo().ok();
    SystemSummary {
        total_bytes: sample.host.map(|h| h.total_bytes),
        available_bytes: sample.host.map(|h| h.available_bytes),
        mlocked_bytes: meminfo.and_then(|m| m.mlocked_bytes),
        swap_total_bytes: meminfo.and_then(|m| m.swap_total_bytes),
        cgroup_limit_bytes: sample.cgroup.map(|c| c.limit_bytes),
        cgroup_available_bytes: sample.cgroup.map(|c| c.available_bytes),
        cgroup_path: sensors.binding_cgroup().map(Path::to_owned),
        memlock_bytes: sample.locks.memlock_bytes(),
        ipc_lock: sample.locks.ipc_lock,
        psi: !sample.degraded.contains(Degraded::NoPsi),
        max_map_count: sample.locks.max_map_count,
        degraded: sensors.degraded(),
    }
}
