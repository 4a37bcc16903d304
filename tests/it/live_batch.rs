//! Several sequences in one context: what each computes, and what the store hears of it.

use super::support::{self, engine_options};
use hotpin::engine::{EngineOptions, Pass, RouteSink, Routed, Row, Session, Token};
use std::sync::{Arc, Mutex};

fn options() -> EngineOptions {
    EngineOptions {
        sequences: 2,
        ..engine_options()
    }
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn row(sequence: u32, position: usize, token: Token) -> Row {
    Row {
        token,
        position,
        sequence,
        logits: true,
    }
}

/// Decodes a prompt in a sequence and then `next` one by one; returns the logits after each.
fn alone(
    session: &mut Session<'_>,
    sequence: u32,
    prompt: &[Token],
    next: &[Token],
) -> Vec<Vec<u32>> {
    session
        .decode_prompt(sequence, 0, prompt, true)
        .expect("prompt");
    let mut all = vec![bits(session.logits_of(prompt.len() - 1))];
    for (i, &token) in next.iter().enumerate() {
        session
            .decode_next(&[row(sequence, prompt.len() + i, token)])
            .expect("decode");
        all.push(bits(session.logits_of(0)));
    }
    all
}

#[test]
fn a_sequence_computes_the_same_bits_beside_another_one() {
    let name = "a_sequence_computes_the_same_bits_beside_another_one";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let tokens = loaded.tokens(60);
    let (prompt, next) = (&tokens[..20], &tokens[20..24]);
    let mut single = Session::new(loaded.model, &engine_options(), false).expect("session");
    single.decode(prompt).expect("prompt");
    let mut stock = vec![bits(single.logits())];
    for token in next {
        single.decode(std::slice::from_ref(token)).expect("decode");
        stock.push(bits(single.logits()));
    }
    drop(single);
    let mut session = Session::new(loaded.model, &options(), false).expect("session");
    assert_eq!(session.n_ctx(), 512, "each sequence has all of it");
    // The other sequence holds more than this one ever will, and goes on in between.
    session
        .decode_prompt(1, 0, &tokens[24..], true)
        .expect("other");
    assert_eq!(
        alone(&mut session, 0, prompt, next),
        stock,
        "beside a longer one"
    );
    session.keep_prefix(1, 0);
    assert_eq!(
        alone(&mut session, 1, prompt, next),
        stock,
        "in another place"
    );
}

#[test]
fn a_prefix_is_kept_and_what_follows_it_replaced() {
    let name = "a_prefix_is_kept_and_what_follows_it_replaced";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let tokens = loaded.tokens(40);
    let mut session = Session::new(loaded.model, &options(), false).expect("session");
    let fresh = alone(&mut session, 0, &tokens[..10], &tokens[10..14]);
    session.keep_prefix(0, 0);
    alone(&mut session, 0, &tokens[..10], &tokens[20..30]);
    assert_eq!(session.keep_prefix(0, 10), 10);
    for (i, &token) in tokens[10..14].iter().enumerate() {
        session
            .decode_next(&[row(0, 10 + i, token)])
            .expect("decode");
        assert_eq!(bits(session.logits_of(0)), fresh[i + 1], "token {i}");
    }
    assert_eq!(session.keep_prefix(1, 5), 0, "nothing is in there");
}

/// Rows of each call, by block, and the pass that it belonged to.
#[derive(Clone, Default)]
struct Calls(Arc<Mutex<Vec<(u32, usize, Pass)>>>);

impl RouteSink for Calls {
    fn routed(&mut self, routed: &Routed<'_>) -> Result<(), String> {
        let mut calls = self.0.lock().expect("calls");
        calls.push((routed.block, routed.tokens, routed.pass));
        Ok(())
    }

    fn decoded(&mut self, _: Pass, _: usize, _: u64, _: u64) {}

    fn streams(&self) -> bool {
        false
    }
}

#[test]
fn the_routing_of_all_sequences_comes_in_one_call_a_layer() {
    let name = "the_routing_of_all_sequences_comes_in_one_call_a_layer";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let tokens = loaded.tokens(40);
    let mut session = Session::new(loaded.model, &options(), true).expect("session");
    session.warm_up().expect("warm-up");
    let calls = Calls::default();
    session.route_to(Box::new(calls.clone()), None);
    session
        .decode_prompt(0, 0, &tokens[..8], true)
        .expect("prompt");
    session
        .decode_prompt(1, 0, &tokens[8..31], true)
        .expect("prompt");
    let heard: Vec<_> = std::mem::take(&mut *calls.0.lock().expect("calls"));
    assert!(heard.iter().all(|call| call.2 == Pass::Prompt));
    session
        .decode_next(&[row(0, 8, tokens[31]), row(1, 23, tokens[32])])
        .expect("decode");
    let heard: Vec<_> = std::mem::take(&mut *calls.0.lock().expect("calls"));
    let blocks: Vec<u32> = loaded
        .map
        .layers()
        .iter()
        .map(|layer| layer.block)
        .collect();
    assert_eq!(
        heard.iter().map(|call| call.0).collect::<Vec<_>>(),
        blocks,
        "one call a layer"
    );
    assert!(
        heard.iter().all(|call| call.1 == 2 && call.2 == Pass::Next),
        "{heard:?}"
    );
}
