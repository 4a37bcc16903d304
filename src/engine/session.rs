//! One context: decode, logits and the thread pools that do the work.

use super::batch::Row;
use super::context::{Made, create, device_bytes};
use super::tap::{Pass, Tap};
use super::threads::ThreadPools;
use super::{
    ArenaUse, EngineError, EngineOptions, ExpertArena, Learned, Model, Poison, RouteSink, Token,
};
use crate::time::nanos;
use llama_cpp_4::context::LlamaContext;
use llama_cpp_4::llama_batch::LlamaBatch;
use llama_cpp_4::token::LlamaToken;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

/// A context over a model. Dropping it frees the context first, then what its callbacks use.
#[derive(Debug)]
pub struct Session<'m> {
    /// `None` after it was given up for another pool and none could be created again.
    pub(super) context: Option<LlamaContext<'m>>,
    bounds: Bounds,
    /// Bytes of the pool of experts in the device's memory; 0 without one.
    pub(super) pool_bytes: u64,
    /// The largest pool that the device bears; none is made before it is known.
    pub(super) pool_limit_bytes: u64,
    device_bytes: u64,
    made_ns: u64,
    batch: LlamaBatch,
    pools: ThreadPools,
    /// Pools that others have taken the place of. ggml's backend looks at one once more, when it takes the next.
    retired: Vec<ThreadPools>,
    poison: Arc<Poison>,
    pub(super) tap: Option<TapHandle>,
    model: &'m Model,
    options: EngineOptions,
    pub(super) position: usize,
    decoded_tokens: u64,
    pub(super) streams: Option<bool>,
}

/// What a context holds, as llama.cpp made it.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    n_ctx: usize,
    sequences: usize,
    n_batch: usize,
}

/// Tokens of one batch when every row's logits are computed: they are kept until the next decode,
/// and a vocabulary of 150,000 takes 600 KB a row.
const EVERY_ROW_TOKENS: usize = 64;

/// Of which tokens of a batch the logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Logits {
    None,
    Last,
    Every,
}

/// Owner of the tap that the context points to.
#[derive(Debug)]
pub(super) struct TapHandle(NonNull<Tap>);

impl TapHandle {
    fn new(tap: Tap) -> Self {
        Self(NonNull::from(Box::leak(Box::new(tap))))
    }

    pub(super) const fn as_ptr(&self) -> *mut Tap {
        self.0.as_ptr()
    }

    pub(super) fn get(&self) -> &Tap {
        // SAFETY: the pointer comes from a leaked box that only `Drop` frees, and the callback that
        // also uses it runs only inside `llama_decode`, which no caller of `get` is in.
        unsafe { self.0.as_ref() }
    }

    pub(super) fn get_mut(&mut self) -> &mut Tap {
        // SAFETY: as for `get`.
        unsafe { self.0.as_mut() }
    }
}

impl Drop for TapHandle {
    fn drop(&mut self) {
        // SAFETY: the box was leaked in `new`; the context that points to it is dropped before, by
        // the field order of `Session`.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl<'m> Session<'m> {
    /// Creates a context. With `tapped`, its routing can be read; without, llama.cpp runs as
    /// shipped.
    ///
    /// # Errors
    /// [`EngineError::Context`] or [`EngineError::Threads`].
    pub fn new(
        model: &'m Model,
        options: &EngineOptions,
        tapped: bool,
    ) -> Result<Self, EngineError> {
        let poison = Arc::new(Poison::default());
        let tap = tapped.then(|| TapHandle::new(Tap::new(Arc::clone(&poison))));
        let began = Instant::now();
        let Made { context, said } = create(model, options, &poison, tap.as_ref(), 0)?;
        let made_ns = nanos(began.elapsed());
        let device = model.device().map(super::Device::name);
        let bounds = Bounds {
            n_ctx: context.n_ctx_seq() as usize,
            sequences: context.n_seq_max() as usize,
            n_batch: context.n_batch() as usize,
        };
        let pools = ThreadPools::new(options.threads, options.poll)?;
        let batch = LlamaBatch::new(bounds.n_batch, 1);
        let mut session = Self {
            context: Some(context),
            bounds,
            pool_bytes: 0,
            pool_limit_bytes: 0,
            device_bytes: device.map_or(0, |name| device_bytes(&said, &name)),
            made_ns,
            batch,
            pools,
            retired: Vec::new(),
            poison,
            tap,
            model,
            options: options.clone(),
            position: 0,
            decoded_tokens: 0,
            streams: None,
        };
        session.attach(false);
        Ok(session)
    }

    /// Decodes one token and forgets it: llama.cpp allocates and touches what it needs, and a tap
    /// learns the graph.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn warm_up(&mut self) -> Result<(), EngineError> {
        self.decode(&[self.model.first_token()])?;
        self.clear();
        Ok(())
    }

