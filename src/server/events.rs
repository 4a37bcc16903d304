//! `/api/events`: a message a tick, as long as somebody listens.

use super::app::{App, Phase};
use super::openai::ApiError;
use super::tick::{ExpertMap, tick};
use axum::extract::{Query, State};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Interval;
use tokio_stream::{Stream, wrappers::WatchStream};

/// Time between messages where no governor ticks.
const IDLE_TICK: Duration = Duration::from_secs(1);

/// What `/api/events` may be asked.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct EventQuery {
    experts: bool,
}

/// `GET /api/events`
pub(super) async fn events(
    State(app): State<Arc<App>>,
    query: Result<Query<EventQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(query) = query.map_err(|e| ApiError::invalid("query", e.body_text()))?;
    let ticks = Ticks {
        app,
        with_experts: query.experts,
        last: None,
        source: None,
        failed: false,
    };
    Ok(Sse::new(ticks).keep_alive(KeepAlive::new()).into_response())
}

/// What makes the next message due.
enum Source {
    Governor(WatchStream<u64>),
    Clock(Interval),
}

/// Messages as long as the server runs.
struct Ticks {
    app: Arc<App>,
    with_experts: bool,
    last: Option<ExpertMap>,
    source: Option<Source>,
    /// The governor's loop has ended, and ticks no more.
    failed: bool,
}

impl Ticks {
    /// The governor's ticks while there are any, the clock's before and after.
    fn source(&mut self) -> &mut Source {
        let governed = matches!(self.source, Some(Source::Governor(_)));
        if self.failed {
            if governed {
                self.source = None;
            }
        } else if !governed
            && let Phase::Ready(ready) = self.app.phase()
            && let Some(monitor) = &ready.monitor
        {
            let ticks: watch::Receiver<u64> = monitor.ticks();
            self.source = Some(Source::Governor(WatchStream::new(ticks)));
        }
        self.source
            .get_or_insert_with(|| Source::Clock(tokio::time::interval(IDLE_TICK)))
    }

    fn message(&mut self) -> sse::Event {
        let mut tick = tick(&self.app, self.with_experts);
        self.failed = tick.failed.is_some();
        if tick.experts == self.last {
            tick.experts = None;
        } else {
            self.last.clone_from(&tick.experts);
        }
        let text = serde_json::to_string(&tick).unwrap_or_default();
        sse::Event::default().event("tick").data(text)
    }
}

impl Stream for Ticks {
    type Item = Result<sse::Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.app.stops() {
            return Poll::Ready(None);
        }
        let due = match self.source() {
            Source::Governor(ticks) => ready!(Pin::new(ticks).poll_next(context)).is_some(),
            Source::Clock(interval) => {
                ready!(interval.poll_tick(context));
                true
            }
        };
        Poll::Ready(due.then(|| Ok(self.message())))
    }
}
