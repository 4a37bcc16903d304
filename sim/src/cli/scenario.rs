//! `hotpin-sim scenario`.

use super::recorded::{self, RecordedArgs};
use super::signals::{self, Panel};
use anyhow::{Context, Result};
use clap::Args;
use hotpin_controllers::PolicyKind;
use hotpin_sim::plant::{Report, TickRecord};
use hotpin_sim::scenarios::Named;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

const MIB: f64 = 1_048_576.0;

/// Lines that the table shows at most.
const TABLE_LINES: usize = 40;

#[derive(Debug, Args)]
pub struct ScenarioArgs {
    /// A scripted disturbance (any other word lists them), or `recorded`: a recorded session on a
    /// calibrated machine.
    #[arg(value_name = "NAME")]
    name: Which,
    /// Policy: off, fetch, static, lru or adaptive [default: adaptive; of `recorded` all].
    #[arg(long, value_name = "NAME")]
    policy: Option<PolicyKind>,
    /// Seed of the routing.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    recorded: RecordedArgs,
    /// Draw every signal over time, as SVG; of `recorded` under --policy.
    #[arg(long, value_name = "OUT.svg")]
    chart: Option<PathBuf>,
    /// Print JSON, with every tick.
    #[arg(long)]
    json: bool,
}

/// What is to run.
#[derive(Clone, Copy, Debug)]
enum Which {
    Scripted(Named),
    Recorded,
}

impl std::str::FromStr for Which {
    type Err = hotpin_sim::scenarios::UnknownScenario;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "recorded" {
            return Ok(Self::Recorded);
        }
        text.parse().map(Self::Scripted)
    }
}

pub fn run(args: &ScenarioArgs) -> Result<()> {
    let named = match args.name {
        Which::Scripted(named) => named,
        Which::Recorded => {
            if let Some(path) = &args.chart {
                let kind = args.policy.unwrap_or_default();
                chart(path, &args.recorded.report(kind)?)?;
            }
            return recorded::run(&args.recorded, args.policy, args.json);
        }
    };
    let kind = args.policy.unwrap_or_default();
    let report = named.scenario(args.seed).run_kind(kind)?;
    if let Some(path) = &args.chart {
        chart(path, &report)?;
    }
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
        return Ok(());
    }
    table(&mut out, &report)?;
    summary(&mut out, &report)
}

/// Every signal of a run. Rates are over the tick before.
fn chart(path: &Path, report: &Report) -> Result<()> {
    let ticks = &report.ticks;
    let at_s: Vec<f64> = ticks.iter().map(|tick| tick.at_s).collect();
    let of = |value: fn(&TickRecord) -> f64| ticks.iter().map(value).collect::<Vec<f64>>();
    let rate = |amount: fn(&TickRecord) -> f64| -> Vec<f64> {
        let amounts = ticks
            .windows(2)
            .map(|two| amount(&two[1]) / (two[1].at_s - two[0].at_s));
        std::iter::once(f64::NAN).chain(amounts).collect()
    };
    let panels = [
        Panel {
            title: "memory, MiB",
            lines: vec![
                (
                    "claimed by others",
                    of(|tick| tick.others_bytes as f64 / MIB),
                ),
                (
                    "the machine permits",
                    of(|tick| tick.true_ceiling_bytes as f64 / MIB),
                ),
                ("capacity", of(|tick| tick.capacity_bytes as f64 / MIB)),
                ("shortage", of(|tick| tick.shortage_bytes as f64 / MIB)),
            ],
        },
        Panel {
            title: "experts, MiB",
            lines: vec![
                ("held", of(|tick| tick.held_before_bytes as f64 / MIB)),
                ("pin budget", of(|tick| tick.pin_budget_bytes as f64 / MIB)),
                ("pinned", of(|tick| tick.pinned_bytes as f64 / MIB)),
                ("transit", of(|tick| tick.transit_bytes as f64 / MIB)),
            ],
        },
        Panel {
            title: "locked and unlocked, MiB/s",
            lines: vec![
                ("locked", rate(|tick| tick.locked_bytes as f64 / MIB)),
                ("unlocked", rate(|tick| tick.unlocked_bytes as f64 / MIB)),
            ],
        },
        Panel {
            title: "tokens a second",
            lines: vec![("tokens", rate(|tick| tick.tokens as f64))],
        },
        Panel {
            title: "shares",
            lines: vec![
                ("hits", of(|tick| tick.hits as f64 / tick.accesses as f64)),
                ("waiting for experts", rate(|tick| tick.stall_s)),
                ("pressure (PSI some)", rate(|tick| tick.pressure_s)),
                ("drift found", of(|tick| f64::from(u8::from(tick.drift)))),
            ],
        },
        Panel {
            title: "major faults a second",
            lines: vec![("faults", rate(|tick| tick.major_faults as f64))],
        },
    ];
    signals::write(path, &at_s, &panels).with_context(|| format!("writing {}", path.display()))
}

