//! What if experts were swapped into VRAM on the fly: one model on one machine under every strategy,
//! from rates and latencies, with the real policies keeping the tiers.
//!
//! Virtual time and no machine. docs/sim.md states what is modelled and how far it agrees with what
//! others have measured.

mod breakeven;
mod card;
mod decode;
mod hardware;
mod locality;
mod model;
mod prefill;
mod published;
mod strategy;
mod tier;

pub use breakeven::{BreakEven, break_even};
pub use card::{CardTick, Hog, Script};
pub use decode::Seconds;
pub use hardware::{Cpu, DescriptionError, Disk, Gpu, Hardware, Link, PRESETS as MACHINES};
pub use locality::{Locality, Sequence, Source};
pub use model::{ModelSizes, PRESETS as MODELS};
pub use published::{Comparison, Kind, published};
pub use strategy::{Impossible, Strategy};

use decode::Decoder;
use hotpin_controllers::{AdaptiveConfig, BuildError, ModelShape};
use serde::Serialize;

/// Tokens from which the profile of a drawn routing is counted.
const PROFILE_TOKENS: u64 = 1000;

/// Most sequences that run together.
pub const MOST_SEQUENCES: u32 = 256;

/// A question.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The machine.
    pub hardware: Hardware,
    /// The model.
    pub model: ModelSizes,
    /// Its routing.
    pub source: Source,
    /// Sequences decoded together, one token of each in a step.
    pub sequences: u32,
    /// Tokens of context of each; their KV takes VRAM.
    pub context: u32,
    /// Steps decoded before those that count.
    pub warm_up_steps: u64,
    /// Steps that count.
    pub steps: u64,
    /// Tokens of a prefill batch.
    pub prefill_tokens: u32,
    /// Time between two ticks of the policies, seconds.
    pub tick_s: f64,
    /// Seed of everything random.
    pub seed: u64,
    /// What changes meanwhile.
    pub script: Script,
    /// Options of the control laws; capacity, churn and read speed are set for each tier.
    pub config: AdaptiveConfig,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum WhatIfError {
    /// The model's description.
    #[error(transparent)]
    Description(#[from] DescriptionError),
    /// The policy.
    #[error(transparent)]
    Policy(#[from] BuildError),
    /// The strategy does not fit the machine.
    #[error(transparent)]
    Impossible(#[from] Impossible),
    /// The layers are no layout of a pool.
    #[error(transparent)]
    Layout(#[from] hotpin_controllers::vram::LayoutError),
    /// The trace is of another model, or empty.
    #[error(
        "the trace has {trace_layers} layers, {trace_experts} experts and {tokens} tokens; the model \
         has {layers} layers and {experts} experts, and its top-k must agree too"
    )]
    Trace {
        /// Layers of the trace.
        trace_layers: usize,
        /// Its experts.
        trace_experts: usize,
        /// Its tokens.
        tokens: usize,
        /// Layers of the model.
        layers: usize,
        /// Its experts.
        experts: usize,
    },
    /// A count outside its range.
    #[error("{name} = {value} must lie within 1 and {most}")]
    Range {
        /// What.
        name: &'static str,
        /// What was given.
        value: u64,
        /// Most.
        most: u64,
    },
}

/// What one strategy gives, a token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Decoded tokens a second over all sequences.
    pub tok_s: f64,
    /// Where the time of one step goes, seconds.
    pub step_s: Seconds,
    /// Share of the routed experts (of each step's union) that lay in VRAM; `null` without accesses.
    pub vram_hit_ratio: Option<f64>,
    /// Share of the experts looked for in RAM that were there; `null` where none was looked for.
    pub ram_hit_ratio: Option<f64>,
    /// Expert bytes over the bus for a token.
    pub bus_bytes_per_token: f64,
    /// Expert bytes from the disk for a token.
    pub disk_bytes_per_token: f64,
    /// Tokens a second while a prompt is read.
    pub prefill_tok_s: f64,
}

/// One line of the answer.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The strategy.
    pub strategy: Strategy,
    /// Its figures, where it fits.
    pub figures: Option<Figures>,
    /// Why it does not.
    pub impossible: Option<String>,
}

