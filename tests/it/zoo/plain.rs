//! llama.cpp by its own C interface and nothing else: what stock is, without any code of hotpin's.

use llama_cpp_sys_4 as sys;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::ptr::NonNull;

/// Sizes of a context, equal for everybody who is compared.
pub const N_CTX: u32 = 256;

/// Tokens of a batch and of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Batches {
    pub batch: u32,
    pub ubatch: u32,
}

/// Routed experts that a tensor was multiplied by, in order, for one decode: by tensor name.
pub type Used = BTreeMap<String, Vec<i32>>;

/// A model and a context.
pub struct Plain {
    context: NonNull<sys::llama_context>,
    model: NonNull<sys::llama_model>,
    used: Option<Box<Used>>,
    position: i32,
    batches: Batches,
}

impl Plain {
    /// Loads a model; with `watched`, every expert that its graph multiplies by is noted.
    pub fn load(path: &Path, batches: Batches, watched: bool) -> Option<Self> {
        let path = CString::new(path.to_str().expect("UTF-8 path")).expect("no NUL");
        // SAFETY: the path is NUL-terminated; what is returned is checked, and owned from then on.
        let model = unsafe {
            let mut params = sys::llama_model_default_params();
            params.n_gpu_layers = 0;
            params.use_extra_bufts = false;
            NonNull::new(sys::llama_model_load_from_file(path.as_ptr(), params))?
        };
        let mut used = watched.then(Box::<Used>::default);
        // SAFETY: the model is alive, and the list that `watch` writes to outlives the context.
        let context = unsafe {
            let mut params = sys::llama_context_default_params();
            params.n_ctx = N_CTX;
            params.n_batch = batches.batch;
            params.n_ubatch = batches.ubatch;
            params.n_threads = 1;
            params.n_threads_batch = 1;
            params.kv_unified = false;
            if let Some(used) = &mut used {
                params.cb_eval = Some(watch);
                params.cb_eval_user_data = (&raw mut **used).cast::<c_void>();
            }
            sys::llama_init_from_model(model.as_ptr(), params)
        };
        let Some(context) = NonNull::new(context) else {
            // SAFETY: nothing else owns the model.
            unsafe { sys::llama_model_free(model.as_ptr()) };
            return None;
        };
        Some(Self {
            context,
            model,
            used,
            position: 0,
            batches,
        })
    }

    pub fn vocabulary(&self) -> usize {
        // SAFETY: the model is alive.
        let count =
            unsafe { sys::llama_vocab_n_tokens(sys::llama_model_get_vocab(self.model.as_ptr())) };
        usize::try_from(count).expect("not negative")
    }

    /// Empties the context.
    pub fn clear(&mut self) {
        // SAFETY: the context is alive.
        unsafe { sys::llama_memory_clear(sys::llama_get_memory(self.context.as_ptr()), true) };
        self.position = 0;
    }

    /// Decodes tokens after those before, in batches, and returns the last one's logits bit by bit.
    pub fn decode(&mut self, tokens: &[i32]) -> Option<Vec<u32>> {
        let rows = self.decode_rows(tokens, tokens.len() - 1)?;
        let last = rows.last().expect("a row");
        Some(last.iter().map(|logit| logit.to_bits()).collect())
    }

    /// The same, with the logits of each token from position `first` on.
    pub fn decode_rows(&mut self, tokens: &[i32], first: usize) -> Option<Vec<Vec<f32>>> {
        let size = self.batches.batch as usize;
        let mut rows = Vec::new();
        for (at, part) in tokens.chunks(size).enumerate() {
            let first = first.saturating_sub(at * size).min(part.len());
            self.decode_batch(part, first)?;
            for row in first..part.len() {
                rows.push(self.logits(row));
            }
        }
        Some(rows)
    }

