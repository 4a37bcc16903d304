//! The last lines of a child's stderr, kept for error messages.

use std::collections::VecDeque;

/// Lines kept.
const MAX_LINES: usize = 20;
/// Bytes of a line that are kept; the rest of a longer one is dropped.
const MAX_LINE_BYTES: usize = 4096;

/// Splits a byte stream into lines and keeps the last ones, in bounded memory.
#[derive(Debug, Default)]
pub struct Tail {
    lines: VecDeque<String>,
    partial: Vec<u8>,
}

impl Tail {
    /// Takes the next bytes and gives every line that they complete to `on_line`.
    pub fn push(&mut self, bytes: &[u8], on_line: &mut dyn FnMut(&str)) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (text, ends) = match piece.split_last() {
                Some((b'\n', text)) => (text, true),
                _ => (piece, false),
            };
            let room = MAX_LINE_BYTES.saturating_sub(self.partial.len());
            self.partial
                .extend_from_slice(&text[..text.len().min(room)]);
            if ends {
                self.end_line(on_line);
            }
        }
    }

    /// The stream is over: a last line without an end counts too.
    pub fn finish(&mut self, on_line: &mut dyn FnMut(&str)) {
        if !self.partial.is_empty() {
            self.end_line(on_line);
        }
    }

    /// The kept lines, oldest first.
    #[must_use]
    pub fn text(&self) -> String {
        self.lines
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join("\n")
    }

    fn end_line(&mut self, on_line: &mut dyn FnMut(&str)) {
        let line = String::from_utf8_lossy(&self.partial).trim_end().to_owned();
        self.partial.clear();
        on_line(&line);
        if self.lines.len() == MAX_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_may_come_in_pieces_and_end_late() {
        let mut tail = Tail::default();
        let mut seen = Vec::new();
        let mut on_line = |line: &str| seen.push(line.to_owned());
        tail.push(b"on", &mut on_line);
        tail.push(b"e\r\ntwo\nth", &mut on_line);
        tail.push(b"ree", &mut on_line);
        tail.finish(&mut on_line);
        assert_eq!(seen, ["one", "two", "three"]);
        assert_eq!(tail.text(), "one\ntwo\nthree");
    }

    #[test]
    fn memory_is_bounded() {
        let mut tail = Tail::default();
        for _ in 0..100 {
            tail.push(&[b'x'; 1 << 16], &mut |_| {});
            tail.push(b"\n", &mut |_| {});
        }
        assert_eq!(tail.lines.len(), MAX_LINES);
        assert!(tail.lines.iter().all(|line| line.len() == MAX_LINE_BYTES));
    }
}
