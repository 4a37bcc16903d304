//! Recording a session: every token's routing, in the format that `hotpin-sim` replays.

use crate::model::ModelMap;
use hotpin_controllers::ModelShape;
use hotpin_controllers::trace::{Phase, TraceEncoder, TraceError, TraceHeader};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Why a recording could not be started.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file could not be created.
    #[error("trace {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The model does not fit the format.
    #[error("trace {path}: {source}")]
    Format {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: TraceError,
    },
}

/// Writes a trace as the engine routes. A failing disk ends the recording, never the session.
#[derive(Debug)]
pub struct Recorder {
    path: PathBuf,
    shape: ModelShape,
    /// `None` after a failure.
    encoder: Option<TraceEncoder>,
    file: File,
    phase: Phase,
    tokens: usize,
    /// For each layer of the micro-batch: its routed experts, token by token in slot order.
    layers: Vec<Vec<u32>>,
    row: Vec<u32>,
}

impl Recorder {
    /// Starts a recording of `map`'s routing into a new file.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn create(path: &Path, map: &ModelMap) -> Result<Self, RecordError> {
        let header = TraceHeader {
            model: map.name().to_owned(),
            shape: map.shape().clone(),
            dense_bytes: map.dense_bytes(),
        };
        let encoder = TraceEncoder::new(&header)
            .map_err(|source| RecordError::Format { path: path.to_owned(), source })?;
        let file = File::create(path)
            .map_err(|source| RecordError::Io { path: path.to_owned(), source })?;
        Ok(Self {
            path: path.to_owned(),
            shape: map.shape().clone(),
            encoder: Some(encoder),
            file,
            phase: Phase::Decode,
            tokens: 0,
            layers: vec![Vec::new(); map.shape().layers()],
            row: Vec::new(),
        })
    }

    /// One layer of a micro-batch: `experts` are indices in the layer, token by token.
    pub fn routed(&mut self, layer: usize, experts: &[i32], tokens: usize) {
        if layer == 0 {
            self.end_batch();
            self.tokens = tokens;
            self.phase = if tokens == 1 { Phase::Decode } else { Phase::Prefill };
        }
        let first = self.shape.id(layer, 0).0;
        self.layers[layer].clear();
        self.layers[layer].extend(experts.iter().map(|&e| first + u32::try_from(e).unwrap_or(0)));
    }

    /// Ends the micro-batch: its tokens are written.
    pub fn end_batch(&mut self) {
        let tokens = std::mem::take(&mut self.tokens);
        for token in 0..tokens {
            self.row.clear();
            for layer in &self.layers {
                let k = layer.len() / tokens;
                self.row.extend(layer.get(token * k..(token + 1) * k).unwrap_or_default());
            }
            let Some(encoder) = &mut self.encoder else { return };
            if let Err(error) = encoder.push(self.phase, &self.row) {
                self.give_up(&error);
                return;
            }
        }
        if let Some(encoder) = &mut self.encoder {
            let bytes = encoder.take();
            if let Err(error) = self.file.write_all(&bytes) {
                self.give_up(&error);
            }
        }
    }

    fn give_up(&mut self, error: &dyn std::fmt::Display) {
        tracing::error!("trace {}: {error}; the recording ends here", self.path.display());
        self.encoder = None;
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.end_batch();
        if let Some(encoder) = self.encoder.take() {
            let bytes = encoder.finish();
            if let Err(error) = self.file.write_all(&bytes) {
                self.give_up(&error);
            }
        }
    }
}
