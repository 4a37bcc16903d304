//! Sizes of pools at which something begins to hold: found by halving, since slots only grow with them.

use super::{GroupPlan, PoolLayout, PoolPlan};

impl PoolLayout {
    /// The least size that every group gets slots from, so that no layer is left out.
    #[must_use]
    pub fn least_bytes(&self) -> u64 {
        self.least_where(|plan| self.each(plan, |group| group.slots > 0))
    }

    /// The least size that holds every expert; more is never used.
    #[must_use]
    pub fn full_bytes(&self) -> u64 {
        self.least_where(|plan| self.each(plan, |group| group.slots == group.experts))
    }

    /// The largest size, at most [`Self::full_bytes`], at which every bank is within its device's
    /// limit; 0 when no pool is.
    #[must_use]
    pub fn largest_bytes(&self) -> u64 {
        self.largest_where(|plan| self.banks_fit(plan))
    }

    /// The largest size, at most [`Self::full_bytes`], whose part fits on every device; 0 when no pool
    /// does. `budgets` are bytes by device; `None` sets no bound.
    #[must_use]
    pub fn largest_within(&self, budgets: &[Option<u64>]) -> u64 {
        self.largest_where(|plan| {
            plan.device_bytes
                .iter()
                .enumerate()
                .all(|(device, &bytes)| match budgets.get(device) {
                    Some(Some(budget_bytes)) => bytes <= *budget_bytes,
                    _ => true,
                })
        })
    }

    /// The most bytes that [`Self::static_layers`] may be given so that its layers fit on every device,
    /// at most those of all experts. `budgets` are bytes by device; `None` sets no bound.
    #[must_use]
    pub fn largest_static_within(&self, budgets: &[Option<u64>]) -> u64 {
        let bounds =
            self.weights
                .iter()
                .enumerate()
                .map(|(device, weight)| match budgets.get(device) {
                    Some(Some(bytes)) if *weight > 0.0 => *bytes as f64 * self.weight_sum / weight,
                    _ => f64::INFINITY,
                });
        let most_bytes = self.host_bytes();
        crate::num::to_bytes(bounds.fold(f64::INFINITY, f64::min)).min(most_bytes)
    }

    /// Whether all groups of devices that get a part of a pool are so.
    fn each(&self, plan: &PoolPlan, is_so: impl Fn(&GroupPlan) -> bool) -> bool {
        plan.groups
            .iter()
            .all(|group| self.weights[group.device] <= 0.0 || is_so(group))
    }

    fn banks_fit(&self, plan: &PoolPlan) -> bool {
        plan.groups.iter().zip(&self.groups).all(|(plan, group)| {
            let most_bytes = self.devices[plan.device].most_bank_bytes;
            most_bytes.is_none_or(|most| plan.largest_bank_bytes <= most)
                && group.bound_slots.is_none_or(|most| plan.slots <= most)
        })
    }

    /// A size at which everything has slots for certain.
    fn more_than_full_bytes(&self) -> u64 {
        let needs = self.groups.iter().map(|group| {
            let alignment_bytes = self.devices[group.device].alignment_bytes;
            let bytes = group.banks_bytes(group.most_slots(), alignment_bytes) as f64;
            let share = self.weights[group.device] / self.weight_sum * group.host_bytes as f64
                / self.device_host_bytes[group.device] as f64;
            // What gets nothing cannot be filled.
            if share > 0.0 { bytes / share } else { 0.0 }
        });
        let bytes = needs.fold(0.0, f64::max);
        crate::num::to_bytes(bytes * 1.001)
            .saturating_add(1)
            .min(1 << 62)
    }

    /// The least size for which `holds`, which must stay true once it is.
    fn least_where(&self, holds: impl Fn(&PoolPlan) -> bool) -> u64 {
        let (mut below, mut above) = (0, self.more_than_full_bytes());
        while above - below > 1 {
            let middle = below + (above - below) / 2;
            if holds(&self.plan_any(middle)) {
                above = middle;
            } else {
                below = middle;
            }
        }
        above
    }

    /// The largest size up to the full one for which `holds`, which must stay false once it is; 0 when
    /// no group has slots then.
    fn largest_where(&self, holds: impl Fn(&PoolPlan) -> bool) -> u64 {
        let full_bytes = self.full_bytes();
        if holds(&self.plan_any(full_bytes)) {
            return full_bytes;
        }
        let failing_bytes = self.least_where(|plan| !holds(plan));
        let bytes = failing_bytes - 1;
        if self.plan(bytes).is_ok() { bytes } else { 0 }
    }
}
