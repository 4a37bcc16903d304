//! A client of a running server: `/api/*` as JSON, and its events as they come.

use super::wire::{State, Tick};
use serde::de::DeserializeOwned;
use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

/// Time for a connection to be made.
const CONNECT: Duration = Duration::from_secs(5);
/// Time for an answer to a question; events come as long as the server runs.
const ANSWER: Duration = Duration::from_secs(30);
/// Longest answer, and longest line of an event, bytes. Every expert takes two.
const MOST_BYTES: u64 = 64 << 20;

/// Why a server did not answer as hoped.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// It cannot be reached.
    #[error("no server answers at {url}: {why}; --server names another one")]
    Unreachable {
        /// Where it was sought.
        url: String,
        /// Why not.
        why: String,
    },
    /// It wants another key.
    #[error("the server at {url} wants its API key: give --api-key or --api-key-file")]
    Key {
        /// The server.
        url: String,
    },
    /// It refused.
    #[error("{message}")]
    Refused {
        /// HTTP's status.
        status: u16,
        /// What it said.
        message: String,
    },
    /// It is something else than a hotpin server, or of another version.
    #[error("{url} does not answer as hotpin does: {why}")]
    Foreign {
        /// What was asked.
        url: String,
        /// What is wrong.
        why: String,
    },
}

/// A server's address and key.
#[derive(Clone)]
pub struct Client {
    base: String,
    key: Option<String>,
    agent: ureq::Agent,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the key.
        f.debug_tuple("Client").field(&self.base).finish()
    }
}

impl Client {
    /// A client of the server at `base`, such as `http://127.0.0.1:8080`.
    #[must_use]
    pub fn new(base: &str, key: Option<String>) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(ANSWER))
            .http_status_as_error(false)
            .build();
        Self {
            base: base.trim_end_matches('/').to_owned(),
            key,
            agent: config.into(),
        }
    }

    /// Where the server is.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Whether there is a key to send.
    #[must_use]
    pub fn has_key(&self) -> bool {
        self.key.is_some()
    }

    /// The whole state.
    ///
    /// # Errors
    /// [`ClientError`], see there.
    pub fn state(&self) -> Result<State, ClientError> {
        self.get("/api/state")
    }

    /// A JSON document.
    ///
    /// # Errors
    /// [`ClientError`], see there.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let url = format!("{}{path}", self.base);
        let request = self.agent.get(&url);
        let response = self.authorized(request).call();
        self.read(&url, response)
    }

    /// An order without a body.
    ///
    /// # Errors
    /// [`ClientError`], see there.
    pub fn order(&self, path: &str) -> Result<serde_json::Value, ClientError> {
        let url = format!("{}{path}", self.base);
        let request = self.agent.post(&url);
        let response = self.authorized(request).send_empty();
        self.read(&url, response)
    }

    fn authorized<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match &self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        }
    }

    fn unreachable(&self, why: &dyn std::fmt::Display) -> ClientError {
        ClientError::Unreachable {
            url: self.base.clone(),
            why: why.to_string(),
        }
    }

    fn read<T: DeserializeOwned>(
        &self,
        url: &str,
        response: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<T, ClientError> {
        let response = self.accepted(response)?;
        let mut text = String::new();
        response
            .into_body()
            .into_reader()
            .take(MOST_BYTES)
            .read_to_string(&mut text)
            .map_err(|error| self.unreachable(&error))?;
        serde_json::from_str(&text).map_err(|error| ClientError::Foreign {
            url: url.to_owned(),
            why: error.to_string(),
        })
    }

    /// A response that is no refusal.
    fn accepted(
        &self,
        response: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<ureq::http::Response<ureq::Body>, ClientError> {
        let response = response.map_err(|error| self.unreachable(&error))?;
        let status = response.status().as_u16();
        if response.status().is_success() {
            return Ok(response);
        }
        if status == 401 {
            return Err(ClientError::Key {
                url: self.base.clone(),
            });
        }
        let mut text = String::new();
        // What cannot be read leaves the status alone, which is said in any case.
        let _ = response
            .into_body()
            .into_reader()
            .take(1 << 16)
            .read_to_string(&mut text);
        let said: Option<serde_json::Value> = serde_json::from_str(&text).ok();
        let message = said
            .as_ref()
            .and_then(|said| said.pointer("/error/message")?.as_str())
            .map_or_else(|| format!("the server answers {status}"), str::to_owned);
        Err(ClientError::Refused { status, message })
    }

    /// Follows the server's events, with every expert, until the server or `tell` ends it: `tell` returns
    /// false when nobody listens any more.
    ///
    /// # Errors
    /// [`ClientError`]: the server could not be reached, or has gone away.
    pub fn follow(&self, tell: &mut dyn FnMut(Tick) -> bool) -> Result<(), ClientError> {
        let url = format!("{}/api/events?experts=true", self.base);
        let response = self.authorized(self.agent.get(&url)).call();
        let body = self.accepted(response)?.into_body();
        let mut lines = BufReader::new(body.into_reader());
        let mut line = String::new();
        loop {
            line.clear();
            let read = lines
                .by_ref()
                .take(MOST_BYTES)
                .read_line(&mut line)
                .map_err(|error| self.unreachable(&error))?;
            if read == 0 {
                return Err(self.unreachable(&"it has ended"));
            }
            let Some(data) = line.strip_prefix("data:") else {
                continue;
            };
            let tick = serde_json::from_str(data.trim()).map_err(|error| ClientError::Foreign {
                url: url.clone(),
                why: error.to_string(),
            })?;
            if !tell(tick) {
                return Ok(());
            }
        }
    }
}
