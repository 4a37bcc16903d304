//! Options that several verbs share, each defined once. A heading here is a section of `hotpin.toml`.

use crate::engine::{CacheType, EngineOptions, FlashAttention, GpuLayers, Placement, gpu_backends};
use crate::governor::OnFailure;
use crate::model::ModelMap;
use crate::plant::VramSize;
use crate::size::{SizeError, parse_size, total_ram_bytes};
use crate::store::StoreKind;
use clap::{ArgAction, Args};
use hotpin_controllers::PolicyKind;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Context length where nothing else is said, tokens.
pub const CONTEXT_TOKENS: u32 = 4096;

/// Reads a size; a share is one of the machine's RAM.
///
/// # Errors
/// As of [`parse_size`].
pub fn size(text: &str) -> Result<u64, SizeError> {
    parse_size(text, total_ram_bytes())
}

/// Engine settings.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Compute threads; from 512 tokens of context on the bits of the output depend on it, as in llama.cpp [default:
    /// all cores]
    #[arg(short, long, env = "HOTPIN_THREADS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Context length in tokens [default: 4096; of bench, what its texts need]
    #[arg(short = 'c', long, env = "HOTPIN_CTX_SIZE", value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx_size: Option<u32>,
    /// Logical batch in tokens
    #[arg(short = 'b', long, env = "HOTPIN_BATCH_SIZE", default_value_t = 512)]
    pub batch_size: u32,
    /// Physical batch in tokens; the bits of the output depend on it
    #[arg(long, env = "HOTPIN_UBATCH_SIZE", default_value_t = 512)]
    pub ubatch_size: u32,
    /// Type of cached keys
    #[arg(long, env = "HOTPIN_CACHE_TYPE_K", value_enum, default_value_t)]
    pub cache_type_k: CacheType,
    /// Type of cached values
    #[arg(long, env = "HOTPIN_CACHE_TYPE_V", value_enum, default_value_t)]
    pub cache_type_v: CacheType,
    /// Flash attention
    #[arg(long, env = "HOTPIN_FLASH_ATTN", value_enum, default_value_t)]
    pub flash_attn: FlashAttention,
}

impl EngineArgs {
    /// The engine's settings, with the context length that holds where none was given.
    #[must_use]
    pub fn options(&self, ctx_size: u32) -> EngineOptions {
        let default = EngineOptions::default();
        EngineOptions {
            threads: self.threads.unwrap_or(default.threads),
            n_ctx: self.ctx_size.unwrap_or(ctx_size),
            sequences: default.sequences,
            n_batch: self.batch_size,
            n_ubatch: self.ubatch_size,
            cache_k: self.cache_type_k,
            cache_v: self.cache_type_v,
            flash_attention: self.flash_attn,
            poll: default.poll,
        }
    }
}

/// What of a model is in a graphics device's memory.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[command(next_help_heading = "Engine")]
pub struct DeviceArgs {
    /// Layers whose dense weights are on the graphics device: a number, counted from the last one, or
    /// all [default: 0; all with --vram or --gpu-experts]
    #[arg(long, env = "HOTPIN_GPU_LAYERS", value_name = "N")]
    pub gpu_layers: Option<GpuLayers>,
    /// Memory of the device for experts that come and go: auto, off, or a size such as 4GiB [default:
    /// auto with --gpu-layers]
    #[arg(long, env = "HOTPIN_VRAM", value_name = "SIZE")]
    pub vram: Option<VramSize>,
    /// Layers whose experts are on the device for good: a number, counted from the last one, or all
    #[arg(long, env = "HOTPIN_GPU_EXPERTS", value_name = "N")]
    pub gpu_experts: Option<GpuLayers>,
}

/// Why a device cannot be used as asked.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// This program has no code for any.
    #[error(
        "{0}: this program was built for CPUs alone; `make gpu` builds it with Vulkan, and `cargo build --release --features cuda` with CUDA"
    )]
    NotBuilt(&'static str),
    /// Experts on a device whose layers are not there.
    #[error("{0} needs layers on the device: leave --gpu-layers out, or give a number above 0")]
    NoLayers(&'static str),
}

impl DeviceArgs {
    /// The option that asks for a device; `None` where none does.
    fn asks(&self) -> Option<&'static str> {
        let some = |layers: Option<GpuLayers>| layers.is_some_and(|n| n != GpuLayers::None);
        if matches!(self.vram, Some(VramSize::Auto | VramSize::Bytes(_))) {
            Some("--vram")
        } else if some(self.gpu_experts) {
            Some("--gpu-experts")
        } else {
            some(self.gpu_layers).then_some("--gpu-layers")
        }
    }

    /// Checks that this program can do what is asked for.
    ///
    /// # Errors
    /// [`DeviceError`], see there.
    pub fn check(&self) -> Result<(), DeviceError> {
        let Some(option) = self.asks() else {
            return Ok(());
        };
        if gpu_backends().is_none() {
            return Err(DeviceError::NotBuilt(option));
        }
        if self.gpu_layers == Some(GpuLayers::None) {
            return Err(DeviceError::NoLayers(option));
        }
        Ok(())
    }

    /// Where a model's weights go.
    #[must_use]
    pub fn placement(&self, map: &ModelMap) -> Placement {
        let layers = match self.asks() {
            Some(_) => self.gpu_layers.unwrap_or(GpuLayers::All),
            None => GpuLayers::None,
        };
        let blocks = map.layers().iter().rev().map(|layer| layer.block);
        let experts = match self.gpu_experts.unwrap_or_default() {
            GpuLayers::None => 0,
            GpuLayers::Last(count) => count as usize,
            GpuLayers::All => usize::MAX,
        };
        Placement::new(map, layers).with_experts(blocks.take(experts))
    }

    /// The memory for experts that come and go.
    #[must_use]
    pub fn vram(&self) -> VramSize {
        if self.asks().is_none() {
            return VramSize::Off;
        }
        self.vram.unwrap_or_default()
    }
}

