//! `whatif`: what must hold of its answers whatever the constants are, and the published points.

use hotpin_sim::whatif::{
    Figures, Hardware, Kind, Locality, ModelSizes, Setup, Source, Strategy, break_even, compare,
    evaluate, published,
};

/// A short question on a preset machine.
fn question(machine: &str, model: &str) -> Setup {
    let hardware = Hardware::preset(machine).unwrap();
    let mut setup = Setup::new(hardware, ModelSizes::preset(model).unwrap());
    setup.warm_up_steps = 100;
    setup.steps = 150;
    setup
}

fn answer(setup: &Setup, strategy: Strategy) -> Figures {
    evaluate(setup, strategy).unwrap()
}

const UNIFORM: Locality = Locality {
    common_spread: 0.0,
    topic_spread: 0.0,
    persistence: 0.0,
    topic_tokens: 1000,
};

/// Guards against an answer that does not depend on what it is about.
#[test]
fn a_cache_pays_with_locality_and_loses_without_over_a_slow_bus() {
    let mut setup = question("rtx-3090", "gpt-oss-120b");
    let fixed = answer(&setup, Strategy::CpuExperts);
    for strategy in [Strategy::ReloadAdaptive, Strategy::AssistAdaptive] {
        assert!(answer(&setup, strategy).tok_s > fixed.tok_s, "{strategy:?}");
    }
    setup.source = Source::Drawn(UNIFORM);
    if let Some(link) = &mut setup.hardware.link {
        link.bytes_per_s = 6e9;
    }
    let fixed = answer(&setup, Strategy::CpuExperts);
    for strategy in [Strategy::ReloadLru, Strategy::ReloadAdaptive] {
        assert!(answer(&setup, strategy).tok_s < fixed.tok_s, "{strategy:?}");
    }
}

/// Guards against bytes that nobody moved: every miss of a plain reload is one copy.
#[test]
fn bus_bytes_are_the_misses() {
    let setup = question("rtx-3090", "gpt-oss-120b");
    let lru = answer(&setup, Strategy::ReloadLru);
    let routed = f64::from(setup.model.layers * setup.model.top_k);
    let missed = routed * (1.0 - lru.vram_hit_ratio.unwrap()) * setup.model.expert_bytes;
    let error = (lru.bus_bytes_per_token - missed).abs() / missed;
    assert!(error < 1e-6, "{} against {missed}", lru.bus_bytes_per_token);
    assert_eq!(
        answer(&setup, Strategy::CpuExperts).bus_bytes_per_token,
        0.0
    );
}

/// Guards against time that is counted twice or not at all.
#[test]
fn the_parts_of_a_step_are_the_step() {
    let mut setup = question("rtx-4090", "gpt-oss-120b");
    setup.sequences = 4;
    for outcome in compare(&setup).unwrap() {
        let figures = outcome.figures.unwrap();
        let parts = figures.step_s;
        let sum = parts.dense
            + parts.card_experts
            + parts.cpu_experts
            + parts.bus_wait
            + parts.disk_wait
            + parts.changes;
        let step_s = 4.0 / figures.tok_s;
        assert!((sum / step_s - 1.0).abs() < 1e-9, "{:?}", outcome.strategy);
    }
}

/// Guards against assistance that is not what the published points are compared with: a step is
/// everything else plus the missed share of what all experts take on the processor.
#[test]
fn assistance_costs_the_missed_share() {
    let mut setup = question("rtx-4090", "gpt-oss-120b");
    // The whole model in RAM, and a card that holds no layer's experts under the static placement.
    setup.hardware.cpu.ram_bytes = 256e9;
    setup.hardware.cpu.handoff_s = 0.0;
    let assisted = answer(&setup, Strategy::AssistLru);
    let hits = assisted.vram_hit_ratio.unwrap();
    if let Some(gpu) = &mut setup.hardware.gpu {
        let kv_bytes = 36.0 * setup.model.kv_layer_bytes(1, setup.context);
        gpu.vram_bytes = gpu.reserved_bytes + setup.model.dense_bytes() + kv_bytes + 1.0;
    }
    let fixed = answer(&setup, Strategy::CpuExperts);
    let expected_s = 1.0 / fixed.tok_s - hits * fixed.step_s.cpu_experts;
    let error = 1.0 / assisted.tok_s / expected_s - 1.0;
    assert!(error.abs() < 0.1, "{error:+.3} at {hits:.3} hits");
}

