//! When the dense weights may be locked. They come before any expert, but not before everybody else:
//! locked weights in a group that is full are what the kernel's killer ends.

use crate::sensors::Sample;
use crate::store::{DenseLock, ExpertStore, program};
use hotpin_controllers::config::CapacityConfig;

/// The dense weights of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenseWeights {
    /// Their size.
    pub bytes: u64,
    /// What of them is locked.
    pub locked_bytes: u64,
    /// The system does not let us lock them, so that it is not tried again.
    pub refused: bool,
    /// What is left to others on the host.
    pub host_reserve_bytes: u64,
    /// What is left to others in a cgroup.
    pub cgroup_reserve_bytes: u64,
}

impl DenseWeights {
    /// Weights of `bytes` that are not locked yet.
    #[must_use]
    pub fn new(bytes: u64, capacity: &CapacityConfig) -> Self {
        Self {
            bytes,
            locked_bytes: 0,
            refused: false,
            host_reserve_bytes: capacity.host_reserve_bytes,
            cgroup_reserve_bytes: capacity.cgroup_reserve_bytes,
        }
    }

    /// Whether they fit beside the reserves, with what of the program is to be locked with them; true where nothing
    /// is known of memory.
    #[must_use]
    pub fn fit(&self, sample: &Sample) -> bool {
        let usable = sample.usable_bytes(self.host_reserve_bytes, self.cgroup_reserve_bytes);
        usable.is_none_or(|usable| usable >= self.bytes + program::unlocked_bytes())
    }

    /// What is locked besides experts: these weights and the program.
    pub(super) fn locked_with_program_bytes(&self) -> u64 {
        self.locked_bytes + program::locked_bytes()
    }

    /// Takes in what came of locking.
    pub fn note(&mut self, outcome: &DenseLock) {
        match outcome {
            DenseLock::Locked(bytes) => self.locked_bytes = *bytes,
            DenseLock::Skipped => self.locked_bytes = 0,
            DenseLock::Failed(_) => {
                self.locked_bytes = 0;
                self.refused = true;
            }
        }
    }

    /// Memory that experts must not take, since these weights are to be locked there.
    pub(super) fn claim_bytes(&self) -> u64 {
        if self.refused || self.locked_bytes > 0 {
            0
        } else {
            self.bytes + program::unlocked_bytes()
        }
    }

    /// Whether they and the program have to be locked or unlocked now: unlocked when all experts were given back and
    /// half of a reserve is still missing, locked again once they fit and experts would follow.
    pub(super) fn change(
        &self,
        sample: &Sample,
        capacity_bytes: u64,
        pinned_bytes: u64,
    ) -> Option<bool> {
        if pinned_bytes > 0 {
            return None;
        }
        if self.locked_with_program_bytes() > 0 && capacity_bytes == 0 {
            let (host, cgroup) = (self.host_reserve_bytes / 2, self.cgroup_reserve_bytes / 2);
            if sample.usable_bytes(host, cgroup) == Some(0) {
                return Some(false);
            }
        }
        if self.locked_bytes > 0 {
            return None;
        }
        (!self.refused && capacity_bytes > 0 && self.fit(sample)).then_some(true)
    }

    /// Locks or unlocks them, and the program with them.
    pub(super) fn set(&mut self, store: &dyn ExpertStore, lock: bool) {
        let outcome = store.set_dense_locked(lock);
        // With them go the pages of the program, the last that is locked.
        if !matches!(outcome, DenseLock::Failed(_)) {
            program::set_locked(lock);
        }
        match &outcome {
            DenseLock::Locked(_) => {
                tracing::warn!(
                    "dense weights and program are locked again: there is room for them"
                );
            }
            DenseLock::Skipped => tracing::warn!(
                "neither dense weights nor the program are locked any longer: others need the memory, and no expert is held"
            ),
            DenseLock::Failed(error) => {
                tracing::warn!("dense weights could not be locked again: {error}");
            }
        }
        self.note(&outcome);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sensors::{Roots, Sensors};
    use hotpin_controllers::{CgroupMemory, HostMemory, Moment};

    const MIB: u64 = 1 << 20;

    fn sample(host_mib: u64, cgroup_mib: Option<u64>) -> Sample {
        let nowhere = Roots::under(std::path::Path::new("/nonexistent"));
        let mut sample = Sensors::open(&nowhere, Moment::default()).sample(Moment::default());
        sample.host = Some(HostMemory {
            total_bytes: 1 << 40,
            available_bytes: host_mib * MIB,
        });
        sample.cgroup = cgroup_mib.map(|mib| CgroupMemory {
            limit_bytes: 1 << 40,
            available_bytes: mib * MIB,
        });
        sample
    }

    /// 100 MiB of weights; 1 GiB is left to the host, 64 MiB to a cgroup.
    fn weights() -> DenseWeights {
        DenseWeights::new(100 * MIB, &CapacityConfig::default())
    }

    #[test]
    fn they_fit_where_both_reserves_stay_whole() {
        assert!(weights().fit(&sample(1124, None)));
        assert!(!weights().fit(&sample(1123, None)));
        assert!(weights().fit(&sample(5000, Some(164))));
        assert!(!weights().fit(&sample(5000, Some(163))));
        let mut unknown = sample(0, None);
        unknown.host = None;
        assert!(weights().fit(&unknown));
    }

    #[test]
    fn they_go_last_and_come_back_first() {
        let mut weights = weights();
        weights.note(&DenseLock::Locked(100 * MIB));
        assert_eq!(weights.claim_bytes(), 0);
        let short = sample(5000, Some(31));
        assert_eq!(weights.change(&short, 0, 0), Some(false));
        assert_eq!(weights.change(&short, 0, MIB), None, "experts go first");
        assert_eq!(weights.change(&short, MIB, 0), None);
        let enough = sample(5000, Some(33));
        assert_eq!(weights.change(&enough, 0, 0), None, "half of the reserve");
        weights.note(&DenseLock::Skipped);
        assert_eq!(weights.claim_bytes(), 100 * MIB);
        assert_eq!(weights.change(&enough, MIB, 0), None);
        let room = sample(5000, Some(165));
        assert_eq!(weights.change(&room, 0, 0), None);
        assert_eq!(weights.change(&room, MIB, 0), Some(true));
    }

    #[test]
    fn what_the_system_refused_is_not_tried_again() {
        let mut weights = weights();
        weights.note(&DenseLock::Failed(crate::store::StoreError::Open {
            cause: "no".into(),
        }));
        assert_eq!(weights.change(&sample(9000, None), MIB, 0), None);
        assert_eq!(weights.claim_bytes(), 0, "the page cache has them");
    }
}
