//! Calibration: the dense model reads texts of several domains, and what enters each layer's
//! feed-forward block is kept.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::error::Error;
use super::options::{Options, Workload};
use super::output::check_space;
use super::parallel;
use super::progress::{Progress, Stage, Step, report};
use crate::engine::capture::{CaptureError, CaptureModel, Row};

/// Longest run of tokens that is read in one context.
const WINDOW_TOKENS: usize = 512;

/// Windows that are read at the same time: each has a context with memory of its own.
const MAX_CONTEXTS: usize = 2;

/// First positions of a window that are left out: their states are outliers (attention sinks) that
/// say nothing about the text.
const SINK_TOKENS: usize = 4;

/// Fewest kept tokens for each expert, below which clusters would be accidents.
const MIN_TOKENS_PER_EXPERT: usize = 4;

/// One domain: its name and text.
#[derive(Clone, Debug)]
pub(super) struct Text {
    pub(super) domain: String,
    pub(super) text: String,
}

/// The texts to calibrate on, sorted by domain.
pub(super) fn texts(workload: &Workload) -> Result<Vec<Text>, Error> {
    match workload {
        Workload::BuiltIn => Ok(built_in()),
        Workload::Directory(path) => read_directory(path),
    }
}

fn built_in() -> Vec<Text> {
    crate::workload::built_in()
        .map(|(domain, text)| Text {
            domain: domain.to_owned(),
            text: text.to_owned(),
        })
        .into()
}

fn read_directory(path: &Path) -> Result<Vec<Text>, Error> {
    let mut texts = Vec::new();
    for entry in std::fs::read_dir(path).map_err(Error::io(path))? {
        let file = entry.map_err(Error::io(path))?.path();
        if file.extension().is_none_or(|e| e != "txt") {
            continue;
        }
        let domain = file
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        texts.push(Text {
            domain,
            text: std::fs::read_to_string(&file).map_err(Error::io(&file))?,
        });
    }
    texts.sort_by(|a, b| a.domain.cmp(&b.domain));
    if texts.is_empty() {
        return Err(Error::NoTexts {
            path: path.to_owned(),
        });
    }
    Ok(texts)
}

/// A domain and the rows of hidden states that are its own, the same in each layer.
#[derive(Clone, Debug)]
pub(super) struct Domain {
    pub(super) name: String,
    pub(super) rows: Range<usize>,
}

/// Hidden states of all layers, in a file without a name: for a large dense model they outgrow
/// memory.
#[derive(Debug)]
pub(super) struct Hidden {
    file: File,
    folder: PathBuf,
    layers: usize,
    width: usize,
    pub(super) domains: Vec<Domain>,
}

impl Hidden {
    /// Layers of the model.
    pub(super) const fn layers(&self) -> usize {
        self.layers
    }

    /// Values in one row.
    pub(super) const fn width(&self) -> usize {
        self.width
    }

    /// Rows of each layer.
    pub(super) fn rows(&self) -> usize {
        self.domains.last().map_or(0, |domain| domain.rows.end)
    }

    /// All rows of one layer.
    pub(super) fn layer(&self, layer: usize) -> Result<Vec<f32>, Error> {
        let mut bytes = vec![0u8; self.rows() * self.width * 4];
        self.file
            .read_exact_at(&mut bytes, self.offset(layer, 0))
            .map_err(Error::io(&self.folder))?;
        let value = |raw: &[u8]| f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
        Ok(bytes.chunks_exact(4).map(value).collect())
    }

    /// Drops the states and keeps whose rows were whose.
    pub(super) fn into_domains(self) -> Vec<Domain> {
        self.domains
    }

    fn put(&self, layer: usize, row: usize, values: &[f32]) -> std::io::Result<()> {
        if values.len() != self.width || layer >= self.layers {
            return Err(std::io::Error::other(
                "hidden state of another width than the model's",
            ));
        }
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.file.write_all_at(&bytes, self.offset(layer, row))
    }

    fn offset(&self, layer: usize, row: usize) -> u64 {
        (layer * self.rows() + row) as u64 * self.width as u64 * 4
    }
}

/// A stretch of one domain's tokens, and the row of its first kept token.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Window {
    tokens: Range<usize>,
    first_row: usize,
}

/// Has the source model read the texts.
pub(super) fn run(
    options: &Options,
    folder: &Path,
    width: usize,
    threads: usize,
    progress: &mut Progress<'_>,
) -> Result<Hidden, Error> {
    let model = CaptureModel::load(&options.source).map_err(Error::Capture)?;
    let domains = texts(&options.workload)?
        .into_iter()
        .map(|t| Ok((t.domain, model.tokenise(&t.text).map_err(Error::Capture)?)))
        .collect::<Result<Vec<(String, Vec<i32>)>, Error>>()?;
    let shares = share(&domains, options)?;
    let hidden = Hidden {
        file: tempfile::tempfile_in(folder).map_err(Error::io(folder))?,
        folder: folder.to_owned(),
        layers: model.layers(),
        width,
        domains: shares.iter().map(|share| share.domain.clone()).collect(),
    };
    check_space(folder, hidden.offset(hidden.layers, 0))?;
    read_windows(&model, &domains, &shares, &hidden, threads, progress)?;
    Ok(hidden)
}

