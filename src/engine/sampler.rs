//! From logits to the next token, with llama.cpp's own samplers.

use super::{EngineError, Session, Token};
use llama_cpp_4::sampling::LlamaSampler;
use serde::{Deserialize, Serialize};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplerOptions {
    /// Temperature; 0 takes the likeliest token.
    pub temperature: f32,
    /// Nucleus: the smallest set of tokens whose probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Keep the k likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Drop tokens less likely than this share of the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Seed of the random choice.
    pub seed: u32,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_p: 0.95,
            top_k: 40,
            min_p: 0.05,
            seed: 0,
        }
    }
}

/// A chain of samplers with its own random state.
#[derive(Debug)]
pub struct Sampler {
    chain: LlamaSampler,
}

impl Sampler {
    /// Builds the chain in llama.cpp's usual order.
    #[must_use]
    pub fn new(options: &SamplerOptions) -> Self {
        let chain = if options.temperature <= 0.0 {
            LlamaSampler::greedy()
        } else {
            let mut parts = Vec::new();
            if options.top_k > 0 {
                parts.push(LlamaSampler::top_k(
                    i32::try_from(options.top_k).unwrap_or(i32::MAX),
                ));
            }
            if options.top_p < 1.0 {
                parts.push(LlamaSampler::top_p(options.top_p, 1));
            }
            if options.min_p > 0.0 {
                parts.push(LlamaSampler::min_p(options.min_p, 1));
            }
            parts.push(LlamaSampler::temp(options.temperature));
            parts.push(LlamaSampler::dist(options.seed));
            LlamaSampler::chain_simple(parts)
        };
        Self { chain }
    }

    /// Chooses the token that follows the last decoded one, and remembers it.
    ///
    /// # Errors
    /// [`EngineError::Decode`] when llama.cpp's sampler fails.
    pub fn next(&mut self, session: &Session<'_>) -> Result<Token, EngineError> {
        self.chain
            .try_sample(session.context(), session.last_row())
            .map(|token| token.0)
            .map_err(|e| EngineError::Decode(format!("sampling: {e}")))
    }
}
