//! Differences of running totals, and what one tick of them says.
//!
//! A total that went backwards was restarted and counts as no change; a total that was absent last
//! time gives no difference this time.

use crate::ids::{ModelShape, Moment};
use crate::observe::{EngineTotals, Observation};

/// Longest time that one tick may integrate over, seconds. After a longer pause (suspend, a stopped
/// process) rates are still right, but slews and integrals do not jump.
const LONGEST_STEP_S: f64 = 1.0;

/// Time as control sees it: it never runs backwards.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Step {
    /// Seconds of control time since the start.
    pub now_s: f64,
    /// Seconds since the last tick, at most [`LONGEST_STEP_S`]; for slews and integrals.
    pub dt_s: f64,
    /// Seconds since the last tick; for rates. Zero when the clock stood or stepped back.
    pub elapsed_s: f64,
    /// This is the first tick.
    pub first: bool,
}

/// One tick's differences.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    /// Engine totals since the last tick.
    pub engine: Option<EngineTotals>,
    /// Major faults since the last tick.
    pub major_faults: Option<u64>,
}

/// Remembers the last totals.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sense {
    last: Option<Moment>,
    now_s: f64,
    engine: Option<EngineTotals>,
    major: Option<u64>,
}

impl Sense {
    /// Advances control time. A clock that stepped backwards is a pause.
    pub fn step(&mut self, now: Moment) -> Step {
        let first = self.last.is_none();
        let elapsed_s = self.last.map_or(0.0, |last| now.seconds_since(last));
        self.last = Some(now);
        self.now_s += elapsed_s;
        Step {
            now_s: self.now_s,
            dt_s: elapsed_s.min(LONGEST_STEP_S),
            elapsed_s,
            first,
        }
    }

    /// Differences since the last tick.
    pub fn delta(&mut self, observation: &Observation<'_>) -> Delta {
        let engine = difference(&mut self.engine, observation.engine, engine_since);
        let major = observation.faults.map(|faults| faults.major);
        let major_faults = difference(&mut self.major, major, u64::saturating_sub);
        Delta {
            engine,
            major_faults,
        }
    }
}

/// `now - last` when both are known; remembers `now`.
pub(crate) fn difference<T: Copy>(
    last: &mut Option<T>,
    now: Option<T>,
    since: impl FnOnce(T, T) -> T,
) -> Option<T> {
    let before = std::mem::replace(last, now);
    Some(since(now?, before?))
}

fn engine_since(now: EngineTotals, last: EngineTotals) -> EngineTotals {
    EngineTotals {
        decode_tokens: now.decode_tokens.saturating_sub(last.decode_tokens),
        prefill_tokens: now.prefill_tokens.saturating_sub(last.prefill_tokens),
        decode_ns: now.decode_ns.saturating_sub(last.decode_ns),
        stall_ns: now.stall_ns.saturating_sub(last.stall_ns),
        hits: now.hits.saturating_sub(last.hits),
        misses: now.misses.saturating_sub(last.misses),
        fetch_bytes: now.fetch_bytes.saturating_sub(last.fetch_bytes),
    }
}

/// Per-expert constants that the laws read every tick.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    /// Bytes of each expert.
    pub bytes: Vec<u64>,
    /// Mean bytes of an expert over bytes of this one: turns a score into a score per mean expert.
    pub per_byte: Vec<f32>,
    /// Mean bytes of an expert.
    pub mean_bytes: f64,
    /// Bytes of the smallest expert.
    pub least_bytes: u64,
    /// Bytes of all experts.
    pub total_bytes: u64,
    /// Bytes that a token touches.
    pub cycle_bytes: u64,
    /// Most bytes that one layer of one token touches.
    pub widest_layer_bytes: u64,
}

impl Sizes {
    /// Reads a shape once.
    pub fn new(shape: &ModelShape) -> Self {
        let layers = 0..shape.layers();
        let bytes: Vec<u64> = layers
            .clone()
            .flat_map(|layer| {
                let count = shape.experts_in(layer) as usize;
                std::iter::repeat_n(shape.layer_expert_bytes(layer), count)
            })
            .collect();
        let total_bytes = shape.total_bytes();
        let mean_bytes = total_bytes as f64 / bytes.len().max(1) as f64;
        Self {
            per_byte: bytes
                .iter()
                .map(|&b| crate::num::narrow(mean_bytes / b as f64))
                .collect(),
            mean_bytes,
            least_bytes: bytes.iter().copied().min().unwrap_or(1).max(1),
            total_bytes,
            cycle_bytes: shape.token_cycle_bytes(),
            widest_layer_bytes: layers
                .map(|layer| shape.layer_expert_bytes(layer) * u64::from(shape.top_k_in(layer)))
                .max()
                .unwrap_or(0),
            bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_steps_back_is_a_pause() {
        let mut sense = Sense::default();
        let at = |s: u64| Moment {
            ns: s * 1_000_000_000,
        };
        assert!(sense.step(at(100)).first);
        assert_eq!(sense.step(at(101)).elapsed_s, 1.0);
        let back = sense.step(at(50));
        assert_eq!((back.elapsed_s, back.now_s, back.first), (0.0, 1.0, false));
        assert_eq!(
            sense.step(at(53)),
            Step {
                now_s: 4.0,
                dt_s: 1.0,
                elapsed_s: 3.0,
                first: false
            }
        );
    }

    #[test]
    fn a_difference_needs_both_ends_and_never_wraps() {
        let mut last = None;
        assert_eq!(difference(&mut last, Some(5u64), u64::saturating_sub), None);
        assert_eq!(difference(&mut last, Some(7), u64::saturating_sub), Some(2));
        assert_eq!(difference(&mut last, Some(1), u64::saturating_sub), Some(0));
        assert_eq!(difference(&mut last, None, u64::saturating_sub), None);
        assert_eq!(difference(&mut last, Some(9), u64::saturating_sub), None);
    }
}
