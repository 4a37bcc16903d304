//! Search over the options of the control laws: robust over scenarios and traces, not the best on one.
//!
//! One knob after the other is turned while the others stay. A value is judged by its worst *regret*:
//! the share of speed that it loses, in the case where it loses most, to the best value of that case
//! (minimax regret, Savage 1951). A value that breaks a bar of the closed loop in any case is out, and one
//! that wins has to win again on cases that nothing was chosen by.

mod cases;
mod knobs;

pub use cases::{recorded, scripted};
pub use knobs::{KNOBS, Knob};

use crate::plant::{Scenario, ScenarioError};
use crate::replay::ReplayError;
use hotpin_controllers::trace::TraceError;
use hotpin_controllers::{AdaptiveConfig, PolicyKind, ShapeError};
use serde::Serialize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Regret by which another value must be better before a default moves: less is noise of the seeds.
const WORTH_MOVING: f64 = 0.003;

/// Ticks that capacity may lag behind a ceiling that falls.
const MOST_LAG_TICKS: usize = 3;

/// Something to run, and the bars that it must keep.
#[derive(Clone, Debug)]
pub struct Case {
    /// The scenario; its options are replaced.
    pub scenario: Scenario,
    /// Most reversals of capacity.
    pub most_reversals: usize,
}

/// What one value of a knob came to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// The value.
    pub value: f64,
    /// Share of speed lost to the best value of the case, in the worst case.
    pub worst_regret: f64,
    /// The same, mean of the cases.
    pub mean_regret: f64,
    /// The case of the worst regret.
    pub worst_case: String,
    /// The first bar that it breaks; `null` when it keeps all.
    pub broken: Option<String>,
}

/// One knob turned.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Turn {
    /// The knob.
    pub name: &'static str,
    /// Its value before.
    pub before: f64,
    /// The value that the cases prefer.
    pub preferred: f64,
    /// Its value after: that one, if the held-out cases bear it out.
    pub chosen: f64,
    /// Every value tried.
    pub trials: Vec<Trial>,
    /// The value before and the preferred one on the held-out cases; `null` where they are the same
    /// or there are none.
    pub held_out: Option<[Trial; 2]>,
}

/// Why a sweep stopped.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// A scenario was refused.
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
    /// A trace has nothing to judge by.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// A part of a trace could not be cut out.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A trace's model could not be given sizes.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// There is nothing to judge by.
    #[error("a sweep needs at least one scenario or trace")]
    NoCase,
}

/// Turns each knob once, in order, on `threads` threads, judged by `cases`. A value that wins there is
/// taken only if it also does on `held_out`, which nothing is chosen by: its worst and its mean regret
/// to the present value are no higher, and it breaks no bar. Without held-out cases the first judgement
/// stands. `told` hears of every turn.
///
/// # Errors
/// When a case is refused or there is none.
pub fn sweep(
    knobs: &[Knob],
    cases: &[Case],
    held_out: &[Case],
    start: &AdaptiveConfig,
    threads: usize,
    told: &mut dyn FnMut(&Turn),
) -> Result<(AdaptiveConfig, Vec<Turn>), SweepError> {
    if cases.is_empty() {
        return Err(SweepError::NoCase);
    }
    let mut config = start.clone();
    let mut turns = Vec::new();
    for knob in knobs {
        let before = (knob.get)(&config);
        let with = |value: f64| {
            let mut candidate = config.clone();
            (knob.set)(&mut candidate, value);
            candidate
        };
        let mut values = knob.values.to_vec();
        if !values.contains(&before) {
            values.push(before);
        }
        let candidates: Vec<AdaptiveConfig> = values.iter().map(|&value| with(value)).collect();
        let trials = judge(&values, &candidates, cases, threads)?;
        let preferred = choose(&trials, before);
        let mut confirmation = None;
        if preferred != before && !held_out.is_empty() {
            let pair = [before, preferred];
            let found = judge(&pair, &pair.map(with), held_out, threads)?;
            confirmation = <[Trial; 2]>::try_from(found).ok();
        }
        let chosen = match &confirmation {
            Some([present, new]) if !confirms(present, new) => before,
            _ => preferred,
        };
        (knob.set)(&mut config, chosen);
        let turn = Turn {
            name: knob.name,
            before,
            preferred,
            chosen,
            trials,
            held_out: confirmation,
        };
        told(&turn);
        turns.push(turn);
    }
    Ok((config, turns))
}

