//! The next use of every expert, learned while the model runs: what experts are ranked by.
//!
//! `V` of an expert is the discounted chance of its next use, `E[discount^(T - 1)]` where `T` is the
//! number of tokens until then. A cache that keeps what has the highest `V` keeps what is used soonest,
//! which is what Belady's optimum does with knowledge of the future. It is a logistic model,
//!
//! ```text
//! V = sigmoid(w . features + q . context)
//! ```
//!
//! of six numbers that are shared by all experts (`w`: bias, the square roots of three decayed
//! routing rates, the logarithm of idleness, affinity to the present context) and, for each expert, a
//! weight on each dimension of the context (`q`).
//!
//! *Context* is what the model is busy with: each expert has a fixed random signature of signs, and the
//! context is the decayed sum of the signatures of what was routed, in all layers, less its own slow
//! mean, brought to length 1. It is a random projection of the recent routing (Johnson and
//! Lindenstrauss 1984), so equal topics give nearby contexts. *Affinity* is the cosine of the present
//! context and the mean context in which an expert was routed; it is of use after few routings, `q`
//! after many.
//!
//! Both are learned by temporal differences (Sutton 1988): when a layer's turn comes, what was
//! predicted at its last turn is compared with 1 for what was routed, and with
//! `discount^tokens x V` for the rest. No future is stored and nothing is waited for. Memory is
//! `DIMENSIONS` numbers an expert, three times; no pair of experts is looked at.

use crate::ids::ModelShape;
use crate::num::narrow;
use crate::numeric::{exp2, log2, signs};
use std::ops::Range;

/// Dimensions of the context.
const DIMENSIONS: usize = 16;

/// Discount of a use by one token. Hits change by less than .002 between 0.5 and 0.9.
const DISCOUNT: f32 = 0.75;

/// Half-lives of the routing rates, in tokens: the present passage, the present text, the model.
const HALF_LIVES_TOKENS: [f32; 3] = [8.0, 64.0, 1024.0];

/// Half-life of the context, in tokens.
const CONTEXT_HALF_LIFE_TOKENS: f32 = 1.0;

/// Share of the context that its slow mean takes up per token, once there are that many tokens.
const MEAN_SHARE: f32 = 0.003;

/// Share of the context that an expert's mean context takes up per routing, at least.
const MEMORY_SHARE: f32 = 0.02;

/// Rate at which the shared weights learn, for the mean of a layer's experts.
const SHARED_RATE: f32 = 0.05;

/// Rate at which an expert's own weights learn, and how much faster they do at first: by a factor of
/// `1 + EARLY_GAIN / (1 + routings)`.
const OWN_RATE: f32 = 0.15;
const EARLY_GAIN: f32 = 4.0;

/// What was not routed corrects an expert's own weights at one turn in so many, by as many times.
const SAMPLE: usize = 4;

/// Effective share of the past that rates start with, so that the first routing is no certainty.
const FIRST_SHARE: f32 = 0.05;

/// Idleness of what was never routed, and the most that is told apart, tokens.
const NEVER_IDLE_TOKENS: f32 = 100.0;
const MOST_IDLE_TOKENS: f32 = 500.0;

/// Scale of the logarithm (base 2) of idleness.
const IDLE_SCALE: f32 = 0.14;

/// Number of shared features beside the bias, and which of them affinity is.
const FEATURES: usize = 5;
const AFFINITY: usize = 4;

/// What the shared weights start from: bias, three rates, idleness, affinity. They are rounded from
/// what was learned on the training half of the reference trace and on a trace of four topics.
const FIRST_WEIGHTS: [f32; FEATURES + 1] = [-2.1, 1.5, 1.5, 0.7, -1.6, 0.9];

/// Smaller than any length that matters.
const NO_LENGTH: f32 = 1e-12;

/// The learner. Time passes with [`NextUse::advance`]; then each layer has its turn, in order.
#[derive(Clone, Debug)]
pub struct NextUse {
    layers: Vec<Range<usize>>,
    top_k: Vec<f32>,
    weights: [f32; FEATURES + 1],
    /// Decayed routings per token of each expert, by half-life, and the share of the past that they
    /// cover in each layer.
    rates: [Vec<f32>; 3],
    rate_share: Vec<[f32; 3]>,
    idle: Vec<f32>,
    routings: Vec<f32>,
    /// Features at each layer's last turn, and what they predicted.
    features: Vec<Features>,
    value: Vec<f32>,
    order: Vec<f32>,
    context: Context,
    /// The context at each layer's last turn, and the turns that it has had.
    seen: Vec<[f32; DIMENSIONS]>,
    turns: Vec<usize>,
    signature: Vec<[f32; DIMENSIONS]>,
    /// Each expert's own weights on the context, and the mean context of its routings with its length.
    own: Vec<[f32; DIMENSIONS]>,
    memory: Vec<[f32; DIMENSIONS]>,
    memory_length: Vec<f32>,
    half_life_factor: f32,
    /// Base-2 logarithm of the discount of one token.
    log_discount: f32,
    scratch: Scratch,
}

