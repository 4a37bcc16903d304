//! Targeting: which experts are locked.
//!
//! Experts are ranked by score per byte. Shrinks unlock the worst at once and without limit; fills
//! use room in the budget; a swap needs a margin, a payback, a minimum dwell and tokens in the churn
//! bucket. A swap only ever replaces experts by a better one, so under fixed scores the pinned set
//! rises in lexicographic order and comes to rest.
//!
//! What ranks below the frontier of eviction is let go at once when it has missed more routings than
//! chance explains. Idleness within chance is no reason: an expert routed every thirtieth token is
//! idle most of the time, and would be locked again for each of its routings. What is let go is no
//! candidate before it is routed again, so nothing flaps at the frontier.
//!
//! What is stable in VRAM is no candidate, however it ranks, and is let go as soon as its room is
//! wanted: RAM is for what the card would have to wait for.

use crate::config::TargetingConfig;
use crate::decision::{Action, Decision, Reason};
use crate::ids::ExpertId;
use crate::num::{narrow, to_count, to_u32};
use crate::observe::Residence;
use crate::scores::Idleness;
use crate::sense::{Sizes, Step};

/// An ordered lock that the books do not show after this long is forgotten, seconds; reading adds
/// its own time.
const ORDER_TIMEOUT_S: f64 = 2.0;

/// Part of transit that the frontier of eviction is read from.
const FRONTIER_PART: usize = 16;

/// What targeting reads each tick.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TargetInput<'a> {
    pub step: Step,
    /// Tokens decoded since the start.
    pub tokens: f64,
    pub scores: &'a [f32],
    /// What experts are ranked by; positive.
    pub ranks: &'a [f32],
    /// With it, pinned experts that are idle beyond chance and rank below what transit is about to
    /// evict are let go at once.
    pub idleness: Option<Idleness<'a>>,
    /// Drift was found a short while ago: what chance explains no longer counts.
    pub hurry: bool,
    pub residence: &'a [Residence],
    /// Experts that need no lock, since VRAM has them.
    pub covered: Option<&'a [bool]>,
    pub budget_bytes: u64,
    /// Seconds that a miss costs.
    pub miss_cost_s: f64,
    /// Disk bandwidth assumed for reads, bytes per second.
    pub read_bytes_per_s: f64,
    pub fill: Fill,
    /// Reason given for experts that swaps bring in.
    pub swap_reason: Reason,
}

impl TargetInput<'_> {
    fn covers(&self, index: usize) -> bool {
        self.covered
            .is_some_and(|covered| covered.get(index).copied().unwrap_or(false))
    }
}

/// How room in the budget is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// With experts that pay for themselves, within the churn limit.
    Paying(Reason),
    /// With every expert that has a score, at once: the start.
    AtOnce(Reason),
    /// With every expert, at once when it is the start, else within the churn limit: everything fits.
    Everything { at_once: bool },
}

/// When an expert was last ordered locked.
#[derive(Clone, Copy, Debug)]
struct Order {
    s: f64,
    tokens: f64,
    /// Until then the order counts as carried out, seconds.
    pending_until_s: f64,
}

/// The state: orders, and buffers that are reused.
#[derive(Clone, Debug)]
pub(crate) struct Targeting {
    config: TargetingConfig,
    orders: Vec<Order>,
    bucket_bytes: f64,
    pinned: Vec<u64>,
    resident: Vec<u64>,
    absent: Vec<u64>,
    victims: Vec<usize>,
}

impl Targeting {
    pub fn new(config: &TargetingConfig, experts: usize) -> Self {
        let never = Order {
            s: f64::NEG_INFINITY,
            tokens: f64::NEG_INFINITY,
            pending_until_s: f64::NEG_INFINITY,
        };
        Self {
            config: config.clone(),
            orders: vec![never; experts],
            bucket_bytes: config.churn_burst_bytes as f64,
            pinned: Vec::with_capacity(experts),
            resident: Vec::with_capacity(experts),
            absent: Vec::with_capacity(experts),
            victims: Vec::with_capacity(64),
        }
    }

    /// Takes over other settings; orders stand.
    pub fn reconfigure(&mut self, config: &TargetingConfig) {
        self.config = config.clone();
    }

