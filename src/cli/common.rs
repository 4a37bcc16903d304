//! What several verbs share: options into settings, loading a model, words for the user.

use crate::config::Config;
use crate::config::args::{ControlArgs, DeviceArgs, RegulationArgs};
use crate::engine::{EngineOptions, Model, Placement};
use crate::governor::{Fill, Journal, JournalFile};
use crate::learn::{self, Learner, Learning};
use crate::model::ModelMap;
use crate::plant::{Rig, RigOptions, VramOptions};
use crate::profile::Profile;
use crate::store::DirectOptions;
use crate::trace::Recorder;
use anyhow::Result;
use hotpin_controllers::{AdaptiveConfig, PolicyKind};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

impl ControlArgs {
    /// What a session is regulated with.
    pub(super) fn rig_options(
        &self,
        engine: EngineOptions,
        control: AdaptiveConfig,
        map: &ModelMap,
    ) -> Result<(RigOptions, Option<Learner>)> {
        let regulation = &self.regulation;
        let (learner, learned) = self.learner(map)?;
        let profile = match &regulation.profile {
            // Read in any case: a file that is none must not go unnoticed until it is needed.
            Some(path) => Some(Profile::load(path, map)?.counts()),
            None => None,
        };
        let file = self
            .journal
            .as_deref()
            .map(JournalFile::create)
            .transpose()?;
        let options = RigOptions {
            direct: DirectOptions {
                verify: regulation.verify,
                ..DirectOptions::default()
            },
            control,
            profile: learned.or(profile),
            tick: Duration::from_millis(regulation.tick_ms),
            journal: Journal::new(file),
            recorder: self
                .record
                .as_deref()
                .map(|path| Recorder::create(path, map))
                .transpose()?,
            on_failure: self.on_failure,
            fill: Fill::Beside,
            keep_program: true,
            vram: VramOptions {
                size: regulation.device.vram(),
                source: None,
                moves: false,
            },
            ..RigOptions::new(self.policy, regulation.store, engine)
        };
        Ok((options, learner))
    }

    /// Who learns in this session, and what was learned before it.
    fn learner(&self, map: &ModelMap) -> Result<(Option<Learner>, Option<Vec<f32>>)> {
        let Some(path) = &self.learn else {
            return Ok((None, None));
        };
        if self.policy == PolicyKind::Off {
            let why = "--learn counts routings, which --policy off does not watch";
            return Err(Usage(why.to_owned()).into());
        }
        if !map.is_moe() {
            note("hotpin: --learn: a dense model has no experts to count");
            return Ok((None, None));
        }
        let opened = Learner::open(path, map)?;
        if let Some(text) = opened.note {
            note(&format!("hotpin: {text}"));
        }
        Ok((Some(opened.learner), opened.counts))
    }
}

/// Begins to learn from a session, where that was asked for.
pub(super) fn start_learning(
    learner: Option<Learner>,
    rig: &Rig<'_>,
) -> std::io::Result<Option<Learning>> {
    learner
        .map(|learner| learner.start(Arc::clone(&rig.counters), learn::SAVE_EVERY))
        .transpose()
}

/// Settings of the control laws: those of the settings files, then of `--control`, then of options.
///
/// # Errors
/// [`Usage`] as well for a device that this program cannot use.
pub(super) fn control(args: &RegulationArgs, config: &Config) -> Result<AdaptiveConfig> {
    args.device.check().map_err(|e| Usage(e.to_string()))?;
    let mut laws = config.laws().clone();
    if let Some(path) = &args.control {
        laws.add_control_file(path)?;
    }
    let mut control = laws.raw();
    if args.capacity.is_some() {
        control.capacity.limit_bytes = args.capacity;
    }
    if let Some(bytes) = args.reserve {
        control.capacity.host_reserve_bytes = bytes;
    }
    Ok(control)
}

pub(super) use super::log::note;

/// Arguments that parse but make no sense: exit code 2, like those that do not parse.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Usage(pub(super) String);

/// Prints a result. A reader that went away is no failure.
pub(super) fn say(text: &str) -> std::io::Result<()> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Prints a report, in words or as JSON.
pub(super) fn say_report(
    report: &(impl serde::Serialize + std::fmt::Display),
    json: bool,
) -> Result<()> {
    let text = if json {
        serde_json::to_string_pretty(report)?
    } else {
        report.to_string()
    };
    Ok(say(&text)?)
}

/// Maps a model, with a progress bar on a terminal. A model whose experts a store will fetch is not
/// read for that; `policy` off loads as llama.cpp does.
pub(super) fn load(
    path: &Path,
    policy: PolicyKind,
    device: &DeviceArgs,
) -> Result<(ModelMap, Model)> {
    let map = ModelMap::open(path)?;
    let model = load_watched(&map, policy, device.placement(&map), &mut |_| true)?;
    Ok((map, model))
}

/// Loads a mapped model, with a progress bar on a terminal. `watch` is told the part that is done, 0
/// to 1, and returns false to stop.
pub(super) fn load_watched(
    map: &ModelMap,
    policy: PolicyKind,
    placement: Placement,
    watch: &mut dyn FnMut(f32) -> bool,
) -> Result<Model> {
    let bar = bar("loading");
    let progress = |fraction: f32| {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0 to 1000"
        )]
        bar.set_position((fraction * 1000.0) as u64);
        watch(fraction)
    };
    let model = if policy == PolicyKind::Off || !map.is_moe() {
        Model::load_placed(map.path(), placement, progress)
    } else {
        Model::open_placed(map.path(), placement, progress)
    };
    bar.finish_and_clear();
    Ok(model?)
}

/// Puts a session together, with a progress bar for the first pins, and prints its notes.
pub(super) fn assemble<'m>(
    model: &'m Model,
    map: &ModelMap,
    options: RigOptions,
) -> Result<Rig<'m>> {
    assemble_watched(model, map, options, &mut |_| {})
}

/// The same; `watch` is told the part of the first pins that is done, 0 to 1.
pub(super) fn assemble_watched<'m>(
    model: &'m Model,
    map: &ModelMap,
    options: RigOptions,
    watch: &mut dyn FnMut(f32),
) -> Result<Rig<'m>> {
    let bar = bar("pinning");
    let rig = Rig::assemble(model, map, options, &mut |done, planned| {
        let permille = done.saturating_mul(1000) / planned.max(1);
        bar.set_position(permille);
        watch(f32::from(u16::try_from(permille).unwrap_or(1000)) / 1000.0);
    });
    bar.finish_and_clear();
    let rig = rig?;
    for said in rig
        .limitations
        .iter()
        .map(|(_, said)| said)
        .chain(&rig.notes)
        .chain(&rig.chosen)
    {
        note(&format!("hotpin: {said}"));
    }
    Ok(rig)
}

/// A progress bar of 1000 steps; hidden when stderr is not a terminal.
fn bar(what: &'static str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg:>8} {bar:40} {percent:>3}% {elapsed}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(1000).with_style(style).with_message(what)
}