/// The decayed sum of signatures, its mean, and the direction in which it differs from that.
#[derive(Clone, Debug)]
struct Context {
    sum: [f32; DIMENSIONS],
    mean: [f32; DIMENSIONS],
    direction: [f32; DIMENSIONS],
    tokens: f32,
}

/// Features of a layer's experts, by feature, each as long as the largest layer.
type Features = [Vec<f32>; FEATURES];

/// Buffers of one turn, as long as the largest layer.
#[derive(Clone, Debug, Default)]
struct Scratch {
    features: Features,
    logit: Vec<f32>,
    error: Vec<f32>,
}

impl NextUse {
    /// A learner that knows nothing but, where there is one, a profile: the chance of a routing per
    /// token, by expert, worth `profile_tokens` tokens of evidence.
    ///
    /// # Panics
    /// When the profile does not have one number an expert.
    #[must_use]
    pub fn new(shape: &ModelShape, profile: Option<(&[f32], f64)>) -> Self {
        let experts = shape.total_experts();
        let layers: Vec<_> = (0..shape.layers())
            .map(|layer| {
                let first = shape.id(layer, 0).index();
                first..first + shape.experts_in(layer) as usize
            })
            .collect();
        let widest = layers.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let mut rates = [(); 3].map(|()| vec![0.0; experts]);
        let mut first_share = [FIRST_SHARE; 3];
        if let Some((chances, tokens)) = profile {
            assert_eq!(chances.len(), experts, "one chance an expert");
            for ((rate, share), half_life) in rates
                .iter_mut()
                .zip(&mut first_share)
                .zip(HALF_LIVES_TOKENS)
            {
                let known = 1.0 - exp2(-narrow(tokens) / half_life);
                *share = share.max(known);
                for (rate, chance) in rate.iter_mut().zip(chances) {
                    *rate = chance * known;
                }
            }
        }
        let mut learner = Self {
            weights: FIRST_WEIGHTS,
            rates,
            rate_share: vec![first_share; layers.len()],
            top_k: (0..layers.len())
                .map(|layer| shape.top_k_in(layer) as f32)
                .collect(),
            idle: vec![NEVER_IDLE_TOKENS; experts],
            routings: vec![0.0; experts],
            features: vec![[(); FEATURES].map(|()| vec![0.0; widest]); layers.len()],
            value: vec![0.0; experts],
            order: vec![0.0; experts],
            context: Context {
                sum: [0.0; DIMENSIONS],
                mean: [0.0; DIMENSIONS],
                direction: [0.0; DIMENSIONS],
                tokens: 0.0,
            },
            seen: vec![[0.0; DIMENSIONS]; layers.len()],
            turns: vec![0; layers.len()],
            signature: (0..experts).map(|e| signs(e as u64)).collect(),
            memory: vec![[0.0; DIMENSIONS]; experts],
            memory_length: vec![0.0; experts],
            own: vec![[0.0; DIMENSIONS]; experts],
            half_life_factor: 1.0,
            log_discount: log2(DISCOUNT),
            scratch: Scratch {
                features: [(); FEATURES].map(|()| vec![0.0; widest]),
                logit: vec![0.0; widest],
                error: vec![0.0; widest],
            },
            layers,
        };
        for layer in 0..learner.layers.len() {
            learner.predict(layer);
        }
        learner
    }

