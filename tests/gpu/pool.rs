//! The pool: its bits, its sizes, and what its shadow says of it.

use crate::support::{Toy, bits, options, sums, toy};
use hotpin::engine::Session;
use hotpin::plant::{Rig, RigOptions, VramOptions, VramSize};
use hotpin::store::StoreKind;
use hotpin_controllers::PolicyKind;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Logits of tokens decoded one by one, the pool being changed to `sizes` in turn, one for each part of
/// the tokens.
fn logits(toy: &Toy, session: &mut Session<'_>, sizes: &[u64]) -> Vec<Vec<u32>> {
    let tokens = toy.tokens(24);
    let part = tokens.len() / sizes.len();
    let mut all = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        if at % part == 0 {
            let bytes = sizes[at / part];
            let outcome = session.set_pool(bytes).expect("pool");
            assert_eq!((outcome.bytes, outcome.refused), (bytes, None));
        }
        session.decode(std::slice::from_ref(token)).expect("decode");
        all.push(bits(session.logits()));
    }
    all
}

#[test]
fn bits_depend_neither_on_the_pools_size_nor_on_its_changes() {
    let Some(alone) = toy("bits_depend_neither_on_the_pools_size_nor_on_its_changes") else {
        return;
    };
    let toy = alone.toy;
    let layout = toy.layout();
    let (least, full) = (layout.least_bytes(), layout.largest_bytes());
    let half = least.midpoint(full);
    let of = |sizes: &[u64]| {
        let mut session = Session::new(&toy.model, &options(), false).expect("session");
        session.limit_pool(full);
        logits(toy, &mut session, sizes)
    };
    let whole = of(&[full]);
    assert_eq!(of(&[least]), whole, "least {least}");
    assert_eq!(of(&[half]), whole, "half {half}");
    assert_eq!(of(&[full, least, half]), whole, "changed twice");
    // On the processor the sums are other ones: how far apart is reported, not asserted.
    let cpu = of(&[0]);
    let apart = cpu.iter().flatten().zip(whole.iter().flatten());
    let most = apart
        .map(|(&a, &b)| (f32::from_bits(a) - f32::from_bits(b)).abs())
        .fold(0.0, f32::max);
    eprintln!("experts on the processor and on the device: logits at most {most} apart");
    assert!(most < 0.5, "{most}");
}

/// Decodes tokens one by one and in batches of these widths with pools of three sizes, and compares what the
/// shadow counted of each with what llama.cpp says when it gives it up.
fn count(toy: &'static Toy, widths: &[usize]) {
    let layout = toy.layout();
    let (least, full) = (layout.least_bytes(), layout.largest_bytes());
    let (mut session, followed) = toy.followed(&options());
    let tokens = toy.tokens(120);
    let sizes = [least, least.midpoint(full), full];
    for &bytes in &sizes {
        followed.link.order(bytes);
        for token in &tokens[..20] {
            session.decode(std::slice::from_ref(token)).expect("decode");
        }
        assert_eq!(session.pool_bytes(), bytes);
        for &width in widths {
            session.decode(&tokens[20..20 + width]).expect("batch");
        }
        session.clear();
    }
    followed.link.order(0);
    session.follow_orders().expect("order");
    let ends = followed.ends();
    assert_eq!(ends.len(), sizes.len());
    for (end, bytes) in ends.iter().zip(sizes) {
        let theirs = end.theirs.expect("llama.cpp says what its pool did");
        eprintln!(
            "pool of {bytes}: shadow {:?}, llama.cpp {theirs:?}",
            end.own
        );
        let (hits, misses) = sums(end.own.small, end.own.large);
        assert!(hits + misses > 0);
        assert_eq!(end.own.small.hits, theirs.small.hits);
        assert_eq!(end.own.small.misses, theirs.small.misses);
        assert_eq!(end.own.large.hits, theirs.large.hits);
        assert_eq!(end.own.large.misses, theirs.large.misses);
        assert_eq!(end.own.copied.slices, theirs.copied);
        #[expect(clippy::cast_precision_loss, reason = "a few MiB")]
        let uploaded = end.own.counts().upload_bytes as f64;
        let said = theirs.small.uploaded_bytes + theirs.large.uploaded_bytes;
        assert!(
            (uploaded - said).abs() <= 0.01 * uploaded + 16384.0,
            "{uploaded} {said}"
        );
    }
    assert!(followed.fetched.load(Relaxed) > 0);
}

