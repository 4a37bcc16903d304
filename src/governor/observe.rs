//! One tick's view of the plant, in buffers that are reused.

use super::{GovernorOptions, Regulated};
use crate::plant::Totals;
use crate::sensors::Sample;
use hotpin_controllers::{
    CgroupMemory, EngineTotals, Faults, Held, HostMemory, ModelShape, Observation, Residence,
};

/// Mappings that the process needs besides what locking splits.
const OTHER_MAPS: u64 = 4096;

/// The plant as last read, and what changed since the time before.
#[derive(Debug)]
pub(super) struct Plant {
    decode: Vec<u32>,
    prefill: Vec<u32>,
    residence: Vec<Residence>,
    held: Held,
    private_transit_bytes: u64,
    totals: Totals,
    earlier: Totals,
    faults: Option<Faults>,
    new_faults: u64,
}

impl Plant {
    pub(super) fn new(shape: &ModelShape) -> Self {
        let experts = shape.total_experts();
        Self {
            decode: vec![0; experts],
            prefill: vec![0; experts],
            residence: vec![Residence::Absent; experts],
            held: Held::default(),
            private_transit_bytes: 0,
            totals: Totals::default(),
            earlier: Totals::default(),
            faults: None,
            new_faults: 0,
        }
    }

    /// Reads counters and books. Nothing is stopped for it.
    pub(super) fn read(&mut self, regulated: &Regulated) {
        regulated.counters.decode_into(&mut self.decode);
        regulated.counters.prefill_into(&mut self.prefill);
        regulated.store.residence_into(&mut self.residence);
        self.held = regulated.store.held();
        self.private_transit_bytes = regulated.store.private_transit_bytes();
        self.earlier = self.totals;
        self.totals = regulated.counters.totals();
    }

    /// Joins the plant and the sensors.
    pub(super) fn observation<'a>(
        &'a mut self,
        sample: &Sample,
        options: &GovernorOptions,
        shape: &ModelShape,
        covered: Option<&'a [bool]>,
    ) -> Observation<'a> {
        self.new_faults = match (sample.faults, self.faults) {
            (Some(now), Some(before)) => now.major.saturating_sub(before.major),
            _ => 0,
        };
        self.faults = sample.faults;
        let locks = sample.locks.limits(
            options.dense.locked_bytes,
            map_budget(sample, options, shape),
        );
        // Transit counts as available, wherever it is; what is to be locked first does not, and neither
        // does the room for what of ours was swapped out, so that capacity falls until all of it is in RAM.
        let ours = self.private_transit_bytes;
        let claim = options.dense.claim_bytes() + sample.swapped_bytes.unwrap_or(0);
        let left = |bytes: u64| bytes.saturating_add(ours).saturating_sub(claim);
        Observation {
            now: sample.now,
            host: sample.host.map(|host| HostMemory {
                available_bytes: left(host.available_bytes),
                ..host
            }),
            cgroup: sample.cgroup.map(|cgroup| CgroupMemory {
                available_bytes: left(cgroup.available_bytes),
                ..cgroup
            }),
            pressure: sample.pressure,
            locks,
            faults: sample.faults,
            engine: Some(EngineTotals {
                decode_tokens: self.totals.decode_tokens,
                prefill_tokens: self.totals.prefill_tokens,
                decode_ns: self.totals.decode_ns,
                stall_ns: self.totals.stall_ns,
                hits: self.totals.hits,
                misses: self.totals.misses,
                fetch_bytes: self.totals.fetch_bytes,
            }),
            stall_known: true,
            decode_counts: Some(&self.decode),
            prefill_counts: Some(&self.prefill),
            residence: &self.residence,
            covered,
            held: self.held,
        }
    }

    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    /// What the engine did since the last tick.
    pub(super) fn change(&self) -> Totals {
        self.totals.since(&self.earlier)
    }

    /// Major faults since the last tick.
    pub(super) fn new_faults(&self) -> u64 {
        self.new_faults
    }
}

/// Bytes of experts that may be locked before mappings run out: each locked slice can split one
/// mapping into three, that is add two.
fn map_budget(sample: &Sample, options: &GovernorOptions, shape: &ModelShape) -> Option<u64> {
    let spare = sample.locks.max_map_count?.saturating_sub(OTHER_MAPS);
    let slices = spare / 2;
    let experts = slices / (options.slices_per_expert.max(1) as u64);
    if experts >= shape.total_experts() as u64 {
        return None;
    }
    let smallest = (0..shape.layers())
        .map(|l| shape.layer_expert_bytes(l))
        .min()?;
    Some(experts * smallest)
}
