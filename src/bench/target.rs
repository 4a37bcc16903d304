//! `--target-tok-s`: the least memory that reaches a speed.
//!
//! Bisection over the limit. Speed is noisy and need not be monotone in memory, so each probe is a
//! median, its spread is reported, and a probe that contradicts the bracket is named.

use serde::{Deserialize, Serialize};

use super::plan::Plan;
use super::progress::Progress;
use super::ratios::hashes_equal;
use super::report::Failure;
use super::session::{RunError, Sample, Session};
use super::stats::{median, range};
use super::table::size;
use super::{BenchError, Hooks};

/// Probes of one policy, at most.
pub const MAX_PROBES: u32 = 10;
/// The lowest limit tried is this part of the highest.
const LOWER_PART: u64 = 20;
/// The bracket is narrow enough at this part of the highest limit.
const WIDTH_PART: u64 = 50;

/// What a search found. None: unknown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TargetReport {
    /// The model, as it was given.
    pub model: String,
    /// The speed asked for in tokens a second.
    pub target_tok_s: f64,
    /// One for each policy.
    pub searches: Vec<Search>,
    /// As in a comparison.
    pub hashes_equal: Option<bool>,
    /// Readahead of the model's disk in KiB.
    pub read_ahead_kb: Option<u64>,
    /// What the reader has to know.
    pub notes: Vec<String>,
    /// One paragraph from the figures.
    pub verdict: String,
}

/// The search for one policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Search {
    /// Policy.
    pub policy: String,
    /// Least limit that reached the speed, in bytes; none: not reached at the highest.
    pub memory_bytes: Option<u64>,
    /// Highest limit below it that did not reach it; none: the lowest one tried did.
    pub fails_at_bytes: Option<u64>,
    /// Largest (max - min) / median of a probe; none with one repeat.
    pub noise_ratio: Option<f64>,
    /// True when less memory was once faster than more by more than the noise.
    pub not_monotone: bool,
    /// Every probe in the order made.
    pub probes: Vec<Probe>,
}

/// One limit, tried.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    /// The limit in bytes.
    pub memory_bytes: u64,
    /// Median speed; none: the run failed.
    pub tok_s: Option<f64>,
    /// Slowest repeat.
    pub tok_s_min: Option<f64>,
    /// Fastest repeat.
    pub tok_s_max: Option<f64>,
    /// `reached`, `too slow`, or why it failed.
    pub outcome: String,
}

/// Where to probe next: first the highest limit, then the lowest, then halfway.
#[derive(Debug, Clone)]
pub struct Bisection {
    lowest: u64,
    highest: u64,
    fails_at: Option<u64>,
    reaches_at: Option<u64>,
    probes_left: u32,
}

impl Bisection {
    /// Between a twentieth of `highest` and `highest` bytes.
    #[must_use]
    pub fn new(highest: u64) -> Self {
        Self {
            lowest: (highest / LOWER_PART).max(1),
            highest,
            fails_at: None,
            reaches_at: None,
            probes_left: MAX_PROBES,
        }
    }

    /// The next limit to try; none: done.
    #[must_use]
    pub fn next(&self) -> Option<u64> {
        if self.probes_left == 0 {
            return None;
        }
        match (self.fails_at, self.reaches_at) {
            (None, None) => Some(self.highest),
            (Some(low), None) => (low < self.highest).then_some(self.highest),
            (None, Some(high)) => (high > self.lowest).then_some(self.lowest),
            (Some(low), Some(high)) => {
                let is_wide = high.saturating_sub(low) > self.highest / WIDTH_PART;
                is_wide.then(|| u64::midpoint(low, high))
            }
        }
    }

    /// The limit given by [`next`](Self::next) reached the speed, or did not.
    pub fn record(&mut self, memory_bytes: u64, reached: bool) {
        self.probes_left = self.probes_left.saturating_sub(1);
        if reached {
            self.reaches_at = Some(memory_bytes);
        } else {
            self.fails_at = Some(memory_bytes);
        }
    }
}

impl TargetReport {
    /// True when every search found a limit and no two hashes differ.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.searches
            .iter()
            .all(|search| search.memory_bytes.is_some())
            && self.hashes_equal != Some(false)
    }
}

