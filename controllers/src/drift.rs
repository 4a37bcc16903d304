//! Drift: a lasting fall of the hit rate, found by the Page-Hinkley test (Page 1954, Hinkley 1971).
//!
//! Per token the test adds `(mean - x) / noise - tolerance`; drift is called when that sum has risen
//! by `threshold` above its lowest point. The noise is the usual deviation of one token's hit rate, so
//! that a fall from .91 to .87 counts where hits are steady, and bursts do not where they are not.

use crate::config::DriftConfig;
use crate::observe::EngineTotals;

/// Hit rates are not taken to be steadier than this.
const LEAST_NOISE: f64 = 0.01;

/// The detector's state.
#[derive(Clone, Debug)]
pub(crate) struct Drift {
    config: DriftConfig,
    mean: f64,
    /// Variance of one token's hit rate.
    variance: f64,
    seen_tokens: f64,
    sum: f64,
    lowest: f64,
    hurry_left_tokens: f64,
}

impl Drift {
    pub fn new(config: &DriftConfig) -> Self {
        Self {
            config: config.clone(),
            mean: 0.0,
            variance: 0.0,
            seen_tokens: 0.0,
            sum: 0.0,
            lowest: 0.0,
            hurry_left_tokens: 0.0,
        }
    }

    /// Takes over other settings.
    pub fn reconfigure(&mut self, config: &DriftConfig) {
        self.config = config.clone();
    }

    /// Whether drift was found a short while ago: usual rates of routing no longer hold.
    pub fn hurries(&self) -> bool {
        self.hurry_left_tokens > 0.0
    }

    /// Factor on the half-lives now.
    pub fn half_life_factor(&self) -> f64 {
        if self.hurry_left_tokens > 0.0 {
            self.config.hurry_factor
        } else {
            1.0
        }
    }

    /// Takes in one tick; true when drift is found on it.
    pub fn update(&mut self, delta: Option<EngineTotals>, tokens: f64) -> bool {
        if tokens <= 0.0 {
            return false;
        }
        self.hurry_left_tokens = (self.hurry_left_tokens - tokens).max(0.0);
        let Some(hit_rate) = delta.and_then(hit_rate).filter(|_| self.config.enabled) else {
            return false;
        };
        let fall = self.learn(hit_rate, tokens);
        if self.seen_tokens < self.config.learn_tokens {
            return false;
        }
        self.sum += tokens * (fall / self.variance.sqrt().max(LEAST_NOISE) - self.config.tolerance);
        self.lowest = self.lowest.min(self.sum);
        if self.sum - self.lowest <= self.config.threshold {
            return false;
        }
        self.restart();
        self.hurry_left_tokens = self.config.hurry_tokens;
        true
    }

    /// Takes a hit rate into the usual one and its noise; returns how far it lies below.
    fn learn(&mut self, hit_rate: f64, tokens: f64) -> f64 {
        self.seen_tokens = (self.seen_tokens + tokens).min(self.config.memory_tokens);
        let share = (tokens / self.seen_tokens).min(1.0);
        let fall = self.mean - hit_rate;
        self.mean -= fall * share;
        // The mean of several tokens is quieter than one of them.
        let squares = if share < 1.0 {
            fall * fall * tokens
        } else {
            0.0
        };
        self.variance += (squares - self.variance) * share;
        fall
    }

    /// The usual hit rate is learnt anew.
    fn restart(&mut self) {
        (self.mean, self.variance) = (0.0, 0.0);
        (self.seen_tokens, self.sum, self.lowest) = (0.0, 0.0, 0.0);
    }
}

fn hit_rate(delta: EngineTotals) -> Option<f64> {
    let accesses = delta.hits.saturating_add(delta.misses);
    (accesses > 0).then(|| delta.hits as f64 / accesses as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(drift: &mut Drift, rates: impl IntoIterator<Item = u64>) -> Option<usize> {
        rates.into_iter().position(|percent| {
            let delta = EngineTotals {
                hits: percent,
                misses: 100 - percent,
                ..EngineTotals::default()
            };
            drift.update(Some(delta), 1.0)
        })
    }

    #[test]
    fn a_fall_is_found_within_a_dozen_tokens() {
        let mut drift = Drift::new(&DriftConfig::default());
        let steady = (0..400).map(|i| 70 + (i * 7919) % 11);
        assert_eq!(run(&mut drift, steady), None);
        let found = run(&mut drift, std::iter::repeat_n(40, 100));
        assert!(found.is_some_and(|token| token < 12), "{found:?}");
        assert!(drift.half_life_factor() < 1.0);
        assert_eq!(
            run(&mut drift, std::iter::repeat_n(40, 200)),
            None,
            "found twice"
        );
        assert_eq!(drift.half_life_factor(), 1.0);
    }

    /// The fall measured with the demo model, which a threshold in absolute hits never saw.
    #[test]
    fn a_small_fall_of_a_steady_rate_is_found() {
        let mut drift = Drift::new(&DriftConfig::default());
        let noisy = |middle: u64| (0u64..400).map(move |i| middle - 3 + (i * 7919) % 7);
        assert_eq!(run(&mut drift, noisy(91)), None);
        let found = run(&mut drift, noisy(87));
        assert!(found.is_some_and(|token| token < 20), "{found:?}");
    }

    #[test]
    fn a_rise_and_an_absent_rate_are_not_drift() {
        let mut drift = Drift::new(&DriftConfig::default());
        assert_eq!(
            run(&mut drift, (0..90).chain(std::iter::repeat_n(90, 300))),
            None
        );
        assert!(!drift.update(None, 50.0));
        assert!(!drift.update(Some(EngineTotals::default()), 50.0));
    }
}
