//! One sequence of the context: what is in it, and the job that uses it.

use super::job::{Done, Event, Failure, Finish, Job, Piece, Timings, TokenReport, Usage};
use crate::engine::{EngineError, Model, Sampler, Session, Token, likelihoods};
use crate::generate::StopWatch;
use std::time::Instant;

/// A sequence. Its tokens stay in the context after a job, for the next one that begins alike.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) sequence: u32,
    /// What the context holds of this sequence.
    pub(super) tokens: Vec<Token>,
    /// Turn in which it was last used.
    pub(super) used: u64,
    pub(super) active: Option<Active>,
}

/// A job at work.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) job: Job,
    sampler: Sampler,
    watch: StopWatch,
    /// Bytes of a character that is not complete yet.
    partial: Vec<u8>,
    /// Reports of tokens whose text is not certain yet.
    reports: Vec<TokenReport>,
    /// The token that was chosen and is not decoded yet; `None` while the prompt is decoded.
    pub(super) next: Option<Token>,
    cached: usize,
    generated: u32,
    began: Instant,
    prompt_done: Option<Instant>,
}

/// What became of a chosen token.
pub(super) enum Step {
    /// The generation goes on.
    Goes,
    /// It has ended.
    Ended(Finish),
}

impl Slot {
    pub(super) fn new(sequence: u32) -> Self {
        Self {
            sequence,
            tokens: Vec::new(),
            used: 0,
            active: None,
        }
    }

    /// Tokens at the start of `prompt` that are in the context.
    pub(super) fn shared(&self, prompt: &[Token]) -> usize {
        self.tokens
            .iter()
            .zip(prompt)
            .take_while(|(a, b)| a == b)
            .count()
    }

    /// Takes a job: keeps what its prompt shares with the context, but for one token at least, whose
    /// logits are needed. A job that cannot be begun is told so, and false is returned.
    pub(super) fn take(
        &mut self,
        session: &mut Session<'_>,
        words: &Model,
        job: Job,
        turn: u64,
    ) -> bool {
        let sampler = match &job.constraint {
            None => Ok(Sampler::new(&job.sampling)),
            Some(constraint) => Sampler::constrained(&job.sampling, words, constraint),
        };
        let sampler = match sampler {
            Ok(sampler) => sampler,
            Err(error) => {
                let _ = job.output.send(Event::Failed(failure(&error)));
                return false;
            }
        };
        let shared = if job.reuse {
            self.shared(&job.prompt).min(job.prompt.len() - 1)
        } else {
            0
        };
        let kept = session.keep_prefix(self.sequence, shared);
        self.tokens.truncate(kept);
        self.used = turn;
        self.active = Some(Active {
            watch: StopWatch::new(&job.stops, job.once.as_deref()),
            job,
            sampler,
            partial: Vec::new(),
            reports: Vec::new(),
            next: None,
            cached: kept,
            generated: 0,
            began: Instant::now(),
            prompt_done: None,
        });
        true
    }

    /// Empties the sequence after an error: what the context holds of it is not known.
    pub(super) fn forget(&mut self, session: &mut Session<'_>) {
        session.keep_prefix(self.sequence, 0);
        self.tokens.clear();
    }

    /// Whether a prompt is being decoded.
    pub(super) fn prefills(&self) -> bool {
        self.active.as_ref().is_some_and(|a| a.next.is_none())
    }
}

impl Active {
    /// Marks the prompt as decoded; returns how many tokens that took.
    pub(super) fn prompt_decoded(&mut self) -> (usize, usize) {
        self.prompt_done = Some(Instant::now());
        (self.job.prompt.len() - self.cached, self.cached)
    }

