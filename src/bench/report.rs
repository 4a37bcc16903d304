//! The report of a comparison: medians, ratios and hashes, in the shape that `--json` prints.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::perplexity::Perplexity;
use super::plan::Plan;
use super::protocol::SegmentResult;
use super::ratios::{PolicyRatios, hashes, hashes_equal, ratios};
use super::roofline::Roofline;
use super::session::Sample;
use super::stats::{median, median_u64, range};
use super::tier::Tier;
use super::verdict::verdict;

/// What `hotpin bench` found. None: unknown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The model, as it was given.
    pub model: String,
    /// Bytes of all its files.
    pub model_bytes: u64,
    /// Limit of each run in bytes; none: no limit held.
    pub memory_bytes: Option<u64>,
    /// One for each policy that gave figures, in the order asked: medians over its repeats.
    pub runs: Vec<PolicyRun>,
    /// Readahead of the model's disk in KiB.
    pub read_ahead_kb: Option<u64>,
    /// True: every run gave the same hash. False: two differ. None: some are unknown.
    pub hashes_equal: Option<bool>,
    /// Each hash, with the runs that gave it.
    pub hashes: BTreeMap<String, Vec<String>>,
    /// Every policy against the baseline.
    pub ratios: Vec<PolicyRatios>,
    /// Tokens asked for in each segment.
    pub tokens: u32,
    /// Repeats asked for.
    pub repeats: u32,
    /// Compute threads.
    pub threads: u32,
    /// The profile that was given.
    pub profile: Option<String>,
    /// Every run, in the order run.
    pub samples: Vec<Sample>,
    /// Runs that gave no figures.
    pub failures: Vec<Failure>,
    /// What the reader has to know.
    pub notes: Vec<String>,
    /// One paragraph from the figures.
    pub verdict: String,
}

/// Medians of one policy over its repeats.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PolicyRun {
    /// Policy.
    pub policy: String,
    /// Store that ran.
    pub store: String,
    /// Tokens a second over all segments.
    pub tok_s: f64,
    /// Slowest repeat.
    pub tok_s_min: f64,
    /// Fastest repeat.
    pub tok_s_max: f64,
    /// Time to load in seconds.
    pub load_s: Option<f64>,
    /// Time to the first token in milliseconds.
    pub ttft_ms: Option<f64>,
    /// Highest memory use in bytes.
    pub peak_memory_bytes: Option<u64>,
    /// Bytes locked at the end.
    pub pinned_bytes: Option<u64>,
    /// Capacity at the end in bytes.
    pub capacity_bytes: Option<u64>,
    /// Bytes of the model in the page cache at the start.
    pub resident_at_start_bytes: Option<u64>,
    /// The roofline of the repeat that took the median time.
    pub roofline: Option<Roofline>,
    /// The pool in a device's memory of that repeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vram: Option<Tier>,
    /// One for each domain or prompt.
    pub segments: Vec<SegmentRun>,
    /// The hash that all its repeats gave; none when they differ or one is unknown.
    pub logits_sha256: Option<String>,
}

/// Medians of one segment over repeats.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SegmentRun {
    /// Domain, or `prompt-N`.
    pub name: String,
    /// Tokens decoded; fewer than asked where generation ended by itself.
    pub tokens: u32,
    /// Tokens a second.
    pub tok_s: f64,
    /// Slowest repeat.
    pub tok_s_min: f64,
    /// Fastest repeat.
    pub tok_s_max: f64,
    /// Part of routed experts resident when routed.
    pub hit_ratio: Option<f64>,
    /// Part of routed experts locked when routed.
    pub pinned_hit_ratio: Option<f64>,
    /// Bytes read per token.
    pub read_bytes_per_token: Option<f64>,
    /// Stall per token in milliseconds.
    pub stall_ms_per_token: Option<f64>,
    /// Major page faults per token.
    pub major_faults_per_token: Option<f64>,
    /// Of `--task perplexity`; the same in every repeat, or the hashes differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<Perplexity>,
}

/// A run that gave no figures.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Policy.
    pub policy: String,
    /// Repeat, from 1.
    pub repeat: u32,
    /// True: the kernel killed it for want of memory.
    pub out_of_memory: bool,
    /// What happened.
    pub error: String,
}

impl Failure {
    /// A run that failed by itself.
    #[must_use]
    pub fn of(policy: &str, repeat: u32, failure: &super::child::RunFailure) -> Self {
        Self {
            policy: policy.to_owned(),
            repeat,
            out_of_memory: matches!(failure, super::child::RunFailure::OutOfMemory { .. }),
            error: failure.to_string(),
        }
    }

    /// Something that stopped the whole bench at this run.
    #[must_use]
    pub fn stop(policy: &str, repeat: u32, error: &super::BenchError) -> Self {
        let error = format!("the bench stopped here: {error}");
        Self {
            policy: policy.to_owned(),
            repeat,
            out_of_memory: false,
            error,
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} #{}: {}", self.policy, self.repeat, self.error)
    }
}

