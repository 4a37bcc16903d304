//! A request's JSON object, read field by field so that every refusal names its field and nothing is
//! overlooked.

use super::error::ApiError;
use serde_json::{Map, Value};

/// Fields that have not been read yet.
#[derive(Debug)]
pub struct Fields(Map<String, Value>);

/// Parses a body as a JSON object.
///
/// # Errors
/// When it is no JSON or no object.
pub fn parse(body: &[u8]) -> Result<Fields, ApiError> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(map)) => Ok(Fields(map)),
        Ok(_) => Err(bad_body("the body must be a JSON object".into())),
        Err(error) => Err(bad_body(format!("the body is not valid JSON: {error}"))),
    }
}

fn bad_body(message: String) -> ApiError {
    ApiError::plain(
        axum::http::StatusCode::BAD_REQUEST,
        "invalid_request_error",
        message,
    )
}

impl Fields {
    /// The fields of an object inside the body.
    #[must_use]
    pub fn of(map: Map<String, Value>) -> Self {
        Self(map)
    }

    /// Takes a field; `null` counts as absent.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    /// Takes a number within bounds.
    ///
    /// # Errors
    /// When it is none or out of bounds.
    pub fn number(&mut self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        value
            .as_f64()
            .filter(|n| (least..=most).contains(n))
            .map(Some)
            .ok_or_else(|| {
                let message =
                    format!("`{name}` must be a number from {least} to {most}, not {value}");
                ApiError::invalid(name, message)
            })
    }

    /// Takes a whole number within bounds.
    ///
    /// # Errors
    /// When it is none or out of bounds.
    pub fn integer(&mut self, name: &str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        value
            .as_u64()
            .filter(|n| (least..=most).contains(n))
            .map(Some)
            .ok_or_else(|| {
                let message =
                    format!("`{name}` must be a whole number from {least} to {most}, not {value}");
                ApiError::invalid(name, message)
            })
    }

    /// Takes a truth value.
    ///
    /// # Errors
    /// When it is none.
    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(ApiError::invalid(
                name,
                format!("`{name}` must be true or false, not {other}"),
            )),
        }
    }

    /// Takes a text.
    ///
    /// # Errors
    /// When it is none.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(_) => Err(ApiError::invalid(
                name,
                format!("`{name}` must be a string"),
            )),
        }
    }

    /// Takes a field that may only have the values at which it does nothing.
    ///
    /// # Errors
    /// When it has another.
    pub fn neutral(&mut self, name: &str, values: &[Value]) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !values.iter().any(|neutral| same(neutral, &value)) => Err(
                ApiError::unsupported(name, format!("`{name}` is not supported by this server")),
            ),
            _ => Ok(()),
        }
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// When a field is left: this server does not know it.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.0.into_iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::unsupported(
                &name,
                format!("`{name}` is not supported by this server"),
            )),
        }
    }
}

/// Equal, numbers by value: 0 and 0.0 are the same.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a.to_bits() == b.to_bits() || (a == 0.0 && b == 0.0),
        _ => a == b,
    }
}
