//! One run in a child process: started, fed, watched, timed, and killed when it must be.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal as SignalStream, SignalKind, signal};

use super::cgroup::RunCgroup;
use super::protocol::{ChildError, ChildRequest, ChildResult};
use super::tail::Tail;

/// Bytes of stdout read before a child is called broken.
const MAX_STDOUT_BYTES: u64 = 1 << 20;

/// The program that runs a child, and its first arguments.
#[derive(Debug, Clone)]
pub struct ChildCommand {
    /// Program to start.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
}

impl ChildCommand {
    /// This program's own hidden verb.
    ///
    /// # Errors
    /// When the system does not tell the path of the running program.
    pub fn bench_child() -> io::Result<Self> {
        Ok(Self {
            program: std::env::current_exe()?,
            args: vec!["bench-child".into()],
        })
    }
}

/// Why a run gave no figures.
#[derive(Debug, thiserror::Error)]
pub enum RunFailure {
    /// The child could not be started or talked to.
    #[error("cannot run {}: {source}", program.display())]
    Spawn {
        /// What was to run.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The kernel killed it for want of memory.
    #[error(
        "out of memory: the kernel killed it at {peak} with a limit of {limit}; this policy cannot \
         run in that"
    )]
    OutOfMemory {
        /// Highest use, in words.
        peak: String,
        /// The limit, in words.
        limit: String,
    },
    /// It took too long and was killed.
    #[error("no result within {timeout_s} s, killed{}", tail_text(tail))]
    TimedOut {
        /// The bound in seconds.
        timeout_s: u64,
        /// Its last lines.
        tail: String,
    },
    /// It said itself what was wrong.
    #[error("{error}")]
    Reported {
        /// Its words.
        error: String,
    },
    /// It ended badly without a word on stdout.
    #[error("it ended with {how}{}", tail_text(tail))]
    Died {
        /// Exit code or signal, in words.
        how: String,
        /// Its last lines.
        tail: String,
    },
    /// It ended well and did not say what was agreed.
    #[error("broken protocol: {what}{}", tail_text(tail))]
    Protocol {
        /// What was wrong.
        what: String,
        /// Its last lines.
        tail: String,
    },
    /// The bench was told to stop.
    #[error("stopped by {signal}")]
    Interrupted {
        /// Name of the signal.
        signal: &'static str,
    },
}

fn tail_text(tail: &str) -> String {
    if tail.is_empty() {
        String::new()
    } else {
        format!("; its last lines:\n{tail}")
    }
}

/// The signals that stop a bench. While this lives, they no longer end the process by themselves, so
/// that children are killed and cgroups removed first.
#[derive(Debug)]
pub struct Interrupts {
    interrupt: SignalStream,
    terminate: SignalStream,
    hangup: SignalStream,
}

impl Interrupts {
    /// Starts to listen. Needs a tokio runtime.
    ///
    /// # Errors
    /// When a handler cannot be installed.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next of them and names it.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.hangup.recv() => "SIGHUP",
        }
    }
}

