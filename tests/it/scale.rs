//! Models of true size whose weights are holes in their files: what reading their headers, holding
//! their maps and regulating them costs.

use crate::gguf_writer::{F16, F32, Gguf, Q8_0, Ty};
use crate::support::{NEVER, governor_options, kb_line, run};
use crate::warmed::learned;
use crate::zoo::plain::shapes_are_right;
use hotpin::engine::{Pass, RouteSink, Routed};
use hotpin::governor::{Governor, Journal, Regulated};
use hotpin::model::ModelMap;
use hotpin::plant::{Counters, Feeder};
use hotpin::store::{ExpertStore, Layout, MappedStore, TransitKeeper};
use hotpin_controllers::policy::{PolicyKind, build};
use hotpin_controllers::{AdaptiveConfig, ExpertId};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MXFP4: Ty = (39, 32, 17);
const Q4_K: Ty = (12, 256, 144);
const BF16: Ty = (30, 1, 2);

/// A published model, as large as it is.
struct Shape {
    architecture: &'static str,
    blocks: u32,
    dense_blocks: u32,
    experts: u64,
    top_k: u32,
    width: u64,
    expert_width: u64,
    dense_width: u64,
    heads: u64,
    kv_heads: u64,
    vocabulary: u64,
    expert_type: Ty,
    /// The size that it is known by, in 10^9 parameters.
    billions: f64,
}

const GPT_OSS_120B: Shape = Shape {
    architecture: "gpt-oss",
    blocks: 36,
    dense_blocks: 0,
    experts: 128,
    top_k: 4,
    width: 2880,
    expert_width: 2880,
    dense_width: 2880,
    heads: 64,
    kv_heads: 8,
    vocabulary: 201_088,
    expert_type: MXFP4,
    billions: 117.0,
};
const QWEN3_235B: Shape = Shape {
    architecture: "qwen3moe",
    blocks: 94,
    dense_blocks: 0,
    experts: 128,
    top_k: 8,
    width: 4096,
    expert_width: 1536,
    dense_width: 12288,
    heads: 64,
    kv_heads: 4,
    vocabulary: 151_936,
    expert_type: Q4_K,
    billions: 235.0,
};
const DEEPSEEK_V3: Shape = Shape {
    architecture: "deepseek2",
    blocks: 61,
    dense_blocks: 3,
    experts: 256,
    top_k: 8,
    width: 7168,
    expert_width: 2048,
    dense_width: 18432,
    heads: 128,
    kv_heads: 1,
    vocabulary: 129_280,
    expert_type: Q4_K,
    billions: 671.0,
};
/// Kimi K2.
const ONE_T: Shape = Shape {
    architecture: "deepseek2",
    blocks: 61,
    dense_blocks: 1,
    experts: 384,
    top_k: 8,
    width: 7168,
    expert_width: 2048,
    dense_width: 18432,
    heads: 64,
    kv_heads: 1,
    vocabulary: 163_840,
    expert_type: Q4_K,
    billions: 1026.0,
};

impl Shape {
    fn is_mla(&self) -> bool {
        self.architecture == "deepseek2"
    }

    /// The file of a model, its weights holes.
    fn write(&self, folder: &Path) -> PathBuf {
        let small = |n: u64| u32::try_from(n).expect("small");
        let key = |name: &str| format!("{}.{name}", self.architecture);
        let mut file = Gguf::model(self.architecture, "as large as it is", self.blocks)
            .u32(&key("context_length"), 131_072)
            .u32(&key("embedding_length"), small(self.width))
            .u32(&key("feed_forward_length"), small(self.dense_width))
            .u32(&key("expert_feed_forward_length"), small(self.expert_width))
            .u32(&key("expert_count"), small(self.experts))
            .u32(&key("expert_used_count"), self.top_k)
            .u32(&key("leading_dense_block_count"), self.dense_blocks)
            .u32(&key("attention.head_count"), small(self.heads))
            .u32(&key("attention.head_count_kv"), small(self.kv_heads))
            .f32(&key("attention.layer_norm_rms_epsilon"), 1e-6);
        for (name, value) in match self.architecture {
            "deepseek2" => &[
                ("attention.q_lora_rank", 1536),
                ("attention.kv_lora_rank", 512),
                ("attention.key_length", 576),
                ("attention.value_length", 512),
                ("attention.key_length_mla", 192),
                ("attention.value_length_mla", 128),
                ("rope.dimension_count", 64),
                ("expert_shared_count", 1),
                ("expert_gating_func", 2),
            ][..],
            "gpt-oss" => &[
                ("attention.key_length", 64),
                ("attention.value_length", 64),
                ("attention.sliding_window", 128),
            ],
            _ => &[
                ("attention.key_length", 128),
                ("attention.value_length", 128),
            ],
        } {
            file = file.u32(&key(name), *value);
        }
        let tokens: Vec<String> = (0..self.vocabulary).map(|n| format!("token{n}")).collect();
        file = file
            .text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", "default")
            .texts("tokenizer.ggml.tokens", &tokens)
            .i32s("tokenizer.ggml.token_type", &vec![1; tokens.len()])
            .texts("tokenizer.ggml.merges", &vec!["token 1"; tokens.len()]);
        file = file
            .hole("token_embd.weight", &[self.width, self.vocabulary], Q8_0)
            .hole("output_norm.weight", &[self.width], F32)
            .hole("output.weight", &[self.width, self.vocabulary], Q8_0);
        for block in 0..self.blocks {
            for (name, dims, ty) in self.block(block) {
                file = file.hole(&format!("blk.{block}.{name}"), &dims, ty);
            }
        }
        file.write(folder, "model.gguf")
    }

