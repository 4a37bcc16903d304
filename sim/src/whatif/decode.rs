//! Decoding step by step in virtual time: a step is one token of each sequence.

use super::card::{Card, CardTick, OFFLOAD_TOKENS};
use super::hardware::Hardware;
use super::locality::Sequence;
use super::model::ModelSizes;
use super::strategy::{Experts, LayerPlace, Miss, Placement};
use super::tier::{Tier, TierPlan};
use super::{Figures, Script, Setup};
use hotpin_controllers::vram::{Arrangement, Routed};
use hotpin_controllers::{BuildError, ExpertId, ModelShape};
use std::collections::VecDeque;

/// Copies for later uses that may wait for the bus, in units of one step's routed experts. What
/// comes on top is not copied.
const QUEUED_STEPS: usize = 1;

/// Virtual time in which a law comes to rest before anything is counted, seconds.
const SETTLE_S: f64 = 120.0;

/// Where a step's time went, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Seconds {
    /// Attention and other dense weights, launches, handing over.
    pub dense: f64,
    /// Experts in VRAM.
    pub card_experts: f64,
    /// Experts on the processor.
    pub cpu_experts: f64,
    /// Waiting for copies over the bus.
    pub bus_wait: f64,
    /// Waiting for the disk.
    pub disk_wait: f64,
    /// Making contexts and models anew.
    pub changes: f64,
}

impl Seconds {
    pub(super) fn sum(&self) -> f64 {
        self.dense
            + self.card_experts
            + self.cpu_experts
            + self.bus_wait
            + self.disk_wait
            + self.changes
    }

    pub(super) fn scaled(&self, factor: f64) -> Self {
        Self {
            dense: self.dense * factor,
            card_experts: self.card_experts * factor,
            cpu_experts: self.cpu_experts * factor,
            bus_wait: self.bus_wait * factor,
            disk_wait: self.disk_wait * factor,
            changes: self.changes * factor,
        }
    }
}

/// Running totals.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    steps: u64,
    tokens: u64,
    seconds: Seconds,
    /// Routed experts (of unions) that were in VRAM, and all of them.
    vram_hits: u64,
    /// Experts looked for in RAM, and found.
    ram_hits: u64,
    ram_accesses: u64,
    accesses: u64,
    bus_bytes: f64,
    disk_bytes: f64,
}

/// The machine while it decodes.
#[derive(Debug)]
pub(super) struct Decoder<'a> {
    pub hardware: &'a Hardware,
    pub model: &'a ModelSizes,
    pub shape: ModelShape,
    pub placement: Placement,
    pub vram: Option<Tier>,
    pub card: Option<Card>,
    pub ram: Tier,
    script: Script,
    sequences: Vec<Sequence>,
    context: u32,
    now_s: f64,
    /// Copies for later uses, waiting for the bus.
    copies: VecDeque<ExpertId>,
    copied_bytes: f64,
    totals: Totals,
    /// Rows of each expert in the present step.
    rows: Vec<u32>,
    /// Experts of the present layer by token, as the router gives them.
    ids: Vec<i32>,
    /// Sequences that decode now.
    active: usize,
}

