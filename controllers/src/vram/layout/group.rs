//! Layers that share banks, and what they take at a size.

use serde::{Deserialize, Serialize};

/// Layers that share banks and slots.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::vram) struct Group {
    pub device: usize,
    pub layers: Vec<usize>,
    pub experts: u32,
    /// Bytes of an expert in each tensor.
    pub tensor_bytes: Vec<u64>,
    pub host_bytes: u64,
    /// Most slots that its device takes, where that was probed.
    pub bound_slots: Option<u32>,
}

impl Group {
    /// Bytes of one expert.
    pub fn expert_bytes(&self) -> u64 {
        self.tensor_bytes.iter().sum()
    }

    /// Slots that hold every expert.
    pub fn most_slots(&self) -> u64 {
        self.layers.len() as u64 * u64::from(self.experts)
    }

    /// What the banks of so many slots take, bytes; one slot more is padding.
    pub fn banks_bytes(&self, slots: u64, alignment_bytes: u64) -> u64 {
        self.tensor_bytes
            .iter()
            .map(|&bytes| {
                let units = bytes.saturating_mul(slots + 1).div_ceil(alignment_bytes);
                units.saturating_mul(alignment_bytes)
            })
            .fold(0, u64::saturating_add)
    }

    /// What the largest bank takes, bytes.
    pub fn largest_bank_bytes(&self, slots: u64) -> u64 {
        let widest = self.tensor_bytes.iter().copied().max().unwrap_or(0);
        widest.saturating_mul(slots + 1)
    }

    /// Most slots that a budget holds.
    pub fn slots_in(&self, budget_bytes: u64, alignment_bytes: u64) -> u64 {
        let fits = |slots| self.banks_bytes(slots, alignment_bytes) <= budget_bytes;
        if !fits(1) {
            return 0;
        }
        // Padding takes a little from what division gives.
        let mut slots = (budget_bytes / self.expert_bytes())
            .saturating_sub(1)
            .clamp(1, self.most_slots());
        while !fits(slots) {
            slots -= 1;
        }
        slots
    }
}

/// A group at a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupPlan {
    /// Device that has its banks.
    pub device: usize,
    /// Layers in it.
    pub layers: usize,
    /// Slots for experts, over all of its layers; 0 when the group is not cached.
    pub slots: u32,
    /// Experts of all of its layers.
    pub experts: u32,
    /// Bytes of its largest bank.
    pub largest_bank_bytes: u64,
    /// Bytes of all of its banks.
    pub bytes: u64,
}

/// A pool at a size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolPlan {
    /// Its groups.
    pub groups: Vec<GroupPlan>,
    /// Bytes that each device allocates.
    pub device_bytes: Vec<u64>,
}
