//! A loaded model: weights mapped from the file, vocabulary and chat template.

use super::chat::{Chat, ChatRequest};
use super::{Device, EngineError, Placement, log, mapping};
use crate::time::nanos;
use llama_cpp_4::llama_backend::LlamaBackend;
use llama_cpp_4::model::{AddBos, LlamaModel, Special};
use llama_cpp_4::token::LlamaToken;
use llama_cpp_sys_4 as sys;
use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::time::Instant;

/// A vocabulary entry's id.
pub type Token = i32;

/// llama.cpp's process-wide backend, initialised on first use.
pub(super) fn backend() -> &'static LlamaBackend {
    static BACKEND: OnceLock<LlamaBackend> = OnceLock::new();
    BACKEND.get_or_init(|| {
        log::install();
        #[expect(
            clippy::expect_used,
            reason = "fails only when initialised twice, which OnceLock excludes"
        )]
        LlamaBackend::init().expect("llama.cpp's backend is initialised once")
    })
}

/// A model whose weights are a shared, read-only mapping of its file.
#[derive(Debug)]
pub struct Model {
    pub(super) inner: LlamaModel,
    placement: Placement,
    device: Option<Device>,
    load_ns: u64,
}

impl Model {
    /// Maps a model as [`Self::load`] does, without reading it: what is used is read when it is used,
    /// or fetched by a store.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn open(path: &Path, progress: impl FnMut(f32) -> bool) -> Result<Self, EngineError> {
        Self::open_placed(path, Placement::default(), progress)
    }

    /// The same with some weights on a device, which are read for that.
    ///
    /// # Errors
    /// As [`Self::load_placed`].
    pub fn open_placed(
        path: &Path,
        placement: Placement,
        progress: impl FnMut(f32) -> bool,
    ) -> Result<Self, EngineError> {
        mapping::on_demand(|| Self::load_placed(path, placement, progress))
    }

    /// Maps and loads a model, without weight repacking (repacked weights would leave the mapping).
    /// llama.cpp reads the whole file meanwhile.
    ///
    /// `progress` is told the fraction done and returns `false` to stop.
    ///
    /// # Errors
    /// [`EngineError::Load`] with llama.cpp's last words.
    pub fn load(path: &Path, progress: impl FnMut(f32) -> bool) -> Result<Self, EngineError> {
        Self::load_placed(path, Placement::default(), progress)
    }

    /// The same with some weights on the first graphics device. Without any, no device is used.
    ///
    /// # Errors
    /// [`EngineError::NoDevice`] before anything is read, or as [`Self::load`].
    pub fn load_placed(
        path: &Path,
        placement: Placement,
        progress: impl FnMut(f32) -> bool,
    ) -> Result<Self, EngineError> {
        Self::load_parts(path, placement, false, progress)
    }

    /// A model's vocabulary and metadata alone: what texts are turned into tokens with, without weights.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn open_words(path: &Path) -> Result<Self, EngineError> {
        Self::load_parts(path, Placement::default(), true, |_| true)
    }

    fn load_parts(
        path: &Path,
        placement: Placement,
        words_alone: bool,
        mut progress: impl FnMut(f32) -> bool,
    ) -> Result<Self, EngineError> {
        let _ = backend();
        let began = Instant::now();
        let device = placement.uses_device().then(Device::first).transpose()?;
        log::forget();
        let fail = |detail: String| EngineError::Load {
            path: path.display().to_string(),
            detail,
        };
        let c_path = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| fail("the path contains a NUL byte".into()))?;
        let mut report: &mut dyn FnMut(f32) -> bool = &mut progress;
        // SAFETY: no preconditions.
        let mut params = unsafe { sys::llama_model_default_params() };
        params.load_mode = sys::LLAMA_LOAD_MODE_MMAP;
        params.use_extra_bufts = false;
        params.vocab_only = words_alone;
        params.n_gpu_layers = placement.count();
        // llama.cpp uses every device for large batches unless it is told of none.
        let mut devices = [
            device.map_or(std::ptr::null_mut(), Device::as_ptr),
            std::ptr::null_mut(),
        ];
        params.devices = devices.as_mut_ptr();
        let overrides = Overrides::new(&placement, device);
        params.tensor_buft_overrides = overrides.as_ptr();
        params.progress_callback = Some(on_progress);
        params.progress_callback_user_data = (&raw mut report).cast::<c_void>();
        // SAFETY: `c_path` is NUL-terminated; lists of devices and overrides end with null and, like
        // `report`, outlive the call, which is the only time at which they are read and it is run.
        let raw = unsafe { sys::llama_model_load_from_file(c_path.as_ptr(), params) };
        let raw = NonNull::new(raw).ok_or_else(|| fail(log::recent()))?;
        // SAFETY: `LlamaModel` is `repr(transparent)` over `NonNull<llama_model>` in the exactly
        // pinned llama-cpp-4, owns the pointer and frees it on drop. The wrapper has no way to set
        // `use_extra_bufts`, which is why the model is loaded here.
        let inner = unsafe { std::mem::transmute::<NonNull<sys::llama_model>, LlamaModel>(raw) };
        // SAFETY: the model is alive for as long as `inner`.
        if !unsafe { generates(raw) } {
            return Err(fail(
                "this model embeds or ranks texts and does not go on with them; use llama.cpp's own embedding server for it".into(),
            ));
        }
        Ok(Self {
            inner,
            placement,
            device,
            load_ns: nanos(began.elapsed()),
        })
    }

    /// Time that loading took, ns.
    #[must_use]
    pub const fn load_ns(&self) -> u64 {
        self.load_ns
    }

    /// What of the weights is where.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The device that some of the weights are on.
    #[must_use]
    pub fn device(&self) -> Option<Device> {
        self.device
    }

    /// Tokens of `text`. `special` turns the vocabulary's control words into control tokens.
    ///
    /// # Errors
    /// [`EngineError::Tokenize`].
    pub fn tokenize(
        &self,
        text: &str,
        bos: bool,
        special: bool,
    ) -> Result<Vec<Token>, EngineError> {
        let add = if bos { AddBos::Always } else { AddBos::Never };
        let special = if special {
            Special::Tokenize
        } else {
            Special::Plaintext
        };
        self.inner
            .str_to_token_with_special(text, add, special)
            .map(|tokens| tokens.into_iter().map(|t| t.0).collect())
            .map_err(|e| EngineError::Tokenize(e.to_string()))
    }

    /// Whether the vocabulary asks for a begin-of-sequence token in front of plain text.
    #[must_use]
    pub fn adds_bos(&self) -> bool {
        self.inner.add_bos_token()
    }

    /// Raw bytes of a token; one character may need several tokens. Control tokens are empty.
    ///
    /// # Errors
    /// [`EngineError::Detokenize`].
    pub fn token_bytes(&self, token: Token) -> Result<Vec<u8>, EngineError> {
        self.inner
            .token_to_raw_bytes(LlamaToken(token), Special::Plaintext)
            .map_err(|e| EngineError::Detokenize {
                token,
                detail: e.to_string(),
            })
    }

    /// Raw bytes of a token, control tokens as they are written in the vocabulary.
    ///
    /// # Errors
    /// [`EngineError::Detokenize`].
    pub fn token_bytes_shown(&self, token: Token) -> Result<Vec<u8>, EngineError> {
        self.inner
            .token_to_raw_bytes(LlamaToken(token), Special::Tokenize)
            .map_err(|e| EngineError::Detokenize {
                token,
                detail: e.to_string(),
            })
    }

    /// Tokens that the model was trained to attend to at once.
    #[must_use]
    pub fn trained_context(&self) -> u32 {
        self.inner.n_ctx_train()
    }

    /// Whether the token ends the generation.
    #[must_use]
    pub fn is_end(&self, token: Token) -> bool {
        self.inner.is_eog_token(LlamaToken(token))
    }

    /// A token that any sequence may begin with; used to warm up.
    #[must_use]
    pub fn first_token(&self) -> Token {
        let bos = self.inner.token_bos().0;
        if bos >= 0 { bos } else { 0 }
    }

    /// Entries in the vocabulary.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        usize::try_from(self.inner.n_vocab()).unwrap_or(0)
    }

    /// Tokens of one user message in the model's own chat template, ready for the answer.
    ///
    /// # Errors
    /// [`EngineError::Template`] when the model has none or it does not render.
    pub fn chat_tokens(&self, system: Option<&str>, user: &str) -> Result<Vec<Token>, EngineError> {
        let mut messages = Vec::new();
        if let Some(system) = system {
            messages.push(serde_json::json!({"role": "system", "content": system}));
        }
        messages.push(serde_json::json!({"role": "user", "content": user}));
        let request = ChatRequest {
            messages: serde_json::Value::Array(messages),
            ..ChatRequest::default()
        };
        Ok(Chat::new(self, None)?.render(self, &request)?.tokens)
    }
}