    fn block(&self, block: u32) -> Vec<(&'static str, Vec<u64>, Ty)> {
        let (w, heads) = (self.width, self.heads);
        let mut all = vec![("attn_norm.weight", vec![w], F32)];
        if self.is_mla() {
            all.extend([
                ("ffn_norm.weight", vec![w], F32),
                ("attn_q_a_norm.weight", vec![1536], F32),
                ("attn_kv_a_norm.weight", vec![512], F32),
                ("attn_q_a.weight", vec![w, 1536], Q8_0),
                ("attn_q_b.weight", vec![1536, heads * 192], Q8_0),
                ("attn_kv_a_mqa.weight", vec![w, 576], Q8_0),
                ("attn_k_b.weight", vec![128, 512, heads], Q8_0),
                ("attn_v_b.weight", vec![512, 128, heads], Q8_0),
                ("attn_output.weight", vec![heads * 128, w], Q8_0),
            ]);
        } else {
            let (ty, head) = if self.architecture == "gpt-oss" {
                (BF16, 64)
            } else {
                (Q8_0, 128)
            };
            let kv = self.kv_heads * head;
            all.extend([
                ("attn_q.weight", vec![w, heads * head], ty),
                ("attn_k.weight", vec![w, kv], ty),
                ("attn_v.weight", vec![w, kv], ty),
                ("attn_output.weight", vec![heads * head, w], ty),
            ]);
            if self.architecture == "gpt-oss" {
                all.extend([
                    ("post_attention_norm.weight", vec![w], F32),
                    ("attn_q.bias", vec![heads * head], F32),
                    ("attn_k.bias", vec![kv], F32),
                    ("attn_v.bias", vec![kv], F32),
                    ("attn_output.bias", vec![w], F32),
                    ("attn_sinks.weight", vec![heads], F32),
                ]);
            } else {
                all.extend([
                    ("ffn_norm.weight", vec![w], F32),
                    ("attn_q_norm.weight", vec![head], F32),
                    ("attn_k_norm.weight", vec![head], F32),
                ]);
            }
        }
        if block < self.dense_blocks {
            let d = self.dense_width;
            all.extend([
                ("ffn_gate.weight", vec![w, d], Q8_0),
                ("ffn_up.weight", vec![w, d], Q8_0),
                ("ffn_down.weight", vec![d, w], Q8_0),
            ]);
            return all;
        }
        let (n, e) = (self.experts, self.expert_width);
        all.extend([
            ("ffn_gate_inp.weight", vec![w, n], F32),
            ("ffn_gate_exps.weight", vec![w, e, n], self.expert_type),
            ("ffn_up_exps.weight", vec![w, e, n], self.expert_type),
            ("ffn_down_exps.weight", vec![e, w, n], self.expert_type),
        ]);
        match self.architecture {
            "deepseek2" => all.extend([
                ("exp_probs_b.bias", vec![n], F32),
                ("ffn_gate_shexp.weight", vec![w, e], Q8_0),
                ("ffn_up_shexp.weight", vec![w, e], Q8_0),
                ("ffn_down_shexp.weight", vec![e, w], Q8_0),
            ]),
            "gpt-oss" => all.extend([
                ("ffn_gate_inp.bias", vec![n], F32),
                ("ffn_gate_exps.bias", vec![e, n], F32),
                ("ffn_up_exps.bias", vec![e, n], F32),
                ("ffn_down_exps.bias", vec![w, n], F32),
            ]),
            _ => {}
        }
        all
    }
}