    /// The discounted chance of the next use at each layer's next turn, by expert; in 0 to 1.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.value
    }

    /// What experts are kept by, by expert: the base-2 logarithm of the value, discounted further by
    /// the time until the layer's next turn. A layer that has just had its turn is furthest.
    #[must_use]
    pub fn order(&self) -> &[f32] {
        &self.order
    }

    /// [`NextUse::order`] of some experts as positive numbers: the discounted chance itself.
    pub fn ranks(&self, experts: Range<usize>) -> impl Iterator<Item = f32> + '_ {
        self.order[experts].iter().map(|&order| exp2(order))
    }

    /// The shared weights: bias, rates with rising half-life, idleness, affinity.
    #[must_use]
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Time passes by `tokens`, a fraction while one is in flight. `half_life_factor` shortens the
    /// half-lives of the rates, for a while after drift.
    pub fn advance(&mut self, tokens: f32, half_life_factor: f32) {
        self.half_life_factor = half_life_factor;
        let later = tokens * self.log_discount;
        for order in &mut self.order {
            *order -= later;
        }
        self.context.advance(tokens);
    }

    /// A layer's turn: `routings` holds how often each of its experts was routed since its last turn.
    /// They say by themselves how many tokens back that lies; without any, the turn has not come.
    ///
    /// # Panics
    /// When there is no such layer or the list is not as long as the layer has experts.
    pub fn turn(&mut self, layer: usize, routings: &[f32]) {
        let range = self.layers[layer].clone();
        assert_eq!(routings.len(), range.len(), "one number an expert");
        let tokens = routings.iter().sum::<f32>() / self.top_k[layer];
        if tokens <= 0.0 {
            return;
        }
        self.count(layer, tokens, routings);
        self.scratch.error[..range.len()].copy_from_slice(&self.value[range.clone()]);
        self.features_of(layer);
        self.score(layer);
        if self.turns[layer] > 0 {
            self.learn(layer, tokens, routings);
        }
        self.turns[layer] += 1;
        self.seen[layer] = self.context.direction;
        self.remember(range, routings);
        std::mem::swap(&mut self.features[layer], &mut self.scratch.features);
        self.discounted(layer);
    }

    /// Predicts a layer without learning from it.
    fn predict(&mut self, layer: usize) {
        self.features_of(layer);
        self.score(layer);
        self.discounted(layer);
    }

    fn count(&mut self, layer: usize, tokens: f32, routings: &[f32]) {
        let range = self.layers[layer].clone();
        for ((rates, share), half_life) in self
            .rates
            .iter_mut()
            .zip(&mut self.rate_share[layer])
            .zip(HALF_LIVES_TOKENS)
        {
            let keep = exp2(-tokens / (half_life * self.half_life_factor));
            *share = *share * keep + (1.0 - keep);
            let gain = (1.0 - keep) / tokens;
            for (rate, routed) in rates[range.clone()].iter_mut().zip(routings) {
                *rate = *rate * keep + routed * gain;
            }
        }
        for (idle, &routed) in self.idle[range].iter_mut().zip(routings) {
            let older = (*idle + tokens).min(MOST_IDLE_TOKENS);
            *idle = if routed > 0.0 { 0.0 } else { older };
        }
    }

    fn features_of(&mut self, layer: usize) {
        let range = self.layers[layer].clone();
        let n = range.len();
        let [fast, middle, slow, idle, affinity] = &mut self.scratch.features;
        for ((feature, rates), share) in [fast, middle, slow]
            .into_iter()
            .zip(&self.rates)
            .zip(self.rate_share[layer])
        {
            let scale = 1.0 / share;
            for (feature, rate) in feature[..n].iter_mut().zip(&rates[range.clone()]) {
                *feature = (rate * scale).sqrt();
            }
        }
        for (feature, tokens) in idle[..n].iter_mut().zip(&self.idle[range.clone()]) {
            *feature = log2(1.0 + tokens) * IDLE_SCALE;
        }
        let memory = self.memory[range.clone()].iter();
        let memory = memory.zip(&self.memory_length[range]);
        for (feature, (memory, length)) in affinity[..n].iter_mut().zip(memory) {
            *feature = dot(memory, &self.context.direction) / length.max(NO_LENGTH);
        }
    }

    /// Values from the features in `scratch`.
    fn score(&mut self, layer: usize) {
        let range = self.layers[layer].clone();
        let n = range.len();
        let logit = &mut self.scratch.logit[..n];
        let [bias, weights @ ..] = &self.weights;
        logit.fill(*bias);
        for (weight, feature) in weights.iter().zip(&self.scratch.features) {
            for (logit, feature) in logit.iter_mut().zip(&feature[..n]) {
                *logit += weight * feature;
            }
        }
        for (logit, own) in logit.iter_mut().zip(&self.own[range.clone()]) {
            *logit += dot(own, &self.context.direction);
        }
        for (value, logit) in self.value[range].iter_mut().zip(logit) {
            *value = 1.0 / (1.0 + exp2(*logit * -std::f32::consts::LOG2_E));
        }
    }

    /// Corrects the weights by what the last turn's prediction got wrong. `scratch.error` holds that
    /// prediction, and then the error.
    fn learn(&mut self, layer: usize, tokens: f32, routings: &[f32]) {
        let range = self.layers[layer].clone();
        let n = range.len();
        let discount = exp2(tokens * self.log_discount);
        let error = &mut self.scratch.error[..n];
        let outcomes = self.value[range.clone()].iter().zip(routings);
        for (error, (value, &routed)) in error.iter_mut().zip(outcomes) {
            let outcome = if routed > 0.0 { 1.0 } else { discount * value };
            *error = outcome - *error;
        }
        let rate = SHARED_RATE / n as f32;
        let [bias, weights @ ..] = &mut self.weights;
        *bias += rate * total(error);
        for (weight, feature) in weights.iter_mut().zip(&self.features[layer]) {
            *weight += rate * dot(error, &feature[..n]);
        }
        let turn = self.turns[layer];
        let seen = &self.seen[layer];
        for (expert, (own, &routed)) in self.own[range.clone()].iter_mut().zip(routings).enumerate()
        {
            let times = if routed > 0.0 {
                1.0
            } else if (expert + turn).is_multiple_of(SAMPLE) {
                SAMPLE as f32
            } else {
                continue;
            };
            let known = self.routings[range.start + expert];
            let step = error[expert] * times * OWN_RATE * (1.0 + EARLY_GAIN / (1.0 + known));
            for (own, seen) in own.iter_mut().zip(seen) {
                *own += step * seen;
            }
        }
    }

    /// Adds what was routed to the context, and the context to what was routed.
    fn remember(&mut self, range: Range<usize>, routings: &[f32]) {
        for (expert, &count) in routings.iter().enumerate() {
            if count <= 0.0 {
                continue;
            }
            let id = range.start + expert;
            self.routings[id] += count;
            let share = MEMORY_SHARE.max(1.0 / self.routings[id]).min(1.0);
            // The length of the mean after it has moved by `share` towards a vector of length 1.
            let (length, rest) = (self.memory_length[id], 1.0 - share);
            let along = length * self.scratch.features[AFFINITY][expert];
            let squares =
                rest * rest * length * length + 2.0 * share * rest * along + share * share;
            self.memory_length[id] = squares.max(0.0).sqrt();
            let sum = self.context.sum.iter_mut();
            for (sum, sign) in sum.zip(&self.signature[id]) {
                *sum += sign * count;
            }
            for (memory, now) in self.memory[id].iter_mut().zip(&self.context.direction) {
                *memory += (now - *memory) * share;
            }
        }
    }

    fn discounted(&mut self, layer: usize) {
        let range = self.layers[layer].clone();
        let turns = 1.0 + layer as f32 / self.layers.len() as f32;
        let wait = turns * self.log_discount;
        for (order, value) in self.order[range.clone()].iter_mut().zip(&self.value[range]) {
            *order = log2(*value) + wait;
        }
    }
}