    /// Logits of a token of the last batch, which asked for them.
    fn logits(&self, row: usize) -> Vec<f32> {
        let row = i32::try_from(row).expect("small");
        // SAFETY: llama.cpp returns one logit a vocabulary entry, or null.
        unsafe {
            let logits = sys::llama_get_logits_ith(self.context.as_ptr(), row);
            assert!(!logits.is_null(), "no logits");
            std::slice::from_raw_parts(logits, self.vocabulary()).to_vec()
        }
    }

    /// Decodes one batch and asks for the logits of its tokens from `first` on.
    fn decode_batch(&mut self, tokens: &[i32], first: usize) -> Option<()> {
        let count = i32::try_from(tokens.len()).expect("small");
        // SAFETY: the batch has room for as many tokens of one sequence, and is freed once.
        let result = unsafe {
            let mut batch = sys::llama_batch_init(count, 0, 1);
            batch.n_tokens = count;
            for (at, &token) in tokens.iter().enumerate() {
                *batch.token.add(at) = token;
                *batch.pos.add(at) = self.position + i32::try_from(at).expect("small");
                *batch.n_seq_id.add(at) = 1;
                **batch.seq_id.add(at) = 0;
                *batch.logits.add(at) = i8::from(at >= first);
            }
            let result = sys::llama_decode(self.context.as_ptr(), batch);
            sys::llama_synchronize(self.context.as_ptr());
            sys::llama_batch_free(batch);
            result
        };
        self.position += count;
        (result == 0).then_some(())
    }

    /// What was used since it was last asked.
    pub fn take_used(&mut self) -> Used {
        std::mem::take(self.used.as_mut().expect("watched"))
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // SAFETY: both are owned by this and freed once, the context first.
        unsafe {
            sys::llama_free(self.context.as_ptr());
            sys::llama_model_free(self.model.as_ptr());
        }
    }
}

/// Notes the indices of each multiplication by experts once it has been computed.
unsafe extern "C" fn watch(tensor: *mut sys::ggml_tensor, ask: bool, used: *mut c_void) -> bool {
    // SAFETY: ggml passes a node of the running graph, and back the list that `load` gave it.
    let (node, used) = unsafe { (&*tensor, &mut *used.cast::<Used>()) };
    if node.op != sys::GGML_OP_MUL_MAT_ID {
        return !ask;
    }
    if ask {
        return true;
    }
    // SAFETY: a multiplication by experts has these sources; all data is in host memory.
    let (name, indices) = unsafe {
        let name = CStr::from_ptr((*node.src[0]).name.as_ptr());
        (name.to_string_lossy().into_owned(), indices(&*node.src[2]))
    };
    used.entry(name).or_default().extend(indices);
    true
}

/// # Safety
/// `list` is a computed matrix of indices in host memory.
unsafe fn indices(list: &sys::ggml_tensor) -> Vec<i32> {
    let (width, rows) = (list.ne[0], list.ne[1]);
    let (width, rows) = (
        usize::try_from(width).expect("width"),
        usize::try_from(rows).expect("rows"),
    );
    (0..rows)
        .flat_map(|row| (0..width).map(move |at| row * list.nb[1] + at * list.nb[0]))
        // SAFETY: within the matrix.
        .map(|at| unsafe {
            list.data
                .cast::<u8>()
                .add(at)
                .cast::<i32>()
                .read_unaligned()
        })
        .collect()
}

/// Whether llama.cpp knows every tensor of a model, in name and shape. No tensor is read.
pub fn shapes_are_right(path: &Path) -> bool {
    let path = CString::new(path.to_str().expect("UTF-8 path")).expect("no NUL");
    // SAFETY: the path is NUL-terminated; the model is freed once.
    unsafe {
        let mut params = sys::llama_model_default_params();
        params.n_gpu_layers = 0;
        params.no_alloc = true;
        params.load_mode = sys::LLAMA_LOAD_MODE_NONE;
        params.use_extra_bufts = false;
        let model = sys::llama_model_load_from_file(path.as_ptr(), params);
        if model.is_null() {
            return false;
        }
        sys::llama_model_free(model);
    }
    true
}
