//! Demo models, end to end, from a tiny dense model made here byte by byte.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use hotpin::demo::{self, Error, ModelArgs, Options, Quant, Report};
use hotpin::engine::capture::{CaptureModel, Row};
use sha2::{Digest, Sha256};

const LAYERS: u32 = 2;
const WIDTH: u64 = 64;
const UNITS: u64 = 96;
const VOCABULARY: u32 = 3 + 256;

/// A GGUF file in the making.
#[derive(Default)]
struct Gguf {
    keys: Vec<u8>,
    key_count: u64,
    tensors: Vec<(String, Vec<u64>)>,
}

impl Gguf {
    fn key(&mut self, name: &str, type_id: u32, value: &[u8]) {
        self.keys.extend(string(name));
        self.keys.extend(type_id.to_le_bytes());
        self.keys.extend(value);
        self.key_count += 1;
    }

    fn u32(&mut self, name: &str, value: u32) {
        self.key(name, 4, &value.to_le_bytes());
    }

    fn array(&mut self, name: &str, type_id: u32, items: &[Vec<u8>]) {
        let head = [
            type_id.to_le_bytes().to_vec(),
            (items.len() as u64).to_le_bytes().to_vec(),
        ];
        self.key(name, 9, &[head.concat(), items.concat()].concat());
    }

    fn tensor(&mut self, name: impl Into<String>, shape: &[u64]) {
        self.tensors.push((name.into(), shape.to_vec()));
    }