impl Report {
    /// Puts the report together. `limited` tells whether the plan's limit held.
    #[must_use]
    pub fn build(
        plan: &Plan,
        limited: bool,
        read_ahead_kb: Option<u64>,
        samples: Vec<Sample>,
        failures: Vec<Failure>,
        notes: &[String],
    ) -> Self {
        let runs: Vec<PolicyRun> = plan
            .policies
            .iter()
            .filter_map(|name| PolicyRun::of(name, &samples))
            .collect();
        let mut report = Self {
            model: plan.model.display().to_string(),
            model_bytes: plan.model_bytes,
            memory_bytes: plan.memory_bytes.filter(|_| limited),
            ratios: ratios(&runs, &samples),
            runs,
            read_ahead_kb,
            hashes_equal: hashes_equal(&samples),
            hashes: hashes(&samples),
            tokens: plan.tokens,
            repeats: plan.repeats,
            threads: plan.threads,
            profile: plan.profile.as_ref().map(|path| path.display().to_string()),
            samples,
            failures,
            notes: notes.to_vec(),
            verdict: String::new(),
        };
        report.verdict = verdict(&report);
        report
    }

    /// The medians of a policy.
    #[must_use]
    pub fn run(&self, policy: &str) -> Option<&PolicyRun> {
        self.runs.iter().find(|run| run.policy == policy)
    }

    /// True when every run gave figures and no two hashes differ.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.failures.is_empty() && self.hashes_equal != Some(false)
    }
}

impl PolicyRun {
    /// Medians over the samples of `policy`; none without any.
    #[must_use]
    pub fn of(policy: &str, samples: &[Sample]) -> Option<Self> {
        let own: Vec<&Sample> = samples
            .iter()
            .filter(|s| s.result.policy == policy)
            .collect();
        let first = own.first()?;
        let speeds: Vec<f64> = own.iter().map(|s| s.total_tok_s).collect();
        let (tok_s_min, tok_s_max) = range(&speeds)?;
        let bytes = |of: fn(&Sample) -> Option<u64>| {
            median_u64(&own.iter().filter_map(|s| of(s)).collect::<Vec<_>>())
        };
        let real = |of: fn(&Sample) -> Option<f64>| {
            median(&own.iter().filter_map(|s| of(s)).collect::<Vec<_>>())
        };
        let hash = first.result.logits_sha256.clone();
        let one_hash = own.iter().all(|s| s.result.logits_sha256 == hash);
        Some(Self {
            policy: policy.to_owned(),
            store: first.result.store.clone(),
            tok_s: median(&speeds)?,
            tok_s_min,
            tok_s_max,
            load_s: real(|s| s.result.load_s),
            ttft_ms: real(|s| s.result.ttft_ms),
            peak_memory_bytes: bytes(|s| s.result.peak_memory_bytes),
            pinned_bytes: bytes(|s| s.result.pinned_bytes),
            capacity_bytes: bytes(|s| s.result.capacity_bytes),
            resident_at_start_bytes: bytes(|s| s.result.resident_at_start_bytes),
            roofline: middle(&own).and_then(|s| s.result.roofline),
            vram: middle(&own).and_then(|s| s.result.vram.clone()),
            segments: segments(&own)?,
            logits_sha256: hash.filter(|_| one_hash),
        })
    }
}

/// The sample whose speed is the median, or the faster of the two around it.
fn middle<'s>(own: &[&'s Sample]) -> Option<&'s Sample> {
    let mut order = own.to_vec();
    order.sort_by(|a, b| a.total_tok_s.total_cmp(&b.total_tok_s));
    order.get(order.len() / 2).copied()
}

/// Every sample has the same segments in the same order: the child's answer was checked for that.
fn segments(own: &[&Sample]) -> Option<Vec<SegmentRun>> {
    let first = own.first()?;
    let count = first.result.segments.len();
    (0..count)
        .map(|index| {
            let all: Vec<&SegmentResult> = own
                .iter()
                .filter_map(|s| s.result.segments.get(index))
                .collect();
            segment(&all)
        })
        .collect()
}

