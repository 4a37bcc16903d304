//! `hotpin bench`'s arguments, and their one way into a checked [`Plan`].

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;
use tempfile::TempDir;

use super::plan::{POLICIES, Plan, read_prompts, read_workload, write_workload};
use super::protocol::Task;
use super::{BenchError, Hooks};
use crate::config::args::{EngineArgs, RegulationArgs};
use crate::size::parse_size;

/// Memory up to which `--target-tok-s` searches when `--memory` gives no bound, in percent of the
/// model: all of it, and room for everything that is not the model.
const TARGET_UPPER_PERCENT: u64 = 130;

/// What a bench measures on its texts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum BenchTask {
    /// Tokens one by one.
    #[default]
    Decode,
    /// Perplexity.
    Perplexity,
}

/// Compares policies on one model, each run a process of its own, in turns.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// GGUF model; of a split one, the first shard
    #[arg(value_name = "MODEL", env = "HOTPIN_MODEL")]
    pub model: PathBuf,

    /// Directory of texts, NAME.txt for each domain [default: built-in texts]
    #[arg(long, value_name = "DIR", env = "HOTPIN_WORKLOAD")]
    pub workload: Option<PathBuf>,

    /// Domains to decode, in this order [default: all, alphabetically]
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        env = "HOTPIN_DOMAINS"
    )]
    pub domains: Vec<String>,

    /// Generate freely from each line of this file instead of decoding texts
    #[arg(
        long,
        value_name = "FILE",
        env = "HOTPIN_PROMPTS",
        conflicts_with_all = ["workload", "domains"]
    )]
    pub prompts: Option<PathBuf>,

    /// What to measure: tokens decoded one by one, or the perplexity of the texts in chunks of the
    /// context (-c, 512 tokens where it is not given)
    #[arg(
        long,
        value_enum,
        default_value_t,
        env = "HOTPIN_TASK",
        conflicts_with = "prompts"
    )]
    pub task: BenchTask,

    /// Chunks of each text for --task perplexity [default: all]
    #[arg(
        long,
        value_parser = clap::value_parser!(u32).range(1..),
        env = "HOTPIN_CHUNKS",
        conflicts_with_all = ["prompts", "target_tok_s"]
    )]
    pub chunks: Option<u32>,

    /// Tokens to decode in each domain, or from each prompt
    #[arg(
        long,
        default_value_t = 150,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000),
        env = "HOTPIN_TOKENS"
    )]
    pub tokens: u32,

    /// Tokens to decode before those in each domain, hashed and not timed
    #[arg(
        long,
        default_value_t = 0,
        conflicts_with = "prompts",
        env = "HOTPIN_WARMUP_TOKENS"
    )]
    pub warmup_tokens: u32,

    /// Limit of each run, in a cgroup of its own: 2500MB, 2GiB, or 45% of the model [default: none]
    #[arg(long, value_name = "SIZE", env = "HOTPIN_MEMORY")]
    pub memory: Option<String>,

    /// Policies to compare
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "off,fetch,static,adaptive",
        value_parser = PossibleValuesParser::new(POLICIES),
        env = "HOTPIN_POLICIES"
    )]
    pub policies: Vec<String>,

    /// Runs of each policy, interleaved with the others'
    #[arg(
        long,
        default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(1..=1_000),
        env = "HOTPIN_REPEATS"
    )]
    pub repeats: u32,

    /// Print JSON instead of tables, or write it to OUT beside them
    #[arg(
        long,
        value_name = "OUT",
        num_args = 0..=1,
        default_missing_value = "-",
        env = "HOTPIN_BENCH_JSON"
    )]
    pub json: Option<PathBuf>,

    /// Draw tokens a second as an SVG chart
    #[arg(long, value_name = "OUT.svg", env = "HOTPIN_CHART")]
    pub chart: Option<PathBuf>,

    /// Find the least memory at which --policy decodes this many tokens a second; --memory is then
    /// the most to try
    #[arg(long, value_name = "X", env = "HOTPIN_TARGET_TOK_S", conflicts_with_all = ["chart", "warm"])]
    pub target_tok_s: Option<f64>,

    /// Policies to find the least memory for
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        requires = "target_tok_s",
        value_parser = PossibleValuesParser::new(POLICIES),
        env = "HOTPIN_TARGET_POLICY"
    )]
    pub policy: Vec<String>,

    /// Write a trace of each run into this directory
    #[arg(long, value_name = "DIR", env = "HOTPIN_RECORD")]
    pub record: Option<PathBuf>,

    /// Write each run's journal of decisions into this directory
    #[arg(long, value_name = "DIR", env = "HOTPIN_JOURNAL")]
    pub journal: Option<PathBuf>,

    /// Measure this machine for `hotpin-sim scenario recorded` and write it to OUT.toml; no policy
    /// runs
    #[arg(
        long,
        value_name = "OUT.toml",
        env = "HOTPIN_CALIBRATE",
        conflicts_with_all = ["prompts", "chart", "warm", "target_tok_s", "record", "journal"]
    )]
    pub calibrate: Option<PathBuf>,

    /// Change the ceiling on capacity once a second, at random by this seed, and compare what is locked
    /// with the books each time: to see that neither the output nor the books depend on it
    #[arg(
        long,
        value_name = "SEED",
        env = "HOTPIN_RANDOM_CAPACITY",
        conflicts_with = "calibrate"
    )]
    pub random_capacity: Option<u64>,

    /// Leave the model in the page cache between runs (only without --memory)
    #[arg(long, env = "HOTPIN_WARM", conflicts_with = "memory")]
    pub warm: bool,

    /// Where no cgroup can be made, run without a limit
    #[arg(long, env = "HOTPIN_NO_CGROUP")]
    pub no_cgroup: bool,

    /// Seconds after which a run is killed
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 3_600,
        value_parser = clap::value_parser!(u64).range(1..=604_800),
        env = "HOTPIN_RUN_TIMEOUT"
    )]
    pub run_timeout: u64,

    /// Show what the runs write to stderr
    #[arg(long, env = "HOTPIN_SHOW_RUNS")]
    pub show_runs: bool,

    /// Where experts live and how the runs are regulated, as for a session.
    #[command(flatten)]
    pub regulation: RegulationArgs,

    /// The engine of the runs, as of a session.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Checks the arguments. The directory, if any, holds built-in texts and has to outlive the runs.