    /// The file, with every tensor of 32-bit floats drawn from a fixed sequence.
    fn bytes(&self) -> Vec<u8> {
        let counts = [self.tensors.len() as u64, self.key_count]
            .map(u64::to_le_bytes)
            .concat();
        let mut out = [b"GGUF".as_slice(), &3u32.to_le_bytes(), &counts, &self.keys].concat();
        let mut offset = 0u64;
        for (name, shape) in &self.tensors {
            out.extend(string(name));
            out.extend(u32::try_from(shape.len()).unwrap().to_le_bytes());
            shape
                .iter()
                .for_each(|extent| out.extend(extent.to_le_bytes()));
            out.extend(0u32.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += shape.iter().product::<u64>() * 4;
            assert_eq!(offset % 32, 0, "{name} would need padding");
        }
        out.resize(out.len().next_multiple_of(32), 0);
        let mut state = 1u32;
        for _ in 0..offset / 4 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            out.extend((f32::from((state >> 16) as u16) / 65_536.0 - 0.5).to_le_bytes());
        }
        out
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A dense llama model of two layers whose tokens are bytes.
fn tiny_dense() -> Gguf {
    let mut gguf = Gguf::default();
    gguf.key("general.architecture", 8, &string("llama"));
    gguf.key("general.name", 8, &string("tiny"));
    gguf.u32("llama.block_count", LAYERS);
    gguf.u32("llama.context_length", 512);
    gguf.u32("llama.embedding_length", 64);
    gguf.u32("llama.feed_forward_length", 96);
    gguf.u32("llama.attention.head_count", 2);
    gguf.key(
        "llama.attention.layer_norm_rms_epsilon",
        6,
        &1e-5f32.to_le_bytes(),
    );
    add_vocabulary(&mut gguf);
    gguf.tensor("token_embd.weight", &[WIDTH, VOCABULARY.into()]);
    gguf.tensor("output_norm.weight", &[WIDTH]);
    for layer in 0..LAYERS {
        for name in ["attn_norm", "ffn_norm"] {
            gguf.tensor(format!("blk.{layer}.{name}.weight"), &[WIDTH]);
        }
        for name in ["attn_q", "attn_k", "attn_v", "attn_output"] {
            gguf.tensor(format!("blk.{layer}.{name}.weight"), &[WIDTH, WIDTH]);
        }
        gguf.tensor(format!("blk.{layer}.ffn_gate.weight"), &[WIDTH, UNITS]);
        gguf.tensor(format!("blk.{layer}.ffn_up.weight"), &[WIDTH, UNITS]);
        gguf.tensor(format!("blk.{layer}.ffn_down.weight"), &[UNITS, WIDTH]);
    }
    gguf
}

fn add_vocabulary(gguf: &mut Gguf) {
    let specials = [("<unk>", 2i32), ("<s>", 3), ("</s>", 3)];
    let bytes = (0..256).map(|byte| (format!("<0x{byte:02X}>"), 6i32));
    let tokens: Vec<(String, i32)> = specials
        .map(|(text, kind)| (text.to_owned(), kind))
        .into_iter()
        .chain(bytes)
        .collect();
    let column = |of: fn(&(String, i32)) -> Vec<u8>| tokens.iter().map(of).collect::<Vec<_>>();
    gguf.key("tokenizer.ggml.model", 8, &string("llama"));
    gguf.array(
        "tokenizer.ggml.tokens",
        8,
        &column(|(text, _)| string(text)),
    );
    gguf.array(
        "tokenizer.ggml.scores",
        6,
        &column(|_| 0f32.to_le_bytes().to_vec()),
    );
    gguf.array(
        "tokenizer.ggml.token_type",
        5,
        &column(|(_, kind)| kind.to_le_bytes().to_vec()),
    );
    gguf.u32("tokenizer.ggml.bos_token_id", 1);
    gguf.u32("tokenizer.ggml.eos_token_id", 2);
    gguf.u32("tokenizer.ggml.unknown_token_id", 0);
}

/// A folder with a source model and two short texts.
struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new(source: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("dense.gguf"), source).unwrap();
        let texts = folder.path().join("texts");
        std::fs::create_dir(&texts).unwrap();
        std::fs::write(
            texts.join("letters.txt"),
            "the cat sat on the mat; ".repeat(12),
        )
        .unwrap();
        std::fs::write(
            texts.join("digits.txt"),
            "3141592653589793 + 27182818 = ".repeat(10),
        )
        .unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn args(&self, output: &str) -> ModelArgs {
        ModelArgs {
            from: self.path("dense.gguf"),
            experts: 8,
            top_k: 2,
            quant: Quant::Q8_0,
            seed: 1,
            output: self.path(output),
            workload: Some(self.path("texts")),
            calibration_tokens: 200,
            held_out_tokens: 100,
            force: false,
        }
    }

    fn build(&self, args: ModelArgs) -> Result<Report, Error> {
        demo::build_model(
            &Options::try_from(args)?,
            &mut |_| ControlFlow::Continue(()),
        )
    }

    /// Names in the folder that a failed build might have left.
    fn leftovers(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.folder.path()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names
            .filter(|name| name != "dense.gguf" && name != "texts")
            .collect()
    }
}

fn hash(path: &Path) -> Vec<u8> {
    Sha256::digest(std::fs::read(path).unwrap()).to_vec()
}

/// Routed expert ids of a text, by layer.
fn routed(path: &Path, text: &str) -> Vec<Vec<i32>> {
    let model = CaptureModel::load(path).unwrap();
    let tokens = model.tokenise(text).unwrap();
    let mut ids = vec![Vec::new(); model.layers()];
    model
        .capture("ffn_moe_topk", 256, &tokens, &mut |layer, _, row| {
            let Row::Ints(row) = row else {
                panic!("expert ids are not integers")
            };
            ids[layer].extend_from_slice(row);
            Ok(())
        })
        .unwrap();
    assert!(ids.iter().all(|layer| layer.len() == tokens.len() * 2));
    ids
}

#[test]
fn a_demo_model_loads_and_routes_by_what_it_reads() {
    let bench = Bench::new(&tiny_dense().bytes());
    let report = bench.build(bench.args("moe.gguf")).unwrap();
    assert_eq!(
        (report.layers, report.experts, report.top_k),
        (LAYERS, 8, 2)
    );
    assert_eq!(
        report.bytes,
        std::fs::metadata(bench.path("moe.gguf")).unwrap().len()
    );
    assert_eq!(report.routing.len(), 2);

    let letters = routed(&bench.path("moe.gguf"), "the cat sat on the mat");
    let digits = routed(&bench.path("moe.gguf"), "3141592653589793 + 2718");
    for ids in letters.iter().chain(&digits) {
        assert!(ids.iter().all(|id| (0..8).contains(id)), "{ids:?}");
        assert!(ids.chunks(2).all(|pair| pair[0] != pair[1]), "{ids:?}");
    }
    let used = |ids: &[i32]| {
        ids.iter()
            .copied()
            .collect::<std::collections::BTreeSet<_>>()
    };
    assert_ne!(used(&letters[0]), used(&digits[0]));
}

#[test]
fn equal_seeds_give_equal_files_in_every_format() {
    let bench = Bench::new(&tiny_dense().bytes());
    let mut hashes = std::collections::BTreeSet::new();
    for quant in [Quant::Q8_0, Quant::Q4_0, Quant::F16] {
        let build = |output: &str, seed| {
            bench
                .build(ModelArgs {
                    quant,
                    seed,
                    force: true,
                    ..bench.args(output)
                })
                .unwrap();
            hash(&bench.path(output))
        };
        let first = build("a.gguf", 1);
        assert_eq!(first, build("b.gguf", 1));
        assert_ne!(first, build("b.gguf", 2));
        hashes.insert(first);
        routed(&bench.path("a.gguf"), "a short text");
    }
    assert_eq!(hashes.len(), 3);
}

#[test]
fn experts_differ_and_stay_close_to_the_dense_block() {
    let bench = Bench::new(&tiny_dense().bytes());
    bench
        .build(ModelArgs {
            quant: Quant::F16,
            ..bench.args("moe.gguf")
        })
        .unwrap();
    let states = |name: &str, prefix| {
        let model = CaptureModel::load(&bench.path(name)).unwrap();
        let tokens = model.tokenise("two hundred").unwrap();
        let mut last = Vec::new();
        let mut keep = |layer, _: usize, row: Row<'_>| {
            if let (1, Row::Floats(values)) = (layer, row) {
                last.extend_from_slice(values);
            }
            Ok(())
        };
        model.capture(prefix, 64, &tokens, &mut keep).unwrap();
        last
    };
    // What enters the second block has been through the first one.
    let (dense, moe) = (
        states("dense.gguf", "ffn_norm"),
        states("moe.gguf", "ffn_norm"),
    );
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
    let apart = square(&mut dense.iter().zip(&moe).map(|(a, b)| a - b));
    let size = square(&mut dense.iter().copied());
    assert!(apart > 0.0 && apart < 0.05 * size, "{apart} of {size}");
}

