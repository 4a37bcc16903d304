//! Free-running generation: prompt in, bytes out, until something stops it.

use crate::engine::{EngineError, Sampler, Session, Token};
use std::time::Instant;

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The model ended its answer.
    End,
    /// A stop text appeared.
    Text,
    /// The token limit was reached.
    Length,
    /// The context is full.
    Context,
    /// Nobody reads any more.
    Reader,
}

/// What a generation did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Generation {
    /// Why it ended.
    pub stop: Stop,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Time to decode the prompt, seconds.
    pub prompt_s: f64,
    /// Tokens generated.
    pub tokens: u32,
    /// Time to generate them, seconds.
    pub decode_s: f64,
}

/// Decodes `prompt`, then generates up to `most` tokens. `emit` gets the text as it is certain not to
/// be part of a stop text, and returns false to stop.
///
/// # Errors
/// Whatever the engine reports; what was emitted until then stands.
pub fn generate(
    session: &mut Session<'_>,
    prompt: &[Token],
    most: u32,
    stops: &[String],
    sampler: &mut Sampler,
    emit: &mut dyn FnMut(&[u8]) -> bool,
) -> Result<Generation, EngineError> {
    let started = Instant::now();
    session.decode(prompt)?;
    let prompt_s = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let mut watch = StopWatch::new(stops, None);
    let mut tokens = 0;
    let stop = loop {
        if tokens == most {
            break Stop::Length;
        }
        let token = sampler.next(session)?;
        if session.model().is_end(token) {
            break Stop::End;
        }
        tokens += 1;
        let (certain, found) = watch.push(&session.model().token_bytes(token)?);
        if !certain.is_empty() && !emit(&certain) {
            break Stop::Reader;
        }
        if found {
            break Stop::Text;
        }
        if session.position() == session.n_ctx() {
            break Stop::Context;
        }
        if tokens < most {
            session.decode(&[token])?;
        }
    };
    if stop != Stop::Text {
        emit(&watch.rest());
    }
    Ok(Generation {
        stop,
        prompt_tokens: u32::try_from(prompt.len()).unwrap_or(u32::MAX),
        prompt_s,
        tokens,
        decode_s: started.elapsed().as_secs_f64(),
    })
}

/// Holds text back while it may be the beginning of a stop text.
#[derive(Debug)]
pub(crate) struct StopWatch {
    stops: Vec<Vec<u8>>,
    /// A text that may appear once; the second time it is a stop text.
    once: Option<Vec<u8>>,
    /// End of its first appearance in `held`, 0 when that has been let go.
    seen: Option<usize>,
    held: Vec<u8>,
}

impl StopWatch {
    pub(crate) fn new(stops: &[String], once: Option<&str>) -> Self {
        Self {
            stops: stops.iter().map(|stop| stop.as_bytes().to_vec()).collect(),
            once: once.map(|text| text.as_bytes().to_vec()),
            seen: None,
            held: Vec::new(),
        }
    }

    /// Adds text; returns what is certain and whether a stop text was found (what follows it, and it,
    /// is dropped).
    pub(crate) fn push(&mut self, text: &[u8]) -> (Vec<u8>, bool) {
        self.held.extend_from_slice(text);
        let second = self.second();
        let stopped = self.stops.iter().filter_map(|stop| find(&self.held, stop));
        let first = stopped.chain(second).min();
        if let Some(at) = first {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self
            .stops
            .iter()
            .chain(&self.once)
            .map(|stop| overlap(&self.held, stop))
            .max()
            .unwrap_or(0);
        let certain: Vec<u8> = self.held.drain(..self.held.len() - keep).collect();
        self.seen = self.seen.map(|end| end.saturating_sub(certain.len()));
        (certain, false)
    }

    /// Where the text that may appear once appears again.
    fn second(&mut self) -> Option<usize> {
        let once = self.once.as_ref()?;
        if self.seen.is_none() {
            self.seen = find(&self.held, once).map(|at| at + once.len());
        }
        let from = self.seen?;
        find(&self.held[from..], once).map(|at| from + at)
    }

    /// What is held back, once nothing more comes. Nothing after a stop text.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

/// Length of the longest end of `text` that begins `what`.
fn overlap(text: &[u8], what: &[u8]) -> usize {
    (1..what.len().min(text.len() + 1))
        .rev()
        .find(|&n| text.ends_with(&what[..n]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::StopWatch;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        run_once(stops, None, pieces)
    }

    fn run_once(stops: &[&str], once: Option<&str>, pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut watch = StopWatch::new(&stops, once);
        let mut out = Vec::new();
        for piece in pieces {
            let (certain, found) = watch.push(piece.as_bytes());
            out.extend(certain);
            if found {
                return (String::from_utf8(out).expect("utf-8"), true);
            }
        }
        out.extend(watch.rest());
        (String::from_utf8(out).expect("utf-8"), false)
    }

    #[test]
    fn stop_texts_are_found_across_pieces_and_never_shown() {
        assert_eq!(
            run(&["END"], &["one E", "N", "D two"]),
            ("one ".into(), true)
        );
        assert_eq!(
            run(&["END"], &["one E", "N", "d"]),
            ("one ENd".into(), false)
        );
        assert_eq!(run(&["END"], &["one EN"]), ("one EN".into(), false));
        assert_eq!(run(&["bc", "abcd"], &["ab", "cd"]), (String::new(), true));
        assert_eq!(run(&[], &["a", "b"]), ("ab".into(), false));
        assert_eq!(run(&["aab"], &["aa", "ab"]), ("a".into(), true));
    }

    #[test]
    fn a_text_that_may_appear_once_stops_at_its_second_appearance() {
        let cases: [(&[&str], &str, bool); 5] = [
            (&["<c>1", "<c>2"], "<c>1", true),
            (&["<", "c", ">1<", "c", ">2"], "<c>1", true),
            (&["<c><c>"], "<c>", true),
            (&["<c>1<", "d>"], "<c>1<d>", false),
            (&["12<c", ">3"], "12<c>3", false),
        ];
        for (pieces, text, found) in cases {
            assert_eq!(
                run_once(&[], Some("<c>"), pieces),
                (text.to_owned(), found),
                "{pieces:?}"
            );
        }
        assert_eq!(
            run_once(&["2"], Some("<c>"), &["<c>12", "<c>"]),
            ("<c>1".into(), true)
        );
    }
}
