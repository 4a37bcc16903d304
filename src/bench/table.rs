//! The reports as tables for a terminal.

use comfy_table::{
    Attribute, Cell, CellAlignment, ContentArrangement, Table, TableComponent, presets,
};

use super::report::{PolicyRun, Report, SegmentRun};
use super::target::{Search, TargetReport};

const UNKNOWN: &str = "-";

/// A comparison: speeds, costs, ratios, hashes, notes and the verdict.
#[must_use]
pub fn report_text(report: &Report) -> String {
    let mut text = headline(report);
    text.push_str(&format!(
        "\nTokens a second, median (min to max)\n{}\n",
        speeds(report)
    ));
    text.push_str(&format!(
        "\nCosts, medians; per token over all segments\n{}\n",
        costs(report)
    ));
    if report.runs.iter().any(|run| run.vram.is_some()) {
        text.push_str(&format!(
            "\nExperts in the device's memory, of the repeat of median speed; MB a token\n{}\n",
            tiers(report)
        ));
    }
    text.push_str(&perplexities(report));
    for run in &report.runs {
        if let Some(roofline) = &run.roofline {
            text.push_str(&format!("\nRoofline of `{}`: {roofline}\n", run.policy));
        }
    }
    if report.repeats > 1 && !report.ratios.is_empty() {
        let baseline = &report.ratios[0].baseline;
        text.push_str(&format!("\nSpeed over `{baseline}`, within each repeat\n"));
        text.push_str(&format!("{}\n", paired(report)));
    }
    if report.hashes_equal == Some(false) {
        text.push_str("\nERROR: THE OUTPUTS DIFFER. Hashes over the logits:\n");
        for (hash, runs) in &report.hashes {
            text.push_str(&format!("  {hash}  {}\n", runs.join(", ")));
        }
    }
    for failure in &report.failures {
        text.push_str(&format!("\nFAILED {failure}\n"));
    }
    for note in &report.notes {
        text.push_str(&format!("\nNote: {note}\n"));
    }
    text.push_str(&format!("\n{}\n", report.verdict));
    text
}

/// A search for the least memory: its probes and the verdict.
#[must_use]
pub fn target_text(report: &TargetReport) -> String {
    let mut text = format!(
        "{}: least memory for {} tok/s\n",
        report.model, report.target_tok_s
    );
    for search in &report.searches {
        text.push_str(&format!("\n`{}`\n{}\n", search.policy, probes(search)));
    }
    for note in &report.notes {
        text.push_str(&format!("\nNote: {note}\n"));
    }
    text.push_str(&format!("\n{}\n", report.verdict));
    text
}

fn headline(report: &Report) -> String {
    let limit = report.memory_bytes.map_or_else(
        || "no memory limit".to_owned(),
        |bytes| {
            let percent = bytes as f64 * 100.0 / report.model_bytes.max(1) as f64;
            format!(
                "{} of memory each ({percent:.0}% of the model)",
                size(bytes)
            )
        },
    );
    let readahead = report
        .read_ahead_kb
        .map_or_else(|| "unknown".to_owned(), |kib| format!("{kib} KiB"));
    format!(
        "{}: {}, {limit}, {} threads, {} repeats of {} tokens a segment, readahead {readahead}\n",
        report.model,
        size(report.model_bytes),
        report.threads,
        report.repeats,
        report.tokens,
    )
}

/// A line for each text whose perplexity was computed.
fn perplexities(report: &Report) -> String {
    let mut text = String::new();
    for run in &report.runs {
        for segment in &run.segments {
            let Some(found) = segment.perplexity else {
                continue;
            };
            let error = found
                .error
                .map_or_else(String::new, |error| format!(" +/- {error:.5}"));
            text.push_str(&format!(
                "\nPerplexity of `{}` under `{}`: {:.4}{error} over {} tokens\n",
                segment.name, run.policy, found.value, found.scored
            ));
        }
    }
    text
}

fn speeds(report: &Report) -> Table {
    let names: Vec<&str> = report
        .runs
        .first()
        .map(|run| run.segments.iter().map(|s| s.name.as_str()).collect())
        .unwrap_or_default();
    let mut header = vec!["policy"];
    header.extend(&names);
    header.push("total");
    let over = report.ratios.first().map(|r| format!("x {}", r.baseline));
    header.extend(over.as_deref());
    let mut table = new_table(&header);
    for run in &report.runs {
        let mut row = vec![run.policy.clone()];
        row.extend(
            run.segments
                .iter()
                .map(|s| spread(s.tok_s, s.tok_s_min, s.tok_s_max)),
        );
        row.push(spread(run.tok_s, run.tok_s_min, run.tok_s_max));
        if over.is_some() {
            let ratio = report.ratios.iter().find(|r| r.policy == run.policy);
            row.push(ratio.map_or("1.00".into(), |r| format!("{:.2}", r.total.of_medians)));
        }
        table.add_row(row);
    }
    table
}

fn costs(report: &Report) -> Table {
    let header = [
        "policy",
        "load s",
        "ttft ms",
        "hit",
        "pinned hit",
        "read MB",
        "stall ms",
        "major faults",
        "peak MB",
        "pinned MB",
    ];
    let mut table = new_table(&header);
    for run in &report.runs {
        let megabytes = |bytes: Option<u64>| real(bytes.map(|b| b as f64 / 1e6), 0);
        let read = per_token(run, |s| s.read_bytes_per_token);
        let row = vec![
            run.policy.clone(),
            real(run.load_s, 1),
            real(run.ttft_ms, 0),
            real(per_token(run, |s| s.hit_ratio), 3),
            real(per_token(run, |s| s.pinned_hit_ratio), 3),
            real(read.map(|bytes| bytes / 1e6), 1),
            real(per_token(run, |s| s.stall_ms_per_token), 1),
            real(per_token(run, |s| s.major_faults_per_token), 1),
            megabytes(run.peak_memory_bytes),
            megabytes(run.pinned_bytes),
        ];
        table.add_row(row);
    }
    table
}

