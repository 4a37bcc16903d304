//! `hotpin-sim sweep`.

use super::recorded::RecordedArgs;
use super::replay::read;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hotpin_controllers::AdaptiveConfig;
use hotpin_controllers::trace::Trace;
use hotpin_sim::replay::Part;
use hotpin_sim::sweep::{self, Case, KNOBS, Knob, Trial, Turn};
use std::io::{self, Write};

/// A session of the demo model whose topic changes every 45 tokens.
const DEMO: &[u8] = include_bytes!("../../traces/demo-64x4.trace");

#[derive(Debug, Args)]
pub struct SweepArgs {
    /// Options to turn, in this order [default: all that there are].
    #[arg(long, value_name = "KEYS", value_delimiter = ',')]
    knobs: Vec<String>,
    /// Seeds of each scripted scenario; 0 leaves them out. As many others are held out.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(0..=100))]
    seeds: u64,
    /// Tokens of each trace that comes with the program, from even prompts; 0 leaves them out. As many of
    /// odd ones are held out.
    #[arg(long, value_name = "N", default_value_t = 1200, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    shipped_tokens: u32,
    /// Choose without held-out cases, in half the time.
    #[arg(long)]
    unconfirmed: bool,
    /// Threads [default: the processors that there are].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    recorded: RecordedArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &SweepArgs) -> Result<()> {
    let knobs = knobs(&args.knobs)?;
    let mut cases = sweep::scripted(1..=args.seeds);
    let mut held_out = sweep::scripted(args.seeds + 1..=2 * args.seeds);
    if args.shipped_tokens > 0 {
        let (large, _) = read(None)?;
        let demo = Trace::decode(DEMO).context("the trace of the demo model")?;
        let tokens = args.shipped_tokens as usize;
        for trace in [&large, &demo] {
            cases.extend(sweep::recorded(trace, Part::Even, tokens)?);
            held_out.extend(sweep::recorded(trace, Part::Odd, tokens)?);
        }
    }
    if args.unconfirmed {
        held_out.clear();
    }
    if let Some(scenario) = args.recorded.scenario()? {
        let most_reversals = usize::MAX;
        cases.push(Case {
            scenario,
            most_reversals,
        });
    }
    ensure!(
        !cases.is_empty(),
        "nothing to judge by: give --seeds or a recorded session"
    );
    let threads = args.threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, usize::from),
        usize::from,
    );
    let mut out = io::stdout().lock();
    let json = args.json;
    let mut failed = None;
    let start = AdaptiveConfig::default();
    let (_, turns) = sweep::sweep(&knobs, &cases, &held_out, &start, threads, &mut |turn| {
        if !json && let Err(error) = table(&mut out, turn) {
            failed.get_or_insert(error);
        }
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    if json {
        serde_json::to_writer_pretty(&mut out, &turns)?;
        writeln!(out)?;
    }
    Ok(())
}

fn knobs(names: &[String]) -> Result<Vec<Knob>> {
    if names.is_empty() {
        return Ok(KNOBS.to_vec());
    }
    let mut found = Vec::new();
    for name in names {
        match KNOBS.iter().find(|knob| knob.name == name) {
            Some(knob) => found.push(*knob),
            None => bail!(
                "no option is called {name:?} here; there are {}",
                KNOBS.map(|knob| knob.name).join(", ")
            ),
        }
    }
    Ok(found)
}

fn table(out: &mut impl Write, turn: &Turn) -> io::Result<()> {
    writeln!(out, "{}: {} -> {}", turn.name, turn.before, turn.chosen)?;
    for trial in &turn.trials {
        line(out, "", trial)?;
    }
    for trial in turn.held_out.iter().flatten() {
        line(out, "held out: ", trial)?;
    }
    out.flush()
}

fn line(out: &mut impl Write, label: &str, trial: &Trial) -> io::Result<()> {
    writeln!(
        out,
        "  {label}{:>8}  worst regret {:>6.2}% ({}), mean {:>6.2}%{}",
        trial.value,
        trial.worst_regret * 100.0,
        trial.worst_case,
        trial.mean_regret * 100.0,
        trial
            .broken
            .as_ref()
            .map_or_else(String::new, |broken| format!("; breaks {broken}"))
    )
}