/// Whether the held-out cases bear a preference out.
fn confirms(present: &Trial, new: &Trial) -> bool {
    new.broken.is_none()
        && (present.broken.is_some()
            || new.worst_regret <= present.worst_regret && new.mean_regret <= present.mean_regret)
}

/// The value of the least worst regret that keeps all bars; the present one unless another is clearly
/// better.
fn choose(trials: &[Trial], before: f64) -> f64 {
    let kept = trials.iter().filter(|trial| trial.broken.is_none());
    let best = kept.min_by(|a, b| a.worst_regret.total_cmp(&b.worst_regret));
    let present = trials.iter().find(|trial| trial.value == before);
    match (best, present) {
        (Some(best), Some(present))
            if present.broken.is_some()
                || best.worst_regret + WORTH_MOVING < present.worst_regret =>
        {
            best.value
        }
        _ => before,
    }
}

/// What a run came to.
#[derive(Clone, Debug)]
struct Run {
    tok_s: f64,
    broken: Option<String>,
}

fn judge(
    values: &[f64],
    candidates: &[AdaptiveConfig],
    cases: &[Case],
    threads: usize,
) -> Result<Vec<Trial>, SweepError> {
    let runs = run_all(candidates, cases, threads)?;
    let of = |candidate: usize, case: usize| &runs[candidate * cases.len() + case];
    let best: Vec<f64> = (0..cases.len())
        .map(|case| {
            let speeds = (0..candidates.len()).map(|candidate| of(candidate, case).tok_s);
            speeds.fold(f64::MIN_POSITIVE, f64::max)
        })
        .collect();
    let trials = values.iter().enumerate().map(|(candidate, &value)| {
        let regrets: Vec<f64> = (0..cases.len())
            .map(|case| 1.0 - of(candidate, case).tok_s / best[case])
            .collect();
        let worst = (0..cases.len()).max_by(|&a, &b| regrets[a].total_cmp(&regrets[b]));
        let worst = worst.unwrap_or(0);
        Trial {
            value,
            worst_regret: regrets[worst],
            mean_regret: regrets.iter().sum::<f64>() / regrets.len() as f64,
            worst_case: cases[worst].scenario.name.clone(),
            broken: (0..cases.len()).find_map(|case| of(candidate, case).broken.clone()),
        }
    });
    Ok(trials.collect())
}

/// Every candidate in every case, candidate by candidate.
fn run_all(
    candidates: &[AdaptiveConfig],
    cases: &[Case],
    threads: usize,
) -> Result<Vec<Run>, SweepError> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Option<Result<Run, ScenarioError>>>> =
        Mutex::new(vec![None; candidates.len() * cases.len()]);
    thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= candidates.len() * cases.len() {
                        return;
                    }
                    let run = run(&candidates[at / cases.len()], &cases[at % cases.len()]);
                    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                    done[at] = Some(run);
                }
            });
        }
    });
    let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    let runs: Result<Vec<Run>, ScenarioError> = done.into_iter().flatten().collect();
    Ok(runs?)
}

