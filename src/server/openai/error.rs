//! Errors as OpenAI's clients understand them.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An error response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// OpenAI's class of the error.
    pub kind: &'static str,
    /// What was wrong, where, and what to do.
    pub message: String,
    /// The parameter.
    pub param: Option<String>,
    /// A word for programs.
    pub code: Option<&'static str>,
    /// Seconds after which to try again.
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    /// A request that makes no sense.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::plain(StatusCode::BAD_REQUEST, "invalid_request_error", message)
        }
    }

    /// Any error without further marks.
    pub fn plain(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            message: message.into(),
            param: None,
            code: None,
            retry_after_s: None,
        }
    }

    /// The same with a word for programs.
    #[must_use]
    pub fn with_code(self, code: &'static str) -> Self {
        Self {
            code: Some(code),
            ..self
        }
    }

    /// A parameter that this server does not know or cannot do.
    pub fn unsupported(param: &str, message: impl Into<String>) -> Self {
        Self::invalid(param, message).with_code("unsupported_parameter")
    }

    /// The server cannot serve now.
    pub fn unavailable(message: impl Into<String>, retry_after_s: u32) -> Self {
        Self {
            retry_after_s: Some(retry_after_s),
            ..Self::plain(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
        }
    }

    /// The JSON body.
    #[must_use]
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
