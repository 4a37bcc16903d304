//! Reading requests' bodies within bounds: bytes of one, bytes of all, and time.

use super::app::App;
use super::openai::ApiError;
use axum::body::{Body, BodyDataStream};
use axum::http::StatusCode;
use tokio::sync::SemaphorePermit;
use tokio_stream::StreamExt;

/// A body that is too long is read on, and thrown away, up to this many times the limit: a client that
/// is cut off while it writes may not read the answer.
const PATIENCE: usize = 4;

/// A body, and its share of what all bodies may take.
#[derive(Debug)]
pub(super) struct Received<'a> {
    pub(super) bytes: Vec<u8>,
    _share: Option<SemaphorePermit<'a>>,
}

/// Reads a body.
///
/// # Errors
/// 413 when it is too long, 408 when it takes too long, 503 when others take all the room there is.
pub(super) async fn read_body(app: &App, body: Body) -> Result<Received<'_>, ApiError> {
    match tokio::time::timeout(app.limits.receive, read(app, body.into_data_stream())).await {
        Ok(received) => received,
        Err(_) => Err(refused(
            StatusCode::REQUEST_TIMEOUT,
            "the body took too long to arrive",
        )),
    }
}

async fn read(app: &App, mut stream: BodyDataStream) -> Result<Received<'_>, ApiError> {
    let limit = app.limits.body_bytes;
    let mut received = Received {
        bytes: Vec::new(),
        _share: None,
    };
    while let Some(part) = stream.next().await {
        let part =
            part.map_err(|_| refused(StatusCode::BAD_REQUEST, "the body could not be read"))?;
        if received.bytes.len() + part.len() > limit {
            drop(received);
            throw_away(stream, limit.saturating_mul(PATIENCE)).await;
            return Err(refused(
                StatusCode::PAYLOAD_TOO_LARGE,
                &format!("the body is longer than {limit} bytes"),
            ));
        }
        let share = u32::try_from(part.len())
            .ok()
            .and_then(|bytes| app.bodies.try_acquire_many(bytes).ok())
            .ok_or_else(|| ApiError::unavailable("too many long requests at once", 5))?;
        match &mut received._share {
            Some(all) => all.merge(share),
            none => *none = Some(share),
        }
        received.bytes.extend_from_slice(&part);
    }
    Ok(received)
}

async fn throw_away(mut stream: BodyDataStream, mut most: usize) {
    while let Some(Ok(part)) = stream.next().await {
        most = most.saturating_sub(part.len());
        if most == 0 {
            return;
        }
    }
}

fn refused(status: StatusCode, message: &str) -> ApiError {
    ApiError::plain(status, "invalid_request_error", message)
}
