//! Requests to `/v1/chat/completions`.

use super::error::ApiError;
use super::fields::{self, Fields};
use super::sampling::Common;
use crate::engine::chat::{ChatRequest, ToolChoice};
use serde_json::{Map, Value, json};

/// Most tools of a request.
const MOST_TOOLS: usize = 128;
/// Most likely tokens that may be reported at each position.
const MOST_TOP: u64 = 20;

/// A checked request.
#[derive(Debug, Clone)]
pub struct ChatCall {
    /// What it has in common with text completions.
    pub common: Common,
    /// The chat.
    pub chat: ChatRequest,
    /// Likeliest tokens to report at each position, when any.
    pub likelihoods: Option<u8>,
}

impl ChatCall {
    /// Reads a body.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = fields::parse(body)?;
        let common = Common::take(&mut fields)?;
        let messages = messages(fields.take("messages"))?;
        let tools = tools(fields.take("tools"))?;
        let (tool_choice, tools) = tool_choice(fields.take("tool_choice"), tools)?;
        let parallel_tool_calls = fields.boolean("parallel_tool_calls")?.unwrap_or(false);
        let json_schema = response_format(fields.take("response_format"))?;
        if json_schema.is_some() && tool_choice == ToolChoice::Required {
            return Err(ApiError::invalid(
                "response_format",
                "a tool call cannot be forced together with a response format",
            ));
        }
        let template_variables = template_variables(&mut fields)?;
        let likelihoods = likelihoods(&mut fields)?;
        fields.neutral("modalities", &[json!(["text"])])?;
        fields.finish()?;
        Ok(Self {
            common,
            chat: ChatRequest {
                messages,
                tools,
                tool_choice,
                parallel_tool_calls,
                json_schema,
                template_variables,
            },
            likelihoods,
        })
    }
}

fn messages(value: Option<Value>) -> Result<Value, ApiError> {
    let name = "messages";
    let Some(Value::Array(list)) = value else {
        return Err(ApiError::invalid(
            name,
            "`messages` must be a list of messages",
        ));
    };
    if list.is_empty() {
        return Err(ApiError::invalid(name, "`messages` must not be empty"));
    }
    list.into_iter()
        .enumerate()
        .map(|(i, message)| checked_message(&format!("messages[{i}]"), message))
        .collect::<Result<Vec<_>, _>>()
        .map(Value::Array)
}

fn checked_message(at: &str, message: Value) -> Result<Value, ApiError> {
    let Value::Object(mut message) = message else {
        return Err(ApiError::invalid(at, format!("`{at}` must be an object")));
    };
    let role = match message.get("role") {
        Some(Value::String(role)) => role.clone(),
        _ => {
            return Err(ApiError::invalid(
                at,
                format!("`{at}.role` must be a string"),
            ));
        }
    };
    match role.as_str() {
        "system" | "user" | "assistant" | "tool" => {}
        "developer" => {
            // The same to every template that this server knows.
            message.insert("role".into(), json!("system"));
        }
        other => {
            return Err(ApiError::invalid(
                at,
                format!(
                    "`{at}.role` is {other:?}; there are system, developer, user, assistant and tool"
                ),
            ));
        }
    }
    let calls = message.get("tool_calls").is_some_and(|v| !v.is_null());
    if calls && role != "assistant" {
        return Err(ApiError::invalid(
            at,
            format!("`{at}.tool_calls` belongs to assistant messages"),
        ));
    }
    let content = message.remove("content").unwrap_or(Value::Null);
    let content = checked_content(at, content, calls)?;
    message.insert("content".into(), content);
    Ok(Value::Object(message))
}

/// Text, or a list of text parts, which becomes one text.
fn checked_content(at: &str, content: Value, may_lack: bool) -> Result<Value, ApiError> {
    let fail = |message: String| ApiError::invalid(format!("{at}.content"), message);
    match content {
        Value::String(_) => Ok(content),
        Value::Null if may_lack => Ok(Value::Null),
        Value::Null => Err(fail(format!("`{at}.content` is missing"))),
        Value::Array(parts) => {
            let mut text = String::new();
            for (i, part) in parts.iter().enumerate() {
                let kind = part.get("type").and_then(Value::as_str).unwrap_or("");
                match (kind, part.get("text").and_then(Value::as_str)) {
                    ("text", Some(part)) => text.push_str(part),
                    ("text", None) => {
                        return Err(fail(format!("`{at}.content[{i}].text` must be a string")));
                    }
                    _ => {
                        return Err(fail(format!(
                            "`{at}.content[{i}]` is of type {kind:?}; this server takes text only"
                        )));
                    }
                }
            }
            Ok(Value::String(text))
        }
        _ => Err(fail(format!(
            "`{at}.content` must be a string or a list of text parts"
        ))),
    }
}