    /// Fills `out.unpin` and `out.pin`.
    pub fn decide(&mut self, sizes: &Sizes, input: &TargetInput<'_>, out: &mut Decision) {
        let refill = self.config.churn_bytes_per_s as f64 * input.step.dt_s;
        let burst = self.config.churn_burst_bytes as f64;
        self.bucket_bytes = (self.bucket_bytes + refill).min(burst);
        let mut used_bytes = self.sort_out(sizes, input);
        if input.covered.is_some()
            && used_bytes.saturating_add(sizes.least_bytes) > input.budget_bytes
        {
            used_bytes -= self.uncover(sizes, input, out);
        }
        if used_bytes > input.budget_bytes {
            self.shrink(sizes, input, used_bytes - input.budget_bytes, out);
            return;
        }
        let frontier = self.frontier();
        let freed_bytes = self.release(sizes, input, frontier, out);
        let mut room_bytes = input.budget_bytes - used_bytes + freed_bytes;
        let sought = self.sought(sizes, input.fill, room_bytes);
        best_first(&mut self.resident, sought);
        best_first(&mut self.absent, sought);
        let filled = self.fill(sizes, input, frontier, &mut room_bytes, out);
        if filled
            && self.config.max_swaps_per_tick > 0
            && !matches!(input.fill, Fill::Everything { .. })
        {
            self.swap(sizes, input, room_bytes, out);
        }
    }

    /// Splits the experts by where they are; returns the bytes locked or ordered locked. Those in VRAM
    /// rank last, and are no candidates.
    fn sort_out(&mut self, sizes: &Sizes, input: &TargetInput<'_>) -> u64 {
        self.pinned.clear();
        self.resident.clear();
        self.absent.clear();
        let mut used_bytes = 0u64;
        for (index, (&rank, &per_byte)) in input.ranks.iter().zip(&sizes.per_byte).enumerate() {
            let residence = input.residence.get(index).copied().unwrap_or_default();
            let rank = rank * per_byte;
            if input.covers(index) {
                if residence == Residence::Pinned {
                    used_bytes = used_bytes.saturating_add(sizes.bytes[index]);
                    self.pinned.push(worst_key(0.0, index));
                }
            } else if residence == Residence::Pinned {
                self.orders[index].pending_until_s = f64::NEG_INFINITY;
                used_bytes = used_bytes.saturating_add(sizes.bytes[index]);
                self.pinned.push(worst_key(rank, index));
            } else if input.step.now_s < self.orders[index].pending_until_s {
                used_bytes = used_bytes.saturating_add(sizes.bytes[index]);
            } else if residence == Residence::Transit {
                self.resident.push(best_key(rank, index));
            } else {
                self.absent.push(best_key(rank, index));
            }
        }
        used_bytes
    }

    /// Unlocks all that is in VRAM as well. Returns the bytes.
    fn uncover(&mut self, sizes: &Sizes, input: &TargetInput<'_>, out: &mut Decision) -> u64 {
        let mut freed_bytes = 0u64;
        self.pinned.retain(|&key| {
            let index = worst_index(key);
            let covered = input.covers(index);
            if covered {
                freed_bytes += sizes.bytes[index];
                out.unpin.push(action(index, Reason::InVram, input.scores));
            }
            !covered
        });
        freed_bytes
    }

    /// Rank of what transit evicts next: its sixteenth-worst part, so that a single straggler says
    /// nothing. 0 when there is no transit.
    fn frontier(&mut self) -> f32 {
        let worst = self.resident.len().div_ceil(FRONTIER_PART);
        if worst == 0 {
            return 0.0;
        }
        let at = self.resident.len() - worst;
        let (_, &mut key, _) = self.resident.select_nth_unstable(at);
        best_rank(key)
    }

