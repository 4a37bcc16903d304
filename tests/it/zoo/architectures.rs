//! One row for each MoE architecture of the pinned llama.cpp.

use super::rows::Value::{Bool, Bools, Float, Ints, Uint, Uints};
use super::rows::{Key, Row, SIGMOID, SQRT_SOFTPLUS};

/// The rows.
pub const ARCHITECTURES: &[Row] = &[
    Row::new("llama", "Mixtral 8x7B, 8x22B", &[])
        .types(&[("q4_0", "q4_1")])
        .without(&["shexp"]),
    Row::new("qwen2moe", "Qwen1.5-MoE, Qwen2-57B-A14B", &[]).with(&[
        "attn_q.bias",
        "attn_k.bias",
        "attn_v.bias",
    ]),
    Row::new("qwen3moe", "Qwen3-30B-A3B, 235B-A22B", &[]).types(&[("q4_0", "q4_1")]),
    Row::new("qwen3next", "Qwen3-Next-80B-A3B", SSM),
    Row::new("qwen35moe", "Qwen3.5-35B-A3B", SSM_MROPE),
    Row::new("qwen35moe", "Qwen3.5-35B-A3B, gate and up apart", SSM_MROPE).split_gate_up(),
    Row::new(
        "qwen3vlmoe",
        "Qwen3-VL-30B-A3B",
        &[("rope.dimension_sections", Ints(&[8, 4, 4, 0]))],
    ),
    Row::new(
        "olmoe",
        "OLMoE-1B-7B",
        &[
            ("attention.head_count_kv", Uint(4)),
            ("feed_forward_length", Uint(64)),
        ],
    ),
    Row::new(
        "deepseek",
        "DeepSeek-MoE-16B",
        &[("leading_dense_block_count", Uint(1))],
    ),
    Row::new("deepseek2", "DeepSeek-V2, V3, R1, Kimi K2", MLA),
    Row::new(
        "gpt-oss",
        "gpt-oss-20b, 120b",
        &[("attention.sliding_window", Uint(16))],
    )
    .types(&[("mxfp4", "mxfp4")])
    .with(&[
        "attn_q.bias",
        "attn_k.bias",
        "attn_v.bias",
        "attn_output.bias",
    ]),
    Row::new(
        "granitemoe",
        "Granite 3 MoE",
        &[
            ("logit_scale", Float(6.0)),
            ("residual_scale", Float(0.22)),
            ("embedding_scale", Float(12.0)),
            ("attention.scale", Float(0.0156)),
        ],
    )
    .types(&[("q4_0", "q4_1")]),
    Row::new(
        "granitehybrid",
        "Granite 4 H",
        &[
            ("logit_scale", Float(6.0)),
            ("ssm.conv_kernel", Uint(4)),
            ("ssm.inner_size", Uint(256)),
            ("ssm.state_size", Uint(32)),
            ("ssm.time_step_rank", Uint(8)),
            ("ssm.group_count", Uint(1)),
            ("attention.head_count_kv", Uints(&[0, 2, 0, 2])),
        ],
    ),
    Row::new(
        "glm4moe",
        "GLM-4.5, 4.6",
        &[
            ("leading_dense_block_count", Uint(1)),
            ("expert_gating_func", Uint(SIGMOID)),
        ],
    )
    .mtp(),
    Row::new(
        "llama4",
        "Llama 4 Maverick",
        &[
            ("interleave_moe_layer_step", Uint(2)),
            ("expert_used_count", Uint(1)),
        ],
    ),
    Row::new(
        "llama4",
        "Llama 4 Scout",
        &[
            ("interleave_moe_layer_step", Uint(1)),
            ("expert_used_count", Uint(1)),
        ],
    ),
    Row::new("gemma4", "Gemma 4 26B-A4B", GEMMA).with(&[
        "rope_freqs",
        "ffn_gate_inp.scale",
        "ffn_down_exps.scale",
    ]),
    Row::new(
        "minimax-01",
        "MiniMax-Text-01",
        &[
            ("residual_scale", Float(1.0)),
            (
                "attention.recurrent_layers",
                Bools(&[true, true, true, false]),
            ),
        ],
    ),
    Row::new(
        "minimax-m2",
        "MiniMax-M2",
        &[("expert_gating_func", Uint(SIGMOID))],
    ),
    Row::new(
        "minimax-m3",
        "MiniMax-M3",
        &[
            ("leading_dense_block_count", Uint(1)),
            ("expert_gating_func", Uint(SIGMOID)),
            ("attention.indexer.head_count", Uint(2)),
            ("attention.indexer.key_length", Uint(64)),
            ("attention.indexer.top_k", Uint(2)),
            ("attention.indexer.block_size", Uint(16)),
            ("attention.indexer.local_blocks", Uint(1)),
        ],
    ),
    Row::new("bailingmoe", "Ling-lite", &[]),
    Row::new(
        "bailingmoe2",
        "Ling 2, Ring 2",
        &[
            ("leading_dense_block_count", Uint(1)),
            ("expert_gating_func", Uint(SIGMOID)),
            ("expert_group_count", Uint(4)),
            ("expert_group_used_count", Uint(2)),
        ],
    ),
    Row::new("bailingmoe3", "Ling 3", BAILING3),
    Row::new("phimoe", "Phi-3.5-MoE", &[]).with(&[
        "attn_q.bias",
        "attn_k.bias",
        "attn_v.bias",
        "attn_output.bias",
    ]),
    Row::new("dbrx", "DBRX", &[("attention.clamp_kqv", Float(8.0))]),
    Row::new("arctic", "Snowflake Arctic", &[]),
    Row::new("grok", "Grok-1", &[]),
    Row::new(
        "lfm2moe",
        "LFM2-8B-A1B",
        &[
            ("shortconv.l_cache", Uint(3)),
            ("leading_dense_block_count", Uint(1)),
            ("expert_gating_func", Uint(SIGMOID)),
            ("attention.head_count_kv", Uints(&[0, 2, 0, 2])),
        ],
    ),
    Row::new(
        "dots1",
        "dots.llm1",
        &[
            ("attention.head_count_kv", Uint(4)),
            ("leading_dense_block_count", Uint(1)),
            ("expert_gating_func", Uint(SIGMOID)),
        ],
    ),
    Row::new(
        "ernie4_5-moe",
        "ERNIE 4.5 MoE",
        &[
            ("leading_dense_block_count", Uint(1)),
            ("interleave_moe_layer_step", Uint(1)),
        ],
    ),
    Row::new("hunyuan-moe", "Hunyuan-A13B", &[]),
    Row::new("smallthinker", "SmallThinker", &[]),
    Row::new(
        "grovemoe",
        "GroveMoE",
        &[
            ("expert_group_scale", Float(0.05)),
            ("experts_per_group", Uint(2)),
            ("expert_chunk_feed_forward_length", Uint(64)),
        ],
    ),
    Row::new(
        "afmoe",
        "Trinity (AFMoE)",
        &[
            ("attention.sliding_window", Uint(16)),
            ("leading_dense_block_count", Uint(1)),
            ("expert_gating_func", Uint(SIGMOID)),
        ],
    ),
    Row::new(
        "exaone-moe",
        "EXAONE MoE",
        &[
            ("leading_dense_block_count", Uint(1)),
            ("expert_gating_func", Uint(SIGMOID)),
            ("attention.sliding_window", Uint(16)),
        ],
    ),
    Row::new(
        "cohere2moe",
        "Cohere2 MoE",
        &[
            ("leading_dense_block_count", Uint(1)),
            ("logit_scale", Float(0.25)),
            ("attention.sliding_window", Uint(16)),
        ],
    ),
    Row::new(
        "jamba",
        "Jamba",
        &[
            ("ssm.conv_kernel", Uint(4)),
            ("ssm.inner_size", Uint(256)),
            ("ssm.state_size", Uint(16)),
            ("ssm.time_step_rank", Uint(8)),
            ("attention.head_count_kv", Uints(&[0, 2, 0, 2])),
        ],
    ),
    Row::new("nemotron_h_moe", "Nemotron 3 Nano", NEMOTRON),
    Row::new("kimi-linear", "Kimi Linear", KIMI_LINEAR),
    Row::new("kimi-k3", "Kimi K3", KIMI_K3),
    Row::new("llada-moe", "LLaDA-MoE", &[]).whole_prompts(),
    Row::new("rnd1", "RND1", &[]).whole_prompts(),
    Row::new("mistral4", "Mistral 4", MLA),
    Row::new(
        "mimo2",
        "MiMo-V2",
        &[
            ("attention.sliding_window", Uint(16)),
            ("attention.sliding_window_pattern", Uints(&[1, 0, 1, 0])),
            ("expert_gating_func", Uint(SIGMOID)),
        ],
    ),
    Row::new(
        "step35",
        "Step-3.5",
        &[
            ("attention.sliding_window", Uint(16)),
            ("attention.sliding_window_pattern", Uints(&[1, 0, 1, 0])),
            ("expert_gating_func", Uint(SIGMOID)),
            ("leading_dense_block_count", Uint(1)),
        ],
    ),
    Row::new(
        "mellum",
        "Mellum",
        &[("attention.sliding_window", Uint(16))],
    ),
    Row::new(
        "laguna",
        "Laguna",
        &[
            ("leading_dense_block_count", Uint(1)),
            ("attention.sliding_window", Uint(16)),
        ],
    ),
    Row::new("deepseek32", "DeepSeek-V3.2", DSA),
    Row::new("deepseek4", "DeepSeek-V4", DEEPSEEK4),
    Row::new("glm-dsa", "GLM-5", DSA),
    Row::new("glm5-next", "GLM-5 Next", GLM5_NEXT),
    Row::new(
        "hy_v3",
        "Hunyuan V3",
        &[
            ("leading_dense_block_count", Uint(1)),
            ("expert_gating_func", Uint(SIGMOID)),
        ],
    ),
    Row::new("hy_v4", "Hunyuan V4", MLA),
    Row::new(
        "maple",
        "Maple",
        &[
            ("attention.sliding_window", Uint(16)),
            ("attention.sliding_window_pattern", Uints(&[1, 0, 1, 0])),
            ("swiglu_clamp_exp", Float(7.0)),
        ],
    ),
    Row::new(
        "flint",
        "Flint",
        &[
            ("leading_dense_block_count", Uint(1)),
            ("attention.sliding_window", Uint(16)),
            ("attention.sliding_window_pattern", Uints(&[1, 0, 1, 0])),
            ("attention.rope_pattern", Uints(&[1, 0, 1, 0])),
            ("expert_gating_func", Uint(SIGMOID)),
        ],
    ),
    Row::new(
        "beam",
        "Beam",
        &[
            ("leading_dense_block_count", Uint(1)),
            ("attention.sliding_window", Uint(16)),
            ("attention.sliding_window_pattern", Uints(&[1, 0, 1, 0])),
            ("expert_gating_func", Uint(SIGMOID)),
        ],
    ),
    Row::new(
        "kolibri1",
        "Kolibri 1",
        &[
            ("attention.sliding_window", Uint(16)),
            ("attention.sliding_window_pattern", Uints(&[1, 0, 1, 0])),
            ("expert_gating_func", Uint(SIGMOID)),
        ],
    ),
    Row::new(
        "k2-horizon",
        "K2 Horizon",
        &[
            ("leading_dense_block_count", Uint(1)),
            ("moe_every_n_layers", Uint(1)),
        ],
    ),
    Row::new(
        "maion-coder",
        "Maion Coder",
        &[
            ("interleave_moe_layer_step", Uint(2)),
            ("moe_latent_size", Uint(64)),
            ("attention.sliding_window", Uint(16)),
            ("attention.sliding_window_pattern", Uints(&[1, 0, 1, 0])),
        ],
    ),
    Row::new(
        "muse-spark",
        "Muse Spark",
        &[
            ("post_norm_epsilon", Float(1e-5)),
            ("attention.sliding_window", Uint(16)),
            ("attention.sliding_window_pattern", Uints(&[1, 0, 1, 0])),
            ("rope.freq_base_swa", Float(10_000.0)),
            ("final_logit_softcapping", Float(30.0)),
            ("logit_scale", Float(1.0)),
            ("moe_latent_size", Uint(64)),
            ("expert_gating_func", Uint(SIGMOID)),
        ],
    ),
    Row::new("qwen4exp", "Qwen4 (experimental)", QWEN4),
    Row::new(
        "granite_swa",
        "Granite SWA",
        &[
            ("logit_scale", Float(6.0)),
            ("attention.sliding_window", Uint(16)),
            ("attention.sliding_window_pattern", Uints(&[1, 0, 1, 0])),
        ],
    ),
    Row::new("dots3note", "dots 3 note", DOTS3),
    Row::new("mistral-large4", "Mistral Large 4", DSA).with(&["rope_freqs"]),
];