/// Guards against a context that costs nothing, and cards whose memories do not add up.
#[test]
fn context_takes_vram_and_cards_add_it() {
    let hits = |machine: &str, context| {
        let mut setup = question(machine, "qwen3-235b-a22b");
        setup.hardware.cpu.ram_bytes = 256e9;
        setup.context = context;
        answer(&setup, Strategy::ReloadLru).vram_hit_ratio.unwrap()
    };
    let (short, long) = (hits("rtx-3090", 1024), hits("rtx-3090", 16_384));
    assert!(long < short - 0.02, "{long:.3} against {short:.3}");
    let two = hits("2x-rtx-3090", 1024);
    assert!(two > short + 0.1, "{two:.3} against {short:.3}");
    let mut setup = question("rtx-3090", "qwen3-235b-a22b");
    setup.context = 1 << 20;
    let outcomes = compare(&setup).unwrap();
    let impossible = outcomes.iter().filter(|outcome| outcome.figures.is_none());
    assert!(impossible.count() >= 4, "a million tokens of KV do not fit");
}

/// Guards against batches that are free, and against a copy for each row: what sixteen tokens need
/// together is copied once.
#[test]
fn a_batch_shares_its_copies() {
    let mut setup = question("rtx-3090", "gpt-oss-120b");
    setup.sequences = 16;
    setup.source = Source::Drawn(Locality {
        common_spread: 1.7,
        ..UNIFORM
    });
    let figures = answer(&setup, Strategy::ReloadLru);
    let cycle_bytes = f64::from(setup.model.layers * setup.model.top_k) * setup.model.expert_bytes;
    let missed = 1.0 - figures.vram_hit_ratio.unwrap();
    assert!(figures.bus_bytes_per_token < 0.8 * missed * cycle_bytes);
    setup.sequences = 1;
    let alone = answer(&setup, Strategy::ReloadLru);
    assert!(figures.bus_bytes_per_token * 16.0 > alone.bus_bytes_per_token);
}

/// Guards against a level that is not one: just there the cache is level, and a uniform router is
/// below it.
#[test]
fn the_break_even_is_level() {
    let mut setup = question("rtx-3090", "gpt-oss-120b");
    if let Some(link) = &mut setup.hardware.link {
        link.bytes_per_s = 12e9;
    }
    let found = break_even(&setup, Strategy::ReloadAdaptive).unwrap();
    let level = found.at.unwrap();
    assert!(!level.always);
    let ratio = level.tok_s / found.against_tok_s;
    assert!((1.0..1.1).contains(&ratio), "{ratio}");
    assert!(level.reuse > 4.0 / 128.0 && level.reuse < 0.9);
    setup.source = Source::Drawn(UNIFORM);
    let uniform = answer(&setup, Strategy::ReloadAdaptive);
    assert!(uniform.tok_s < found.against_tok_s);
    assert!(uniform.vram_hit_ratio.unwrap() < level.hit_ratio);
}

/// Guards against a model that has left what others measured. The bars are what it reaches today:
/// docs/sim.md discusses the deviations.
#[test]
fn published_points_are_met_as_far_as_stated() {
    let points = published().unwrap();
    let deviation = |start: &str| {
        let point = points.iter().find(|p| p.what.starts_with(start)).unwrap();
        assert!(point.kind != Kind::Fitted, "{start} would prove nothing");
        point.model / point.published.unwrap() - 1.0
    };
    assert!(deviation("EPYC 7742 + RTX 5090, 77%").abs() < 0.15);
    assert!(
        deviation("RTX 3090, slow bus") < 0.0,
        "the cache loses there"
    );
    assert!(deviation("Qwen3-30B-A3B, LRU over 38%").abs() < 0.15);
    assert!(deviation("Qwen3-30B-A3B, 21.6 GB").abs() < 0.5);
    let reload = deviation("Qwen3-30B-A3B, reload");
    assert!(
        (3.0..5.0).contains(&reload),
        "copies cost their bytes: {reload}"
    );
    assert!(deviation("  the same where texts keep").abs() < 0.1);
}

/// Guards against answers that cannot be repeated.
#[test]
fn equal_seeds_give_equal_answers() {
    let tok_s = |seed| {
        let mut setup = question("rtx-3090", "gpt-oss-20b");
        setup.hardware.gpu.as_mut().unwrap().vram_bytes = 8e9;
        setup.seed = seed;
        answer(&setup, Strategy::AssistAdaptive).tok_s
    };
    assert_eq!(tok_s(3), tok_s(3));
    assert_ne!(tok_s(3), tok_s(4));
}