impl Context {
    /// Takes the direction from what was routed so far, then lets the sum decay.
    fn advance(&mut self, tokens: f32) {
        self.tokens += tokens;
        let share = (MEAN_SHARE * tokens)
            .max(tokens / self.tokens.max(1.0))
            .min(1.0);
        let mut squares = 0.0;
        for ((sum, mean), direction) in self.sum.iter().zip(&mut self.mean).zip(&mut self.direction)
        {
            *mean += (sum - *mean) * share;
            *direction = sum - *mean;
            squares += *direction * *direction;
        }
        let scale = 1.0 / squares.sqrt().max(NO_LENGTH);
        let keep = exp2(-tokens / CONTEXT_HALF_LIFE_TOKENS);
        for (sum, direction) in self.sum.iter_mut().zip(&mut self.direction) {
            *direction *= scale;
            *sum *= keep;
        }
    }
}

/// Sum, in eight sums side by side.
fn total(numbers: &[f32]) -> f32 {
    let (eights, rest) = numbers.as_chunks::<8>();
    let mut sums = [0.0f32; 8];
    for eight in eights {
        for (sum, number) in sums.iter_mut().zip(eight) {
            *sum += number;
        }
    }
    in_pairs(sums) + rest.iter().sum::<f32>()
}

/// Eight sums as one, in pairs, which do not wait for one another.
fn in_pairs([a, b, c, d, e, f, g, h]: [f32; 8]) -> f32 {
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Inner product, in eight sums side by side.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, rest_a) = a.as_chunks::<8>();
    let (b, rest_b) = b.as_chunks::<8>();
    let mut sums = [0.0f32; 8];
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f32 = rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum();
    in_pairs(sums) + rest
}

#[cfg(test)]
#[path = "next_use/tests.rs"]
mod tests;
