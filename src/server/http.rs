//! Routes, who may use them, and the connections that they come in on.

use super::app::{App, Phase};
use super::openai::ApiError;
use super::queue::End;
use super::watchdog::tell;
use super::{api, completions, events, metrics};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use sd_notify::NotifyState;
use serde_json::json;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_io_timeout::TimeoutStream;
use tower_http::cors::{AllowHeaders, AllowMethods, CorsLayer};

/// The page at `/`: everything it needs is in it.
const PAGE: &str = include_str!("dashboard.html");
/// Bytes of a request's head.
const MOST_HEAD_BYTES: usize = 64 << 10;
/// Time that connections get to end after the engine has.
const FAREWELL: Duration = Duration::from_secs(3);
/// Wait after a connection could not be taken, so that a lack of files does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// All routes.
pub(super) fn router(app: Arc<App>, origins: &[HeaderValue]) -> Router {
    let router = Router::new()
        .route("/v1/chat/completions", post(completions::chat))
        .route("/v1/completions", post(completions::complete))
        .route("/v1/models", get(completions::models))
        .route("/v1/models/{name}", get(completions::model))
        .route("/metrics", get(exposition))
        .route("/api/state", get(api::state))
        .route("/api/events", get(events::events))
        .route("/api/journal", get(api::journal))
        .route("/api/explain/{layer}/{expert}", get(api::explain))
        .route("/api/control/pause", post(api::pause))
        .route("/api/control/resume", post(api::resume))
        .route("/api/control/capacity", post(api::capacity))
        .route("/health", get(health))
        .route("/", get(page))
        .fallback(nothing_here)
        .method_not_allowed_fallback(not_that_way)
        .layer(middleware::from_fn_with_state(Arc::clone(&app), guard))
        .with_state(app);
    if origins.is_empty() {
        return router;
    }
    let cors = CorsLayer::new()
        .allow_origin(origins.to_vec())
        .allow_methods(AllowMethods::list([Method::GET, Method::POST]))
        .allow_headers(AllowHeaders::list([
            header::AUTHORIZATION,
            header::CONTENT_TYPE,
        ]));
    router.layer(cors)
}

