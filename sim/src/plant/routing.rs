//! Which experts each token is routed to.

use crate::rng::Rng;
use hotpin_controllers::ModelShape;
use hotpin_controllers::trace::Trace;
use std::sync::Arc;

/// Where routing comes from.
#[derive(Clone, Debug)]
pub enum Routing {
    /// A recorded trace of the same shape, from its start, again and again.
    Trace(Arc<Trace>),
    /// Drawn at random by domain.
    Synthetic(Synthetic),
}

/// A router that knows domains: in each layer the experts' weights follow a power law, in an order
/// that belongs to the domain. A token draws its top-k without replacement.
#[derive(Clone, Debug, PartialEq)]
pub struct Synthetic {
    /// Exponent of the power law; 0 is a uniform router.
    pub exponent: f64,
    /// Each domain and the token with which it begins, in order of tokens; the first begins at 0.
    pub domains: Vec<(u64, u64)>,
    /// The routing repeats after this many tokens; `None` never repeats.
    pub period_tokens: Option<u64>,
}

/// Draws the routed experts of one token after the other.
#[derive(Debug)]
pub(super) struct Router<'a> {
    shape: &'a ModelShape,
    routing: &'a Routing,
    seed: u64,
    token: u64,
    /// The domain whose weights are in `weights`.
    domain: Option<u64>,
    weights: Vec<f64>,
    keys: Vec<(f64, u32)>,
}

impl<'a> Router<'a> {
    pub fn new(shape: &'a ModelShape, routing: &'a Routing, seed: u64) -> Self {
        Self {
            shape,
            routing,
            seed,
            token: 0,
            domain: None,
            weights: Vec::new(),
            keys: Vec::new(),
        }
    }

    /// Writes the next token's flat ids, layer by layer.
    pub fn next(&mut self, routed: &mut Vec<u32>) {
        routed.clear();
        match self.routing {
            Routing::Trace(trace) => {
                let count = trace.tokens().max(1) as u64;
                let at = usize::try_from(self.token % count).unwrap_or(0);
                if trace.tokens() > 0 {
                    routed.extend_from_slice(trace.token(at));
                }
            }
            Routing::Synthetic(synthetic) => self.draw(synthetic, routed),
        }
        self.token += 1;
    }

    fn draw(&mut self, synthetic: &Synthetic, routed: &mut Vec<u32>) {
        let begun = synthetic
            .domains
            .partition_point(|&(token, _)| token <= self.token);
        let domain = begun.checked_sub(1).map_or(0, |at| synthetic.domains[at].1);
        if self.domain != Some(domain) {
            self.weights = synthetic.weights(self.shape, self.seed, domain);
            self.domain = Some(domain);
        }
        let token = synthetic
            .period_tokens
            .map_or(self.token, |period| self.token % period.max(1));
        let mut rng = Rng::keyed(&[self.seed, domain, token, 1]);
        for layer in 0..self.shape.layers() {
            // The smallest of exponential waiting times are a weighted draw without replacement.
            self.keys.clear();
            let first = self.shape.id(layer, 0).0;
            self.keys.extend(
                (first..first + self.shape.experts_in(layer))
                    .map(|id| (-rng.unit().ln() / self.weights[id as usize], id)),
            );
            let top_k = self.shape.top_k_in(layer) as usize;
            self.keys
                .select_nth_unstable_by(top_k - 1, |a, b| a.0.total_cmp(&b.0));
            routed.extend(self.keys[..top_k].iter().map(|key| key.1));
        }
    }
}

impl Synthetic {
    /// Weight of each expert in a domain, by flat id; each layer's sum to 1.
    #[must_use]
    pub fn weights(&self, shape: &ModelShape, seed: u64, domain: u64) -> Vec<f64> {
        let mut weights = Vec::with_capacity(shape.total_experts());
        for layer in 0..shape.layers() {
            let ranks = 1..=shape.experts_in(layer);
            let mut of_layer: Vec<f64> = ranks
                .map(|rank| f64::from(rank).powf(-self.exponent))
                .collect();
            let sum: f64 = of_layer.iter().sum();
            for weight in &mut of_layer {
                *weight /= sum;
            }
            Rng::keyed(&[seed, domain, layer as u64, 0]).shuffle(&mut of_layer);
            weights.append(&mut of_layer);
        }
        weights
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(exponent: f64, seed: u64, count: usize) -> Vec<Vec<u32>> {
        let shape = ModelShape::uniform(3, 16, 1, 4).unwrap();
        let routing = Routing::Synthetic(Synthetic {
            exponent,
            domains: vec![(0, 5), (50, 6)],
            period_tokens: None,
        });
        let mut router = Router::new(&shape, &routing, seed);
        (0..count)
            .map(|_| {
                let mut routed = Vec::new();
                router.next(&mut routed);
                routed
            })
            .collect()
    }

    #[test]
    fn equal_seeds_route_equally_and_slots_are_distinct() {
        assert_eq!(tokens(1.0, 3, 100), tokens(1.0, 3, 100));
        assert_ne!(tokens(1.0, 3, 100), tokens(1.0, 4, 100));
        for token in tokens(1.0, 3, 100) {
            for (layer, slots) in (0u32..).zip(token.chunks(4)) {
                let range = layer * 16..(layer + 1) * 16;
                assert!(slots.iter().all(|id| range.contains(id)));
                assert!((0..4).all(|slot| !slots[..slot].contains(&slots[slot])));
            }
        }
    }

    #[test]
    fn domains_are_skewed_differently() {
        let shape = ModelShape::uniform(40, 16, 1, 4).unwrap();
        let synthetic = |exponent| Synthetic {
            exponent,
            domains: Vec::new(),
            period_tokens: None,
        };
        let best = |domain| {
            let weights = synthetic(1.0).weights(&shape, 9, domain);
            let layers = weights.chunks(16);
            let best = |layer: &[f64]| (0..16).max_by(|&a, &b| layer[a].total_cmp(&layer[b]));
            layers.map(best).collect::<Vec<_>>()
        };
        let shared = best(5).iter().zip(best(6)).filter(|(a, b)| *a == b).count();
        assert!(shared < 10, "{shared} of 40 layers share their best expert");
        assert!(
            synthetic(0.0)
                .weights(&shape, 9, 5)
                .iter()
                .all(|&weight| weight == 1.0 / 16.0)
        );
    }

    #[test]
    fn draws_follow_the_weights() {
        let counts = |exponent| {
            let mut counts = [0u32; 16];
            for token in tokens(exponent, 9, 50) {
                for &id in token.iter().filter(|&&id| id < 16) {
                    counts[id as usize] += 1;
                }
            }
            counts
        };
        let (skewed, uniform) = (counts(1.2), counts(0.0));
        assert!(skewed.iter().max() > Some(&40), "{skewed:?}");
        assert!(uniform.iter().max() < Some(&26), "{uniform:?}");
    }
}