#[test]
fn sources_that_cannot_become_experts_are_refused() {
    let check = |name: &str, change: &dyn Fn(&mut Gguf), expected: &str| {
        let mut gguf = tiny_dense();
        change(&mut gguf);
        let bench = Bench::new(&gguf.bytes());
        let error = bench
            .build(bench.args("moe.gguf"))
            .expect_err(name)
            .to_string();
        assert!(error.contains(expected), "{name}: {error}");
        assert_eq!(bench.leftovers(), Vec::<String>::new(), "{name}");
    };
    let drop = |gguf: &mut Gguf, name: &str| gguf.tensors.retain(|(n, _)| n != name);
    check(
        "other",
        &|g| swap(&mut g.keys, b"llama", b"gpt-2"),
        "architecture is gpt-2",
    );
    check(
        "moe",
        &|g| g.u32("llama.expert_count", 4),
        "llama.expert_count = 4",
    );
    check(
        "router",
        &|g| g.tensor("blk.0.ffn_gate_inp.weight", &[WIDTH, 8]),
        "ffn_gate_inp",
    );
    check(
        "gap",
        &|g| drop(g, "blk.1.ffn_down.weight"),
        "blk.1.ffn_down.weight is missing",
    );
    check(
        "bias",
        &|g| g.tensor("blk.1.ffn_up.bias", &[UNITS]),
        "cannot be carried over",
    );
    check(
        "part",
        &|g| g.key("split.count", 2, &3u16.to_le_bytes()),
        "one of 3 parts",
    );
    let reshape = |g: &mut Gguf| {
        drop(g, "blk.1.ffn_up.weight");
        g.tensor("blk.1.ffn_up.weight", &[WIDTH, 32]);
    };
    check("shape", &reshape, "not [64, 96, 1, 1]");
}

