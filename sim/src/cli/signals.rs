//! Signals over time, panel below panel, as SVG.

use super::chart::save;
use anyhow::{Result, anyhow};
use plotters::prelude::*;
use std::path::Path;

const WIDTH_PX: u32 = 1000;
const PANEL_PX: u32 = 190;

/// Points that a line has at most: more cannot be told apart.
const MOST_POINTS: usize = 1000;

/// Lines that share an axis.
#[derive(Debug)]
pub struct Panel {
    /// What they show, with its unit.
    pub title: &'static str,
    /// The lines: a name, and values at the times of the chart.
    pub lines: Vec<(&'static str, Vec<f64>)>,
}

/// Draws panels over common times. What is not finite is left out.
pub fn write(path: &Path, at_s: &[f64], panels: &[Panel]) -> Result<()> {
    let mut svg = String::new();
    draw(&mut svg, at_s, panels).map_err(|error| anyhow!("chart: {error}"))?;
    save(path, &svg)
}

fn draw(
    svg: &mut String,
    at_s: &[f64],
    panels: &[Panel],
) -> Result<(), Box<dyn std::error::Error>> {
    let count = u32::try_from(panels.len())?;
    let root = SVGBackend::with_string(svg, (WIDTH_PX, PANEL_PX * count)).into_drawing_area();
    root.fill(&WHITE)?;
    let areas = root.split_evenly((panels.len(), 1));
    let from_s = at_s.first().copied().unwrap_or(0.0);
    let to_s = at_s.last().copied().unwrap_or(0.0).max(from_s + 1e-3);
    for (area, panel) in areas.iter().zip(panels) {
        let values = panel.lines.iter().flat_map(|(_, values)| values);
        let most = values
            .copied()
            .filter(|value| value.is_finite())
            .fold(f64::MIN_POSITIVE, f64::max);
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .caption(panel.title, ("sans-serif", 14))
            .x_label_area_size(22)
            .y_label_area_size(64)
            .build_cartesian_2d(from_s..to_s, 0.0..most * 1.05)?;
        chart
            .configure_mesh()
            .y_labels(5)
            .label_style(("sans-serif", 11))
            .light_line_style(WHITE)
            .draw()?;
        for (number, (name, values)) in panel.lines.iter().enumerate() {
            let color = Palette99::pick(number).to_rgba();
            let step = values.len().div_ceil(MOST_POINTS).max(1);
            let points = at_s
                .iter()
                .copied()
                .zip(values.iter().copied())
                .step_by(step)
                .filter(|(_, value)| value.is_finite());
            chart
                .draw_series(LineSeries::new(points, color.stroke_width(1)))?
                .label(*name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], color));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.7))
            .label_font(("sans-serif", 11))
            .draw()?;
    }
    root.present()?;
    Ok(())
}
