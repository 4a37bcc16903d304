//! `hotpin journal`: a journal of decisions as a chart, or in words.

use super::common;
use crate::governor::Entry;
use anyhow::{Context, Result, ensure};
use clap::Args;
use hotpin_controllers::Ceiling;
use hotpin_controllers::vram::ChangeKind;
use plotters::prelude::*;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const SIZE_PX: (u32, u32) = (1100, 520);
const GIB: f64 = 1_073_741_824.0;

#[derive(Debug, Args)]
pub(super) struct JournalArgs {
    /// A file written by --journal
    file: PathBuf,
    /// Draw capacity, ceilings and what was held over time
    #[arg(long, value_name = "OUT.svg")]
    chart: Option<PathBuf>,
}

pub(super) fn execute(args: &JournalArgs) -> Result<ExitCode> {
    let entries = read(&args.file)?;
    ensure!(
        !entries.is_empty(),
        "{} has no entries",
        args.file.display()
    );
    common::say(&summary(&entries))?;
    if let Some(chart) = &args.chart {
        draw(&entries, chart).with_context(|| format!("chart {}", chart.display()))?;
        common::say(&format!("chart: {}", chart.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads the entries; a last line that a crash cut short is left out.
fn read(path: &Path) -> Result<Vec<Entry>> {
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    let lines: Vec<String> = BufReader::new(file)
        .lines()
        .collect::<Result<_, _>>()
        .with_context(|| path.display().to_string())?;
    let mut entries = Vec::with_capacity(lines.len());
    for (index, line) in lines.iter().enumerate() {
        match serde_json::from_str(line) {
            Ok(entry) => entries.push(entry),
            Err(_) if index + 1 == lines.len() => {}
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("{}, line {}", path.display(), index + 1));
            }
        }
    }
    Ok(entries)
}

/// What happened, in a few lines.
fn summary(entries: &[Entry]) -> String {
    let last = &entries[entries.len() - 1];
    let pinned: usize = entries.iter().map(|e| e.pinned.len()).sum();
    let unpinned: usize = entries.iter().map(|e| e.unpinned.len()).sum();
    let least = entries.iter().map(|e| e.capacity_bytes).min().unwrap_or(0);
    let most = entries.iter().map(|e| e.capacity_bytes).max().unwrap_or(0);
    let binds: Vec<String> = Ceiling::ALL
        .iter()
        .filter_map(|ceiling| {
            let ticks: u64 = entries
                .iter()
                .filter(|e| e.binding == *ceiling)
                .map(|e| 1 + u64::from(e.quiet_ticks))
                .sum();
            (ticks > 0).then(|| format!("{} on {ticks} ticks", ceiling.label()))
        })
        .collect();
    let tier = vram_summary(entries).map_or_else(String::new, |text| format!("\n{text}"));
    format!(
        "{:.1} s; capacity {} to {}, set by {}\n{pinned} pins, {unpinned} unpins, {} drift events, {} lock failures; at the end {} pinned, {} in transit{tier}",
        last.t_s,
        crate::size::format_bytes(least),
        crate::size::format_bytes(most),
        binds.join(", "),
        entries.iter().filter(|e| e.drift).count(),
        entries.iter().filter(|e| e.lock_error.is_some()).count(),
        crate::size::format_bytes(last.pinned_bytes),
        crate::size::format_bytes(last.transit_bytes),
    )
}

/// The tier in a device's memory, where there was one.
fn vram_summary(entries: &[Entry]) -> Option<String> {
    let last = entries.iter().rev().find_map(|e| e.vram.as_ref())?;
    let changes = || {
        entries
            .iter()
            .filter_map(|e| e.vram.as_ref())
            .flat_map(|v| &v.changes)
    };
    let refused = changes().filter(|change| change.refused.is_some()).count();
    let loads = changes().filter(|change| change.kind == Some(ChangeKind::Reload));
    Some(format!(
        "vram: {} changes, for {} of which the model was loaded anew ({refused} refused); at the end {}",
        changes().count(),
        loads.count(),
        last.words(),
    ))
}

/// One line of the chart: label, colour, and its value at an entry.
type Line = (&'static str, RGBColor, fn(&Entry) -> Option<u64>);

const LINES: [Line; 4] = [
    ("capacity", RGBColor(0x00, 0x72, 0xb2), |e| {
        Some(e.capacity_bytes)
    }),
    ("pinned", RGBColor(0x00, 0x9e, 0x73), |e| {
        Some(e.pinned_bytes)
    }),
    ("pinned + transit", RGBColor(0xe6, 0x9f, 0x00), |e| {
        Some(e.pinned_bytes + e.transit_bytes)
    }),
    ("available", RGBColor(0x8c, 0x92, 0x9d), |e| {
        match (e.available_bytes, e.cgroup_available_bytes) {
            (Some(host), Some(cgroup)) => Some(host.min(cgroup)),
            (host, cgroup) => host.or(cgroup),
        }
    }),
];

fn draw(entries: &[Entry], path: &Path) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    let gib = |bytes: u64| bytes as f64 / GIB;
    let end_s = entries[entries.len() - 1].t_s.max(1.0);
    let values = entries
        .iter()
        .flat_map(|e| LINES.iter().filter_map(move |line| line.2(e)));
    let top = gib(values.max().unwrap_or(1)) * 1.05;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE_PX).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption("Memory under control", ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..end_s, 0.0..top)?;
        chart
            .configure_mesh()
            .x_desc("seconds")
            .y_desc("GiB")
            .light_line_style(WHITE)
            .draw()?;
        for (label, colour, value) in LINES {
            let points = entries.iter().filter_map(|e| Some((e.t_s, gib(value(e)?))));
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
                .label(label)
                .legend(move |(x, y)| {
                    PathElement::new(vec![(x, y), (x + 18, y)], colour.stroke_width(2))
                });
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(RGBColor(0xe3, 0xe6, 0xea))
            .draw()?;
        area.present()?;
    }
    crate::files::write_whole(path, &svg)?;
    Ok(())
}
