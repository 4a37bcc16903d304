//! The running engine: equal bits under every policy, counters, and what happens when something
//! fails in the middle.

use super::support::{self, Loaded, NEVER, bits, engine_options, forced_hash, locked_bytes};
use hotpin::engine::{EngineError, Pass, RouteSink, Routed, Session};
use hotpin::plant::Rig;
use hotpin::trace::Recorder;
use hotpin_controllers::trace::{Phase, Trace};
use hotpin_controllers::{ExpertId, PolicyKind};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TICK: Duration = Duration::from_millis(20);

#[test]
fn every_policy_computes_the_same_bits_however_little_it_may_keep() {
    let name = "every_policy_computes_the_same_bits_however_little_it_may_keep";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let tokens = loaded.tokens(102);
    let mut plain = loaded.rig(PolicyKind::Off, None, TICK);
    // Where nearly every byte is read again for every token, fewer tokens do.
    let [stock, stock_of_few] = [24, 8].map(|decoded| bits(&mut plain, &tokens, decoded));
    drop(plain);
    let third = loaded.map.shape().total_bytes() * 3 / 10;
    let one_layer = 2 * loaded.expert_bytes();
    let cases = [
        (PolicyKind::Fetch, third),
        (PolicyKind::Static, third),
        (PolicyKind::Lru, third),
        (PolicyKind::Lru, one_layer),
        (PolicyKind::Adaptive, third),
        (PolicyKind::Adaptive, one_layer),
    ];
    for (policy, limit_bytes) in cases {
        let what = format!("{policy} with {limit_bytes} bytes");
        let mut rig = loaded.rig(policy, Some(limit_bytes), TICK);
        let (decoded, expected) = if limit_bytes == one_layer {
            (8, &stock_of_few)
        } else {
            (24, &stock)
        };
        assert_eq!(&bits(&mut rig, &tokens, decoded), expected, "{what}");
        let status = rig.governor.as_ref().expect("governor").status();
        assert_eq!(status.failed, None, "{what}");
        assert!(status.decision.capacity_bytes <= limit_bytes, "{what}");
        assert!(status.pinned_bytes <= limit_bytes, "{what}");
        check_eviction(&loaded, &rig, policy, limit_bytes, &what);
    }
}

/// The capacity must have been too small for what was routed, or the test shows nothing.
fn check_eviction(
    loaded: &Loaded,
    rig: &Rig<'_>,
    policy: PolicyKind,
    limit_bytes: u64,
    what: &str,
) {
    if !matches!(policy, PolicyKind::Adaptive | PolicyKind::Lru) {
        return;
    }
    let shape = loaded.map.shape();
    let mut decode = vec![0; shape.total_experts()];
    let mut prefill = decode.clone();
    rig.counters.decode_into(&mut decode);
    rig.counters.prefill_into(&mut prefill);
    let used = (0..decode.len())
        .filter(|&i| decode[i] + prefill[i] > 0)
        .count() as u64;
    let totals = rig.counters.totals();
    assert!(
        used * loaded.expert_bytes() > limit_bytes,
        "{what}: {used} experts were used"
    );
    assert!(
        totals.misses > used,
        "{what}: {} misses of {used} experts, so none was evicted",
        totals.misses
    );
    // One layer's experts of the last batch may be above it; they are in use.
    let store = rig.store.as_ref().expect("store");
    store.trim();
    let held = store.held();
    assert!(
        held.pinned_bytes + held.transit_bytes <= limit_bytes,
        "{what}: {held:?}"
    );
}

#[test]
fn the_thread_pools_that_follow_residence_compute_stock_bits() {
    let name = "the_thread_pools_that_follow_residence_compute_stock_bits";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let tokens = loaded.tokens(10);
    let hash_of = |policy, limit_bytes| {
        let mut options = loaded.rig_options(policy, limit_bytes, TICK);
        options.engine.threads = 2;
        let mut rig =
            Rig::assemble(loaded.model, loaded.map, options, &mut |_, _| {}).expect("rig");
        forced_hash(&mut rig.session, &tokens)
    };
    let stock = hash_of(PolicyKind::Off, None);
    // All resident: the pool spins from the ninth token on.
    assert_eq!(hash_of(PolicyKind::Adaptive, None), stock);
    assert_eq!(
        hash_of(
            PolicyKind::Adaptive,
            Some(loaded.map.shape().total_bytes() / 4)
        ),
        stock
    );
}

