//! Handlers of `/v1/*`: a request becomes a job, the job's events become a response.

use super::app::{App, Ready};
use super::body::read_body;
use super::job::{Gone, Job};
use super::openai::{
    ApiError, ChatCall, ChatWriter, Common, CompletionCall, Head, Prompt, TextWriter, Writer,
};
use super::queue::Refusal;
use super::stats::Outcome;
use super::stream::{Chunks, Waiter};
use crate::engine::chat::ToolChoice;
use crate::engine::{Constraint, EngineError, Token};
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, UNIX_EPOCH};
use tokio::sync::mpsc;

/// Time between signs of life on a stream that has nothing to say.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// `POST /v1/chat/completions`
pub(super) async fn chat(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let ready = admitted(&app)?;
    let call = ChatCall::parse(&read_body(&app, body).await?.bytes)?;
    app.check_model(call.common.model.as_deref())?;
    if call.chat.tools.is_some()
        && call.chat.tool_choice != ToolChoice::None
        && !ready.chat.knows_tool_calls()
    {
        return Err(ApiError::unsupported(
            "tools",
            "this model's chat template knows no tool calls; the server takes another one with --chat-template",
        ));
    }
    let renderer = Arc::clone(&ready);
    let chat = call.chat;
    let rendered = on_a_thread(move || renderer.chat.render(&renderer.model, &chat))
        .await?
        .map_err(|error| refused_by_template(&error))?;
    let mut common = call.common;
    common.stops.extend(rendered.stops);
    let id = new_id("chatcmpl");
    let head = Head::new(id.clone(), app.name.clone(), common.include_usage);
    let writer = ChatWriter::new(head, rendered.reader, call.likelihoods.is_some());
    let wanted = Wanted {
        id,
        common,
        prompt: rendered.tokens,
        constraint: rendered.constraint,
        once: rendered.call_mark,
        shown: rendered.shown,
        likelihoods: call.likelihoods,
    };
    respond(&app, &ready, wanted, Box::new(writer)).await
}

/// `POST /v1/completions`
pub(super) async fn complete(
    State(app): State<Arc<App>>,
    body: Body,
) -> Result<Response, ApiError> {
    let ready = admitted(&app)?;
    let call = CompletionCall::parse(&read_body(&app, body).await?.bytes)?;
    app.check_model(call.common.model.as_deref())?;
    let tokeniser = Arc::clone(&ready);
    let prompt = on_a_thread(move || tokens(&tokeniser, call.prompt)).await??;
    let id = new_id("cmpl");
    let head = Head::new(id.clone(), app.name.clone(), call.common.include_usage);
    let writer = TextWriter::new(head, call.likelihoods.is_some());
    let wanted = Wanted {
        id,
        common: call.common,
        prompt,
        constraint: None,
        once: None,
        shown: Vec::new(),
        likelihoods: call.likelihoods,
    };
    respond(&app, &ready, wanted, Box::new(writer)).await
}

/// `GET /v1/models`
pub(super) async fn models(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let ready = app.ready()?;
    Ok(axum::Json(json!({"object": "list", "data": [described(&app, &ready)]})).into_response())
}

/// `GET /v1/models/{name}`
pub(super) async fn model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    let ready = app.ready()?;
    app.check_model(Some(&name))?;
    Ok(axum::Json(described(&app, &ready)).into_response())
}

fn described(app: &App, ready: &Ready) -> Value {
    let created_s = UNIX_EPOCH
        .elapsed()
        .unwrap_or_default()
        .saturating_sub(ready.since.elapsed())
        .as_secs();
    json!({"id": app.name, "object": "model", "created": created_s, "owned_by": "hotpin"})
}

/// The model, unless there is no place left in the queue. Told before a body is read, so that a crowd
/// costs little.
fn admitted(app: &App) -> Result<Arc<Ready>, ApiError> {
    let ready = app.ready()?;
    let waiting = app.queue.waiting();
    if waiting >= app.limits.queue && !app.queue.make_room() {
        return Err(crowded(app, waiting));
    }
    Ok(ready)
}

fn crowded(app: &App, waiting: usize) -> ApiError {
    app.stats.ended(Outcome::Refused);
    ApiError {
        retry_after_s: Some(app.stats.turn_s().clamp(1, 60)),
        ..ApiError::plain(
            StatusCode::TOO_MANY_REQUESTS,
            "rate_limit_error",
            format!("{waiting} requests are waiting, and no more may; try again later"),
        )
        .with_code("queue_full")
    }
}

