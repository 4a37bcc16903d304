//! Runs against each other: speeds as ratios, outputs as hashes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::plan::BASELINE;
use super::report::PolicyRun;
use super::session::Sample;
use super::stats::{median, median_interval_95};

/// One policy's speed as a multiple of the baseline's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PolicyRatios {
    /// Policy.
    pub policy: String,
    /// What it is compared with.
    pub baseline: String,
    /// Over all segments.
    pub total: Ratio,
    /// By segment.
    pub segments: Vec<SegmentRatio>,
}

/// A ratio in one segment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SegmentRatio {
    /// Domain, or `prompt-N`.
    pub name: String,
    /// The ratio.
    #[serde(flatten)]
    pub ratio: Ratio,
}

/// A ratio of speeds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Median speed over median speed.
    pub of_medians: f64,
    /// Median of the ratios within each repeat; none without a repeat that has both.
    pub paired_median: Option<f64>,
    /// Interval that holds the paired median with 95%, from six repeats on.
    pub interval_95: Option<(f64, f64)>,
    /// Repeats that have both.
    pub pairs: u32,
}

/// Against `off` where it ran, else against the first policy.
#[must_use]
pub fn ratios(runs: &[PolicyRun], samples: &[Sample]) -> Vec<PolicyRatios> {
    let Some(baseline) = runs
        .iter()
        .find(|run| run.policy == BASELINE)
        .or(runs.first())
    else {
        return Vec::new();
    };
    let others = runs.iter().filter(|run| run.policy != baseline.policy);
    others
        .map(|run| {
            let total = ratio(
                run.tok_s,
                baseline.tok_s,
                &run.policy,
                &baseline.policy,
                samples,
                |s| Some(s.total_tok_s),
            );
            let pairs = run.segments.iter().zip(&baseline.segments).enumerate();
            let segments = pairs.map(|(index, (ours, theirs))| SegmentRatio {
                name: ours.name.clone(),
                ratio: ratio(
                    ours.tok_s,
                    theirs.tok_s,
                    &run.policy,
                    &baseline.policy,
                    samples,
                    |s| Some(s.result.segments.get(index)?.tok_s),
                ),
            });
            PolicyRatios {
                policy: run.policy.clone(),
                baseline: baseline.policy.clone(),
                total,
                segments: segments.collect(),
            }
        })
        .collect()
}

fn ratio(
    ours: f64,
    theirs: f64,
    policy: &str,
    baseline: &str,
    samples: &[Sample],
    speed: impl Fn(&Sample) -> Option<f64>,
) -> Ratio {
    let of = |name: &str, repeat: u32| {
        let is_it = |s: &&Sample| s.result.policy == name && s.repeat == repeat;
        samples.iter().find(is_it).and_then(&speed)
    };
    let last = samples.iter().map(|s| s.repeat).max().unwrap_or(0);
    let paired: Vec<f64> = (1..=last)
        .filter_map(|repeat| Some(of(policy, repeat)? / of(baseline, repeat)?))
        .collect();
    Ratio {
        of_medians: ours / theirs,
        paired_median: median(&paired),
        interval_95: median_interval_95(&paired),
        pairs: u32::try_from(paired.len()).unwrap_or(u32::MAX),
    }
}

/// True: all known and equal; false: two differ; none: some unknown, the others equal.
#[must_use]
pub fn hashes_equal(samples: &[Sample]) -> Option<bool> {
    let known: Vec<&String> = samples
        .iter()
        .filter_map(|s| s.result.logits_sha256.as_ref())
        .collect();
    if known.windows(2).any(|pair| pair[0] != pair[1]) {
        return Some(false);
    }
    (!known.is_empty() && known.len() == samples.len()).then_some(true)
}

/// Each hash, with the runs that gave it.
#[must_use]
pub fn hashes(samples: &[Sample]) -> BTreeMap<String, Vec<String>> {
    let mut by_hash: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for sample in samples {
        if let Some(hash) = &sample.result.logits_sha256 {
            let run = format!("{} #{}", sample.result.policy, sample.repeat);
            by_hash.entry(hash.clone()).or_default().push(run);
        }
    }
    by_hash
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::{report, sample};

    #[test]
    fn ratios_pair_within_repeats() {
        let mut samples = Vec::new();
        for repeat in 1..=6 {
            let slow = f64::from(repeat);
            samples.push(sample("off", repeat, &[("a", slow)], "x"));
            samples.push(sample("adaptive", repeat, &[("a", 2.0 * slow)], "x"));
        }
        let report = report(&["adaptive", "off"], samples);
        let ratios = &report.ratios[0];
        assert_eq!(
            (ratios.policy.as_str(), ratios.baseline.as_str()),
            ("adaptive", "off")
        );
        assert_eq!(ratios.total.pairs, 6);
        assert_eq!(ratios.total.paired_median, Some(2.0));
        assert_eq!(ratios.segments[0].ratio.interval_95, Some((2.0, 2.0)));
    }

    #[test]
    fn hashes_are_equal_different_or_unknown() {
        let of = |hashes: [&str; 3]| {
            hashes_equal(&hashes.map(|hash| sample("off", 1, &[("a", 1.0)], hash)))
        };
        assert_eq!(of(["x", "x", "x"]), Some(true));
        assert_eq!(of(["x", "", "y"]), Some(false));
        assert_eq!(of(["x", "", "x"]), None);
        assert_eq!(of(["", "", ""]), None);
        assert_eq!(hashes_equal(&[]), None);
    }
}