#[test]
fn models_of_true_size_are_inspected_within_a_second() {
    for shape in [GPT_OSS_120B, QWEN3_235B, DEEPSEEK_V3, ONE_T] {
        let folder = tempfile::tempdir().expect("folder");
        let path = shape.write(folder.path());
        assert!(shapes_are_right(&path), "{}", shape.architecture);
        let map = ModelMap::open(&path).expect("map");
        let parameters: u64 = map
            .tensors()
            .iter()
            .map(|t| t.info.dims().iter().product::<u64>())
            .sum();
        #[expect(clippy::cast_precision_loss, reason = "for three digits")]
        let billions = parameters as f64 / 1e9;
        assert!(
            (billions / shape.billions - 1.0).abs() < 0.02,
            "{billions} billions"
        );
        let layers = u64::from(shape.blocks - shape.dense_blocks);
        assert_eq!(map.shape().total_experts() as u64, layers * shape.experts);
        let began = Instant::now();
        let text = run(["inspect", path.to_str().expect("UTF-8"), "--json"]).success();
        let took = began.elapsed();
        assert!(text.contains(shape.architecture));
        eprintln!(
            "{billions:.0} billions, {} GB: inspect {took:.2?}",
            map.total_bytes() / 1_000_000_000
        );
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
}

/// As many layers and experts as a large model has, each part of an expert little more than two pages:
/// thousands can be locked, and between two that are not neighbours is a page that is not.
fn many_small_experts(folder: &Path, layers: u32, experts: u64) -> PathBuf {
    let mut file = Gguf::model("testmoe", "many", layers)
        .u32(
            "testmoe.expert_count",
            u32::try_from(experts).expect("small"),
        )
        .u32("testmoe.expert_used_count", 8)
        .hole("token_embd.weight", &[64, 10], F16);
    for block in 0..layers {
        for part in ["gate", "up", "down"] {
            let name = format!("blk.{block}.ffn_{part}_exps.weight");
            file = file.hole(&name, &[64, 124, experts], Q8_0);
        }
    }
    file.write(folder, "model.gguf")
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps")
        .expect("maps")
        .lines()
        .count()
}

/// Memory of our own, not of files, without what the allocator merely keeps.
fn own_bytes() -> u64 {
    // SAFETY: no preconditions.
    unsafe { libc::malloc_trim(0) };
    kb_line("/proc/self/status", "RssAnon").expect("RssAnon")
}

const CHILD: &str = "HOTPIN_TEST_SCALE";

/// In a process of its own, whose memory and mappings nobody else changes.
#[test]
fn a_governor_of_15_000_experts_is_small_and_never_runs_out_of_mappings() {
    let output = Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", "scale::child", "--ignored", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .expect("start");
    let (said, why) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{said}\n{why}");
    eprintln!("{why}");
}

#[test]
#[ignore = "run by a_governor_of_15_000_experts_is_small_and_never_runs_out_of_mappings"]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("folder");
    true_size_is_held(&DEEPSEEK_V3.write(folder.path()));
    for (name, layers, experts, least_mappings) in [
        ("DeepSeek-V3", 58, 256, 30_000),
        // Locking every second of these would take more mappings than the kernel gives.
        ("Kimi K2", 60, 384, 50_000),
    ] {
        let path = many_small_experts(folder.path(), layers, experts);
        regulate(name, &path, least_mappings);
    }
}

