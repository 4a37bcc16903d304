//! Guards of the control laws, each switched off: the bar that holds with it must break without it.
//! Else the guard, or the bar, is worth nothing.

use hotpin_controllers::{AdaptiveConfig, PolicyKind};
use hotpin_sim::plant::{Report, Scenario, Schedule, Sensor};
use hotpin_sim::scenarios::{DRIFT_TOKEN, HOG_S, Named};

const SEEDS: [u64; 3] = [1, 2, 3];
const MIB: f64 = 1_048_576.0;

fn run(scenario: &Scenario) -> Report {
    scenario.run_kind(PolicyKind::Adaptive).unwrap()
}

/// A figure with and without a guard, for each seed.
fn compare(
    named: Named,
    change: impl Fn(&mut Scenario),
    off: impl Fn(&mut AdaptiveConfig),
    figure: impl Fn(&Report) -> f64,
) -> Vec<(f64, f64)> {
    SEEDS
        .into_iter()
        .map(|seed| {
            let mut scenario = named.scenario(seed);
            change(&mut scenario);
            let with = figure(&run(&scenario));
            off(&mut scenario.config);
            let without = figure(&run(&scenario));
            eprintln!(
                "{}, seed {seed}: {with:.4} with, {without:.4} without",
                named.label()
            );
            (with, without)
        })
        .collect()
}

/// Every seed keeps within `bar` with the guard, and none without.
fn must_matter(pairs: &[(f64, f64)], bar: f64) {
    for &(with, without) in pairs {
        assert!(with <= bar, "{with} breaks the bar of {bar} with the guard");
        assert!(without > bar, "{without} keeps the bar of {bar} without it");
    }
}

fn locked_mib_a_token(report: &Report, from_s: f64) -> f64 {
    let sums = report
        .between(from_s, f64::INFINITY)
        .fold((0, 0), |sums, tick| {
            (sums.0 + tick.locked_bytes, sums.1 + tick.tokens)
        });
    sums.0 as f64 / MIB / sums.1.max(1) as f64
}

/// Seconds after `from_s` in which capacity is below 95% of what the machine permits.
fn away_s(report: &Report, from_s: f64) -> f64 {
    let away = report
        .between(from_s, f64::INFINITY)
        .filter(|tick| (tick.capacity_bytes as f64) < 0.95 * tick.true_ceiling_bytes as f64);
    away.count() as f64 * 0.1
}

/// `stale_missed`: without it, every pause of an expert ends its pin.
#[test]
fn patience_with_idle_experts_keeps_churn_down() {
    let pairs = compare(
        Named::SteadyDraws,
        |_| {},
        |config| config.targeting.stale_missed = 0.0,
        |report| locked_mib_a_token(report, 60.0),
    );
    must_matter(&pairs, 2.0);
}

/// The skew gate: without it, the noise of a uniform router is pinned.
#[test]
fn the_skew_gate_keeps_noise_unpinned() {
    let pairs = compare(
        Named::UniformRouter,
        |_| {},
        |config| {
            config.pins.gate_on_z = 1e-6;
            config.pins.gate_off_z = 0.0;
            config.pins.gate_min_variation = 0.0;
        },
        |report| {
            let late: Vec<_> = report.between(30.0, 120.0).collect();
            let pinned: u64 = late.iter().map(|tick| tick.pinned_bytes).sum();
            pinned as f64 / late.len() as f64 / MIB
        },
    );
    must_matter(&pairs, 0.0);
}

/// Drift detection: without it, the pins of the topic that is over outlive it.
#[test]
fn drift_detection_shortens_the_way_back() {
    let pairs = compare(
        Named::DriftAtOnce,
        |_| {},
        |config| config.drift.enabled = false,
        |report| {
            let mut tokens = 0;
            // Misses of the first 40 tokens after the change, in experts a token.
            let after = report.ticks.iter().filter(|tick| {
                tokens += tick.tokens;
                (DRIFT_TOKEN..DRIFT_TOKEN + 120).contains(&tokens)
            });
            let sums = after.fold((0, 0), |sums, tick| {
                (sums.0 + tick.accesses - tick.hits, sums.1 + tick.tokens)
            });
            sums.0 as f64 / sums.1 as f64
        },
    );
    for (with, without) in pairs {
        assert!(
            with < without,
            "{with} misses a token with it, {without} without"
        );
    }
}

