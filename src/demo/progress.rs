//! Steps of a build, and a bar that shows them.

use std::ops::ControlFlow;

use indicatif::{ProgressBar, ProgressStyle};

use super::error::Error;

/// A part of the build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The dense model reads the calibration texts; counted in windows of text.
    Calibrate,
    /// The routers are clustered; counted in layers.
    Cluster,
    /// The model is written; counted in bytes.
    Write,
}

/// How far a stage is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The stage.
    pub stage: Stage,
    /// Units done.
    pub done: u64,
    /// Units in all.
    pub total: u64,
}

/// Receives steps; `Break` stops the build with [`Error::Cancelled`](super::Error::Cancelled).
pub type Progress<'a> = dyn FnMut(Step) -> ControlFlow<()> + 'a;

/// Tells the receiver of a step.
pub(super) fn report(progress: &mut Progress<'_>, step: Step) -> Result<(), Error> {
    match progress(step) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::Cancelled),
    }
}

/// A progress receiver that draws bars on stderr when that is a terminal.
pub fn bar() -> impl FnMut(Step) -> ControlFlow<()> {
    let mut current: Option<(Stage, ProgressBar)> = None;
    move |step| {
        if current
            .as_ref()
            .is_none_or(|(stage, _)| *stage != step.stage)
        {
            if let Some((_, old)) = current.take() {
                old.finish();
            }
            current = Some((step.stage, stage_bar(step)));
        }
        if let Some((_, bar)) = &current {
            bar.set_position(step.done);
            if step.done == step.total {
                bar.finish();
            }
        }
        ControlFlow::Continue(())
    }
}

fn stage_bar(step: Step) -> ProgressBar {
    let (label, count) = match step.stage {
        Stage::Calibrate => ("reading texts", "{pos}/{len} windows"),
        Stage::Cluster => ("clustering routers", "{pos}/{len} layers"),
        Stage::Write => (
            "writing experts",
            "{bytes}/{total_bytes}, {binary_bytes_per_sec}",
        ),
    };
    let template = format!("{{msg:18}} [{{bar:30}}] {count}, {{eta}} left");
    let style = ProgressStyle::with_template(&template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ");
    ProgressBar::new(step.total)
        .with_style(style)
        .with_message(label)
}
