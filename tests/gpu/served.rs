//! A server whose model is loaded anew: what becomes of those who wait when that fails, and when the server is told to
//! stop meanwhile.

use crate::in_process::{Client, begin};
use crate::moves::two_layers;
use crate::rigged::{Device, NEVER, quick, rig_over};
use crate::support::{Alone, Toy, toy};
use hotpin::engine::{Model, Placement};
use hotpin::plant::{Move, Outcome, Resumed, VramLink, VramSize};
use hotpin::server::{App, End, Load, Lost, Moves, Queue};
use hotpin_controllers::vram::Arrangement;
use serde_json::json;
use std::cell::Cell;
use std::sync::Arc;

const TOKENS: u32 = 24;

/// What came of serving.
struct Served<T> {
    ended: Result<(), Lost>,
    /// What was answered.
    said: T,
    link: Arc<VramLink>,
}

/// Serves who asks, over a load of the toy that may go, until the asking is done. Experts stay on the host: only
/// orders of the test change that.
fn serve<T: Send + 'static>(
    alone: &Alone,
    load: &Load<'_>,
    asks: impl FnOnce(&App, &Client, &VramLink) -> T + Send + 'static,
) -> Served<T> {
    let toy = alone.toy;
    let mut control = quick();
    control.vram.limit_bytes = Some(0);
    let open = |placement: Placement| Model::open_placed(toy.map.path(), placement, |_| true);
    let model = Arc::new(open(toy.model.placement().clone()).expect("model"));
    let words = Arc::new(Model::open_words(toy.map.path()).expect("words"));
    let device = Arc::new(Device::default());
    let rig = rig_over(&model, &toy.map, &device, VramSize::Auto, control, NEVER);
    let link = rig.vram_link().expect("a tier");
    let monitor = rig.governor.as_ref().expect("regulated").monitor();
    let (app, http, client) = begin(&toy.map, &rig, monitor);
    let asking = {
        let (app, link) = (Arc::clone(&app), Arc::clone(&link));
        std::thread::spawn(move || {
            let said = asks(&app, &client, &link);
            app.queue.close(End::Drained);
            said
        })
    };
    let moves = Moves {
        app: &app,
        map: &toy.map,
        words: &words,
        load,
    };
    let due = moves.serve(Resumed { rig, lost: None }, None);
    let ended = moves.follow(model, due);
    let said = asking.join().expect("answers");
    http.stop();
    Served { ended, said, link }
}

fn open(toy: &Toy, placement: &Placement) -> Result<Model, String> {
    Model::open_placed(toy.map.path(), placement.clone(), |_| true).map_err(|e| e.to_string())
}

/// An answer, streamed; `order` is given after its first few pieces.
fn stream(client: &Client, link: &VramLink, order: Option<Move>) -> (String, Option<String>) {
    let body = json!({"prompt": "A card holds what was used last.", "max_tokens": TOKENS,
        "temperature": 0, "stream": true, "cache_prompt": false});
    client.stream("/v1/completions", &body, |pieces| {
        if let Some(order) = order.filter(|_| pieces == 4) {
            link.order_move(order);
        }
    })
}

fn there(toy: &Toy, both_fit: bool) -> Move {
    Move {
        to: Arrangement::Static {
            bytes: two_layers(toy),
        },
        both_fit,
    }
}