/// Confirmation of stall: without it, the engine's own refaults hold capacity down for ever.
#[test]
fn confirmation_keeps_own_refaults_from_shrinking() {
    let pairs = compare(
        Named::RefaultHog,
        |_| {},
        |config| {
            config.pressure.low_headroom_fraction = 1.0;
            config.pressure.confirm_reclaim_bytes_per_s = 1;
        },
        |report| away_s(report, HOG_S.1 + 50.0),
    );
    must_matter(&pairs, 1.0);
}

/// The quiet hold and the slow rise: without them, capacity follows every edge of a busy machine.
#[test]
fn the_quiet_hold_stops_a_dance() {
    let busy = |scenario: &mut Scenario| {
        // 300 MiB come and go, a second each way.
        let low = 1280 << 20;
        let pulses: Vec<(f64, f64)> = (10..50)
            .map(|n| (f64::from(n) * 2.0, f64::from(n) * 2.0 + 1.0))
            .collect();
        scenario.others = Schedule::pulses(low, low + (300 << 20), &pulses);
    };
    let pairs = compare(
        Named::SteadyDraws,
        busy,
        |config| {
            config.capacity.quiet_hold_s = 0.1;
            config.capacity.rise_filter_s = 0.05;
        },
        |report| report.reversals as f64,
    );
    // The claims turn 80 times.
    must_matter(&pairs, 40.0);
}

/// The weight of prefill: with a full one, a prompt of another kind throws the pins out.
#[test]
fn a_prompt_does_not_count_like_decoding() {
    let prompts = |scenario: &mut Scenario| {
        scenario.disturbances.prefills = (0..8).map(|n| (60.0 + 5.0 * f64::from(n), 256)).collect();
    };
    let pairs = compare(
        Named::SteadyDraws,
        prompts,
        |config| {
            config.scores.prefill_weight = 1.0;
            config.scores.prefill_cap = 100.0;
        },
        |report| locked_mib_a_token(report, 60.0),
    );
    for (with, without) in pairs {
        assert!(with <= without, "{with} with, {without} without");
    }
}

/// Waiting after failed locks: without it, every tick tries what has just failed.
#[test]
fn failed_locks_are_not_tried_every_tick() {
    let pairs = compare(
        Named::DriftAtOnce,
        |scenario| scenario.disturbances.failed_locks = vec![(20.0, 110.0)],
        |config| {
            config.pins.lock_retry_s = 0.1;
            config.pins.lock_retry_max_s = 0.1;
        },
        |report| {
            let failing = report.between(20.0, 110.0);
            failing.filter(|tick| tick.locked_bytes > 0).count() as f64
        },
    );
    // Of 900 ticks.
    must_matter(&pairs, 50.0);
}

/// The churn limit: without it, re-targeting takes the disk that misses need when it is slow.
#[test]
fn the_churn_limit_spares_a_slow_disk() {
    let pairs = compare(
        Named::DriftAtOnce,
        |scenario| scenario.disturbances.slow_disk = vec![(0.0, 1e9, 0.1)],
        |config| {
            config.targeting.churn_bytes_per_s = 64 << 30;
            config.targeting.churn_burst_bytes = 64 << 30;
            config.targeting.payback_tokens = 1e6;
            config.targeting.max_fills_per_tick = 4096;
            config.targeting.max_swaps_per_tick = 4096;
            config.targeting.margin = 0.0;
            config.targeting.absent_margin = 0.0;
        },
        |report| -report.tok_s,
    );
    for (with, without) in pairs {
        assert!(
            with <= without,
            "{} tok/s with, {} without",
            -with,
            -without
        );
    }
}

/// Giving up ahead: without it a ramp takes of the reserve for as long as it goes on.
#[test]
fn what_is_given_up_ahead_keeps_the_reserve_of_a_ramp() {
    const RAMP_BYTES_PER_S: f64 = 2e9;
    let pairs = compare(
        Named::RampHog,
        |scenario| {
            let (quiet, hog) = (scenario.others.at(0.0), scenario.others.at(HOG_S.1 - 1.0));
            let full_s = HOG_S.0 + (hog - quiet) as f64 / RAMP_BYTES_PER_S;
            let points = vec![(HOG_S.0, quiet), (full_s, hog)];
            scenario.others = Schedule::new(points);
        },
        |config| config.capacity.demand_lead_s = 0.0,
        |report| {
            let ticks = report.between(HOG_S.0, HOG_S.1);
            let short = ticks.filter(|tick| tick.capacity_before_bytes > tick.true_ceiling_bytes);
            short.count() as f64
        },
    );
    must_matter(&pairs, 4.0);
}

