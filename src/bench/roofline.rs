//! How close a run came to what its disk and cores allow.
//!
//! Three bounds on a token's time, from figures of the run itself. The first two are what computing
//! alone and reading alone would take. Neither can be reached: a layer's experts are known only
//! once its router has run, so they can be read while that layer's other experts are computed and
//! no earlier, unless they are guessed. The *dependency roofline* adds that up layer by layer:
//! time outside experts + max(time of its experts, its missed bytes / the disk's bandwidth).

use serde::{Deserialize, Serialize};

/// What a run gives for its roofline.
#[derive(Clone, Debug)]
pub struct Measured<'a> {
    /// Tokens decoded one by one.
    pub tokens: u64,
    /// Time of their decodes, ns.
    pub decode_ns: u64,
    /// The part of it in which the engine waited for bytes, ns.
    pub stall_ns: u64,
    /// Layers by number of routed experts that were not there: `missed[n]` had `n`.
    pub missed: &'a [u64],
    /// Bytes of an expert.
    pub expert_bytes: f64,
    /// Experts routed a layer.
    pub top_k: f64,
    /// Time to compute one expert for one token, ns.
    pub expert_ns: f64,
    /// Bytes a second that the store reads when nothing else is done.
    pub bandwidth: f64,
}

/// Bounds on the mean token's time, and the time it took, ms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Roofline {
    /// Computing alone.
    pub compute_ms: f64,
    /// Reading what was missed alone.
    pub read_ms: f64,
    /// The dependency roofline.
    pub dependency_ms: f64,
    /// What it took.
    pub took_ms: f64,
    /// Bandwidth that reading was reckoned with, MB/s.
    pub read_mb_s: f64,
}

impl Roofline {
    /// Reckons the bounds; `None` without tokens or bandwidth.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    pub fn of(run: &Measured<'_>) -> Option<Self> {
        if run.tokens == 0 || run.bandwidth <= 0.0 || !run.expert_ns.is_finite() {
            return None;
        }
        let read_ns = run.expert_bytes / run.bandwidth * 1e9;
        let experts_ns = run.top_k * run.expert_ns;
        let (mut reading, mut beyond) = (0.0, 0.0);
        for (missed, &layers) in run.missed.iter().enumerate() {
            let of_layer = missed as f64 * read_ns;
            reading += layers as f64 * of_layer;
            beyond += layers as f64 * (of_layer - experts_ns).max(0.0);
        }
        let computing = run.decode_ns.saturating_sub(run.stall_ns) as f64;
        let ms = |ns: f64| ns / run.tokens as f64 / 1e6;
        Some(Self {
            compute_ms: ms(computing),
            read_ms: ms(reading),
            dependency_ms: ms(computing + beyond),
            took_ms: ms(run.decode_ns as f64),
            read_mb_s: run.bandwidth / 1e6,
        })
    }

    /// The part of the dependency roofline's speed that was reached. Above 1 where experts that were
    /// guessed came before their router had run.
    #[must_use]
    pub fn reached(&self) -> f64 {
        self.dependency_ms / self.took_ms
    }
}

impl std::fmt::Display for Roofline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "computing {:.1} ms a token, reading {:.1} ms at {:.0} MB/s, the longer of them {:.1} ms; \
             dependency roofline {:.1} ms, took {:.1} ms: {:.2} of it reached",
            self.compute_ms,
            self.read_ms,
            self.read_mb_s,
            self.compute_ms.max(self.read_ms),
            self.dependency_ms,
            self.took_ms,
            self.reached()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_counts_only_beyond_what_its_own_layer_computes() {
        // Two layers, 10 tokens: one never misses, one misses two experts each time.
        let run = Measured {
            tokens: 10,
            decode_ns: 90_000_000,
            stall_ns: 40_000_000,
            missed: &[10, 0, 10],
            expert_bytes: 2e6,
            top_k: 4.0,
            expert_ns: 0.25e6,
            bandwidth: 1e9,
        };
        let roofline = Roofline::of(&run).expect("a roofline");
        assert!((roofline.compute_ms - 5.0).abs() < 1e-9);
        assert!((roofline.read_ms - 4.0).abs() < 1e-9);
        // 4 ms of reading beside 1 ms of computing: 3 ms more than computing alone.
        assert!((roofline.dependency_ms - 8.0).abs() < 1e-9);
        assert!((roofline.reached() - 8.0 / 9.0).abs() < 1e-9);
        assert!(Roofline::of(&Measured { tokens: 0, ..run }).is_none());
    }
}
