//! Toy models: random weights in the shape of a Mixture of Experts, made without any source. They write
//! nonsense, the same on every machine, and are for checks of machinery that need no sense.

use super::error::Error;
use super::output::{Output, check_space, folder_of};
use crate::rng::Rng;
use std::path::PathBuf;

/// What a toy model is like.
#[derive(Clone, Debug, clap::Args)]
pub struct ToyArgs {
    /// Layers
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub layers: u32,
    /// Experts in every layer
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=512))]
    pub experts: u32,
    /// Experts that a token is routed to in every layer
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=32))]
    pub top_k: u32,
    /// Width of the model, a multiple of 64
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(64..=8192))]
    pub width: u32,
    /// Width of an expert, a multiple of 32
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(32..=8192))]
    pub expert_width: u32,
    /// Seed: equal seeds give equal files
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// File to write
    #[arg(short, long, value_name = "OUT.gguf")]
    pub output: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    pub force: bool,
}

/// Entries of the vocabulary: a token for each byte, then control tokens.
const VOCABULARY: u32 = 264;
/// The tokens that a text consists of: printable ASCII, so that it goes on for ever and can be read.
const SAID: std::ops::RangeInclusive<u64> = 0x20..=0x7e;
/// Width of an attention head.
const HEAD: u32 = 64;
/// Bytes that tensors are aligned to.
const ALIGNMENT: u64 = 32;
/// Columns and bytes of a block of 8-bit weights.
const BLOCK: (u64, u64) = (32, 34);
/// ggml's numbers of the two types used.
const F32: u32 = 0;
const Q8_0: u32 = 8;

/// One tensor to write.
struct Part {
    name: String,
    dims: Vec<u64>,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Floats around 1.
    Norm,
    /// Floats around 0.
    Dense,
    /// Floats so far apart that every token has experts of its own.
    Router,
    /// 8-bit blocks.
    Experts,
}

impl Part {
    fn bytes(&self) -> u64 {
        let count: u64 = self.dims.iter().product();
        if self.kind == Kind::Experts {
            count / BLOCK.0 * BLOCK.1
        } else {
            count * 4
        }
    }
}

/// Writes a toy model. Returns its size in bytes.
///
/// # Errors
/// When the widths do not fit together, the target exists, the disk is too full, or writing fails.
pub fn build_toy(args: &ToyArgs) -> Result<u64, Error> {
    check(args)?;
    if args.output.symlink_metadata().is_ok() && !args.force {
        return Err(Error::Exists {
            path: args.output.clone(),
        });
    }
    let parts = parts(args);
    let header = header(args, &parts);
    let body: u64 = parts
        .iter()
        .map(|p| p.bytes().next_multiple_of(ALIGNMENT))
        .sum();
    let total = header.len() as u64 + body;
    check_space(folder_of(&args.output), total)?;
    let mut output = Output::create(&args.output, args.force)?;
    output.write(&header)?;
    for (number, part) in parts.iter().enumerate() {
        write(part, args.seed, number as u64, &mut output)?;
    }
    output.finish()?;
    Ok(total)
}

fn check(args: &ToyArgs) -> Result<(), Error> {
    let refused = |option, value: u32, expected: &str| {
        Err(Error::Option {
            option,
            value: value.to_string(),
            expected: expected.to_owned(),
        })
    };
    if !args.width.is_multiple_of(HEAD) {
        return refused("--width", args.width, "a multiple of 64");
    }
    if !args.expert_width.is_multiple_of(32) {
        return refused("--expert-width", args.expert_width, "a multiple of 32");
    }
    if args.top_k > args.experts {
        return refused("--top-k", args.top_k, "at most --experts");
    }
    Ok(())
}

