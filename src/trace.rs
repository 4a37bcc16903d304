//! Recording a session: every token's routing, where prompts begin, and what the governor saw and
//! decided, in the format that `hotpin-sim` replays.

use crate::engine::{Pass, Routed};
use crate::model::ModelMap;
use hotpin_controllers::trace::{Phase, Tick, TraceEncoder, TraceError, TraceHeader};
use hotpin_controllers::{Decision, ModelShape, Observation};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};

/// Ticks that wait for the next token. Those of an engine that decodes nothing for longer are left out.
const MOST_TICKS: usize = 1024;

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

/// What other threads, and whoever begins prompts, have to say in a recording. The engine's thread
/// writes it before its next token, and never waits for it.
#[derive(Clone, Debug)]
pub struct Recording {
    prompts: Sender<String>,
    ticks: SyncSender<Box<Tick>>,
}

impl Recording {
    /// The tokens that follow belong to a new prompt.
    pub fn prompt(&self, label: impl Into<String>) {
        // A recording that has ended takes no notes.
        let _ = self.prompts.send(label.into());
    }

    /// One tick of the governor.
    pub fn tick(&self, observation: &Observation<'_>, decision: &Decision) {
        let _ = self
            .ticks
            .try_send(Box::new(Tick::new(observation, decision)));
    }
}

/// Writes a trace as the engine routes. A failing disk ends the recording, never the session.
///
/// llama.cpp does not compute the last layer for prompt tokens whose logits nobody wants. A trace
/// has every layer of every token, so those tokens are left out of it.
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
    recording: Recording,
    prompts: Receiver<String>,
    ticks: Receiver<Box<Tick>>,
}

impl Recorder {
    /// Starts a recording of `map`'s routing into a new file.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn create(path: &Path, map: &ModelMap) -> Result<Self, RecordError> {
        let header = TraceHeader {
            model: map.name().to_owned(),
            architecture: map.architecture().to_owned(),
            shape: map.shape().clone(),
            dense_bytes: map.dense_bytes(),
        };
        let encoder = TraceEncoder::new(&header).map_err(|source| RecordError::Format {
            path: path.to_owned(),
            source,
        })?;
        let file = File::create(path).map_err(|source| RecordError::Io {
            path: path.to_owned(),
            source,
        })?;
        let (told_prompts, prompts) = mpsc::channel();
        let (told_ticks, ticks) = mpsc::sync_channel(MOST_TICKS);
        Ok(Self {
            recording: Recording {
                prompts: told_prompts,
                ticks: told_ticks,
            },
            prompts,
            ticks,
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

    /// Where the rest of what is recorded comes in.
    #[must_use]
    pub fn recording(&self) -> Recording {
        self.recording.clone()
    }

    /// One layer of a micro-batch.
    pub fn routed(&mut self, layer: usize, routed: &Routed<'_>) {
        if layer == 0 {
            self.end_batch();
            // A layer of which nothing is wanted is not heard of again in this micro-batch.
            self.layers.iter_mut().for_each(Vec::clear);
            self.tokens = routed.tokens;
            self.phase = if routed.pass == Pass::Next {
                Phase::Decode
            } else {
                Phase::Prefill
            };
        }
        let first = self.shape.id(layer, 0).0;
        let ids = routed
            .experts
            .iter()
            .map(|&e| first + u32::try_from(e).unwrap_or(0));
        self.layers[layer].extend(ids);
    }

    /// Forgets the micro-batch: its decode failed.
    pub fn abandon_batch(&mut self) {
        self.tokens = 0;
    }

    /// Ends the micro-batch: those of its tokens that every layer routed are written. They are its
    /// last ones, since only the last token's logits are asked for, or every token's.
    pub fn end_batch(&mut self) {
        self.take_notes();
        let tokens = std::mem::take(&mut self.tokens);
        let top_k = |layer: usize| self.shape.top_k_in(layer) as usize;
        let rows = |layer: usize| self.layers[layer].len() / top_k(layer).max(1);
        let whole = (0..self.layers.len())
            .map(rows)
            .min()
            .unwrap_or(0)
            .min(tokens);
        for from_end in (1..=whole).rev() {
            self.row.clear();
            for (layer, ids) in self.layers.iter().enumerate() {
                let k = self.shape.top_k_in(layer) as usize;
                let at = ids.len() - from_end * k;
                self.row.extend_from_slice(&ids[at..at + k]);
            }
            let Some(encoder) = &mut self.encoder else {
                return;
            };
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

    /// Writes what was said since the last batch: it goes before this one's tokens.
    fn take_notes(&mut self) {
        let Some(encoder) = &mut self.encoder else {
            return;
        };
        let ticks = self.ticks.try_iter().map(|tick| encoder.tick(&tick));
        let mut written: Result<(), TraceError> = ticks.collect();
        for label in self.prompts.try_iter() {
            written = written.and_then(|()| encoder.prompt(&label));
        }
        if let Err(error) = written {
            self.give_up(&error);
        }
    }

    fn give_up(&mut self, error: &dyn std::fmt::Display) {
        tracing::error!(
            "trace {}: {error}; the recording ends here",
            self.path.display()
        );
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
