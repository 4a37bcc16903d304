//! `hotpin profile`: count how often each expert is used.

use super::common;
use crate::config::args::{CONTEXT_TOKENS, DeviceArgs, EngineArgs};
use crate::engine::{Pass, RouteSink, Routed, Session};
use crate::model::ModelMap;
use crate::profile::Profile;
use anyhow::{Context, Result, ensure};
use clap::Args;
use hotpin_controllers::ModelShape;
use hotpin_controllers::PolicyKind;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Debug, Args)]
pub(super) struct ProfileArgs {
    /// The model, a GGUF file (the first one if it is split)
    #[arg(env = "HOTPIN_MODEL")]
    model: PathBuf,
    /// Text that is like what will be asked; may be given several times
    #[arg(long, required = true, value_name = "FILE")]
    prompts: Vec<PathBuf>,
    /// Leave out this many tokens at the beginning of each file
    #[arg(long, default_value_t = 0)]
    skip_tokens: usize,
    /// Count at most this many tokens of each file
    #[arg(long)]
    tokens: Option<usize>,
    /// Where to write the profile
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    engine: EngineArgs,
}

pub(super) fn execute(args: &ProfileArgs) -> Result<ExitCode> {
    let (map, model) = common::load(&args.model, PolicyKind::Off, &DeviceArgs::default())?;
    ensure!(
        map.is_moe(),
        "{} is a dense model: it has no experts to count",
        args.model.display()
    );
    let options = args.engine.options(CONTEXT_TOKENS);
    let mut session = Session::new(&model, &options, true)?;
    session.warm_up()?;
    let counts = Arc::new(Mutex::new(vec![0u64; map.shape().total_experts()]));
    session.route_to(Box::new(Census::new(&map, Arc::clone(&counts))), None);
    let mut total = 0;
    for path in &args.prompts {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let tokens = model.tokenize(&text, false, false)?;
        let wanted = tokens.get(args.skip_tokens..).unwrap_or_default();
        let wanted = &wanted[..wanted.len().min(args.tokens.unwrap_or(usize::MAX))];
        ensure!(
            !wanted.is_empty(),
            "{} has {} tokens, none of them after the first {}",
            path.display(),
            tokens.len(),
            args.skip_tokens
        );
        for window in wanted.chunks(options.n_ctx as usize) {
            session.clear();
            session.decode_every_row(window)?;
        }
        total += wanted.len();
        common::note(&format!("{}: {} tokens", path.display(), wanted.len()));
    }
    drop(session);
    let counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
    let profile = Profile::new(&map, &counts, total as u64);
    profile.save(&args.output)?;
    common::say(&format!(
        "{}: {total} tokens, {}",
        args.output.display(),
        skew(map.shape(), &counts)
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Share of routings that go to the busiest quarter of each layer's experts.
fn skew(shape: &ModelShape, counts: &[u64]) -> String {
    let (mut hot, mut all) = (0u64, 0u64);
    for layer in 0..shape.layers() {
        let first = shape.id(layer, 0).index();
        let mut own = counts[first..first + shape.experts_in(layer) as usize].to_vec();
        own.sort_unstable_by(|a, b| b.cmp(a));
        hot += own.iter().take(own.len().div_ceil(4)).sum::<u64>();
        all += own.iter().sum::<u64>();
    }
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    let share = hot as f64 / all.max(1) as f64;
    format!(
        "the busiest quarter of the experts took {:.0}% of the routing",
        share * 100.0
    )
}

/// Counts every routing of every token.
#[derive(Debug)]
struct Census {
    counts: Arc<Mutex<Vec<u64>>>,
    shape: ModelShape,
    layers: Vec<(u32, usize)>,
}

impl Census {
    fn new(map: &ModelMap, counts: Arc<Mutex<Vec<u64>>>) -> Self {
        let layers = map
            .layers()
            .iter()
            .enumerate()
            .map(|(i, l)| (l.block, i))
            .collect();
        Self {
            counts,
            shape: map.shape().clone(),
            layers,
        }
    }
}

impl RouteSink for Census {
    fn routed(&mut self, routed: &Routed<'_>) -> Result<(), String> {
        let Some(&(_, layer)) = self.layers.iter().find(|(block, _)| *block == routed.block) else {
            return Ok(());
        };
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        for &expert in routed.experts {
            let index = u32::try_from(expert)
                .ok()
                .filter(|&e| e < self.shape.experts_in(layer))
                .ok_or_else(|| {
                    format!("the router of block {} named expert {expert}", routed.block)
                })?;
            counts[self.shape.id(layer, index).index()] += 1;
        }
        Ok(())
    }

    fn decoded(&mut self, _: Pass, _: usize, _: u64, _: u64) {}

    fn streams(&self) -> bool {
        true
    }
}
