//! The routers: one direction per expert and layer, and how routing spreads under them.

use super::calibration::Hidden;
use super::cluster::{center_directions, score, spherical_k_means};
use super::error::Error;
use super::options::Options;
use super::parallel;
use super::progress::{Progress, Stage, Step, report};
use crate::rng::Rng;

/// Marks the random stream of clustering among those of a seed.
const STREAM: u64 = 0x726f_7574;

/// The share of the weight that the first of k experts gets on average is k to this power: .44 for
/// four and .29 for eight, as in trained models. Scaling a router does not change whom it picks, so
/// the scale is free to be set this way; unscaled, the first expert would take nearly all.
const FIRST_SHARE_EXPONENT: f32 = -0.6;

/// One layer's router.
#[derive(Clone, Debug)]
pub(super) struct Router {
    /// One row of the model's width for each expert.
    pub(super) rows: Vec<f32>,
    /// The factor between a unit direction and a row.
    pub(super) scale: f32,
    /// Mean weight of the first of the experts that a token is routed to.
    pub(super) first_share: f32,
    /// For each domain: routings of its calibration tokens to each expert.
    pub(super) routings: Vec<Vec<u32>>,
}

/// Clusters every layer's hidden states, a layer on each thread at a time.
pub(super) fn build(
    options: &Options,
    hidden: &Hidden,
    threads: usize,
    progress: &mut Progress<'_>,
) -> Result<Vec<Router>, Error> {
    let total = hidden.layers() as u64;
    let mut routers: Vec<Option<Router>> = (0..hidden.layers()).map(|_| None).collect();
    let mut done = 0;
    let job = |layer| layer_router(options, hidden, layer);
    parallel::run(threads, hidden.layers(), job, |layer, router| {
        routers[layer] = Some(router);
        done += 1;
        report(
            progress,
            Step {
                stage: Stage::Cluster,
                done,
                total,
            },
        )
    })?;
    routers
        .into_iter()
        .map(|router| router.ok_or(Error::Cancelled))
        .collect()
}

fn layer_router(options: &Options, hidden: &Hidden, layer: usize) -> Result<Router, Error> {
    let width = hidden.width();
    let states = hidden.layer(layer)?;
    let mut directions = states.clone();
    center_directions(&mut directions, width);
    let mut rng = Rng::new(options.seed, [STREAM, layer as u64, 0]);
    let centroids = spherical_k_means(&directions, width, options.experts, &mut rng);
    drop(directions);

    let top_k = options.top_k as usize;
    let mut routings = vec![vec![0u32; options.experts as usize]; hidden.domains.len()];
    let mut scores = vec![0f32; options.experts as usize];
    let mut chosen_scores = Vec::with_capacity(hidden.rows() * top_k);
    for (domain, routings) in hidden.domains.iter().zip(&mut routings) {
        for row in states[domain.rows.start * width..domain.rows.end * width].chunks_exact(width) {
            score(row, &centroids, &mut scores);
            for expert in largest(&scores, top_k) {
                routings[expert] += 1;
                chosen_scores.push(scores[expert]);
            }
        }
    }
    let (scale, first_share) = fit_scale(&chosen_scores, top_k);
    let rows = centroids.iter().map(|value| value * scale).collect();
    Ok(Router {
        rows,
        scale,
        first_share,
        routings,
    })
}

/// Positions of the `count` largest values, largest first.
fn largest(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    let descending = |a: &usize, b: &usize| values[*b].total_cmp(&values[*a]).then(a.cmp(b));
    if count < order.len() {
        order.select_nth_unstable_by(count, descending);
        order.truncate(count);
    }
    order.sort_unstable_by(descending);
    order
}

/// The scale at which the first of k experts gets its share of the weight, and that share.
fn fit_scale(chosen_scores: &[f32], top_k: usize) -> (f32, f32) {
    if top_k < 2 {
        return (1.0, 1.0);
    }
    let target = (top_k as f32).powf(FIRST_SHARE_EXPONENT);
    let (mut low, mut high) = (1e-4f32, 1e3f32);
    for _ in 0..30 {
        let middle = (low * high).sqrt();
        if mean_first_share(chosen_scores, top_k, middle) < target {
            low = middle;
        } else {
            high = middle;
        }
    }
    (low, mean_first_share(chosen_scores, top_k, low))
}

/// Mean softmax weight of the first score in each group of `top_k`, largest first.
fn mean_first_share(chosen_scores: &[f32], top_k: usize, scale: f32) -> f32 {
    let share = |scores: &[f32]| {
        let sum: f32 = scores.iter().map(|s| ((s - scores[0]) * scale).exp()).sum();
        f64::from(1.0 / sum)
    };
    let groups = chosen_scores.chunks_exact(top_k);
    let count = groups.len().max(1) as f64;
    #[expect(clippy::cast_possible_truncation, reason = "a share between 0 and 1")]
    let mean = (groups.map(share).sum::<f64>() / count) as f32;
    mean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_come_first_and_ties_go_to_the_lower_index() {
        assert_eq!(largest(&[1.0, 3.0, 2.0, 3.0], 3), [1, 3, 2]);
        assert_eq!(largest(&[1.0, 2.0], 2), [1, 0]);
    }

    #[test]
    fn the_scale_gives_the_first_expert_its_share() {
        let mut rng = Rng::new(1, [0; 3]);
        let mut scores = Vec::new();
        for _ in 0..500 {
            let mut group: Vec<f32> = (0..4).map(|_| 20.0 * rng.normal()).collect();
            group.sort_by(|a, b| b.total_cmp(a));
            scores.extend(group);
        }
        let (scale, share) = fit_scale(&scores, 4);
        assert!((share - 4f32.powf(-0.6)).abs() < 1e-3, "{scale} {share}");
        assert!(mean_first_share(&scores, 4, 1.0) > 0.9);
    }
}
