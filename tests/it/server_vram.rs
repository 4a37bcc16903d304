//! What a server tells of the tier in a device's memory. The device is a stub, and the test plays the engine;
//! law, loop, journal and server are real.

use super::in_process::begin;
use super::support::{self, governor_options};
use hotpin::engine::{MemorySource, Repooled};
use hotpin::governor::{Governor, GovernorOptions, Journal, JournalFile, Regulated, VramPart};
use hotpin::plant::{Moved, VramFeed, VramLink};
use hotpin_controllers::config::VramConfig;
use hotpin_controllers::vram::{
    Arrangement, DeviceLayout, DeviceMemory, LayerLayout, PoolLayout, TensorLayout,
};
use hotpin_controllers::{AdaptiveConfig, PolicyKind, build};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// A device of which 64 MiB are free.
#[derive(Debug)]
struct Stub;

impl MemorySource for Stub {
    fn memory(&self) -> Option<DeviceMemory> {
        Some(DeviceMemory {
            total_bytes: 256 * MIB,
            free_bytes: 64 * MIB,
        })
    }
}

/// How a pool for the model would be laid out on it.
fn layout(loaded: &support::Loaded) -> PoolLayout {
    let shape = loaded.map.shape();
    let layers = (0..shape.layers()).map(|layer| LayerLayout {
        device: Some(0),
        experts: shape.experts_in(layer),
        top_k: shape.top_k_in(layer),
        tensors: vec![
            TensorLayout {
                ggml_type: 2,
                columns: 64,
                rows: 64,
                expert_bytes: shape.layer_expert_bytes(layer) / 3,
            };
            3
        ],
    });
    let device = DeviceLayout {
        alignment_bytes: 256,
        split: 1.0,
        most_bank_bytes: None,
        offload_tokens: None,
    };
    PoolLayout::new(layers.collect(), vec![device]).expect("layout")
}

#[test]
fn the_tier_is_told_by_state_metrics_explain_and_journal() {
    let name = "the_tier_is_told_by_state_metrics_explain_and_journal";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let rig = loaded.rig(PolicyKind::Fetch, None, support::NEVER);
    let layout = layout(&loaded);
    let config = VramConfig {
        reserve_bytes: 4 * MIB,
        ..VramConfig::default()
    };
    let link = Arc::new(VramLink::default());
    let shape = loaded.map.shape().clone();
    let mut engine = VramFeed::new(layout.clone(), &config, shape.clone(), Arc::clone(&link));
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("journal.jsonl");
    let mut governor = Governor::start(
        GovernorOptions {
            vram: Some(VramPart {
                link: Arc::clone(&link),
                source: Arc::new(Stub),
                layout,
                config,
                can_move: true,
                link_bytes_per_s: Some(1e9),
                dense_bytes: MIB,
                context_bytes: MIB,
                load_ns: 1_000_000_000,
            }),
            ..governor_options(Duration::from_millis(20))
        },
        Regulated {
            store: rig.store.clone().expect("store"),
            counters: Arc::clone(&rig.counters),
            shape: shape.clone(),
        },
        build(PolicyKind::Fetch, &shape, &AdaptiveConfig::default(), None).expect("policy"),
        Journal::new(Some(JournalFile::create(&file).expect("journal"))),
        &mut |_, _| {},
    )
    .expect("governor");
    // The first tick orders as large a pool as fits beside the reserve.
    let ordered = engine.order().expect("an order");
    assert!(
        (50 * MIB..=64 * MIB).contains(&ordered),
        "{ordered} of 64 MiB"
    );
    let (app, http, client) = begin(loaded.map, &rig, governor.monitor());
    let tier = || client.ask("GET", "/api/state", "").json()["now"]["tick"]["vram"].clone();
    let due = tier();
    assert_eq!(due["arrangement"], "cpu");
    assert_eq!(
        (&due["wanted"], &due["wanted_bytes"]),
        (&"reload".into(), &ordered.into())
    );
    assert_eq!(due["free_bytes"], 64 * MIB);
    assert_eq!(
        (&due["rule"], &due["binding"]),
        (&"start".into(), &"memory".into())
    );
    engine.repooled(&Repooled {
        asked_bytes: ordered,
        before_bytes: 0,
        bytes: ordered,
        slots: Vec::new(),
        ended: None,
        state_bytes: 5,
        took_ns: 3_000_000,
        refused: None,
    });
    let mut there = Value::Null;
    support::wait_until("the pool to be told", || {
        there = tier();
        there["arrangement"] == "reload"
    });
    assert_eq!(there["pool_bytes"], ordered);
    assert!(there["slots"].as_u64().expect("slots") > 0, "{there}");
    let layer_bytes = shape.layer_expert_bytes(29) * 8;
    let asked = Arrangement::Static {
        bytes: 2 * layer_bytes,
    };
    engine.moved(Moved {
        asked,
        before: Arrangement::Reload {
            pool_bytes: ordered,
        },
        now: asked,
        ended: None,
        state_bytes: 5,
        took_ns: 2_000_000_000,
        refused: None,
    });
    support::wait_until("whole layers to be told", || {
        tier()["arrangement"] == "static"
    });
    let placed = tier();
    assert_eq!(placed["static_bytes"], 2 * layer_bytes);
    assert_eq!(placed["static_layers"], serde_json::json!([28, 29]));
    let metrics = client.ask("GET", "/metrics", "").body;
    for line in [
        format!("hotpin_vram_static_bytes {}", 2 * layer_bytes),
        "hotpin_vram_arrangement{arrangement=\"static\"} 1".into(),
        "hotpin_vram_changes_total 2".into(),
    ] {
        assert!(metrics.contains(&line), "no {line:?} in {metrics}");
    }
    let explained = |layer: usize| {
        let path = format!("/api/explain/{layer}/3");
        let answer = client.ask("GET", &path, "").json();
        assert_eq!(answer["vram"]["arrangement"], "static");
        answer["text"].as_str().expect("text").to_owned()
    };
    let (on_device, here) = (explained(29), explained(0));
    assert!(
        on_device.contains("in the graphics device's memory, as all of its layer"),
        "{on_device}"
    );
    assert!(
        !here.contains("as all of its layer") && here.contains("of whole layers' experts for good"),
        "{here}"
    );
    governor.stop();
    http.stop();
    drop(app);
    let said = support::run(["journal", file.to_str().expect("UTF-8")]);
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    let line = said
        .stdout
        .lines()
        .find(|line| line.starts_with("vram: "))
        .expect("a line of the tier");
    assert!(
        line.contains("2 changes, for 1 of which the model was loaded anew (0 refused)"),
        "{line}"
    );
    assert!(line.contains("of whole layers' experts for good"), "{line}");
}
