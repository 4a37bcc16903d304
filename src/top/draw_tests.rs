use super::draw;
use crate::top::view::{Message, Order, View};
use crate::top::wire::{State, Tick};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

/// A tick as a server sends it, `s` seconds after the start.
fn tick(s: f64, tokens: u64, more: &[(&str, Value)]) -> Value {
    let mut tick = json!({
        "number": 7, "uptime_s": s, "pressure_cause": null, "paused": false,
        "tick": {
            "t_s": s, "capacity_bytes": 2 * GIB, "binding": "cgroup",
            "ceilings": {"model": 4 * GIB, "cgroup": 2 * GIB},
            "pin_budget_bytes": GIB, "pin_limit": "share", "pinned_bytes": GIB,
            "transit_bytes": GIB / 2, "available_bytes": null, "cgroup_available_bytes": null,
            "decode_tokens": 1, "hit_ratio": 0.5, "stall_ms": 1.0, "major_faults": 0, "drift": false,
            "pinned": [{"layer": 1, "expert": 2, "reason": "swap", "score": 0.5}], "unpinned": [],
            "lock_error": null, "lost_bytes": null, "quiet_ticks": 0
        },
        "totals": {"decode_tokens": tokens, "prompt_tokens": 0, "hits": tokens * 3, "pinned_hits": 0,
            "misses": tokens, "fetch_bytes": tokens << 20, "stall_ms": s * 250.0, "decode_ms": 0.0,
            "major_faults": null, "pressure_stall_ms": null, "drift_events": 4, "lock_errors": 0},
        "requests": {"queued": 3, "running": 2, "finished": 10, "cancelled": 0, "failed": 0,
            "refused": 1, "prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": tokens}
    });
    for (key, value) in more {
        tick[key] = value.clone();
    }
    tick
}

fn state(layers: usize, experts: usize) -> State {
    let all = layers * experts;
    let map = json!({"residence": "Pt..".repeat(all.div_ceil(4))[..all],
        "score": "/AA/".repeat(all.div_ceil(4))[..all]});
    let layer =
        |block: usize| json!({"block": block, "experts": experts, "top_k": 2, "expert_bytes": 9});
    let state = json!({
        "version": "0", "phase": "ready", "loading": null, "controls": true, "recent_requests": [],
        "model": {"id": "a-model", "policy": "adaptive", "store": "direct", "expert_bytes": 4 * GIB,
            "parallel": 2, "n_ctx": 512},
        "layers": (0..layers).map(layer).collect::<Vec<_>>(),
        "now": tick(1.0, 0, &[("experts", map)])
    });
    serde_json::from_value(state).expect("state")
}

fn told(view: &mut View, tick: Value) {
    let tick: Tick = serde_json::from_value(tick).expect("tick");
    view.take(Message::Tick(Box::new(tick)));
}

fn view() -> View {
    let mut view = View::new("http://127.0.0.1:8080", true);
    view.take(Message::State(Box::new(state(3, 8))));
    told(&mut view, tick(2.0, 40, &[]));
    view
}

fn picture(view: &View, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("terminal");
    terminal.draw(|frame| draw(frame, view)).expect("draw");
    terminal.backend().to_string()
}

fn key(view: &mut View, code: KeyCode) -> Option<Order> {
    view.key(KeyEvent::new(code, KeyModifiers::NONE))
}

#[test]
fn the_whole_picture_says_what_is_where_and_why() {
    let picture = picture(&view(), 120, 40);
    for words in [
        "a-model  policy adaptive, store direct  up 0:00:02  http://127.0.0.1:8080",
        "Capacity 2.00 GiB set by cgroup",
        "model 4.00 GiB",
        "1.00 GiB locked, 512 MiB in transit, of 4.00 GiB",
        "40.0 tok/s  hits 75.0%  stall 25%  reads 40.0 MiB/s  faults -  drift 4",
        "2 running, 3 waiting; 10 finished, 0 cancelled, 0 failed, 1 refused",
        "layer 0 (block 0), expert 0 chosen",
        "pinned expert 2 of layer 1: swap",
        "q ends",
    ] {
        assert!(picture.contains(words), "no {words:?} in\n{picture}");
    }
    // A quarter each: locked and hot, in transit, on disk, on disk and hot.
    let rows: Vec<&str> = picture.lines().filter(|l| l.contains("█░·!█░·!")).collect();
    assert_eq!(rows.len(), 3, "{picture}");
    assert!(picture.contains(&format!(
        "[{}{}{}]",
        "█".repeat(7),
        "▒".repeat(3),
        "·".repeat(20)
    )));
}

#[test]
fn the_tier_in_a_devices_memory_is_shown_where_there_is_one() {
    let mut view = view();
    assert!(!picture(&view, 110, 24).contains("vram"));
    let mut with = tick(3.0, 80, &[]);
    with["tick"]["vram"] =
        serde_json::to_value(crate::governor::VramEntry::example()).expect("as in a journal");
    told(&mut view, with);
    let picture = picture(&view, 110, 24);
    let words = "vram reload 3.00 MiB hits 75.0%";
    assert!(picture.contains(words), "no {words:?} in\n{picture}");
}