const SSM: &[Key] = &[
    ("ssm.conv_kernel", Uint(4)),
    ("ssm.inner_size", Uint(128)),
    ("ssm.state_size", Uint(32)),
    ("ssm.time_step_rank", Uint(4)),
    ("ssm.group_count", Uint(2)),
    ("full_attention_interval", Uint(4)),
];

const SSM_MROPE: &[Key] = &[
    ("ssm.conv_kernel", Uint(4)),
    ("ssm.inner_size", Uint(128)),
    ("ssm.state_size", Uint(32)),
    ("ssm.time_step_rank", Uint(4)),
    ("ssm.group_count", Uint(2)),
    ("full_attention_interval", Uint(4)),
    ("rope.dimension_sections", Ints(&[8, 4, 4, 0])),
];

pub const MLA: &[Key] = &[
    ("leading_dense_block_count", Uint(1)),
    ("attention.head_count_kv", Uint(1)),
    ("attention.q_lora_rank", Uint(64)),
    ("attention.kv_lora_rank", Uint(64)),
    ("attention.key_length", Uint(64 + 16)),
    ("attention.value_length", Uint(64)),
    ("attention.key_length_mla", Uint(32 + 16)),
    ("attention.value_length_mla", Uint(32)),
    ("rope.dimension_count", Uint(16)),
    ("expert_gating_func", Uint(SIGMOID)),
    ("expert_group_count", Uint(4)),
    ("expert_group_used_count", Uint(2)),
    ("expert_weights_scale", Float(2.5)),
    ("hyper_connection.count", Uint(4)),
    ("hyper_connection.epsilon", Float(1e-6)),
    ("hyper_connection.magnitude", Float(1.0)),
];

