//! The order in which experts are moved.

use crate::model::ModelMap;
use hotpin_controllers::ExpertId;

pub(super) fn bytes_of(map: &ModelMap, experts: &[ExpertId]) -> u64 {
    experts.iter().map(|&id| map.shape().bytes(id)).sum()
}

/// Every expert of the model in a fixed order that follows no pattern of the file, again and again:
/// in a group smaller than the model each is cold when its turn comes.
#[derive(Debug)]
pub(super) struct Batches {
    layers: Vec<Vec<ExpertId>>,
    /// Next layer and, in each, the next expert.
    layer: usize,
    next: Vec<usize>,
}

impl Batches {
    pub(super) fn new(map: &ModelMap) -> Self {
        let shape = map.shape();
        let layers: Vec<Vec<ExpertId>> = (0..shape.layers())
            .map(|layer| {
                let count = shape.experts_in(layer);
                let stride = stride(count);
                (0..count)
                    .map(|at| shape.id(layer, (at * stride) % count))
                    .collect()
            })
            .collect();
        Self {
            next: vec![0; layers.len()],
            layers,
            layer: 0,
        }
    }

    pub(super) fn next(&mut self, count: usize) -> Vec<ExpertId> {
        let layer = self.layer;
        self.layer = (self.layer + 1) % self.layers.len();
        let experts = &self.layers[layer];
        let start = self.next[layer];
        self.next[layer] = (start + count) % experts.len();
        (0..count.min(experts.len()))
            .map(|at| experts[(start + at) % experts.len()])
            .collect()
    }
}

/// A step that visits every one of `count` and goes far each time.
fn stride(count: u32) -> u32 {
    let common = |a: u32, b: u32| {
        let (mut a, mut b) = (a, b);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (count * 5 / 13..count)
        .find(|&step| common(step.max(1), count) == 1)
        .unwrap_or(1)
        .max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_visit_every_expert() {
        for count in [1, 2, 8, 32, 64, 128, 384] {
            let step = stride(count);
            let seen: std::collections::HashSet<u32> =
                (0..count).map(|at| (at * step) % count).collect();
            assert_eq!(seen.len(), count as usize, "{count} by {step}");
        }
    }
}
