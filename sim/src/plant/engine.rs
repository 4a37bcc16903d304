//! The engine, the disk and the governor's reads, advanced layer by layer.

use super::memory::Memory;
use super::routing::Router;
use super::store::{Access, Store};
use super::{Machine, Scenario, to_bytes};
use hotpin_controllers::{EngineTotals, ExpertId};
use std::collections::VecDeque;

const PAGE_BYTES: u64 = 4096;

/// Everything that moves between ticks.
#[derive(Debug)]
pub(super) struct Engine<'a> {
    pub now_s: f64,
    pub store: Store,
    pub memory: Memory,
    pub totals: EngineTotals,
    /// Routed experts that were really in memory.
    pub true_hits: u64,
    pub major_faults: u64,
    pub decode_counts: Vec<u32>,
    /// Experts that the governor is reading in order to lock them.
    pub pins: PinQueue,
    scenario: &'a Scenario,
    router: Router<'a>,
    routed: Vec<u32>,
    /// Next layer of the present token and its first slot.
    layer: usize,
    slot: usize,
}

impl<'a> Engine<'a> {
    pub fn new(scenario: &'a Scenario) -> Self {
        let shape = &scenario.shape;
        Self {
            now_s: 0.0,
            store: Store::new(shape),
            memory: Memory {
                others_bytes: scenario.others.at(0.0),
                ..Memory::default()
            },
            totals: EngineTotals::default(),
            true_hits: 0,
            major_faults: 0,
            decode_counts: vec![0; shape.total_experts()],
            pins: PinQueue::default(),
            router: Router::new(shape, &scenario.routing, scenario.seed),
            routed: Vec::new(),
            layer: 0,
            slot: 0,
            scenario,
        }
    }

    /// One layer of one token: waits for its experts, then computes.
    pub fn step(&mut self) {
        let start_s = self.now_s;
        if self.layer == 0 {
            self.router.next(&mut self.routed);
            self.slot = 0;
        }
        let shape = &self.scenario.shape;
        let machine = &self.scenario.machine;
        let end = self.slot + shape.top_k_in(self.layer) as usize;
        self.fetch(self.slot..end);
        let compute_s = machine.compute_s / shape.layers() as f64;
        self.pins
            .read(compute_s * machine.disk_bytes_per_s, &mut self.store);
        self.now_s += compute_s;
        self.slot = end;
        self.layer += 1;
        if self.layer == shape.layers() {
            self.layer = 0;
            self.totals.decode_tokens += 1;
        }
        self.memory.pass(machine, self.now_s - start_s);
        self.memory.reclaim(machine, &mut self.store);
        self.totals.decode_ns += to_ns(self.now_s - start_s);
    }

    fn fetch(&mut self, slots: std::ops::Range<usize>) {
        let machine = &self.scenario.machine;
        let routed = std::mem::take(&mut self.routed);
        let (mut read_bytes, mut fault_bytes, mut refault_bytes) = (0, 0, 0.0);
        for &id in &routed[slots.clone()] {
            let expert = ExpertId(id);
            let bytes = self.store.bytes(expert);
            let count = &mut self.decode_counts[expert.index()];
            *count = count.wrapping_add(1);
            match self.store.access(expert) {
                Access::Hit => {
                    self.totals.hits += 1;
                    self.true_hits += 1;
                }
                Access::Phantom => {
                    self.totals.hits += 1;
                    fault_bytes += bytes;
                    refault_bytes += bytes as f64;
                }
                Access::Miss { before } => {
                    self.totals.misses += 1;
                    read_bytes += bytes;
                    if before {
                        refault_bytes += bytes as f64 * machine.own_refault_share;
                    }
                }
            }
        }
        if read_bytes + fault_bytes > 0 {
            let stall_s = self.wait(machine, read_bytes, fault_bytes);
            let share = refault_bytes / (read_bytes + fault_bytes) as f64;
            self.memory.stall_s += stall_s * share;
            self.totals.stall_ns += to_ns(stall_s);
            self.totals.fetch_bytes += read_bytes;
            self.major_faults += fault_bytes / PAGE_BYTES;
            self.store.evict(&routed[slots]);
            self.memory.reclaim(machine, &mut self.store);
        }
        self.routed = routed;
    }

    /// Waits for bytes from the disk, which the governor's reads share half and half. Returns the
    /// seconds waited.
    fn wait(&mut self, machine: &Machine, read_bytes: u64, fault_bytes: u64) -> f64 {
        let rate = machine.disk_bytes_per_s;
        // Faults in disk-bandwidth bytes, so that one sum says how long the disk is needed.
        let slow = rate / machine.fault_bytes_per_s;
        let needed_bytes = read_bytes as f64 + fault_bytes as f64 * slow;
        let behind_bytes = self.pins.left_bytes(&self.store).min(needed_bytes);
        let wait_s = machine.disk_latency_s + (needed_bytes + behind_bytes) / rate;
        self.pins.read(
            behind_bytes + machine.disk_latency_s * rate,
            &mut self.store,
        );
        self.now_s += wait_s;
        wait_s
    }
}

fn to_ns(s: f64) -> u64 {
    to_bytes(s * 1e9)
}

/// Experts being read for the governor, one after the other.
#[derive(Debug, Default)]
pub(crate) struct PinQueue {
    queue: VecDeque<ExpertId>,
    /// Bytes of the first that are read already.
    done_bytes: f64,
}

impl PinQueue {
    pub fn push(&mut self, id: ExpertId) {
        self.queue.push_back(id);
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Reads up to `bytes`, locking each expert as it is complete.
    pub fn read(&mut self, bytes: f64, store: &mut Store) {
        let mut left_bytes = bytes;
        while let Some(&id) = self.queue.front() {
            let needed_bytes = if store.must_read(id) {
                store.bytes(id) as f64 - self.done_bytes
            } else {
                0.0
            };
            if needed_bytes > left_bytes {
                self.done_bytes += left_bytes;
                return;
            }
            left_bytes -= needed_bytes.max(0.0);
            self.done_bytes = 0.0;
            self.queue.pop_front();
            store.pin(id);
        }
    }

    pub fn left_bytes(&self, store: &Store) -> f64 {
        let queued = self.queue.iter().filter(|&&id| store.must_read(id));
        let bytes: u64 = queued.map(|&id| store.bytes(id)).sum();
        (bytes as f64 - self.done_bytes).max(0.0)
    }
}
