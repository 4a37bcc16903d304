//! `hotpin bench --task perplexity` against llama.cpp alone, to the last digit.

use super::architectures::ARCHITECTURES;
use super::make;
use super::plain::{Batches, Plain};
use crate::support::{TEXT, THREADS, run};
use serde_json::Value;

/// Tokens of a chunk; a vocabulary of bytes makes texts long.
const CHUNK: u32 = 256;
const CHUNKS: u32 = 4;

/// llama.cpp's own sum, written down once more: the mean cost of what came in each second half.
fn stock(plain: &mut Plain, text: &str) -> f64 {
    let chunk = CHUNK as usize;
    let tokens: Vec<i32> = text.bytes().map(i32::from).collect();
    let (mut sum, mut count) = (0.0, 0);
    for tokens in tokens.chunks_exact(chunk).take(CHUNKS as usize) {
        plain.clear();
        let rows = plain.decode_rows(tokens, chunk / 2).expect("decode");
        for (at, logits) in (chunk / 2..).zip(&rows[..chunk / 2 - 1]) {
            let came = usize::try_from(tokens[at + 1]).expect("a token");
            let largest = logits.iter().copied().fold(f32::MIN, f32::max);
            let total: f64 = logits.iter().map(|&x| f64::from((x - largest).exp())).sum();
            sum -= f64::from(logits[came] - largest) - total.ln();
            count += 1;
        }
    }
    (sum / f64::from(count)).exp()
}

#[test]
fn bench_computes_the_perplexity_of_llama_cpp_alone_to_the_last_digit() {
    let folder = tempfile::tempdir().expect("folder");
    let row = ARCHITECTURES
        .iter()
        .find(|row| row.architecture == "qwen3moe");
    let made = make::model(row.expect("a row"), folder.path()).expect("a model");
    // Single printable bytes are their own tokens in the model's vocabulary.
    let text: String = TEXT.chars().filter(|c| ('!'..='~').contains(c)).collect();
    let text = text
        .replace("th", "")
        .replace("in", "")
        .replace("th", "")
        .replace("in", "");
    assert!(
        !text.contains("th") && !text.contains("in"),
        "a merged token"
    );
    let texts = folder.path().join("texts");
    std::fs::create_dir(&texts).expect("folder");
    std::fs::write(texts.join("domain.txt"), &text).expect("write");
    let batches = Batches {
        batch: CHUNK,
        ubatch: CHUNK,
    };
    let expected = stock(
        &mut Plain::load(&made.path, batches, false).expect("load"),
        &text,
    );
    for store in ["mapped", "direct"] {
        let size = CHUNK.to_string();
        let chunks = CHUNKS.to_string();
        let arguments = [
            "bench",
            made.path.to_str().expect("UTF-8"),
            "--task",
            "perplexity",
            "--chunks",
            &chunks,
            "-c",
            &size,
            "-b",
            &size,
            "--ubatch-size",
            &size,
            "-t",
            THREADS,
            "--workload",
            texts.to_str().expect("UTF-8"),
            "--policies",
            "off,lru,adaptive",
            "--store",
            store,
            "--capacity",
            "1KiB",
            "--repeats",
            "1",
            "--json",
        ];
        let report: Value = serde_json::from_str(&run(arguments).success()).expect("JSON");
        assert_eq!(report["hashes_equal"], Value::Bool(true), "{report}");
        for policy in report["runs"].as_array().expect("runs") {
            let found = &policy["segments"][0]["perplexity"];
            assert_eq!(found["value"].as_f64(), Some(expected), "{policy}");
            assert_eq!(found["scored"], CHUNKS * (CHUNK / 2 - 1), "{policy}");
        }
        assert_eq!(report["runs"].as_array().map(Vec::len), Some(3));
    }
}