    /// Decodes the largest micro-batch and forgets it, before routing is handed to a sink: buffers get
    /// their memory now, so that what is measured as free stays free when the first long prompt
    /// comes. No expert is read or computed for it. Where experts are in slots, ggml's list of rows
    /// by expert becomes longer later, by 8 bytes for each row and each slot between the first and the
    /// last in use; little of it is touched.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn touch_buffers(&mut self) -> Result<(), EngineError> {
        let tokens = (self.options.n_ubatch as usize).min(self.n_ctx());
        self.decode(&vec![self.model.first_token(); tokens])?;
        self.clear();
        Ok(())
    }

    /// What warm-up learned; `None` without a tap.
    #[must_use]
    pub fn learned(&self) -> Option<&Learned> {
        self.tap.as_ref().map(|tap| tap.get().learned())
    }

    /// Hands routing to `sink` from now on, and uses experts from `arena`, if there is one. Without a
    /// tap, both are dropped unused.
    pub fn route_to(&mut self, sink: Box<dyn RouteSink>, arena: Option<Arc<dyn ExpertArena>>) {
        let max_tokens = self.options.n_ubatch as usize;
        if let Some(tap) = &mut self.tap {
            tap.get_mut().run(sink, arena, max_tokens);
        }
    }

    /// How the experts of an arena were used so far; `None` without one.
    #[must_use]
    pub fn arena_use(&self) -> Option<ArenaUse> {
        self.tap.as_ref().and_then(|tap| tap.get().arena_use())
    }

    /// The flag that stops a decode from outside.
    #[must_use]
    pub fn poison(&self) -> Arc<Poison> {
        Arc::clone(&self.poison)
    }

    /// Decodes `tokens` after what is in the context, in batches; logits of the last are kept.
    ///
    /// # Errors
    /// [`EngineError::ContextFull`] before anything is decoded; [`EngineError::Poisoned`] when
    /// expert bytes could not be had; [`EngineError::Decode`] when llama.cpp failed. After an error
    /// the context must be cleared.
    pub fn decode(&mut self, tokens: &[Token]) -> Result<(), EngineError> {
        self.decode_in(tokens, self.bounds.n_batch, Logits::Last)
    }

    /// Decodes `tokens` so that every layer routes every one of them. [`Self::decode`] asks for the
    /// logits of the last token alone, and then llama.cpp skips the others in the last layer.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn decode_every_row(&mut self, tokens: &[Token]) -> Result<(), EngineError> {
        let chunk = EVERY_ROW_TOKENS.min(self.bounds.n_batch);
        self.decode_in(tokens, chunk, Logits::Every)
    }

    /// Decodes `tokens` as one prompt and hands over the logits of each from position `first` on:
    /// its position among them, and one logit a vocabulary entry. The logits of a whole batch are in
    /// memory at once.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn decode_scored(
        &mut self,
        tokens: &[Token],
        first: usize,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), EngineError> {
        self.check_room(tokens.len())?;
        let batch = self.bounds.n_batch;
        for (part, tokens) in tokens.chunks(batch).enumerate() {
            let start = part * batch;
            let position = self.position;
            let rows = tokens.iter().enumerate().map(|(i, &token)| Row {
                token,
                position: position + i,
                sequence: 0,
                logits: start + i >= first,
            });
            self.decode_batch(Pass::Prompt, rows)?;
            self.position += tokens.len();
            for i in (0..tokens.len()).filter(|i| start + i >= first) {
                let row = i32::try_from(i).map_err(|e| EngineError::Decode(e.to_string()))?;
                visit(start + i, self.context()?.get_logits_ith(row));
            }
        }
        Ok(())
    }

    fn check_room(&self, wanted: usize) -> Result<(), EngineError> {
        let n_ctx = self.n_ctx();
        if self.position + wanted <= n_ctx {
            return Ok(());
        }
        Err(EngineError::ContextFull {
            used: self.position,
            wanted,
            n_ctx,
        })
    }

    fn decode_in(
        &mut self,
        tokens: &[Token],
        chunk: usize,
        logits: Logits,
    ) -> Result<(), EngineError> {
        self.check_room(tokens.len())?;
        for (i, part) in tokens.chunks(chunk).enumerate() {
            let last_part = (i + 1) * chunk >= tokens.len();
            let logits = if logits == Logits::Last && !last_part {
                Logits::None
            } else {
                logits
            };
            self.decode_part(part, logits)?;
        }
        Ok(())
    }

    fn decode_part(&mut self, tokens: &[Token], want: Logits) -> Result<(), EngineError> {
        let pass = if tokens.len() == 1 {
            Pass::Next
        } else {
            Pass::Prompt
        };
        let position = self.position;
        let rows = tokens.iter().enumerate().map(|(i, &token)| Row {
            token,
            position: position + i,
            sequence: 0,
            logits: match want {
                Logits::None => false,
                Logits::Last => i + 1 == tokens.len(),
                Logits::Every => true,
            },
        });
        self.decode_batch(pass, rows)?;
        self.position += tokens.len();
        Ok(())
    }

    /// Decodes the rows as one batch.
    pub(super) fn decode_batch(
        &mut self,
        pass: Pass,
        rows: impl Iterator<Item = Row>,
    ) -> Result<(), EngineError> {
        let fail = |e: String| EngineError::Decode(e);
        self.follow_orders()?;
        self.batch.clear();
        let mut tokens = 0;
        for row in rows {
            let position = i32::try_from(row.position).map_err(|e| fail(e.to_string()))?;
            let sequence = i32::try_from(row.sequence).map_err(|e| fail(e.to_string()))?;
            self.batch
                .add(LlamaToken(row.token), position, &[sequence], row.logits)
                .map_err(|e| fail(e.to_string()))?;
            tokens += 1;
        }
        self.follow_processors();
        let started = Instant::now();
        if let Some(tap) = &mut self.tap {
            tap.get_mut().begin(pass, tokens);
        }
        let Some(context) = &mut self.context else {
            return Err(lost());
        };
        let stay = self.pools.stay();
        let result = context.decode(&mut self.batch);
        // llama_decode returns with work still queued; logits and timings need it done.
        context.synchronize();
        drop(stay);
        let decode_ns = nanos(started.elapsed());
        if let Some(tap) = &mut self.tap {
            tap.get_mut().restore();
        }
        let outcome = match self.poison.take() {
            Some(cause) => Err(EngineError::Poisoned(cause)),
            None => result.map_err(|e| fail(e.to_string())),
        };
        let outcome = outcome.and_then(|()| {
            let tap = self.tap.as_mut();
            tap.map_or(Ok(()), |tap| tap.get_mut().accept())
                .map_err(EngineError::Poisoned)
        });
        if outcome.is_err() {
            if let Some(tap) = &mut self.tap {
                tap.get_mut().abandon();
            }
            return outcome;
        }
        self.retired.clear();
        self.decoded_tokens += tokens as u64;
        if let Some(tap) = &mut self.tap {
            tap.get_mut().end(tokens, decode_ns);
            let streams = tap.get().sink().is_some_and(RouteSink::streams);
            self.attach(streams);
        }
        Ok(())
    }

    /// Makes the threads anew where this one may run on other processors than when they were made: pinned ones
    /// would stay where they are, or share a processor where theirs has gone.
    fn follow_processors(&mut self) {
        if !self.pools.are_misplaced() {
            return;
        }
        match ThreadPools::new(self.options.threads, self.options.poll) {
            Ok(pools) => {
                tracing::debug!("compute threads are made anew for other processors");
                self.retired.push(std::mem::replace(&mut self.pools, pools));
                let streams = self.streams.take().unwrap_or(false);
                self.attach(streams);
            }
            Err(error) => tracing::warn!("compute threads stay where they are: {error}"),
        }
    }

    /// Puts the pool to work that suits the coming token.
    pub(super) fn attach(&mut self, streams: bool) {
        if self.streams == Some(streams) {
            return;
        }
        self.streams = Some(streams);
        if let (Some(pool), Some(context)) = (self.pools.pick(streams), &mut self.context) {
            // SAFETY: the pools live as long as the session and are dropped after its context.
            unsafe { context.attach_threadpool(pool.as_ptr(), pool.as_ptr()) };
            if let (Some(tap), Some(raw)) = (&mut self.tap, NonNull::new(pool.as_ptr())) {
                tap.get_mut().use_threads(raw, self.options.threads);
            }
        }
    }

    /// Logits of the last decoded token, one a vocabulary entry; none after a decode that failed because
    /// the context is gone.
    #[must_use]
    pub fn logits(&self) -> &[f32] {
        self.logits_at(self.batch.n_tokens() - 1)
    }

    pub(super) fn logits_at(&self, row: i32) -> &[f32] {
        self.context
            .as_ref()
            .map_or(&[], |context| context.get_logits_ith(row))
    }

    /// Empties the context.
    pub fn clear(&mut self) {
        if let Some(context) = &mut self.context {
            context.clear_kv_cache();
        }
        self.position = 0;
    }

    /// Tokens in the context.
    #[must_use]
    pub fn position(&self) -> usize {
        self.position
    }

    /// Tokens decoded since it was made, warm-up and prompts included.
    #[must_use]
    pub const fn decoded_tokens(&self) -> u64 {
        self.decoded_tokens
    }

    /// Tokens that one sequence holds at most.
    #[must_use]
    pub fn n_ctx(&self) -> usize {
        self.bounds.n_ctx
    }

    /// Sequences that may be in the context at once.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.bounds.sequences
    }

    /// Tokens that one decode takes at most.
    #[must_use]
    pub fn n_batch(&self) -> usize {
        self.bounds.n_batch
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// Bytes of the device's memory that the context took, its pool apart, as llama.cpp told when it was
    /// made; 0 without a device.
    #[must_use]
    pub const fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    /// Time that making the first context took, ns.
    #[must_use]
    pub const fn made_ns(&self) -> u64 {
        self.made_ns
    }

    /// Says that no decode follows for a while: what is still read for the last one is waited for, until `leave_off`
    /// says that something else is to be done.
    pub fn rest(&mut self, leave_off: &mut dyn FnMut() -> bool) {
        if let Some(tap) = &mut self.tap {
            tap.get_mut().rest(leave_off);
        }
    }

    /// Takes the sink of the routing back; none is seen from then on.
    pub fn take_sink(&mut self) -> Option<Box<dyn RouteSink>> {
        self.tap.as_mut().and_then(|tap| tap.get_mut().take_sink())
    }

    /// The settings in force.
    #[must_use]
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    pub(super) fn context(&self) -> Result<&LlamaContext<'m>, EngineError> {
        self.context.as_ref().ok_or_else(lost)
    }

    /// Creates the context anew, with a pool of `bytes` in the device's memory.
    pub(super) fn create_with_pool(&self, bytes: u64) -> Result<Made<'m>, EngineError> {
        create(
            self.model,
            &self.options,
            &self.poison,
            self.tap.as_ref(),
            bytes,
        )
    }

    pub(super) fn last_row(&self) -> i32 {
        self.batch.n_tokens() - 1
    }
}

pub(super) fn lost() -> EngineError {
    EngineError::Lost("no decode succeeds any more".into())
}
