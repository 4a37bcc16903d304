//! Tokens a second by domain and policy, as grouped bars in an SVG.

use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::report::{PolicyRun, Report};
use super::table::size;

const HEIGHT_PX: u32 = 460;
const MIN_WIDTH_PX: u32 = 640;
const MAX_WIDTH_PX: u32 = 4_000;
const BAR_PX: u32 = 34;
const FONT: &str = "sans-serif";
/// plotters takes a font's height, which it holds to be this multiple of the size SVG means.
const FONT_HEIGHT: f64 = 1.24;
/// Part of a group's width that its bars take.
const GROUP_FILL: f64 = 0.84;
/// One colour for each policy, told apart also by those who do not see red or green.
const COLOURS: [(&str, RGBColor); 5] = [
    ("off", RGBColor(0x8c, 0x92, 0x9d)),
    ("fetch", RGBColor(0x56, 0xb4, 0xe9)),
    ("static", RGBColor(0xe6, 0x9f, 0x00)),
    ("lru", RGBColor(0xcc, 0x79, 0xa7)),
    ("adaptive", RGBColor(0x00, 0x72, 0xb2)),
];
const INK: RGBColor = RGBColor(0x22, 0x26, 0x2e);
const FAINT: RGBColor = RGBColor(0xe3, 0xe6, 0xea);

/// Why there is no chart.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw the chart {}: {reason}", path.display())]
pub struct ChartError {
    path: PathBuf,
    reason: String,
}

/// Draws the report's speeds: one group of bars for each segment and one for the total, a bar for
/// each policy, whiskers from the slowest to the fastest repeat.
///
/// # Errors
/// [`ChartError`] when the file cannot be written.
pub fn draw(report: &Report, path: &Path) -> Result<(), ChartError> {
    let failed = |reason: String| ChartError {
        path: path.to_path_buf(),
        reason,
    };
    let mut svg = String::new();
    let groups = groups(report);
    let bars = u32::try_from(groups.len() * (report.runs.len() + 1)).unwrap_or(u32::MAX);
    let width_px = bars.saturating_mul(BAR_PX).saturating_add(110);
    let area_px = (width_px.clamp(MIN_WIDTH_PX, MAX_WIDTH_PX), HEIGHT_PX);
    {
        let area = SVGBackend::with_string(&mut svg, area_px).into_drawing_area();
        paint(report, &groups, &area).map_err(|error| failed(error.to_string()))?;
        area.present().map_err(|error| failed(error.to_string()))?;
    }
    crate::files::write_whole(path, &svg).map_err(|error| failed(error.to_string()))
}

/// One group of bars: a name, and for each run its median and extremes.
struct Group {
    name: String,
    bars: Vec<Bar>,
}

#[derive(Clone, Copy)]
struct Bar {
    middle: f64,
    low: f64,
    high: f64,
}

