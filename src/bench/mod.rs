//! `hotpin bench`: policies side by side on one model, each run a process of its own.
//!
//! This is the parent's half: it plans, evicts, limits, starts, times, compares and reports. The
//! child's half runs the engine; [`protocol`] is what they share.
#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::path::{Path, PathBuf};

pub mod args;
pub mod calibrate;
pub mod cgroup;
pub mod chart;
pub mod child;
mod hierarchy;
pub mod measure;
pub mod perplexity;
pub mod plan;
pub mod progress;
pub mod protocol;
pub mod ratios;
pub mod report;
pub mod residency;
pub mod roofline;
pub mod session;
pub mod shaken;
pub mod stats;
pub mod table;
mod tail;
pub mod target;
pub mod tier;
pub mod verdict;

pub use args::BenchArgs;
pub use child::ChildCommand;

use plan::Plan;
use progress::Progress;
use report::{Failure, Report};
use session::{RunError, Sample, Session};

/// What the bench takes from the rest of the program.
pub struct Hooks<'a> {
    /// The program that runs a child.
    pub child: ChildCommand,
    /// `/`; tests give a directory with a fake `proc` and `sys`.
    pub system_root: PathBuf,
    /// All files of a model, given the first; the error is for the user.
    pub shards: &'a dyn Fn(&Path) -> Result<Vec<PathBuf>, String>,
    /// Built-in texts: name and text.
    pub demo_workload: &'a [(&'a str, &'a str)],
    /// `read_ahead_kb` of the block device under a file.
    pub read_ahead_kb: &'a dyn Fn(&Path) -> Option<u64>,
    /// Engine settings that the children get unread.
    pub engine: serde_json::Value,
}

impl std::fmt::Debug for Hooks<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hooks")
            .field("child", &self.child)
            .finish_non_exhaustive()
    }
}

