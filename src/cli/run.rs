//! `hotpin run`: generate text.

use super::common::{self, Usage};
use crate::config::Config;
use crate::config::args::{CONTEXT_TOKENS, ControlArgs, EngineArgs};
use crate::engine::{Model, Sampler, SamplerOptions};
use crate::generate::{Generation, Stop, generate};
use crate::learn::Learning;
use crate::plant::Rig;
use anyhow::{Context, Result, ensure};
use clap::Args;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// The model, a GGUF file (the first one if it is split)
    #[arg(env = "HOTPIN_MODEL")]
    model: PathBuf,
    /// The prompt; `-` reads it from stdin
    #[arg(short, long)]
    prompt: String,
    /// A system message in front of the prompt
    #[arg(long, conflicts_with = "raw")]
    system: Option<String>,
    /// Send the prompt as it is, without the model's chat template
    #[arg(long)]
    raw: bool,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Seed of the random choice
    #[arg(long, env = "HOTPIN_SEED", default_value_t = 0)]
    seed: u32,
    #[command(flatten)]
    generation: GenerationArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    control: ControlArgs,
}

/// How text is generated.
#[derive(Debug, Args)]
#[command(next_help_heading = "Generation")]
struct GenerationArgs {
    /// Most tokens to generate
    #[arg(short = 'n', long, env = "HOTPIN_PREDICT", default_value_t = 256)]
    predict: u32,
    /// Temperature; 0 takes the likeliest token
    #[arg(long, env = "HOTPIN_TEMP", default_value_t = 0.8)]
    temp: f32,
    /// Nucleus sampling: smallest set of tokens with this probability
    #[arg(long, env = "HOTPIN_TOP_P", default_value_t = 0.95)]
    top_p: f32,
    /// Keep the k likeliest tokens; 0 keeps all
    #[arg(long, env = "HOTPIN_TOP_K", default_value_t = 40)]
    top_k: u32,
    /// Drop tokens less likely than this share of the likeliest
    #[arg(long, env = "HOTPIN_MIN_P", default_value_t = 0.05)]
    min_p: f32,
}

impl RunArgs {
    fn sampler(&self) -> Result<SamplerOptions> {
        let choice = &self.generation;
        let checks = [
            (
                choice.temp >= 0.0 && choice.temp.is_finite(),
                "--temp must be 0 or more",
            ),
            (
                choice.top_p > 0.0 && choice.top_p <= 1.0,
                "--top-p must be above 0 and at most 1",
            ),
            (
                (0.0..=1.0).contains(&choice.min_p),
                "--min-p must be between 0 and 1",
            ),
            (
                self.stop.iter().all(|s| !s.is_empty()),
                "--stop must not be empty",
            ),
        ];
        if let Some((_, wrong)) = checks.into_iter().find(|(fits, _)| !fits) {
            return Err(Usage(wrong.to_owned()).into());
        }
        Ok(SamplerOptions {
            temperature: choice.temp,
            top_p: choice.top_p,
            top_k: choice.top_k,
            min_p: choice.min_p,
            seed: self.seed,
        })
    }

    fn prompt_text(&self) -> Result<String> {
        if self.prompt != "-" {
            return Ok(self.prompt.clone());
        }
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .context("reading the prompt from stdin")?;
        Ok(text)
    }

    fn tokens(&self, model: &Model, text: &str) -> Result<Vec<i32>> {
        let tokens = if self.raw {
            model.tokenize(text, model.adds_bos(), true)?
        } else {
            model.chat_tokens(self.system.as_deref(), text)?
        };
        ensure!(!tokens.is_empty(), "the prompt is empty");
        Ok(tokens)
    }
}

pub(super) fn execute(args: &RunArgs, config: &Config) -> Result<ExitCode> {
    let sampling = args.sampler()?;
    // Before the model is loaded, which may take minutes.
    let control = common::control(&args.control.regulation, config)?;
    let text = args.prompt_text()?;
    let device = &args.control.regulation.device;
    let (map, model) = common::load(&args.model, args.control.policy, device)?;
    let tokens = args.tokens(&model, &text)?;
    let (options, learner) =
        args.control
            .rig_options(args.engine.options(CONTEXT_TOKENS), control, &map)?;
    let mut rig = common::assemble(&model, &map, options)?;
    let learning = common::start_learning(learner, &rig)?;
    if let Some(recording) = &rig.recording {
        recording.prompt("prompt");
    }
    let mut sampler = Sampler::new(&sampling);
    let mut out = std::io::stdout().lock();
    let generation = generate(
        &mut rig.session,
        &tokens,
        args.generation.predict,
        &args.stop,
        &mut sampler,
        &mut |piece: &[u8]| {
            // A reader that went away ends the generation, it is no failure.
            out.write_all(piece).and_then(|()| out.flush()).is_ok()
        },
    )?;
    let _ = writeln!(out);
    drop(out);
    report(&mut rig, &generation)?;
    learning.map_or(Ok(()), Learning::finish)?;
    Ok(ExitCode::SUCCESS)
}

fn report(rig: &mut Rig<'_>, generation: &Generation) -> Result<()> {
    let totals = rig.counters.totals();
    common::note(&format!(
        "\nprompt {} tokens in {:.2} s ({:.1} tok/s), answer {} tokens in {:.2} s ({:.1} tok/s){}",
        generation.prompt_tokens,
        generation.prompt_s,
        f64::from(generation.prompt_tokens) / generation.prompt_s.max(1e-9),
        generation.tokens,
        generation.decode_s,
        f64::from(generation.tokens) / generation.decode_s.max(1e-9),
        match generation.stop {
            Stop::Length => ", stopped at -n",
            Stop::Context => ", stopped because the context is full (a larger -c holds more)",
            Stop::End | Stop::Text | Stop::Reader => "",
        }
    ));
    if let Some(pool) = rig.end_fixed_pool()? {
        let (hits, misses) = pool.uses();
        common::note(&format!(
            "device: a pool of {} for experts, {} slots, {hits} of {} there when routed, {:.1} MiB copied to it",
            crate::size::format_bytes(pool.bytes),
            pool.slots,
            hits + misses,
            pool.uploaded_bytes() / f64::from(1 << 20),
        ));
    }
    let routed = totals.hits + totals.misses;
    if routed == 0 {
        return Ok(());
    }
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    let (hit, stall_s) = (
        totals.hits as f64 / routed as f64,
        crate::time::seconds(totals.stall_ns),
    );
    if let Some(governor) = &rig.governor {
        let status = governor.status();
        common::note(&format!(
            "experts: {:.1}% resident when routed, waited {stall_s:.2} s for the rest; {} pinned, {} in transit, capacity {} set by {}",
            hit * 100.0,
            crate::size::format_bytes(status.pinned_bytes),
            crate::size::format_bytes(status.transit_bytes),
            crate::size::format_bytes(status.decision.capacity_bytes),
            status.decision.binding.label(),
        ));
        if let Some(vram) = status.entry.and_then(|entry| entry.vram) {
            common::note(&format!("device: {}", vram.words()));
        }
    }
    Ok(())
}