fn parts(args: &ToyArgs) -> Vec<Part> {
    let [width, inner, experts] = [args.width, args.expert_width, args.experts].map(u64::from);
    let head = u64::from(HEAD);
    let part = |name: String, dims: &[u64], kind| Part {
        name,
        dims: dims.to_vec(),
        kind,
    };
    let vocabulary = u64::from(VOCABULARY);
    let mut parts = vec![
        part(
            "token_embd.weight".into(),
            &[width, vocabulary],
            Kind::Dense,
        ),
        part("output_norm.weight".into(), &[width], Kind::Norm),
        part("output.weight".into(), &[width, vocabulary], Kind::Dense),
    ];
    for layer in 0..args.layers {
        let mut add = |name: &str, dims: &[u64], kind| {
            parts.push(part(format!("blk.{layer}.{name}.weight"), dims, kind));
        };
        for name in ["attn_norm", "ffn_norm"] {
            add(name, &[width], Kind::Norm);
        }
        for name in ["attn_q", "attn_k", "attn_v", "attn_output"] {
            add(name, &[width, width], Kind::Dense);
        }
        for name in ["attn_q_norm", "attn_k_norm"] {
            add(name, &[head], Kind::Norm);
        }
        add("ffn_gate_inp", &[width, experts], Kind::Router);
        for name in ["ffn_gate_exps", "ffn_up_exps"] {
            add(name, &[width, inner, experts], Kind::Experts);
        }
        add("ffn_down_exps", &[inner, width, experts], Kind::Experts);
    }
    parts
}

/// A GGUF header as it grows.
#[derive(Default)]
struct Header {
    bytes: Vec<u8>,
    keys: u64,
}

impl Header {
    fn text(&mut self, text: &str) {
        self.bytes.extend((text.len() as u64).to_le_bytes());
        self.bytes.extend(text.as_bytes());
    }

    /// A key and the number of its value's type.
    fn key(&mut self, key: &str, ty: u32) {
        self.keys += 1;
        self.text(key);
        self.bytes.extend(ty.to_le_bytes());
    }

    fn u32(&mut self, key: &str, value: u32) {
        self.key(key, 4);
        self.bytes.extend(value.to_le_bytes());
    }

    fn f32(&mut self, key: &str, value: f32) {
        self.key(key, 6);
        self.bytes.extend(value.to_le_bytes());
    }

    fn string(&mut self, key: &str, value: &str) {
        self.key(key, 8);
        self.text(value);
    }

    fn array(&mut self, key: &str, ty: u32, length: usize) {
        self.key(key, 9);
        self.bytes.extend(ty.to_le_bytes());
        self.bytes.extend((length as u64).to_le_bytes());
    }

    fn strings(&mut self, key: &str, values: &[String]) {
        self.array(key, 8, values.len());
        for value in values {
            self.text(value);
        }
    }
}

fn header(args: &ToyArgs, parts: &[Part]) -> Vec<u8> {
    let mut keys = Header::default();
    keys.string("general.architecture", "qwen3moe");
    keys.string("general.name", "toy");
    let heads = args.width / HEAD;
    let numbers = [
        ("block_count", args.layers),
        ("context_length", 4096),
        ("embedding_length", args.width),
        ("feed_forward_length", args.expert_width),
        ("attention.head_count", heads),
        ("attention.head_count_kv", heads),
        ("attention.key_length", HEAD),
        ("attention.value_length", HEAD),
        ("expert_count", args.experts),
        ("expert_used_count", args.top_k),
        ("expert_feed_forward_length", args.expert_width),
    ];
    for (name, value) in numbers {
        keys.u32(&format!("qwen3moe.{name}"), value);
    }
    keys.f32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6);
    keys.f32("qwen3moe.rope.freq_base", 10_000.0);
    vocabulary(&mut keys);
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend((parts.len() as u64).to_le_bytes());
    bytes.extend(keys.keys.to_le_bytes());
    let mut table = Header {
        bytes: std::mem::take(&mut keys.bytes),
        keys: 0,
    };
    let mut offset = 0_u64;
    for part in parts {
        table.text(&part.name);
        let dims = u32::try_from(part.dims.len()).unwrap_or(u32::MAX);
        table.bytes.extend(dims.to_le_bytes());
        for dim in &part.dims {
            table.bytes.extend(dim.to_le_bytes());
        }
        let ty = if part.kind == Kind::Experts {
            Q8_0
        } else {
            F32
        };
        table.bytes.extend(ty.to_le_bytes());
        table.bytes.extend(offset.to_le_bytes());
        offset += part.bytes().next_multiple_of(ALIGNMENT);
    }
    bytes.extend(table.bytes);
    let end = bytes.len().next_multiple_of(32);
    bytes.resize(end, 0);
    bytes
}

