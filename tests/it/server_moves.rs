//! Requests that outlive the session that they began on, as when the model is loaded anew.

use super::in_process::{Client, begin};
use super::support;
use hotpin::engine::{Model, Session};
use hotpin::plant::{Move, VramLink};
use hotpin::server::{Desk, End, Scheduler, Stopped};
use hotpin_controllers::PolicyKind;
use hotpin_controllers::vram::Arrangement;
use serde_json::json;
use std::sync::Arc;

const TOKENS: u32 = 24;

/// A chat answer, streamed; an order is given after its first few pieces.
fn stream(client: &Client, link: Option<&VramLink>) -> (String, Option<String>) {
    let body = json!({"messages": [{"role": "user", "content": "Count the ships."}],
        "max_tokens": TOKENS, "temperature": 0, "stream": true, "cache_prompt": false});
    client.stream("/v1/chat/completions", &body, |pieces| {
        if let Some(link) = link.filter(|_| pieces == 4) {
            link.order_move(Move {
                to: Arrangement::Static { bytes: 1 },
                both_fit: true,
            });
        }
    })
}

#[test]
fn requests_go_on_with_another_session_and_say_what_they_would_have_said() {
    let name = "requests_go_on_with_another_session_and_say_what_they_would_have_said";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let mut rig = loaded.rig(PolicyKind::Fetch, None, support::NEVER);
    let monitor = rig.governor.as_ref().expect("regulated").monitor();
    assert!(monitor.store().is_some());
    let (app, http, client) = begin(loaded.map, &rig, monitor);
    let link = Arc::new(VramLink::default());
    let queue = Arc::clone(&app.queue);
    let asking = {
        let link = Arc::clone(&link);
        std::thread::spawn(move || {
            let whole = stream(&client, None);
            let moved = stream(&client, Some(&link));
            let lost = stream(&client, Some(&link));
            queue.close(End::Drained);
            [whole, moved, lost]
        })
    };
    // The vocabulary alone is enough for what is made for a request.
    let words = Arc::new(Model::open_words(loaded.map.path()).expect("words"));
    let serve = |session: &mut Session<'_>, desk: Option<Desk>, lost: Option<&str>| {
        let mut scheduler = Scheduler::new(session, Arc::clone(&app.queue), Arc::clone(&app.stats))
            .moving(Arc::clone(&words), Some(Arc::clone(&link)))
            .resumed(desk, lost);
        (scheduler.run(), scheduler.leave())
    };
    let (stopped, desk) = serve(&mut rig.session, None, None);
    assert!(matches!(stopped, Stopped::Moves(_)));
    let kept = rig.session.give_up();
    assert!(kept.state_bytes > 0);
    link.withdraw();
    let model = Model::open(loaded.map.path(), |_| true).expect("load");
    let mut second = Session::new(&model, rig.session.options(), false).expect("session");
    second.warm_up().expect("warm-up");
    second.take_over(&kept).expect("the sequences");
    let (stopped, desk) = serve(&mut second, Some(desk), None);
    assert!(matches!(stopped, Stopped::Moves(_)));
    // The second time they are not put back.
    link.withdraw();
    second.clear();
    let (stopped, _) = serve(&mut second, Some(desk), Some("there was no room for them"));
    assert_eq!(stopped, Stopped::Closed);
    let [whole, moved, lost] = asking.join().expect("answers");
    assert!(whole.0.len() > 20 && whole.1.is_none(), "{whole:?}");
    assert_eq!(moved, whole);
    let why = lost.1.expect("an error");
    assert!(why.contains("no room for them"), "{why}");
    assert!(
        whole.0.starts_with(&lost.0) && lost.0 != whole.0,
        "{}",
        lost.0
    );
    http.stop();
}
