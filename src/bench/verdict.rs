//! One paragraph in words, computed from the figures and from nothing else.

use super::plan::BASELINE;
use super::report::{PolicyRun, Report};

/// Who won and by how much, where `static` lost, whether `adaptive` kept its word, and whether the
/// outputs are the same. A difference inside the spread of the repeats is called that.
#[must_use]
pub fn verdict(report: &Report) -> String {
    let mut sentences = Vec::new();
    sentences.extend(winner(report));
    sentences.extend(adaptive(report));
    sentences.extend(static_pins(report));
    sentences.push(output(report));
    sentences.extend(failures(report));
    sentences.join(" ")
}

fn winner(report: &Report) -> Option<String> {
    let best = fastest(report.runs.iter())?;
    let Some(second) = fastest(report.runs.iter().filter(|run| run.policy != best.policy)) else {
        return Some(format!(
            "Only `{}` ran: {:.2} tok/s.",
            best.policy, best.tok_s
        ));
    };
    let mut text = format!("`{}` was fastest at {:.2} tok/s", best.policy, best.tok_s);
    if let Some(ratio) = against(report, &best.policy, BASELINE) {
        text.push_str(&format!(", {ratio:.2}x `{BASELINE}`"));
    }
    if second.policy != BASELINE || best.policy == BASELINE {
        let ratio = best.tok_s / second.tok_s;
        text.push_str(&format!(", {ratio:.2}x `{}`, the next", second.policy));
    }
    if best.tok_s_min <= second.tok_s_max {
        let with_one = "; with one repeat the spread is not known";
        let overlap = "; the two overlap within the spread of the repeats, so that is no clear win";
        text.push_str(if report.repeats == 1 {
            with_one
        } else {
            overlap
        });
    } else if report.repeats == 1 {
        text.push_str("; one repeat tells nothing of the spread");
    }
    text.push('.');
    Some(text)
}

fn adaptive(report: &Report) -> Option<String> {
    let run = report.run("adaptive")?;
    let best = fastest(report.runs.iter())?;
    if report.runs.len() < 2 {
        return None;
    }
    let mut parts = Vec::new();
    if best.policy != run.policy {
        let ratio = run.tok_s / best.tok_s;
        parts.push(format!(
            "`adaptive` did not win: {ratio:.2}x `{}` in total",
            best.policy
        ));
    }
    let mut behind = Vec::new();
    for (index, segment) in run.segments.iter().enumerate() {
        let rivals = report
            .runs
            .iter()
            .filter(|other| other.policy != run.policy);
        let ahead = rivals
            .filter_map(|other| Some((&other.policy, other.segments.get(index)?)))
            .filter(|(_, theirs)| theirs.tok_s_min > segment.tok_s_max)
            .max_by(|a, b| a.1.tok_s.total_cmp(&b.1.tok_s));
        if let Some((policy, theirs)) = ahead {
            let ratio = segment.tok_s / theirs.tok_s;
            behind.push(format!("{} ({ratio:.2}x `{policy}`)", segment.name));
        }
    }
    if !behind.is_empty() {
        parts.push(format!(
            "`adaptive` was clearly behind in {}",
            behind.join(", ")
        ));
    }
    (!parts.is_empty()).then(|| parts.join("; ") + ".")
}

fn static_pins(report: &Report) -> Option<String> {
    let pinned = report.run("static")?;
    let stock = report.run(BASELINE)?;
    let (mut lost, mut won) = (Vec::new(), Vec::new());
    for (ours, theirs) in pinned.segments.iter().zip(&stock.segments) {
        let text = format!("{} ({:.2}x)", ours.name, ours.tok_s / theirs.tok_s);
        if ours.tok_s < theirs.tok_s {
            lost.push(text);
        } else {
            won.push(text);
        }
    }
    let mut text = match (lost.is_empty(), won.is_empty()) {
        (false, false) => format!(
            "The static pin beat `{BASELINE}` in {} and lost to it in {}",
            won.join(", "),
            lost.join(", ")
        ),
        (false, true) => {
            format!(
                "The static pin lost to `{BASELINE}` everywhere: {}",
                lost.join(", ")
            )
        }
        (true, _) => format!("The static pin did not lose to `{BASELINE}` anywhere here"),
    };
    let slowest = pinned
        .segments
        .iter()
        .zip(report.run("adaptive").map(|run| &run.segments)?)
        .min_by(|a, b| a.0.tok_s.total_cmp(&b.0.tok_s));
    if let Some((ours, theirs)) = slowest
        && pinned.segments.len() > 1
    {
        let ratio = theirs.tok_s / ours.tok_s;
        text.push_str(&format!(
            "; where it was slowest, in {}, `adaptive` made {ratio:.2}x of it",
            ours.name
        ));
    }
    Some(text + ".")
}

