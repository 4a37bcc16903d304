//! OpenAI's HTTP interface: what requests may say and what responses look like.

mod chat_request;
mod completion_request;
mod delta;
mod error;
mod fields;
mod sampling;
mod writer;

pub use chat_request::ChatCall;
pub use completion_request::{CompletionCall, Prompt};
pub use delta::Deltas;
pub use error::ApiError;
pub use sampling::Common;
pub use writer::{ChatWriter, Head, TextWriter, Writer};