#[test]
fn the_shadow_counts_what_llama_cpp_counts() {
    let Some(alone) = toy("the_shadow_counts_what_llama_cpp_counts") else {
        return;
    };
    // Batches that fit, and batches that could select more experts than the smallest pool has slots.
    count(alone.toy, &[3, 5, 8]);
}

#[test]
fn the_shadow_counts_wide_batches() {
    let Some(alone) = toy("the_shadow_counts_wide_batches") else {
        return;
    };
    // Batches that count as large ones, and one too wide for any pool. ggml's scratch memory grows with them,
    // which Mesa's software device bears only without flash attention.
    count(alone.toy, &[12, 40]);
}

#[test]
fn what_the_pool_holds_is_not_asked_of_ram() {
    let Some(alone) = toy("what_the_pool_holds_is_not_asked_of_ram") else {
        return;
    };
    let toy = alone.toy;
    let (mut session, followed) = toy.followed(&options());
    let tokens = toy.tokens(32);
    let round = |session: &mut Session<'_>| {
        let before = followed.fetched.load(Relaxed);
        for token in &tokens {
            session.decode(std::slice::from_ref(token)).expect("decode");
        }
        session.clear();
        followed.fetched.load(Relaxed) - before
    };
    let every = round(&mut session);
    // Four layers, two experts each.
    assert_eq!(every, 32 * 8);
    followed.link.order(followed.layout.largest_bytes());
    let first = round(&mut session);
    assert!(first <= 32, "each of 32 experts comes once: {first}");
    assert_eq!(round(&mut session), 0, "all of them are there");
    followed.link.order(0);
    assert_eq!(round(&mut session), every, "and none any more");
}

#[test]
fn sizes_that_the_device_does_not_bear_are_refused() {
    let Some(alone) = toy("sizes_that_the_device_does_not_bear_are_refused") else {
        return;
    };
    let toy = alone.toy;
    let layout = toy.layout();
    let mut session = Session::new(&toy.model, &options(), false).expect("session");
    let token = toy.tokens(1);
    let refused = session.set_pool(layout.least_bytes()).expect("outcome");
    assert!(refused.refused.is_some(), "no limit is known yet");
    session.limit_pool(layout.largest_bytes());
    for bytes in [layout.largest_bytes() + 1, u64::MAX] {
        let outcome = session.set_pool(bytes).expect("outcome");
        assert!(outcome.refused.is_some() && outcome.bytes == 0, "{bytes}");
    }
    // Too small for a token's experts: llama.cpp refuses, and the session goes on without.
    let outcome = session.set_pool(1).expect("outcome");
    assert!(outcome.refused.is_some() && outcome.bytes == 0);
    session.decode(&token).expect("decode");
    // A size that is kept when the next one is refused.
    let half = layout.least_bytes().midpoint(layout.largest_bytes());
    assert_eq!(session.set_pool(half).expect("outcome").bytes, half);
    assert_eq!(session.set_pool(1).expect("outcome").bytes, half);
    session.decode(&token).expect("decode");
}

#[test]
fn banks_end_where_the_device_computes_no_more() {
    let Some(alone) = toy("banks_end_where_the_device_computes_no_more") else {
        return;
    };
    let device = alone.toy.device;
    let Some(bytes) = device.largest_tensor_bytes(1 << 40) else {
        eprintln!("{}: no bound below 1 TiB", device.description());
        return;
    };
    eprintln!("{}: tensors of up to {bytes} bytes", device.description());
    // Every driver gives 2^27 (the least that Vulkan asks for).
    assert!(bytes >= 1 << 26, "{bytes}");
    let row = hotpin::engine::BankRow {
        ty: 8,
        columns: 1024,
        rows: 1024,
    };
    let (slot, most) = (1024 * 1024 / 32 * 34, 1 << 20);
    let slots = device.most_slots(row, most);
    assert!(slots < most && (slots + 2) * slot > bytes && slots * slot <= bytes + slot);
}