const DSA: &[Key] = &[
    ("leading_dense_block_count", Uint(1)),
    ("attention.head_count_kv", Uint(1)),
    ("attention.q_lora_rank", Uint(64)),
    ("attention.kv_lora_rank", Uint(64)),
    ("attention.key_length", Uint(64 + 16)),
    ("attention.value_length", Uint(64)),
    ("attention.key_length_mla", Uint(32 + 16)),
    ("attention.value_length_mla", Uint(32)),
    ("rope.dimension_count", Uint(16)),
    ("expert_gating_func", Uint(SIGMOID)),
    ("attention.indexer.head_count", Uint(4)),
    ("attention.indexer.key_length", Uint(64)),
    ("attention.indexer.top_k", Uint(16)),
];

const DOTS3: &[Key] = &[
    ("leading_dense_block_count", Uint(1)),
    ("attention.head_count_kv", Uint(1)),
    ("attention.q_lora_rank", Uint(64)),
    ("attention.kv_lora_rank", Uint(64)),
    ("attention.key_length", Uint(64 + 16)),
    ("attention.value_length", Uint(64)),
    ("attention.key_length_mla", Uint(32 + 16)),
    ("attention.value_length_mla", Uint(32)),
    ("attention.kv_lora_rank_swa", Uint(48)),
    ("attention.key_length_mla_swa", Uint(32 + 16)),
    ("attention.value_length_mla_swa", Uint(32)),
    ("attention.key_length_swa", Uint(64)),
    ("attention.value_length_swa", Uint(48)),
    ("attention.sliding_window", Uint(16)),
    ("attention.sliding_window_pattern", Uints(&[1, 0, 1, 0])),
    ("rope.freq_base_swa", Float(10_000.0)),
    ("rope.dimension_count", Uint(16)),
    ("expert_gating_func", Uint(SIGMOID)),
    ("attention.indexer.head_count", Uint(4)),
    ("attention.indexer.key_length", Uint(64)),
    ("attention.indexer.top_k", Uint(16)),
    ("attention.indexer.types", Uints(&[1, 1, 1, 1])),
];