/// Runs one child to its end.
///
/// # Errors
/// [`RunFailure`]; the child and whatever it started in its process group are dead by then.
pub async fn run_child(
    command: &ChildCommand,
    request: &ChildRequest,
    cgroup: Option<&RunCgroup>,
    timeout: Duration,
    interrupts: &mut Interrupts,
    on_line: &mut dyn FnMut(&str),
) -> Result<ChildResult, RunFailure> {
    let spawn_failed = |source| RunFailure::Spawn {
        program: command.program.clone(),
        source,
    };
    let order = serde_json::to_vec(request).map_err(|error| spawn_failed(error.into()))?;
    let mut child = Command::new(&command.program)
        .args(&command.args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Ctrl-C in a terminal then reaches only this process, which ends the child in order.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(spawn_failed)?;

    let mut tail = Tail::default();
    let ended = tokio::select! {
        talked = talk(&mut child, order, &mut tail, on_line) => Ok(talked),
        () = tokio::time::sleep(timeout) => Err(None),
        signal = interrupts.next() => Err(Some(signal)),
    };
    match ended {
        Ok(Ok((status, stdout))) => judge(request, status, &stdout, cgroup, tail.text()),
        Ok(Err(source)) => {
            end(&mut child).await;
            Err(spawn_failed(source))
        }
        Err(Some(signal)) => {
            end(&mut child).await;
            Err(RunFailure::Interrupted { signal })
        }
        Err(None) => {
            end(&mut child).await;
            Err(RunFailure::TimedOut {
                timeout_s: timeout.as_secs(),
                tail: tail.text(),
            })
        }
    }
}

/// Feeds the child, reads all it says, and waits for its end. All at once: a child that writes
/// before it reads would block otherwise.
async fn talk(
    child: &mut Child,
    order: Vec<u8>,
    tail: &mut Tail,
    on_line: &mut dyn FnMut(&str),
) -> io::Result<(ExitStatus, Vec<u8>)> {
    let stdin = child.stdin.take();
    let stdout = child.stdout.take();
    let stderr = child.stderr.take();
    let feed = async {
        if let Some(mut stdin) = stdin {
            // A child that refuses at once never reads its order; its exit says why.
            stdin.write_all(&order).await.ok();
            stdin.shutdown().await.ok();
        }
        Ok(())
    };
    let listen = async {
        let mut bytes = Vec::new();
        if let Some(stdout) = stdout {
            stdout
                .take(MAX_STDOUT_BYTES + 1)
                .read_to_end(&mut bytes)
                .await?;
        }
        Ok::<_, io::Error>(bytes)
    };
    let watch = async {
        if let Some(stderr) = stderr {
            follow(stderr, tail, on_line).await?;
        }
        Ok(())
    };
    let ((), bytes, (), status) = tokio::try_join!(feed, listen, watch, child.wait())?;
    Ok((status, bytes))
}

async fn follow(
    mut stderr: impl AsyncRead + Unpin,
    tail: &mut Tail,
    on_line: &mut dyn FnMut(&str),
) -> io::Result<()> {
    let mut buffer = vec![0; 8192];
    loop {
        match stderr.read(&mut buffer).await? {
            0 => break,
            count => tail.push(&buffer[..count], on_line),
        }
    }
    tail.finish(on_line);
    Ok(())
}

/// Kills the child and its process group, and waits until it is gone.
async fn end(child: &mut Child) {
    if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
        killpg(Pid::from_raw(pid), Signal::SIGKILL).ok();
    }
    child.kill().await.ok();
}

/// Turns an exit status and stdout into figures or the reason for none.
fn judge(
    request: &ChildRequest,
    status: ExitStatus,
    stdout: &[u8],
    cgroup: Option<&RunCgroup>,
    tail: String,
) -> Result<ChildResult, RunFailure> {
    // First of all: a child that is cut off here dies of it, by SIGPIPE.
    if stdout.len() as u64 > MAX_STDOUT_BYTES {
        let what = format!("more than {MAX_STDOUT_BYTES} bytes on stdout");
        return Err(RunFailure::Protocol { what, tail });
    }
    let text = String::from_utf8_lossy(stdout);
    if status.success() {
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| !line.trim().is_empty())
            .collect();
        let [line] = lines[..] else {
            let what = format!("{} lines on stdout where one was agreed", lines.len());
            return Err(RunFailure::Protocol { what, tail });
        };
        return request.accept(line).map_err(|error| RunFailure::Protocol {
            what: error.to_string(),
            tail,
        });
    }
    if cgroup
        .and_then(RunCgroup::oom_kills)
        .is_some_and(|kills| kills > 0)
    {
        let bytes = |bytes: Option<u64>| {
            bytes.map_or_else(
                || "an unknown number of bytes".into(),
                |b| format!("{b} bytes"),
            )
        };
        return Err(RunFailure::OutOfMemory {
            peak: bytes(cgroup.and_then(RunCgroup::peak_bytes)),
            limit: bytes(request.memory_bytes),
        });
    }
    let last = text
        .lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("");
    if let Ok(ChildError { error }) = serde_json::from_str(last) {
        return Err(RunFailure::Reported { error });
    }
    Err(RunFailure::Died {
        how: how_it_ended(status),
        tail,
    })
}

fn how_it_ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(libc::SIGKILL)) => {
            "signal 9: most likely the kernel, out of memory (its log says so)".to_owned()
        }
        (None, Some(signal)) => {
            let name = Signal::try_from(signal).map_or("", Signal::as_str);
            format!("signal {signal} {name}")
        }
        (None, None) => "no status".to_owned(),
    }
}