fn run(config: &AdaptiveConfig, case: &Case) -> Result<Run, ScenarioError> {
    let mut scenario = case.scenario.clone();
    // Ceilings belong to the case, laws to the candidate.
    let limit_bytes = scenario.config.capacity.limit_bytes;
    scenario.config = config.clone();
    scenario.config.capacity.limit_bytes = limit_bytes;
    let report = match scenario.run_kind(PolicyKind::Adaptive) {
        Ok(report) => report,
        // A value that contradicts another option is out, the sweep goes on.
        Err(ScenarioError::Build(error)) => {
            return Ok(Run {
                tok_s: 0.0,
                broken: Some(error.to_string()),
            });
        }
        Err(other) => return Err(other),
    };
    let name = &scenario.name;
    let broken = if report.overshoot_ticks > MOST_LAG_TICKS {
        Some(format!("{name}: lags by {} ticks", report.overshoot_ticks))
    } else if report.reversals > case.most_reversals {
        Some(format!("{name}: {} reversals", report.reversals))
    } else {
        None
    };
    Ok(Run {
        tok_s: report.tok_s,
        broken,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plant::Routing;
    use crate::replay::Part;
    use hotpin_controllers::trace::Trace;

    fn trial(value: f64, worst_regret: f64, broken: bool) -> Trial {
        Trial {
            value,
            worst_regret,
            mean_regret: worst_regret,
            worst_case: String::new(),
            broken: broken.then(|| "bar".to_owned()),
        }
    }

    #[test]
    fn a_default_moves_only_for_what_is_clearly_better_and_keeps_the_bars() {
        let slightly = [trial(1.0, 0.010, false), trial(2.0, 0.009, false)];
        assert_eq!(choose(&slightly, 1.0), 1.0);
        let clearly = [trial(1.0, 0.020, false), trial(2.0, 0.009, false)];
        assert_eq!(choose(&clearly, 1.0), 2.0);
        let unstable = [trial(1.0, 0.020, false), trial(2.0, 0.0, true)];
        assert_eq!(choose(&unstable, 1.0), 1.0);
        let escape = [trial(1.0, 0.0, true), trial(2.0, 0.02, false)];
        assert_eq!(choose(&escape, 1.0), 2.0);
    }

    #[test]
    fn held_out_cases_have_the_last_word() {
        assert!(confirms(&trial(1.0, 0.01, false), &trial(2.0, 0.0, false)));
        assert!(!confirms(&trial(1.0, 0.0, false), &trial(2.0, 0.01, false)));
        assert!(!confirms(&trial(1.0, 0.01, false), &trial(2.0, 0.0, true)));
        assert!(confirms(&trial(1.0, 0.0, true), &trial(2.0, 0.01, false)));
    }

    #[test]
    fn recorded_cases_are_of_their_part_and_size() {
        let bytes = include_bytes!("../../traces/gpt-oss-20b.trace");
        let trace = Trace::decode(bytes).unwrap();
        let of = |part| recorded(&trace, part, 20).unwrap();
        let (even, odd) = (of(Part::Even), of(Part::Odd));
        assert_eq!(even.len(), 4, "two sizes, two stores");
        let tokens = |case: &Case| {
            let Routing::Trace(trace) = &case.scenario.routing else {
                panic!("not a trace");
            };
            trace.routed().to_vec()
        };
        assert_ne!(tokens(&even[0]), tokens(&odd[0]));
        let report = even[0].scenario.run_kind(PolicyKind::Adaptive).unwrap();
        assert_eq!(report.tokens, 20);
        let limit_bytes = even[0].scenario.shape.total_bytes() / 4;
        assert!(
            report
                .ticks
                .iter()
                .all(|tick| tick.capacity_bytes <= limit_bytes)
        );
    }

    #[test]
    fn knobs_set_what_they_read_and_begin_at_usable_values() {
        for knob in KNOBS {
            for &value in knob.values {
                let mut config = AdaptiveConfig::default();
                (knob.set)(&mut config, value);
                assert_eq!((knob.get)(&config), value, "{}", knob.name);
                assert!(config.check().is_ok(), "{} = {value}", knob.name);
            }
        }
    }

    #[test]
    fn a_bad_value_is_found_to_be_bad() {
        let mut cases = scripted(1..=1);
        cases.retain(|case| case.scenario.name.starts_with("drift"));
        for case in &mut cases {
            case.scenario.duration_s = 60.0;
        }
        // Hardly any transit: what a token loads is gone before the next.
        let knob = Knob {
            values: &[0.02, 0.75],
            ..KNOBS[0]
        };
        let start = AdaptiveConfig::default();
        let (config, turns) = sweep(&[knob], &cases, &[], &start, 2, &mut |_| {}).unwrap();
        assert_eq!(config.pins.share, 0.75);
        assert_eq!(turns[0].trials.len(), 2);
        assert!(turns[0].trials[0].worst_regret > turns[0].trials[1].worst_regret);
        assert!(sweep(&[knob], &[], &[], &start, 1, &mut |_| {}).is_err());
    }
}