/// Regulates a model of which every second expert is hot.
fn regulate(name: &str, path: &Path, least_mappings: usize) {
    let before = own_bytes();
    let map = ModelMap::open(path).expect("map");
    let file = std::fs::File::open(path).expect("open");
    // SAFETY: nobody changes the file, and the mapping is dropped after the store.
    let mapping = unsafe { memmap2::Mmap::map(&file) }.expect("map");
    let learned = learned(&map, mapping.as_ptr() as usize);
    let layout = Layout::new(&map, &learned).expect("layout");
    // SAFETY: as above.
    let (store, _) = unsafe { MappedStore::new(layout, TransitKeeper::Store, false, 128 << 10) };
    let store: Arc<dyn ExpertStore> = Arc::new(store);
    let shape = map.shape().clone();
    let counters = Arc::new(Counters::new(shape.total_experts()));
    let mut control = AdaptiveConfig::default();
    control.pins.transit_floor_bytes = 1 << 20;
    // Every second expert is hot: no two locked ones are neighbours.
    let profile: Vec<f32> = (0..shape.total_experts())
        .map(|i| [50.0, 0.0][i % 2])
        .collect();
    let policy = build(PolicyKind::Adaptive, &shape, &control, Some(&profile)).expect("policy");
    let tick = Duration::from_millis(10);
    let options = governor_options(tick);
    let regulated = Regulated {
        store: Arc::clone(&store),
        counters: Arc::clone(&counters),
        shape: shape.clone(),
    };
    let governor = Governor::start(
        options,
        regulated,
        policy,
        Journal::new(None),
        &mut |_, _| {},
    )
    .expect("governor");
    let blocks: Vec<u32> = map.layers().iter().map(|layer| layer.block).collect();
    let mut feeder = Feeder::new(counters, Arc::clone(&store), shape.clone(), &blocks, None);
    let began = Instant::now();
    let mut most_mappings = 0;
    let mut tokens = 0_usize;
    while began.elapsed() < Duration::from_secs(4) {
        decode(&mut feeder, &blocks, tokens);
        tokens += 1;
        if tokens.is_multiple_of(50) {
            most_mappings = most_mappings.max(mappings());
        }
    }
    let status = governor.status();
    let held = own_bytes().saturating_sub(before);
    let times = governor.tick_times();
    let percentile = |share| Duration::from_nanos(times.value_at_quantile(share));
    eprintln!(
        "{name}, {} experts, {tokens} tokens: {} pinned, {most_mappings} mappings at most, {} KB of its own; {} ticks, p50 {:?}, p99 {:?}",
        shape.total_experts(),
        status.pinned_bytes / shape.bytes(ExpertId(0)),
        held >> 10,
        times.len(),
        percentile(0.5),
        percentile(0.99)
    );
    assert_eq!((status.failed, status.lock_errors), (None, 0));
    assert!(status.pinned_bytes > 0 && tokens > 10 && times.len() > 50);
    let limit: usize = std::fs::read_to_string("/proc/sys/vm/max_map_count")
        .expect("limit")
        .trim()
        .parse()
        .expect("a number");
    assert!(most_mappings < limit, "{most_mappings} of {limit}");
    assert!(
        most_mappings > least_mappings,
        "{most_mappings} mappings show nothing"
    );
    assert!((1 << 10..64 << 20).contains(&held), "{held} bytes");
    // Neighbours that are all locked are one mapping again, whatever their number.
    drop(governor);
    for index in 0..shape.total_experts() {
        store.unpin(ExpertId(u32::try_from(index).expect("small")));
    }
    store.set_capacity(u64::MAX);
    let apart = mappings();
    for index in 0..10 * 256 {
        store.pin(ExpertId(index)).expect("pin");
    }
    let joined = mappings();
    eprintln!("{joined} mappings with 2560 neighbours pinned, {apart} with none");
    assert!(joined < apart + 2 * 30, "{joined} after {apart}");
    drop(feeder);
    drop(store);
}

/// Routes a token: mostly to the experts at hand, whose number moves on.
fn decode(feeder: &mut Feeder, blocks: &[u32], token: usize) {
    for &block in blocks {
        let experts: Vec<i32> = (0..8)
            .map(|n| i32::try_from((token / 20 + n * n * 3 + block as usize) % 256).expect("small"))
            .collect();
        let routed = Routed {
            block,
            experts: &experts,
            tokens: 1,
            batch_tokens: 1,
            pass: Pass::Next,
            since_last_ns: 50_000,
        };
        feeder.routed(&routed).expect("routed");
    }
    feeder.decoded(Pass::Next, 1, 50_000, 5_000_000);
}

/// Map, layout, books and governor of the true file, of which nothing is read.
fn true_size_is_held(path: &Path) {
    let before = own_bytes();
    let map = ModelMap::open(path).expect("map");
    let file = std::fs::File::open(path).expect("open");
    // SAFETY: nobody changes the file, and the mapping is dropped after the store.
    let mapping = unsafe { memmap2::Mmap::map(&file) }.expect("map");
    let learned = learned(&map, mapping.as_ptr() as usize);
    let layout = Layout::new(&map, &learned).expect("layout");
    // SAFETY: as above.
    let (store, _) = unsafe { MappedStore::new(layout, TransitKeeper::Store, false, 128 << 10) };
    let shape = map.shape().clone();
    let control = AdaptiveConfig::default();
    let policy = build(PolicyKind::Adaptive, &shape, &control, None).expect("policy");
    let regulated = Regulated {
        store: Arc::new(store),
        counters: Arc::new(Counters::new(shape.total_experts())),
        shape,
    };
    let options = governor_options(NEVER);
    let governor = Governor::start(
        options,
        regulated,
        policy,
        Journal::new(None),
        &mut |_, _| {},
    )
    .expect("governor");
    let held = own_bytes().saturating_sub(before);
    eprintln!(
        "DeepSeek-V3, {} GB of files: {} KB of its own",
        map.total_bytes() / 1_000_000_000,
        held >> 10
    );
    assert!((1 << 10..64 << 20).contains(&held), "{held} bytes");
    drop(governor);
}