impl Setup {
    /// A question with one sequence, a context of 4096 tokens and default control laws.
    #[must_use]
    pub fn new(hardware: Hardware, model: ModelSizes) -> Self {
        Self {
            hardware,
            model,
            source: Source::Drawn(Locality::default()),
            sequences: 1,
            context: 4096,
            warm_up_steps: 400,
            steps: 600,
            prefill_tokens: 512,
            tick_s: 0.1,
            seed: 1,
            script: Script::default(),
            config: AdaptiveConfig::default(),
        }
    }

    /// Expert counts of an earlier run.
    fn profile(&self, shape: &ModelShape) -> Vec<f32> {
        locality::profile(&self.source, shape, self.seed, PROFILE_TOKENS)
    }

    fn check(&self) -> Result<(), WhatIfError> {
        let counts = [
            (
                "sequences",
                u64::from(self.sequences),
                u64::from(MOST_SEQUENCES),
            ),
            ("context", u64::from(self.context), 1 << 24),
            ("steps", self.steps, 1 << 24),
            ("prefill_tokens", u64::from(self.prefill_tokens), 1 << 16),
        ];
        for (name, value, most) in counts {
            if !(1..=most).contains(&value) {
                return Err(WhatIfError::Range { name, value, most });
            }
        }
        let Source::Trace(trace) = &self.source else {
            return Ok(());
        };
        let (theirs, ours) = (&trace.header.shape, self.model.shape()?);
        let same = theirs.layers() == ours.layers()
            && (0..ours.layers()).all(|layer| {
                theirs.experts_in(layer) == ours.experts_in(layer)
                    && theirs.top_k_in(layer) == ours.top_k_in(layer)
            });
        if same && trace.tokens() > 0 {
            return Ok(());
        }
        Err(WhatIfError::Trace {
            trace_layers: theirs.layers(),
            trace_experts: theirs.total_experts(),
            tokens: trace.tokens(),
            layers: ours.layers(),
            experts: ours.total_experts(),
        })
    }
}

fn decoder(setup: &Setup, strategy: Strategy) -> Result<Decoder<'_>, WhatIfError> {
    setup.check()?;
    let placement = strategy.place(
        &setup.hardware,
        &setup.model,
        setup.sequences,
        setup.context,
    )?;
    Decoder::new(setup, placement)
}

/// Answers for one strategy.
///
/// # Errors
/// When the question is refused or the strategy does not fit.
pub fn evaluate(setup: &Setup, strategy: Strategy) -> Result<Figures, WhatIfError> {
    let mut decoder = decoder(setup, strategy)?;
    decoder.settle(setup.warm_up_steps);
    decoder.run(setup.steps);
    let figures = decoder.figures();
    Ok(Figures {
        prefill_tok_s: decoder.prefill_tok_s(setup, setup.prefill_tokens),
        ..figures
    })
}

/// What the law does with a card for so many seconds of virtual time, tick by tick; nothing for a
/// strategy without it.
///
/// # Errors
/// As [`evaluate`].
pub fn timeline(
    setup: &Setup,
    strategy: Strategy,
    seconds: f64,
) -> Result<Vec<CardTick>, WhatIfError> {
    let mut decoder = decoder(setup, strategy)?;
    Ok(decoder.record(seconds))
}

/// Answers for every strategy of the machine.
///
/// # Errors
/// When the question is refused.
pub fn compare(setup: &Setup) -> Result<Vec<Outcome>, WhatIfError> {
    setup.check()?;
    let strategies = Strategy::of(&setup.hardware).iter();
    strategies
        .map(|&strategy| {
            let (figures, impossible) = match evaluate(setup, strategy) {
                Ok(figures) => (Some(figures), None),
                Err(WhatIfError::Impossible(why)) => (None, Some(why.to_string())),
                Err(other) => return Err(other),
            };
            Ok(Outcome {
                strategy,
                figures,
                impossible,
            })
        })
        .collect()
}