/// A placement's patterns as llama.cpp reads them: a list that ends with an empty entry.
struct Overrides {
    /// What the list's patterns point to.
    _patterns: Vec<CString>,
    list: Vec<sys::llama_model_tensor_buft_override>,
}

impl Overrides {
    fn new(placement: &Placement, device: Option<Device>) -> Self {
        // SAFETY: no preconditions.
        let host = unsafe { sys::ggml_backend_cpu_buffer_type() };
        let there = device.map_or(host, |device| {
            // SAFETY: a device lives as long as the process.
            unsafe { sys::ggml_backend_dev_buffer_type(device.as_ptr()) }
        });
        let (patterns, kinds): (Vec<CString>, Vec<_>) = placement
            .patterns()
            .into_iter()
            .filter_map(|(pattern, on_device)| {
                let pattern = CString::new(pattern).ok()?;
                Some((pattern, if on_device { there } else { host }))
            })
            .unzip();
        let entry = |pattern, buft| sys::llama_model_tensor_buft_override { pattern, buft };
        let mut list: Vec<_> = patterns
            .iter()
            .zip(kinds)
            .map(|(pattern, kind)| entry(pattern.as_ptr(), kind))
            .collect();
        list.push(entry(std::ptr::null(), std::ptr::null_mut()));
        Self {
            _patterns: patterns,
            list,
        }
    }

