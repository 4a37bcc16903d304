//! Making a context: its parameters, its callbacks, and what it takes of a device's memory.

use super::session::TapHandle;
use super::tap::{on_abort_check, on_node};
use super::{Device, EngineError, EngineOptions, FlashAttention, Model, Poison, log};
use llama_cpp_4::context::LlamaContext;
use llama_cpp_4::context::params::{LlamaContextParams, LlamaFlashAttnType};
use std::ffi::c_void;
use std::num::NonZeroU32;
use std::sync::Arc;

/// A context, and what llama.cpp said while it was made.
pub(super) struct Made<'m> {
    pub(super) context: LlamaContext<'m>,
    pub(super) said: Vec<String>,
}

/// Creates a context whose callbacks are the flag and the tap, which must outlive it.
pub(super) fn create<'m>(
    model: &'m Model,
    options: &EngineOptions,
    poison: &Arc<Poison>,
    tap: Option<&TapHandle>,
    pool_bytes: u64,
) -> Result<Made<'m>, EngineError> {
    let mut params = context_params(options, model.device().is_some_and(Device::is_software))
        .with_moe_cache_size(usize::try_from(pool_bytes).unwrap_or(usize::MAX))
        .with_abort_callback(
            Some(on_abort_check),
            Arc::as_ptr(poison).cast_mut().cast::<c_void>(),
        );
    if let Some(tap) = tap {
        params = params
            .with_cb_eval(Some(on_node))
            .with_cb_eval_user_data(tap.as_ptr().cast::<c_void>());
    }
    log::forget();
    let (context, said) = log::listen(|| {
        model
            .inner
            .new_context(super::model::backend(), params)
            .map_err(|_| EngineError::Context {
                n_ctx: options.n_ctx,
                n_batch: options.n_batch,
                n_ubatch: options.n_ubatch,
                detail: log::recent(),
            })
    });
    Ok(Made {
        context: context?,
        said,
    })
}

/// On Mesa's software device flash attention is left out unless it is asked for by name: in Mesa 22.3 that device
/// looks at all twelve buffers of a descriptor set, those too that a shader does not use, and ggml's
/// flash attention leaves scratch memory there that it replaces by larger one later.
fn context_params(options: &EngineOptions, software: bool) -> LlamaContextParams {
    let threads = i32::try_from(options.threads).unwrap_or(1);
    // Each sequence has a cache of its own, so that the bits of one do not depend on where another
    // one's tokens lie.
    LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new(
            options.n_ctx.saturating_mul(options.sequences.max(1)),
        ))
        .with_n_seq_max(options.sequences.max(1))
        .with_kv_unified(false)
        .with_n_batch(options.n_batch)
        .with_n_ubatch(options.n_ubatch)
        .with_n_threads(threads)
        .with_n_threads_batch(threads)
        .with_cache_type_k(options.cache_k.ggml())
        .with_cache_type_v(options.cache_v.ggml())
        .with_flash_attn_type(match options.flash_attention {
            FlashAttention::Auto if software => LlamaFlashAttnType::Disabled,
            FlashAttention::Auto => LlamaFlashAttnType::Auto,
            FlashAttention::On => LlamaFlashAttnType::Enabled,
            FlashAttention::Off => LlamaFlashAttnType::Disabled,
        })
}

/// Bytes of the buffers, caches and compute buffers alike, that a context took of the device `name`, as
/// llama.cpp says in `lines`; its pool is none of them.
pub(super) fn device_bytes(lines: &[String], name: &str) -> u64 {
    let mib = lines.iter().filter_map(|line| {
        let (what, size) = line.split_once(" buffer size =")?;
        what.split_whitespace().find(|word| *word == name)?;
        size.trim().strip_suffix("MiB")?.trim().parse::<f64>().ok()
    });
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "sizes in memory, not negative"
    )]
    let bytes = (mib.sum::<f64>().max(0.0) * 1024.0 * 1024.0) as u64;
    bytes
}

#[cfg(test)]
mod tests {
    use super::device_bytes;

    #[test]
    fn buffers_of_one_device_are_summed() {
        let said = [
            "llama_kv_cache:    Vulkan0 KV buffer size =     1.50 MiB",
            "llama_context: Vulkan_Host  output buffer size =     0.19 MiB",
            "sched_reserve:    Vulkan0 compute buffer size =     2.25 MiB",
            "sched_reserve:    Vulkan01 compute buffer size =     9.00 MiB",
            "impl:    Vulkan0 MoE cache size =     7.00 MiB for 8.00 MiB of host experts",
        ]
        .map(str::to_owned);
        assert_eq!(device_bytes(&said, "Vulkan0"), (3 << 20) + (3 << 18));
        assert_eq!(device_bytes(&said, "CUDA0"), 0);
    }
}
