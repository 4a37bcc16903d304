//! What the law decides, always with the rule that decided it.

use serde::{Deserialize, Serialize};

/// Where experts lie and are computed while batches are small.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrangement {
    /// In host memory, computed on the processor; no pool (`moe_cache_size` 0).
    #[default]
    Cpu,
    /// In host memory, and a pool in VRAM holds what was used last and most.
    Reload {
        /// `moe_cache_size`, bytes.
        pool_bytes: u64,
    },
    /// The experts of some whole layers lie in VRAM, the others are computed on the processor: those
    /// of [`super::PoolLayout::static_layers`] of so many bytes. No pool.
    Static {
        /// Bytes given to experts, over all devices.
        bytes: u64,
    },
}

impl Arrangement {
    /// Its name in metrics and journals.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Reload { .. } => "reload",
            Self::Static { .. } => "static",
        }
    }

    /// Bytes given to experts in VRAM.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Cpu => 0,
            Self::Reload { pool_bytes } => pool_bytes,
            Self::Static { bytes } => bytes,
        }
    }

    /// What it takes to come from here to there; `None` when they are equal.
    #[must_use]
    pub fn change_to(self, other: Self) -> Option<ChangeKind> {
        let is_static = |arrangement| matches!(arrangement, Self::Static { .. });
        if self == other {
            None
        } else if is_static(self) || is_static(other) {
            Some(ChangeKind::Reload)
        } else {
            Some(ChangeKind::Recreate)
        }
    }
}

/// What has to be made anew for a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// The context; sequences are saved and restored.
    Recreate,
    /// The model and the context: where experts lie is a parameter of the model.
    Reload,
}

/// A change that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// What has to be made anew.
    pub kind: ChangeKind,
    /// It must not wait for the end of a request, only for that of a token: others need the memory.
    pub urgent: bool,
    /// Old and new fit side by side, so the old one may stay until the new one works. Otherwise it
    /// has to go first.
    pub both_fit: bool,
}

/// The upper bounds on bytes of experts in VRAM, of which the lowest binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VramCeiling {
    /// Every expert has its place.
    Model,
    /// The user's own.
    Configured,
    /// The largest bank that a device bears.
    Bank,
    /// Free memory of the devices, and what is held there, less the reserve.
    Memory,
    /// A size that could not be allocated lately.
    Failed,
    /// More would save too little.
    Value,
}

impl VramCeiling {
    /// All of them, in the order of [`VramDecision::ceilings`].
    pub const ALL: [Self; 6] = [
        Self::Model,
        Self::Configured,
        Self::Bank,
        Self::Memory,
        Self::Failed,
        Self::Value,
    ];

    /// Its name in metrics and journals.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Configured => "configured",
            Self::Bank => "bank",
            Self::Memory => "memory",
            Self::Failed => "failed",
            Self::Value => "value",
        }
    }
}

/// The rule that chose the arrangement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VramRule {
    /// The first tick: as large a pool as the ceilings permit.
    Start,
    /// Nothing is to be changed.
    Hold,
    /// Others need the memory.
    Yield,
    /// There is room for more, and it pays.
    Grow,
    /// A smaller pool hits nearly as often.
    Spare,
    /// The pool is the fastest arrangement.
    Reload,
    /// Whole layers in VRAM are the fastest.
    Static,
    /// The processor alone is the fastest.
    Cpu,
    /// The processor's time is not known and may be less: it is tried for a few tokens.
    Trial,
    /// No size that the ceilings permit holds a token's experts.
    TooSmall,
    /// Another arrangement is faster, but not by the margin.
    Margin,
    /// It is faster by the margin, but not yet for long enough.
    Confirm,
    /// A change was made a short while ago, or memory was given up.
    Dwell,
    /// The change would cost more than it saves within the payback time.
    Payback,
    /// What the change costs was never measured.
    Unmeasured,
    /// Old and new fit neither side by side nor one after the other, or host memory does not hold the
    /// saved sequences.
    NoRoom,
    /// A sensor of device memory went missing: no growth on its silence.
    Blind,
    /// It could not be made; the next try waits.
    Failed,
}

impl VramRule {
    /// Its name in metrics and journals.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Hold => "hold",
            Self::Yield => "yield",
            Self::Grow => "grow",
            Self::Spare => "spare",
            Self::Reload => "reload",
            Self::Static => "static",
            Self::Cpu => "cpu",
            Self::Trial => "trial",
            Self::TooSmall => "too_small",
            Self::Margin => "margin",
            Self::Confirm => "confirm",
            Self::Dwell => "dwell",
            Self::Payback => "payback",
            Self::Unmeasured => "unmeasured",
            Self::NoRoom => "no_room",
            Self::Blind => "blind",
            Self::Failed => "failed",
        }
    }
}

/// What a decoded token takes under each arrangement with the present work, ns; `None` where it is
/// not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Expected {
    /// Now, as measured.
    pub present_ns: Option<f64>,
    /// With the pool at the lowest ceiling.
    pub reload_ns: Option<f64>,
    /// With whole layers of that many bytes.
    pub static_ns: Option<f64>,
    /// On the processor.
    pub cpu_ns: Option<f64>,
}

/// One tick's decision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct VramDecision {
    /// What is to be.
    pub arrangement: Arrangement,
    /// What has to be done for that; `None` when it is so already.
    pub change: Option<Change>,
    /// The rule that chose it, or that keeps something better from being chosen.
    pub rule: VramRule,
    /// Lowest ceiling, bytes.
    pub capacity_bytes: u64,
    /// Which one that is.
    pub binding: VramCeiling,
    /// Every ceiling in the order of [`VramCeiling::ALL`], bytes; `None` when what it is made from
    /// is not known.
    pub ceilings: [Option<u64>; 6],
    /// Times that were compared.
    pub expected: Expected,
    /// Experts that are stable in VRAM need not be locked in RAM. False while a change is due, so that
    /// they are taken back before the pool goes.
    pub cover: bool,
}

impl Default for VramDecision {
    fn default() -> Self {
        Self {
            arrangement: Arrangement::Cpu,
            change: None,
            rule: VramRule::Hold,
            capacity_bytes: 0,
            binding: VramCeiling::Model,
            ceilings: [None; 6],
            expected: Expected::default(),
            cover: false,
        }
    }
}