///
/// # Errors
/// [`BenchError::Usage`] for what cannot be meant, others for what cannot be read.
pub fn resolve(args: &BenchArgs, hooks: &Hooks<'_>) -> Result<(Plan, Option<TempDir>), BenchError> {
    let policies = policies(args)?;
    let shards = (hooks.shards)(&args.model).map_err(BenchError::Model)?;
    let model_bytes = total_bytes(&shards)?;
    if model_bytes == 0 {
        return Err(BenchError::Model(format!(
            "{} is empty",
            args.model.display()
        )));
    }
    let memory_bytes = memory(args, model_bytes)?;
    let (workload, texts, prompts) = match &args.prompts {
        Some(path) => (Vec::new(), None, read_prompts(path)?),
        None => {
            let (workload, texts) = workload(args, hooks)?;
            (workload, texts, Vec::new())
        }
    };
    prepare_outputs(args)?;
    if let Some(profile) = &args.regulation.profile {
        std::fs::metadata(profile).map_err(|source| BenchError::io(profile, source))?;
    }
    let plan = Plan {
        model: args.model.clone(),
        shards,
        model_bytes,
        task: match args.task {
            _ if args.prompts.is_some() => Task::Generate,
            BenchTask::Decode => Task::Forced,
            BenchTask::Perplexity => Task::Perplexity,
        },
        chunks: args.chunks,
        workload,
        prompts,
        tokens: args.tokens,
        warmup_tokens: args.warmup_tokens,
        memory_bytes,
        policies,
        store: args.regulation.store.label().to_owned(),
        profile: args.regulation.profile.clone(),
        repeats: args.repeats,
        threads: args.engine.threads.unwrap_or_else(available_threads),
        timeout: Duration::from_secs(args.run_timeout),
        record: args.record.clone(),
        journal: args.journal.clone(),
        warm: args.warm,
        no_cgroup: args.no_cgroup,
        verbose: args.show_runs,
        engine: hooks.engine.clone(),
    };
    Ok((plan, texts))
}

