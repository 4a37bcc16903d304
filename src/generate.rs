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
    let mut watch = StopWatch::new(stops);
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
struct StopWatch<'a> {
    stops: Vec<&'a [u8]>,
    held: Vec<u8>,
}

impl<'a> StopWatch<'a> {
    fn new(stops: &'a [String]) -> Self {
        Self {
            stops: stops.iter().map(String::as_bytes).collect(),
            held: Vec::new(),
        }
    }

    /// Adds text; returns what is certain and whether a stop text was found (what follows it, and it,
    /// is dropped).
    fn push(&mut self, text: &[u8]) -> (Vec<u8>, bool) {
        self.held.extend_from_slice(text);
        let first = self
            .stops
            .iter()
            .filter_map(|stop| find(&self.held, stop))
            .min();
        if let Some(at) = first {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self
            .stops
            .iter()
            .map(|stop| overlap(&self.held, stop))
            .max()
            .unwrap_or(0);
        let certain = self.held.drain(..self.held.len() - keep).collect();
        (certain, false)
    }

    fn rest(self) -> Vec<u8> {
        self.held
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
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut watch = StopWatch::new(&stops);
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
}