async fn page() -> Response {
    let mut response = Html(PAGE).into_response();
    let headers = response.headers_mut();
    let policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    headers.insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(policy),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

async fn health(State(app): State<Arc<App>>) -> Response {
    let (status, word) = match app.phase() {
        Phase::Ready(_) => (StatusCode::OK, "ok"),
        Phase::Loading { .. } => (StatusCode::SERVICE_UNAVAILABLE, "loading"),
        Phase::Stopping => (StatusCode::SERVICE_UNAVAILABLE, "stopping"),
    };
    (status, Json(json!({"status": word}))).into_response()
}

async fn exposition(State(app): State<Arc<App>>) -> Response {
    let kind = HeaderValue::from_static(metrics::CONTENT_TYPE);
    ([(header::CONTENT_TYPE, kind)], metrics::exposition(&app)).into_response()
}

async fn nothing_here(request: Request) -> ApiError {
    let message = format!("there is nothing at {}", request.uri().path());
    ApiError::plain(StatusCode::NOT_FOUND, "invalid_request_error", message)
}

async fn not_that_way(request: Request) -> ApiError {
    let message = format!(
        "{} cannot be used at {}",
        request.method(),
        request.uri().path()
    );
    ApiError::plain(
        StatusCode::METHOD_NOT_ALLOWED,
        "invalid_request_error",
        message,
    )
}

/// Lets a request pass, or says why not.
async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match allowed(
        &app,
        request.method(),
        request.uri().path(),
        request.headers(),
    ) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn allowed(app: &App, method: &Method, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
    if path == "/health" || path == "/" {
        return Ok(());
    }
    let control = path.starts_with("/api/control/");
    match &app.key {
        Some(key) => {
            let given = headers
                .get(header::AUTHORIZATION)
                .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
            if !given.is_some_and(|given| key.is(given)) {
                return Err(ApiError::plain(
                    StatusCode::UNAUTHORIZED,
                    "authentication_error",
                    "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                )
                .with_code("invalid_api_key"));
            }
        }
        None if control => {
            return Err(forbidden(
                "controls need an API key; start the server with --api-key",
            ));
        }
        None => {
            // Without a key, a page from elsewhere could reach a server on this machine by a name
            // that it lets point here.
            let host = headers.get(header::HOST).and_then(|h| h.to_str().ok());
            if app.loopback && !host.is_none_or(names_this_machine) {
                return Err(forbidden(
                    "without an API key this server answers to localhost and to addresses only",
                ));
            }
        }
    }
    // A page from elsewhere may send other content types without asking first.
    if method == Method::POST && !control_without_body(path) && !is_json(headers) {
        return Err(ApiError::plain(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            "the body must be JSON: send `Content-Type: application/json`",
        ));
    }
    Ok(())
}

/// These have no body, and need the key anyway.
fn control_without_body(path: &str) -> bool {
    matches!(path, "/api/control/pause" | "/api/control/resume")
}

fn forbidden(message: &str) -> ApiError {
    ApiError::plain(StatusCode::FORBIDDEN, "permission_error", message)
}

fn is_json(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split(';').next())
        .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

/// Whether a `Host` header is `localhost` or an address, with or without a port.
fn names_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(""),
        None => match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => host,
        },
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

/// Accepts connections until `stop`, then lets them end.
pub(super) async fn serve(
    listener: TcpListener,
    router: Router,
    app: Arc<App>,
    mut stop: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(app.limits.connections));
    let graceful = GracefulShutdown::new();
    loop {
        let place = tokio::select! {
            place = Arc::clone(&places).acquire_owned() => place,
            _ = stop.wait_for(|&stop| stop) => break,
        };
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!("a connection could not be taken: {error}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            _ = stop.wait_for(|&stop| stop) => break,
        };
        // Tokens are small; waiting to fill a packet would only delay them.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(app.limits.send));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(app.limits.receive)
            .max_buf_size(MOST_HEAD_BYTES)
            .serve_connection(
                TokioIo::new(Box::pin(stream)),
                TowerToHyperService::new(router.clone()),
            );
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // A client's mistakes are its own; what is wrong here is logged where it happens.
            let _ = connection.await;
            drop(place);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(app.limits.drain + FAREWELL, graceful.shutdown()).await;
}

/// Waits for the signals that end the server: the first lets what runs finish, in bounded time, the
/// second does not.
pub(super) async fn end_on_signal(app: Arc<App>, stop: watch::Sender<bool>) -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    tracing::info!("stopping: what runs may finish");
    app.enter(Phase::Stopping);
    app.queue.close(End::Drained);
    tell(&[NotifyState::Stopping]);
    stop.send_replace(true);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        () = tokio::time::sleep(app.limits.drain) => {}
    }
    app.queue.close(End::Now);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{allowed, names_this_machine};
    use crate::server::app::{App, Key, Limits};
    use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};

    fn app(key: Option<&str>) -> App {
        App::new("m".into(), key.map(Key::new), true, Limits::default())
    }

    fn status(
        app: &App,
        method: &Method,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Option<StatusCode> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let name = header::HeaderName::from_bytes(name.as_bytes()).expect("name");
            map.insert(name, HeaderValue::from_str(value).expect("value"));
        }
        allowed(app, method, path, &map).err().map(|e| e.status)
    }

    const JSON: (&str, &str) = ("content-type", "application/json; charset=utf-8");

    #[test]
    fn a_key_is_needed_everywhere_but_for_health_and_the_page() {
        let app = app(Some("k"));
        let paths = [
            "/v1/models",
            "/metrics",
            "/api/state",
            "/api/control/pause",
            "/x",
        ];
        for path in paths {
            let get = Method::GET;
            let unauthorized = Some(StatusCode::UNAUTHORIZED);
            assert_eq!(status(&app, &get, path, &[]), unauthorized, "{path}");
            let wrong = [("authorization", "Bearer kk")];
            assert_eq!(status(&app, &get, path, &wrong), unauthorized, "{path}");
            let bare = [("authorization", "k")];
            assert_eq!(status(&app, &get, path, &bare), unauthorized, "{path}");
            let right = [("authorization", "Bearer k")];
            assert_eq!(status(&app, &get, path, &right), None, "{path}");
        }
        for path in ["/health", "/"] {
            assert_eq!(status(&app, &Method::GET, path, &[]), None);
        }
    }

    #[test]
    fn without_a_key_controls_are_closed_and_foreign_names_turned_away() {
        let app = app(None);
        let post = Method::POST;
        let closed = Some(StatusCode::FORBIDDEN);
        assert_eq!(status(&app, &post, "/api/control/pause", &[JSON]), closed);
        assert_eq!(status(&app, &post, "/v1/completions", &[JSON]), None);
        let evil = [JSON, ("host", "evil.example:8080")];
        assert_eq!(status(&app, &post, "/v1/completions", &evil), closed);
    }

    #[test]
    fn bodies_that_a_foreign_page_may_send_unasked_are_refused() {
        let app = app(None);
        for kind in ["text/plain", "application/x-www-form-urlencoded"] {
            let refused = status(
                &app,
                &Method::POST,
                "/v1/completions",
                &[("content-type", kind)],
            );
            assert_eq!(refused, Some(StatusCode::UNSUPPORTED_MEDIA_TYPE), "{kind}");
        }
        let bare = status(&app, &Method::POST, "/v1/completions", &[]);
        assert_eq!(bare, Some(StatusCode::UNSUPPORTED_MEDIA_TYPE));
    }

    #[test]
    fn hosts_are_told_apart() {
        for host in [
            "localhost",
            "LOCALHOST:80",
            "127.0.0.1:8080",
            "[::1]:8080",
            "[::1]",
            "10.0.0.1",
        ] {
            assert!(names_this_machine(host), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.nip.io:80",
            "",
            "[x]",
        ] {
            assert!(!names_this_machine(host), "{host}");
        }
    }
}