#[test]
fn several_sequences_survive_a_change() {
    let Some(alone) = toy("several_sequences_survive_a_change") else {
        return;
    };
    let toy = alone.toy;
    let layout = toy.layout();
    let tokens = toy.tokens(12);
    let options = hotpin::engine::EngineOptions {
        sequences: 3,
        ..options()
    };
    let run = |sizes: [u64; 2]| {
        let mut session = Session::new(&toy.model, &options, false).expect("session");
        session.limit_pool(layout.largest_bytes());
        let mut all = Vec::new();
        for (at, &token) in tokens.iter().enumerate() {
            if at % 6 == 0 {
                let outcome = session.set_pool(sizes[at / 6]).expect("pool");
                assert_eq!(outcome.state_bytes > 0, at > 0);
            }
            let rows: Vec<hotpin::engine::Row> = [0, 2]
                .map(|sequence| hotpin::engine::Row {
                    token: token + i32::try_from(sequence).expect("small"),
                    position: at,
                    sequence,
                    logits: true,
                })
                .into();
            session.decode_next(&rows).expect("decode");
            all.push([bits(session.logits_of(0)), bits(session.logits_of(1))]);
        }
        all
    };
    let full = layout.largest_bytes();
    let half = layout.least_bytes().midpoint(full);
    assert_eq!(run([full, half]), run([full, full]));
}

#[test]
fn the_tap_changes_no_choice_and_its_cost_is_reported() {
    let Some(alone) = toy("the_tap_changes_no_choice_and_its_cost_is_reported") else {
        return;
    };
    let toy = alone.toy;
    let full = toy.layout().largest_bytes();
    let tokens = toy.tokens(64);
    let mut plain = Session::new(&toy.model, &options(), false).expect("session");
    plain.limit_pool(full);
    plain.set_pool(full).expect("pool");
    let (mut tapped, followed) = toy.followed(&options());
    followed.link.order(full);
    let round = |session: &mut Session<'_>| {
        session.clear();
        let began = Instant::now();
        let mut all = Vec::new();
        for token in &tokens {
            session.decode(std::slice::from_ref(token)).expect("decode");
            all.push(bits(session.logits()));
        }
        (began.elapsed().as_secs_f64() * 1e3 / 64.0, all)
    };
    // The first rounds compile what the device computes with.
    let (_, without) = round(&mut plain);
    let (_, with) = round(&mut tapped);
    let best = |a: f64, b: f64| a.min(b);
    let (mut plain_ms, mut tapped_ms) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..3 {
        plain_ms = best(plain_ms, round(&mut plain).0);
        tapped_ms = best(tapped_ms, round(&mut tapped).0);
        tapped_ms = best(tapped_ms, round(&mut tapped).0);
        plain_ms = best(plain_ms, round(&mut plain).0);
    }
    let layers = toy.map.layers().len();
    eprintln!(
        "a token takes {plain_ms:.3} ms without the tap and {tapped_ms:.3} ms with it, {layers} layers asked for; bits {}",
        if with == without {
            "are equal"
        } else {
            "differ"
        }
    );
    let likeliest = |row: &[u32]| {
        (0..row.len()).max_by(|&a, &b| f32::from_bits(row[a]).total_cmp(&f32::from_bits(row[b])))
    };
    for (a, b) in with.iter().zip(&without) {
        assert_eq!(likeliest(a), likeliest(b));
    }
}

#[test]
fn a_pool_that_nobody_regulates_is_told_by_llama_cpps_own_count() {
    let Some(alone) = toy("a_pool_that_nobody_regulates_is_told_by_llama_cpps_own_count") else {
        return;
    };
    let toy = alone.toy;
    let layout = toy.layout();
    let half = layout.least_bytes().midpoint(layout.largest_bytes());
    let options = RigOptions {
        vram: VramOptions {
            size: VramSize::Bytes(half),
            ..VramOptions::default()
        },
        ..RigOptions::new(PolicyKind::Off, StoreKind::Auto, options())
    };
    let mut rig = Rig::assemble(&toy.model, &toy.map, options, &mut |_, _| {}).expect("rig");
    let tokens = toy.tokens(24);
    for token in &tokens {
        rig.session.decode(&[*token]).expect("decode");
    }
    let used = rig.end_fixed_pool().expect("ended").expect("a pool");
    let (hits, misses) = used.uses();
    eprintln!("{used:?}");
    assert_eq!((used.bytes, used.tokens), (half, 24));
    // Two experts in each of four layers.
    assert_eq!(hits + misses, 24 * 8);
    assert!(hits > 0 && misses > 0 && used.slots > 0);
    let uploaded = toy.map.expert_bytes() / 32 * misses;
    #[expect(clippy::cast_precision_loss, reason = "a few MiB")]
    let apart = (used.uploaded_bytes() - uploaded as f64).abs();
    assert!(apart < 16384.0, "{apart} bytes of {uploaded}");
    assert_eq!(rig.end_fixed_pool().expect("nothing"), None);
    rig.session.decode(&tokens[..1]).expect("goes on");
}
