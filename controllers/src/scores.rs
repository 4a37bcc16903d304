//! Scores: expected decode routings per token of every expert, from two decayed counts.
//!
//! `score = (fast + w x slow) / (fast_tokens + w x slow_tokens)`, where `fast` and `slow` are routing
//! counts whose weights halve every `fast_` and `slow_half_life_tokens` and the denominators are the token count decayed
//! alike. The weights are those that came closest to Belady on a recorded trace
//! (docs/control.md); dividing turns the counts into a probability that can be compared with costs.
//!
//! Counts alone hold on to what a topic that is over used often, while recency alone forgets what
//! comes back: after a change of topic the first lose to LRU, in a steady one the second does. So
//! what has not been routed for `idle` tokens is worth less: `score` halves every
//! `idle_half_life_tokens`, and experts are ranked by `2^(8 (probability - idle_cost x idle))`, the
//! linear trade of probability against idleness that did best on both kinds of trace
//! (docs/control.md), made positive.

use crate::config::ScoreConfig;
use crate::ids::ModelShape;
use crate::num::{narrow, to_count};
use crate::profile::Profile;

/// More routings of one expert than this in one tick mean that the counter was restarted.
const MOST_PER_TICK: u32 = 1 << 24;

/// How steeply rank grows with probability: a rank of twice another is 1/8 more probable.
const RANK_STEEPNESS: f32 = 8.0;

/// Exponent below which all ranks are alike; single precision ends a little further down.
const LEAST_RANK_EXPONENT: f32 = -120.0;

/// Smaller components are cleared, since arithmetic on denormal numbers is slow.
const NOTHING: f32 = 1e-20;

/// Skew of the recent routing against a uniform router's at the same sample size.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Skew {
    /// Effective tokens of evidence.
    pub tokens: f64,
    /// Standard scores above what a uniform router gives.
    pub z: f64,
    /// Coefficient of variation of the routing probabilities beyond sampling noise.
    pub variation: f64,
}

/// How long experts have not been routed, and how often they used to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idleness<'a> {
    idle: &'a [f32],
    usual: &'a [f32],
}

impl Idleness<'_> {
    /// Routings that an expert should have had since its last one. Under a router that has not
    /// changed, more than `n` of them have failed to come with a chance of `exp(-n)`.
    pub fn missed(self, index: usize) -> f32 {
        self.idle[index] * self.usual[index]
    }

    /// Probability of a routing when it was last routed.
    pub fn usual(self, index: usize) -> f32 {
        self.usual[index]
    }
}

/// A span of experts that share a router.
#[derive(Clone, Copy, Debug)]
struct Layer {
    first: usize,
    experts: usize,
    probability: f64,
}

/// Per-expert state.
#[derive(Clone, Debug)]
pub(crate) struct Scores {
    config: ScoreConfig,
    layers: Vec<Layer>,
    routed_per_token: f64,
    fast: Vec<f32>,
    slow: Vec<f32>,
    prior: Vec<f32>,
    score: Vec<f32>,
    rank: Vec<f32>,
    /// Tokens since the last decode routing; since the start for what was never routed.
    idle: Vec<f32>,
    /// Probability of a routing when it was last routed; the profile's before that.
    usual: Vec<f32>,
    last_decode: Vec<u32>,
    last_prefill: Vec<u32>,
    decode_known: bool,
    prefill_known: bool,
    fast_tokens: f64,
    slow_tokens: f64,
    /// Sum of squared weights of the slow component: its variance under a fixed router.
    slow_squares: f64,
    prior_tokens: f64,
    scratch: Vec<u32>,
}

