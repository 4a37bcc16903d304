//! From a job's events to a response: as a stream of server-sent events, or as a whole.

use super::job::{Event, Failure, Gone};
use super::openai::{ApiError, Writer};
use axum::http::StatusCode;
use axum::response::sse;
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_stream::Stream;

/// The receiving end of a job. When it is dropped, the engine's thread stops working on the job.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) events: UnboundedReceiver<Event>,
    pub(super) gone: Arc<Gone>,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.gone.set();
    }
}

impl Waiter {
    /// Waits for the end and writes the whole response.
    pub(super) async fn whole(mut self, mut writer: Box<dyn Writer>) -> Result<Value, ApiError> {
        while let Some(event) = self.events.recv().await {
            match event {
                Event::Piece(piece) => writer.add(piece),
                Event::Done(done) => return Ok(writer.whole(&done)),
                Event::Failed(failure) => return Err(told(&failure)),
            }
        }
        Err(told(&Failure::Shutdown))
    }
}

/// What a client is told of a failure.
fn told(failure: &Failure) -> ApiError {
    let message = failure.to_string();
    match failure {
        Failure::Grammar(_) => ApiError::invalid("response_format", message),
        Failure::Shutdown => ApiError::unavailable(message, 5),
        Failure::Deadline => ApiError::plain(StatusCode::GATEWAY_TIMEOUT, "server_error", message)
            .with_code("timeout"),
        Failure::Engine(_) => {
            ApiError::plain(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
        }
    }
}

/// Server-sent events of a job.
pub(super) struct Chunks {
    waiter: Waiter,
    writer: Box<dyn Writer>,
    ready: VecDeque<String>,
    ended: bool,
}

impl Chunks {
    pub(super) fn new(waiter: Waiter, mut writer: Box<dyn Writer>) -> Self {
        let ready = writer.begin().iter().map(Value::to_string).collect();
        Self {
            waiter,
            writer,
            ready,
            ended: false,
        }
    }

    fn on(&mut self, event: Option<Event>) {
        let chunks = match event {
            Some(Event::Piece(piece)) => self.writer.piece(&piece),
            Some(Event::Done(done)) => {
                self.ended = true;
                self.writer.done(&done)
            }
            Some(Event::Failed(failure)) => {
                self.ended = true;
                vec![told(&failure).body()]
            }
            None => {
                self.ended = true;
                vec![told(&Failure::Shutdown).body()]
            }
        };
        self.ready.extend(chunks.iter().map(Value::to_string));
        if self.ended {
            self.ready.push_back("[DONE]".into());
        }
    }
}

impl Stream for Chunks {
    type Item = Result<sse::Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(data) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(sse::Event::default().data(data))));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            let event = ready!(self.waiter.events.poll_recv(context));
            self.on(event);
        }
    }
}
