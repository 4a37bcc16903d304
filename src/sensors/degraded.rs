//! Named states of sensors that are absent, unreadable or malformed.

use serde::Serialize;

use super::error::SensorError;

/// One thing that the sensors cannot tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Degraded {
    /// No host memory.
    NoMeminfo,
    /// No reclaim counters.
    NoVmstat,
    /// No pressure stall information.
    NoPsi,
    /// No cgroup that accounts memory can be seen.
    NoCgroup,
    /// A cgroup level above us has memory files that cannot be read.
    CgroupLevelSkipped,
    /// A cgroup namespace hides levels between the mount and us.
    CgroupLevelHidden,
    /// No fault counters.
    NoStat,
    /// No read bytes.
    NoSelfIo,
    /// No capabilities and no locked bytes.
    NoStatus,
    /// No lock limit.
    NoLockLimit,
    /// No limit of mappings.
    NoMaxMapCount,
}

impl Degraded {
    /// Every state, in declaration order.
    pub const ALL: [Self; 11] = [
        Self::NoMeminfo,
        Self::NoVmstat,
        Self::NoPsi,
        Self::NoCgroup,
        Self::CgroupLevelSkipped,
        Self::CgroupLevelHidden,
        Self::NoStat,
        Self::NoSelfIo,
        Self::NoStatus,
        Self::NoLockLimit,
        Self::NoMaxMapCount,
    ];

    /// The name in metrics, logs and `--json`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoMeminfo => "no_meminfo",
            Self::NoVmstat => "no_vmstat",
            Self::NoPsi => "no_psi",
            Self::NoCgroup => "no_cgroup",
            Self::CgroupLevelSkipped => "cgroup_level_skipped",
            Self::CgroupLevelHidden => "cgroup_level_hidden",
            Self::NoStat => "no_stat",
            Self::NoSelfIo => "no_self_io",
            Self::NoStatus => "no_status",
            Self::NoLockLimit => "no_lock_limit",
            Self::NoMaxMapCount => "no_max_map_count",
        }
    }

    /// What it means for the user, in one sentence.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::NoMeminfo => {
                "The host's available memory is unknown: nothing grows if it was known before, and nothing is bounded by it if it never was."
            }
            Self::NoVmstat => {
                "Reclaim on the host is unseen, so stalls are confirmed by headroom alone."
            }
            Self::NoPsi => {
                "Memory stalls of other programs are unseen; headroom and direct reclaim shrink the pinned set."
            }
            Self::NoCgroup => {
                "No cgroup memory limit can be seen; only the host's memory bounds the pinned set."
            }
            Self::CgroupLevelSkipped => "A limit on that cgroup level, if any, is not respected.",
            Self::CgroupLevelHidden => {
                "Limits on the hidden cgroup levels, if any, are not respected."
            }
            Self::NoStat => "Major faults are unseen.",
            Self::NoSelfIo => "Bytes read from disk are unknown.",
            Self::NoStatus => "Lock privilege is unknown, so the lock limit is taken to apply.",
            Self::NoLockLimit => "The lock limit is unknown and shows only when locking fails.",
            Self::NoMaxMapCount => {
                "The limit of mappings is unknown and shows only when locking fails."
            }
        }
    }

    const fn bit(self) -> u16 {
        1 << self as u8
    }
}

/// A set of [`Degraded`] states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DegradedSet(u16);

impl DegradedSet {
    /// Whether `state` is in the set.
    #[must_use]
    pub const fn contains(self, state: Degraded) -> bool {
        self.0 & state.bit() != 0
    }

    /// Whether nothing is degraded.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The states in the set, in declaration order.
    pub fn iter(self) -> impl Iterator<Item = Degraded> {
        Degraded::ALL
            .into_iter()
            .filter(move |&state| self.contains(state))
    }

    /// The states of `self` that are not in `earlier`.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0 & !earlier.0)
    }
}

/// A state with the reason that it was entered for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DegradedReason {
    /// The state.
    pub state: Degraded,
    /// The first failure since the state was entered: path, line, item.
    pub reason: String,
}

/// The states now, each with its reason.
#[derive(Debug, Default)]
pub(crate) struct States {
    set: DegradedSet,
    reasons: [String; Degraded::ALL.len()],
}

impl States {
    pub(crate) fn set(&self) -> DegradedSet {
        self.set
    }

    pub(crate) fn reasons(&self) -> Vec<DegradedReason> {
        let reason = |state: Degraded| self.reasons[state as usize].clone();
        self.set
            .iter()
            .map(|state| DegradedReason {
                state,
                reason: reason(state),
            })
            .collect()
    }

    /// Enters or leaves `state`. The reason is formatted only on entry: a sensor that keeps failing
    /// costs nothing more each tick.
    pub(crate) fn put(&mut self, state: Degraded, reason: Option<impl std::fmt::Display>) {
        match reason {
            None => self.set.0 &= !state.bit(),
            Some(_) if self.set.contains(state) => {}
            Some(reason) => {
                self.set.0 |= state.bit();
                self.reasons[state as usize] = reason.to_string();
            }
        }
    }

    /// Passes a reading through, entering `state` when it failed and leaving it when not.
    pub(crate) fn reading<T>(
        &mut self,
        state: Degraded,
        result: Result<T, SensorError>,
    ) -> Option<T> {
        match result {
            Ok(value) => {
                self.put(state, None::<SensorError>);
                Some(value)
            }
            Err(error) => {
                self.put(state, Some(error));
                None
            }
        }
    }
}