impl Scores {
    pub fn new(shape: &ModelShape, config: &ScoreConfig, profile: Option<&Profile>) -> Self {
        let experts = shape.total_experts();
        let layers = (0..shape.layers())
            .map(|layer| {
                let experts = shape.experts_in(layer);
                let probability = f64::from(shape.top_k_in(layer)) / f64::from(experts);
                let first = shape.id(layer, 0).index();
                Layer {
                    first,
                    experts: experts as usize,
                    probability,
                }
            })
            .collect();
        let prior = profile.map_or_else(|| vec![0.0; experts], |p| p.probabilities().to_vec());
        let mut scores = Self {
            config: config.clone(),
            layers,
            routed_per_token: f64::from(shape.routed_per_token()).max(1.0),
            fast: vec![0.0; experts],
            slow: vec![0.0; experts],
            score: vec![0.0; experts],
            rank: vec![0.0; experts],
            idle: vec![0.0; experts],
            usual: prior.clone(),
            prior,
            last_decode: vec![0; experts],
            last_prefill: vec![0; experts],
            decode_known: false,
            prefill_known: false,
            fast_tokens: 0.0,
            slow_tokens: 0.0,
            slow_squares: 0.0,
            prior_tokens: if profile.is_some() {
                config.profile_tokens
            } else {
                0.0
            },
            scratch: Vec::with_capacity(experts),
        };
        scores.rescore();
        scores
    }

    /// Expected decode routings per token, by expert.
    pub fn get(&self) -> &[f32] {
        &self.score
    }

    /// What experts are ranked by, by expert: positive, and higher for what is rather kept.
    pub fn ranks(&self) -> &[f32] {
        &self.rank
    }

