//! A card whose experts are kept by llama.cpp's pool, as large as it is or regulated: the tracker and
//! the law are those that ship.

use super::hardware::Hardware;
use super::model::ModelSizes;
use super::{Setup, WhatIfError};
use crate::plant::to_bytes;
use hotpin_controllers::config::VramConfig;
use hotpin_controllers::vram::{
    Arrangement, ChangeCosts, ChangeKind, DeviceLayout, DeviceMemory, LayerLayout, PoolLayout,
    TensorLayout, Tracker, VramDecision, VramFigures, VramLaw, VramObservation, VramRule,
};
use hotpin_controllers::{ExpertId, Moment};
use serde::Serialize;

/// Making a context, seconds; assumed.
const CONTEXT_S: f64 = 0.5;

/// Loading a model whose file is in memory, seconds beside its copies; assumed.
const LOAD_S: f64 = 3.0;

/// Batches of at least this many tokens are computed on the card with experts copied for them.
pub(super) const OFFLOAD_TOKENS: u32 = 32;

/// Part of the card's memory that is left to others, beside what the machine's description reserves.
const RESERVE_BYTES: u64 = 256 << 20;

/// Memory of the card that somebody else takes for a while.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Hog {
    /// From then on, seconds.
    pub from_s: f64,
    /// Until then, seconds.
    pub until_s: f64,
    /// Bytes.
    pub bytes: f64,
}

/// What changes while a card decodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Script {
    /// Others on the card.
    pub hogs: Vec<Hog>,
    /// How many of the sequences are decoded from when on (seconds), ascending; all before the first.
    pub active: Vec<(f64, u32)>,
}

impl Script {
    pub(super) fn hog_bytes(&self, now_s: f64) -> f64 {
        let there = |hog: &&Hog| (hog.from_s..hog.until_s).contains(&now_s);
        self.hogs.iter().filter(there).map(|hog| hog.bytes).sum()
    }

    pub(super) fn active(&self, now_s: f64, all: usize) -> usize {
        let last = self
            .active
            .iter()
            .rev()
            .find(|(from_s, _)| *from_s <= now_s);
        last.map_or(all, |&(_, count)| (count as usize).clamp(1, all))
    }
}

/// One tick of the law.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CardTick {
    /// When, seconds.
    pub at_s: f64,
    /// What the card has.
    pub arrangement: Arrangement,
    /// The rule that keeps or changes it.
    pub rule: VramRule,
    /// Bytes that others want and the card has not.
    pub short_bytes: f64,
    /// Tokens decoded so far.
    pub tokens: u64,
}

/// The card.
#[derive(Debug)]
pub(super) struct Card {
    pub tracker: Tracker,
    pub applied: Arrangement,
    regulated: Option<VramLaw>,
    decision: VramDecision,
    figures: VramFigures,
    /// Memory for experts and the reserve, bytes.
    total_bytes: u64,
    kv_bytes: f64,
    dense_bytes: f64,
    link_bytes_per_s: f64,
    tick_s: f64,
    next_tick_s: f64,
    covered: Vec<bool>,
    pub log: Option<Vec<CardTick>>,
}

/// A change that the law ordered, with what it takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ordered {
    pub to: Arrangement,
    pub cost_s: f64,
}

impl Card {
    /// A card with `bytes` for experts, all of them a pool, or as the law decides.
    pub fn new(setup: &Setup, bytes: f64, regulated: bool) -> Result<Self, WhatIfError> {
        let (hardware, model) = (&setup.hardware, &setup.model);
        let layout = layout(model)?;
        let config = VramConfig {
            reserve_bytes: RESERVE_BYTES,
            ..setup.config.vram.clone()
        };
        let pool_bytes = to_bytes(bytes).min(layout.full_bytes());
        let pool = match layout.plan(pool_bytes) {
            Ok(_) => Arrangement::Reload { pool_bytes },
            Err(_) => Arrangement::Cpu,
        };
        let link_bytes_per_s = link_bytes_per_s(hardware);
        let kv_bytes =
            f64::from(model.layers) * model.kv_layer_bytes(setup.sequences, setup.context);
        let mut card = Self {
            tracker: Tracker::new(layout.clone(), pool, &config),
            applied: pool,
            regulated: regulated.then(|| VramLaw::new(layout, config)),
            decision: VramDecision::default(),
            figures: VramFigures::default(),
            total_bytes: to_bytes(bytes) + RESERVE_BYTES,
            kv_bytes,
            dense_bytes: model.dense_bytes(),
            link_bytes_per_s,
            tick_s: setup.tick_s,
            next_tick_s: 0.0,
            covered: Vec::new(),
            log: None,
        };
        if regulated {
            card.applied = Arrangement::Cpu;
            let begun = card.tick(0.0, 0.0, 0);
            card.applied = begun.map_or(Arrangement::Cpu, |ordered| ordered.to);
            card.tracker.arranged(card.applied);
        }
        Ok(card)
    }

