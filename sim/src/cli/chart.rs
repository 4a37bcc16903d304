//! Hit ratio against capacity, as SVG.

use anyhow::{Result, anyhow};
use hotpin_sim::replay::{ReplayPolicy, ReplayResult};
use plotters::prelude::*;
use std::fs;
use std::path::Path;

/// Writes a file beside the target first, so that one of that name is always whole.
pub fn save(path: &Path, text: &str) -> Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    fs::write(&partial, text)?;
    fs::rename(&partial, path)?;
    Ok(())
}

/// Draws what policies made of a trace.
pub fn write(
    path: &Path,
    results: &[ReplayResult],
    policies: &[ReplayPolicy],
    experts: usize,
) -> Result<()> {
    let mut svg = String::new();
    draw(&mut svg, results, policies, experts).map_err(|error| anyhow!("chart: {error}"))?;
    save(path, &svg)
}

fn draw(
    svg: &mut String,
    results: &[ReplayResult],
    policies: &[ReplayPolicy],
    experts: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(svg, (860, 520)).into_drawing_area();
    root.fill(&WHITE)?;
    let percent = |result: &ReplayResult| result.capacity_experts as f64 * 100.0 / experts as f64;
    let most = results.iter().map(percent).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..most * 1.02, 0.0..1.0)?;
    chart
        .configure_mesh()
        .x_desc("experts cached, percent")
        .y_desc("hit ratio")
        .label_style(("sans-serif", 13))
        .draw()?;
    for (number, &policy) in policies.iter().enumerate() {
        let mut points: Vec<_> = results
            .iter()
            .filter(|result| result.policy == policy)
            .map(|result| (percent(result), result.hit_ratio))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let color = Palette99::pick(number).to_rgba();
        let width = if policy == ReplayPolicy::Adaptive {
            3
        } else {
            1
        };
        chart
            .draw_series(points.iter().map(|&at| Circle::new(at, 3, color.filled())))?
            .label(policy.label())
            .legend(move |(x, y)| Circle::new((x + 8, y), 4, color.filled()));
        chart.draw_series(LineSeries::new(points, color.stroke_width(width)))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 13))
        .draw()?;
    root.present()?;
    Ok(())
}
