//! What can go wrong while a demo model is built.

use std::path::PathBuf;

use crate::engine::capture::CaptureError;
use crate::engine::gguf_write::GgufError;
use crate::engine::quantize::QuantizeError;

/// Why no demo model was built. Nothing is left behind in the target's folder.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An option is out of range.
    #[error("{option} {value} is out of range: {expected}")]
    Option {
        /// The flag.
        option: &'static str,
        /// What was given.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// The target exists and may not be replaced.
    #[error("{path} exists already; give --force to replace it")]
    Exists {
        /// The target.
        path: PathBuf,
    },
    /// The target would replace the model that it is made from.
    #[error("{path} is the source model itself; choose another target")]
    SameFile {
        /// The target.
        path: PathBuf,
    },
    /// The source is not of the `llama` architecture.
    #[error(
        "{path}: architecture is {found}, but only dense llama models can be turned into a demo model"
    )]
    NotLlama {
        /// The source.
        path: PathBuf,
        /// Its `general.architecture`, or `not given`.
        found: String,
    },
    /// The source is a Mixture-of-Experts model.
    #[error("{path}: is a Mixture-of-Experts model already ({evidence}); give a dense one")]
    AlreadyMoe {
        /// The source.
        path: PathBuf,
        /// The key or tensor that says so.
        evidence: String,
    },
    /// The source is one part of several.
    #[error("{path}: is one of {parts} parts; merge them into one file first")]
    Split {
        /// The source.
        path: PathBuf,
        /// How many parts there are.
        parts: u32,
    },
    /// The source lacks a tensor or key that every dense llama model has.
    #[error("{path}: {name} is missing, so this is not a complete dense llama model")]
    Missing {
        /// The source.
        path: PathBuf,
        /// The tensor or key.
        name: String,
    },
    /// A tensor cannot be carried over into experts.
    #[error("{path}: tensor {name} {problem}")]
    Tensor {
        /// The source.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The source ends before its tensors do.
    #[error("{path}: truncated: tensor {name} ends at byte {end_bytes}, the file at {file_bytes}")]
    Truncated {
        /// The source.
        path: PathBuf,
        /// The first tensor that does not fit.
        name: String,
        /// Where it would end.
        end_bytes: u64,
        /// Where the file ends.
        file_bytes: u64,
    },
    /// The disk is too full.
    #[error(
        "{folder}: {needed_bytes} bytes are needed, but only {available_bytes} are free; \
         use fewer experts or another folder"
    )]
    Space {
        /// The target's folder.
        folder: PathBuf,
        /// Bytes needed.
        needed_bytes: u64,
        /// Bytes free to this user.
        available_bytes: u64,
    },
    /// The workload directory has no texts.
    #[error("{path}: no *.txt files to calibrate the routers on")]
    NoTexts {
        /// The directory.
        path: PathBuf,
    },
    /// There is too little text for so many experts.
    #[error(
        "the texts give {found} calibration tokens, but {experts} experts need {needed}; the \
         shortest text is {shortest} and every domain counts the same"
    )]
    TooLittleText {
        /// Usable tokens over all domains.
        found: usize,
        /// Tokens needed.
        needed: usize,
        /// Experts a layer.
        experts: u32,
        /// Domain with the fewest tokens.
        shortest: String,
    },
    /// The caller asked to stop.
    #[error("stopped before the model was complete; nothing was kept")]
    Cancelled,
    /// A file operation failed.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Evaluating the source model failed.
    #[error("calibration failed: {0}")]
    Capture(#[source] CaptureError),
    /// Reading or composing a header failed.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Converting rows failed.
    #[error(transparent)]
    Quantize(#[from] QuantizeError),
}

impl Error {
    /// Wraps an I/O error with the path that it is about.
    pub(super) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}