/// Searches for every policy of the plan, up to the plan's memory.
///
/// # Errors
/// [`BenchError`] for whatever stops the bench; a probe that runs out of memory is an answer, and
/// any other failed run stops it.
pub async fn search(
    plan: &Plan,
    hooks: &Hooks<'_>,
    target_tok_s: f64,
) -> Result<TargetReport, BenchError> {
    let highest = plan.memory_bytes.unwrap_or(plan.model_bytes);
    let mut session = Session::open(plan, hooks)?;
    let runs = u64::from(MAX_PROBES) * u64::from(plan.repeats) * plan.policies.len() as u64;
    let mut progress = Progress::new(runs, plan.verbose);
    let mut samples = Vec::new();
    let mut searches = Vec::new();
    for policy in &plan.policies {
        let mut bisection = Bisection::new(highest);
        let mut probes = Vec::new();
        while let Some(memory_bytes) = bisection.next() {
            let probe = probe(
                &mut session,
                &mut progress,
                plan,
                (policy, memory_bytes, target_tok_s),
                &mut samples,
            )
            .await?;
            bisection.record(
                memory_bytes,
                probe.tok_s.is_some_and(|speed| speed >= target_tok_s),
            );
            probes.push(probe);
        }
        searches.push(conclude(policy, &bisection, probes));
    }
    drop(progress);
    let mut report = TargetReport {
        model: plan.model.display().to_string(),
        target_tok_s,
        searches,
        hashes_equal: hashes_equal(&samples),
        read_ahead_kb: (hooks.read_ahead_kb)(&plan.model),
        notes: session.notes().to_vec(),
        verdict: String::new(),
    };
    report.verdict = verdict(&report);
    Ok(report)
}

async fn probe(
    session: &mut Session<'_>,
    progress: &mut Progress,
    plan: &Plan,
    (policy, memory_bytes, target_tok_s): (&str, u64, f64),
    samples: &mut Vec<Sample>,
) -> Result<Probe, BenchError> {
    let mut speeds = Vec::new();
    for repeat in 1..=plan.repeats {
        progress.start(format!("{policy} in {} #{repeat}", size(memory_bytes)));
        match session
            .run(policy, repeat, Some(memory_bytes), progress)
            .await
        {
            Ok(sample) => {
                progress.end(&format!("{:.2} tok/s", sample.total_tok_s));
                speeds.push(sample.total_tok_s);
                samples.push(sample);
            }
            Err(RunError::Stop(error)) => return Err(error),
            Err(RunError::Failed(failure)) => {
                progress.end(&format!("FAILED: {failure}"));
                let failure = Failure::of(policy, repeat, &failure);
                if !failure.out_of_memory {
                    return Err(BenchError::NoFigures(failure.to_string()));
                }
                let outcome = "out of memory".to_owned();
                return Ok(Probe {
                    memory_bytes,
                    tok_s: None,
                    tok_s_min: None,
                    tok_s_max: None,
                    outcome,
                });
            }
        }
    }
    let tok_s = median(&speeds);
    let reached = tok_s.is_some_and(|speed| speed >= target_tok_s);
    Ok(Probe {
        memory_bytes,
        tok_s,
        tok_s_min: range(&speeds).map(|(low, _)| low),
        tok_s_max: range(&speeds).map(|(_, high)| high),
        outcome: if reached { "reached" } else { "too slow" }.to_owned(),
    })
}

fn conclude(policy: &str, bisection: &Bisection, probes: Vec<Probe>) -> Search {
    let spread = |probe: &Probe| {
        Some((probe.tok_s_max? - probe.tok_s_min?) / probe.tok_s?).filter(|spread| *spread > 0.0)
    };
    let noise_ratio = probes.iter().filter_map(spread).max_by(f64::total_cmp);
    let allowed = 1.0 + noise_ratio.unwrap_or(0.0);
    let not_monotone = probes.iter().any(|less| {
        probes
            .iter()
            .filter(|more| more.memory_bytes > less.memory_bytes)
            .any(|more| matches!((less.tok_s, more.tok_s), (Some(a), Some(b)) if a > b * allowed))
    });
    Search {
        policy: policy.to_owned(),
        memory_bytes: bisection.reaches_at,
        fails_at_bytes: bisection.fails_at,
        noise_ratio,
        not_monotone,
        probes,
    }
}

