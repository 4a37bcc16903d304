//! Routing with a stated locality, for models of which no trace is at hand.
//!
//! In each layer an expert's weight is log-normal: a part that all topics share and a part of its
//! topic. A token keeps each expert of the token before with a fixed probability and draws the rest
//! by weight, without replacement. Three sources of locality, one number each.

use crate::rng::Rng;
use hotpin_controllers::ModelShape;
use hotpin_controllers::trace::Trace;
use std::sync::Arc;

/// How far routing repeats itself.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Locality {
    /// Deviation of the logarithm of an expert's weight over all topics; 0 is a uniform router.
    pub common_spread: f64,
    /// Deviation of its logarithm from topic to topic.
    pub topic_spread: f64,
    /// Probability that a routed expert stays for the next token.
    pub persistence: f64,
    /// Tokens after which the topic changes.
    pub topic_tokens: u64,
}

impl Default for Locality {
    /// Fitted to the decode trace of gpt-oss-20b: docs/sim.md says how closely.
    fn default() -> Self {
        Self {
            common_spread: 1.0,
            topic_spread: 1.4,
            persistence: 0.12,
            topic_tokens: 170,
        }
    }
}

/// Where routing comes from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A trace of a model of the same layers, experts and top-k.
    Trace(Arc<Trace>),
    /// Drawn with a locality.
    Drawn(Locality),
}

/// The tokens of one sequence, one after the other.
#[derive(Debug)]
pub struct Sequence {
    source: Source,
    shape: ModelShape,
    seed: u64,
    /// Number of the sequence among those that run together.
    number: u64,
    token: u64,
    /// Topic of the weights held.
    topic: Option<u64>,
    weights: Vec<f64>,
    routed: Vec<u32>,
    waits: Vec<(f64, u32)>,
}

impl Sequence {
    /// Sequence `number` of `count`. Sequences of a trace start at equal distances.
    #[must_use]
    pub fn new(source: &Source, shape: &ModelShape, seed: u64, number: u32, count: u32) -> Self {
        let token = match source {
            Source::Trace(trace) => {
                trace.tokens() as u64 * u64::from(number) / u64::from(count.max(1))
            }
            Source::Drawn(_) => 0,
        };
        Self {
            source: source.clone(),
            shape: shape.clone(),
            seed,
            number: u64::from(number),
            token,
            topic: None,
            weights: Vec::new(),
            routed: Vec::new(),
            waits: Vec::new(),
        }
    }

    /// Routes the next token; flat ids, layer by layer.
    pub fn next_token(&mut self) -> &[u32] {
        match self.source.clone() {
            Source::Trace(trace) => {
                self.routed.clear();
                let count = trace.tokens() as u64;
                if let Some(at) = self.token.checked_rem(count) {
                    let at = usize::try_from(at).unwrap_or(0);
                    self.routed.extend_from_slice(trace.token(at));
                }
            }
            Source::Drawn(locality) => self.draw(locality),
        }
        self.token += 1;
        &self.routed
    }

    fn draw(&mut self, locality: Locality) {
        let topic = self.token / locality.topic_tokens.max(1);
        if self.topic != Some(topic) {
            self.weights = weights(locality, &self.shape, self.seed, self.number, topic);
            self.topic = Some(topic);
        }
        let mut rng = Rng::keyed(&[self.seed, self.number, self.token, 2]);
        let before = std::mem::take(&mut self.routed);
        let mut slot = 0;
        for layer in 0..self.shape.layers() {
            let top_k = self.shape.top_k_in(layer) as usize;
            let start = self.routed.len();
            let last = before.get(slot..slot + top_k).unwrap_or(&[]);
            slot += top_k;
            for &id in last {
                if rng.unit() <= locality.persistence {
                    self.routed.push(id);
                }
            }
            let wanted = top_k - (self.routed.len() - start);
            if wanted == 0 {
                continue;
            }
            // The smallest of exponential waiting times are a weighted draw without replacement.
            self.waits.clear();
            let first = self.shape.id(layer, 0).0;
            for id in first..first + self.shape.experts_in(layer) {
                if !self.routed[start..].contains(&id) {
                    self.waits
                        .push((-rng.unit().ln() / self.weights[id as usize], id));
                }
            }
            self.waits
                .select_nth_unstable_by(wanted - 1, |a, b| a.0.total_cmp(&b.0));
            self.routed
                .extend(self.waits[..wanted].iter().map(|wait| wait.1));
        }
    }
}