async fn on_a_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        tracing::error!("a request's preparation failed: {error}");
        ApiError::plain(
            StatusCode::INTERNAL_SERVER_ERROR,
            "server_error",
            "the request could not be prepared",
        )
    })
}

fn refused_by_template(error: &EngineError) -> ApiError {
    match error {
        EngineError::Template(cause) => {
            let message = format!("the model's chat template refuses these messages: {cause}");
            ApiError::invalid("messages", message)
        }
        EngineError::Grammar(_) => ApiError::invalid("response_format", error.to_string()),
        other => ApiError::invalid("messages", other.to_string()),
    }
}

fn tokens(ready: &Ready, prompt: Prompt) -> Result<Vec<Token>, ApiError> {
    let fail = |message: String| ApiError::invalid("prompt", message);
    match prompt {
        Prompt::Text(text) => ready
            .model
            .tokenize(&text, ready.model.adds_bos(), true)
            .map_err(|e| fail(e.to_string())),
        Prompt::Tokens(tokens) => {
            let known = ready.model.vocabulary();
            let strange = tokens
                .iter()
                .find(|&&t| usize::try_from(t).map_or(true, |t| t >= known));
            match strange {
                None => Ok(tokens),
                Some(token) => Err(fail(format!(
                    "the vocabulary has no token {token}; it has {known}"
                ))),
            }
        }
    }
}

/// A generation that was asked for.
struct Wanted {
    id: String,
    common: Common,
    prompt: Vec<Token>,
    constraint: Option<Constraint>,
    once: Option<String>,
    shown: Vec<Token>,
    likelihoods: Option<u8>,
}

async fn respond(
    app: &App,
    ready: &Ready,
    wanted: Wanted,
    writer: Box<dyn Writer>,
) -> Result<Response, ApiError> {
    let most = most(app, ready, &wanted)?;
    let stream = wanted.common.stream;
    let (output, events) = mpsc::unbounded_channel();
    let gone = Arc::new(Gone::default());
    let queued = Instant::now();
    let job = Job {
        id: wanted.id,
        prompt: wanted.prompt,
        sampling: wanted.common.sampling,
        constraint: wanted.constraint,
        stops: wanted.common.stops,
        once: wanted.once,
        shown: wanted.shown,
        most,
        likelihoods: wanted.likelihoods,
        reuse: wanted.common.reuse,
        deadline: app.limits.generation.map(|limit| queued + limit),
        queued,
        gone: Arc::clone(&gone),
        output,
    };
    app.queue.offer(job).map_err(|refusal| match refusal {
        Refusal::Full { waiting } => crowded(app, waiting),
        Refusal::Closed => ApiError::unavailable("the server is shutting down", 5),
    })?;
    let waiter = Waiter { events, gone };
    if stream {
        let chunks = Chunks::new(waiter, writer);
        let alive = KeepAlive::new().interval(KEEP_ALIVE);
        return Ok(Sse::new(chunks).keep_alive(alive).into_response());
    }
    let whole = waiter.whole(writer).await?;
    Ok(axum::Json(whole).into_response())
}

/// Tokens that may be generated: as many as were asked for, which must fit, or as many as fit.
fn most(app: &App, ready: &Ready, wanted: &Wanted) -> Result<u32, ApiError> {
    let prompt = wanted.prompt.len();
    let overflow = |message: String| {
        ApiError::invalid("messages", message).with_code("context_length_exceeded")
    };
    if prompt == 0 {
        return Err(ApiError::invalid("prompt", "the prompt has no tokens"));
    }
    let n_ctx = ready.n_ctx;
    if prompt >= n_ctx {
        return Err(overflow(format!(
            "the prompt has {prompt} tokens, and the context holds {n_ctx}, the answer included"
        )));
    }
    let room = u32::try_from(n_ctx - prompt).unwrap_or(u32::MAX);
    let cap = app.limits.tokens.unwrap_or(u32::MAX);
    match wanted.common.most {
        None => Ok(room.min(cap)),
        Some(most) if most > cap => Err(ApiError::invalid(
            "max_tokens",
            format!("`max_tokens` is {most}, and this server generates at most {cap}"),
        )),
        Some(most) if most > room => Err(overflow(format!(
            "the prompt has {prompt} tokens and {most} more were asked for, and the context holds {n_ctx}"
        ))),
        Some(most) => Ok(most),
    }
}

fn new_id(prefix: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let random = RandomState::new().hash_one(NEXT.fetch_add(1, Relaxed));
    format!("{prefix}-{random:016x}")
}
