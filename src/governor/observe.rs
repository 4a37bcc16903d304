//! One tick's view of the plant, in buffers that are reused.

use super::{GovernorOptions, Regulated};
use crate::plant::Totals;
use crate::sensors::Sample;
use hotpin_controllers::{
    CgroupMemory, EngineTotals, Faults, Held, HostMemory, ModelShape, Moment, Observation,
    Residence,
};

/// Mappings that the process needs besides what locking splits.
const OTHER_MAPS: u64 = 4096;
/// Major faults in one tick above which the books on transit are compared with the kernel.
const AUDIT_FAULTS: u64 = 64;
/// Misses may fault in their last pages; this many faults a miss are no news.
const FAULTS_A_MISS: u64 = 8;
/// The same is done so often while anything of the process is swapped out.
const COMPARE_S: f64 = 1.0;

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
    /// When transit was last compared with the kernel because something of ours was swapped out.
    compared: Option<Moment>,
    is_suspect: bool,
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
            compared: None,
            is_suspect: false,
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
        // What transit has in memory of its own may be among it.
        let has_swapped = self.private_transit_bytes > 0 && sample.swapped_bytes > Some(0);
        let is_due = |at: Moment| sample.now.seconds_since(at) >= COMPARE_S;
        let is_time = has_swapped && self.compared.is_none_or(is_due);
        if is_time {
            self.compared = Some(sample.now);
        }
        let usual = AUDIT_FAULTS + FAULTS_A_MISS * self.change().misses;
        self.is_suspect = is_time || self.new_faults > usual;
        let locks = sample.locks.limits(
            options.dense.locked_with_program_bytes(),
            map_budget(sample, options, shape),
        );
        // Transit counts as available, wherever it is; what is to be locked first does not.
        let ours = self.private_transit_bytes;
        let claim = options.dense.claim_bytes();
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

    /// Whether transit may not be where the books say: the session faulted more than misses do, or something of
    /// it was swapped out.
    pub(super) fn is_suspect(&self) -> bool {
        self.is_suspect
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
