//! Requests to `/v1/completions`.

use super::error::ApiError;
use super::fields;
use super::sampling::Common;
use crate::engine::Token;
use serde_json::{Value, json};

/// Most likely tokens that may be reported at each position.
const MOST_TOP: u64 = 5;

/// A prompt as it was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Tokens.
    Tokens(Vec<Token>),
}

/// A checked request.
#[derive(Debug, Clone)]
pub struct CompletionCall {
    /// What it has in common with chats.
    pub common: Common,
    /// The prompt.
    pub prompt: Prompt,
    /// Likeliest tokens to report at each position, when any.
    pub likelihoods: Option<u8>,
}

impl CompletionCall {
    /// Reads a body.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = fields::parse(body)?;
        let common = Common::take(&mut fields)?;
        let prompt = prompt(fields.take("prompt"))?;
        let likelihoods = fields
            .integer("logprobs", 0, MOST_TOP)?
            .and_then(|n| u8::try_from(n).ok());
        fields.neutral("echo", &[json!(false)])?;
        fields.neutral("best_of", &[json!(1)])?;
        fields.neutral("suffix", &[json!("")])?;
        fields.finish()?;
        Ok(Self {
            common,
            prompt,
            likelihoods,
        })
    }
}

fn prompt(value: Option<Value>) -> Result<Prompt, ApiError> {
    let fail = |message: &str| ApiError::invalid("prompt", message);
    match value {
        Some(Value::String(text)) if text.is_empty() => Err(fail("`prompt` must not be empty")),
        Some(Value::String(text)) => Ok(Prompt::Text(text)),
        Some(Value::Array(mut list)) => match list.first() {
            None => Err(fail("`prompt` must not be empty")),
            Some(Value::String(_) | Value::Array(_)) if list.len() == 1 => prompt(list.pop()),
            Some(Value::String(_) | Value::Array(_)) => Err(ApiError::unsupported(
                "prompt",
                "this server takes one prompt a request",
            )),
            Some(_) => list
                .iter()
                .map(|token| token.as_i64().and_then(|n| Token::try_from(n).ok()))
                .collect::<Option<Vec<Token>>>()
                .map(Prompt::Tokens)
                .ok_or_else(|| fail("`prompt` must be a string or a list of tokens")),
        },
        _ => Err(fail("`prompt` must be a string or a list of tokens")),
    }
}

#[cfg(test)]
mod tests {
    use super::{CompletionCall, Prompt};

    fn parse(body: &str) -> Result<Prompt, String> {
        CompletionCall::parse(body.as_bytes())
            .map(|call| call.prompt)
            .map_err(|e| e.message)
    }

    #[test]
    fn prompts_are_text_or_tokens_and_one_of_them() {
        assert_eq!(parse(r#"{"prompt": "a"}"#), Ok(Prompt::Text("a".into())));
        assert_eq!(parse(r#"{"prompt": ["a"]}"#), Ok(Prompt::Text("a".into())));
        assert_eq!(
            parse(r#"{"prompt": [1, 2]}"#),
            Ok(Prompt::Tokens(vec![1, 2]))
        );
        assert_eq!(parse(r#"{"prompt": [[1]]}"#), Ok(Prompt::Tokens(vec![1])));
        for bad in [
            r#"{"prompt": ""}"#,
            r#"{"prompt": []}"#,
            r#"{"prompt": ["a", "b"]}"#,
            r#"{"prompt": [1.5]}"#,
            r#"{"prompt": [99999999999]}"#,
            r#"{}"#,
            r#"{"prompt": "a", "echo": true}"#,
            r#"{"prompt": "a", "logprobs": 6}"#,
            "[]",
            "{",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
