//! Progress over runs: a bar on a terminal, plain lines elsewhere. All of it on stderr.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Characters of a child's line shown beside the bar.
const MAX_LINE_CHARS: usize = 60;

/// Progress over a known or bounded number of runs.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    verbose: bool,
    label: String,
    runs: u64,
    done: u64,
}

impl Progress {
    /// For `runs` runs; `verbose` shows the children's lines in full.
    #[must_use]
    pub fn new(runs: u64, verbose: bool) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(runs);
            let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {elapsed} {wide_msg}");
            if let Ok(style) = style {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        Self {
            bar,
            verbose,
            label: String::new(),
            runs,
            done: 0,
        }
    }

    /// A run begins.
    pub fn start(&mut self, label: String) {
        if let Some(bar) = &self.bar {
            bar.set_message(label.clone());
        }
        self.label = label;
    }

    /// The running child wrote a line to stderr.
    pub fn child_line(&mut self, line: &str) {
        if self.verbose {
            self.say(&format!("[{}] {line}", self.label));
        } else if let Some(bar) = &self.bar {
            let shown: String = line
                .chars()
                .filter(|c| !c.is_control())
                .take(MAX_LINE_CHARS)
                .collect();
            bar.set_message(format!("{}: {shown}", self.label));
        }
    }

    /// The run ended like that.
    pub fn end(&mut self, outcome: &str) {
        self.done += 1;
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
        self.say(&format!(
            "[{}/{}] {}: {outcome}",
            self.done, self.runs, self.label
        ));
    }

    /// A line for the user.
    pub fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            // A closed stderr is no reason to stop a bench.
            None => {
                writeln!(std::io::stderr(), "{text}").ok();
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
