//! `hotpin-sim import`.

use anyhow::{Context, Result};
use clap::Args;
use hotpin_controllers::ModelShape;
use hotpin_controllers::trace::TraceHeader;
use hotpin_sim::import;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub struct ImportArgs {
    /// Raw ids: one byte each, [tokens][layers][top-k], plain or compressed with xz.
    #[arg(long, value_name = "FILE")]
    raw: PathBuf,
    /// MoE layers of the model.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    layers: u32,
    /// Experts a layer, at most 256.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    experts: u32,
    /// Experts routed to per token and layer.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    top_k: u32,
    /// CSV with the columns repetition, n_tokens and offset_tokens, one row a prompt.
    #[arg(long, value_name = "CSV")]
    segments: Option<PathBuf>,
    /// Leave out the segments marked as repetition.
    #[arg(long, requires = "segments")]
    drop_repetition: bool,
    /// Name of the model, kept in the trace.
    #[arg(long, value_name = "NAME", default_value = "")]
    model: String,
    /// Architecture as the model file names it, kept in the trace.
    #[arg(long, value_name = "NAME", default_value = "")]
    architecture: String,
    /// Bytes of one expert; hit ratios do not depend on it.
    #[arg(long, value_name = "BYTES", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    expert_bytes: u64,
    /// Bytes of the dense weights.
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    dense_bytes: u64,
    /// The trace to write.
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
}

pub fn run(args: &ImportArgs) -> Result<()> {
    let header = TraceHeader {
        model: args.model.clone(),
        architecture: args.architecture.clone(),
        dense_bytes: args.dense_bytes,
        shape: ModelShape::uniform(
            args.layers as usize,
            args.experts,
            args.expert_bytes,
            args.top_k,
        )?,
    };
    let file = fs::read(&args.raw).with_context(|| format!("reading {}", args.raw.display()))?;
    let raw = import::unpack(file).with_context(|| args.raw.display().to_string())?;
    let tokens =
        import::token_count(&header, &raw).with_context(|| args.raw.display().to_string())?;
    let kept = args
        .segments
        .as_deref()
        .map(|path| kept_segments(path, tokens, args.drop_repetition))
        .transpose()?;
    let trace = import::encode(&header, &raw, kept.as_deref())
        .with_context(|| args.raw.display().to_string())?;
    write_whole(&args.out, &trace)?;
    let kept_tokens = kept.map_or(tokens, |kept| kept.iter().map(|s| s.tokens.len()).sum());
    writeln!(
        io::stdout(),
        "{}: {kept_tokens} of {tokens} tokens, {} bytes",
        args.out.display(),
        trace.len()
    )?;
    Ok(())
}

fn kept_segments(path: &Path, tokens: usize, drop: bool) -> Result<Vec<import::Segment>> {
    let context = || path.display().to_string();
    let text = fs::read_to_string(path).with_context(context)?;
    let segments = import::segments(&text, tokens).with_context(context)?;
    Ok(segments
        .into_iter()
        .filter(|segment| !(drop && segment.repetition))
        .collect())
}

/// Writes beside the target first, so that a file of that name is always whole.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    fs::write(&partial, bytes)
        .and_then(|()| fs::rename(&partial, path))
        .with_context(|| format!("writing {}", path.display()))
}