fn tools(value: Option<Value>) -> Result<Vec<Value>, ApiError> {
    let fail = |message: String| ApiError::invalid("tools", message);
    let tools = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(tools)) => tools,
        Some(_) => return Err(fail("`tools` must be a list".into())),
    };
    if tools.len() > MOST_TOOLS {
        return Err(fail(format!("`tools` holds more than {MOST_TOOLS} tools")));
    }
    for (i, tool) in tools.iter().enumerate() {
        if tool.get("type").and_then(Value::as_str) != Some("function") {
            return Err(fail(format!("`tools[{i}].type` must be \"function\"")));
        }
        match name_of(tool) {
            Some(name) if is_name(name) => {}
            _ => {
                return Err(fail(format!(
                    "`tools[{i}].function.name` must be 1 to 64 letters, digits, `_`, `-` or `.`"
                )));
            }
        }
        if tool["function"]
            .get("parameters")
            .is_some_and(|p| !p.is_object() && !p.is_null())
        {
            return Err(fail(format!(
                "`tools[{i}].function.parameters` must be a JSON schema"
            )));
        }
    }
    Ok(tools)
}

fn name_of(tool: &Value) -> Option<&str> {
    tool.get("function")?.get("name")?.as_str()
}

fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
}

/// The choice, and the tools that remain under it. No tools are told as `None`.
fn tool_choice(
    value: Option<Value>,
    tools: Vec<Value>,
) -> Result<(ToolChoice, Option<Value>), ApiError> {
    let name = "tool_choice";
    let some = |tools: Vec<Value>| (!tools.is_empty()).then_some(Value::Array(tools));
    let Some(value) = value else {
        return Ok((ToolChoice::Auto, some(tools)));
    };
    if tools.is_empty() && value != json!("none") && value != json!("auto") {
        return Err(ApiError::invalid(name, "`tool_choice` needs `tools`"));
    }
    match &value {
        Value::String(word) => match word.as_str() {
            "auto" => Ok((ToolChoice::Auto, some(tools))),
            "none" => Ok((ToolChoice::None, some(tools))),
            "required" => Ok((ToolChoice::Required, some(tools))),
            other => Err(ApiError::invalid(
                name,
                format!(
                    "`tool_choice` is {other:?}; there are auto, none, required and an object that names a function"
                ),
            )),
        },
        Value::Object(_) => {
            let wanted = name_of(&value)
                .ok_or_else(|| ApiError::invalid(name, "`tool_choice.function.name` is missing"))?;
            let only: Vec<Value> = tools
                .into_iter()
                .filter(|tool| name_of(tool) == Some(wanted))
                .collect();
            if only.is_empty() {
                return Err(ApiError::invalid(
                    name,
                    format!("`tool_choice` names {wanted:?}, which is not in `tools`"),
                ));
            }
            Ok((ToolChoice::Required, some(only)))
        }
        _ => Err(ApiError::invalid(
            name,
            "`tool_choice` must be a string or an object",
        )),
    }
}

/// The schema that the answer must satisfy.
fn response_format(value: Option<Value>) -> Result<Option<Value>, ApiError> {
    let name = "response_format";
    let Some(value) = value else { return Ok(None) };
    let kind = value.get("type").and_then(Value::as_str).unwrap_or("");
    match kind {
        "text" => Ok(None),
        "json_object" => Ok(Some(json!({"type": "object"}))),
        "json_schema" => match value.get("json_schema").and_then(|s| s.get("schema")) {
            Some(schema @ Value::Object(_)) => Ok(Some(schema.clone())),
            _ => Err(ApiError::invalid(
                name,
                "`response_format.json_schema.schema` must be a JSON schema",
            )),
        },
        other => Err(ApiError::invalid(
            name,
            format!(
                "`response_format.type` is {other:?}; there are text, json_object and json_schema"
            ),
        )),
    }
}

/// Variables for the template: `chat_template_kwargs`, and `reasoning_effort`, which templates know by
/// that name.
fn template_variables(fields: &mut Fields) -> Result<Option<Value>, ApiError> {
    let name = "chat_template_kwargs";
    let mut variables = match fields.take(name) {
        None => Map::new(),
        Some(Value::Object(map)) => map,
        Some(_) => {
            return Err(ApiError::invalid(
                name,
                format!("`{name}` must be an object"),
            ));
        }
    };
    if let Some(effort) = fields.text("reasoning_effort")? {
        variables.insert("reasoning_effort".into(), json!(effort));
    }
    Ok((!variables.is_empty()).then_some(Value::Object(variables)))
}

