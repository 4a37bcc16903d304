//! Chats: the model's own template, the grammars that force tool calls and schemas, and the parser
//! that reads reasoning and tool calls back. All of it is llama.cpp's (`common/chat.h`).

use super::{Constraint, EngineError, Model, Token};
use llama_cpp_4::chat::{
    ChatApplyParams, ChatParams, ChatTemplates, ReasoningFormat, ToolChoice as NativeChoice,
};
use llama_cpp_4::model::{AddBos, Special};
use llama_cpp_4::token::LlamaToken;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A model's chat template, parsed once.
#[derive(Debug)]
pub struct Chat {
    templates: ChatTemplates,
    tool_calls: bool,
}

/// What the model may do with the tools it is told of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// It must call one; a grammar sees to it.
    Required,
    /// It must not.
    None,
}

/// A chat to be continued. The JSON values have OpenAI's shapes.
#[derive(Clone, Debug, Default)]
pub struct ChatRequest {
    /// `messages`.
    pub messages: Value,
    /// `tools`.
    pub tools: Option<Value>,
    /// `tool_choice`.
    pub tool_choice: ToolChoice,
    /// `parallel_tool_calls`.
    pub parallel_tool_calls: bool,
    /// A JSON schema that the answer must satisfy.
    pub json_schema: Option<Value>,
    /// Variables for the template.
    pub template_variables: Option<Value>,
}

/// A chat as the model sees it.
#[derive(Debug)]
pub struct Rendered {
    /// The prompt.
    pub tokens: Vec<Token>,
    /// What the answer must follow.
    pub constraint: Option<Constraint>,
    /// Texts that end the answer in this format.
    pub stops: Vec<String>,
    /// The mark with which a tool call begins, where only one is wanted and the format has such a mark:
    /// its second appearance ends the answer. llama.cpp's grammars allow calls without end.
    pub call_mark: Option<String>,
    /// Control tokens that the parser wants to see as text.
    pub shown: Vec<Token>,
    /// Reads the answer back.
    pub reader: AnswerReader,
}

/// Reads an answer's text as a message.
#[derive(Debug, Clone)]
pub struct AnswerReader {
    params: ChatParams,
}

/// A message that the model wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The text.
    #[serde(default)]
    pub content: Option<String>,
    /// What it thought before.
    #[serde(default)]
    pub reasoning_content: Option<String>,
    /// Tools that it calls.
    #[serde(default)]
    pub tool_calls: Vec<ToolCall>,
}

/// One call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The call's id, empty where the format has none.
    #[serde(default)]
    pub id: String,
    /// The function.
    pub function: FunctionCall,
}

/// A function and its arguments.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// Its name.
    #[serde(default)]
    pub name: String,
    /// JSON text; incomplete while the answer is being written.
    #[serde(default)]
    pub arguments: String,
}

impl Chat {
    /// The template of a model, or `source` (Jinja) in its place.
    ///
    /// # Errors
    /// [`EngineError::Template`] when there is none or it cannot be parsed.
    pub fn new(model: &Model, source: Option<&str>) -> Result<Self, EngineError> {
        let fail = |e: llama_cpp_4::chat::ChatError| EngineError::Template(e.to_string());
        let templates = ChatTemplates::from_model(&model.inner, source).map_err(fail)?;
        let caps = templates.caps_json().map_err(fail)?;
        tracing::debug!("chat template: {caps}");
        let caps: Value = serde_json::from_str(&caps).unwrap_or_default();
        Ok(Self {
            templates,
            tool_calls: caps["supports_tool_calls"].as_bool().unwrap_or(false),
        })
    }

    /// Whether the template knows tools and calls of them.
    #[must_use]
    pub fn knows_tool_calls(&self) -> bool {
        self.tool_calls
    }

    /// Renders a chat up to where the answer begins.
    ///
    /// # Errors
    /// [`EngineError::Template`] when the template refuses it, [`EngineError::Grammar`] when a schema
    /// cannot be turned into a grammar.
    pub fn render(&self, model: &Model, request: &ChatRequest) -> Result<Rendered, EngineError> {
        let params = self.apply(request, request.tool_choice)?;
        // User text is tokenised apart from the template, so that it cannot forge control tokens.
        let bos = if model.adds_bos() {
            AddBos::Always
        } else {
            AddBos::Never
        };
        let tokens = params
            .tokenize_prompt(&model.inner, bos)
            .map_err(|e| EngineError::Tokenize(e.to_string()))?;
        let mark = self.call_mark(request, &params)?;
        let mut constraint = constraint(model, &params)?;
        if let (Some(constraint), Some(mark)) = (&mut constraint, &mark)
            && request.tool_choice == ToolChoice::Required
            && !params.supports_thinking
        {
            // llama.cpp's grammar for a call that is required allows any text before it, and a model that
            // will not call talks until its tokens are used up.
            constraint.opening = model.tokenize(mark, false, true)?;
        }
        Ok(Rendered {
            tokens: tokens.into_iter().map(|t| t.0).collect(),
            constraint,
            stops: strings(&params.additional_stops_json),
            call_mark: mark
                .map(|mark| mark.trim().to_owned())
                .filter(|mark| !mark.is_empty() && !request.parallel_tool_calls),
            shown: shown(model, &strings(&params.preserved_tokens_json)),
            reader: AnswerReader { params },
        })
    }