/// Compute threads of this thread's sessions that may run on `processor` alone.
fn held_on(processor: usize) -> usize {
    let name = |task: &str| std::fs::read_to_string(format!("/proc/{task}/comm"));
    let ours = name("thread-self").expect("comm");
    let this = nix::unistd::gettid();
    let tasks = std::fs::read_dir("/proc/self/task").expect("tasks");
    tasks
        .filter_map(|task| task.ok()?.file_name().to_str().map(str::to_owned))
        .filter(|task| name(&format!("self/task/{task}")).is_ok_and(|name| name == ours))
        .map(|task| Pid::from_raw(task.parse().expect("number")))
        .filter(|task| *task != this)
        .filter(|task| sched_getaffinity(*task).is_ok_and(|set| numbers(&set) == [processor]))
        .count()
}

fn numbers(set: &CpuSet) -> Vec<usize> {
    let is_set = |number: &usize| set.is_set(*number).unwrap_or(false);
    (0..CpuSet::count()).filter(is_set).collect()
}

/// Guards against `taskset` that is undone by the next token, and threads that stay where no processor is left.
#[test]
fn compute_threads_follow_the_processors_that_they_may_run_on() {
    let name = "compute_threads_follow_the_processors_that_they_may_run_on";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let this = Pid::from_raw(0);
    let all = sched_getaffinity(this).expect("processors");
    let [first, .., last] = numbers(&all)[..] else {
        eprintln!("SKIPPED {name}: one processor");
        return;
    };
    let tokens = loaded.tokens(10);
    let quarter = loaded.map.shape().total_bytes() / 4;
    // The last one changes between its two pools of threads.
    let cases = [
        (PolicyKind::Off, None),
        (PolicyKind::Adaptive, Some(quarter)),
        (PolicyKind::Adaptive, None),
    ];
    for (policy, limit_bytes) in cases {
        let mut options = loaded.rig_options(policy, limit_bytes, TICK);
        options.engine.threads = u32::try_from(numbers(&all).len()).expect("threads");
        let mut rig =
            Rig::assemble(loaded.model, loaded.map, options, &mut |_, _| {}).expect("rig");
        // On one processor threads that wait for each other take a time slice at each node.
        let stock = [10, 3].map(|count| forced_hash(&mut rig.session, &tokens[..count]));
        assert!(held_on(first) > 0, "{policy}: each has its own");
        let mut elsewhere = CpuSet::new();
        elsewhere.set(last).expect("processor");
        sched_setaffinity(this, &elsewhere).expect("affinity");
        let moved = forced_hash(&mut rig.session, &tokens[..3]);
        let stays = sched_getaffinity(this).expect("affinity");
        let left = held_on(first);
        sched_setaffinity(this, &all).expect("affinity");
        assert_eq!(stays, elsewhere, "{policy}: it stays where it was put");
        assert_eq!(left, 0, "{policy}: the others follow");
        let back = forced_hash(&mut rig.session, &tokens);
        assert_eq!(sched_getaffinity(this).expect("affinity"), all);
        assert!(held_on(first) > 0, "{policy}: they are placed again");
        assert_eq!([back, moved], stock, "{policy}");
    }
}

#[test]
fn routing_is_sampled_while_everything_is_resident_and_seen_whole_when_it_is_not() {
    let name = "routing_is_sampled_while_everything_is_resident_and_seen_whole_when_it_is_not";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let shape = loaded.map.shape();
    let tokens = loaded.tokens(16);
    let mut rig = loaded.rig(PolicyKind::Fetch, None, NEVER);
    let seen = forced_hash(&mut rig.session, &tokens);
    let mut counts = vec![0; shape.total_experts()];
    let mut routed = |rig: &Rig<'_>| {
        rig.counters.decode_into(&mut counts);
        counts.iter().sum::<u32>()
    };
    assert_eq!(routed(&rig), 16 * shape.routed_per_token());
    let store = rig.store.clone().expect("store");
    store.set_capacity(u64::MAX);
    assert!(!store.is_complete());
    // Wrong guesses may still be read.
    rig.session.rest(&mut || false);
    for id in (0u32..).take(shape.total_experts()).map(ExpertId) {
        store.pin(id).expect("pin");
    }
    assert!(store.is_complete());
    assert_eq!(forced_hash(&mut rig.session, &tokens), seen);
    assert_eq!(
        routed(&rig),
        18 * shape.routed_per_token(),
        "one token in eight"
    );
    assert_eq!(rig.counters.totals().decode_tokens, 32);
    store.unpin(ExpertId(0));
    assert!(!store.is_complete());
    assert_eq!(forced_hash(&mut rig.session, &tokens), seen);
    assert_eq!(routed(&rig), 34 * shape.routed_per_token());
}