/// What one domain contributes.
#[derive(Debug)]
struct Share {
    domain: Domain,
    windows: Vec<Window>,
}

/// Gives every domain as many tokens, spread over its text.
fn share(domains: &[(String, Vec<i32>)], options: &Options) -> Result<Vec<Share>, Error> {
    // What benchmarks decode must not have shaped the routers: the beginning is held out, and at
    // most half of a short text.
    let held_out = |tokens: &[i32]| options.held_out_tokens.min(tokens.len() / 2);
    let left = |tokens: &[i32]| tokens.len() - held_out(tokens);
    let shortest = domains.iter().min_by_key(|(_, tokens)| left(tokens));
    let (shortest, fewest) =
        shortest.map_or(("", 0), |(name, tokens)| (name.as_str(), left(tokens)));
    let take = fewest.min(options.calibration_tokens);
    let mut next_row = 0;
    let mut shares = Vec::with_capacity(domains.len());
    for (domain, tokens) in domains {
        let first_row = next_row;
        let windows = spread(held_out(tokens)..tokens.len(), take, &mut next_row);
        let domain = Domain {
            name: domain.clone(),
            rows: first_row..next_row,
        };
        shares.push(Share { domain, windows });
    }
    let needed = MIN_TOKENS_PER_EXPERT * options.experts as usize;
    if next_row < needed {
        return Err(Error::TooLittleText {
            found: next_row,
            needed,
            experts: options.experts,
            shortest: shortest.to_owned(),
        });
    }
    Ok(shares)
}

/// Cuts `take` of the `available` tokens into windows that lie evenly over them.
fn spread(available: Range<usize>, take: usize, next_row: &mut usize) -> Vec<Window> {
    let count = take.div_ceil(WINDOW_TOKENS).max(1);
    (0..count)
        .map(|index| {
            let length = take * (index + 1) / count - take * index / count;
            let start = available.start + available.len() * index / count;
            let first_row = *next_row;
            *next_row += length.saturating_sub(SINK_TOKENS);
            Window {
                tokens: start..start + length,
                first_row,
            }
        })
        .filter(|window| window.tokens.len() > SINK_TOKENS)
        .collect()
}

fn read_windows(
    model: &CaptureModel,
    domains: &[(String, Vec<i32>)],
    shares: &[Share],
    hidden: &Hidden,
    threads: usize,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let mut windows = Vec::new();
    for (share, (_, tokens)) in shares.iter().zip(domains) {
        for window in &share.windows {
            windows.push((window.first_row, &tokens[window.tokens.clone()]));
        }
    }
    let total = windows.len() as u64;
    let mut done = 0;
    report(
        progress,
        Step {
            stage: Stage::Calibrate,
            done,
            total,
        },
    )?;
    let job = |index: usize| {
        let (first_row, tokens) = windows[index];
        let mut sink = |layer: usize, position: usize, row: Row<'_>| match (row, position) {
            (_, 0..SINK_TOKENS) => Ok(()),
            (Row::Floats(values), _) => {
                hidden.put(layer, first_row + position - SINK_TOKENS, values)
            }
            (Row::Ints(_), _) => Err(std::io::Error::other("hidden states are not floats")),
        };
        model
            .capture("ffn_norm", WINDOW_TOKENS, tokens, &mut sink)
            .map_err(failed(hidden))
    };
    parallel::run(threads.min(MAX_CONTEXTS), windows.len(), job, |_, ()| {
        done += 1;
        report(
            progress,
            Step {
                stage: Stage::Calibrate,
                done,
                total,
            },
        )
    })
}

/// A failing sink is a failing write of hidden states, not of llama.cpp.
fn failed(hidden: &Hidden) -> impl FnOnce(CaptureError) -> Error {
    |error| match error {
        CaptureError::Sink(source) => Error::Io {
            path: hidden.folder.clone(),
            source,
        },
        other => Error::Capture(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_lie_within_the_text_and_rows_follow_each_other() {
        for (available, take) in [(3000, 1024), (1024, 1024), (600, 513), (70, 70), (4, 4)] {
            let mut next_row = 10;
            let windows = spread(7..7 + available, take, &mut next_row);
            let mut expected_row = 10;
            let mut last_end = 0;
            for window in &windows {
                assert!(window.tokens.start >= last_end && window.tokens.end <= 7 + available);
                assert!(window.tokens.len() <= WINDOW_TOKENS);
                assert_eq!(window.first_row, expected_row);
                expected_row += window.tokens.len() - SINK_TOKENS;
                last_end = window.tokens.end;
            }
            assert_eq!(next_row, expected_row, "{available} {take}");
        }
    }
}
