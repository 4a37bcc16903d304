//! Responses in OpenAI's shapes, whole and in chunks.

use super::delta::{Deltas, call_id};
use crate::engine::chat::{Answer, AnswerReader};
use crate::server::job::{Done, Finish, Piece, TokenReport, Usage};
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The logarithm that stands for a probability of 0, which JSON cannot hold.
const LEAST_LOGPROB: f32 = -9999.0;

/// What every response begins with.
#[derive(Debug, Clone)]
pub struct Head {
    /// The response's id.
    pub id: String,
    /// The model's name.
    pub model: String,
    /// When it was made, seconds since 1970.
    pub created_s: u64,
    /// Whether chunks speak of usage.
    pub include_usage: bool,
}

impl Head {
    /// The head of a response that is made now.
    #[must_use]
    pub fn new(id: String, model: String, include_usage: bool) -> Self {
        let created_s = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs());
        Self {
            id,
            model,
            created_s,
            include_usage,
        }
    }

    fn object(&self, kind: &str, choices: &Value) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), json!(self.id));
        map.insert("object".into(), json!(kind));
        map.insert("created".into(), json!(self.created_s));
        map.insert("model".into(), json!(self.model));
        map.insert(
            "system_fingerprint".into(),
            json!(concat!("hotpin-", env!("CARGO_PKG_VERSION"))),
        );
        map.insert("choices".into(), choices.clone());
        map
    }

    fn chunk(&self, kind: &str, choices: &Value) -> Value {
        let mut map = self.object(kind, choices);
        if self.include_usage {
            map.insert("usage".into(), Value::Null);
        }
        Value::Object(map)
    }

    /// The last chunk, which has the usage and no choice.
    fn usage_chunk(&self, kind: &str, done: &Done) -> Option<Value> {
        self.include_usage.then(|| {
            let mut map = self.object(kind, &json!([]));
            map.insert("usage".into(), usage(&done.usage));
            map.insert("timings".into(), json!(done.timings));
            Value::Object(map)
        })
    }

    fn whole(&self, kind: &str, choices: &Value, done: &Done) -> Value {
        let mut map = self.object(kind, choices);
        map.insert("usage".into(), usage(&done.usage));
        map.insert("timings".into(), json!(done.timings));
        Value::Object(map)
    }
}

fn usage(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    })
}

fn reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    }
}

/// Turns a generation into responses.
pub trait Writer: Send {
    /// Chunks before the first piece.
    fn begin(&mut self) -> Vec<Value>;
    /// Chunks for a piece.
    fn piece(&mut self, piece: &Piece) -> Vec<Value>;
    /// Chunks at the end.
    fn done(&mut self, done: &Done) -> Vec<Value>;
    /// Takes in a piece of a response that is sent as a whole.
    fn add(&mut self, piece: Piece);
    /// The whole response.
    fn whole(&mut self, done: &Done) -> Value;
}

/// A chat's answer.
#[derive(Debug)]
pub struct ChatWriter {
    head: Head,
    reader: AnswerReader,
    likelihoods: bool,
    text: String,
    reports: Vec<TokenReport>,
    deltas: Deltas,
    pace: Pace,
}

/// How often a growing answer is read. Each time it is read from its beginning, on cores that the
/// engine wants, so a long one is not read for every token.
#[derive(Debug, Default)]
struct Pace {
    /// When it was read last, and how long that took.
    last: Option<(Instant, Duration)>,
}

/// Part of the time that reading may take: one of so many.
const READING_SHARE: u32 = 200;

impl Pace {
    fn is_due(&self) -> bool {
        self.last
            .is_none_or(|(at, took)| at.elapsed() >= took * READING_SHARE)
    }

    fn time<T>(&mut self, read: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let read = read();
        self.last = Some((Instant::now(), began.elapsed()));
        read
    }
}

const CHAT: &str = "chat.completion";
const CHAT_CHUNK: &str = "chat.completion.chunk";