/// One paragraph: what each policy needs, within which bracket and noise, and what that saves.
#[must_use]
pub fn verdict(report: &TargetReport) -> String {
    let mut sentences: Vec<String> = report
        .searches
        .iter()
        .map(|search| sentence(search, report.target_tok_s))
        .collect();
    let found = report
        .searches
        .iter()
        .filter_map(|s| Some((&s.policy, s.memory_bytes?)));
    let found: Vec<(&String, u64)> = found.collect();
    let most = found.iter().max_by_key(|(_, bytes)| *bytes);
    let least = found.iter().min_by_key(|(_, bytes)| *bytes);
    if let (Some((more_name, more)), Some((less_name, less))) = (most, least)
        && more > less
    {
        let percent = (more - less) as f64 * 100.0 / *more as f64;
        sentences.push(format!(
            "`{less_name}` needs {} less than `{more_name}` ({percent:.0}%).",
            size(more - less)
        ));
    }
    sentences.push(match report.hashes_equal {
        Some(true) => "All runs gave the same hash over the logits.".to_owned(),
        Some(false) => "THE OUTPUTS DIFFER between runs, so no figure here counts.".to_owned(),
        None => "Whether the outputs are the same is not known for every run.".to_owned(),
    });
    sentences.join(" ")
}

fn sentence(search: &Search, target_tok_s: f64) -> String {
    let policy = &search.policy;
    let mut text = match (search.memory_bytes, search.fails_at_bytes) {
        (Some(bytes), Some(fails)) => format!(
            "`{policy}` reaches {target_tok_s} tok/s in {}, and not in {}",
            size(bytes),
            size(fails)
        ),
        (Some(bytes), None) => format!(
            "`{policy}` reaches {target_tok_s} tok/s even in {}, the least that was tried",
            size(bytes)
        ),
        (None, fails) => format!(
            "`{policy}` does not reach {target_tok_s} tok/s even in {}",
            fails.map_or_else(|| "the most that was tried".to_owned(), size)
        ),
    };
    match search.noise_ratio {
        Some(noise) => {
            text.push_str(&format!(
                "; repeats of a probe differ by up to {:.0}%",
                noise * 100.0
            ));
        }
        None => text.push_str("; with one repeat a probe the noise is not known"),
    }
    if search.not_monotone {
        text.push_str("; less memory was once faster than more, so take the bracket with care");
    }
    text + "."
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Searches where `needed` bytes are enough.
    fn run(highest: u64, needed: u64) -> (Bisection, u32) {
        let mut bisection = Bisection::new(highest);
        let mut probes = 0;
        while let Some(bytes) = bisection.next() {
            bisection.record(bytes, bytes >= needed);
            probes += 1;
        }
        (bisection, probes)
    }

    #[test]
    fn the_ends_are_tried_first() {
        let (bisection, probes) = run(1_000, 2_000);
        assert_eq!(
            (bisection.reaches_at, bisection.fails_at, probes),
            (None, Some(1_000), 1)
        );
        let (bisection, probes) = run(1_000, 1);
        assert_eq!(
            (bisection.reaches_at, bisection.fails_at, probes),
            (Some(50), None, 2)
        );
    }

    proptest! {
        #[test]
        fn the_bracket_holds_the_answer_and_is_narrow(
            highest in 1_u64..=u64::MAX, permille in 0..=1_000_u64,
        ) {
            let needed = (highest / 1_000 * permille).clamp(1, highest);
            let (bisection, probes) = run(highest, needed);
            prop_assert!(probes <= MAX_PROBES);
            let high = bisection.reaches_at.expect("the highest is enough");
            prop_assert!(high >= needed);
            if let Some(low) = bisection.fails_at {
                prop_assert!(low < needed && high - low <= (highest / WIDTH_PART).max(1));
            }
        }
    }

    fn probe(memory_bytes: u64, tok_s: f64) -> Probe {
        let (low, high) = (Some(tok_s * 0.98), Some(tok_s * 1.02));
        let outcome = String::new();
        Probe {
            memory_bytes,
            tok_s: Some(tok_s),
            tok_s_min: low,
            tok_s_max: high,
            outcome,
        }
    }

    #[test]
    fn noise_and_contradictions_are_told() {
        let mut bisection = Bisection::new(4_000_000_000);
        bisection.record(4_000_000_000, true);
        bisection.record(2_000_000_000, false);
        let probes = vec![probe(4_000_000_000, 20.0), probe(2_000_000_000, 9.0)];
        let search = conclude("adaptive", &bisection, probes);
        assert!(!search.not_monotone);
        let text = sentence(&search, 10.0);
        assert!(text.contains("in 4000 MB, and not in 2000 MB"), "{text}");
        assert!(text.contains("up to 4%"), "{text}");
        let probes = vec![probe(4_000_000_000, 9.0), probe(2_000_000_000, 20.0)];
        let search = conclude("adaptive", &bisection, probes);
        assert!(sentence(&search, 10.0).contains("with care"));
    }
}
