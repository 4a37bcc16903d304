//! What a controller is told each tick. Every part may be absent: a sensor that does not exist on
//! this machine, or failed this time, is `None` and never a zero.

use crate::ids::Moment;
use serde::{Deserialize, Serialize};

/// Host memory, from `/proc/meminfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostMemory {
    /// `MemTotal`, bytes.
    pub total_bytes: u64,
    /// `MemAvailable`, bytes. Our own locked pages have left it.
    pub available_bytes: u64,
}

/// The tightest cgroup level above us that has a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupMemory {
    /// The limit of that level, bytes (`memory.max`, or `memory.high` when lower, or v1's
    /// `limit_in_bytes`).
    pub limit_bytes: u64,
    /// Limit - usage + reclaimable file pages of that level, bytes. Our own locked pages are usage.
    pub available_bytes: u64,
}

/// Memory-pressure totals. All are running totals; controllers take differences.
///
/// The whole is `None` in [`Observation`] when neither PSI nor the reclaim counters can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Pressure {
    /// PSI `some` of memory: microseconds in which at least one task stalled on memory.
    pub some_total_us: u64,
    /// PSI `full` of memory, microseconds.
    pub full_total_us: u64,
    /// Pages reclaimed directly by allocating tasks (`pgsteal_direct`), if readable. It confirms
    /// that a stall comes from shortage and not from our own refaults.
    pub direct_reclaim_pages: Option<u64>,
    /// PSI cannot be read (kernel without it, container): both totals above mean nothing and only
    /// the reclaim counter counts.
    pub psi_absent: bool,
}

/// What the system allows us to lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockLimits {
    /// `RLIMIT_MEMLOCK`, bytes; `None` when unlimited or when `CAP_IPC_LOCK` is held.
    pub memlock_bytes: Option<u64>,
    /// Bytes of dense weights and others that we hold locked besides experts.
    pub locked_elsewhere_bytes: u64,
    /// Locked bytes of experts that the map-count budget still permits (each locked run may split a
    /// mapping in up to three); `None` when it cannot bind.
    pub map_budget_bytes: Option<u64>,
}

/// Engine totals. All are running totals since load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EngineTotals {
    /// Tokens decoded one batch row at a time.
    pub decode_tokens: u64,
    /// Tokens that went through prefill batches.
    pub prefill_tokens: u64,
    /// Time spent inside decode calls, ns.
    pub decode_ns: u64,
    /// Time the engine waited for expert bytes, ns (definition per store in docs/control.md).
    pub stall_ns: u64,
    /// Routed experts that were resident when routed.
    pub hits: u64,
    /// Routed experts that were not.
    pub misses: u64,
    /// Bytes that fetches asked the disk for.
    pub fetch_bytes: u64,
}

/// Major faults of our process, running totals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Faults {
    /// All major faults (`majflt` of `/proc/self/stat`).
    pub major: u64,
}

/// Where an expert's bytes are, as the store's books say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum Residence {
    /// Not known to be in memory.
    #[default]
    Absent = 0,
    /// In memory, not locked.
    Transit = 1,
    /// Locked.
    Pinned = 2,
}

/// What the store holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Bytes of locked experts.
    pub pinned_bytes: u64,
    /// Bytes of resident experts that are not locked.
    pub transit_bytes: u64,
    /// Bytes that the last lock calls failed to lock (EAGAIN, ENOMEM, EPERM) since the last tick.
    pub lock_shortfall_bytes: u64,
}

/// One tick's view of the plant. Slices are indexed by [`crate::ExpertId`].
#[derive(Clone, Copy, Debug)]
pub struct Observation<'a> {
    /// When the sensors were read.
    pub now: Moment,
    /// `/proc/meminfo`.
    pub host: Option<HostMemory>,
    /// Tightest cgroup.
    pub cgroup: Option<CgroupMemory>,
    /// PSI and reclaim counters.
    pub pressure: Option<Pressure>,
    /// Lock limits.
    pub locks: LockLimits,
    /// Process fault counters.
    pub faults: Option<Faults>,
    /// Engine totals; `stall` inside them is meaningful only when `stall_known`.
    pub engine: Option<EngineTotals>,
    /// Whether `engine.stall_ns` is measured (the tap is on).
    pub stall_known: bool,
    /// Cumulative decode routings per expert; `None` when the tap is off. Wraps around.
    pub decode_counts: Option<&'a [u32]>,
    /// Cumulative prefill routings per expert (once per batch in which the expert was routed).
    pub prefill_counts: Option<&'a [u32]>,
    /// Residence per expert.
    pub residence: &'a [Residence],
    /// Bytes held.
    pub held: Held,
    /// Experts that are stable in VRAM, so that they need not be locked in RAM as well
    /// ([`crate::vram::Tracker::covered`]); `None` where there is no such tier.
    pub covered: Option<&'a [bool]>,
}