const DEEPSEEK4: &[Key] = &[
    ("attention.head_count_kv", Uint(1)),
    ("attention.q_lora_rank", Uint(64)),
    ("attention.key_length", Uint(64)),
    ("attention.value_length", Uint(64)),
    ("rope.dimension_count", Uint(16)),
    ("attention.sliding_window", Uint(16)),
    ("swiglu_clamp_exp", Float(7.0)),
    ("swiglu_clamp_shexp", Float(7.0)),
    ("attention.indexer.head_count", Uint(4)),
    ("attention.indexer.key_length", Uint(128)),
    ("attention.indexer.top_k", Uint(16)),
    ("attention.output_group_count", Uint(2)),
    ("attention.output_lora_rank", Uint(32)),
    ("attention.compress_rope_freq_base", Float(40_000.0)),
    ("hyper_connection.count", Uint(4)),
    ("hyper_connection.sinkhorn_iterations", Uint(3)),
    ("hyper_connection.epsilon", Float(1e-6)),
    ("hash_layer_count", Uint(1)),
    ("attention.compress_ratios", Uints(&[0, 4, 128, 4])),
    ("expert_gating_func", Uint(SQRT_SOFTPLUS)),
];

const BAILING3: &[Key] = &[
    ("leading_dense_block_count", Uint(1)),
    ("attention.head_count_kv", Uints(&[0, 0, 0, 1])),
    ("attention.q_lora_rank", Uint(64)),
    ("attention.kv_lora_rank", Uint(64)),
    ("attention.key_length", Uint(64 + 16)),
    ("attention.value_length", Uint(64)),
    ("attention.key_length_mla", Uint(32 + 16)),
    ("attention.value_length_mla", Uint(32)),
    ("rope.dimension_count", Uint(16)),
    ("ssm.conv_kernel", Uint(4)),
    ("kda.head_dim", Uint(32)),
    ("kda.safe_gate", Bool(true)),
    ("kda.gate_lower_bound", Float(-5.0)),
    ("expert_gating_func", Uint(SIGMOID)),
];