fn tiers(report: &Report) -> Table {
    let header = [
        "policy",
        "arrangement",
        "MB",
        "slots",
        "hit",
        "uploaded MB",
        "changes",
    ];
    let mut table = new_table(&header);
    for (run, tier) in report
        .runs
        .iter()
        .filter_map(|run| Some((run, run.vram.as_ref()?)))
    {
        let uploaded = tier.uploaded_bytes_per_token.map(|bytes| bytes / 1e6);
        table.add_row(vec![
            run.policy.clone(),
            tier.arrangement.clone(),
            real(Some(tier.bytes as f64 / 1e6), 0),
            tier.slots.to_string(),
            real(tier.hit_ratio, 3),
            real(uploaded, 1),
            tier.changes.to_string(),
        ]);
    }
    table
}

fn paired(report: &Report) -> Table {
    let mut table = new_table(&["policy", "segment", "median", "95% interval", "repeats"]);
    for ratios in &report.ratios {
        let total = std::iter::once(("total", &ratios.total));
        for (name, ratio) in ratios
            .segments
            .iter()
            .map(|s| (s.name.as_str(), &s.ratio))
            .chain(total)
        {
            let interval = ratio.interval_95.map_or_else(
                || "needs 6 repeats".to_owned(),
                |(low, high)| format!("{low:.2} to {high:.2}"),
            );
            let row = vec![
                ratios.policy.clone(),
                name.to_owned(),
                real(ratio.paired_median, 2),
                interval,
                ratio.pairs.to_string(),
            ];
            table.add_row(row);
        }
    }
    table
}

fn probes(search: &Search) -> Table {
    let mut table = new_table(&["memory MB", "tok/s, median (min to max)", "outcome"]);
    for probe in &search.probes {
        let speed = match (probe.tok_s, probe.tok_s_min, probe.tok_s_max) {
            (Some(middle), Some(low), Some(high)) => spread(middle, low, high),
            _ => UNKNOWN.to_owned(),
        };
        let megabytes = format!("{:.0}", probe.memory_bytes as f64 / 1e6);
        table.add_row(vec![megabytes, speed, probe.outcome.clone()]);
    }
    table
}

/// Mean over segments weighted by tokens; unknown as soon as one is.
fn per_token(run: &PolicyRun, of: impl Fn(&SegmentRun) -> Option<f64>) -> Option<f64> {
    let mut sum = 0.0;
    let mut tokens = 0.0;
    for segment in &run.segments {
        sum += of(segment)? * f64::from(segment.tokens);
        tokens += f64::from(segment.tokens);
    }
    (tokens > 0.0).then_some(sum / tokens)
}

fn spread(middle: f64, low: f64, high: f64) -> String {
    // One repeat has no spread to show.
    if low == high {
        format!("{middle:.2}")
    } else {
        format!("{middle:.2} ({low:.2} to {high:.2})")
    }
}

fn real(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), |value| format!("{value:.digits$}"))
}

/// Bytes for people, in the decimal units that `--memory 2500MB` uses.
#[must_use]
pub fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{bytes} B"),
        1_000_000..10_000_000_000 => format!("{:.0} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

fn new_table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_style(TableComponent::HeaderLines, '─');
    table.set_style(TableComponent::MiddleHeaderIntersections, '─');
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(
        header
            .iter()
            .map(|name| Cell::new(name).add_attribute(Attribute::Bold)),
    );
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::{report, sample};
    use crate::bench::tier::Tier;

    #[test]
    fn a_report_reads_well_and_unknown_is_not_zero() {
        let mut samples = Vec::new();
        for repeat in 1..=2 {
            let wobble = f64::from(repeat) * 0.1;
            samples.push(sample(
                "off",
                repeat,
                &[("prose", 16.0 + wobble), ("zh", 6.0)],
                "x",
            ));
            samples.push(sample(
                "static",
                repeat,
                &[("prose", 35.0), ("zh", 4.0)],
                "y",
            ));
        }
        let text = report_text(&report(&["off", "static"], samples));
        for part in [
            "2500 MB of memory each (46% of the model)",
            "16.15 (16.10 to 16.20)",
            "x off",
            "needs 6 repeats",
            "ERROR: THE OUTPUTS DIFFER",
            "off #1, off #2",
        ] {
            assert!(text.contains(part), "no `{part}` in:\n{text}");
        }
        assert!(!text.contains("NaN"));
    }

    #[test]
    fn a_pool_has_a_table_of_its_own() {
        let mut one = sample("adaptive", 1, &[("a", 10.0)], "x");
        let other = sample("fetch", 1, &[("a", 9.0)], "x");
        let text = |samples| report_text(&report(&["adaptive", "fetch"], samples));
        assert!(!text(vec![one.clone(), other.clone()]).contains("slots"));
        one.result.vram = Some(Tier {
            arrangement: "reload".into(),
            bytes: 350_000_000,
            slots: 417,
            hit_ratio: Some(0.8125),
            uploaded_bytes_per_token: None,
            changes: 3,
        });
        let text = text(vec![one, other]);
        let row = text
            .lines()
            .find(|line| line.contains("reload"))
            .expect("a row");
        let cells: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(
            cells,
            ["adaptive", "reload", "350", "417", "0.812", "-", "3"]
        );
    }

    #[test]
    fn sizes_are_decimal() {
        assert_eq!(size(2_500_000_000), "2500 MB");
        assert_eq!(size(10_900_000_000), "10.9 GB");
        assert_eq!(size(12), "12 B");
    }
}
