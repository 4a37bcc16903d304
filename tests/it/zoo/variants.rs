//! Rows for every type of weights, and for shapes that only some models have.

use super::architectures::MLA;
use super::rows::Value::{Bool, Ints, Uint, Uints};
use super::rows::{Key, Place, Row};

/// Rows of 256, as the K types want them.
const WIDE: &[Key] = &[
    ("embedding_length", Uint(256)),
    ("block_count", Uint(2)),
    ("expert_feed_forward_length", Uint(256)),
];

/// A model whose experts are all of one type.
macro_rules! of_type {
    ($ty:literal) => {
        Row::new("qwen3moe", $ty, WIDE).types(&[($ty, $ty)])
    };
}

/// Every type that ggml multiplies experts by, and mixtures.
pub const TYPES: &[Row] = &[
    of_type!("q4_0"),
    of_type!("q4_1"),
    of_type!("q5_0"),
    of_type!("q5_1"),
    of_type!("q8_0"),
    of_type!("q2_K"),
    of_type!("q3_K"),
    of_type!("q4_K"),
    of_type!("q5_K"),
    of_type!("q6_K"),
    of_type!("iq1_s"),
    of_type!("iq1_m"),
    of_type!("iq2_xxs"),
    of_type!("iq2_xs"),
    of_type!("iq2_s"),
    of_type!("iq3_xxs"),
    of_type!("iq3_s"),
    of_type!("iq4_nl"),
    of_type!("iq4_xs"),
    of_type!("tq1_0"),
    of_type!("tq2_0"),
    of_type!("q1_0"),
    of_type!("q2_0"),
    of_type!("mxfp4"),
    of_type!("nvfp4"),
    of_type!("f8_e4m3"),
    of_type!("f16"),
    of_type!("bf16"),
    of_type!("f32"),
    Row::new(
        "qwen3moe",
        "another type in each block and part",
        &[
            ("embedding_length", Uint(256)),
            ("expert_feed_forward_length", Uint(256)),
        ],
    )
    .types(&[
        ("q2_K", "q3_K"),
        ("q4_K", "q6_K"),
        ("iq2_xxs", "iq4_nl"),
        ("q5_1", "f16"),
    ]),
];

/// Ways in which the files of a model lie.
pub const FILES: &[Row] = &[
    Row::new(
        "qwen3moe",
        "four shards, each layer's experts in three of them",
        &[],
    )
    .lies(Place::Shards(4)),
    Row::new("deepseek2", "seven shards, the first without experts", MLA).lies(Place::Shards(7)),
    Row::new(
        "qwen3moe",
        "symbolic links to shards on two file systems",
        &[],
    )
    .lies(Place::Linked(4)),
    Row::new("qwen3moe", "a read-only mount", &[]).lies(Place::ReadOnlyMount),
];

/// Shapes.
pub const SHAPES: &[Row] = &[
    Row::new(
        "qwen3moe",
        "512 experts, top-10",
        &[
            ("embedding_length", Uint(64)),
            ("block_count", Uint(2)),
            ("expert_feed_forward_length", Uint(32)),
            ("expert_count", Uint(512)),
            ("expert_used_count", Uint(10)),
        ],
    ),
    Row::new(
        "qwen3moe",
        "top-22 of 64",
        &[
            ("block_count", Uint(2)),
            ("expert_count", Uint(64)),
            ("expert_used_count", Uint(22)),
        ],
    ),
    Row::new(
        "qwen3moe",
        "top-1 of 2",
        &[("expert_count", Uint(2)), ("expert_used_count", Uint(1))],
    ),
    Row::new(
        "qwen3moe",
        "all of 4",
        &[("expert_count", Uint(4)), ("expert_used_count", Uint(4))],
    ),
    Row::new(
        "nemotron_h_moe",
        "top-k differs by layer",
        &[
            ("ssm.conv_kernel", Uint(4)),
            ("ssm.inner_size", Uint(256)),
            ("ssm.state_size", Uint(32)),
            ("ssm.time_step_rank", Uint(8)),
            ("ssm.group_count", Uint(1)),
            ("attention.head_count_kv", Uints(&[0, 0, 2, 0])),
            ("feed_forward_length", Uints(&[0, 64, 0, 64])),
            ("expert_used_count", Uints(&[0, 1, 0, 3])),
        ],
    ),
    Row::new(
        "deepseek",
        "one MoE layer after a dense one",
        &[
            ("block_count", Uint(2)),
            ("leading_dense_block_count", Uint(1)),
        ],
    ),
    Row::new(
        "gpt-oss",
        "biases larger than a page",
        &[
            ("attention.sliding_window", Uint(16)),
            ("expert_feed_forward_length", Uint(1056)),
        ],
    )
    .types(&[("mxfp4", "mxfp4")])
    .with(&[
        "attn_q.bias",
        "attn_k.bias",
        "attn_v.bias",
        "attn_output.bias",
    ]),
    Row::new("qwen3moe", "experts with scales", WIDE)
        .types(&[("nvfp4", "nvfp4")])
        .with(&["exps.scale", "exps.input_scale"]),
    Row::new(
        "qwen3moe",
        "slices that fill whole pages",
        &[("expert_feed_forward_length", Uint(64))],
    )
    .types(&[("f16", "f16")])
    .aligned(4096),
    Row::new(
        "k2-horizon",
        "value experts in attention",
        &[
            ("leading_dense_block_count", Uint(1)),
            ("moe_every_n_layers", Uint(1)),
            ("attention.value_expert_count", Uint(4)),
            ("attention.value_expert_used_count", Uint(2)),
        ],
    ),
    Row::new(
        "qwen35moe",
        "a block for multi-token prediction",
        &[
            ("ssm.conv_kernel", Uint(4)),
            ("ssm.inner_size", Uint(128)),
            ("ssm.state_size", Uint(32)),
            ("ssm.time_step_rank", Uint(4)),
            ("ssm.group_count", Uint(2)),
            ("rope.dimension_sections", Ints(&[8, 4, 4, 0])),
        ],
    )
    .mtp(),
];

/// What llama.cpp itself does not run, and a part of what it says.
pub const NOT_RUN: &[(Row, &str)] = &[
    (
        Row::new("qwen3moe", "tensors aligned to 8 bytes", &[]).aligned(8),
        "buffer pointer must be aligned",
    ),
    (
        Row::new(
            "qwen3moe",
            "another number of experts in each layer",
            &[("expert_count", Uints(&[8, 4, 8, 4]))],
        ),
        "expert_count",
    ),
    (
        Row::new(
            "llada-moe",
            "a diffusion model's prompt in several micro-batches",
            &[],
        ),
        "encoder requires n_ubatch >= n_tokens",
    ),
];

/// Models that embed or rank texts instead of going on with them.
pub const NO_GENERATORS: &[Row] = &[
    Row::new("qwen3moe", "a reranker", &[("pooling_type", Uint(4))]),
    Row::new(
        "qwen3moe",
        "an embedding model",
        &[("attention.causal", Bool(false)), ("pooling_type", Uint(1))],
    ),
];
