//! `hotpin serve`: HTTP on one thread, the engine on another, a bounded queue between them.
#![forbid(unsafe_code)]

mod api;
mod app;
mod body;
mod completions;
mod degraded;
mod descriptors;
mod events;
mod explain;
mod http;
mod job;
mod metrics;
mod moves;
pub mod openai;
mod queue;
mod scheduler;
mod slot;
mod stats;
mod stream;
mod tick;
mod watchdog;

pub use app::{App, Key, Limits, ModelInfo, Phase, Ready};
pub use descriptors::make_room;
pub use moves::{Due, Load, Lost, Moves};
pub use queue::{End, Queue};
pub use scheduler::{Desk, Scheduler, Stopped};
pub use stats::Stats;
pub use watchdog::tell;

use axum::http::HeaderValue;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::sync::watch;

/// Threads that render and tokenise prompts.
const BLOCKING_THREADS: usize = 2;

/// The HTTP side, on its own thread.
#[derive(Debug)]
pub struct Http {
    thread: Option<JoinHandle<()>>,
    stop: watch::Sender<bool>,
}

/// Why the HTTP side could not be started.
#[derive(Debug, thiserror::Error)]
#[error("the HTTP server could not be started: {0}")]
pub struct HttpError(#[from] std::io::Error);

impl Http {
    /// Serves on `listener` until a signal or [`Http::stop`]. Pages of `origins` may use the
    /// interface, others may not.
    ///
    /// # Errors
    /// When the runtime or its thread cannot be made.
    pub fn start(
        app: &Arc<App>,
        listener: TcpListener,
        origins: &[HeaderValue],
    ) -> Result<Self, HttpError> {
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS)
            .build()?;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let (stop, stopped) = watch::channel(false);
        let router = http::router(Arc::clone(app), origins);
        let (app, stop_on_signal) = (Arc::clone(app), stop.clone());
        let thread = std::thread::Builder::new()
            .name("hotpin-http".into())
            .spawn(move || {
                runtime.block_on(async move {
                    let signals = http::end_on_signal(Arc::clone(&app), stop_on_signal);
                    tokio::spawn(async move {
                        if let Err(error) = signals.await {
                            tracing::error!("signals cannot be waited for: {error}");
                        }
                    });
                    tokio::spawn(watchdog::keep(Arc::clone(&app)));
                    tokio::spawn(watchdog::end_when_halted(Arc::clone(&app)));
                    http::serve(listener, router, app, stopped).await;
                });
            })?;
        Ok(Self {
            thread: Some(thread),
            stop,
        })
    }

    /// Takes no more connections and waits for those that there are.
    pub fn stop(mut self) {
        self.join();
    }

    fn join(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            // A panic of a handler ends its connection, one of the thread is in the log.
            let _ = thread.join();
        }
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        self.join();
    }
}
