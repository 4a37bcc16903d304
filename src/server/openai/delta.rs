//! From an answer that grows to what a stream says of it.

use crate::engine::chat::Answer;
use serde_json::{Map, Value, json};

/// What has been said of an answer so far.
#[derive(Debug, Default)]
pub struct Deltas {
    said: Answer,
    id_prefix: String,
}

impl Deltas {
    /// Nothing said yet. Calls without an id of their own get one that begins with `id_prefix`.
    #[must_use]
    pub fn new(id_prefix: String) -> Self {
        Self {
            said: Answer::default(),
            id_prefix,
        }
    }

    /// What is new in `answer`; `last` says that it will not grow any more. A field that no longer begins with what was said of it (the parser has
    /// changed its mind in the middle of a tag) is left out until it does.
    pub fn update(&mut self, answer: &Answer, last: bool) -> Option<Value> {
        let mut delta = Map::new();
        if let Some(new) = grown(
            &mut self.said.reasoning_content,
            answer.reasoning_content.as_ref(),
        ) {
            delta.insert("reasoning_content".into(), json!(new));
        }
        if let Some(new) = grown(&mut self.said.content, answer.content.as_ref()) {
            delta.insert("content".into(), json!(new));
        }
        let calls = self.calls(answer, last);
        if !calls.is_empty() {
            delta.insert("tool_calls".into(), Value::Array(calls));
        }
        (!delta.is_empty()).then_some(Value::Object(delta))
    }

    fn calls(&mut self, answer: &Answer, last: bool) -> Vec<Value> {
        let mut new = Vec::new();
        for (index, call) in answer.tool_calls.iter().enumerate() {
            // The name is said once, so it must be complete: the arguments have begun.
            let begins = index >= self.said.tool_calls.len();
            let unnamed =
                call.function.name.is_empty() || (call.function.arguments.is_empty() && !last);
            if begins && unnamed {
                break;
            }
            if begins {
                let mut said = call.clone();
                said.function.arguments.clear();
                self.said.tool_calls.push(said);
            }
            let said = &mut self.said.tool_calls[index].function.arguments;
            let Some(more) = call.function.arguments.strip_prefix(said.as_str()) else {
                continue;
            };
            if begins {
                let id = call_id(&self.id_prefix, index, &call.id);
                new.push(json!({"index": index, "id": id, "type": "function",
                    "function": {"name": call.function.name, "arguments": more}}));
            } else if !more.is_empty() {
                new.push(json!({"index": index, "function": {"arguments": more}}));
            }
            call.function.arguments.clone_into(said);
        }
        new
    }
}

/// A call's own id, or one made for it.
#[must_use]
pub fn call_id(prefix: &str, index: usize, own: &str) -> String {
    if own.is_empty() {
        format!("call_{prefix}_{index}")
    } else {
        own.to_owned()
    }
}

/// What `now` has more than `said`.
fn grown(said: &mut Option<String>, now: Option<&String>) -> Option<String> {
    let now = now?;
    let more = now.strip_prefix(said.as_deref().unwrap_or(""))?;
    if more.is_empty() {
        return None;
    }
    let more = more.to_owned();
    *said = Some(now.clone());
    Some(more)
}

#[cfg(test)]
mod tests {
    use super::Deltas;
    use crate::engine::chat::{Answer, FunctionCall, ToolCall};
    use proptest::prelude::*;
    use serde_json::Value;

    fn call(name: &str, arguments: &str) -> ToolCall {
        ToolCall {
            id: String::new(),
            function: FunctionCall {
                name: name.into(),
                arguments: arguments.into(),
            },
        }
    }

    /// Puts deltas together as a client does.
    fn joined(deltas: &[Value]) -> Answer {
        let mut answer = Answer::default();
        for delta in deltas {
            for (field, slot) in [
                ("content", &mut answer.content),
                ("reasoning_content", &mut answer.reasoning_content),
            ] {
                if let Some(text) = delta[field].as_str() {
                    slot.get_or_insert_default().push_str(text);
                }
            }
            for part in delta["tool_calls"].as_array().into_iter().flatten() {
                let index = usize::try_from(part["index"].as_u64().expect("index")).expect("small");
                if index == answer.tool_calls.len() {
                    assert!(part["id"].is_string(), "{part}");
                    answer
                        .tool_calls
                        .push(call(part["function"]["name"].as_str().expect("name"), ""));
                }
                let arguments = part["function"]["arguments"].as_str().expect("arguments");
                answer.tool_calls[index]
                    .function
                    .arguments
                    .push_str(arguments);
            }
        }
        answer
    }

    proptest! {
        /// However an answer grows, what was said adds up to it.
        #[test]
        fn deltas_add_up_to_the_answer(
            content in "\\PC{0,20}", thoughts in "\\PC{0,20}",
            arguments in proptest::collection::vec("\\{\"[a-z€]{1,8}\":[0-9]{1,4}\\}", 0..3),
            cuts in proptest::collection::vec(0.0_f64..1.0, 0..8),
        ) {
            let mut cuts = cuts;
            cuts.sort_by(f64::total_cmp);
            let cut = |text: &str, share: f64| -> String {
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "test")]
                let n = (text.chars().count() as f64 * share) as usize;
                text.chars().take(n).collect()
            };
            let mut deltas = Deltas::new("x".into());
            let mut said = Vec::new();
            for (share, last) in cuts.into_iter().map(|s| (s, false)).chain([(1.0, true)]) {
                let answer = Answer {
                    content: Some(cut(&content, share)),
                    reasoning_content: Some(cut(&thoughts, share)),
                    tool_calls: arguments.iter().map(|a| call("f", &cut(a, share))).collect(),
                };
                said.extend(deltas.update(&answer, last));
            }
            let answer = joined(&said);
            prop_assert_eq!(answer.content.unwrap_or_default(), content);
            prop_assert_eq!(answer.reasoning_content.unwrap_or_default(), thoughts);
            let calls: Vec<String> = answer.tool_calls.into_iter().map(|c| c.function.arguments).collect();
            prop_assert_eq!(calls, arguments);
        }
    }
}