    /// Whether the law decides.
    pub const fn is_regulated(&self) -> bool {
        self.regulated.is_some()
    }

    /// Whether an expert's bytes are in VRAM, for layers that use the pool.
    pub fn holds(&self, layer: usize, expert: u32) -> bool {
        self.tracker
            .pool()
            .is_some_and(|pool| pool.holds(layer, expert))
    }

    /// Experts that RAM need not keep, as far as the law says so.
    pub fn covered(&mut self) -> Option<&[bool]> {
        if !self.decision.cover {
            return None;
        }
        self.tracker.covered(&mut self.covered);
        Some(&self.covered)
    }

    /// Takes over what was ordered.
    pub fn arrange(&mut self, to: Arrangement) {
        self.applied = to;
        self.tracker.arranged(to);
    }

    /// Gives the law its tick, when it is due; `hog_bytes` are what others have of the card.
    pub fn advance(&mut self, now_s: f64, hog_bytes: f64, tokens: u64) -> Option<Ordered> {
        if self.regulated.is_none() || now_s < self.next_tick_s {
            return None;
        }
        self.next_tick_s = now_s + self.tick_s;
        self.tick(now_s, hog_bytes, tokens)
    }

    fn tick(&mut self, now_s: f64, hog_bytes: f64, tokens: u64) -> Option<Ordered> {
        let law = self.regulated.as_mut()?;
        let layout = self.tracker.layout();
        let held_bytes: u64 = layout.device_bytes(self.applied).iter().sum();
        // Others get what is free, no more.
        let left_bytes = self.total_bytes.saturating_sub(held_bytes);
        let hog_gets_bytes = to_bytes(hog_bytes).min(left_bytes);
        let context_bytes = to_bytes(self.kv_bytes);
        self.tracker.figures(&mut self.figures);
        let recreate_s = CONTEXT_S + 2.0 * self.kv_bytes / self.link_bytes_per_s;
        let host_bytes = layout.host_bytes() as f64;
        let loaded_bytes = (self.total_bytes as f64).min(host_bytes) + self.dense_bytes;
        let reload_s = recreate_s + LOAD_S + loaded_bytes / self.link_bytes_per_s;
        let observation = VramObservation {
            now: Moment {
                ns: to_bytes(now_s * 1e9),
            },
            devices: &[Some(DeviceMemory {
                total_bytes: self.total_bytes,
                free_bytes: left_bytes - hog_gets_bytes,
            })],
            figures: Some(&self.figures),
            applied: self.applied,
            link_bytes_per_s: Some(self.link_bytes_per_s),
            costs: ChangeCosts {
                recreate_ns: Some(to_bytes(recreate_s * 1e9)),
                reload_ns: Some(to_bytes(reload_s * 1e9)),
                context_bytes: Some(context_bytes),
                dense_bytes: Some(to_bytes(self.dense_bytes)),
                state_bytes: Some(context_bytes),
            },
            host_available_bytes: None,
            failed: None,
            idle: false,
        };
        law.tick(&observation, &mut self.decision);
        if let Some(log) = &mut self.log {
            log.push(CardTick {
                at_s: now_s,
                arrangement: self.applied,
                rule: self.decision.rule,
                short_bytes: hog_bytes - hog_gets_bytes as f64,
                tokens,
            });
        }
        let to = self.decision.arrangement;
        self.decision.change.map(|change| Ordered {
            to,
            cost_s: match change.kind {
                ChangeKind::Recreate => recreate_s,
                ChangeKind::Reload => reload_s,
            },
        })
    }
}

fn link_bytes_per_s(hardware: &Hardware) -> f64 {
    hardware.link.as_ref().map_or(1.0, |link| link.bytes_per_s)
}

/// All layers on one device: cards share layers, and their memories add up.
fn layout(model: &ModelSizes) -> Result<PoolLayout, WhatIfError> {
    let shape = model.shape()?;
    let bytes = shape.bytes(ExpertId(0));
    // Gate, up and down; what a third leaves over is down's.
    let tensors = [bytes / 3, bytes / 3, bytes - bytes / 3 * 2].map(|expert_bytes| TensorLayout {
        ggml_type: 0,
        columns: 0,
        rows: 0,
        expert_bytes,
    });
    let layer = LayerLayout {
        device: Some(0),
        experts: model.experts,
        top_k: model.top_k,
        tensors: tensors.to_vec(),
    };
    let device = DeviceLayout {
        alignment_bytes: 256,
        split: 1.0,
        most_bank_bytes: None,
        offload_tokens: Some(OFFLOAD_TOKENS),
    };
    Ok(PoolLayout::new(
        vec![layer; model.layers as usize],
        vec![device],
    )?)
}
