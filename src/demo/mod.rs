//! Demo models: a dense llama model turned into a real Mixture of Experts.
//!
//! Every layer's feed-forward block becomes many experts that compute nearly what it did, and a
//! router that picks them by the meaning of the hidden state. The text that such a model writes
//! stays coherent, its routing drifts with the topic, and its size is whatever an experiment needs.
//!
//! Equal sources, options and texts give equal bytes on one kind of machine; llama.cpp's kernels, and
//! with them the hidden states that the routers come from, differ between processors.
#![forbid(unsafe_code)]

mod calibration;
mod cluster;
mod dense;
mod error;
mod experts;
mod options;
mod output;
mod parallel;
mod plan;
mod progress;
mod report;
mod router;
mod toy;

use std::time::Instant;

use dense::Dense;
use experts::ExpertPart;
use output::{Output, check_space, check_target, folder_of};
use plan::{Item, Origin, Plan, padded};
use progress::report as report_step;
use router::Router;

pub use error::Error;
pub use options::{MAX_EXPERTS, ModelArgs, Options, Quant, Workload};
pub use progress::{Progress, Stage, Step, bar};
pub use report::{DomainDrift, LayerRouting, Report, Seconds};
pub use toy::{ToyArgs, build_toy, byte_tokens};

/// Most threads that cluster and quantise; the file does not depend on how many there are.
const MAX_THREADS: usize = 8;

/// Bytes of a source tensor that are copied at once.
const COPY_BYTES: usize = 4 << 20;

/// Builds a demo model. `progress` is told of every step and may stop the build.
///
/// # Errors
/// When the source is not a complete dense llama model, the target exists, the disk is too full,
/// the texts are too short, or reading, evaluating or writing fails. The target is untouched then.
pub fn build_model(options: &Options, progress: &mut Progress<'_>) -> Result<Report, Error> {
    check_target(&options.source, &options.output, options.force)?;
    let folder = folder_of(&options.output);
    let dense = Dense::open(&options.source)?;
    let plan = Plan::new(&dense, options)?;
    check_space(folder, plan.total_bytes)?;
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
    let mut seconds = Seconds::default();

    let start = Instant::now();
    let hidden = calibration::run(options, folder, dense.n_embd as usize, threads, progress)?;
    seconds.calibrate = start.elapsed().as_secs_f64();

    let start = Instant::now();
    let routers = router::build(options, &hidden, threads, progress)?;
    seconds.cluster = start.elapsed().as_secs_f64();
    // Frees the disk space that the hidden states take before the model claims its own.
    let domains = hidden.into_domains();

    let start = Instant::now();
    Build {
        options,
        dense: &dense,
        routers: &routers,
        threads,
    }
    .write(&plan, progress)?;
    seconds.write = start.elapsed().as_secs_f64();
    Ok(Report::new(
        options,
        plan.total_bytes,
        &domains,
        &routers,
        seconds,
    ))
}

/// Everything that the file's data is made from.
struct Build<'a> {
    options: &'a Options,
    dense: &'a Dense,
    routers: &'a [Router],
    threads: usize,
}

impl Build<'_> {
    fn write(&self, plan: &Plan, progress: &mut Progress<'_>) -> Result<(), Error> {
        let mut output = Output::create(&self.options.output, self.options.force)?;
        output.write(&plan.header)?;
        for item in &plan.items {
            self.write_item(item, &mut |bytes| {
                output.write(bytes)?;
                let done = output.written_bytes();
                let step = Step {
                    stage: Stage::Write,
                    done,
                    total: plan.total_bytes,
                };
                report_step(progress, step)
            })?;
        }
        debug_assert_eq!(output.written_bytes(), plan.total_bytes);
        output.finish()
    }

    fn write_item(
        &self,
        item: &Item,
        write: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match item.origin {
            Origin::Copy { offset_bytes } => self.copy(offset_bytes, item.size_bytes, write)?,
            Origin::Router { layer } => {
                let rows = &self.routers[layer as usize].rows;
                let bytes: Vec<u8> = rows.iter().flat_map(|v| v.to_le_bytes()).collect();
                write(&bytes)?;
            }
            Origin::Experts { layer, part } => {
                let dense = self.dense.values(layer, part)?;
                let row_len = self.dense.row_len(part) as usize;
                let (options, units) = (self.options, self.dense.n_ff);
                ExpertPart {
                    options,
                    layer,
                    part,
                    units,
                    row_len,
                    dense: &dense,
                }
                .stream(self.threads, write)?;
            }
        }
        let gap = usize::try_from(padded(item.size_bytes) - item.size_bytes).unwrap_or(0);
        write(&vec![0u8; gap])
    }

    fn copy(
        &self,
        mut offset_bytes: u64,
        size_bytes: u64,
        write: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut buffer = vec![0u8; COPY_BYTES];
        let mut left_bytes = size_bytes;
        while left_bytes > 0 {
            let piece = usize::try_from(left_bytes)
                .unwrap_or(usize::MAX)
                .min(COPY_BYTES);
            self.dense.read(offset_bytes, &mut buffer[..piece])?;
            write(&buffer[..piece])?;
            offset_bytes += piece as u64;
            left_bytes -= piece as u64;
        }
        Ok(())
    }
}
