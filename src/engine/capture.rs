//! Runs a model over token windows and hands out the rows of one kind of tensor, layer by layer.

mod context;
mod tap;

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use llama_cpp_sys_4 as sys;

use context::{Batch, Context};
use tap::Tap;

/// Tokens evaluated at once. ggml's kernels depend on the batch width, so that it is fixed: equal
/// windows give equal rows.
pub const BATCH_TOKENS: usize = 128;

/// Threads of one evaluation. One never waits for another at a barrier, which on a busy machine takes
/// most of the time; callers evaluate several windows at once instead.
const THREADS: i32 = 1;

/// Why a capture failed.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// llama.cpp does not load the model.
    #[error("llama.cpp cannot load {path}")]
    Load {
        /// The model.
        path: PathBuf,
    },
    /// llama.cpp gives no context for the model, usually for lack of memory.
    #[error("llama.cpp cannot make a context of {tokens} tokens")]
    Context {
        /// Length of the context in tokens.
        tokens: usize,
    },
    /// The text does not tokenise.
    #[error("llama.cpp cannot tokenise a text of {bytes} bytes")]
    Tokenise {
        /// Length of the text.
        bytes: usize,
    },
    /// A window is empty, longer than the context, or holds a token outside the vocabulary.
    #[error("a window of {found} tokens does not fit: {limit} tokens of vocabulary {vocabulary}")]
    Window {
        /// Tokens in the window.
        found: usize,
        /// Most tokens that a window may have.
        limit: usize,
        /// Tokens in the vocabulary.
        vocabulary: i32,
    },
    /// `llama_decode` failed.
    #[error("llama.cpp failed to evaluate a batch of {tokens} tokens (code {code})")]
    Decode {
        /// Tokens in the batch.
        tokens: usize,
        /// What `llama_decode` returned.
        code: i32,
    },
    /// The graph has no such tensor for a layer, or it is not made of rows in memory.
    #[error("tensor {name} is missing from the graph, or is not rows of 32-bit values in memory")]
    Tensor {
        /// The tensor looked for.
        name: String,
    },
    /// The receiver of the rows gave up.
    #[error("the receiver of captured rows failed: {0}")]
    Sink(#[source] std::io::Error),
    /// The receiver of the rows panicked.
    #[error("the receiver of captured rows panicked")]
    Panicked,
}

/// One captured row: the values of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Row<'a> {
    /// 32-bit floats, such as hidden states.
    Floats(&'a [f32]),
    /// 32-bit integers, such as routed expert ids.
    Ints(&'a [i32]),
}

/// Receives (layer, position in the window, row).
pub type Sink<'a> = dyn FnMut(usize, usize, Row<'_>) -> std::io::Result<()> + 'a;

/// A loaded model, without a context.
#[derive(Debug)]
pub struct CaptureModel {
    model: NonNull<sys::llama_model>,
}

// SAFETY: llama.cpp does not change a loaded model: contexts and tokenisers on any thread only read
// it, and freeing it needs `&mut`.
unsafe impl Send for CaptureModel {}
// SAFETY: as above.
unsafe impl Sync for CaptureModel {}

impl Drop for CaptureModel {
    fn drop(&mut self) {
        // SAFETY: this is the only owner, and contexts borrow it, so none is left.
        unsafe { sys::llama_model_free(self.model.as_ptr()) }
    }
}

impl CaptureModel {
    /// Maps the model at `path`.
    ///
    /// # Errors
    /// When llama.cpp refuses it.
    pub fn load(path: &Path) -> Result<Self, CaptureError> {
        use std::os::unix::ffi::OsStrExt;
        let _ = super::model::backend();
        let failed = || CaptureError::Load {
            path: path.to_owned(),
        };
        let c_path = CString::new(path.as_os_str().as_bytes()).map_err(|_| failed())?;
        // SAFETY: the path is NUL-terminated; the default parameters are valid and borrow nothing.
        let raw = unsafe {
            let mut params = sys::llama_model_default_params();
            params.load_mode = sys::LLAMA_LOAD_MODE_MMAP;
            params.use_extra_bufts = false;
            params.n_gpu_layers = 0;
            sys::llama_model_load_from_file(c_path.as_ptr(), params)
        };
        Ok(Self {
            model: NonNull::new(raw).ok_or_else(failed)?,
        })
    }

