//! `hotpin demo`: demo material.

use super::common;
use crate::demo::{self, ModelArgs, Options, ToyArgs};
use crate::size::format_bytes;
use anyhow::Result;
use clap::Subcommand;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Debug, Subcommand)]
pub(super) enum DemoVerb {
    /// Turn a dense llama-architecture GGUF into a real Mixture-of-Experts model
    Model(ModelArgs),
    /// Make a model of random weights: it writes nonsense, and serves checks that need no network
    Toy(ToyArgs),
}

pub(super) fn execute(verb: &DemoVerb) -> Result<ExitCode> {
    let args = match verb {
        DemoVerb::Model(args) => args,
        DemoVerb::Toy(args) => {
            let bytes = demo::build_toy(args)?;
            common::say(&format!(
                "{}: {}",
                args.output.display(),
                format_bytes(bytes)
            ))?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let options = Options::try_from(args.clone())?;
    let stopped = stop_on_interrupt()?;
    let mut bar = demo::bar();
    let report = demo::build_model(&options, &mut |step| {
        if stopped.load(Ordering::Relaxed) {
            return ControlFlow::Break(());
        }
        bar(step)
    })?;
    common::say(&report.to_string())?;
    Ok(ExitCode::SUCCESS)
}

/// Turns Ctrl-C into an orderly end, so that no half-written model is left behind.
fn stop_on_interrupt() -> Result<Arc<AtomicBool>> {
    let stopped = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stopped);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    std::thread::Builder::new()
        .name("interrupt".into())
        .spawn(move || {
            if runtime.block_on(tokio::signal::ctrl_c()).is_ok() {
                flag.store(true, Ordering::Relaxed);
            }
        })?;
    Ok(stopped)
}
