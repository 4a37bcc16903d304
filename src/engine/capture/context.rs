//! A llama.cpp context whose graphs report to a tap, and the batch that feeds it.

use std::marker::PhantomData;
use std::ptr::NonNull;

use llama_cpp_sys_4 as sys;

use super::tap::{Tap, on_tensor};
use super::{BATCH_TOKENS, CaptureError, CaptureModel, THREADS};

/// One context with the tap that it owns.
pub(super) struct Context<'m, 'a, 's> {
    context: NonNull<sys::llama_context>,
    tap: NonNull<Tap<'a, 's>>,
    model: PhantomData<&'m CaptureModel>,
}

impl<'m, 'a, 's> Context<'m, 'a, 's> {
    pub(super) fn new(
        model: &'m CaptureModel,
        tokens: usize,
        tap: Tap<'a, 's>,
    ) -> Result<Self, CaptureError> {
        let failed = || CaptureError::Context { tokens };
        let n_ctx = u32::try_from(tokens).map_err(|_| failed())?;
        let n_batch = u32::try_from(BATCH_TOKENS).map_err(|_| failed())?;
        let tap = NonNull::from(Box::leak(Box::new(tap)));
        // SAFETY: the default parameters are valid; the callback gets the tap that it expects,
        // which `Drop` frees after the context; the model outlives `self`.
        let raw = unsafe {
            let mut params = sys::llama_context_default_params();
            params.n_ctx = n_ctx;
            params.n_batch = n_batch;
            params.n_ubatch = n_batch;
            params.n_threads = THREADS;
            params.n_threads_batch = THREADS;
            params.cb_eval = Some(on_tensor);
            params.cb_eval_user_data = tap.as_ptr().cast();
            sys::llama_init_from_model(model.model.as_ptr(), params)
        };
        let Some(context) = NonNull::new(raw) else {
            // SAFETY: the tap was leaked above, and no context knows it.
            drop(unsafe { Box::from_raw(tap.as_ptr()) });
            return Err(failed());
        };
        Ok(Self {
            context,
            tap,
            model: PhantomData,
        })
    }

    /// The tap, between decodes.
    pub(super) fn tap(&mut self) -> &mut Tap<'a, 's> {
        // SAFETY: the tap is owned by `self`, and the callback uses it only within `decode`, which
        // borrows `self` too.
        unsafe { self.tap.as_mut() }
    }

    /// Evaluates the batch; returns llama.cpp's code, 0 for success.
    pub(super) fn decode(&mut self, batch: &Batch) -> i32 {
        // SAFETY: the context is live, and the batch's arrays hold `n_tokens` filled entries.
        unsafe { sys::llama_decode(self.context.as_ptr(), batch.0) }
    }
}

impl Drop for Context<'_, '_, '_> {
    fn drop(&mut self) {
        // SAFETY: `self` owns both; the context, whose callback knows the tap, goes first.
        unsafe {
            sys::llama_free(self.context.as_ptr());
            drop(Box::from_raw(self.tap.as_ptr()));
        }
    }
}

/// A batch with room for [`BATCH_TOKENS`] tokens of one sequence.
pub(super) struct Batch(sys::llama_batch);

impl Batch {
    pub(super) fn new() -> Self {
        let room = i32::try_from(BATCH_TOKENS).unwrap_or(i32::MAX);
        // SAFETY: no precondition; the arrays are freed in `Drop`.
        Self(unsafe { sys::llama_batch_init(room, 0, 1) })
    }

    /// Holds `tokens` (at most [`BATCH_TOKENS`]) from position `first` on. Every token asks for
    /// output, or the last layer would drop the rows of the others.
    pub(super) fn fill(&mut self, tokens: &[i32], first: usize) {
        let tokens = &tokens[..tokens.len().min(BATCH_TOKENS)];
        for (index, &token) in tokens.iter().enumerate() {
            // SAFETY: llama_batch_init made room for BATCH_TOKENS entries in every array, and for
            // one sequence id in each entry of `seq_id`.
            unsafe {
                *self.0.token.add(index) = token;
                *self.0.pos.add(index) = i32::try_from(first + index).unwrap_or(i32::MAX);
                *self.0.n_seq_id.add(index) = 1;
                **self.0.seq_id.add(index) = 0;
                *self.0.logits.add(index) = 1;
            }
        }
        self.0.n_tokens = i32::try_from(tokens.len()).unwrap_or(0);
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        // SAFETY: the arrays came from llama_batch_init and are freed once.
        unsafe { sys::llama_batch_free(self.0) }
    }
}
