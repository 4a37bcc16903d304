//! Weights on the host and on the device.

use crate::program::program;
use crate::rigged::{Device, NEVER, quick, rig_over};
use crate::support::{bits, options, toy};
use hotpin::demo::{ToyArgs, build_toy};
use hotpin::engine::{GpuLayers, Model, Placement, Session, Token};
use hotpin::plant::VramSize;
use hotpin::store::Layout;
use std::sync::Arc;

/// Tokens chosen greedily after a prompt, and the logits of the first choice.
fn greedy(session: &mut Session<'_>, prompt: &[Token], count: usize) -> (Vec<Token>, Vec<u32>) {
    for token in prompt {
        session.decode(std::slice::from_ref(token)).expect("decode");
    }
    let first = bits(session.logits());
    let mut chosen = Vec::new();
    for _ in 0..count {
        let logits = session.logits();
        let best = (0..logits.len())
            .max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
            .expect("a vocabulary");
        let token = Token::try_from(best).expect("a token");
        chosen.push(token);
        session.decode(&[token]).expect("decode");
    }
    (chosen, first)
}

#[test]
fn placements_say_nearly_the_same() {
    let Some(alone) = toy("placements_say_nearly_the_same") else {
        return;
    };
    let toy = alone.toy;
    let prompt = toy.tokens(12);
    let on_host = Model::open(toy.map.path(), |_| true).expect("model");
    assert!(on_host.device().is_none());
    let all = Placement::new(&toy.map, GpuLayers::All);
    let whole = all.clone().with_experts([0, 1, 2, 3]);
    let whole = Model::open_placed(toy.map.path(), whole, |_| true).expect("model");
    let part = Placement::new(&toy.map, GpuLayers::Last(3)).with_experts([3]);
    let part = Model::open_placed(toy.map.path(), part, |_| true).expect("model");
    let full = toy.layout().largest_bytes();
    let mut said = Vec::new();
    for (name, model, pool) in [
        ("processor", &on_host, 0),
        ("dense weights on the device", &toy.model, 0),
        ("with a pool", &toy.model, full),
        ("with all experts", &whole, 0),
        ("the last layers", &part, 0),
    ] {
        let mut session = Session::new(model, &options(), false).expect("session");
        session.limit_pool(full);
        session.set_pool(pool).expect("pool");
        said.push((name, greedy(&mut session, &prompt, 64)));
    }
    let (_, (text, first)) = &said[0];
    for (name, (other, logits)) in &said {
        let apart = first.iter().zip(logits);
        let most = apart
            .map(|(&a, &b)| (f32::from_bits(a) - f32::from_bits(b)).abs())
            .fold(0.0, f32::max);
        let alike = text.iter().zip(other).take_while(|(a, b)| a == b).count();
        eprintln!(
            "{name}: {alike} of 64 greedy tokens as on the processor; logits at most {most} apart"
        );
        assert!(most < 0.5, "{name}: {most}");
    }
}

#[test]
fn layouts_leave_out_what_is_on_the_device() {
    let Some(alone) = toy("layouts_leave_out_what_is_on_the_device") else {
        return;
    };
    let toy = alone.toy;
    let placement = Placement::new(&toy.map, GpuLayers::All).with_experts([2]);
    let model = Model::open_placed(toy.map.path(), placement.clone(), |_| true).expect("model");
    let mut session = Session::new(&model, &options(), true).expect("session");
    session.warm_up().expect("warm-up");
    let learned = session.learned().expect("tapped");
    assert_eq!(learned.blocks, [0, 1, 2, 3]);
    assert!(
        learned.uses.iter().all(|u| u.block != 2),
        "its experts are not here"
    );
    let layout = Layout::placed(&toy.map, learned, &placement).expect("layout");
    let shape = toy.map.shape();
    assert!(layout.is_here(shape.id(1, 0)) && !layout.is_here(shape.id(2, 0)));
    // The table of token vectors is all that is dense here.
    let table = toy
        .map
        .tensor("token_embd.weight")
        .expect("table")
        .info
        .bytes;
    assert_eq!(layout.dense_bytes(), table);
    let rest = toy.map.dense_bytes() - table;
    assert_eq!(hotpin::plant::dense_on_device(&toy.map, &placement), rest);
}

#[test]
fn a_session_needs_no_experts_in_host_memory() {
    let Some(alone) = toy("a_session_needs_no_experts_in_host_memory") else {
        return;
    };
    let toy = alone.toy;
    let placement = Placement::new(&toy.map, GpuLayers::All).with_experts([0, 1, 2, 3]);
    let model = Model::open_placed(toy.map.path(), placement, |_| true).expect("model");
    let device = Arc::new(Device::default());
    let mut rig = rig_over(&model, &toy.map, &device, VramSize::Off, quick(), NEVER);
    let store = rig.store.clone().expect("store");
    rig.session.decode(&toy.tokens(4)).expect("decode");
    let totals = rig.counters.totals();
    assert_eq!((totals.misses, totals.fetch_bytes), (0, 0));
    assert!(!store.pin(toy.map.shape().id(0, 0)).expect("pin"));
}

#[test]
fn layers_that_are_too_large_for_the_device_are_refused_by_name() {
    let name = "layers_that_are_too_large_for_the_device_are_refused_by_name";
    let Some(alone) = toy(name) else { return };
    // Mesa's software device bears 128 MiB in one tensor, cards 2 GiB and more.
    if alone.toy.device.largest_tensor_bytes(1 << 28).is_none() {
        eprintln!("{name}: this device bears more than what is worth making");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let output = folder.path().join("large.gguf");
    build_toy(&ToyArgs {
        layers: 1,
        experts: 128,
        top_k: 2,
        width: 1024,
        expert_width: 1024,
        seed: 1,
        output: output.clone(),
        force: false,
    })
    .expect("toy");
    // In a process of its own: llama.cpp would end it.
    let path = output.to_str().expect("UTF-8");
    let args = [
        "run", path, "--raw", "-p", "A", "-n", "1", "-c", "64", "-t", "1", "--vram", "off",
    ];
    let ran = program(args.iter().chain(&["--gpu-experts", "all"]))
        .output()
        .expect("run");
    let said = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1), "{said}");
    assert!(
        said.contains("--gpu-experts") && said.contains("the experts of block 0, 136 MiB"),
        "{said}"
    );
}
