//! The log on stderr: as lines for people or as JSON, and its level, which may change while it runs. A thread of its
//! own writes it, so that nobody waits for a terminal that is stopped, a full pipe or a disk that stands still;
//! what does not fit into the queue is left out.

use clap::{ArgAction, Args, ValueEnum};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::prelude::*;
use tracing_subscriber::{EnvFilter, Registry, fmt, reload};

/// Target of what a user should see whatever the level is.
const NOTES: &str = "hotpin::note";

/// What is logged, and how.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Log")]
pub(super) struct LogArgs {
    /// More detail on stderr; twice for llama.cpp's own log
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(super) verbose: u8,
    /// What is logged: error, warn, info, debug, trace, or a filter such as `info,llama.cpp=warn`
    #[arg(long, global = true, env = "HOTPIN_LOG", value_name = "FILTER", default_value = "warn,llama.cpp=error", value_parser = filter_text)]
    pub(super) log_level: String,
    /// How it is logged
    #[arg(
        long,
        global = true,
        env = "HOTPIN_LOG_FORMAT",
        value_name = "FORMAT",
        default_value = "text"
    )]
    pub(super) log_format: Format,
}

/// How lines of the log look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// A running log.
struct Log {
    format: Format,
    level: reload::Handle<EnvFilter, Registry>,
    writer: NonBlocking,
}

static LOG: OnceLock<Log> = OnceLock::new();

fn filter_text(text: &str) -> Result<String, ParseError> {
    EnvFilter::builder().parse(text).map(|_| text.to_owned())
}

fn filter(text: &str) -> EnvFilter {
    // The text was checked when it was given.
    let filter = EnvFilter::try_new(text).unwrap_or_else(|_| EnvFilter::new("warn"));
    match format!("{NOTES}=info").parse() {
        Ok(notes) => filter.add_directive(notes),
        Err(_) => filter,
    }
}

impl LogArgs {
    /// The level in force: `-v` is a flag, so it wins over what files and the environment say.
    pub(super) fn level(&self, given_as_flag: bool) -> &str {
        match self.verbose {
            _ if given_as_flag => &self.log_level,
            0 => &self.log_level,
            1 => "info,llama.cpp=warn",
            _ => "debug",
        }
    }
}

/// Lines that wait to be written, at most.
const LINES: usize = 8192;

/// Sees to it, when it goes, that everything is written, for a second at most.
pub(super) struct Written(Option<WorkerGuard>);

impl Drop for Written {
    fn drop(&mut self) {
        let Some(log) = LOG.get() else { return };
        let lost = || log.writer.error_counter().dropped_lines();
        let before = lost();
        let _ = log.writer.clone().write(b"");
        if lost() > before {
            // Of a queue that is full the guard would tell on stdout, where answers are.
            std::mem::forget(self.0.take());
        }
    }
}

/// Starts the log.
pub(super) fn init(level: &str, format: Format) -> Written {
    let (writer, guard) = NonBlockingBuilder::default()
        .buffered_lines_limit(LINES)
        .finish(std::io::stderr());
    let (filter, handle) = reload::Layer::new(filter(level));
    let layer = fmt::layer()
        .with_writer(writer.clone())
        .log_internal_errors(false);
    let layer = match format {
        Format::Text => layer.with_target(false).without_time().boxed(),
        Format::Json => layer.json().flatten_event(true).boxed(),
    };
    let started = tracing_subscriber::registry()
        .with(filter)
        .with(layer)
        .try_init();
    if started.is_ok() {
        let _ = LOG.set(Log {
            format,
            level: handle,
            writer,
        });
    }
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        // At once, since the program may end with it; but whoever panics may hold what others need.
        if format == Format::Text && takes_more(std::io::stderr().as_fd()) {
            return usual(panic);
        }
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed");
        tracing::error!(target: NOTES, "thread {name:?}: {panic}");
    }));
    Written(Some(guard))
}

/// Whether a write would not have to wait; of files on disks that is not known, and supposed.
fn takes_more(file: BorrowedFd<'_>) -> bool {
    let mut files = [PollFd::new(file, PollFlags::POLLOUT)];
    poll(&mut files, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// Changes the level from now on.
pub(super) fn set_level(level: &str) {
    if let Some(log) = LOG.get() {
        let _ = log.level.reload(filter(level));
    }
}

/// Tells the user something, on stderr. Where that is gone, nobody is left to tell.
pub(super) fn note(text: &str) {
    match LOG.get() {
        Some(log) if log.format == Format::Json => tracing::info!(target: NOTES, "{text}"),
        // In one piece, and behind what was logged before.
        Some(log) => {
            let _ = log.writer.clone().write_all(format!("{text}\n").as_bytes());
        }
        None => {
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }
}
