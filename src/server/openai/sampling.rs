//! Parameters that both kinds of completion share.

use super::error::ApiError;
use super::fields::Fields;
use crate::engine::SamplerOptions;
use serde_json::{Value, json};
use std::hash::{BuildHasher, RandomState};

/// Most stop texts of a request, and bytes of one.
const MOST_STOPS: usize = 16;
const MOST_STOP_BYTES: usize = 1024;

/// What both kinds of completion have in common.
#[derive(Debug, Clone, PartialEq)]
pub struct Common {
    /// The model asked for.
    pub model: Option<String>,
    /// How tokens are chosen.
    pub sampling: SamplerOptions,
    /// Most tokens to generate, when said.
    pub most: Option<u32>,
    /// Texts that end the output.
    pub stops: Vec<String>,
    /// Whether to send the output as it comes.
    pub stream: bool,
    /// Whether a stream ends with the usage.
    pub include_usage: bool,
    /// Whether what is in the context already may be used.
    pub reuse: bool,
}

impl Common {
    /// Takes the shared fields.
    ///
    /// # Errors
    /// When one has a value that it cannot have, or asks for what this server cannot do.
    pub fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        refuse_the_unsupported(fields)?;
        let model = fields.text("model")?;
        let sampling = sampling(fields)?;
        let limits = [
            fields.integer("max_tokens", 1, u64::from(u32::MAX))?,
            fields.integer("max_completion_tokens", 1, u64::from(u32::MAX))?,
        ];
        let most = limits[1]
            .or(limits[0])
            .map(|most| u32::try_from(most).unwrap_or(u32::MAX));
        let stops = stops(fields.take("stop"))?;
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let include_usage = stream_options(fields, stream)?;
        let reuse = fields.boolean("cache_prompt")?.unwrap_or(true);
        Ok(Self {
            model,
            sampling,
            most,
            stops,
            stream,
            include_usage,
            reuse,
        })
    }
}

fn refuse_the_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    // Marks for the provider's own books; they change nothing in the answer.
    for name in ["user", "safety_identifier", "prompt_cache_key", "metadata"] {
        let _ = fields.take(name);
    }
    let neutral: [(&str, &[Value]); 5] = [
        ("n", &[json!(1)]),
        ("frequency_penalty", &[json!(0)]),
        ("presence_penalty", &[json!(0)]),
        ("logit_bias", &[json!({})]),
        ("store", &[json!(false)]),
    ];
    for (name, values) in neutral {
        fields.neutral(name, values)?;
    }
    fields.neutral("service_tier", &[json!("auto"), json!("default")])
}

#[expect(clippy::cast_possible_truncation, reason = "samplers take f32")]
fn sampling(fields: &mut Fields) -> Result<SamplerOptions, ApiError> {
    let usual = SamplerOptions::default();
    let top_p = fields.number("top_p", 0.0, 1.0)?.map(|n| n as f32);
    if top_p == Some(0.0) {
        return Err(ApiError::invalid("top_p", "`top_p` must be above 0"));
    }
    Ok(SamplerOptions {
        temperature: fields
            .number("temperature", 0.0, 2.0)?
            .map_or(usual.temperature, |n| n as f32),
        top_p: top_p.unwrap_or(usual.top_p),
        top_k: fields
            .integer("top_k", 0, 1 << 20)?
            .map_or(usual.top_k, |n| n as u32),
        min_p: fields
            .number("min_p", 0.0, 1.0)?
            .map_or(usual.min_p, |n| n as f32),
        seed: seed(fields)?,
    })
}

/// The seed given, folded to 32 bits, or another one each time.
#[expect(clippy::cast_possible_truncation, reason = "both halves are used")]
fn seed(fields: &mut Fields) -> Result<u32, ApiError> {
    let Some(value) = fields.take("seed") else {
        return Ok(RandomState::new().hash_one(0) as u32);
    };
    let given = value.as_i64().ok_or_else(|| {
        ApiError::invalid(
            "seed",
            format!("`seed` must be a whole number, not {value}"),
        )
    })?;
    let bits = given.cast_unsigned();
    Ok(bits as u32 ^ (bits >> 32) as u32)
}

fn stops(value: Option<Value>) -> Result<Vec<String>, ApiError> {
    let fail = |message: String| ApiError::invalid("stop", message);
    let stops = match value {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => stops
            .into_iter()
            .map(|stop| match stop {
                Value::String(stop) => Ok(stop),
                other => Err(fail(format!("`stop` holds {other}, which is no string"))),
            })
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(fail("`stop` must be a string or a list of strings".into())),
    };
    if stops.len() > MOST_STOPS {
        return Err(fail(format!("`stop` holds more than {MOST_STOPS} texts")));
    }
    if stops.iter().any(String::is_empty) {
        return Err(fail("a stop text must not be empty".into()));
    }
    if stops.iter().any(|stop| stop.len() > MOST_STOP_BYTES) {
        return Err(fail(format!(
            "a stop text is longer than {MOST_STOP_BYTES} bytes"
        )));
    }
    Ok(stops)
}

fn stream_options(fields: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    let name = "stream_options";
    let Some(value) = fields.take(name) else {
        return Ok(false);
    };
    if !stream {
        return Err(ApiError::invalid(
            name,
            "`stream_options` needs `stream` to be true",
        ));
    }
    let Value::Object(map) = value else {
        return Err(ApiError::invalid(
            name,
            "`stream_options` must be an object",
        ));
    };
    let mut options = Fields::of(map);
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    options.neutral("include_obfuscation", &[json!(false)])?;
    options.finish()?;
    Ok(include_usage)
}