    /// Chooses the token after `row` of the last batch and sends what is certain of its text.
    pub(super) fn choose(
        &mut self,
        session: &Session<'_>,
        row: usize,
        room: usize,
    ) -> Result<Step, EngineError> {
        let index = i32::try_from(row).unwrap_or(i32::MAX);
        let token = self.sampler.next_at(session, index)?;
        let model = session.model();
        if model.is_end(token) {
            return Ok(Step::Ended(Finish::Stop));
        }
        self.generated += 1;
        self.next = Some(token);
        if let Some(most) = self.job.likelihoods {
            let (chosen, top) = likelihoods(session.logits_of(row), token, usize::from(most));
            let report = TokenReport::new(chosen, &top, |token| text_of(model, &[], token));
            self.reports.push(report);
        }
        let (certain, found) = self.watch.push(&text_of(model, &self.job.shown, token));
        self.send(&certain);
        Ok(if found {
            Step::Ended(Finish::Stop)
        } else if self.generated >= self.job.most || room == 0 {
            Step::Ended(Finish::Length)
        } else {
            Step::Goes
        })
    }

    /// Sends the characters that are complete.
    fn send(&mut self, bytes: &[u8]) {
        self.partial.extend_from_slice(bytes);
        let complete = complete_len(&self.partial);
        let text: Vec<u8> = self.partial.drain(..complete).collect();
        if text.is_empty() {
            return;
        }
        let piece = Piece {
            text: String::from_utf8_lossy(&text).into_owned(),
            tokens: std::mem::take(&mut self.reports),
        };
        let _ = self.job.output.send(Event::Piece(piece));
    }

    /// Sends what was held back and the end.
    pub(super) fn finish(mut self, finish: Finish) {
        let rest = self.watch.rest();
        self.partial.extend(rest);
        let text = String::from_utf8_lossy(&self.partial).into_owned();
        if !text.is_empty() || !self.reports.is_empty() {
            let tokens = std::mem::take(&mut self.reports);
            let _ = self.job.output.send(Event::Piece(Piece { text, tokens }));
        }
        let (usage, timings) = self.spent();
        let _ = self.job.output.send(Event::Done(Done {
            finish,
            usage,
            timings,
        }));
    }

    /// Tokens generated so far.
    pub(super) fn generated(&self) -> u32 {
        self.generated
    }

    /// Tokens and times so far.
    pub(super) fn spent(&self) -> (Usage, Timings) {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let usage = Usage {
            prompt_tokens: count(self.job.prompt.len()),
            cached_tokens: count(self.cached),
            completion_tokens: self.generated,
        };
        let prompt_done = self.prompt_done.unwrap_or_else(Instant::now);
        let timings = Timings {
            queue_s: self.began.duration_since(self.job.queued).as_secs_f64(),
            prompt_s: prompt_done.duration_since(self.began).as_secs_f64(),
            decode_s: prompt_done.elapsed().as_secs_f64(),
        };
        (usage, timings)
    }
}

/// What to tell a client of an engine's error.
pub(super) fn failure(error: &EngineError) -> Failure {
    match error {
        EngineError::Grammar(_) => Failure::Grammar(error.to_string()),
        other => Failure::Engine(other.to_string()),
    }
}

fn text_of(model: &Model, shown: &[Token], token: Token) -> Vec<u8> {
    let bytes = if shown.contains(&token) {
        model.token_bytes_shown(token)
    } else {
        model.token_bytes(token)
    };
    // A token of the model's own vocabulary always has bytes, if only none.
    bytes.unwrap_or_default()
}

/// Bytes at the start that do not end within a character. What can never become one counts as
/// complete.
fn complete_len(bytes: &[u8]) -> usize {
    let mut at = 0;
    loop {
        match std::str::from_utf8(&bytes[at..]) {
            Ok(_) => return bytes.len(),
            Err(error) => match error.error_len() {
                Some(len) => at += error.valid_up_to() + len,
                None => return at + error.valid_up_to(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::complete_len;

    #[test]
    fn characters_are_held_until_they_are_complete() {
        let euro = "€".as_bytes();
        assert_eq!(complete_len(b"abc"), 3);
        assert_eq!(complete_len(&[b"a", &euro[..2]].concat()), 1);
        assert_eq!(complete_len(&[b"a", euro].concat()), 4);
        assert_eq!(complete_len(b"\xff\xfea"), 3, "bytes that begin nothing");
        assert_eq!(complete_len(&[b"\xff", &euro[..1]].concat()), 1);
        assert_eq!(complete_len(b""), 0);
    }
}