fn table(out: &mut impl Write, report: &Report) -> Result<()> {
    writeln!(
        out,
        "{:>7} {:>8} {:>8} {:>8} {:>8} {:>8}  {:<10} {:>7} {:>6} {:>6}",
        "s",
        "others",
        "ceiling",
        "capacity",
        "pinned",
        "transit",
        "binding",
        "tok/s",
        "hits",
        "stall"
    )?;
    let step = report.ticks.len().div_ceil(TABLE_LINES).max(1);
    for window in report.ticks.chunks(step) {
        row(out, window)?;
    }
    writeln!(
        out,
        "(MiB; hits and stall are shares, over the ticks up to the next line)\n"
    )?;
    Ok(())
}

/// Levels of the window's first tick, rates over all of it.
fn row(out: &mut impl Write, window: &[TickRecord]) -> Result<()> {
    let (Some(first), Some(last)) = (window.first(), window.last()) else {
        return Ok(());
    };
    let sum = |amount: fn(&TickRecord) -> f64| window.iter().map(amount).sum::<f64>();
    let spacing_s = (last.at_s - first.at_s) / (window.len().max(2) - 1) as f64;
    let elapsed_s = spacing_s * window.len() as f64;
    let mib = |bytes: u64| bytes as f64 / MIB;
    writeln!(
        out,
        "{:>7.1} {:>8.0} {:>8.0} {:>8.0} {:>8.0} {:>8.0}  {:<10} {:>7.2} {:>6.3} {:>6.3}",
        first.at_s,
        mib(first.others_bytes),
        mib(first.true_ceiling_bytes),
        mib(first.capacity_bytes),
        mib(first.pinned_bytes),
        mib(first.transit_bytes),
        first.binding.map_or("-", |ceiling| ceiling.label()),
        sum(|tick| tick.tokens as f64) / elapsed_s,
        sum(|tick| tick.hits as f64) / sum(|tick| tick.accesses as f64),
        sum(|tick| tick.stall_s) / elapsed_s,
    )?;
    Ok(())
}

fn summary(out: &mut impl Write, report: &Report) -> Result<()> {
    let mib = |bytes: u64| bytes as f64 / MIB;
    writeln!(
        out,
        "{} under {}, seed {}: {} tokens, {:.2} tok/s, hit ratio {:.4}",
        report.scenario, report.policy, report.seed, report.tokens, report.tok_s, report.hit_ratio
    )?;
    writeln!(
        out,
        "capacity above what the machine permits: at most {:.0} MiB, lagging by at most {} ticks \
         (what is held: {}); shortage at most {:.0} MiB",
        mib(report.max_overshoot_bytes),
        report.overshoot_ticks,
        report.held_overshoot_ticks,
        mib(report.max_shortage_bytes)
    )?;
    writeln!(
        out,
        "{} reversals, {:.0} MiB locked after the start, {:.0} MiB fetched, {} major faults, {} \
         ticks skipped",
        report.reversals,
        mib(report.bytes_churned),
        mib(report.bytes_fetched),
        report.major_faults,
        report.skipped_ticks
    )?;
    Ok(())
}