const KIMI_LINEAR: &[Key] = &[
    ("leading_dense_block_count", Uint(1)),
    ("attention.head_count_kv", Uints(&[0, 0, 0, 1])),
    ("attention.q_lora_rank", Uint(64)),
    ("attention.kv_lora_rank", Uint(64)),
    ("attention.key_length", Uint(64 + 16)),
    ("attention.value_length", Uint(64)),
    ("attention.key_length_mla", Uint(32 + 16)),
    ("attention.value_length_mla", Uint(32)),
    ("rope.dimension_count", Uint(16)),
    ("ssm.conv_kernel", Uint(4)),
    ("kda.head_dim", Uint(32)),
    ("expert_gating_func", Uint(SIGMOID)),
];

const GLM5_NEXT: &[Key] = &[
    ("leading_dense_block_count", Uint(1)),
    ("attention.head_count_kv", Uints(&[0, 0, 0, 1])),
    ("attention.q_lora_rank", Uint(64)),
    ("attention.kv_lora_rank", Uint(64)),
    ("attention.key_length", Uint(64)),
    ("attention.value_length", Uint(64)),
    ("attention.key_length_mla", Uint(32)),
    ("attention.value_length_mla", Uint(32)),
    ("rope.dimension_count", Uint(0)),
    ("ssm.conv_kernel", Uint(4)),
    ("kda.head_dim", Uint(32)),
    ("expert_gating_func", Uint(SIGMOID)),
    ("attention.indexer.head_count", Uint(4)),
    ("attention.indexer.key_length", Uint(64)),
    ("attention.indexer.top_k", Uint(16)),
    ("attention.indexer.kpool", Uint(4)),
    ("hyper_connection.count", Uint(4)),
    ("hyper_connection.sinkhorn_iterations", Uint(3)),
    ("hyper_connection.epsilon", Float(1e-6)),
];