#[test]
fn counters_and_recording_tell_the_routing_of_every_token() {
    let name = "counters_and_recording_tell_the_routing_of_every_token";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let shape = loaded.map.shape();
    let folder = tempfile::tempdir().expect("temp dir");
    let path = folder.path().join("trace");
    let mut options = loaded.rig_options(PolicyKind::Adaptive, Some(shape.total_bytes() / 3), TICK);
    options.recorder = Some(Recorder::create(&path, loaded.map).expect("recorder"));
    // A prompt of 33 tokens ends in a micro-batch of one, which is no decoded token for that.
    options.engine.n_ubatch = 16;
    let mut rig = Rig::assemble(loaded.model, loaded.map, options, &mut |_, _| {}).expect("rig");
    let recording = rig.recording.clone().expect("it is recorded");
    recording.prompt("the first");
    let tokens = loaded.tokens(33);
    let experts = shape.total_experts();
    let mut counts = vec![0; experts];
    rig.session.decode(&tokens).expect("prompt");
    rig.counters.decode_into(&mut counts);
    assert_eq!(
        counts.iter().sum::<u32>(),
        0,
        "a prompt is not decoded token by token"
    );
    for (at, token) in tokens[..20].iter().enumerate() {
        if at == 12 {
            recording.prompt("the second");
        }
        rig.session
            .decode(std::slice::from_ref(token))
            .expect("decode");
    }
    rig.counters.decode_into(&mut counts);
    assert_eq!(counts.iter().sum::<u32>(), 20 * shape.routed_per_token());
    for layer in 0..shape.layers() {
        let first = shape.id(layer, 0).index();
        let own = &counts[first..first + shape.experts_in(layer) as usize];
        assert_eq!(
            own.iter().sum::<u32>(),
            20 * shape.top_k_in(layer),
            "layer {layer}"
        );
    }
    let totals = rig.counters.totals();
    assert_eq!((totals.decode_tokens, totals.prefill_tokens), (20, 33));
    let mut prefill = vec![0; experts];
    rig.counters.prefill_into(&mut prefill);
    let seen = u64::from(counts.iter().sum::<u32>() + prefill.iter().sum::<u32>());
    assert_eq!(
        totals.hits + totals.misses,
        seen,
        "each routed expert is a hit or a miss"
    );
    drop(rig);

    let trace = Trace::decode(&std::fs::read(&path).expect("read")).expect("trace");
    assert_eq!(&trace.header.shape, shape);
    assert_eq!(trace.header.dense_bytes, loaded.map.dense_bytes());
    let mut replayed = vec![0; experts];
    let decoded = (0..trace.tokens()).filter(|&token| trace.phase(token) == Phase::Decode);
    let mut decoded_tokens = 0;
    for token in decoded {
        decoded_tokens += 1;
        trace
            .token(token)
            .iter()
            .for_each(|&id| replayed[id as usize] += 1);
    }
    assert_eq!(decoded_tokens, 20);
    assert_eq!(replayed, counts);
    assert_eq!(
        trace.tokens(),
        21,
        "of the prompt, the token that every layer routed"
    );
    assert_eq!(trace.phase(0), Phase::Prefill);
    let prompts = [(0, "the first".to_owned()), (13, "the second".to_owned())];
    assert_eq!(trace.prompts(), prompts);
    // The first tick pins before the first token.
    let (at, first) = trace.ticks().first().expect("a tick");
    assert_eq!(*at, 0);
    assert!(first.decision.capacity_bytes > 0);
    assert!(first.host.is_some());
}

#[test]
fn every_layer_routes_every_token_when_every_row_is_wanted() {
    let name = "every_layer_routes_every_token_when_every_row_is_wanted";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let mut session = Session::new(loaded.model, &engine_options(), true).expect("session");
    session.warm_up().expect("warm-up");
    let sink = Troubled::new(u32::MAX, Trouble::Fail);
    let rows = Arc::clone(&sink.rows);
    session.route_to(Box::new(sink), None);
    session
        .decode_every_row(&loaded.tokens(70))
        .expect("decode");
    let rows = rows.lock().expect("rows");
    assert_eq!(rows.len(), loaded.map.layers().len());
    assert!(rows.iter().all(|&(_, rows)| rows == 70), "{rows:?}");
}

#[derive(Clone, Copy)]
enum Trouble {
    Fail,
    Panic,
}

/// A sink that fails at one block, as often as it is armed.
struct Troubled {
    block: u32,
    trouble: Trouble,
    armed: Arc<AtomicU32>,
    abandoned: Arc<AtomicU32>,
    /// Rows seen of each block.
    rows: Arc<Mutex<Vec<(u32, usize)>>>,
}

impl Troubled {
    fn new(block: u32, trouble: Trouble) -> Self {
        Self {
            block,
            trouble,
            armed: Arc::default(),
            abandoned: Arc::default(),
            rows: Arc::default(),
        }
    }
}