    /// Unlocks pinned experts that have missed more routings than chance explains and rank clearly
    /// below the frontier: they are worth less than what is evicted instead of them. Unlocking is
    /// cheap, so no churn limit holds it up. Returns the bytes.
    fn release(
        &mut self,
        sizes: &Sizes,
        input: &TargetInput<'_>,
        frontier: f32,
        out: &mut Decision,
    ) -> u64 {
        let limit = frontier / narrow(1.0 + self.config.margin);
        let (config, orders) = (&self.config, &self.orders);
        let mut freed_bytes = 0u64;
        if input.idleness.is_none() {
            return freed_bytes;
        }
        self.pinned.retain(|&key| {
            let index = worst_index(key);
            let order = orders[index];
            let stale = worst_rank(key) < limit
                && is_stale(config, input, index)
                && input.step.now_s - order.s >= config.dwell_s
                && input.tokens - order.tokens >= config.dwell_tokens;
            if stale {
                freed_bytes = freed_bytes.saturating_add(sizes.bytes[index]);
                out.unpin.push(action(index, Reason::Stale, input.scores));
            }
            !stale
        });
        freed_bytes
    }

    /// How many of the best candidates can matter this tick.
    fn sought(&self, sizes: &Sizes, fill: Fill, room_bytes: u64) -> usize {
        let fits = to_count(room_bytes as f64 / sizes.least_bytes as f64);
        let fills = match fill {
            Fill::AtOnce(_) | Fill::Everything { .. } => fits,
            Fill::Paying(_) => fits.min(self.config.max_fills_per_tick as usize),
        };
        fills.saturating_add(self.config.max_swaps_per_tick as usize)
    }

    fn shrink(
        &mut self,
        sizes: &Sizes,
        input: &TargetInput<'_>,
        mut excess_bytes: u64,
        out: &mut Decision,
    ) {
        let most = to_count(excess_bytes as f64 / sizes.least_bytes as f64).saturating_add(1);
        best_first(&mut self.pinned, most);
        for &key in &self.pinned {
            if excess_bytes == 0 {
                break;
            }
            let index = worst_index(key);
            excess_bytes = excess_bytes.saturating_sub(sizes.bytes[index]);
            out.unpin.push(action(index, Reason::Shrink, input.scores));
        }
    }

    /// Uses room in the budget. True when nothing more was to be filled, so that swaps make sense.
    fn fill(
        &mut self,
        sizes: &Sizes,
        input: &TargetInput<'_>,
        frontier: f32,
        room_bytes: &mut u64,
        out: &mut Decision,
    ) -> bool {
        let (reason, at_once) = match input.fill {
            Fill::Paying(reason) => (reason, false),
            Fill::AtOnce(reason) => (reason, true),
            Fill::Everything { at_once } => (Reason::LockAll, at_once),
        };
        let most = match input.fill {
            Fill::Paying(_) => self.config.max_fills_per_tick as usize,
            Fill::AtOnce(_) | Fill::Everything { .. } => usize::MAX,
        };
        let (mut resident_at, mut absent_at) = (0, 0);
        while out.pin.len() < most && *room_bytes >= sizes.least_bytes {
            let (key, absent) = match (self.resident.get(resident_at), self.absent.get(absent_at)) {
                (Some(&resident), Some(&absent)) if absent < resident => (absent, true),
                (Some(&resident), _) => (resident, false),
                (None, Some(&absent)) => (absent, true),
                (None, None) => return true,
            };
            let index = best_index(key);
            let score = f64::from(input.scores[index]);
            let pays = match input.fill {
                Fill::Everything { .. } => true,
                Fill::AtOnce(_) => score > 0.0,
                Fill::Paying(_) => {
                    self.is_clear(sizes, input, index, frontier)
                        && self.pays(sizes, input, index, absent, score)
                }
            };
            let fits = sizes.bytes[index] <= *room_bytes;
            if pays && fits {
                if !at_once && !self.spend(sizes.bytes[index], absent) {
                    return false;
                }
                *room_bytes -= sizes.bytes[index];
                self.order(sizes, input, index, absent, reason, out);
            }
            // A fill takes its candidate out of the swaps' reach by the pending mark.
            if absent {
                absent_at += 1;
            } else {
                resident_at += 1;
            }
        }
        out.pin.len() < most
    }