impl ChatWriter {
    /// A writer of an answer that `reader` reads.
    #[must_use]
    pub fn new(head: Head, reader: AnswerReader, likelihoods: bool) -> Self {
        let deltas = Deltas::new(head.id.clone());
        Self {
            head,
            reader,
            likelihoods,
            text: String::new(),
            reports: Vec::new(),
            deltas,
            pace: Pace::default(),
        }
    }

    fn chunk(&self, delta: &Value, reports: &[TokenReport], finish: Option<&str>) -> Value {
        let logprobs = (self.likelihoods && !reports.is_empty()).then(|| chat_logprobs(reports));
        let choice =
            json!([{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]);
        self.head.chunk(CHAT_CHUNK, &choice)
    }

    /// The answer as it stands. Text that does not have the format's shape at the end is content: the
    /// model has said it, and nobody else will.
    fn answer(&self, partial: bool) -> Option<Answer> {
        match self.reader.read(&self.text, partial) {
            Ok(answer) => Some(answer),
            Err(_) if partial => None,
            Err(error) => {
                tracing::warn!("an answer is passed on as text: {error}");
                Some(Answer {
                    content: Some(self.text.clone()),
                    ..Answer::default()
                })
            }
        }
    }

    /// The last answer and why it ended.
    fn last(&self, done: &Done) -> (Answer, &'static str) {
        let cut = done.finish == Finish::Length;
        let answer = self.answer(cut).unwrap_or_default();
        let why = if !cut && !answer.tool_calls.is_empty() {
            "tool_calls"
        } else {
            reason(done.finish)
        };
        (answer, why)
    }
}

impl Writer for ChatWriter {
    fn begin(&mut self) -> Vec<Value> {
        vec![self.chunk(&json!({"role": "assistant", "content": ""}), &[], None)]
    }

    fn piece(&mut self, piece: &Piece) -> Vec<Value> {
        self.text.push_str(&piece.text);
        // Likelihoods belong to the chunk of their token. Else what is left out now comes with a later
        // piece, or at the end.
        if !self.likelihoods && !self.pace.is_due() {
            return Vec::new();
        }
        let mut pace = std::mem::take(&mut self.pace);
        let answer = pace.time(|| self.answer(true));
        self.pace = pace;
        let delta = answer.and_then(|a| self.deltas.update(&a, false));
        match delta {
            None if piece.tokens.is_empty() => Vec::new(),
            delta => vec![self.chunk(&delta.unwrap_or_else(|| json!({})), &piece.tokens, None)],
        }
    }

    fn done(&mut self, done: &Done) -> Vec<Value> {
        let (answer, why) = self.last(done);
        let mut chunks = Vec::new();
        if let Some(delta) = self.deltas.update(&answer, true) {
            chunks.push(self.chunk(&delta, &[], None));
        }
        chunks.push(self.chunk(&json!({}), &[], Some(why)));
        chunks.extend(self.head.usage_chunk(CHAT_CHUNK, done));
        chunks
    }

    fn add(&mut self, piece: Piece) {
        self.text.push_str(&piece.text);
        self.reports.extend(piece.tokens);
    }