/// Why a bench gave no report.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Arguments that cannot be meant.
    #[error("{0}")]
    Usage(String),
    /// The model's files cannot be found.
    #[error("{0}")]
    Model(String),
    /// A file or directory cannot be used.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The workload cannot be used.
    #[error(transparent)]
    Workload(#[from] plan::WorkloadError),
    /// A limit was asked for and cannot be set.
    #[error("cannot limit the runs' memory: {0}. Run as root, or pass --no-cgroup to go without")]
    NoLimit(#[source] cgroup::CgroupError),
    /// A run cannot start cold.
    #[error(transparent)]
    NotCold(#[from] residency::ResidencyError),
    /// No signal handlers, so no orderly end.
    #[error("cannot listen for signals: {0}")]
    Signals(#[source] io::Error),
    /// Told to stop.
    #[error("stopped by {0}; cgroups are removed and children ended")]
    Interrupted(&'static str),
    /// No run of any policy gave figures.
    #[error("no run gave figures:\n{0}")]
    NoFigures(String),
    /// The chart cannot be drawn.
    #[error(transparent)]
    Chart(#[from] chart::ChartError),
}

impl BenchError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io {
            path: path.to_path_buf(),
            source,
        }
    }

    /// Exit code: 2 for wrong arguments, 1 for all else.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Workload(plan::WorkloadError::UnknownDomain { .. }) => 2,
            _ => 1,
        }
    }
}

/// Runs the whole verb and writes its reports. The exit code: 0 when every run gave figures and all
/// hashes are equal, else 1.
///
/// # Errors
/// [`BenchError`], with its own exit code, when there is nothing to report.
pub fn run_bench(args: &BenchArgs, hooks: &Hooks<'_>) -> Result<u8, BenchError> {
    let (plan, _texts) = args::resolve(args, hooks)?;
    if let Some(out) = &args.calibrate {
        let document = calibrate::calibrate(&plan, hooks, out)?;
        let stdout_path = Path::new("standard output");
        return match write!(io::stdout(), "{document}") {
            Ok(()) => Ok(0),
            Err(source) => Err(BenchError::io(stdout_path, source)),
        };
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(BenchError::Signals)?;
    runtime.block_on(async {
        match args.target_tok_s {
            Some(target_tok_s) => {
                let report = target::search(&plan, hooks, target_tok_s).await?;
                let text = table::target_text(&report);
                emit(args.json.as_deref(), &report, &text)?;
                Ok(u8::from(!report.is_clean()))
            }
            None => {
                let report = compare(&plan, hooks).await?;
                let mut text = table::report_text(&report);
                // The figures come first: a chart that cannot be drawn must not lose them.
                let drawn = args.chart.as_deref().map(|path| chart::draw(&report, path));
                if let (Some(path), Some(Ok(()))) = (&args.chart, &drawn) {
                    text.push_str(&format!("\nChart: {}\n", path.display()));
                }
                emit(args.json.as_deref(), &report, &text)?;
                drawn.transpose()?;
                Ok(u8::from(!report.is_clean()))
            }
        }
    })
}

/// Runs the schedule. A policy that fails is left out from then on and the others go on; whatever
/// stops all of them ends the schedule early, and what was measured is still reported.
///
/// # Errors
/// [`BenchError`] when no run gave figures.
pub async fn compare(plan: &Plan, hooks: &Hooks<'_>) -> Result<Report, BenchError> {
    let mut session = Session::open(plan, hooks)?;
    let slots = plan::schedule(plan.policies.len(), plan.repeats);
    let mut progress = Progress::new(slots.len() as u64, plan.verbose);
    for note in session.notes() {
        progress.say(note);
    }
    let mut samples: Vec<Sample> = Vec::new();
    let mut failures: Vec<Failure> = Vec::new();
    for slot in slots {
        let policy = &plan.policies[slot.policy];
        let repeat = slot.repeat + 1;
        progress.start(format!("{policy} #{repeat}"));
        if failures.iter().any(|failure| &failure.policy == policy) {
            progress.end("left out, it failed before");
            continue;
        }
        match session
            .run(policy, repeat, plan.memory_bytes, &mut progress)
            .await
        {
            Ok(sample) => {
                progress.end(&format!("{:.2} tok/s", sample.total_tok_s));
                samples.push(sample);
            }
            Err(RunError::Failed(failure)) => {
                progress.end(&format!("FAILED: {failure}"));
                failures.push(Failure::of(policy, repeat, &failure));
            }
            Err(RunError::Stop(error)) if samples.is_empty() => return Err(error),
            Err(RunError::Stop(error)) => {
                progress.end(&format!("STOPPED: {error}"));
                failures.push(Failure::stop(policy, repeat, &error));
                break;
            }
        }
    }
    drop(progress);
    if samples.is_empty() {
        let lines: Vec<String> = failures.iter().map(ToString::to_string).collect();
        return Err(BenchError::NoFigures(lines.join("\n")));
    }
    let read_ahead_kb = (hooks.read_ahead_kb)(&plan.model);
    Ok(Report::build(
        plan,
        session.is_limited(),
        read_ahead_kb,
        samples,
        failures,
        session.notes(),
    ))
}

/// With `--json` alone stdout carries JSON and nothing else; the tables then go to stderr.
fn emit(json: Option<&Path>, report: &impl serde::Serialize, text: &str) -> Result<(), BenchError> {
    let stdout_path = Path::new("standard output");
    let mut stdout = io::stdout().lock();
    let Some(path) = json else {
        return write!(stdout, "{text}").map_err(|source| BenchError::io(stdout_path, source));
    };
    let mut document =
        serde_json::to_string_pretty(report).map_err(|error| BenchError::io(path, error.into()))?;
    document.push('\n');
    if path == Path::new("-") {
        write!(io::stderr(), "{text}").ok();
        return write!(stdout, "{document}").map_err(|e| BenchError::io(stdout_path, e));
    }
    crate::files::write_whole(path, &document).map_err(|source| BenchError::io(path, source))?;
    write!(stdout, "{text}").map_err(|source| BenchError::io(stdout_path, source))
}
