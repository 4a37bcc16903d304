//! Perplexity of a text, computed as llama.cpp's own tool does: the text in chunks of the context, each
//! in an empty context and behind a begin-of-sequence token where the vocabulary asks for one, and the
//! tokens of each chunk's second half scored.

use crate::engine::{EngineError, Model, Session, Token};
use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

/// Perplexity and its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Perplexity {
    /// exp of the mean negative log likelihood.
    pub value: f64,
    /// Standard error of the value; none for a single token.
    pub error: Option<f64>,
    /// Tokens that were scored.
    pub scored: u32,
}

/// Sums over scored tokens.
#[derive(Debug, Clone, Copy, Default)]
pub struct Score {
    sum: f64,
    sum_of_squares: f64,
    count: u32,
}

impl Score {
    /// Adds the likelihood that logits give to the token that came.
    pub fn add(&mut self, logits: &[f32], came: Token) {
        let cost = negative_log_likelihood(logits, came);
        self.sum += cost;
        self.sum_of_squares += cost * cost;
        self.count += 1;
    }

    /// The perplexity of what was added; none of nothing.
    #[must_use]
    pub fn perplexity(&self) -> Option<Perplexity> {
        let count = f64::from(self.count);
        if self.count == 0 {
            return None;
        }
        let mean = self.sum / count;
        let value = mean.exp();
        let variance = self.sum_of_squares / count - mean * mean;
        let error =
            (self.count > 1 && variance > 0.0).then(|| (variance / (count - 1.0)).sqrt() * value);
        Some(Perplexity {
            value,
            error,
            scored: self.count,
        })
    }
}

/// In 32-bit floats where llama.cpp's tool uses them, summed in 64 bits.
fn negative_log_likelihood(logits: &[f32], came: Token) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from((x - largest).exp())).sum();
    let own = usize::try_from(came).ok().and_then(|at| logits.get(at));
    let own = own.copied().unwrap_or(f32::NEG_INFINITY);
    sum.ln() - f64::from(own - largest)
}

/// Chunks of a text.
#[derive(Debug)]
pub struct Chunks {
    tokens: Vec<Token>,
    length: usize,
    first: Option<Token>,
}

impl Chunks {
    /// The text's chunks of `length` tokens, `most` of them at most.
    ///
    /// # Errors
    /// When the text does not fill two chunks, as llama.cpp's tool wants it, or cannot be tokenised.
    pub fn of(model: &Model, text: &str, length: usize, most: Option<u32>) -> Result<Self> {
        let adds_first = model.adds_bos();
        let tokens = model.tokenize(text, adds_first, false)?;
        if length < 2 || tokens.len() < 2 * length {
            bail!(
                "perplexity takes texts of at least two chunks of {length} tokens, and this one has {}; -c makes chunks shorter",
                tokens.len()
            );
        }
        let all = tokens.len() / length;
        let most = most.map_or(all, |most| all.min(most as usize));
        let mut tokens = tokens;
        tokens.truncate(most * length);
        Ok(Self {
            tokens,
            length,
            first: adds_first.then(|| model.first_token()),
        })
    }

    /// The chunks, each as it is decoded.
    pub fn iter(&self) -> impl Iterator<Item = Vec<Token>> + '_ {
        self.tokens.chunks_exact(self.length).map(|chunk| {
            let mut chunk = chunk.to_vec();
            if let Some(first) = self.first {
                chunk[0] = first;
            }
            chunk
        })
    }

    /// Tokens of a chunk.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }
}

/// Decodes a chunk in an empty context and adds its second half. `each` is told all logits that count.
///
/// # Errors
/// As [`Session::decode`].
pub fn score_chunk(
    session: &mut Session<'_>,
    chunk: &[Token],
    score: &mut Score,
    each: &mut dyn FnMut(&[f32]),
) -> Result<(), EngineError> {
    let half = chunk.len() / 2;
    session.clear();
    session.decode_scored(chunk, half, &mut |at, logits| {
        if let Some(&came) = chunk.get(at + 1) {
            each(logits);
            score.add(logits, came);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::Score;

    #[test]
    fn equal_likelihoods_give_the_number_of_choices() {
        let mut score = Score::default();
        assert!(score.perplexity().is_none());
        for came in 0..4 {
            score.add(&[0.5; 8], came);
        }
        let found = score.perplexity().unwrap();
        assert!((found.value - 8.0).abs() < 1e-12, "{found:?}");
        assert_eq!(found.scored, 4);
    }

    #[test]
    fn the_error_grows_with_the_spread() {
        let mut score = Score::default();
        score.add(&[0.0, 2.0_f32.ln()], 0);
        score.add(&[0.0, 2.0_f32.ln()], 1);
        let found = score.perplexity().unwrap();
        // Likelihoods 1/3 and 2/3: costs ln 3 and ln 1.5.
        assert!((found.value - 4.5_f64.sqrt()).abs() < 1e-6, "{found:?}");
        let half_spread = 2.0_f64.ln() / 2.0;
        let expected = half_spread * found.value;
        assert!((found.error.unwrap() - expected).abs() < 1e-6, "{found:?}");
    }
}