/// Weight of each expert for one topic of one sequence.
fn weights(
    locality: Locality,
    shape: &ModelShape,
    seed: u64,
    sequence: u64,
    topic: u64,
) -> Vec<f64> {
    let mut common = Rng::keyed(&[seed, 3]);
    let mut of_topic = Rng::keyed(&[seed, sequence, topic, 4]);
    (0..shape.total_experts())
        .map(|_| {
            let spread = locality.common_spread * normal(&mut common)
                + locality.topic_spread * normal(&mut of_topic);
            spread.exp()
        })
        .collect()
}

/// A standard normal number (Box and Muller 1958).
fn normal(rng: &mut Rng) -> f64 {
    let radius = (-2.0 * rng.unit().ln()).sqrt();
    radius * (2.0 * std::f64::consts::PI * rng.unit()).cos()
}

/// Expected use of each expert over all topics, as a profile of long runs would have it.
#[must_use]
pub fn profile(source: &Source, shape: &ModelShape, seed: u64, tokens: u64) -> Vec<f32> {
    // A sequence that is none of those decoded: its topics are others.
    let mut sequence = Sequence::new(source, shape, seed, 0, 1);
    sequence.number = u64::MAX;
    let mut counts = vec![0.0f32; shape.total_experts()];
    for _ in 0..tokens {
        for &id in sequence.next_token() {
            counts[id as usize] += 1.0;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn shape() -> ModelShape {
        ModelShape::uniform(6, 32, 1, 4).unwrap()
    }

    /// Distinct experts of 64 tokens, and how many of a token's experts were the last one's.
    fn reuse(locality: Locality, sequence: u32) -> (usize, f64) {
        let mut sequence = Sequence::new(&Source::Drawn(locality), &shape(), 5, sequence, 4);
        let mut last = HashSet::new();
        let (mut kept, mut distinct) = (0, HashSet::new());
        for _ in 0..64 {
            let token: HashSet<u32> = sequence.next_token().iter().copied().collect();
            assert_eq!(token.len(), 24, "experts of one token differ");
            kept += token.intersection(&last).count();
            distinct.extend(token.iter().copied());
            last = token;
        }
        (distinct.len(), kept as f64 / (63.0 * 24.0))
    }

    #[test]
    fn each_number_adds_locality() {
        let uniform = Locality {
            common_spread: 0.0,
            topic_spread: 0.0,
            persistence: 0.0,
            topic_tokens: 1000,
        };
        let (all, chance) = reuse(uniform, 0);
        assert!(all >= 190 && (chance - 4.0 / 32.0).abs() < 0.03);
        let persistent = Locality {
            persistence: 0.8,
            ..uniform
        };
        assert!((reuse(persistent, 0).1 - 0.82).abs() < 0.04);
        let skewed = Locality {
            topic_spread: 2.0,
            ..uniform
        };
        let skewed = reuse(skewed, 0).1;
        assert!(skewed > 2.0 * chance, "{skewed}");
    }

    #[test]
    fn sequences_share_what_is_common_and_differ_in_topic() {
        let spread = |common_spread, topic_spread, sequence| {
            let locality = Locality {
                common_spread,
                topic_spread,
                ..Locality::default()
            };
            weights(locality, &shape(), 5, sequence, 0)
        };
        assert_eq!(spread(1.0, 0.0, 0), spread(1.0, 0.0, 1));
        assert_ne!(spread(1.0, 1.0, 0), spread(1.0, 1.0, 1));
    }
}