fn groups(report: &Report) -> Vec<Group> {
    let Some(first) = report.runs.first() else {
        return Vec::new();
    };
    let segment = |run: &PolicyRun, index: usize| {
        run.segments.get(index).map(|s| Bar {
            middle: s.tok_s,
            low: s.tok_s_min,
            high: s.tok_s_max,
        })
    };
    let mut groups: Vec<Group> = first
        .segments
        .iter()
        .enumerate()
        .map(|(index, s)| Group {
            name: s.name.clone(),
            bars: report
                .runs
                .iter()
                .filter_map(|run| segment(run, index))
                .collect(),
        })
        .collect();
    if groups.len() > 1 {
        let total = |run: &PolicyRun| Bar {
            middle: run.tok_s,
            low: run.tok_s_min,
            high: run.tok_s_max,
        };
        groups.push(Group {
            name: "total".into(),
            bars: report.runs.iter().map(total).collect(),
        });
    }
    groups
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

fn paint(report: &Report, groups: &[Group], area: &Area<'_>) -> Drawn {
    area.fill(&WHITE)?;
    let (title, subtitle) = titles(report);
    let text = |px: f64| (FONT, px * FONT_HEIGHT).into_font().color(&INK);
    area.draw(&Text::new(title, (24, 16), text(18.0)))?;
    area.draw(&Text::new(subtitle, (24, 42), text(12.0)))?;
    legend(report, area)?;
    let plot = area.margin(88, 12, 16, 20);
    let highest = groups
        .iter()
        .flat_map(|g| &g.bars)
        .map(|bar| bar.high)
        .fold(0.0, f64::max);
    let top = if highest > 0.0 { highest * 1.12 } else { 1.0 };
    let digits = if top < 6.0 { 1 } else { 0 };
    let end = groups.len() as f64;
    let mut chart = ChartBuilder::on(&plot)
        .set_label_area_size(LabelAreaPosition::Left, 58)
        .set_label_area_size(LabelAreaPosition::Bottom, 44)
        .build_cartesian_2d(0.0..end, 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(TRANSPARENT)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .y_labels(7)
        .y_desc("tokens a second")
        .y_label_formatter(&|value| format!("{value:.digits$}"))
        .label_style(text(12.0))
        .axis_desc_style(text(12.0))
        .draw()?;
    let wide = text(12.0).pos(Pos::new(HPos::Center, VPos::Top));
    let small = text(10.0).pos(Pos::new(HPos::Center, VPos::Bottom));
    for (index, group) in groups.iter().enumerate() {
        let left = index as f64 + (1.0 - GROUP_FILL) / 2.0;
        let width = GROUP_FILL / group.bars.len().max(1) as f64;
        for (place, (bar, run)) in group.bars.iter().zip(&report.runs).enumerate() {
            let x0 = left + width * place as f64 + width * 0.05;
            let x1 = x0 + width * 0.9;
            let fill = colour(&run.policy, place).filled();
            chart.draw_series([Rectangle::new([(x0, 0.0), (x1, bar.middle)], fill)])?;
            let middle = f64::midpoint(x0, x1);
            whisker(bar, middle, width, &mut |points| {
                chart.draw_series([PathElement::new(points, INK.stroke_width(1))])?;
                Ok(())
            })?;
            let value = format!("{:.1}", bar.middle);
            let at = (middle, bar.high + top * 0.008);
            chart.draw_series([Text::new(value, at, small.clone())])?;
        }
        let (x, y) = chart.backend_coord(&(index as f64 + 0.5, 0.0));
        area.draw(&Text::new(group.name.clone(), (x, y + 12), wide.clone()))?;
    }
    Ok(())
}

fn whisker(bar: &Bar, x: f64, width: f64, line: &mut dyn FnMut(Vec<(f64, f64)>) -> Drawn) -> Drawn {
    if bar.low == bar.high {
        return Ok(());
    }
    let cap = width * 0.14;
    line(vec![(x, bar.low), (x, bar.high)])?;
    line(vec![(x - cap, bar.low), (x + cap, bar.low)])?;
    line(vec![(x - cap, bar.high), (x + cap, bar.high)])
}

fn legend(report: &Report, area: &Area<'_>) -> Drawn {
    let style = (FONT, 12.0 * FONT_HEIGHT).into_font().color(&INK);
    let mut x = 24;
    for (place, run) in report.runs.iter().enumerate() {
        let fill = colour(&run.policy, place).filled();
        area.draw(&Rectangle::new([(x, 66), (x + 12, 78)], fill))?;
        area.draw(&Text::new(run.policy.clone(), (x + 18, 66), style.clone()))?;
        x += 44 + 8 * i32::try_from(run.policy.chars().count()).unwrap_or(12);
    }
    Ok(())
}

fn titles(report: &Report) -> (String, String) {
    let name = Path::new(&report.model).file_name().map_or_else(
        || report.model.clone(),
        |name| name.to_string_lossy().into_owned(),
    );
    let limit = report.memory_bytes.map_or_else(
        || "no memory limit".to_owned(),
        |b| format!("{} of memory", size(b)),
    );
    let subtitle = format!(
        "{name}, {}, {limit}; {} tokens each; median of {}, whiskers min to max",
        size(report.model_bytes),
        report.tokens,
        if report.repeats == 1 {
            "1 run".into()
        } else {
            format!("{} runs", report.repeats)
        },
    );
    ("Decoding speed by policy".to_owned(), subtitle)
}

fn colour(policy: &str, place: usize) -> RGBColor {
    let known = COLOURS.iter().find(|(name, _)| *name == policy);
    known.map_or(COLOURS[place % COLOURS.len()].1, |(_, colour)| *colour)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::{report, sample};

    #[test]
    fn the_chart_names_every_policy_and_domain_and_escapes_text() {
        let mut samples = Vec::new();
        for repeat in 1..=3 {
            let wobble = 1.0 + 0.02 * f64::from(repeat);
            let four = |a: f64, b: f64, c: f64, d: f64| {
                [
                    ("prose", a * wobble),
                    ("a<b&c", b * wobble),
                    ("zh", c * wobble),
                    ("python", d * wobble),
                ]
            };
            samples.push(sample("off", repeat, &four(15.7, 7.9, 5.9, 6.6), "x"));
            samples.push(sample("fetch", repeat, &four(26.1, 16.5, 13.2, 13.4), "x"));
            samples.push(sample("static", repeat, &four(35.2, 14.2, 4.0, 8.7), "x"));
            samples.push(sample(
                "adaptive",
                repeat,
                &four(30.3, 22.2, 17.4, 19.3),
                "x",
            ));
        }
        let report = report(&["off", "fetch", "static", "adaptive"], samples);
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("sub/chart.svg");
        draw(&report, &path).expect("drawn");
        let svg = std::fs::read_to_string(&path).expect("svg");
        for part in [
            "adaptive",
            "static",
            "a&lt;b&amp;c",
            "total",
            "tokens a second",
            "2500 MB",
        ] {
            assert!(svg.contains(part), "no `{part}`");
        }
        if let Some(keep) = std::env::var_os("HOTPIN_KEEP_CHART") {
            std::fs::write(keep, svg).expect("kept");
        }
    }

    #[test]
    fn one_run_of_one_domain_draws_too() {
        let report = report(&["off"], vec![sample("off", 1, &[("a", 10.0)], "x")]);
        let dir = tempfile::tempdir().expect("dir");
        draw(&report, &dir.path().join("c.svg")).expect("drawn");
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let report = report(&["off"], vec![sample("off", 1, &[("a", 10.0)], "x")]);
        let error = draw(&report, Path::new("/proc/x/c.svg")).expect_err("no such place");
        assert!(error.to_string().contains("/proc/x/c.svg"), "{error}");
    }
}