impl<'a> Decoder<'a> {
    pub fn new(setup: &'a Setup, placement: Placement) -> Result<Self, super::WhatIfError> {
        let card = match placement.pool {
            Some((bytes, regulated)) => Some(Card::new(setup, bytes, regulated)?),
            None => None,
        };
        let shape = setup.model.shape()?;
        let profile = setup.profile(&shape);
        let tier = |kind, capacity_bytes, feed_bytes_per_s| -> Result<Tier, BuildError> {
            let plan = TierPlan {
                kind,
                capacity_bytes,
                feed_bytes_per_s,
                profile: Some(&profile),
                tick_s: setup.tick_s,
                config: &setup.config,
            };
            Tier::new(&shape, &plan)
        };
        let vram = match (placement.vram, &setup.hardware.link) {
            (Some((kind, bytes)), Some(link)) => Some(tier(kind, bytes, link.bytes_per_s)?),
            _ => None,
        };
        let (kind, bytes) = placement.ram;
        let ram = tier(kind, bytes, placement.disk_bytes_per_s)?;
        let sequences = (0..setup.sequences)
            .map(|number| Sequence::new(&setup.source, &shape, setup.seed, number, setup.sequences))
            .collect();
        let active = setup.script.active(0.0, setup.sequences as usize);
        let mut decoder = Self {
            hardware: &setup.hardware,
            model: &setup.model,
            placement,
            vram,
            card,
            ram,
            script: setup.script.clone(),
            sequences,
            context: setup.context,
            now_s: 0.0,
            copies: VecDeque::new(),
            copied_bytes: 0.0,
            totals: Totals::default(),
            rows: vec![0; shape.total_experts()],
            ids: Vec::new(),
            active,
            shape,
        };
        decoder.place_experts();
        Ok(decoder)
    }

    /// Decodes `steps`, and longer until a law has come to rest, and forgets their figures.
    pub fn settle(&mut self, steps: u64) {
        self.run(steps);
        while self.card.as_ref().is_some_and(Card::is_regulated) && self.now_s < SETTLE_S {
            self.step();
        }
        self.totals = Totals::default();
    }

    /// Decodes for so many seconds; what the law saw and did.
    pub fn record(&mut self, seconds: f64) -> Vec<CardTick> {
        if let Some(card) = &mut self.card {
            card.log = Some(Vec::new());
        }
        let until_s = self.now_s + seconds;
        while self.now_s < until_s {
            self.step();
        }
        let log = self.card.as_mut().and_then(|card| card.log.take());
        log.unwrap_or_default()
    }

