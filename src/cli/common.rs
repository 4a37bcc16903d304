//! Arguments that several verbs share, and how they become settings.

use crate::engine::{CacheType, EngineOptions, FlashAttention, Model};
use crate::governor::{Journal, JournalFile};
use crate::model::ModelMap;
use crate::plant::{Rig, RigOptions};
use crate::profile::Profile;
use crate::size::{parse_size, total_ram_bytes};
use crate::store::{DirectOptions, StoreKind};
use crate::trace::Recorder;
use anyhow::{Context, Result};
use clap::Args;
use hotpin_controllers::{AdaptiveConfig, PolicyKind};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Engine settings.
#[derive(Debug, Clone, Args)]
pub(super) struct EngineArgs {
    /// Compute threads [default: all cores]
    #[arg(short, long, env = "HOTPIN_THREADS")]
    pub(super) threads: Option<u32>,
    /// Context length in tokens
    #[arg(short = 'c', long, env = "HOTPIN_CTX_SIZE", default_value_t = 4096)]
    pub(super) ctx_size: u32,
    /// Logical batch in tokens
    #[arg(short = 'b', long, env = "HOTPIN_BATCH_SIZE", default_value_t = 512)]
    pub(super) batch_size: u32,
    /// Physical batch in tokens; the bits of the output depend on it
    #[arg(long, env = "HOTPIN_UBATCH_SIZE", default_value_t = 512)]
    pub(super) ubatch_size: u32,
    /// Type of cached keys
    #[arg(long, env = "HOTPIN_CACHE_TYPE_K", value_enum, default_value_t)]
    pub(super) cache_type_k: CacheType,
    /// Type of cached values
    #[arg(long, env = "HOTPIN_CACHE_TYPE_V", value_enum, default_value_t)]
    pub(super) cache_type_v: CacheType,
    /// Flash attention
    #[arg(long, env = "HOTPIN_FLASH_ATTN", value_enum, default_value_t)]
    pub(super) flash_attn: FlashAttention,
}

impl EngineArgs {
    /// The defaults with another context length.
    pub(super) fn defaults(ctx_size: u32) -> EngineOptions {
        EngineOptions {
            n_ctx: ctx_size,
            ..EngineOptions::default()
        }
    }