impl RouteSink for Troubled {
    fn routed(&mut self, routed: &Routed<'_>) -> Result<(), String> {
        let mut rows = self.rows.lock().expect("rows");
        match rows.iter_mut().find(|(block, _)| *block == routed.block) {
            Some((_, rows)) => *rows += routed.tokens,
            None => rows.push((routed.block, routed.tokens)),
        }
        drop(rows);
        if routed.block != self.block || self.armed.load(Relaxed) == 0 {
            return Ok(());
        }
        self.armed.fetch_sub(1, Relaxed);
        match self.trouble {
            Trouble::Fail => Err(format!("no bytes for block {}", routed.block)),
            Trouble::Panic => panic!("sink gave way at block {}", routed.block),
        }
    }

    fn decoded(&mut self, _: Pass, _: usize, _: u64, _: u64) {}

    fn abandoned(&mut self) {
        self.abandoned.fetch_add(1, Relaxed);
    }

    fn streams(&self) -> bool {
        true
    }
}

/// A sink that fails at `block` stops that decode and no other.
fn check_trouble(loaded: &Loaded, block: u32, trouble: Trouble, expect: &str) {
    let tokens = loaded.tokens(12);
    let mut session = Session::new(loaded.model, &engine_options(), true).expect("session");
    session.warm_up().expect("warm-up");
    let sink = Troubled::new(block, trouble);
    let (armed, abandoned) = (Arc::clone(&sink.armed), Arc::clone(&sink.abandoned));
    session.route_to(Box::new(sink), None);
    let healthy = forced_hash(&mut session, &tokens[..6]);
    for part in [&tokens[6..7], &tokens[..]] {
        let position = session.position();
        armed.store(1, Relaxed);
        let error = session.decode(part).expect_err("poisoned");
        let EngineError::Poisoned(cause) = &error else {
            panic!("{error}")
        };
        assert!(cause.contains(expect), "{cause}");
        assert_eq!(session.position(), position, "nothing was added");
        assert!(!session.poison().is_set(), "the next decode starts clean");
        assert_eq!(
            forced_hash(&mut session, &tokens[..6]),
            healthy,
            "block {block}"
        );
    }
    assert_eq!(abandoned.load(Relaxed), 2);
}

#[test]
fn a_sink_that_fails_stops_the_decode_with_its_cause() {
    let Some(loaded) = support::loaded("a_sink_that_fails_stops_the_decode_with_its_cause") else {
        return;
    };
    for block in [0, 17, 29] {
        check_trouble(
            &loaded,
            block,
            Trouble::Fail,
            &format!("no bytes for block {block}"),
        );
    }
}

#[test]
fn a_sink_that_panics_stops_the_decode_and_not_the_program() {
    let name = "a_sink_that_panics_stops_the_decode_and_not_the_program";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    check_trouble(
        &loaded,
        11,
        Trouble::Panic,
        "panicked: sink gave way at block 11",
    );
}

#[test]
fn a_governor_whose_first_tick_panics_leaves_a_session_without_control() {
    let name = "a_governor_whose_first_tick_panics_leaves_a_session_without_control";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let before = locked_bytes();
    let mut rig = loaded.rig(PolicyKind::Fetch, None, NEVER);
    let governor = loaded.doomed_governor(&rig, 1);
    let said = governor.status().failed.expect("failed");
    assert!(said.contains("without control"), "{said}");
    assert_eq!(locked_bytes(), before);
    rig.session.decode(&loaded.tokens(1)).expect("decode");
}

#[test]
fn a_governor_that_panics_unlocks_everything_and_the_session_goes_on() {
    let name = "a_governor_that_panics_unlocks_everything_and_the_session_goes_on";
    let Some(loaded) = support::loaded(name) else {
        return;
    };
    let before = locked_bytes();
    let tokens = loaded.tokens(8);
    let mut rig = loaded.rig(PolicyKind::Fetch, None, NEVER);
    let healthy = forced_hash(&mut rig.session, &tokens);
    let store = rig.store.clone().expect("store");
    let dense = locked_bytes();
    let governor = loaded.doomed_governor(&rig, 4);
    assert!(
        locked_bytes() >= dense + 40 * loaded.expert_bytes(),
        "the first decision is carried out"
    );
    support::wait_until("the governor to fail", || {
        governor.status().failed.is_some()
    });
    let status = governor.status();
    let said = status.failed.expect("failed");
    assert!(
        said.contains("panicked") && said.contains("unlocked"),
        "{said}"
    );
    assert_eq!(
        locked_bytes(),
        before,
        "everything is unlocked, dense weights too"
    );
    assert_eq!(store.held().pinned_bytes, 0);
    assert_eq!(forced_hash(&mut rig.session, &tokens), healthy);
    drop(governor);
    drop(store);
    drop(rig);
    assert_eq!(locked_bytes(), before);
}