const KIMI_K3: &[Key] = &[
    ("leading_dense_block_count", Uint(1)),
    ("attention.head_count_kv", Uints(&[0, 0, 0, 1])),
    ("attention.q_lora_rank", Uint(64)),
    ("attention.kv_lora_rank", Uint(64)),
    ("attention.key_length", Uint(64 + 16)),
    ("attention.value_length", Uint(64)),
    ("attention.key_length_mla", Uint(32 + 16)),
    ("attention.value_length_mla", Uint(32)),
    ("rope.dimension_count", Uint(16)),
    ("ssm.conv_kernel", Uint(4)),
    ("kda.head_dim", Uint(32)),
    ("kda.gate_lower_bound", Float(-5.0)),
    ("expert_gating_func", Uint(SIGMOID)),
    ("expert_latent_length", Uint(64)),
    ("attn_res.block_size", Uint(2)),
    ("activation.situ_beta", Float(1.0)),
    ("activation.situ_linear_beta", Float(1.0)),
];

const NEMOTRON: &[Key] = &[
    ("ssm.conv_kernel", Uint(4)),
    ("ssm.inner_size", Uint(256)),
    ("ssm.state_size", Uint(32)),
    ("ssm.time_step_rank", Uint(8)),
    ("ssm.group_count", Uint(1)),
    ("attention.head_count_kv", Uints(&[0, 0, 2, 0])),
    ("feed_forward_length", Uints(&[0, 64, 0, 64])),
    ("moe_latent_size", Uint(64)),
];

const GEMMA: &[Key] = &[
    ("attention.sliding_window", Uint(16)),
    (
        "attention.sliding_window_pattern",
        Bools(&[true, false, true, false]),
    ),
    ("embedding_length_per_layer_input", Uint(0)),
    ("attention.key_length_swa", Uint(32)),
    ("attention.value_length_swa", Uint(32)),
    ("final_logit_softcapping", Float(30.0)),
];

const QWEN4: &[Key] = &[
    ("ssm.conv_kernel", Uint(4)),
    ("ssm.inner_size", Uint(128)),
    ("ssm.state_size", Uint(32)),
    ("ssm.time_step_rank", Uint(4)),
    ("ssm.group_count", Uint(2)),
    ("full_attention_interval", Uint(4)),
    ("rope.dimension_sections", Ints(&[8, 4, 4, 0])),
    ("hyper_connection.count", Uint(4)),
    ("hyper_connection.low_rank", Uint(16)),
    ("attention.indexer.head_count", Uint(2)),
    ("attention.indexer.key_length", Uint(64)),
    ("attention.indexer.top_k", Uint(16)),
];
