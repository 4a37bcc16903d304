//! `--learn`: what one session learned is where the next one starts.

use super::support::{self, greedy, run};
use hotpin::learn::Learner;
use hotpin::model::ModelMap;
use hotpin::plant::Counters;
use hotpin::profile::Profile;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const PROMPT: &str = "Tell me about the sea.";

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .expect("folder")
        .map(|entry| entry.expect("entry").file_name().to_string_lossy().into())
        .collect();
    names.sort();
    names
}

#[test]
fn the_next_session_starts_from_what_this_one_learned() {
    let name = "the_next_session_starts_from_what_this_one_learned";
    let Some(model) = support::moe(name) else {
        return;
    };
    let folder = tempfile::tempdir().expect("folder");
    let learned = folder.path().join("learned.toml");
    let file = learned.to_str().expect("UTF-8");
    let journal = folder.path().join("journal");
    let lines = journal.to_str().expect("UTF-8");
    let more = ["--learn", file, "--journal", lines, "--capacity", "100MB"];
    let args = |tokens: &str| greedy(&model, PROMPT, tokens, &more);
    let first = run(args("24")).success();
    let pins = std::fs::read_to_string(&journal).expect("journal");
    assert!(!pins.contains("\"profile\""), "nothing was known yet");
    let map = ModelMap::open(&model).expect("map");
    let profile = Profile::load(&learned, &map).expect("a profile like any other");
    // The first token comes from the prompt; the last is not decoded.
    assert_eq!(profile.tokens, 23);
    let top_k = 2;
    for layer in &profile.layer {
        assert_eq!(layer.counts.iter().sum::<u64>(), 23 * top_k, "{layer:?}");
    }
    assert_eq!(run(args("24")).success(), first, "the text is the same");
    let pins = std::fs::read_to_string(&journal).expect("journal");
    assert!(pins.contains("\"profile\""), "a warm start: {pins}");
    let twice = Profile::load(&learned, &map).expect("profile");
    assert_eq!(twice.tokens, 46, "it adds up");
    assert_eq!(names(folder.path()), ["journal", "learned.toml"]);
}

#[test]
fn a_file_that_does_not_fit_is_refused_or_set_aside() {
    let name = "a_file_that_does_not_fit_is_refused_or_set_aside";
    let Some(model) = support::moe(name) else {
        return;
    };
    let folder = tempfile::tempdir().expect("folder");
    let learned = folder.path().join("learned.toml");
    let file = learned.to_str().expect("UTF-8");
    let learn = |more: &[&str]| {
        let more: Vec<&str> = ["--learn", file].iter().chain(more).copied().collect();
        run(greedy(&model, PROMPT, "4", &more))
    };
    learn(&[]).success();
    let good = std::fs::read_to_string(&learned).expect("read");
    let line = good
        .lines()
        .find(|line| line.starts_with("fingerprint"))
        .expect("fingerprint");
    let other = good.replace(line, "fingerprint = \"0123456789abcdef\"");
    std::fs::write(&learned, &other).expect("write");
    let says = [
        "--learn",
        "made for",
        "30 MoE layers of 8 experts",
        "0123456789ab",
    ];
    learn(&[]).failure(1, &says);
    let kept = std::fs::read_to_string(&learned).expect("read");
    assert_eq!(kept, other, "another model's file is left alone");
    let newer = good.replace("version = 1", "version = 99");
    std::fs::write(&learned, &newer).expect("write");
    learn(&[]).failure(1, &["version 99"]);
    for (number, damage) in ["[[layer", "\u{0}\u{1}", &good[..good.len() / 2]]
        .iter()
        .enumerate()
    {
        std::fs::write(&learned, damage).expect("write");
        let ran = learn(&[]);
        let aside = format!("learned.toml.damaged-{}", number + 1);
        assert!(ran.stderr.contains(&aside), "{}", ran.stderr);
        ran.success();
        let kept = std::fs::read_to_string(folder.path().join(&aside)).expect("aside");
        assert_eq!(kept, *damage);
        let map = ModelMap::open(&model).expect("map");
        assert_eq!(Profile::load(&learned, &map).expect("anew").tokens, 3);
    }
    std::fs::write(&learned, [0xff, 0xfe]).expect("write");
    assert!(learn(&[]).stderr.contains("damaged-4"));
    learn(&["--policy", "off"]).failure(2, &["--learn", "--policy off"]);
    let nowhere = folder.path().join("none/learned.toml");
    let nowhere = nowhere.to_str().expect("UTF-8");
    let ran = run(greedy(&model, PROMPT, "4", &["--learn", nowhere]));
    ran.failure(1, &["--learn", "none/learned.toml"]);
}

#[test]
fn it_is_saved_while_the_session_runs_and_never_half() {
    let name = "it_is_saved_while_the_session_runs_and_never_half";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let folder = tempfile::tempdir().expect("folder");
    let learned = folder.path().join("learned.toml");
    let mut rig = loaded.rig(hotpin_controllers::PolicyKind::Fetch, None, support::NEVER);
    let counters: Arc<Counters> = Arc::clone(&rig.counters);
    let opened = Learner::open(&learned, loaded.map).expect("open");
    assert!(opened.counts.is_none() && opened.note.is_none());
    let every = Duration::from_millis(1);
    let learning = opened.learner.start(counters, every).expect("start");
    let mut seen = 0;
    for token in loaded.tokens(40) {
        rig.session.decode(&[token]).expect("decode");
        if learned.exists() {
            // Whenever one looks, there is a whole profile.
            let profile = Profile::load(&learned, loaded.map).expect("whole");
            assert!(profile.tokens >= seen);
            seen = profile.tokens;
        }
    }
    support::wait_until("a save while the session runs", || {
        Profile::load(&learned, loaded.map).is_ok_and(|profile| profile.tokens == 40)
    });
    learning.finish().expect("finish");
    assert_eq!(names(folder.path()), ["learned.toml"]);
    let next = Learner::open(&learned, loaded.map).expect("open");
    let counts = next.counts.expect("learned");
    let routed = f64::from(counts.iter().sum::<f32>());
    assert!((routed - 40.0 * 30.0 * 2.0).abs() < 0.5, "{routed}");
}
