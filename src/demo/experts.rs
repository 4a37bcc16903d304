//! Experts: variations of a dense feed-forward block.
//!
//! An expert has the dense block's hidden units in another order, so that its sum over them is the
//! dense one, with each unit's `up` row scaled a little, so that it is not quite. No two experts
//! share bytes or outputs, and any weighted mean of them stays close to the dense block.

use super::dense::Part;
use super::error::Error;
use super::options::Options;
use crate::engine::quantize::quantize;
use crate::rng::Rng;

/// Marks the random stream of experts among those of a seed.
const STREAM: u64 = 0x6578_7074;

/// Deviation of a unit's scale from 1.
const SCALE_DEVIATION: f32 = 0.03;

/// Experts that each thread makes before they are written: bounds the memory of a batch.
const EXPERTS_PER_THREAD: u32 = 2;

/// How one expert differs from the dense block.
#[derive(Debug)]
struct Variation {
    /// For each hidden unit of the expert: the dense unit that it is.
    order: Vec<u32>,
    /// For each hidden unit of the expert: the factor on its `up` row.
    scale: Vec<f32>,
}

impl Variation {
    fn new(seed: u64, layer: u32, expert: u32, units: u32) -> Self {
        let mut rng = Rng::new(seed, [STREAM, u64::from(layer), u64::from(expert)]);
        let order = rng.permutation(units);
        let scale = (0..units)
            .map(|_| 1.0 + SCALE_DEVIATION * rng.normal())
            .collect();
        Self { order, scale }
    }

    /// One part of the expert; `dense` and `out` hold the whole part, rows of `row_len` values.
    fn apply(&self, part: Part, row_len: usize, dense: &[f32], out: &mut [f32]) {
        match part {
            Part::Gate | Part::Up => {
                let units = self.order.iter().zip(&self.scale);
                for (row, (&unit, &scale)) in out.chunks_exact_mut(row_len).zip(units) {
                    let scale = if part == Part::Up { scale } else { 1.0 };
                    let from = &dense[unit as usize * row_len..][..row_len];
                    for (value, from) in row.iter_mut().zip(from) {
                        *value = from * scale;
                    }
                }
            }
            Part::Down => {
                for (row, from) in out
                    .chunks_exact_mut(row_len)
                    .zip(dense.chunks_exact(row_len))
                {
                    for (value, &unit) in row.iter_mut().zip(&self.order) {
                        *value = from[unit as usize];
                    }
                }
            }
        }
    }
}

/// One part of all experts of a layer, made batch by batch.
#[derive(Debug)]
pub(super) struct ExpertPart<'a> {
    pub(super) options: &'a Options,
    pub(super) layer: u32,
    pub(super) part: Part,
    /// Hidden units of the block.
    pub(super) units: u32,
    /// Values in one row of the part.
    pub(super) row_len: usize,
    /// The dense block's values of the part.
    pub(super) dense: &'a [f32],
}

impl ExpertPart<'_> {
    /// Hands `write` the quantised bytes of the experts, in order.
    pub(super) fn stream(
        &self,
        threads: usize,
        write: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let ty = self.options.quant.tensor_type();
        let expert_bytes = ty.row_bytes(self.row_len)? * (self.dense.len() / self.row_len);
        let per_thread = EXPERTS_PER_THREAD as usize;
        let experts: Vec<u32> = (0..self.options.experts).collect();
        let mut buffer = vec![0u8; expert_bytes * per_thread * threads];
        for batch in experts.chunks(per_thread * threads) {
            let bytes = &mut buffer[..expert_bytes * batch.len()];
            std::thread::scope(|scope| {
                let jobs = batch
                    .chunks(per_thread)
                    .zip(bytes.chunks_mut(expert_bytes * per_thread));
                let workers: Vec<_> = jobs
                    .map(|(experts, out)| {
                        scope.spawn(move || self.make(experts, expert_bytes, out))
                    })
                    .collect();
                workers
                    .into_iter()
                    .try_for_each(|worker| match worker.join() {
                        Ok(result) => result,
                        Err(panic) => std::panic::resume_unwind(panic),
                    })
            })?;
            write(bytes)?;
        }
        Ok(())
    }

    fn make(&self, experts: &[u32], expert_bytes: usize, out: &mut [u8]) -> Result<(), Error> {
        let mut values = vec![0f32; self.dense.len()];
        for (&expert, out) in experts.iter().zip(out.chunks_exact_mut(expert_bytes)) {
            let variation = Variation::new(self.options.seed, self.layer, expert, self.units);
            variation.apply(self.part, self.row_len, self.dense, &mut values);
            quantize(self.options.quant.tensor_type(), self.row_len, &values, out)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum over hidden units of `down * gate * up`, with rows of width 1.
    fn output(gate: &[f32], up: &[f32], down: &[f32]) -> f32 {
        gate.iter()
            .zip(up)
            .zip(down)
            .map(|((g, u), d)| g * u * d)
            .sum()
    }

    #[test]
    fn an_expert_computes_nearly_what_the_dense_block_does() {
        let units = 512u32;
        let mut rng = Rng::new(9, [0; 3]);
        let mut part = || {
            (0..units)
                .map(|_| 1.0 + 0.5 * rng.normal())
                .collect::<Vec<f32>>()
        };
        let (gate, up, down) = (part(), part(), part());
        let dense = output(&gate, &up, &down);
        let expert = |index| {
            let variation = Variation::new(1, 0, index, units);
            let make = |part, row_len, from: &[f32]| {
                let mut out = vec![0.0; from.len()];
                variation.apply(part, row_len, from, &mut out);
                out
            };
            let parts = (make(Part::Gate, 1, &gate), make(Part::Up, 1, &up));
            (parts.0, parts.1, make(Part::Down, units as usize, &down))
        };
        let (first, second) = (expert(0), expert(1));
        assert_ne!(first.0, second.0);
        let outputs = [&first, &second].map(|(g, u, d)| output(g, u, d));
        assert!(
            outputs.iter().all(|o| (o - dense).abs() / dense < 0.02),
            "{outputs:?} {dense}"
        );
        assert!((outputs[0] - outputs[1]).abs() > 1e-4);
    }
}