fn output(report: &Report) -> String {
    match report.hashes_equal {
        Some(true) if report.samples.len() == 1 => {
            "One run has nothing to compare its hash with.".to_owned()
        }
        Some(true) if report.samples.len() == 2 => {
            "Both runs gave the same hash over the logits.".to_owned()
        }
        Some(true) => {
            format!(
                "All {} runs gave the same hash over the logits.",
                report.samples.len()
            )
        }
        Some(false) => format!(
            "THE OUTPUTS DIFFER: {} different hashes over the logits, so no speed here counts.",
            report.hashes.len()
        ),
        None => "Whether the outputs are the same is not known for every run.".to_owned(),
    }
}

fn failures(report: &Report) -> Option<String> {
    let first = report.failures.first()?;
    let kind = if first.out_of_memory {
        "ran out of memory"
    } else {
        "failed"
    };
    let more = match report.failures.len() {
        1 => String::new(),
        n => format!(", and {} more runs failed", n - 1),
    };
    Some(format!(
        "`{}` {kind} in repeat {}{more}.",
        first.policy, first.repeat
    ))
}

fn fastest<'a>(runs: impl Iterator<Item = &'a PolicyRun>) -> Option<&'a PolicyRun> {
    runs.max_by(|a, b| a.tok_s.total_cmp(&b.tok_s))
}

fn against(report: &Report, policy: &str, baseline: &str) -> Option<f64> {
    let found = report
        .ratios
        .iter()
        .find(|r| r.policy == policy && r.baseline == baseline)?;
    Some(found.total.of_medians)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::{report, sample};

    fn three(adaptive: f64, hash: &str) -> Report {
        let mut samples = Vec::new();
        for repeat in 1..=3 {
            let wobble = 1.0 + 0.01 * f64::from(repeat);
            let speeds = |a: f64, b: f64| [("prose", a * wobble), ("zh", b * wobble)];
            samples.push(sample("off", repeat, &speeds(16.0, 6.0), "x"));
            samples.push(sample("static", repeat, &speeds(35.0, 4.0), "x"));
            samples.push(sample(
                "adaptive",
                repeat,
                &speeds(adaptive, adaptive / 2.0),
                hash,
            ));
        }
        report(&["off", "static", "adaptive"], samples)
    }

    fn check(report: &Report, expect: &[&str], absent: &[&str]) {
        for part in expect {
            assert!(
                report.verdict.contains(part),
                "no `{part}` in: {}",
                report.verdict
            );
        }
        for part in absent {
            assert!(
                !report.verdict.contains(part),
                "`{part}` in: {}",
                report.verdict
            );
        }
    }

    #[test]
    fn a_win_is_told_with_its_ratio_and_where_static_lost() {
        let expect = [
            "`adaptive` was fastest at",
            "x `off`",
            "beat `off` in prose (2.19x) and lost to it in zh (0.67x)",
            "in zh, `adaptive` made 3.50x",
            "All 9 runs gave the same hash",
        ];
        let absent = ["did not win", "DIFFER", "overlap"];
        check(&three(28.0, "x"), &expect, &absent);
    }

    #[test]
    fn a_loss_is_told_as_one() {
        let expect = [
            "`off` was fastest",
            "`adaptive` did not win",
            "clearly behind in prose",
        ];
        check(&three(8.0, "x"), &expect, &[]);
    }

    #[test]
    fn different_output_is_loud() {
        check(
            &three(28.0, "y"),
            &["THE OUTPUTS DIFFER: 2 different hashes"],
            &["same hash"],
        );
    }

    #[test]
    fn a_win_within_the_spread_is_no_clear_win() {
        let samples = vec![
            sample("off", 1, &[("a", 10.0)], "x"),
            sample("off", 2, &[("a", 12.0)], "x"),
            sample("fetch", 1, &[("a", 11.0)], "x"),
            sample("fetch", 2, &[("a", 11.5)], "x"),
        ];
        check(&report(&["off", "fetch"], samples), &["no clear win"], &[]);
    }

    #[test]
    fn one_policy_is_no_contest() {
        let one = report(
            &["adaptive"],
            vec![sample("adaptive", 1, &[("a", 10.0)], "x")],
        );
        check(
            &one,
            &["Only `adaptive` ran", "nothing to compare"],
            &["did not win"],
        );
    }
}