fn likelihoods(fields: &mut Fields) -> Result<Option<u8>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0, MOST_TOP)?;
    if top.is_some() && !wanted {
        return Err(ApiError::invalid(
            "top_logprobs",
            "`top_logprobs` needs `logprobs` to be true",
        ));
    }
    Ok(wanted.then(|| top.and_then(|n| u8::try_from(n).ok()).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::ChatCall;
    use crate::engine::chat::ToolChoice;
    use serde_json::{Value, json};

    fn parse(extra: &Value) -> Result<ChatCall, String> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        let map = body.as_object_mut().expect("object");
        for (name, value) in extra.as_object().expect("object") {
            map.insert(name.clone(), value.clone());
        }
        ChatCall::parse(body.to_string().as_bytes()).map_err(|e| {
            format!(
                "{} | {} | {:?}",
                e.message,
                e.param.unwrap_or_default(),
                e.code
            )
        })
    }

    fn refused(extra: &Value, words: &[&str]) {
        let error = parse(extra).expect_err("refused");
        for word in words {
            assert!(error.contains(word), "no {word:?} in {error}");
        }
    }

    #[test]
    fn unsupported_parameters_are_refused_by_name_and_harmless_values_pass() {
        refused(&json!({"n": 2}), &["`n`", "unsupported_parameter"]);
        refused(&json!({"logit_bias": {"5": 1}}), &["`logit_bias`"]);
        refused(&json!({"presence_penalty": 0.5}), &["`presence_penalty`"]);
        refused(&json!({"frobnicate": true}), &["`frobnicate`"]);
        refused(
            &json!({"stream": true, "stream_options": {"x": 1}}),
            &["`x`"],
        );
        refused(
            &json!({"stream_options": {"include_usage": true}}),
            &["`stream`"],
        );
        let harmless = json!({"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "user": "u",
            "logit_bias": {}, "store": false, "seed": null, "unknown": null});
        assert!(parse(&harmless).is_ok());
    }

    #[test]
    fn values_out_of_bounds_are_refused_with_their_bounds() {
        refused(&json!({"temperature": 2.5}), &["`temperature`", "0 to 2"]);
        refused(&json!({"temperature": "hot"}), &["`temperature`", "hot"]);
        refused(&json!({"top_p": 0}), &["`top_p`", "above 0"]);
        refused(&json!({"max_tokens": 0}), &["`max_tokens`", "from 1"]);
        refused(&json!({"max_tokens": -1}), &["`max_tokens`"]);
        refused(
            &json!({"top_logprobs": 21, "logprobs": true}),
            &["`top_logprobs`"],
        );
        refused(&json!({"top_logprobs": 2}), &["needs `logprobs`"]);
        refused(&json!({"stop": [""]}), &["empty"]);
        refused(&json!({"stop": vec!["x"; 17]}), &["more than 16"]);
        refused(&json!({"seed": 1.5}), &["`seed`"]);
    }

    #[test]
    fn messages_are_checked_one_by_one() {
        refused(&json!({"messages": []}), &["`messages`", "empty"]);
        refused(&json!({"messages": "hi"}), &["`messages`"]);
        refused(&json!({"messages": [7]}), &["`messages[0]`"]);
        let role = json!({"messages": [{"role": "robot", "content": "x"}]});
        refused(&role, &["messages[0].role", "robot"]);
        let image = json!({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]}]});
        refused(&image, &["content[1]", "image_url", "text only"]);
        refused(
            &json!({"messages": [{"role": "user"}]}),
            &["content", "missing"],
        );
        let parts = json!({"messages": [
            {"role": "developer", "content": "d"},
            {"role": "assistant", "content": null, "tool_calls": []},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]});
        let call = parse(&parts).expect("accepted");
        assert_eq!(call.chat.messages[0]["role"], "system");
        assert_eq!(call.chat.messages[2]["content"], "ab");
    }

    #[test]
    fn a_named_tool_is_the_only_one_and_required() {
        let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
        let tools = json!([tool("a"), tool("b")]);
        let named =
            json!({"tools": tools, "tool_choice": {"type": "function", "function": {"name": "b"}}});
        let call = parse(&named).expect("accepted");
        assert_eq!(call.chat.tool_choice, ToolChoice::Required);
        assert_eq!(call.chat.tools, Some(json!([tool("b")])));
        let absent =
            json!({"tools": tools, "tool_choice": {"type": "function", "function": {"name": "c"}}});
        refused(&absent, &["\"c\"", "not in `tools`"]);
        refused(&json!({"tool_choice": "required"}), &["needs `tools`"]);
        refused(&json!({"tools": [tool("a b")]}), &["tools[0]"]);
        refused(&json!({"tools": tools, "tool_choice": "maybe"}), &["maybe"]);
    }

    #[test]
    fn response_formats_become_schemas() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let format = json!({"response_format": {"type": "json_schema",
            "json_schema": {"name": "x", "schema": schema}}});
        assert_eq!(
            parse(&format).expect("accepted").chat.json_schema,
            Some(schema)
        );
        refused(&json!({"response_format": {"type": "xml"}}), &["xml"]);
        refused(
            &json!({"response_format": {"type": "json_schema"}}),
            &["schema"],
        );
        let text = json!({"response_format": {"type": "text"}});
        assert_eq!(parse(&text).expect("accepted").chat.json_schema, None);
    }
}
