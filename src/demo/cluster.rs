//! Spherical k-means: directions that stand for groups of hidden states.
//!
//! Dhillon and Modha, "Concept decompositions for large sparse text data using clustering", 2001.

use crate::rng::Rng;

/// Rounds of assigning and averaging; the assignments barely move after ten.
const ITERATIONS: usize = 12;

/// Values summed side by side in a dot product. The order of the sum is fixed by it, so that it is
/// part of what a seed means.
const LANES: usize = 8;

/// Rows scored together, so that each row is read from memory once for several.
const BLOCK: usize = 4;

/// Removes the mean direction of `rows` from each and scales each to length 1.
///
/// Hidden states of language models share a large common component; with it in, all of them look
/// alike and a few clusters take everything.
pub(super) fn center_directions(rows: &mut [f32], width: usize) {
    let mut mean = vec![0f32; width];
    for row in rows.chunks_exact(width) {
        add(&mut mean, row);
    }
    normalise(&mut mean);
    for row in rows.chunks_exact_mut(width) {
        let along = dot(row, &mean);
        for (value, direction) in row.iter_mut().zip(&mean) {
            *value -= along * direction;
        }
        normalise(row);
    }
}

/// Directions of `clusters` groups of `rows` (each of length 1), one after the other.
pub(super) fn spherical_k_means(
    rows: &[f32],
    width: usize,
    clusters: u32,
    rng: &mut Rng,
) -> Vec<f32> {
    let count = u32::try_from(rows.len() / width).unwrap_or(u32::MAX);
    let row = |index: u32| &rows[index as usize * width..][..width];
    let mut centroids = Vec::with_capacity(clusters as usize * width);
    for &first in rng
        .permutation(count)
        .iter()
        .cycle()
        .take(clusters as usize)
    {
        centroids.extend_from_slice(row(first));
    }
    let mut scores = vec![0f32; clusters as usize];
    for _ in 0..ITERATIONS {
        let mut sums = vec![0f32; centroids.len()];
        let mut members = vec![0u32; clusters as usize];
        for row in rows.chunks_exact(width) {
            score(row, &centroids, &mut scores);
            let nearest = argmax(&scores);
            members[nearest] += 1;
            add(&mut sums[nearest * width..][..width], row);
        }
        for (sum, &members) in sums.chunks_exact_mut(width).zip(&members) {
            if members == 0 {
                // An empty group starts anew somewhere, or its expert would never be routed to.
                sum.copy_from_slice(row(rng.below(count)));
            }
            normalise(sum);
        }
        centroids = sums;
    }
    centroids
}

/// Dot products of `row` with each direction.
pub(super) fn score(row: &[f32], directions: &[f32], out: &mut [f32]) {
    let width = row.len();
    let mut blocks = directions.chunks_exact(width * BLOCK);
    let mut outs = out.chunks_exact_mut(BLOCK);
    for (block, out) in blocks.by_ref().zip(outs.by_ref()) {
        out.copy_from_slice(&dots(row, block));
    }
    for (direction, out) in blocks
        .remainder()
        .chunks_exact(width)
        .zip(outs.into_remainder())
    {
        *out = dot(row, direction);
    }
}

/// [`dot`] of `row` with [`BLOCK`] directions at once; the same sums in the same order.
fn dots(row: &[f32], block: &[f32]) -> [f32; BLOCK] {
    let width = row.len();
    let whole = width / LANES * LANES;
    let mut sums = [[0f32; LANES]; BLOCK];
    let lanes: [&[f32]; BLOCK] = std::array::from_fn(|i| &block[i * width..][..whole]);
    for (chunk, values) in row[..whole].chunks_exact(LANES).enumerate() {
        for (sum, direction) in sums.iter_mut().zip(lanes) {
            let direction = &direction[chunk * LANES..][..LANES];
            for lane in 0..LANES {
                sum[lane] += values[lane] * direction[lane];
            }
        }
    }
    std::array::from_fn(|i| {
        let rest = row[whole..]
            .iter()
            .zip(&block[i * width + whole..][..width - whole]);
        sums[i].iter().sum::<f32>() + rest.map(|(a, b)| a * b).sum::<f32>()
    })
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    let rest: f32 = rest.map(|(x, y)| x * y).sum();
    for (x, y) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * y[lane];
        }
    }
    sums.iter().sum::<f32>() + rest
}

fn add(sum: &mut [f32], row: &[f32]) {
    for (total, value) in sum.iter_mut().zip(row) {
        *total += value;
    }
}

fn normalise(row: &mut [f32]) {
    let length = dot(row, row).sqrt();
    if length > f32::MIN_POSITIVE {
        for value in row {
            *value /= length;
        }
    }
}

/// Position of the first largest value.
fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (index, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = index;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows around three axes, all pushed the same way.
    fn three_groups(rng: &mut Rng) -> Vec<f32> {
        let mut rows = Vec::new();
        for index in 0..90 {
            for axis in 0..11 {
                let own = if axis == index % 3 { 3.0 } else { 0.0 };
                rows.push(own + 10.0 * f32::from(u8::from(axis == 10)) + 0.2 * rng.normal());
            }
        }
        rows
    }

    #[test]
    fn groups_are_found_behind_a_common_direction() {
        let mut rng = Rng::new(3, [0; 3]);
        let mut rows = three_groups(&mut rng);
        center_directions(&mut rows, 11);
        let centroids = spherical_k_means(&rows, 11, 6, &mut rng);
        let mut scores = [0f32; 6];
        let mut owners = vec![std::collections::BTreeSet::new(); 6];
        for (index, row) in rows.chunks_exact(11).enumerate() {
            score(row, &centroids, &mut scores);
            owners[argmax(&scores)].insert(index % 3);
        }
        assert!(owners.iter().all(|groups| groups.len() <= 1), "{owners:?}");
    }

    #[test]
    fn blocks_score_exactly_as_single_rows() {
        let mut rng = Rng::new(5, [0; 3]);
        let row: Vec<f32> = (0..19).map(|_| rng.normal()).collect();
        let directions: Vec<f32> = (0..19 * 7).map(|_| rng.normal()).collect();
        let mut scores = [0f32; 7];
        score(&row, &directions, &mut scores);
        for (direction, score) in directions.chunks_exact(19).zip(scores) {
            assert_eq!(dot(&row, direction).to_bits(), score.to_bits());
        }
    }
}
