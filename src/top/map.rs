//! The heat map: a row a layer, a character an expert, around the chosen one.

use super::view::View;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::widgets::Widget;

/// Columns of a layer's number.
const LABEL: u16 = 4;
const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
/// Score, of 63, from which an expert counts as hot: a routing every tenth token.
const HOT: usize = 20;

/// The map of a view's experts.
pub(super) struct Map<'a>(pub(super) &'a View);

/// The first of `all` that is shown in `room` places around `chosen`.
fn first_shown(all: usize, room: usize, chosen: usize) -> usize {
    chosen
        .saturating_sub(room / 2)
        .min(all.saturating_sub(room))
}

impl Widget for Map<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let view = self.0;
        let room = (
            usize::from(area.height),
            usize::from(area.width.saturating_sub(LABEL)),
        );
        if room.0 == 0 || room.1 == 0 {
            return;
        }
        let top = first_shown(view.layers.len(), room.0, view.chosen.0);
        // Where each layer's experts begin in the texts.
        let mut start: usize = view.layers[..top].iter().map(|layer| layer.experts).sum();
        for (row, (number, layer)) in
            (area.y..area.bottom()).zip(view.layers.iter().enumerate().skip(top))
        {
            let label = format!("{number:>3} ");
            buffer.set_string(area.x, row, label, Style::new().fg(Color::DarkGray));
            let left = first_shown(layer.experts, room.1, view.chosen.1);
            for (column, expert) in (area.x + LABEL..area.right()).zip(left..layer.experts) {
                let (symbol, style) = cell(view, start + expert);
                let style = if view.chosen == (number, expert) {
                    style.add_modifier(Modifier::REVERSED)
                } else {
                    style
                };
                buffer[(column, row)].set_symbol(symbol).set_style(style);
            }
            start += layer.experts;
        }
    }
}

/// Symbol and colour of an expert: what is locked, what is in memory, and what is missing although it
/// is used.
fn cell(view: &View, index: usize) -> (&'static str, Style) {
    let place = view.experts.residence.as_bytes().get(index);
    let digit = view.experts.score.as_bytes().get(index);
    let score = digit
        .and_then(|digit| DIGITS.iter().position(|known| known == digit))
        .unwrap_or(0);
    let hot = score >= HOT;
    match place {
        Some(b'P') if hot => ("█", Style::new().fg(Color::Green)),
        Some(b'P') => (
            "▓",
            Style::new().fg(Color::Green).add_modifier(Modifier::DIM),
        ),
        Some(b't') if hot => ("▒", Style::new().fg(Color::Yellow)),
        Some(b't') => (
            "░",
            Style::new().fg(Color::Yellow).add_modifier(Modifier::DIM),
        ),
        Some(_) if hot => ("!", Style::new().fg(Color::Red)),
        Some(_) => ("·", Style::new().fg(Color::DarkGray)),
        None => (" ", Style::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::first_shown;

    #[test]
    fn the_chosen_one_is_always_shown() {
        for (all, room) in [(10, 4), (4, 10), (1, 1), (0, 3), (64, 63)] {
            for chosen in 0..all {
                let first = first_shown(all, room, chosen);
                assert!(
                    (first..first + room).contains(&chosen),
                    "{chosen} of {all} in {room} from {first}"
                );
                assert!(first == 0 || first + room <= all, "no empty places");
            }
        }
    }
}