    /// Whether an expert stands clear of the frontier: what is near would be let go again.
    fn is_clear(
        &self,
        sizes: &Sizes,
        input: &TargetInput<'_>,
        index: usize,
        frontier: f32,
    ) -> bool {
        let limit = frontier * narrow(1.0 + self.config.absent_margin);
        input.idleness.is_none()
            || input.ranks[index] * sizes.per_byte[index] > limit
                && !is_stale(&self.config, input, index)
    }

    fn swap(
        &mut self,
        sizes: &Sizes,
        input: &TargetInput<'_>,
        mut room_bytes: u64,
        out: &mut Decision,
    ) {
        let most = self.config.max_swaps_per_tick as usize;
        let (config, orders) = (&self.config, &self.orders);
        self.pinned.retain(|&key| {
            let order = orders[worst_index(key)];
            input.step.now_s - order.s >= config.dwell_s
                && input.tokens - order.tokens >= config.dwell_tokens
        });
        best_first(&mut self.pinned, most.saturating_mul(2));
        let (mut resident_at, mut absent_at, mut victim_at, mut swaps) = (0, 0, 0, 0);
        while swaps < most {
            let resident = self.next_candidate(input, &self.resident, &mut resident_at);
            let absent = self.next_candidate(input, &self.absent, &mut absent_at);
            let (index, absent) = match (resident, absent) {
                (Some(resident), Some(absent)) => {
                    let rank = |index: usize| input.ranks[index] * sizes.per_byte[index];
                    // Reading is dear: an absent expert goes first only when it is far ahead.
                    if rank(absent) > rank(resident) * 2.0 {
                        (absent, true)
                    } else {
                        (resident, false)
                    }
                }
                (Some(resident), None) => (resident, false),
                (None, Some(absent)) => (absent, true),
                (None, None) => return,
            };
            let next_victim = self.victims_for(sizes, input, index, absent, room_bytes, victim_at);
            let Some((next_victim, freed_bytes)) = next_victim else {
                // The best resident candidate fails: so do those after it. Try the other list once.
                if absent {
                    absent_at = self.absent.len();
                } else {
                    resident_at = self.resident.len();
                }
                continue;
            };
            if !self.spend(sizes.bytes[index], absent) {
                return;
            }
            for &victim in &self.victims {
                out.unpin
                    .push(action(victim, Reason::Swapped, input.scores));
            }
            room_bytes = room_bytes + freed_bytes - sizes.bytes[index];
            victim_at = next_victim;
            swaps += usize::from(!self.victims.is_empty());
            self.order(sizes, input, index, absent, input.swap_reason, out);
        }
    }

    /// The candidate at the cursor, past those that were just ordered and those out of use.
    fn next_candidate(
        &self,
        input: &TargetInput<'_>,
        keys: &[u64],
        at: &mut usize,
    ) -> Option<usize> {
        while let Some(&key) = keys.get(*at) {
            let index = best_index(key);
            let pending = input.step.now_s < self.orders[index].pending_until_s;
            if !pending && !is_stale(&self.config, input, index) {
                return Some(index);
            }
            *at += 1;
        }
        None
    }

    /// Collects into `self.victims` the worst pinned experts that must go for `candidate`; `None`
    /// when margin or payback forbid it. Returns the next cursor and the bytes freed.
    fn victims_for(
        &mut self,
        sizes: &Sizes,
        input: &TargetInput<'_>,
        candidate: usize,
        absent: bool,
        room_bytes: u64,
        mut victim_at: usize,
    ) -> Option<(usize, u64)> {
        self.victims.clear();
        let margin = if absent {
            self.config.absent_margin
        } else {
            self.config.margin
        };
        let rank = f64::from(input.ranks[candidate] * sizes.per_byte[candidate]);
        let (mut freed_bytes, mut lost_score) = (0u64, 0.0);
        while room_bytes + freed_bytes < sizes.bytes[candidate] {
            let victim = worst_index(*self.pinned.get(victim_at)?);
            victim_at += 1;
            let victim_rank = f64::from(input.ranks[victim] * sizes.per_byte[victim]);
            if rank <= victim_rank * (1.0 + margin) {
                return None;
            }
            freed_bytes += sizes.bytes[victim];
            lost_score += self.worth(input, victim);
            self.victims.push(victim);
        }
        // Noise makes equals differ: without the margin they would take turns.
        let gain = f64::from(input.scores[candidate]) - lost_score * (1.0 + margin);
        self.pays(sizes, input, candidate, absent, gain)
            .then_some((victim_at, freed_bytes))
    }