#[test]
fn what_cannot_be_loaded_changes_nothing_and_what_can_is_there() {
    let name = "what_cannot_be_loaded_changes_nothing_and_what_can_is_there";
    let Some(alone) = toy(name) else { return };
    let toy = alone.toy;
    let loads = Cell::new(0);
    // Side by side, after the old one went, and last of all with success.
    let load = |placement: &Placement, _: &mut dyn FnMut() -> bool| {
        loads.set(loads.get() + 1);
        match loads.get() {
            1 => Err("no room beside the old one".to_owned()),
            2 => Err("no room after the old one".to_owned()),
            _ => open(toy, placement),
        }
    };
    let orders = [
        None,
        Some(there(toy, true)),
        Some(there(toy, false)),
        Some(there(toy, true)),
    ];
    let served = serve(&alone, &load, move |_, client, link| {
        orders.map(|order| stream(client, link, order))
    });
    served.ended.expect("served to the end");
    // The last answer is computed elsewhere from some token on, and need not be the same.
    let [whole, beside, after, moved] = served.said;
    assert!(whole.0.len() > 8 && whole.1.is_none(), "{whole:?}");
    assert_eq!((&beside, &after), (&whole, &whole));
    assert!(moved.1.is_none() && moved.0.len() > 8, "{moved:?}");
    assert_eq!(loads.get(), 4, "the third brings back what there was");
    assert_eq!(served.link.applied(), there(toy, true).to);
    let told: Vec<_> = std::mem::take(&mut served.link.published().changes)
        .into_iter()
        .map(|change| match change {
            Outcome::Placed(moved) => (moved.now, moved.refused),
            Outcome::Pool(pool) => panic!("{pool:?}"),
        })
        .collect();
    assert_eq!(
        told,
        [
            (Arrangement::Cpu, Some("no room beside the old one".into())),
            (Arrangement::Cpu, Some("no room after the old one".into())),
            (there(toy, true).to, None),
        ]
    );
}

#[test]
fn where_nothing_can_be_loaded_everybody_is_told_and_the_server_ends() {
    let name = "where_nothing_can_be_loaded_everybody_is_told_and_the_server_ends";
    let Some(alone) = toy(name) else { return };
    let toy = alone.toy;
    let load = |_: &Placement, _: &mut dyn FnMut() -> bool| Err("the file is gone".to_owned());
    let order = there(toy, false);
    let served = serve(&alone, &load, move |_, client, link| {
        let running = stream(client, link, Some(order));
        // Who comes later finds the queue closed.
        let late = client.ask("POST", "/v1/completions", "{\"prompt\": \"A\"}");
        (running, late.status)
    });
    let error = served.ended.expect_err("lost").to_string();
    assert!(error.contains("the file is gone"), "{error}");
    let ((text, told), late) = served.said;
    let told = told.expect("an error");
    assert!(
        !text.is_empty() && told.contains("the file is gone"),
        "{told}"
    );
    assert_eq!(late, 503);
}

/// Tells the server to stop while it loads; returns what the running request was told, and how often it was tried to
/// load.
fn stopped_meanwhile(alone: &Alone, end: End) -> (String, Option<String>, u32) {
    let toy = alone.toy;
    let loads = Cell::new(0);
    let (sender, receiver) = std::sync::mpsc::channel::<Arc<Queue>>();
    let load = |placement: &Placement, goes_on: &mut dyn FnMut() -> bool| {
        loads.set(loads.get() + 1);
        let queue = receiver.recv().expect("the queue of the server");
        assert!(goes_on());
        queue.close(end);
        if goes_on() {
            open(toy, placement)
        } else {
            Err("told to stop".to_owned())
        }
    };
    let order = there(toy, false);
    let served = serve(alone, &load, move |app, client, link| {
        sender.send(Arc::clone(&app.queue)).expect("sent");
        stream(client, link, Some(order))
    });
    served.ended.expect("an orderly end");
    let (text, told) = served.said;
    (text, told, loads.get())
}

#[test]
fn a_server_that_is_told_to_stop_while_it_loads_lets_what_runs_finish() {
    let name = "a_server_that_is_told_to_stop_while_it_loads_lets_what_runs_finish";
    let Some(alone) = toy(name) else { return };
    let (text, told, loads) = stopped_meanwhile(&alone, End::Drained);
    assert_eq!((told, loads), (None, 1));
    assert!(text.len() > 8, "{text:?}");
}

#[test]
fn a_server_that_must_stop_at_once_loads_no_more() {
    let name = "a_server_that_must_stop_at_once_loads_no_more";
    let Some(alone) = toy(name) else { return };
    let (text, told, loads) = stopped_meanwhile(&alone, End::Now);
    let told = told.expect("an error");
    assert!(!text.is_empty() && told.contains("shutting down"), "{told}");
    assert_eq!(loads, 1);
}