    /// Idleness of all experts.
    pub fn idleness(&self) -> Idleness<'_> {
        Idleness {
            idle: &self.idle,
            usual: &self.usual,
        }
    }

    /// Takes in cumulative counts, which may wrap. Returns the decoded tokens that they stand for
    /// (fractional while a token is in flight). Lists of the wrong length are as good as absent.
    pub fn update(
        &mut self,
        decode: Option<&[u32]>,
        prefill: Option<&[u32]>,
        half_life_factor: f64,
    ) -> f64 {
        let decode = decode.filter(|counts| counts.len() == self.score.len());
        let prefill = prefill.filter(|counts| counts.len() == self.score.len());
        let known = std::mem::replace(&mut self.decode_known, decode.is_some());
        let routed = match decode {
            Some(counts) if known => total_since(counts, &self.last_decode),
            Some(counts) => {
                self.last_decode.copy_from_slice(counts);
                0
            }
            None => 0,
        };
        let tokens = routed as f64 / self.routed_per_token;
        if let Some(counts) = decode.filter(|_| routed > 0) {
            self.decode(counts, tokens, half_life_factor);
        }
        let prefilled = self.prefill(prefill);
        if routed > 0 || prefilled {
            self.rescore();
        }
        tokens
    }

    fn decode(&mut self, counts: &[u32], tokens: f64, half_life_factor: f64) {
        let fast_half_life = self.config.fast_half_life_tokens * half_life_factor;
        let slow_half_life = self.config.slow_half_life_tokens * half_life_factor;
        let fast_keep = (-tokens / fast_half_life).exp2();
        let slow_keep = (-tokens / slow_half_life).exp2();
        let (fast_scale, slow_scale) = (narrow(fast_keep), narrow(slow_keep));
        let slots = self
            .fast
            .iter_mut()
            .zip(&mut self.slow)
            .zip(&mut self.idle)
            .zip(&mut self.last_decode);
        let passed = narrow(tokens);
        for ((((fast, slow), idle), last), &count) in slots.zip(counts) {
            let new = since(count, *last) as f32;
            *last = count;
            *idle = if new > 0.0 { 0.0 } else { *idle + passed };
            *fast = settle(*fast * fast_scale + new);
            *slow = settle(*slow * slow_scale + new);
        }
        self.fast_tokens = self.fast_tokens * fast_keep + tokens;
        self.slow_tokens = self.slow_tokens * slow_keep + tokens;
        self.slow_squares = self.slow_squares * slow_keep * slow_keep + tokens;
        self.prior_tokens *= slow_keep;
    }

    /// Adds prefill routings to the slow component with their small weight; true if there were any.
    fn prefill(&mut self, counts: Option<&[u32]>) -> bool {
        let known = std::mem::replace(&mut self.prefill_known, counts.is_some());
        let Some(counts) = counts else { return false };
        if !known {
            self.last_prefill.copy_from_slice(counts);
            return false;
        }
        if total_since(counts, &self.last_prefill) == 0 {
            return false;
        }
        let (weight, cap) = (
            narrow(self.config.prefill_weight),
            narrow(self.config.prefill_cap),
        );
        for ((slow, last), &count) in self.slow.iter_mut().zip(&mut self.last_prefill).zip(counts) {
            *slow += (since(count, *last) as f32 * weight).min(cap);
            *last = count;
        }
        true
    }

    fn rescore(&mut self) {
        let slow_weight = self.config.slow_weight;
        let tokens = self.fast_tokens + slow_weight * (self.slow_tokens + self.prior_tokens);
        // Below one token of evidence a single routing would look like certainty.
        let scale = 1.0 / tokens.max(1.0);
        let fast_scale = narrow(scale);
        let slow_scale = narrow(slow_weight * scale);
        let prior_scale = narrow(slow_weight * self.prior_tokens * scale);
        let idle_cost = narrow(self.config.idle_cost_per_token);
        let idle_rate = narrow(-1.0 / self.config.idle_half_life_tokens);
        let parts = self
            .fast
            .iter()
            .zip(&self.slow)
            .zip(&self.prior)
            .zip(&self.idle);
        let slots = self
            .score
            .iter_mut()
            .zip(&mut self.rank)
            .zip(&mut self.usual);
        for (((score, rank), usual), (((fast, slow), prior), &idle)) in slots.zip(parts) {
            let probability = fast * fast_scale + slow * slow_scale + prior * prior_scale;
            if idle == 0.0 {
                *usual = probability;
                *score = probability;
            } else {
                *score = probability * (idle * idle_rate).exp2();
            }
            *rank = rank_of(probability, idle, idle_cost);
        }
    }

    /// Compares the spread of the slow counts with a uniform router's (index of dispersion).
    ///
    /// With token weights `w`, a router that picks `k` of `E` evenly gives each count the variance
    /// `p (1 - p) x sum(w^2)`, `p = k / E`; the sum of squares over it, times `(E - 1) / E` for the
    /// fixed total, is chi-squared with `E - 1` degrees of freedom. Layers add up.
    pub fn skew(&self) -> Skew {
        if self.slow_squares <= 0.0 {
            return Skew::default();
        }
        let tokens = self.slow_tokens * self.slow_tokens / self.slow_squares;
        let (mut chi_squared, mut freedom, mut variance, mut layers) = (0.0, 0.0, 0.0, 0.0);
        for layer in self.layers.iter().filter(|layer| layer.probability < 1.0) {
            let counts = &self.slow[layer.first..layer.first + layer.experts];
            let experts = layer.experts as f64;
            let mean = counts.iter().map(|&c| f64::from(c)).sum::<f64>() / experts;
            let squares: f64 = counts.iter().map(|&c| (f64::from(c) - mean).powi(2)).sum();
            let p = layer.probability;
            let noise = p * (1.0 - p) * self.slow_squares;
            chi_squared += squares / noise * (experts - 1.0) / experts;
            freedom += experts - 1.0;
            let beyond_noise = (squares / experts - noise).max(0.0);
            variance += beyond_noise / (self.slow_tokens * p).powi(2);
            layers += 1.0;
        }
        if freedom <= 0.0 {
            return Skew {
                tokens,
                ..Skew::default()
            };
        }
        let z = (chi_squared - freedom) / (2.0 * freedom).sqrt();
        Skew {
            tokens,
            z,
            variation: (variance / layers).sqrt(),
        }
    }

    /// Mean score of the experts at the edge of a capacity of `experts` experts: the last twentieth
    /// of what it would hold.
    pub fn at_margin(&mut self, experts: f64) -> f64 {
        let inside = to_count(experts)
            .clamp(1, self.score.len().max(1))
            .min(self.score.len());
        let band = (inside / 20).max(1).min(inside);
        if band == 0 {
            return 0.0;
        }
        self.scratch.clear();
        // Scores are not negative, so their bits sort as they do; inverted, best first.
        self.scratch
            .extend(self.score.iter().map(|score| !score.to_bits()));
        self.scratch.select_nth_unstable(inside - 1);
        self.scratch.truncate(inside);
        self.scratch.select_nth_unstable(inside - band);
        let edge = &self.scratch[inside - band..];
        edge.iter()
            .map(|bits| f64::from(f32::from_bits(!bits)))
            .sum::<f64>()
            / band as f64
    }
}