    /// Layers of the model.
    #[must_use]
    pub fn layers(&self) -> usize {
        // SAFETY: the model is live.
        usize::try_from(unsafe { sys::llama_model_n_layer(self.model.as_ptr()) }).unwrap_or(0)
    }

    /// Tokens of `text`, without special tokens.
    ///
    /// # Errors
    /// When the text is longer than llama.cpp can take.
    pub fn tokenise(&self, text: &str) -> Result<Vec<i32>, CaptureError> {
        let failed = || CaptureError::Tokenise { bytes: text.len() };
        let mut tokens = vec![0i32; text.len() + 16];
        // A negative count says how much room is needed: a vocabulary of bytes can take several
        // tokens for a space.
        let needed = self.tokenise_into(text, &mut tokens).ok_or_else(failed)?;
        if needed < 0 {
            tokens.resize(
                usize::try_from(needed.unsigned_abs()).map_err(|_| failed())?,
                0,
            );
        }
        let count = if needed < 0 {
            self.tokenise_into(text, &mut tokens)
        } else {
            Some(needed)
        };
        let count = count
            .and_then(|count| usize::try_from(count).ok())
            .ok_or_else(failed)?;
        tokens.truncate(count);
        Ok(tokens)
    }

    /// Tokens written to `out`, or the negative of the room needed; `None` when a length does not
    /// fit llama.cpp's integers.
    fn tokenise_into(&self, text: &str, out: &mut [i32]) -> Option<i32> {
        let bytes = i32::try_from(text.len()).ok()?;
        let room = i32::try_from(out.len()).ok()?;
        // SAFETY: the vocabulary belongs to the live model; `text` has `bytes` bytes and `out` room
        // for `room` tokens.
        let count = unsafe {
            let vocab = sys::llama_model_get_vocab(self.model.as_ptr());
            let text = text.as_ptr().cast();
            sys::llama_tokenize(vocab, text, bytes, out.as_mut_ptr(), room, false, false)
        };
        Some(count)
    }

    /// Evaluates `window` in an empty context of `context_tokens` and gives `sink` every token's row
    /// of each tensor `<prefix>-<layer>`.
    ///
    /// Evaluation stops after the last layer's tensor, so that neither its FFN nor the output
    /// matrix is computed.
    ///
    /// # Errors
    /// When the window does not fit, llama.cpp fails, a layer has no such tensor or the sink fails.
    pub fn capture(
        &self,
        prefix: &str,
        context_tokens: usize,
        window: &[i32],
        sink: &mut Sink<'_>,
    ) -> Result<(), CaptureError> {
        self.check(window, context_tokens)?;
        let tap = Tap::new(prefix, self.layers(), sink);
        let mut context = Context::new(self, context_tokens, tap)?;
        let mut batch = Batch::new();
        for (piece, tokens) in window.chunks(BATCH_TOKENS).enumerate() {
            let first_position = piece * BATCH_TOKENS;
            context.tap().begin(first_position);
            batch.fill(tokens, first_position);
            let code = context.decode(&batch);
            context.tap().finish(tokens.len())?;
            if code != 0 {
                return Err(CaptureError::Decode {
                    tokens: tokens.len(),
                    code,
                });
            }
        }
        Ok(())
    }

    fn check(&self, window: &[i32], limit: usize) -> Result<(), CaptureError> {
        // SAFETY: the model is live, and so is the vocabulary that it owns.
        let vocabulary =
            unsafe { sys::llama_vocab_n_tokens(sys::llama_model_get_vocab(self.model.as_ptr())) };
        let known = window.iter().all(|token| (0..vocabulary).contains(token));
        if window.is_empty() || window.len() > limit || !known {
            return Err(CaptureError::Window {
                found: window.len(),
                limit,
                vocabulary,
            });
        }
        Ok(())
    }
}