/// A sensor that goes missing restarts the hold; the loop neither grows blindly nor forgets its pins.
#[test]
fn dropouts_move_nothing() {
    for sensor in [Sensor::Host, Sensor::Pressure, Sensor::Engine] {
        for seed in SEEDS {
            let mut scenario = Named::SteadyDraws.scenario(seed);
            scenario.disturbances.dropouts = vec![(sensor, 40.0, 60.0)];
            let report = run(&scenario);
            let ceiling = report.between(70.0, 120.0);
            for tick in ceiling {
                assert!(tick.capacity_bytes <= tick.true_ceiling_bytes, "{sensor:?}");
                assert!(tick.pinned_bytes > 0, "{sensor:?}, seed {seed}");
            }
            assert!(
                report.hit_ratio_between(80.0, 120.0)
                    >= report.hit_ratio_between(20.0, 40.0) - 0.02,
                "{sensor:?}, seed {seed}"
            );
        }
    }
}

/// Half a second of delay costs as many ticks and starts no cycle. What grows meanwhile is counted
/// twice, in what is available and in what is held, and comes out of the reserve.
#[test]
fn a_delay_of_five_ticks_starts_no_cycle() {
    for seed in SEEDS {
        let mut scenario = Named::StepHog.scenario(seed);
        scenario.disturbances.delay_ticks = 5;
        let report = run(&scenario);
        let excess_mib = |from_s, to_s| {
            let ticks = report.between(from_s, to_s);
            let excess =
                ticks.map(|tick| tick.capacity_bytes.saturating_sub(tick.true_ceiling_bytes));
            excess.max().unwrap_or(0) >> 20
        };
        let (during, after) = (
            excess_mib(HOG_S.0 + 0.8, HOG_S.1),
            excess_mib(HOG_S.1, 120.0),
        );
        assert!(
            during <= 64,
            "seed {seed}: {during} MiB more than the hog leaves"
        );
        assert!(after <= 256, "seed {seed}: {after} MiB of the reserve");
        assert_eq!(report.max_shortage_bytes, 0);
        assert!(report.reversals <= 4, "{} reversals", report.reversals);
    }
}

/// A disk at a tenth of its speed for 20 s: calm, and back to the old speed.
#[test]
fn a_slow_disk_is_sat_out() {
    for seed in SEEDS {
        let mut scenario = Named::SteadyDraws.scenario(seed);
        scenario.disturbances.slow_disk = vec![(40.0, 60.0, 0.1)];
        let report = run(&scenario);
        let speed = |from_s, to_s| {
            let tokens: u64 = report.between(from_s, to_s).map(|tick| tick.tokens).sum();
            tokens as f64 / (to_s - from_s)
        };
        assert!(speed(80.0, 120.0) >= 0.95 * speed(20.0, 40.0));
        assert_eq!(report.reversals, 0, "memory has nothing to do with it");
    }
}

/// Slow drift: 12 topics, each for 100 tokens; returning to the first at the end finds it quickly.
#[test]
fn slow_drift_and_a_return_are_followed() {
    for seed in SEEDS {
        let mut scenario = Named::DriftAtOnce.scenario(seed);
        if let hotpin_sim::plant::Routing::Synthetic(synthetic) = &mut scenario.routing {
            synthetic.domains = (0..12).map(|n| (n * 150, 1 + n % 4)).collect();
        }
        let regulated = run(&scenario);
        let mut policy = hotpin_controllers::build(
            PolicyKind::Static,
            &scenario.shape,
            &scenario.config,
            scenario.profile.as_deref(),
        )
        .unwrap();
        let fixed = scenario.run(policy.as_mut()).unwrap();
        assert!(
            regulated.tok_s > 1.1 * fixed.tok_s,
            "{} against {}",
            regulated.tok_s,
            fixed.tok_s
        );
        assert!(regulated.reversals == 0);
    }
}
