//! The picture of a view. What does not fit is left out, the least important first.

use super::map::Map;
use super::view::{Link, View};
use crate::size::format_bytes;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph, Sparkline, Wrap};

/// Below this the screen holds a line of figures only.
const SMALL: (u16, u16) = (40, 8);
/// From this height on there are charts and a journal.
const TALL: u16 = 20;
/// Lines of the journal.
const JOURNAL: u16 = 6;
/// Columns of the bar of capacity.
const BAR: usize = 30;

const HELP: &str = "\
arrows, PgUp, PgDn, Home, End   choose an expert
Enter                           why is it where it is?
p                               freeze the pinned set, or go on (needs the API key)
?                               this help
q, Esc, Ctrl-C                  end

The map has a row a MoE layer and a character an expert:
█ ▓  locked in memory    ▒ ░  in memory, not locked    ·  on disk
!    on disk although it is used every tenth token or more
The darker character of each pair marks those that are used as often.";

/// Draws everything.
pub(super) fn draw(frame: &mut Frame<'_>, view: &View) {
    let area = frame.area();
    if area.width < SMALL.0 || area.height < SMALL.1 {
        small(frame, view, area);
    } else {
        full(frame, view, area);
    }
    if view.help {
        cover(frame, "Help", HELP);
    } else if let Some(text) = &view.told {
        cover(frame, "Any key goes back", text);
    }
}

/// The figures that matter most, in what room there is.
fn small(frame: &mut Frame<'_>, view: &View, area: Rect) {
    let mut lines = vec![Line::from(rates(view))];
    lines.extend(trouble(view).map(|(text, style)| Line::styled(text, style)));
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: true }), area);
}

fn full(frame: &mut Frame<'_>, view: &View, area: Rect) {
    let tall = area.height >= TALL;
    let [
        title,
        state,
        memory,
        ceilings,
        figures,
        requests,
        charts,
        map,
        journal,
        keys,
    ] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(u16::from(trouble(view).is_some())),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(if tall { 4 } else { 0 }),
        Constraint::Min(1),
        Constraint::Length(if tall { JOURNAL } else { 0 }),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(title_line(view), title);
    if let Some((text, style)) = trouble(view) {
        frame.render_widget(Line::styled(text, style), state);
    }
    frame.render_widget(memory_line(view), memory);
    frame.render_widget(ceilings_line(view), ceilings);
    frame.render_widget(Line::from(rates(view)), figures);
    frame.render_widget(Line::from(requests_text(view)), requests);
    draw_charts(frame, view, charts);
    let heading = match view.layers.get(view.chosen.0) {
        Some(layer) => format!(
            "Experts, layer {} (block {}), expert {} chosen",
            view.chosen.0,
            layer
                .block
                .map_or_else(|| "?".into(), |block| block.to_string()),
            view.chosen.1
        ),
        None => "Experts".to_owned(),
    };
    let block = Block::bordered().title(heading);
    let inner = block.inner(map);
    frame.render_widget(block, map);
    frame.render_widget(Map(view), inner);
    draw_journal(frame, view, journal);
    let text = "arrows choose   Enter explains   p pauses   ? help   q ends";
    frame.render_widget(Line::styled(text, Style::new().fg(Color::DarkGray)), keys);
}

/// What is not as it should be, or not yet.
fn trouble(view: &View) -> Option<(String, Style)> {
    let bad = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
    let odd = Style::new().fg(Color::Yellow);
    if let Link::Lost(why) = &view.link {
        return Some((format!("{why}. Trying again."), bad));
    }
    let now = view.now.as_ref();
    if let Some(why) = now.and_then(|now| now.failed.as_ref()) {
        return Some((why.clone(), bad));
    }
    if view.phase != "ready" {
        return Some((format!("The server is {}.", view.phase), odd));
    }
    if now.is_some_and(|now| now.paused) {
        return Some(("Paused: the pinned set is frozen.".into(), odd));
    }
    None
}

fn title_line(view: &View) -> Line<'_> {
    let mut spans = vec![Span::styled(
        "hotpin ",
        Style::new().add_modifier(Modifier::BOLD),
    )];
    if let Some(model) = &view.model {
        let store = model
            .store
            .as_ref()
            .map_or_else(String::new, |store| format!(", store {store}"));
        spans.push(Span::raw(format!(
            "{}  policy {}{store}  ",
            model.id, model.policy
        )));
    }
    if let Some(now) = &view.now {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an uptime is positive, and a cast saturates"
        )]
        let s = now.uptime_s as u64;
        let (hours, minutes, seconds) = (s / 3600, s / 60 % 60, s % 60);
        spans.push(Span::raw(format!("up {hours}:{minutes:02}:{seconds:02}  ")));
    }
    spans.push(Span::styled(
        view.url.as_str(),
        Style::new().fg(Color::DarkGray),
    ));
    Line::from(spans)
}