/// A token for each byte, as byte-level BPE writes them.
#[must_use]
pub fn byte_tokens() -> Vec<String> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut shifted = 0x100;
    (0..=255_u8)
        .map(|byte| {
            if printable(byte) {
                return char::from(byte).to_string();
            }
            shifted += 1;
            char::from_u32(shifted - 1).map_or_else(String::new, String::from)
        })
        .collect()
}

/// Byte-level BPE, without merges that matter.
fn vocabulary(keys: &mut Header) {
    let mut tokens = byte_tokens();
    let bytes = tokens.len();
    tokens.push("th".to_owned());
    let controls = (tokens.len()..VOCABULARY as usize).map(|n| format!("<|control {n}|>"));
    tokens.extend(controls);
    keys.string("tokenizer.ggml.model", "gpt2");
    keys.string("tokenizer.ggml.pre", "default");
    keys.strings("tokenizer.ggml.tokens", &tokens);
    keys.array("tokenizer.ggml.token_type", 5, tokens.len());
    for index in 0..tokens.len() {
        let kind: i32 = if index <= bytes { 1 } else { 3 };
        keys.bytes.extend(kind.to_le_bytes());
    }
    keys.strings("tokenizer.ggml.merges", &["t h".to_owned()]);
    keys.u32("tokenizer.ggml.bos_token_id", VOCABULARY - 2);
    keys.u32("tokenizer.ggml.eos_token_id", VOCABULARY - 1);
}

fn write(part: &Part, seed: u64, number: u64, output: &mut Output) -> Result<(), Error> {
    let columns = part.dims[0];
    let rows: u64 = part.dims[1..].iter().product();
    #[expect(clippy::cast_precision_loss, reason = "a width")]
    let spread = 1.0 / (columns as f32).sqrt();
    let mut row = Vec::new();
    for at in 0..rows {
        let mut rng = Rng::new(seed, [number, at, 0]);
        row.clear();
        if part.name == "output.weight" && !SAID.contains(&at) {
            // Never the likeliest.
            row.resize(usize::try_from(columns).unwrap_or(0) * 4, 0);
            output.write(&row)?;
            continue;
        }
        if part.kind == Kind::Experts {
            // Whole numbers from -127 to 127 have a deviation of 73.3.
            let scale = half(spread / 73.3).to_le_bytes();
            for _ in 0..columns / BLOCK.0 {
                row.extend(scale);
                row.extend((0..BLOCK.0).map(|_| rng.below(255).wrapping_sub(127).to_le_bytes()[0]));
            }
        } else {
            for _ in 0..columns {
                let normal = rng.normal();
                let value = match part.kind {
                    Kind::Norm => 1.0 + 0.1 * normal,
                    Kind::Router => 2.0 * spread * normal,
                    Kind::Dense | Kind::Experts => spread * normal,
                };
                row.extend(value.to_le_bytes());
            }
        }
        output.write(&row)?;
    }
    let padding = part.bytes().next_multiple_of(ALIGNMENT) - part.bytes();
    output.write(&vec![0; usize::try_from(padding).unwrap_or(0)])
}

/// A number from 2^-14 on as a 16-bit float, rounded towards 0; smaller ones become 2^-14.
fn half(value: f32) -> u16 {
    let bits = value.max(6.104e-5).to_bits();
    let exponent = (bits >> 23) - 112;
    u16::try_from(exponent << 10 | (bits >> 13 & 0x3ff)).unwrap_or(0x7bff)
}

#[cfg(test)]
mod tests {
    use super::half;

    #[test]
    fn halves_have_their_bits() {
        assert_eq!(half(1.0), 0x3c00);
        assert_eq!(half(0.5), 0x3800);
        assert_eq!(half(1.5), 0x3e00);
        assert_eq!(half(0.0), 0x0400);
    }
}