#[test]
fn no_terminal_is_too_small_or_too_large_for_it() {
    let mut views = vec![View::new("http://x", false), view(), view(), view(), view()];
    views[2].help = true;
    views[3].told = Some("words ".repeat(200));
    views[4].take(Message::Lost("it has ended".into()));
    let mut wide = View::new("http://x", false);
    wide.take(Message::State(Box::new(state(60, 256))));
    wide.chosen = (59, 255);
    views.push(wide);
    for view in &views {
        for width in [1, 2, 5, 20, 39, 40, 80, 250] {
            for height in [1, 2, 3, 7, 8, 9, 19, 20, 24, 70] {
                picture(view, width, height);
            }
        }
    }
    assert!(
        picture(&views[1], 30, 4).contains("tok/s"),
        "the rate is there"
    );
    let wide = picture(&views[5], 80, 24);
    assert!(
        wide.contains("layer 59 (block 59), expert 255 chosen"),
        "{wide}"
    );
    assert!(wide.contains("│ 59 "), "the chosen layer is shown\n{wide}");
}

#[test]
fn a_server_that_goes_away_comes_back_as_it_then_is() {
    let mut view = view();
    view.take(Message::Lost(
        "no server answers at http://127.0.0.1:8080".into(),
    ));
    let lost = picture(&view, 100, 24);
    assert!(
        lost.contains("no server answers") && lost.contains("Trying again"),
        "{lost}"
    );
    assert!(lost.contains("a-model"), "what was known stays\n{lost}");
    // Another one, smaller, that has just begun to load.
    let loading = json!({"version": "0", "phase": "loading", "layers": null, "model": null,
        "loading": {"step": "pinning", "fraction": 0.5}, "now": tick(0.5, 0, &[("tick", Value::Null)])});
    key(&mut view, KeyCode::Down);
    view.take(Message::State(Box::new(
        serde_json::from_value(loading).expect("state"),
    )));
    assert_eq!(view.chosen, (0, 0));
    let picture = picture(&view, 100, 24);
    assert!(picture.contains("The server is pinning 50%"), "{picture}");
    assert!(
        !picture.contains("-1") && !picture.contains("-4"),
        "{picture}"
    );
    assert!(picture.contains("Nothing is regulated here"), "{picture}");
}

#[test]
fn what_is_wrong_with_the_loop_is_said() {
    let mut view = view();
    told(&mut view, tick(3.0, 41, &[("paused", json!(true))]));
    assert!(picture(&view, 100, 24).contains("Paused"));
    let failed = tick(4.0, 42, &[("failed", json!("the loop has ended"))]);
    told(&mut view, failed);
    assert!(picture(&view, 100, 24).contains("the loop has ended"));
}

#[test]
fn keys_choose_explain_pause_and_end() {
    let mut view = view();
    for code in [KeyCode::Up, KeyCode::Left, KeyCode::PageUp, KeyCode::Home] {
        assert_eq!(key(&mut view, code), None);
        assert_eq!(view.chosen, (0, 0));
    }
    key(&mut view, KeyCode::Down);
    key(&mut view, KeyCode::Right);
    assert_eq!(key(&mut view, KeyCode::Enter), Some(Order::Explain(1, 1)));
    for _ in 0..20 {
        key(&mut view, KeyCode::PageDown);
        key(&mut view, KeyCode::Right);
    }
    assert_eq!(key(&mut view, KeyCode::Enter), Some(Order::Explain(2, 7)));
    view.take(Message::Told("because of its score".into()));
    assert!(picture(&view, 80, 24).contains("because of its score"));
    assert_eq!(
        key(&mut view, KeyCode::Down),
        None,
        "goes back, and no further"
    );
    assert_eq!((view.chosen, &view.told), ((2, 7), &None));
    assert_eq!(key(&mut view, KeyCode::Char('p')), Some(Order::Pause(true)));
    told(&mut view, tick(3.0, 41, &[("paused", json!(true))]));
    assert_eq!(
        key(&mut view, KeyCode::Char('p')),
        Some(Order::Pause(false))
    );
    view.has_key = false;
    assert_eq!(key(&mut view, KeyCode::Char('p')), None);
    assert!(view.told.as_ref().is_some_and(|t| t.contains("--api-key")));
    assert_eq!(key(&mut view, KeyCode::Esc), None, "closes what covers");
    key(&mut view, KeyCode::Char('?'));
    assert!(picture(&view, 80, 24).contains("locked in memory"));
    assert_eq!(key(&mut view, KeyCode::Esc), None);
    assert_eq!(key(&mut view, KeyCode::Esc), Some(Order::Quit));
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(view.key(interrupt), Some(Order::Quit));
    let nothing = &mut View::new("http://x", false);
    assert_eq!(key(nothing, KeyCode::Enter), None, "no expert to explain");
}