fn settle(value: f32) -> f32 {
    if value < NOTHING { 0.0 } else { value }
}

/// Routings since `last`, across a wrap; none when the counter was restarted.
fn since(count: u32, last: u32) -> u32 {
    let new = count.wrapping_sub(last);
    if new > MOST_PER_TICK { 0 } else { new }
}

/// The linear trade of probability against idleness, made positive.
fn rank_of(probability: f32, idle: f32, idle_cost: f32) -> f32 {
    let exponent = RANK_STEEPNESS * (probability - idle_cost * idle);
    exponent.max(LEAST_RANK_EXPONENT).exp2()
}

fn total_since(counts: &[u32], last: &[u32]) -> u64 {
    counts
        .iter()
        .zip(last)
        .map(|(&count, &last)| u64::from(since(count, last)))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Ranks can be compared and divided: finite, positive, and in the order of what they are
        /// made from, however long an expert is idle.
        #[test]
        fn ranks_are_positive_and_monotone(
            probability in 0.0f32..=1.0,
            more in 0.001f32..1.0,
            idle in 0.0f32..1e7,
            longer in 1.0f32..1e7,
            cost in 0.0f32..=1.0,
        ) {
            let rank = rank_of(probability, idle, cost);
            prop_assert!(rank.is_finite() && rank > 0.0, "{rank}");
            let (likelier, idler) = (
                rank_of(probability + more, idle, cost),
                rank_of(probability, idle + longer, cost),
            );
            prop_assert!(likelier >= rank && idler <= rank);
            let floored = RANK_STEEPNESS * (probability - cost * idle) <= LEAST_RANK_EXPONENT;
            if !floored && cost * idle < 10.0 {
                prop_assert!(likelier > rank, "{likelier} {rank}");
                prop_assert!(cost < 0.001 || idler < rank, "{idler} {rank}");
            }
        }
    }

    #[test]
    fn what_is_missed_grows_with_idleness_until_the_next_routing() {
        let (mut scores, mut counts) = (scores(None), [0; 16]);
        scores.update(Some(&counts), None, 1.0);
        steady(&mut scores, &mut counts, 40, 1);
        assert_eq!(scores.idleness().missed(0), 0.0);
        for _ in 0..20 {
            for id in [2, 3, 10, 11] {
                counts[id] += 1;
            }
            scores.update(Some(&counts), None, 1.0);
        }
        assert!(
            (scores.idleness().missed(0) - 20.0).abs() < 0.1,
            "it was certain"
        );
        assert_eq!(
            scores.idleness().missed(4),
            0.0,
            "never used, so nothing is missed"
        );
        assert!(scores.ranks()[2] > scores.ranks()[0] && scores.ranks()[0] > 0.0);
        counts[0] += 1;
        scores.update(Some(&counts), None, 1.0);
        assert_eq!(scores.idleness().missed(0), 0.0);
    }

    fn shape() -> ModelShape {
        ModelShape::uniform(2, 8, 1000, 2).unwrap()
    }

    fn scores(profile: Option<&[f32]>) -> Scores {
        let profile = profile.map(|counts| Profile::from_counts(&shape(), counts).unwrap());
        Scores::new(&shape(), &ScoreConfig::default(), profile.as_ref())
    }

    /// Routes every token to experts 0 and 1 of both layers.
    fn steady(scores: &mut Scores, counts: &mut [u32], ticks: usize, tokens: u32) {
        for _ in 0..ticks {
            for id in [0, 1, 8, 9] {
                counts[id] = counts[id].wrapping_add(tokens);
            }
            scores.update(Some(counts), None, 1.0);
        }
    }

    #[test]
    fn a_certain_expert_scores_one() {
        for tokens in [1, 3, 20] {
            let (mut scores, mut counts) = (scores(None), [0; 16]);
            scores.update(Some(&counts), None, 1.0);
            steady(&mut scores, &mut counts, 50, tokens);
            assert!(
                (scores.get()[0] - 1.0).abs() < 1e-4,
                "{tokens}: {}",
                scores.get()[0]
            );
            assert_eq!(scores.get()[2], 0.0);
        }
    }

    #[test]
    fn counts_may_wrap_and_restart() {
        let (mut plain, mut wrapping) = (scores(None), scores(None));
        let (mut low, mut high) = ([0; 16], [u32::MAX - 3; 16]);
        plain.update(Some(&low), None, 1.0);
        wrapping.update(Some(&high), None, 1.0);
        steady(&mut plain, &mut low, 10, 1);
        steady(&mut wrapping, &mut high, 10, 1);
        assert_eq!(plain.get(), wrapping.get());
        assert_eq!(
            plain.update(Some(&[0; 16]), None, 1.0),
            0.0,
            "a restart is no routing"
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "it takes hundreds of tokens")]
    fn a_profile_fades_as_evidence_comes_in() {
        let mut profile = [0.0; 16];
        profile[5] = 3.0;
        let (mut scores, mut counts) = (scores(Some(&profile)), [0; 16]);
        assert!((scores.get()[5] - 1.0).abs() < 1e-6);
        scores.update(Some(&counts), None, 1.0);
        steady(&mut scores, &mut counts, 30, 1);
        assert!(scores.get()[0] > scores.get()[5]);
        steady(&mut scores, &mut counts, 600, 1);
        assert!(scores.get()[5] < 1e-3);
    }

    #[test]
    fn prefill_counts_little_and_is_capped() {
        let (mut scores, mut counts) = (scores(None), [0; 16]);
        let mut prefill = [0; 16];
        scores.update(Some(&counts), Some(&prefill), 1.0);
        prefill[3] = 1_000_000;
        counts[0] += 4;
        scores.update(Some(&counts), Some(&prefill), 1.0);
        assert!(scores.get()[3] > 0.0);
        assert!(scores.get()[3] < scores.get()[0] / 4.0);
    }

    #[test]
    fn a_list_of_the_wrong_length_is_absent() {
        let mut scores = scores(None);
        assert_eq!(scores.update(Some(&[1; 3]), Some(&[1; 99]), 1.0), 0.0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it takes hundreds of tokens")]
    fn skew_tells_a_uniform_router_from_a_skewed_one() {
        let shape = ModelShape::uniform(8, 64, 1000, 4).unwrap();
        for (skewed, seed) in [(false, 1u64), (false, 2), (false, 3), (true, 4)] {
            let mut scores = Scores::new(&shape, &ScoreConfig::default(), None);
            let mut counts = vec![0u32; 512];
            let mut state = seed;
            scores.update(Some(&counts), None, 1.0);
            for _ in 0..200 {
                for layer in 0..8 {
                    let mut picked = [usize::MAX; 4];
                    for slot in 0..4 {
                        loop {
                            state = state
                                .wrapping_mul(6_364_136_223_846_793_005)
                                .wrapping_add(1);
                            let draw = to_count(((state >> 33) % 64) as f64);
                            let index = if skewed { draw * draw / 64 } else { draw };
                            if !picked.contains(&index) {
                                picked[slot] = index;
                                break;
                            }
                        }
                        counts[layer * 64 + picked[slot]] += 1;
                    }
                }
                scores.update(Some(&counts), None, 1.0);
            }
            let skew = scores.skew();
            assert!(skew.tokens > 100.0);
            assert_eq!(skew.z > 5.0, skewed, "{skew:?}");
            assert_eq!(skew.variation > 0.15, skewed, "{skew:?}");
        }
    }

    #[test]
    fn the_margin_is_the_edge_of_what_fits() {
        let profile: Vec<f32> = (0u8..16).map(f32::from).collect();
        let mut scores = scores(Some(&profile));
        let all: Vec<f32> = {
            let mut all = scores.get().to_vec();
            all.sort_by(|a, b| b.total_cmp(a));
            all
        };
        for inside in [1usize, 5, 16] {
            let edge = scores.at_margin(inside as f64);
            assert!((edge - f64::from(all[inside - 1])).abs() < 1e-6, "{inside}");
        }
        assert_eq!(scores.at_margin(1e9), f64::from(all[15]));
    }
}
