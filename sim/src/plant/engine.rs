//! The engine, the disk and the governor's reads, advanced layer by layer.

use super::memory::Memory;
use super::routing::Router;
use super::store::{Access, Keeper, Store};
use super::{Machine, Scenario, to_bytes};
use hotpin_controllers::{EngineTotals, ExpertId};
use std::collections::VecDeque;

const PAGE_BYTES: u64 = 4096;

/// Matmuls of a layer's experts: gate, up and down. Under the store `direct` each waits for its own
/// part of what is read, part after part, so that one is computed while the next arrives.
const PARTS: u32 = 3;

/// Memory that the governor makes ready for the store `direct` before it is used, bytes.
const AHEAD_BYTES: f64 = 134_217_728.0;

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
    /// Bytes of experts that the disk was asked for by the engine.
    pub read_bytes: u64,
    pub decode_counts: Vec<u32>,
    pub prefill_counts: Vec<u32>,
    /// Experts that the governor is reading in order to lock them.
    pub pins: PinQueue,
    scenario: &'a Scenario,
    /// Routed experts are fetched; else they fault in with readahead.
    fetches: bool,
    /// Time to compute the experts of one layer, where that overlaps with reading them, seconds.
    overlapped_s: f64,
    /// Time of a core that locking takes, not yet passed.
    owed_s: f64,
    /// Memory that is ready and was not used yet, bytes, and since when no more was made ready.
    ready_bytes: f64,
    ready_s: f64,
    /// Prefill batches done.
    prefills: usize,
    router: Router<'a>,
    routed: Vec<u32>,
    /// Next layer of the present token and its first slot.
    layer: usize,
    slot: usize,
}

impl<'a> Engine<'a> {
    pub fn new(scenario: &'a Scenario, keeper: Keeper, fetches: bool) -> Self {
        let shape = &scenario.shape;
        let readahead = (!fetches).then_some(scenario.machine.readahead_amplification);
        let mut store = Store::new(shape, keeper, readahead);
        if !fetches {
            store.load(scenario.room_bytes());
        }
        let overlapped_s = if keeper == Keeper::Arena {
            expert_compute_s(scenario)
        } else {
            0.0
        };
        Self {
            now_s: 0.0,
            store,
            memory: Memory {
                others_bytes: scenario.others.at(0.0),
                ..Memory::default()
            },
            totals: EngineTotals::default(),
            true_hits: 0,
            major_faults: 0,
            read_bytes: 0,
            decode_counts: vec![0; shape.total_experts()],
            prefill_counts: vec![0; shape.total_experts()],
            pins: PinQueue::default(),
            router: Router::new(shape, &scenario.routing, scenario.seed),
            routed: Vec::new(),
            layer: 0,
            slot: 0,
            fetches,
            overlapped_s,
            owed_s: 0.0,
            ready_bytes: 0.0,
            ready_s: 0.0,
            prefills: 0,
            scenario,
        }
    }

    /// The governor kept a core busy: the engine's barriers wait for the thread that lacked it.
    pub fn owe(&mut self, s: f64) {
        self.owed_s += s;
    }

