//! `/api/*`: the state of the loop as JSON, and the few controls on it.

use super::app::{App, Phase, Ready};
use super::body::read_body;
use super::explain;
use super::openai::ApiError;
use super::stats::Finished;
use super::tick::tick;
use crate::governor::Monitor;
use crate::size::{parse_size, total_ram_bytes};
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Journal entries of a page, when the request does not say, and at most.
const PAGE: usize = 100;
const MOST_PAGE: usize = 1000;

/// `GET /api/state`
pub(super) async fn state(State(app): State<Arc<App>>) -> Response {
    axum::Json(whole_state(&app)).into_response()
}

fn whole_state(app: &App) -> Value {
    let (phase, loading, ready) = match app.phase() {
        Phase::Loading { step, fraction } => (
            "loading",
            Some(json!({"step": step, "fraction": fraction})),
            None,
        ),
        Phase::Ready(ready) => ("ready", None, Some(ready)),
        Phase::Stopping => ("stopping", None, None),
    };
    let layers = ready.as_deref().map(layers);
    let recent: Vec<Finished> = app.stats.recent();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "phase": phase,
        "loading": loading,
        "model": ready.as_ref().map(|ready| &ready.info),
        "layers": layers,
        "controls": app.key.is_some(),
        "now": tick(app, true),
        "recent_requests": recent,
    })
}

/// One object a MoE layer, in the order of the expert map.
fn layers(ready: &Ready) -> Value {
    let Some(shape) = &ready.shape else {
        return json!([]);
    };
    (0..shape.layers())
        .map(|layer| {
            json!({
                "block": ready.blocks.get(layer),
                "experts": shape.experts_in(layer),
                "top_k": shape.top_k_in(layer),
                "expert_bytes": shape.layer_expert_bytes(layer),
            })
        })
        .collect()
}

/// Which part of the journal is wanted.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct JournalQuery {
    before: Option<u64>,
    limit: Option<usize>,
}

/// `GET /api/journal`
pub(super) async fn journal(
    State(app): State<Arc<App>>,
    query: Result<Query<JournalQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(query) = query.map_err(|e| ApiError::invalid("query", e.body_text()))?;
    let limit = query.limit.unwrap_or(PAGE);
    if !(1..=MOST_PAGE).contains(&limit) {
        return Err(ApiError::invalid(
            "limit",
            format!("`limit` must be a whole number from 1 to {MOST_PAGE}, not {limit}"),
        ));
    }
    let ready = app.ready()?;
    let page = monitor(&ready)?.page(query.before, limit);
    let first = page.entries.first().map(|(number, _)| *number);
    let entries: Vec<Value> = page
        .entries
        .iter()
        .map(|(number, entry)| json!({"number": number, "entry": entry}))
        .collect();
    let earlier = first.filter(|&first| first > page.oldest);
    Ok(axum::Json(json!({"entries": entries, "before": earlier})).into_response())
}

/// `GET /api/explain/{layer}/{expert}`
pub(super) async fn explain(
    State(app): State<Arc<App>>,
    Path((layer, expert)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let ready = app.ready()?;
    let monitor = monitor(&ready)?;
    let explained = explain::explain(&ready, monitor, &layer, &expert)?;
    Ok(axum::Json(explained).into_response())
}

fn monitor(ready: &Ready) -> Result<&Monitor, ApiError> {
    ready.monitor.as_ref().ok_or_else(|| {
        ApiError::plain(
            StatusCode::NOT_FOUND,
            "invalid_request_error",
            "nothing is regulated here: the policy is `off` or the model is dense",
        )
        .with_code("not_regulated")
    })
}

/// The monitor of a loop that still runs: an order to one that has ended would be taken in silence.
fn steerable(ready: &Ready) -> Result<&Monitor, ApiError> {
    let monitor = monitor(ready)?;
    match monitor.status().failed {
        Some(why) => Err(
            ApiError::plain(StatusCode::CONFLICT, "invalid_request_error", why)
                .with_code("loop_ended"),
        ),
        None => Ok(monitor),
    }
}

/// `POST /api/control/pause` and `/resume`
pub(super) async fn pause(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    set_paused(&app, true)
}

/// See [`pause`].
pub(super) async fn resume(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    set_paused(&app, false)
}

fn set_paused(app: &App, paused: bool) -> Result<Response, ApiError> {
    let ready = app.ready()?;
    steerable(&ready)?.pause(paused);
    tracing::info!("control was {}", if paused { "paused" } else { "resumed" });
    Ok(axum::Json(json!({"paused": paused})).into_response())
}

/// The body of a request that sets capacity.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CapacityOrder {
    /// Bytes, or a size such as `8GiB` or `40%`, or `null` for no ceiling.
    bytes: Value,
}

/// `POST /api/control/capacity`
pub(super) async fn capacity(
    State(app): State<Arc<App>>,
    body: Body,
) -> Result<Response, ApiError> {
    let ready = app.ready()?;
    let monitor = steerable(&ready)?;
    let body = read_body(&app, body).await?;
    let bad = |message: String| ApiError::invalid("bytes", message);
    let order: CapacityOrder = serde_json::from_slice(&body.bytes)
        .map_err(|e| bad(format!("the body must be {{\"bytes\": ...}}: {e}")))?;
    let bytes = match &order.bytes {
        Value::Null => None,
        Value::Number(number) => Some(
            number
                .as_u64()
                .ok_or_else(|| bad(format!("{number} is no number of bytes")))?,
        ),
        Value::String(text) => {
            let total = total_ram_bytes();
            Some(parse_size(text, total).map_err(|e| bad(e.to_string()))?)
        }
        other => return Err(bad(format!("{other} is no size"))),
    };
    monitor.limit_capacity(bytes);
    tracing::info!("capacity was limited to {bytes:?} bytes");
    Ok(axum::Json(json!({"bytes": bytes})).into_response())
}