fn memory_line(view: &View) -> Line<'static> {
    let (Some(entry), Some(model)) = (&view.entry, &view.model) else {
        return Line::from("Nothing is regulated here.");
    };
    let total = model.expert_bytes.max(1);
    let part = |bytes: u64| (u128::from(bytes) * BAR as u128 / u128::from(total)) as usize;
    let pinned = part(entry.pinned_bytes).min(BAR);
    let transit = part(entry.transit_bytes).min(BAR - pinned);
    let rest = BAR - pinned - transit;
    Line::from(vec![
        Span::raw("Memory   ["),
        Span::styled("█".repeat(pinned), Style::new().fg(Color::Green)),
        Span::styled("▒".repeat(transit), Style::new().fg(Color::Yellow)),
        Span::raw("·".repeat(rest)),
        Span::raw(format!(
            "] {} locked, {} in transit, of {}",
            format_bytes(entry.pinned_bytes),
            format_bytes(entry.transit_bytes),
            format_bytes(model.expert_bytes)
        )),
    ])
}

fn ceilings_line(view: &View) -> Line<'static> {
    let Some(entry) = &view.entry else {
        return Line::default();
    };
    let mut spans = vec![Span::styled(
        format!(
            "Capacity {} set by {}",
            format_bytes(entry.capacity_bytes),
            entry.binding.label()
        ),
        Style::new().add_modifier(Modifier::BOLD),
    )];
    for (name, bytes) in &entry.ceilings {
        spans.push(Span::raw(format!("  {name} {}", format_bytes(*bytes))));
    }
    Line::from(spans)
}

fn rates(view: &View) -> String {
    let rates = view.rates;
    let hits = rates
        .hit_ratio
        .map_or_else(|| "-".into(), |ratio| format!("{:.1}%", ratio * 100.0));
    let totals = view.now.as_ref().map(|now| now.totals).unwrap_or_default();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate is positive, and a cast saturates"
    )]
    let read = format_bytes(rates.read_bytes as u64);
    let faults = totals
        .major_faults
        .map_or_else(|| "-".into(), |faults| faults.to_string());
    let tier = view.entry.as_ref().and_then(|entry| entry.vram.as_ref());
    let vram = tier.map_or_else(String::new, |vram| {
        let hits = vram
            .hit_ratio()
            .map_or_else(|| "-".into(), |ratio| format!("{:.1}%", ratio * 100.0));
        let bytes = format_bytes(vram.pool_bytes + vram.static_bytes);
        format!("  vram {} {bytes} hits {hits}", vram.arrangement)
    });
    format!(
        "{:.1} tok/s  hits {hits}  stall {:.0}%  reads {read}/s  faults {faults}  drift {}{vram}",
        rates.tokens,
        rates.stall * 100.0,
        totals.drift_events
    )
}

fn requests_text(view: &View) -> String {
    let Some(now) = &view.now else {
        return String::new();
    };
    let requests = now.requests;
    format!(
        "Requests {} running, {} waiting; {} finished, {} cancelled, {} failed, {} refused",
        requests.running,
        requests.queued,
        requests.finished,
        requests.cancelled,
        requests.failed,
        requests.refused
    )
}

fn draw_charts(frame: &mut Frame<'_>, view: &View, area: Rect) {
    if area.height == 0 {
        return;
    }
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(area);
    let shown = usize::from(left.width.saturating_sub(2));
    let from = view.history.len().saturating_sub(shown);
    let tokens: Vec<u64> = view
        .history
        .iter()
        .skip(from)
        .map(|point| point.0)
        .collect();
    let hits: Vec<u64> = view
        .history
        .iter()
        .skip(from)
        .map(|point| point.1)
        .collect();
    let chart = |title: &'static str, data: Vec<u64>, most: Option<u64>, colour| {
        let line = Sparkline::default()
            .block(Block::bordered().title(title))
            .data(data)
            .style(Style::new().fg(colour));
        match most {
            Some(most) => line.max(most),
            None => line,
        }
    };
    let tokens = chart("Tokens a second", tokens, None, Color::Cyan);
    frame.render_widget(tokens, left);
    frame.render_widget(
        chart("Hits, 0 to 100%", hits, Some(100), Color::Green),
        right,
    );
}

fn draw_journal(frame: &mut Frame<'_>, view: &View, area: Rect) {
    if area.height == 0 {
        return;
    }
    let room = usize::from(area.height.saturating_sub(2));
    let from = view.lines.len().saturating_sub(room);
    let lines: Vec<Line<'_>> = view
        .lines
        .iter()
        .skip(from)
        .map(|line| Line::from(line.as_str()))
        .collect();
    let block = Block::bordered().title("Journal");
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// A text above all else.
fn cover(frame: &mut Frame<'_>, title: &str, text: &str) {
    let area = frame.area();
    let width = area.width.saturating_sub(4).clamp(1, 84).min(area.width);
    let inside = usize::from(width.saturating_sub(2)).max(1);
    let rows: usize = text
        .lines()
        .map(|line| line.chars().count().div_ceil(inside).max(1))
        .sum();
    let height = u16::try_from(rows + 3).unwrap_or(u16::MAX).min(area.height);
    let place = Rect {
        x: area.x + (area.width - width) / 2,
        y: area.y + (area.height - height) / 2,
        width,
        height,
    };
    frame.render_widget(Clear, place);
    let block = Block::bordered()
        .title(title)
        .title_alignment(Alignment::Center);
    let text = Paragraph::new(text).wrap(Wrap { trim: false }).block(block);
    frame.render_widget(text, place);
}

#[cfg(test)]
#[path = "draw_tests.rs"]
mod tests;