    /// Null where nothing is overridden.
    fn as_ptr(&self) -> *const sys::llama_model_tensor_buft_override {
        if self.list.len() == 1 {
            std::ptr::null()
        } else {
            self.list.as_ptr()
        }
    }
}

/// Whether a model computes logits for a next token: those that pool the states of a whole text do
/// not, unless they are made of one that does and read from left to right.
///
/// # Safety
/// The model must be alive.
unsafe fn generates(model: NonNull<sys::llama_model>) -> bool {
    let value = |key: &str| {
        let key = CString::new(key).ok()?;
        let mut text = [0_u8; 64];
        // SAFETY: the model by the caller; key and buffer are valid for the call, which writes no more
        // than the buffer holds and ends it with NUL.
        let length = unsafe {
            sys::llama_model_meta_val_str(
                model.as_ptr(),
                key.as_ptr(),
                text.as_mut_ptr().cast(),
                text.len(),
            )
        };
        let length = usize::try_from(length).ok()?.min(text.len() - 1);
        String::from_utf8(text[..length].to_vec()).ok()
    };
    let Some(architecture) = value("general.architecture") else {
        return true;
    };
    let pooling = value(&format!("{architecture}.pooling_type"));
    let causal = value(&format!("{architecture}.attention.causal"));
    match pooling.as_deref() {
        None | Some("0" | "-1") => true,
        Some(RANKS) => false,
        Some(_) => causal.as_deref() != Some("false"),
    }
}

/// `LLAMA_POOLING_TYPE_RANK` in metadata.
const RANKS: &str = "4";

unsafe extern "C" fn on_progress(fraction: f32, user_data: *mut c_void) -> bool {
    // SAFETY: `user_data` is the `&mut dyn FnMut` of `Model::load`, alive for the load.
    let report = unsafe { &mut *user_data.cast::<&mut dyn FnMut(f32) -> bool>() };
    // An unwind must not cross the C++ frames above us; a panicking reporter stops the load.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| report(fraction))).unwrap_or(false)
}