/// Replaces the first occurrence of `from`.
fn swap(bytes: &mut [u8], from: &[u8; 5], to: &[u8; 5]) {
    let at = bytes.windows(5).position(|window| window == from).unwrap();
    bytes[at..at + 5].copy_from_slice(to);
}

#[test]
fn damaged_files_and_missing_files_are_refused() {
    let whole = tiny_dense().bytes();
    for length in [0, 3, 100, 4000, whole.len() / 2, whole.len() - 1] {
        let bench = Bench::new(&whole[..length]);
        assert!(
            bench.build(bench.args("moe.gguf")).is_err(),
            "{length} bytes"
        );
        assert_eq!(bench.leftovers(), Vec::<String>::new());
    }
    let bench = Bench::new(&whole);
    let absent = ModelArgs {
        from: bench.path("absent.gguf"),
        ..bench.args("moe.gguf")
    };
    assert!(matches!(bench.build(absent), Err(Error::Io { .. })));
}

#[test]
fn targets_are_replaced_only_on_demand_and_left_alone_on_failure() {
    let bench = Bench::new(&tiny_dense().bytes());
    std::fs::write(bench.path("moe.gguf"), "precious").unwrap();
    assert!(matches!(
        bench.build(bench.args("moe.gguf")),
        Err(Error::Exists { .. })
    ));

    let itself = ModelArgs {
        force: true,
        ..bench.args("dense.gguf")
    };
    assert!(matches!(bench.build(itself), Err(Error::SameFile { .. })));

    let forced = ModelArgs {
        force: true,
        ..bench.args("moe.gguf")
    };
    let options = Options::try_from(forced.clone()).unwrap();
    let stop = &mut |step: demo::Step| match step.stage {
        demo::Stage::Write => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    assert!(matches!(
        demo::build_model(&options, stop),
        Err(Error::Cancelled)
    ));
    assert_eq!(std::fs::read(bench.path("moe.gguf")).unwrap(), b"precious");
    assert_eq!(bench.leftovers(), ["moe.gguf"]);

    bench.build(forced).unwrap();
    assert_eq!(bench.leftovers(), ["moe.gguf"]);
    routed(&bench.path("moe.gguf"), "now a model");
}

#[test]
fn texts_and_options_out_of_range_are_refused_by_name() {
    let bench = Bench::new(&tiny_dense().bytes());
    let refused = |change: &dyn Fn(&mut ModelArgs), expected: &str| {
        let mut args = bench.args("moe.gguf");
        change(&mut args);
        let error = bench.build(args).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(&|a| a.experts = 1, "--experts 1");
    refused(&|a| a.top_k = 9, "--top-k 9");
    refused(&|a| a.calibration_tokens = 0, "--calibration-tokens 0");
    refused(&|a| a.output = PathBuf::from(".."), "--output ..");
    refused(&|a| a.experts = 200, "200 experts need 800");
    refused(&|a| a.workload = Some(bench.path("nowhere")), "nowhere");
    refused(&|a| a.output = bench.path("nowhere/moe.gguf"), "nowhere");
    std::fs::create_dir(bench.path("empty")).unwrap();
    refused(
        &|a| a.workload = Some(bench.path("empty")),
        "no *.txt files",
    );
}
