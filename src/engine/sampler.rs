//! From logits to the next token, with llama.cpp's own samplers.

use super::{EngineError, Model, Session, Token};
use llama_cpp_4::sampling::LlamaSampler;
use llama_cpp_4::token::LlamaToken;
use llama_cpp_4::token::data::LlamaTokenData;
use llama_cpp_4::token::data_array::LlamaTokenDataArray;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

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

/// A grammar (GBNF) that the output must follow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Constraint {
    /// The grammar; its root rule is `root`.
    pub grammar: String,
    /// Regular expressions and tokens after which a lazy grammar begins; without any it holds from
    /// the first token on.
    pub trigger_patterns: Vec<String>,
    /// See `trigger_patterns`.
    pub trigger_tokens: Vec<Token>,
    /// Tokens that the grammar has seen already: the end of the prompt.
    pub prefill: Vec<Token>,
    /// Tokens that the output begins with, whatever the model would say.
    pub opening: Vec<Token>,
}

/// One candidate of a position, for `logprobs`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Likelihood {
    /// The token.
    pub token: Token,
    /// Natural logarithm of its probability under the model, before any sampler.
    pub logprob: f32,
}

/// A chain of samplers with its own random state.
#[derive(Debug)]
pub struct Sampler {
    chain: LlamaSampler,
    grammar: Option<LlamaSampler>,
    opening: VecDeque<Token>,
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
        Self {
            chain,
            grammar: None,
            opening: VecDeque::new(),
        }
    }

    /// The same chain under a grammar.
    ///
    /// # Errors
    /// [`EngineError::Grammar`] when llama.cpp refuses the grammar.
    pub fn constrained(
        options: &SamplerOptions,
        model: &Model,
        constraint: &Constraint,
    ) -> Result<Self, EngineError> {
        let mut grammar = build_grammar(model, constraint)?;
        for &token in &constraint.prefill {
            grammar
                .try_accept(LlamaToken(token))
                .map_err(|e| EngineError::Grammar(e.to_string()))?;
        }
        Ok(Self {
            grammar: Some(grammar),
            opening: constraint.opening.iter().copied().collect(),
            ..Self::new(options)
        })
    }

    /// Chooses the token that follows the last decoded one, and remembers it.
    ///
    /// # Errors
    /// [`EngineError::Decode`] when llama.cpp's sampler fails.
    pub fn next(&mut self, session: &Session<'_>) -> Result<Token, EngineError> {
        self.next_at(session, session.last_row())
    }

    /// Chooses the token that follows the one in `row` of the last batch, and remembers it.
    ///
    /// # Errors
    /// [`EngineError::Decode`] when llama.cpp's sampler fails.
    pub fn next_at(&mut self, session: &Session<'_>, row: i32) -> Result<Token, EngineError> {
        if let Some(token) = self.opening.pop_front() {
            self.accept(LlamaToken(token))?;
            return Ok(token);
        }
        let fail = |e| EngineError::Decode(format!("sampling: {e}"));
        let token = self
            .chain
            .try_sample(session.context()?, row)
            .map_err(fail)?;
        let Some(grammar) = &mut self.grammar else {
            return Ok(token.0);
        };
        // As llama.cpp does: only when the grammar refuses the choice is it applied to everything.
        let token = if allows(grammar, token) {
            token
        } else {
            let candidates = session.context()?.candidates_ith(row);
            let mut candidates = LlamaTokenDataArray::from_iter(candidates, false);
            candidates.apply_sampler(grammar);
            candidates.apply_sampler(&mut self.chain);
            candidates.selected_token().ok_or_else(|| {
                EngineError::Decode("sampling: the grammar allows no token".into())
            })?
        };
        self.accept(token)?;
        Ok(token.0)
    }

    /// Tells the grammar what was chosen.
    fn accept(&mut self, token: LlamaToken) -> Result<(), EngineError> {
        match &mut self.grammar {
            Some(grammar) => grammar
                .try_accept(token)
                .map_err(|e| EngineError::Grammar(e.to_string())),
            None => Ok(()),
        }
    }
}

fn build_grammar(model: &Model, constraint: &Constraint) -> Result<LlamaSampler, EngineError> {
    let lazy = !constraint.trigger_patterns.is_empty() || !constraint.trigger_tokens.is_empty();
    let built = if lazy {
        let patterns: Vec<&str> = constraint
            .trigger_patterns
            .iter()
            .map(String::as_str)
            .collect();
        let tokens: Vec<LlamaToken> = constraint
            .trigger_tokens
            .iter()
            .map(|&token| LlamaToken(token))
            .collect();
        LlamaSampler::try_grammar_lazy_patterns(
            &model.inner,
            &constraint.grammar,
            "root",
            &patterns,
            &tokens,
        )
    } else {
        LlamaSampler::try_grammar(&model.inner, &constraint.grammar, "root")
    };
    built.map_err(|e| EngineError::Grammar(e.to_string()))
}

fn allows(grammar: &mut LlamaSampler, token: LlamaToken) -> bool {
    let mut only = LlamaTokenDataArray::new(vec![LlamaTokenData::new(token, 1.0, 0.0)], false);
    only.apply_sampler(grammar);
    only.data
        .first()
        .is_some_and(|candidate| candidate.logit() != f32::NEG_INFINITY)
}

/// The chosen token's likelihood and those of the `most` likeliest, best first.
#[must_use]
pub fn likelihoods(logits: &[f32], chosen: Token, most: usize) -> (Likelihood, Vec<Likelihood>) {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .map(|&logit| f64::from(logit - highest).exp())
        .sum();
    #[expect(clippy::cast_possible_truncation, reason = "a logarithm of a count")]
    let log_sum = sum.ln() as f32 + highest;
    let at = |index: usize| Likelihood {
        token: Token::try_from(index).unwrap_or(Token::MAX),
        logprob: logits[index] - log_sum,
    };
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let by_logit = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    if most < order.len() {
        order.select_nth_unstable_by(most, by_logit);
        order.truncate(most);
    }
    order.sort_unstable_by(by_logit);
    let chosen_logprob = usize::try_from(chosen)
        .ok()
        .filter(|&index| index < logits.len())
        .map_or(f32::NEG_INFINITY, |index| at(index).logprob);
    (
        Likelihood {
            token: chosen,
            logprob: chosen_logprob,
        },
        order.into_iter().map(at).collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::likelihoods;

    #[test]
    fn likelihoods_are_a_softmax_in_order() {
        let logits = [1.0_f32, 3.0, 2.0, 3.0];
        let (chosen, top) = likelihoods(&logits, 2, 3);
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        assert!((f64::from(chosen.logprob) - (2.0 - sum.ln())).abs() < 1e-6);
        let tokens: Vec<i32> = top.iter().map(|l| l.token).collect();
        assert_eq!(tokens, [1, 3, 2]);
        let (_, all) = likelihoods(&logits, 0, 10);
        let total: f64 = all.iter().map(|l| f64::from(l.logprob).exp()).sum();
        assert!((total - 1.0).abs() < 1e-6, "{total}");
    }
}