    /// Decodes `steps`.
    pub fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            self.step();
        }
    }

    /// Figures since the warm-up, per token.
    pub fn figures(&self) -> Figures {
        let totals = &self.totals;
        let steps = (totals.steps as f64).max(1.0);
        let tokens = (totals.tokens as f64).max(1.0);
        let share = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
        Figures {
            tok_s: tokens / totals.seconds.sum(),
            step_s: totals.seconds.scaled(1.0 / steps),
            vram_hit_ratio: share(totals.vram_hits, totals.accesses),
            ram_hit_ratio: share(totals.ram_hits, totals.ram_accesses),
            bus_bytes_per_token: totals.bus_bytes / tokens,
            disk_bytes_per_token: totals.disk_bytes / tokens,
            prefill_tok_s: 0.0,
        }
    }

    fn step(&mut self) {
        self.active = self.script.active(self.now_s, self.sequences.len());
        let rows = self.sequence_count();
        let routed: Vec<Vec<u32>> = self.sequences[..self.active]
            .iter_mut()
            .map(|sequence| sequence.next_token().to_vec())
            .collect();
        let start_s = self.now_s;
        let mut slot = 0;
        for layer in 0..self.shape.layers() {
            let end = slot + self.shape.top_k_in(layer) as usize;
            let mut union: Vec<u32> = Vec::new();
            let base = self.shape.id(layer, 0).0;
            self.ids.clear();
            for token in &routed {
                for &id in &token[slot..end] {
                    self.ids.push((id - base).cast_signed());
                    if self.rows[id as usize] == 0 {
                        union.push(id);
                    }
                    self.rows[id as usize] += 1;
                }
            }
            self.layer(layer, &union);
            for &id in &union {
                self.rows[id as usize] = 0;
            }
            slot = end;
        }
        self.outside_layers(f64::from(rows));
        let took_s = self.now_s - start_s;
        self.totals.steps += 1;
        self.totals.tokens += u64::from(rows);
        self.regulate(rows, took_s);
        for tier in self.vram.iter_mut().chain([&mut self.ram]) {
            tier.decoded(rows, took_s);
        }
    }

    /// Embedding and output.
    fn outside_layers(&mut self, rows: f64) {
        let bytes = self.model.other_read_bytes;
        let operations = self.model.dense_operations(bytes, rows);
        let s = match &self.hardware.gpu {
            Some(gpu) => gpu.compute_s(bytes, operations),
            None => self.hardware.cpu.compute_s(bytes, operations),
        };
        self.pass(
            Seconds {
                dense: s,
                ..Seconds::default()
            },
            s,
        );
    }

    fn layer(&mut self, layer: usize, union: &[u32]) {
        let place = self.placement.layers[layer];
        let dense_s = self.dense_s(place, self.active as f64);
        self.pass(
            Seconds {
                dense: dense_s,
                ..Seconds::default()
            },
            dense_s,
        );
        let pooled = self.pooled(layer, union);
        if pooled {
            return;
        }
        match place.experts {
            Experts::Vram => {
                let s = self.on_card_s(union);
                self.totals.vram_hits += union.len() as u64;
                self.totals.accesses += union.len() as u64;
                let spent = Seconds {
                    card_experts: s,
                    ..Seconds::default()
                };
                self.pass(spent, s);
            }
            Experts::Cpu => self.on_processor(place, union),
            Experts::Cached => self.cached(union),
        }
    }

    fn on_processor(&mut self, place: LayerPlace, union: &[u32]) {
        self.totals.accesses += union.len() as u64;
        let disk_wait = self.read_absent_s(union);
        let spent = Seconds {
            cpu_experts: self.on_cpu_s(union),
            dense: if place.dense_on_card {
                self.hardware.cpu.handoff_s
            } else {
                0.0
            },
            disk_wait,
            ..Seconds::default()
        };
        self.pass(spent, spent.sum());
    }

    /// Experts through llama.cpp's pool. False where there is none, or whole layers are placed.
    fn pooled(&mut self, layer: usize, union: &[u32]) -> bool {
        let place = self.placement.layers[layer];
        let base = self.shape.id(layer, 0).0;
        let Some(card) = &mut self.card else {
            return false;
        };
        let lacks = |id: &u32| !card.holds(layer, *id - base);
        let missing: Vec<u32> = union.iter().copied().filter(lacks).collect();
        let routed = card.tracker.route(layer, &self.ids, self.active);
        if place.experts != Experts::Cached {
            return false;
        }
        match routed {
            Routed::Pooled { misses, .. } => {
                debug_assert_eq!(misses as usize, missing.len());
                self.totals.vram_hits += (union.len() - missing.len()) as u64;
                self.totals.accesses += union.len() as u64;
                self.upload(union, &missing);
            }
            Routed::Bypassed { .. } if self.sequence_count() >= OFFLOAD_TOKENS => {
                self.totals.accesses += union.len() as u64;
                self.upload(union, union);
            }
            Routed::Bypassed { .. } | Routed::Uncached => self.on_processor(place, union),
        }
        true
    }

    /// The card waits for what is missing, and then computes all. Ids come back over the link first.
    fn upload(&mut self, union: &[u32], missing: &[u32]) {
        let ids_s = self
            .hardware
            .link
            .as_ref()
            .map_or(0.0, |link| link.latency_s);
        let disk_wait = self.read_absent_s(missing);
        let copy_s = if missing.is_empty() {
            0.0
        } else {
            self.copy_s(missing)
        };
        self.totals.bus_bytes += self.bytes(missing);
        let spent = Seconds {
            card_experts: self.on_card_s(union),
            bus_wait: copy_s + ids_s,
            disk_wait,
            ..Seconds::default()
        };
        self.pass(spent, 0.0);
    }

    /// Tells the law of a step, and does what it orders.
    fn regulate(&mut self, rows: u32, took_s: f64) {
        let Some(card) = &mut self.card else { return };
        card.tracker
            .decoded(rows, crate::plant::to_bytes(took_s * 1e9), true);
        let hog_bytes = self.script.hog_bytes(self.now_s);
        let ordered = card.advance(self.now_s, hog_bytes, self.totals.tokens);
        self.ram.covered = card.covered().map(<[bool]>::to_vec);
        let Some(ordered) = ordered else { return };
        card.arrange(ordered.to);
        self.place_experts();
        let spent = Seconds {
            changes: ordered.cost_s,
            ..Seconds::default()
        };
        self.pass(spent, 0.0);
    }

    /// Puts the layers where the card's arrangement has them.
    fn place_experts(&mut self) {
        let Some(card) = &self.card else { return };
        let others = match card.applied {
            Arrangement::Reload { .. } => Experts::Cached,
            Arrangement::Cpu | Arrangement::Static { .. } => Experts::Cpu,
        };
        for place in &mut self.placement.layers {
            place.experts = others;
        }
        if let Arrangement::Static { bytes } = card.applied {
            for layer in card.tracker.layout().static_layers(bytes) {
                self.placement.layers[layer].experts = Experts::Vram;
            }
        }
    }

    fn dense_s(&self, place: LayerPlace, rows: f64) -> f64 {
        let kv_bytes = self
            .model
            .kv_layer_bytes(self.sequence_count(), self.context);
        let bytes = self.model.dense_layer_bytes;
        let operations = self.model.dense_operations(bytes, rows);
        match &self.hardware.gpu {
            Some(gpu) if place.dense_on_card => {
                gpu.layer_overhead_s + gpu.compute_s(bytes + kv_bytes, operations)
            }
            _ => self.hardware.cpu.compute_s(bytes + kv_bytes, operations),
        }
    }

    /// Experts through the cache in VRAM.
    fn cached(&mut self, union: &[u32]) {
        let Some(vram) = &mut self.vram else { return };
        let insert = self.placement.miss == Miss::Copy;
        let mut hits = Vec::with_capacity(union.len());
        let mut missing = Vec::new();
        for &id in union {
            if vram.route(ExpertId(id), self.rows[id as usize], insert) {
                hits.push(id);
            } else {
                missing.push(id);
            }
        }
        self.totals.vram_hits += hits.len() as u64;
        self.totals.accesses += union.len() as u64;
        let hits_s = self.on_card_s(&hits);
        if missing.is_empty() {
            let spent = Seconds {
                card_experts: hits_s,
                ..Seconds::default()
            };
            return self.pass(spent, hits_s);
        }
        let disk_wait = self.read_absent_s(&missing);
        match self.placement.miss {
            Miss::Copy => self.await_copies(union, &missing, hits_s, disk_wait),
            Miss::Assist => self.assist(&missing, hits_s, disk_wait),
        }
    }

    /// The card computes the hits while the missing are copied, then those.
    fn await_copies(&mut self, union: &[u32], missing: &[u32], hits_s: f64, disk_wait: f64) {
        let bytes = self.bytes(missing);
        let copy_s = self.copy_s(missing);
        let missing_s = self.on_card_s(missing);
        self.totals.bus_bytes += bytes;
        if let Some(vram) = &mut self.vram {
            vram.store.evict(union);
            vram.waited((copy_s - hits_s).max(0.0) + disk_wait);
        }
        let spent = Seconds {
            card_experts: hits_s + missing_s,
            bus_wait: (copy_s - hits_s).max(0.0),
            disk_wait,
            ..Seconds::default()
        };
        let idle_s = spent.sum() - copy_s;
        self.pass(spent, idle_s);
    }

    /// The processor computes the missing while the card computes the hits, and the bus copies the
    /// missing for later uses as far as it can.
    fn assist(&mut self, missing: &[u32], hits_s: f64, disk_wait: f64) {
        let cpu_s = self.on_cpu_s(missing) + self.hardware.cpu.handoff_s;
        let most = QUEUED_STEPS * self.shape.routed_per_token() as usize * self.active;
        for &id in missing {
            if self.copies.len() < most && !self.copies.contains(&ExpertId(id)) {
                self.copies.push_back(ExpertId(id));
            }
        }
        if let Some(vram) = &mut self.vram {
            vram.waited((cpu_s - hits_s).max(0.0) + disk_wait);
        }
        let spent = Seconds {
            card_experts: hits_s,
            cpu_experts: (cpu_s - hits_s).max(0.0),
            disk_wait,
            ..Seconds::default()
        };
        self.pass(spent, spent.sum());
    }

    /// Lets time pass, in which the bus is idle for `bus_idle_s`.
    fn pass(&mut self, spent: Seconds, bus_idle_s: f64) {
        let elapsed_s = spent.sum();
        self.now_s += elapsed_s;
        let seconds = &mut self.totals.seconds;
        seconds.dense += spent.dense;
        seconds.card_experts += spent.card_experts;
        seconds.cpu_experts += spent.cpu_experts;
        seconds.bus_wait += spent.bus_wait;
        seconds.disk_wait += spent.disk_wait;
        seconds.changes += spent.changes;
        let disk_idle_bytes = (elapsed_s - spent.disk_wait) * self.placement.disk_bytes_per_s;
        let wanted_bytes = self.ram.pins.left_bytes(&self.ram.store);
        self.totals.disk_bytes += wanted_bytes.min(disk_idle_bytes);
        self.ram.advance(self.now_s, disk_idle_bytes);
        if let (Some(link), Some(_)) = (&self.hardware.link, &self.vram) {
            self.background(bus_idle_s * link.bytes_per_s);
        }
    }

    /// Pins first, then copies for later uses.
    fn background(&mut self, bytes: f64) {
        let Some(vram) = &mut self.vram else { return };
        let wanted_bytes = vram.pins.left_bytes(&vram.store).min(bytes);
        self.totals.bus_bytes += wanted_bytes;
        vram.advance(self.now_s, bytes);
        self.copied_bytes += bytes - wanted_bytes;
        while let Some(&id) = self.copies.front() {
            let size_bytes = vram.store.bytes(id) as f64;
            if size_bytes > self.copied_bytes {
                break;
            }
            self.copied_bytes -= size_bytes;
            self.copies.pop_front();
            if !vram.store.is_resident(id) {
                vram.store.access(id);
                vram.store.evict(&[id.0]);
                self.totals.bus_bytes += size_bytes;
            }
        }
        if self.copies.is_empty() {
            self.copied_bytes = 0.0;
        }
    }

    /// Makes experts resident in RAM; returns the seconds that the disk takes.
    pub(super) fn read_absent_s(&mut self, experts: &[u32]) -> f64 {
        let mut bytes = 0.0;
        for &id in experts {
            let rows = self.rows[id as usize];
            self.totals.ram_accesses += 1;
            if self.ram.route(ExpertId(id), rows, true) {
                self.totals.ram_hits += 1;
            } else {
                bytes += self.ram.store.bytes(ExpertId(id)) as f64;
            }
        }
        if bytes == 0.0 {
            return 0.0;
        }
        self.ram.store.evict(experts);
        self.totals.disk_bytes += bytes;
        let wait_s = self.hardware.disk.latency_s + bytes / self.placement.disk_bytes_per_s;
        self.ram.waited(wait_s);
        wait_s
    }

    fn sequence_count(&self) -> u32 {
        u32::try_from(self.active).unwrap_or(u32::MAX)
    }

    fn bytes(&self, experts: &[u32]) -> f64 {
        experts.len() as f64 * self.model.expert_bytes
    }

    fn copy_s(&self, experts: &[u32]) -> f64 {
        let link = self.hardware.link.as_ref();
        link.map_or(0.0, |link| {
            link.latency_s + self.bytes(experts) / link.bytes_per_s
        })
    }

    fn operations(&self, experts: &[u32]) -> f64 {
        let rows: u32 = experts.iter().map(|&id| self.rows[id as usize]).sum();
        self.model.expert_operations(f64::from(rows))
    }

    fn on_card_s(&self, experts: &[u32]) -> f64 {
        let gpu = self.hardware.gpu.as_ref();
        gpu.map_or(0.0, |gpu| {
            gpu.compute_s(self.bytes(experts), self.operations(experts))
        })
    }

    fn on_cpu_s(&self, experts: &[u32]) -> f64 {
        self.hardware
            .cpu
            .compute_s(self.bytes(experts), self.operations(experts))
    }
}
