//! Several sequences in one context: each has its own cache, and one batch may hold rows of many.

use super::tap::Pass;
use super::{EngineError, Session, Token};

/// One row of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The token.
    pub token: Token,
    /// Its position in its sequence.
    pub position: usize,
    /// Its sequence, below [`Session::sequences`].
    pub sequence: u32,
    /// Whether its logits are wanted.
    pub logits: bool,
}

impl Session<'_> {
    /// Decodes the next token of each of some sequences in one batch; all logits are kept.
    ///
    /// # Errors
    /// As [`Session::decode`]; after an error the sequences of the batch must be forgotten.
    pub fn decode_next(&mut self, rows: &[Row]) -> Result<(), EngineError> {
        self.decode_batch(Pass::Next, rows.iter().copied())
    }

    /// Decodes a part of one sequence's prompt, at most [`Session::n_batch`] tokens, alone: so the
    /// bits of a prompt do not depend on what else is served. With `last`, the last row's logits are
    /// kept.
    ///
    /// # Errors
    /// As [`Self::decode_next`].
    pub fn decode_prompt(
        &mut self,
        sequence: u32,
        position: usize,
        tokens: &[Token],
        last: bool,
    ) -> Result<(), EngineError> {
        // A single token is decoded by the same kernels in either case, and is no prompt's worth.
        let pass = if tokens.len() == 1 {
            Pass::Next
        } else {
            Pass::Prompt
        };
        let rows = tokens.iter().enumerate().map(|(i, &token)| Row {
            token,
            position: position + i,
            sequence,
            logits: last && i + 1 == tokens.len(),
        });
        self.decode_batch(pass, rows)
    }

    /// Forgets what follows the first `tokens` of a sequence. Returns how many are left: a model whose
    /// state cannot be cut (recurrent ones, windows that have moved on) forgets all of them.
    pub fn keep_prefix(&mut self, sequence: u32, tokens: usize) -> usize {
        let from = u32::try_from(tokens).unwrap_or(u32::MAX);
        let Some(context) = &mut self.context else {
            return 0;
        };
        if tokens > 0 {
            let cut = context
                .clear_kv_cache_seq(Some(sequence), Some(from), None)
                .unwrap_or(false);
            let first = i32::try_from(sequence)
                .ok()
                .map(|sequence| context.memory_seq_pos_min(sequence));
            if cut && first == Some(0) {
                return tokens;
            }
        }
        // Removing a whole sequence always succeeds.
        let _ = context.clear_kv_cache_seq(Some(sequence), None, None);
        0
    }

    /// Logits of a row of the last batch that asked for them.
    #[must_use]
    pub fn logits_of(&self, row: usize) -> &[f32] {
        self.logits_at(i32::try_from(row).unwrap_or(i32::MAX))
    }
}