fn segment(all: &[&SegmentResult]) -> Option<SegmentRun> {
    let known = |of: fn(&SegmentResult) -> Option<f64>| {
        median(&all.iter().filter_map(|s| of(s)).collect::<Vec<_>>())
    };
    let speeds: Vec<f64> = all.iter().map(|s| s.tok_s).collect();
    let (tok_s_min, tok_s_max) = range(&speeds)?;
    let first = all.first()?;
    Some(SegmentRun {
        name: first.name.clone(),
        tokens: first.tokens,
        tok_s: median(&speeds)?,
        tok_s_min,
        tok_s_max,
        hit_ratio: known(|s| s.hit_ratio),
        pinned_hit_ratio: known(|s| s.pinned_hit_ratio),
        read_bytes_per_token: known(|s| s.read_bytes_per_token),
        stall_ms_per_token: known(|s| s.stall_ms_per_token),
        major_faults_per_token: known(|s| s.major_faults_per_token),
        perplexity: first.perplexity,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bench::protocol::{ChildResult, Task};
    use std::time::Duration;

    pub(crate) fn sample(policy: &str, repeat: u32, speeds: &[(&str, f64)], hash: &str) -> Sample {
        let segments = speeds.iter().map(|(name, tok_s)| SegmentResult {
            name: (*name).to_owned(),
            tokens: 150,
            seconds: 150.0 / tok_s,
            tok_s: *tok_s,
            hit_ratio: Some(0.5),
            pinned_hit_ratio: None,
            read_bytes_per_token: Some(1e8),
            stall_ms_per_token: None,
            major_faults_per_token: None,
            perplexity: None,
        });
        let result = ChildResult {
            policy: policy.to_owned(),
            store: "mapped".to_owned(),
            load_s: Some(4.0),
            ttft_ms: None,
            peak_memory_bytes: Some(2_500_000_000),
            pinned_bytes: None,
            resident_at_start_bytes: Some(0),
            segments: segments.collect(),
            logits_sha256: (!hash.is_empty()).then(|| hash.to_owned()),
            capacity_bytes: None,
            roofline: None,
            vram: None,
            shaken: None,
            notes: Vec::new(),
        };
        let tokens: f64 = result.segments.iter().map(|s| f64::from(s.tokens)).sum();
        let seconds: f64 = result.segments.iter().map(|s| s.seconds).sum();
        Sample {
            repeat,
            order: repeat,
            total_tok_s: tokens / seconds,
            result,
        }
    }

    pub(crate) fn plan(policies: &[&str]) -> Plan {
        Plan {
            model: "m.gguf".into(),
            shards: vec!["m.gguf".into()],
            model_bytes: 5_470_000_000,
            task: Task::Forced,
            chunks: None,
            workload: Vec::new(),
            prompts: Vec::new(),
            warmup_tokens: 0,
            tokens: 150,
            memory_bytes: Some(2_500_000_000),
            policies: policies.iter().map(|p| (*p).to_owned()).collect(),
            store: "mapped".into(),
            profile: None,
            repeats: 3,
            threads: 2,
            timeout: Duration::from_secs(60),
            record: None,
            journal: None,
            warm: false,
            no_cgroup: false,
            verbose: false,
            engine: serde_json::Value::Null,
        }
    }

    pub(crate) fn report(policies: &[&str], samples: Vec<Sample>) -> Report {
        Report::build(&plan(policies), true, Some(128), samples, Vec::new(), &[])
    }

    #[test]
    fn totals_are_tokens_over_seconds_and_medians_are_over_repeats() {
        let samples = vec![
            sample("off", 1, &[("a", 10.0), ("b", 30.0)], "x"),
            sample("off", 2, &[("a", 20.0), ("b", 30.0)], "x"),
            sample("off", 3, &[("a", 12.0), ("b", 30.0)], "x"),
        ];
        assert!((samples[0].total_tok_s - 15.0).abs() < 1e-9);
        let report = report(&["off"], samples);
        let run = report.run("off").expect("off ran");
        assert!((run.segments[0].tok_s - 12.0).abs() < 1e-9);
        assert!((run.segments[0].tok_s_min - 10.0).abs() < 1e-9);
        assert!((run.segments[0].tok_s_max - 20.0).abs() < 1e-9);
        assert_eq!(run.segments[0].pinned_hit_ratio, None);
        assert_eq!(report.hashes_equal, Some(true));
    }

    #[test]
    fn json_has_the_agreed_shape_and_null_for_unknown() {
        let report = report(&["off"], vec![sample("off", 1, &[("a", 10.0)], "x")]);
        let json = serde_json::to_value(&report).expect("json");
        for key in [
            "model",
            "memory_bytes",
            "runs",
            "read_ahead_kb",
            "samples",
            "ratios",
        ] {
            assert!(json.get(key).is_some(), "{key}");
        }
        let run = &json["runs"][0];
        for key in [
            "policy",
            "store",
            "tok_s",
            "load_s",
            "peak_memory_bytes",
            "logits_sha256",
        ] {
            assert!(!run[key].is_null(), "{key}");
        }
        assert!(run["ttft_ms"].is_null() && run.get("ttft_ms").is_some());
        assert!(run["segments"][0]["pinned_hit_ratio"].is_null());
        assert_eq!(json["samples"][0]["segments"][0]["name"], "a");
        assert_eq!(
            serde_json::from_value::<Report>(json).expect("back"),
            report
        );
    }
}