    /// Routings per token that a pinned expert is given up with: idleness within chance takes
    /// nothing from it.
    fn worth(&self, input: &TargetInput<'_>, index: usize) -> f64 {
        let usual = input
            .idleness
            .filter(|_| !is_stale(&self.config, input, index))
            .map_or(0.0, |idleness| idleness.usual(index));
        f64::from(usual.max(input.scores[index]))
    }

    /// Whether `gain` routings per token are worth locking (and reading) the expert.
    fn pays(
        &self,
        sizes: &Sizes,
        input: &TargetInput<'_>,
        index: usize,
        absent: bool,
        gain: f64,
    ) -> bool {
        let bytes = sizes.bytes[index] as f64;
        let lock_s = bytes / f64::from(1u32 << 20) * self.config.lock_us_per_mib / 1e6;
        let read_s = if absent {
            bytes / input.read_bytes_per_s
        } else {
            0.0
        };
        gain > 0.0 && gain * self.config.payback_tokens * input.miss_cost_s > lock_s + read_s
    }

    /// Takes the cost of locking from the churn bucket; false when it does not hold that much.
    fn spend(&mut self, bytes: u64, absent: bool) -> bool {
        let factor = if absent {
            1.0
        } else {
            self.config.resident_cost
        };
        let cost = bytes as f64 * factor;
        // An expert larger than the bucket goes when the bucket is full, and leaves a debt.
        if self.bucket_bytes < cost.min(self.config.churn_burst_bytes as f64) {
            return false;
        }
        self.bucket_bytes -= cost;
        true
    }

    fn order(
        &mut self,
        sizes: &Sizes,
        input: &TargetInput<'_>,
        index: usize,
        absent: bool,
        reason: Reason,
        out: &mut Decision,
    ) {
        // An expert is locked after those ordered before it have been read.
        let ahead = if absent { out.pin.len() + 1 } else { 0 };
        let read_s = ahead as f64 * sizes.bytes[index] as f64 / input.read_bytes_per_s;
        self.orders[index] = Order {
            s: input.step.now_s,
            tokens: input.tokens,
            pending_until_s: input.step.now_s + ORDER_TIMEOUT_S + 2.0 * read_s,
        };
        out.pin.push(action(index, reason, input.scores));
    }
}

/// Whether an expert has missed more routings than chance explains.
fn is_stale(config: &TargetingConfig, input: &TargetInput<'_>, index: usize) -> bool {
    let most = if input.hurry {
        0.0
    } else {
        config.stale_missed
    };
    input
        .idleness
        .is_some_and(|idleness| f64::from(idleness.missed(index)) > most)
}

fn action(index: usize, reason: Reason, scores: &[f32]) -> Action {
    Action {
        expert: ExpertId(to_u32(index)),
        reason,
        score: scores[index],
    }
}

/// Keys order by rank, then by index, as integers. Ranks are not negative, so their bits sort as
/// they do.
fn best_key(rank: f32, index: usize) -> u64 {
    (u64::from(!rank.to_bits()) << 32) | u64::from(to_u32(index))
}

fn best_rank(key: u64) -> f32 {
    f32::from_bits(!to_u32(to_count((key >> 32) as f64)))
}

fn best_index(key: u64) -> usize {
    to_count((key & 0xffff_ffff) as f64)
}

fn worst_key(rank: f32, index: usize) -> u64 {
    (u64::from(rank.to_bits()) << 32) | u64::from(!to_u32(index))
}

fn worst_rank(key: u64) -> f32 {
    f32::from_bits(to_u32(to_count((key >> 32) as f64)))
}

fn worst_index(key: u64) -> usize {
    to_count((!key & 0xffff_ffff) as f64)
}

/// Keeps the `count` smallest keys, in order.
fn best_first(keys: &mut Vec<u64>, count: usize) {
    if count < keys.len() {
        if count > 0 {
            keys.select_nth_unstable(count - 1);
        }
        keys.truncate(count);
    }
    keys.sort_unstable();
}