/// What a regulated session keeps where, and how fast it is regulated.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Control")]
pub struct RegulationArgs {
    /// Where experts live
    #[arg(long, env = "HOTPIN_STORE", value_enum, default_value = "auto")]
    pub store: StoreKind,
    /// Compare every expert that is read with the file's bytes, and stop where they differ (store
    /// direct); slow
    #[arg(
        long,
        env = "HOTPIN_VERIFY",
        action = ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        default_value = "false",
        default_missing_value = "true",
        value_name = "BOOL"
    )]
    pub verify: bool,
    /// Expert counts to start from, made by `hotpin profile`
    #[arg(long, env = "HOTPIN_PROFILE", value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Most memory for experts, such as 8GiB or 40% of RAM [default: what the machine can spare]
    #[arg(long, env = "HOTPIN_CAPACITY", value_name = "SIZE", value_parser = size)]
    pub capacity: Option<u64>,
    /// Memory to leave to other programs [default: 1GiB]
    #[arg(long, env = "HOTPIN_RESERVE", value_name = "SIZE", value_parser = size)]
    pub reserve: Option<u64>,
    /// Time between control ticks, milliseconds
    #[arg(long, env = "HOTPIN_TICK_MS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(10..=10_000))]
    pub tick_ms: u64,
    /// Settings of the control laws, TOML (docs/control.md lists them)
    #[arg(long, env = "HOTPIN_CONTROL", value_name = "FILE")]
    pub control: Option<PathBuf>,
    /// What is on a graphics device.
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// What regulates a session, and what it leaves behind.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Control")]
pub struct ControlArgs {
    /// What to keep in memory: off, fetch, static, lru or adaptive
    #[arg(long, env = "HOTPIN_POLICY", default_value = "adaptive")]
    pub policy: PolicyKind,
    /// Start from what earlier sessions learned in FILE, and add to it: counts of the experts used
    #[arg(long, env = "HOTPIN_LEARN", value_name = "FILE")]
    pub learn: Option<PathBuf>,
    /// Write every decision and its reason to FILE, as JSON lines
    #[arg(long, env = "HOTPIN_JOURNAL", value_name = "FILE")]
    pub journal: Option<PathBuf>,
    /// Record the routing of every token to FILE, for hotpin-sim
    #[arg(long, env = "HOTPIN_RECORD", value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// What becomes of a session whose control fails: it goes on without, or ends with an error
    #[arg(
        long,
        env = "HOTPIN_ON_FAILURE",
        value_enum,
        default_value = "go-on",
        value_name = "WHAT"
    )]
    pub on_failure: OnFailure,
    /// What a session shares with a benchmark.
    #[command(flatten)]
    pub regulation: RegulationArgs,
}

/// The key to a server. Flags win over the environment as elsewhere; a key itself is in no settings file.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct KeyArgs {
    /// Key that clients must send; controls are closed without one
    #[arg(
        long,
        env = "HOTPIN_API_KEY",
        value_name = "KEY",
        hide_env_values = true
    )]
    pub api_key: Option<String>,
    /// The same key from the first line of a file
    #[arg(
        long,
        env = "HOTPIN_API_KEY_FILE",
        value_name = "FILE",
        conflicts_with = "api_key"
    )]
    pub api_key_file: Option<PathBuf>,
}

/// Why a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// Its file cannot be read.
    #[error("API key {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// There is nothing in it.
    #[error("the API key must not be empty")]
    Empty,
}

impl KeyArgs {
    /// The key, where one was given.
    ///
    /// # Errors
    /// [`KeyError`], see there.
    pub fn text(&self) -> Result<Option<String>, KeyError> {
        let text = match (&self.api_key, &self.api_key_file) {
            (Some(key), _) => key.clone(),
            (None, Some(path)) => {
                let text = std::fs::read_to_string(path).map_err(|source| KeyError::Io {
                    path: path.clone(),
                    source,
                })?;
                text.lines().next().unwrap_or("").trim().to_owned()
            }
            (None, None) => return Ok(None),
        };
        if text.is_empty() {
            return Err(KeyError::Empty);
        }
        Ok(Some(text))
    }
}