    fn whole(&mut self, done: &Done) -> Value {
        let (answer, why) = self.last(done);
        let mut message = Map::new();
        message.insert("role".into(), json!("assistant"));
        let content = answer
            .content
            .filter(|text| !text.is_empty() || answer.tool_calls.is_empty());
        message.insert("content".into(), json!(content));
        if let Some(thoughts) = answer.reasoning_content.filter(|t| !t.is_empty()) {
            message.insert("reasoning_content".into(), json!(thoughts));
        }
        if !answer.tool_calls.is_empty() {
            let calls: Vec<Value> = answer
                .tool_calls
                .iter()
                .enumerate()
                .map(|(index, call)| {
                    json!({"id": call_id(&self.head.id, index, &call.id), "type": "function",
                        "function": call.function})
                })
                .collect();
            message.insert("tool_calls".into(), json!(calls));
        }
        let logprobs = self.likelihoods.then(|| chat_logprobs(&self.reports));
        let choice =
            json!([{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": why}]);
        self.head.whole(CHAT, &choice, done)
    }
}

fn lossy(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

fn chat_logprobs(reports: &[TokenReport]) -> Value {
    let one = |bytes: &[u8], logprob: f32| json!({"token": lossy(bytes), "logprob": logprob.max(LEAST_LOGPROB), "bytes": bytes});
    let content: Vec<Value> = reports
        .iter()
        .map(|report| {
            let mut token = one(&report.bytes, report.logprob);
            let top: Vec<Value> = report.top.iter().map(|(b, l)| one(b, *l)).collect();
            token["top_logprobs"] = json!(top);
            token
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// A text completion.
#[derive(Debug)]
pub struct TextWriter {
    head: Head,
    likelihoods: bool,
    text: String,
    reports: Vec<TokenReport>,
    /// Characters of the tokens that were reported.
    offset: usize,
}

const TEXT: &str = "text_completion";

impl TextWriter {
    /// A writer of a completion.
    #[must_use]
    pub fn new(head: Head, likelihoods: bool) -> Self {
        Self {
            head,
            likelihoods,
            text: String::new(),
            reports: Vec::new(),
            offset: 0,
        }
    }

    fn choice(&mut self, text: &str, reports: &[TokenReport], finish: Option<&str>) -> Value {
        let logprobs = (self.likelihoods && (finish.is_none() || !reports.is_empty()))
            .then(|| text_logprobs(reports, &mut self.offset));
        json!([{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}])
    }
}

impl Writer for TextWriter {
    fn begin(&mut self) -> Vec<Value> {
        Vec::new()
    }

    fn piece(&mut self, piece: &Piece) -> Vec<Value> {
        let choice = self.choice(&piece.text, &piece.tokens, None);
        vec![self.head.chunk(TEXT, &choice)]
    }

    fn done(&mut self, done: &Done) -> Vec<Value> {
        let choice = self.choice("", &[], Some(reason(done.finish)));
        let mut chunks = vec![self.head.chunk(TEXT, &choice)];
        chunks.extend(self.head.usage_chunk(TEXT, done));
        chunks
    }

    fn add(&mut self, piece: Piece) {
        self.text.push_str(&piece.text);
        self.reports.extend(piece.tokens);
    }

    fn whole(&mut self, done: &Done) -> Value {
        let (text, reports) = (
            std::mem::take(&mut self.text),
            std::mem::take(&mut self.reports),
        );
        let choice = self.choice(&text, &reports, Some(reason(done.finish)));
        self.head.whole(TEXT, &choice, done)
    }
}

fn text_logprobs(reports: &[TokenReport], offset: &mut usize) -> Value {
    let mut offsets = Vec::with_capacity(reports.len());
    for report in reports {
        offsets.push(*offset);
        *offset += lossy(&report.bytes).chars().count();
    }
    let tokens: Vec<_> = reports.iter().map(|r| lossy(&r.bytes)).collect();
    let logprobs: Vec<f32> = reports
        .iter()
        .map(|r| r.logprob.max(LEAST_LOGPROB))
        .collect();
    let top: Vec<Map<String, Value>> = reports
        .iter()
        .map(|report| {
            let entry = |(bytes, logprob): &(Vec<u8>, f32)| {
                (lossy(bytes).into_owned(), json!(logprob.max(LEAST_LOGPROB)))
            };
            report.top.iter().map(entry).collect()
        })
        .collect();
    json!({"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets})
}

#[cfg(test)]
mod tests {
    use super::Pace;
    use std::time::{Duration, Instant};

    #[test]
    fn a_growing_answer_is_read_at_a_bounded_share_of_the_time() {
        assert!(Pace::default().is_due(), "the first piece");
        let read = |ago_ms: u64, took_us: u64| {
            let at = Instant::now().checked_sub(Duration::from_millis(ago_ms));
            let last = at.map(|at| (at, Duration::from_micros(took_us)));
            Pace { last }.is_due()
        };
        assert!(read(20, 50), "short answers are read for every token");
        assert!(!read(20, 5_000), "long ones are not");
        assert!(read(1_000, 5_000), "but go on");
        let mut pace = Pace::default();
        pace.time(|| std::thread::sleep(Duration::from_millis(20)));
        assert!(!pace.is_due());
    }
}