    /// One layer of one token: waits for its experts, then computes.
    pub fn step(&mut self) {
        let start_s = self.now_s;
        if self.layer == 0 {
            let prefills = &self.scenario.disturbances.prefills;
            if let Some(&(at_s, tokens)) = prefills.get(self.prefills)
                && at_s <= self.now_s
            {
                self.prefills += 1;
                self.prefill(tokens);
            }
            self.router.next(&mut self.routed);
            self.slot = 0;
        }
        let shape = &self.scenario.shape;
        let machine = &self.scenario.machine;
        let end = self.slot + shape.top_k_in(self.layer) as usize;
        let routed = std::mem::take(&mut self.routed);
        for &id in &routed[self.slot..end] {
            let count = &mut self.decode_counts[id as usize];
            *count = count.wrapping_add(1);
        }
        self.fetch(&routed[self.slot..end]);
        self.routed = routed;
        let compute_s =
            machine.compute_s / shape.layers() as f64 + std::mem::take(&mut self.owed_s);
        let rate = machine.disk_bytes_per_s * self.scenario.disturbances.disk_speed(self.now_s);
        self.pins.read(compute_s * rate, &mut self.store);
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

    /// A batch of prompt tokens: each layer needs the union of what they are routed to, once.
    fn prefill(&mut self, tokens: u32) {
        let shape = &self.scenario.shape;
        let mut unions = vec![Vec::new(); shape.layers()];
        let mut seen = vec![false; shape.total_experts()];
        for _ in 0..tokens {
            self.router.next(&mut self.routed);
            for &id in &self.routed {
                if !std::mem::replace(&mut seen[id as usize], true) {
                    unions[shape.layer_of(ExpertId(id))].push(id);
                }
            }
        }
        let start_s = self.now_s;
        for union in &unions {
            for &id in union {
                let count = &mut self.prefill_counts[id as usize];
                *count = count.wrapping_add(1);
            }
            self.fetch(union);
            self.now_s += self.scenario.machine.compute_s / shape.layers() as f64;
        }
        self.totals.prefill_tokens += u64::from(tokens);
        self.memory
            .pass(&self.scenario.machine, self.now_s - start_s);
    }

    /// Makes the routed experts of one layer resident.
    fn fetch(&mut self, routed: &[u32]) {
        let machine = &self.scenario.machine;
        let mut need = Need::default();
        for &id in routed {
            let expert = ExpertId(id);
            let bytes = self.store.bytes(expert);
            match self.store.access(expert) {
                Access::Hit => {
                    self.totals.hits += 1;
                    self.true_hits += 1;
                }
                Access::Cached => {
                    // A fetch of what the page cache holds reads nothing.
                    self.totals.misses += 1;
                    self.totals.fetch_bytes += bytes;
                    self.true_hits += 1;
                }
                Access::Phantom => {
                    self.totals.hits += 1;
                    need.fault_bytes += bytes;
                    need.refault_bytes += bytes as f64;
                }
                Access::Miss { before } => {
                    self.totals.misses += 1;
                    self.totals.fetch_bytes += bytes;
                    need.read_bytes += bytes;
                    if before {
                        need.refault_bytes += bytes as f64 * machine.own_refault_share;
                    }
                }
            }
        }
        let bytes = need.read_bytes + need.fault_bytes;
        if bytes == 0 {
            return;
        }
        let mut stall_s = self.wait(machine, &need);
        self.memory.stall_s += stall_s * need.refault_bytes / bytes as f64;
        self.read_bytes += if self.fetches {
            bytes
        } else {
            to_bytes(bytes as f64 * machine.readahead_amplification)
        };
        self.major_faults += need.fault_bytes / PAGE_BYTES;
        self.store.evict(routed);
        let fresh_s = self.freshen(machine);
        self.now_s += fresh_s + bytes as f64 * machine.handling_s_per_byte;
        stall_s += fresh_s;
        self.totals.stall_ns += to_ns(stall_s);
        self.memory.reclaim(machine, &mut self.store);
    }

    /// Uses memory for the first time where what is held is more than ever. The governor has made some ready
    /// since it was last used, and is no faster than the engine would be. Returns the seconds that the engine
    /// takes for the rest.
    fn freshen(&mut self, machine: &Machine) -> f64 {
        if machine.fresh_s_per_byte <= 0.0 {
            return 0.0;
        }
        let made_bytes = (self.now_s - self.ready_s) / machine.fresh_s_per_byte;
        self.ready_s = self.now_s;
        self.ready_bytes = (self.ready_bytes + made_bytes).min(AHEAD_BYTES);
        let fresh_bytes = self.store.fresh_bytes() as f64;
        let used_bytes = fresh_bytes.min(self.ready_bytes);
        self.ready_bytes -= used_bytes;
        (fresh_bytes - used_bytes) * machine.fresh_s_per_byte
    }

    /// Waits for bytes from the disk, which the governor's reads share half and half. Returns the
    /// seconds waited.
    fn wait(&mut self, machine: &Machine, need: &Need) -> f64 {
        let speed = self.scenario.disturbances.disk_speed(self.now_s);
        let rate = machine.disk_bytes_per_s * speed;
        let fault_s = need.fault_bytes as f64 / (machine.fault_bytes_per_s * speed);
        let (latency_s, read_s) = if self.fetches {
            (machine.disk_latency_s, need.read_bytes as f64 / rate)
        } else {
            let read_bytes = need.read_bytes as f64 * machine.readahead_amplification;
            let read_s = read_bytes / (machine.readahead_bytes_per_s * speed);
            (machine.readahead_latency_s, read_s)
        };
        // In disk-bandwidth bytes, which the pins share half and half.
        let needed_bytes = (read_s + fault_s) * rate;
        let behind_bytes = self.pins.left_bytes(&self.store).min(needed_bytes);
        let read_s = (needed_bytes + behind_bytes) / rate;
        let wait_s = latency_s + read_s - hidden_s(latency_s, read_s, self.overlapped_s);
        self.pins
            .read(behind_bytes + latency_s * rate, &mut self.store);
        self.now_s += wait_s;
        wait_s
    }
}

/// Time to compute the experts of one layer: matmuls take as long as their weights, which are all read,
/// so it is the experts' share of what a token reads.
fn expert_compute_s(scenario: &Scenario) -> f64 {
    let cycle_bytes = scenario.shape.token_cycle_bytes() as f64;
    let share = cycle_bytes / (cycle_bytes + scenario.machine.dense_bytes as f64);
    scenario.machine.compute_s * share / scenario.shape.layers() as f64
}

/// How much of `compute_s` is done while the experts arrive, part by part.
fn hidden_s(latency_s: f64, read_s: f64, compute_s: f64) -> f64 {
    let parts = f64::from(PARTS);
    let mut end_s = 0.0_f64;
    for part in 1..=PARTS {
        let arrived_s = latency_s + read_s * f64::from(part) / parts;
        end_s = end_s.max(arrived_s) + compute_s / parts;
    }
    latency_s + read_s + compute_s - end_s
}

/// What one layer needs from the disk.
#[derive(Clone, Copy, Debug, Default)]
struct Need {
    read_bytes: u64,
    fault_bytes: u64,
    /// Bytes whose wait the kernel counts as memory pressure.
    refault_bytes: f64,
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
