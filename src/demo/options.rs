//! What to build: command-line arguments and the validated options made from them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::Error;
use crate::engine::quantize::TensorType;

/// Most experts a layer may have.
pub const MAX_EXPERTS: u32 = 512;

/// Fewest and most calibration tokens a domain.
const CALIBRATION_TOKENS: std::ops::RangeInclusive<usize> = 64..=65_536;

/// Number format of the experts' weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Quant {
    /// 8.5 bits a weight.
    #[value(name = "q8_0")]
    #[serde(rename = "q8_0")]
    Q8_0,
    /// 4.5 bits a weight.
    #[value(name = "q4_0")]
    #[serde(rename = "q4_0")]
    Q4_0,
    /// 16 bits a weight.
    F16,
}

impl Quant {
    /// ggml's type.
    #[must_use]
    pub const fn tensor_type(self) -> TensorType {
        match self {
            Self::Q8_0 => TensorType::Q8_0,
            Self::Q4_0 => TensorType::Q4_0,
            Self::F16 => TensorType::F16,
        }
    }

    /// llama.cpp's number for files of mostly this type (`general.file_type`, `enum llama_ftype`).
    #[must_use]
    pub const fn file_type(self) -> u32 {
        match self {
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 7,
        }
    }
}

/// Turns a dense llama-architecture GGUF into a real Mixture-of-Experts model.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelArgs {
    /// Dense llama-architecture GGUF to start from
    #[arg(long, value_name = "DENSE.gguf", env = "HOTPIN_DEMO_FROM")]
    pub from: PathBuf,
    /// Experts in every layer
    #[arg(long, default_value_t = 64, env = "HOTPIN_DEMO_EXPERTS")]
    pub experts: u32,
    /// Experts that a token is routed to in every layer
    #[arg(long, default_value_t = 4, env = "HOTPIN_DEMO_TOP_K")]
    pub top_k: u32,
    /// Number format of the experts
    #[arg(long, value_enum, default_value = "q8_0", env = "HOTPIN_DEMO_QUANT")]
    pub quant: Quant,
    /// Seed of everything random: equal seeds give equal files on one machine
    #[arg(long, default_value_t = 1, env = "HOTPIN_DEMO_SEED")]
    pub seed: u64,
    /// File to write
    #[arg(short, long, value_name = "OUT.gguf", env = "HOTPIN_DEMO_OUTPUT")]
    pub output: PathBuf,
    /// Directory of NAME.txt files, one a domain, to calibrate the routers on; built-in texts
    /// otherwise
    #[arg(long, value_name = "DIR", env = "HOTPIN_DEMO_WORKLOAD")]
    pub workload: Option<PathBuf>,
    /// Most calibration tokens of a domain; every domain gives as many
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1024,
        env = "HOTPIN_DEMO_CALIBRATION_TOKENS"
    )]
    pub calibration_tokens: usize,
    /// Tokens at the beginning of each text that calibration leaves out, for benchmarks to decode
    #[arg(
        long,
        value_name = "N",
        default_value_t = 640,
        env = "HOTPIN_DEMO_HELD_OUT_TOKENS"
    )]
    pub held_out_tokens: usize,
    /// Replace the output file if it exists
    #[arg(long, env = "HOTPIN_DEMO_FORCE")]
    pub force: bool,
}

/// Where the calibration texts come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Workload {
    /// The texts in the program.
    BuiltIn,
    /// All `*.txt` files of a directory, each a domain named by its stem.
    Directory(PathBuf),
}

/// A validated order for a demo model.
#[derive(Clone, Debug)]
pub struct Options {
    pub(super) source: PathBuf,
    pub(super) output: PathBuf,
    pub(super) experts: u32,
    pub(super) top_k: u32,
    pub(super) quant: Quant,
    pub(super) seed: u64,
    pub(super) workload: Workload,
    pub(super) calibration_tokens: usize,
    pub(super) held_out_tokens: usize,
    pub(super) force: bool,
}

impl TryFrom<ModelArgs> for Options {
    type Error = Error;

    fn try_from(args: ModelArgs) -> Result<Self, Error> {
        let refuse = |option, value: String, expected: String| {
            Err(Error::Option {
                option,
                value,
                expected,
            })
        };
        if !(2..=MAX_EXPERTS).contains(&args.experts) {
            return refuse(
                "--experts",
                args.experts.to_string(),
                format!("2 to {MAX_EXPERTS}"),
            );
        }
        if !(1..=args.experts).contains(&args.top_k) {
            let expected = format!("1 to the {} experts of a layer", args.experts);
            return refuse("--top-k", args.top_k.to_string(), expected);
        }
        if !CALIBRATION_TOKENS.contains(&args.calibration_tokens) {
            let (low, high) = (CALIBRATION_TOKENS.start(), CALIBRATION_TOKENS.end());
            let expected = format!("{low} to {high} tokens a domain");
            return refuse(
                "--calibration-tokens",
                args.calibration_tokens.to_string(),
                expected,
            );
        }
        if args.output.file_name().is_none() {
            let value = args.output.display().to_string();
            return refuse("--output", value, "a file name".to_owned());
        }
        Ok(Self {
            source: args.from,
            output: args.output,
            experts: args.experts,
            top_k: args.top_k,
            quant: args.quant,
            seed: args.seed,
            workload: args.workload.map_or(Workload::BuiltIn, Workload::Directory),
            calibration_tokens: args.calibration_tokens,
            held_out_tokens: args.held_out_tokens,
            force: args.force,
        })
    }
}
