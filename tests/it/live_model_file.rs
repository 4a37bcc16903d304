//! The model's file while the program runs: written to, cut, replaced, removed. No token may come of what
//! is no longer the model.

use super::client::Server;
use super::support::{self, Answering, Copy, program, run};
use serde_json::json;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};

const PROMPT: &str = "Tell me about the sea.";

/// A run that has begun to answer.
fn answering(own: &Copy, store: &str, predict: &str) -> Answering {
    let more = ["--store", store, "--capacity", "120MB"];
    let args = support::with_context(support::greedy(&own.model, PROMPT, predict, &more));
    Answering::begin(program(args), 8)
}

#[test]
fn a_file_that_is_written_to_ends_the_run_before_a_token_comes_of_it() {
    let name = "a_file_that_is_written_to_ends_the_run_before_a_token_comes_of_it";
    let Some(model) = support::moe(name) else {
        return;
    };
    let stock = run(support::greedy(&model, PROMPT, "200", &["--policy", "off"])).success();
    for store in ["mapped", "direct"] {
        let own = Copy::of(&model);
        let answer = answering(&own, store, "100000");
        // Noise all over the weights, as a download in place would write it.
        let mut file = File::options().write(true).open(&own.model).expect("open");
        let bytes = file.metadata().expect("metadata").len();
        for part in 1..40 {
            file.seek(SeekFrom::Start(bytes / 40 * part)).expect("seek");
            file.write_all(&[0x5a; 4096]).expect("write");
        }
        let ran = answer.ended();
        let said = ran.stdout.trim_end().to_owned();
        let least = said.len().min(stock.trim_end().len());
        assert_eq!(said[..least], stock[..least], "{store}: no wrong token");
        ran.failure(
            1,
            &["m.gguf has changed while it was in use", "start again"],
        );
    }
}

#[test]
fn a_file_that_is_cut_ends_the_run_with_a_message() {
    let name = "a_file_that_is_cut_ends_the_run_with_a_message";
    let Some(model) = support::moe(name) else {
        return;
    };
    for store in ["mapped", "direct"] {
        let own = Copy::of(&model);
        let answer = answering(&own, store, "100000");
        let file = File::options().write(true).open(&own.model).expect("open");
        file.set_len(1 << 20).expect("cut");
        let ran = answer.ended();
        assert_eq!(ran.code, Some(1), "{store}: {ran:?}");
        let told = [
            "has changed while it was in use",
            "was cut",
            "been cut",
            "cut short",
        ];
        assert!(
            told.iter().any(|words| ran.stderr.contains(words)),
            "{store}: {ran:?}"
        );
    }
}

#[test]
fn a_file_that_is_replaced_or_removed_is_used_to_the_end() {
    let name = "a_file_that_is_replaced_or_removed_is_used_to_the_end";
    let Some(model) = support::moe(name) else {
        return;
    };
    let stock = run(support::greedy(&model, PROMPT, "60", &["--policy", "off"])).success();
    for store in ["mapped", "direct"] {
        let own = Copy::of(&model);
        let answer = answering(&own, store, "60");
        let other = own.folder.path().join("other");
        std::fs::write(&other, "Dear reader, this is no model.").expect("write");
        std::fs::rename(&other, &own.model).expect("replace");
        std::fs::remove_file(&own.model).expect("remove");
        assert_eq!(answer.ended().success(), stock, "{store}");
        let again = run(support::greedy(&own.model, PROMPT, "2", &[]));
        again.failure(1, &["m.gguf", "No such file"]);
    }
}

#[test]
fn a_server_whose_model_has_changed_says_so_and_ends_with_an_error() {
    let name = "a_server_whose_model_has_changed_says_so_and_ends_with_an_error";
    let Some(model) = support::moe(name) else {
        return;
    };
    let own = Copy::of(&model);
    let server = Server::start(&own.model, &["--capacity", "120MB"]);
    let ask = json!({"prompt": "The sea", "max_tokens": 4});
    assert_eq!(server.post("/v1/completions", &ask).status, 200);
    let mut file = File::options().write(true).open(&own.model).expect("open");
    file.seek(SeekFrom::End(-1)).expect("seek");
    file.write_all(&[0]).expect("write");
    let answer = server.post("/v1/completions", &ask);
    answer.refused(500, &["has changed while it was in use"]);
    let (code, said) = server.ended();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("the server ends: "), "{said}");
}