    fn apply(&self, request: &ChatRequest, choice: ToolChoice) -> Result<ChatParams, EngineError> {
        let mut params = ChatApplyParams::new(request.messages.to_string())
            .with_reasoning_format(ReasoningFormat::Auto)
            .with_parallel_tool_calls(request.parallel_tool_calls)
            .with_tool_choice(match choice {
                ToolChoice::Auto => NativeChoice::Auto,
                ToolChoice::Required => NativeChoice::Required,
                ToolChoice::None => NativeChoice::None,
            });
        if let Some(tools) = &request.tools {
            params = params.with_tools(tools.to_string());
        }
        if let Some(schema) = &request.json_schema {
            params = params.with_json_schema(schema.to_string());
        }
        if let Some(variables) = &request.template_variables {
            params = params.with_template_kwargs(variables.to_string());
        }
        self.templates
            .apply(&params)
            .map_err(|e| EngineError::Template(e.to_string()))
    }

    /// The mark with which a tool call begins: where the model may call or not, it is what triggers the
    /// grammar.
    fn call_mark(
        &self,
        request: &ChatRequest,
        params: &ChatParams,
    ) -> Result<Option<String>, EngineError> {
        if request.tools.is_none() || request.tool_choice == ToolChoice::None {
            return Ok(None);
        }
        let free;
        let triggers = if request.tool_choice == ToolChoice::Required {
            free = self.apply(request, ToolChoice::Auto)?;
            &free.grammar_triggers
        } else {
            &params.grammar_triggers
        };
        Ok(match &triggers[..] {
            [mark] if mark.kind == "word" => Some(mark.value.clone()),
            _ => None,
        })
    }
}

impl AnswerReader {
    /// Reads an answer; `partial` while it is still being written.
    ///
    /// # Errors
    /// [`EngineError::Template`] when the text does not have the format's shape.
    pub fn read(&self, text: &str, partial: bool) -> Result<Answer, EngineError> {
        let fail = |e: String| EngineError::Template(e);
        let json = self
            .params
            .parse(&text.replace('\0', "\u{fffd}"), partial)
            .map_err(|e| fail(e.to_string()))?;
        serde_json::from_str(&json).map_err(|e| fail(e.to_string()))
    }

    /// llama.cpp's name of the format.
    #[must_use]
    pub fn format(&self) -> String {
        self.params.format_name().unwrap_or_default()
    }
}

fn strings(json: &str) -> Vec<String> {
    serde_json::from_str(json).unwrap_or_default()
}

/// Tokens of the vocabulary that stand for these texts.
fn shown(model: &Model, texts: &[String]) -> Vec<Token> {
    texts
        .iter()
        .filter_map(|text| {
            let tokens = model.tokenize(text, false, true).ok()?;
            (tokens.len() == 1).then(|| tokens[0])
        })
        .collect()
}

fn constraint(model: &Model, params: &ChatParams) -> Result<Option<Constraint>, EngineError> {
    if params.grammar.is_empty() {
        return Ok(None);
    }
    let (mut patterns, mut tokens) = if params.grammar_lazy {
        params.sampler_triggers()
    } else {
        (Vec::new(), Vec::new())
    };
    // A word that is one control token never appears as text: it triggers as a token.
    for trigger in params
        .grammar_triggers
        .iter()
        .filter(|_| params.grammar_lazy)
    {
        if trigger.kind != "word" {
            continue;
        }
        if let [token] = model.tokenize(&trigger.value, false, true)?[..] {
            tokens.push(LlamaToken(token));
        }
    }
    patterns.dedup();
    let lazy = !patterns.is_empty() || !tokens.is_empty();
    // Such a grammar is written for what the template put at the end of the prompt and what follows.
    let prefill = if lazy {
        Vec::new()
    } else {
        prefill(model, params.generation_prompt())?
    };
    Ok(Some(Constraint {
        grammar: params.grammar.clone(),
        trigger_patterns: patterns,
        trigger_tokens: tokens.into_iter().map(|t| t.0).collect(),
        prefill,
        opening: Vec::new(),
    }))
}

/// Tokens of the end of the prompt as llama.cpp feeds them to a grammar: without the space that some
/// tokenisers put in front of the first.
fn prefill(model: &Model, text: &str) -> Result<Vec<Token>, EngineError> {
    let mut tokens = model.tokenize(text, false, true)?;
    if let Some(&first) = tokens.first()
        && !text.starts_with(char::is_whitespace)
        && model
            .inner
            .token_to_raw_bytes(LlamaToken(first), Special::Tokenize)
            .is_ok_and(|bytes| bytes.first().is_some_and(u8::is_ascii_whitespace))
    {
        tokens.remove(0);
    }
    Ok(tokens)
}
