//! What a controller decides each tick, always with the rule that decided it.

use crate::ids::ExpertId;
use serde::{Deserialize, Serialize};

/// The upper bounds on capacity, of which the lowest binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ceiling {
    /// All experts fit: there is nothing more to hold.
    Model,
    /// The user's `--capacity`.
    Configured,
    /// Host memory: available + held - reserve.
    Host,
    /// Cgroup: available + held - reserve.
    Cgroup,
    /// The PID on memory pressure.
    Pressure,
    /// The value loop: more bytes would buy too little stall.
    Value,
}

impl Ceiling {
    /// All ceilings, in the order of [`Decision::ceilings`].
    pub const ALL: [Self; 6] = [
        Self::Model,
        Self::Configured,
        Self::Host,
        Self::Cgroup,
        Self::Pressure,
        Self::Value,
    ];

    /// The label used in metrics and journals.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Configured => "configured",
            Self::Host => "host",
            Self::Cgroup => "cgroup",
            Self::Pressure => "pressure",
            Self::Value => "value",
        }
    }
}

/// What limits the locked part of the capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PinLimit {
    /// The share of capacity that is not left to transit.
    Share,
    /// `RLIMIT_MEMLOCK`.
    Memlock,
    /// `vm.max_map_count`.
    Maps,
    /// Lock calls failed; the budget is what is locked now.
    LockFailures,
    /// Routing is not distinguishable from uniform, so no expert deserves a pin.
    Uniform,
    /// The policy pins nothing.
    Policy,
    /// Every expert fits: all may be locked.
    Model,
}

/// What moved the pressure ceiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PressureCause {
    /// PSI stall, confirmed by low headroom.
    StallLowHeadroom,
    /// PSI stall, confirmed by direct reclaim beyond our own reads.
    StallReclaim,
    /// Direct reclaim alone: PSI is absent.
    Reclaim,
    /// Major faults on experts that the books call resident.
    Faults,
}

/// Why an expert is pinned or unpinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// In the starting profile.
    Profile,
    /// There was room, and it had the best score.
    Fill,
    /// Its score beat that of a pinned expert by the margin, long enough to pay back.
    Swap,
    /// It was swapped out for a better one.
    Swapped,
    /// It ranks below what transit evicts: its topic is over.
    Stale,
    /// The pin budget shrank below what is pinned.
    Shrink,
    /// Everything fits, so everything is locked.
    LockAll,
    /// Recently used (policy `lru`).
    Recent,
    /// It is stable in VRAM, and RAM is better used for another.
    InVram,
}

/// One change of the pinned set.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Action {
    /// The expert.
    pub expert: ExpertId,
    /// The rule that chose it.
    pub reason: Reason,
    /// Its score at that moment (expected decode routings per token, see docs/control.md).
    pub score: f32,
}

/// One tick's decision. Reused between ticks; [`Decision::clear`] keeps the allocations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Byte budget for pinned + transit.
    pub capacity_bytes: u64,
    /// The ceiling that set it.
    pub binding: Ceiling,
    /// Every ceiling in the order of [`Ceiling::ALL`], bytes; `None` when its sensor is absent.
    pub ceilings: [Option<u64>; 6],
    /// Byte budget for pinned experts, at most `capacity_bytes`.
    pub pin_budget_bytes: u64,
    /// What set the pin budget.
    pub pin_limit: PinLimit,
    /// Experts to unlock, worst first. They stay resident as transit until evicted.
    pub unpin: Vec<Action>,
    /// Experts to lock, best first; not necessarily resident.
    pub pin: Vec<Action>,
    /// Drift was detected on this tick.
    pub drift: bool,
    /// What holds the pressure ceiling down, while it is below the others.
    pub pressure_cause: Option<PressureCause>,
}

impl Default for Decision {
    fn default() -> Self {
        Self {
            capacity_bytes: 0,
            binding: Ceiling::Model,
            ceilings: [None; 6],
            pin_budget_bytes: 0,
            pin_limit: PinLimit::Share,
            unpin: Vec::new(),
            pin: Vec::new(),
            drift: false,
            pressure_cause: None,
        }
    }
}

impl Decision {
    /// Resets everything and keeps the allocations.
    pub fn clear(&mut self) {
        let (mut unpin, mut pin) = (
            std::mem::take(&mut self.unpin),
            std::mem::take(&mut self.pin),
        );
        unpin.clear();
        pin.clear();
        *self = Self {
            unpin,
            pin,
            ..Self::default()
        };
    }
}