    pub(super) fn options(&self) -> EngineOptions {
        let default = EngineOptions::default();
        EngineOptions {
            threads: self.threads.unwrap_or(default.threads),
            n_ctx: self.ctx_size,
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

/// What regulates the session.
#[derive(Debug, Clone, Args)]
pub(super) struct ControlArgs {
    /// What to keep in memory: off, fetch, static, lru or adaptive
    #[arg(long, env = "HOTPIN_POLICY", default_value = "adaptive")]
    pub(super) policy: PolicyKind,
    /// Where experts live
    #[arg(long, env = "HOTPIN_STORE", value_enum, default_value = "auto")]
    pub(super) store: StoreKind,
    /// Compare every expert that is read with the file's bytes, and stop where they differ (store
    /// direct)
    #[arg(long, env = "HOTPIN_VERIFY")]
    pub(super) verify: bool,
    /// Expert counts to start from, made by `hotpin profile`
    #[arg(long, env = "HOTPIN_PROFILE", value_name = "FILE")]
    pub(super) profile: Option<PathBuf>,
    /// Most memory for experts, such as 8GiB or 40% of RAM [default: what the machine can spare]
    #[arg(long, env = "HOTPIN_CAPACITY", value_name = "SIZE")]
    pub(super) capacity: Option<String>,
    /// Memory to leave to other programs
    #[arg(long, env = "HOTPIN_RESERVE", value_name = "SIZE")]
    pub(super) reserve: Option<String>,
    /// Time between control ticks, milliseconds
    #[arg(long, env = "HOTPIN_TICK_MS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(10..=10_000))]
    pub(super) tick_ms: u64,
    /// Write every decision and its reason to FILE, as JSON lines
    #[arg(long, env = "HOTPIN_JOURNAL", value_name = "FILE")]
    pub(super) journal: Option<PathBuf>,
    /// Record the routing of every token to FILE, for hotpin-sim
    #[arg(long, env = "HOTPIN_RECORD", value_name = "FILE")]
    pub(super) record: Option<PathBuf>,
    /// Settings of the control laws, TOML (docs/control.md lists them)
    #[arg(long, env = "HOTPIN_CONTROL", value_name = "FILE")]
    pub(super) control: Option<PathBuf>,
}

impl ControlArgs {
    /// Settings of the control laws from file and flags.
    pub(super) fn control(&self) -> Result<AdaptiveConfig> {
        let mut control = read_control(self.control.as_deref())?;
        if let Some(size) = &self.capacity {
            control.capacity.limit_bytes = Some(size_of("--capacity", size)?);
        }
        if let Some(size) = &self.reserve {
            control.capacity.host_reserve_bytes = size_of("--reserve", size)?;
        }
        Ok(control)
    }

    pub(super) fn rig_options(&self, engine: EngineOptions, map: &ModelMap) -> Result<RigOptions> {
        let profile = match &self.profile {
            Some(path) => Some(Profile::load(path, map)?.counts()),
            None => None,
        };
        let file = self
            .journal
            .as_deref()
            .map(JournalFile::create)
            .transpose()?;
        Ok(RigOptions {
            policy: self.policy,
            store: self.store,
            direct: DirectOptions {
                verify: self.verify,
                ..DirectOptions::default()
            },
            engine,
            control: self.control()?,
            profile,
            tick: Duration::from_millis(self.tick_ms),
            journal: Journal::new(file),
            recorder: self
                .record
                .as_deref()
                .map(|path| Recorder::create(path, map))
                .transpose()?,
        })
    }
}

/// Arguments that parse but make no sense: exit code 2, like those that do not parse.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Usage(pub(super) String);

/// Reads a size given as the value of `flag`.
pub(super) fn size_of(flag: &str, text: &str) -> Result<u64> {
    parse_size(text, total_ram_bytes()).map_err(|e| Usage(format!("{flag}: {e}")).into())
}

/// Prints a result. A reader that went away is no failure.
pub(super) fn say(text: &str) -> std::io::Result<()> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Prints a line for the user on stderr. Where that is gone, nobody is left to tell.
pub(super) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Settings of the control laws from a TOML file; defaults without one.
pub(super) fn read_control(path: Option<&Path>) -> Result<AdaptiveConfig> {
    let Some(path) = path else {
        return Ok(AdaptiveConfig::default());
    };
    let what = || format!("control settings {}", path.display());
    let text = std::fs::read_to_string(path).with_context(what)?;
    toml::from_str(&text).with_context(what)
}

/// Maps a model, with a progress bar on a terminal. A model whose experts a store will fetch is not
/// read for that; `policy` off loads as llama.cpp does.
pub(super) fn load(path: &Path, policy: PolicyKind) -> Result<(ModelMap, Model)> {
    let map = ModelMap::open(path)?;
    let model = load_watched(&map, policy, &mut |_| true)?;
    Ok((map, model))
}

/// Loads a mapped model, with a progress bar on a terminal. `watch` is told the part that is done, 0
/// to 1, and returns false to stop.
pub(super) fn load_watched(
    map: &ModelMap,
    policy: PolicyKind,
    watch: &mut dyn FnMut(f32) -> bool,
) -> Result<Model> {
    let bar = bar("loading");
    let progress = |fraction: f32| {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0 to 1000"
        )]
        bar.set_position((fraction * 1000.0) as u64);
        watch(fraction)
    };
    let model = if policy == PolicyKind::Off || !map.is_moe() {
        Model::load(map.path(), progress)
    } else {
        Model::open(map.path(), progress)
    };
    bar.finish_and_clear();
    Ok(model?)
}

/// Puts a session together, with a progress bar for the first pins, and prints its notes.
pub(super) fn assemble<'m>(
    model: &'m Model,
    map: &ModelMap,
    options: RigOptions,
) -> Result<Rig<'m>> {
    assemble_watched(model, map, options, &mut |_| {})
}

/// The same; `watch` is told the part of the first pins that is done, 0 to 1.
pub(super) fn assemble_watched<'m>(
    model: &'m Model,
    map: &ModelMap,
    options: RigOptions,
    watch: &mut dyn FnMut(f32),
) -> Result<Rig<'m>> {
    let bar = bar("pinning");
    let rig = Rig::assemble(model, map, options, &mut |done, planned| {
        let permille = done.saturating_mul(1000) / planned.max(1);
        bar.set_position(permille);
        watch(f32::from(u16::try_from(permille).unwrap_or(1000)) / 1000.0);
    });
    bar.finish_and_clear();
    let rig = rig?;
    for note in &rig.notes {
        self::note(&format!("hotpin: {note}"));
    }
    Ok(rig)
}

/// A progress bar of 1000 steps; hidden when stderr is not a terminal.
fn bar(what: &'static str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg:>8} {bar:40} {percent:>3}% {elapsed}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(1000).with_style(style).with_message(what)
}