/// What cannot be written is found out before hours of runs, not after.
fn prepare_outputs(args: &BenchArgs) -> Result<(), BenchError> {
    if let Some(chart) = &args.chart
        && chart
            .extension()
            .is_none_or(|extension| !extension.eq_ignore_ascii_case("svg"))
    {
        let why = format!(
            "--chart {}: charts are SVG, name it OUT.svg",
            chart.display()
        );
        return Err(BenchError::Usage(why));
    }
    let files = [&args.json, &args.chart].into_iter().flatten();
    let dirs = [&args.record, &args.journal]
        .into_iter()
        .flatten()
        .map(PathBuf::as_path);
    for dir in files.filter_map(|path| path.parent()).chain(dirs) {
        if !dir.as_os_str().is_empty() {
            std::fs::create_dir_all(dir).map_err(|source| BenchError::io(dir, source))?;
        }
    }
    Ok(())
}

fn policies(args: &BenchArgs) -> Result<Vec<String>, BenchError> {
    if args.calibrate.is_some() {
        return Ok(Vec::new());
    }
    let asked = match args.target_tok_s {
        None => args.policies.clone(),
        Some(target) if !(target.is_finite() && target > 0.0) => {
            return Err(BenchError::Usage(format!(
                "--target-tok-s {target}: must be above 0"
            )));
        }
        Some(_) if args.no_cgroup => {
            let why = "--target-tok-s searches over limits, which --no-cgroup may not set";
            return Err(BenchError::Usage(why.to_owned()));
        }
        Some(_) if args.policy.is_empty() => vec!["adaptive".to_owned()],
        Some(_) => args.policy.clone(),
    };
    for (index, policy) in asked.iter().enumerate() {
        if asked[..index].contains(policy) {
            return Err(BenchError::Usage(format!(
                "policy `{policy}` is asked for twice"
            )));
        }
        if policy == "static" && args.regulation.profile.is_none() {
            let why = "`static` pins what a profile names: give --profile (`hotpin profile` \
                       writes one), or leave `static` out of --policies";
            return Err(BenchError::Usage(why.to_owned()));
        }
    }
    Ok(asked)
}

fn memory(args: &BenchArgs, model_bytes: u64) -> Result<Option<u64>, BenchError> {
    let Some(text) = &args.memory else {
        let upper = model_bytes.saturating_mul(TARGET_UPPER_PERCENT) / 100;
        return Ok(args.target_tok_s.map(|_| upper));
    };
    let bytes = parse_size(text, Some(model_bytes))
        .map_err(|error| BenchError::Usage(format!("--memory: {error}")))?;
    if bytes == 0 {
        return Err(BenchError::Usage(
            "--memory 0 leaves nothing to run in".to_owned(),
        ));
    }
    Ok(Some(bytes))
}

type Workload = (Vec<super::protocol::WorkloadText>, Option<TempDir>);

fn workload(args: &BenchArgs, hooks: &Hooks<'_>) -> Result<Workload, BenchError> {
    if let Some(dir) = &args.workload {
        return Ok((read_workload(dir, &args.domains)?, None));
    }
    if hooks.demo_workload.is_empty() {
        return Err(BenchError::Usage(
            "no built-in texts: give --workload DIR".to_owned(),
        ));
    }
    let place = std::env::temp_dir();
    let dir = TempDir::with_prefix("hotpin-bench-texts-")
        .map_err(|source| BenchError::io(&place, source))?;
    write_workload(dir.path(), hooks.demo_workload)?;
    Ok((read_workload(dir.path(), &args.domains)?, Some(dir)))
}

fn total_bytes(shards: &[PathBuf]) -> Result<u64, BenchError> {
    shards.iter().try_fold(0_u64, |sum, path: &PathBuf| {
        let bytes = file_bytes(path).map_err(|source| BenchError::io(path, source))?;
        Ok(sum.saturating_add(bytes))
    })
}

fn file_bytes(path: &Path) -> std::io::Result<u64> {
    let metadata = std::fs::metadata(path)?;
    if metadata.is_file() {
        Ok(metadata.len())
    } else {
        Err(std::io::Error::other("not a regular file"))
    }
}

fn available_threads() -> u32 {
    std::thread::available_parallelism()
        .ok()
        .and_then(|n| u32::try_from(n.get()).ok())
        .unwrap_or(1)
}
