//! Reads into the arena: a queue, of which a few are under way at a time.
//!
//! One thread submits and reaps; nothing spins and nothing reads on its behalf. With io_uring the
//! reads run while that thread computes. Without, they run when it waits.

use super::files::ModelFiles;
use super::{DirectOptions, Fault};
use io_uring::{IoUring, opcode, types};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

/// Reads under way at a time. The disk needs two or three to be busy all the time; more only delay
/// those that are wanted first (docs/performance.md).
pub(super) const FEW_IN_FLIGHT: usize = 4;

/// The same where so much is read that computing goes on for long between two looks, as for a prompt: the
/// disk must not run out of reads meanwhile.
pub(super) const MANY_IN_FLIGHT: usize = 128;

/// How often a call is tried for which the kernel lacks memory at that moment before that is an error, and how long it
/// waits in between: seconds in all.
const MOST_TRIES: u32 = 4000;
const TRY_STEP: Duration = Duration::from_millis(1);

/// One read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    /// Whose it is: expert and part.
    pub(super) owner: (u32, u8),
    pub(super) shard: usize,
    pub(super) offset: u64,
    pub(super) address: usize,
    /// Bytes to read.
    pub(super) len: usize,
    /// Bytes that must come; beyond them the file may end.
    pub(super) least: usize,
}

/// A read that ended.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) owner: (u32, u8),
    /// In words for the user.
    pub(super) result: Result<(), String>,
}

/// How long to wait for a read to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Not at all.
    Not,
    /// Until one has ended.
    ForOne,
    /// Until one has ended, so long at most where the kernel can (since Linux 5.11).
    AtMost(Duration),
}

/// Who carries reads out.
enum Way {
    Uring(Box<IoUring>),
    Blocking,
}

/// A queue of reads.
pub(super) struct Reader {
    way: Way,
    files: Arc<ModelFiles>,
    queue: VecDeque<Read>,
    /// What is under way; the index is the request's tag.
    flight: Vec<Option<Read>>,
    in_flight: usize,
    /// Reads that may be under way.
    depth: usize,
    fault: Option<Fault>,
    /// Whether a fault that happens once has happened.
    failed: bool,
    /// Calls that the kernel is still to refuse, in tests.
    refusals: u32,
    /// Calls that it refused one after the other.
    tries: u32,
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader")
            .field("queued", &self.queue.len())
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

fn ring() -> io::Result<IoUring> {
    let entries = u32::try_from(MANY_IN_FLIGHT).unwrap_or(4);
    // Completions wait until we look: without it each one interrupts the thread that computes.
    IoUring::builder()
        .setup_coop_taskrun()
        .build(entries)
        .or_else(|_| IoUring::new(entries))
}

impl Reader {
    /// A reader, with io_uring where that is asked for and allowed. The second value says why not.
    pub(super) fn new(files: Arc<ModelFiles>, options: DirectOptions) -> (Self, Option<String>) {
        let (way, refused) = if options.uring {
            match ring() {
                Ok(ring) => (Way::Uring(Box::new(ring)), None),
                Err(error) => (Way::Blocking, Some(error.to_string())),
            }
        } else {
            (Way::Blocking, Some("it was not asked for".to_owned()))
        };
        let reader = Self {
            way,
            files,
            queue: VecDeque::new(),
            flight: vec![None; MANY_IN_FLIGHT],
            in_flight: 0,
            depth: FEW_IN_FLIGHT,
            fault: options.fault,
            failed: false,
            refusals: match options.fault {
                Some(Fault::Refused(calls)) => calls,
                _ => 0,
            },
            tries: 0,
        };
        (reader, refused)
    }

    /// Reads that were asked for and have not ended.
    pub(super) fn outstanding(&self) -> usize {
        self.queue.len() + self.in_flight
    }

    /// Sets how many reads may be under way from now on, [`MANY_IN_FLIGHT`] at most.
    pub(super) fn set_depth(&mut self, reads: usize) {
        self.depth = reads.clamp(1, MANY_IN_FLIGHT);
    }

    /// Appends a read.
    ///
    /// # Safety
    /// `address..address + len` must be writable, used by nothing else until the read has ended, and
    /// outlive the reader.
    pub(super) unsafe fn push(&mut self, read: Read) {
        self.queue.push_back(read);
    }

    /// Starts what may be started. What the kernel has no memory for now stays in the ring, and is started by the next
    /// look.
    pub(super) fn start(&mut self) -> io::Result<()> {
        if self.fault == Some(Fault::SkipWait) {
            return Ok(());
        }
        let Way::Uring(ring) = &mut self.way else {
            return Ok(());
        };
        let most = if self.fault == Some(Fault::ReadErrorOnce) {
            1
        } else {
            self.depth
        };
        while self.in_flight < most {
            let Some(read) = self.queue.pop_front() else {
                break;
            };
            let Some(tag) = self.flight.iter().position(Option::is_none) else {
                self.queue.push_front(read);
                break;
            };
            let fd = types::Fd(self.files.shards[read.shard].file.as_raw_fd());
            let len = u32::try_from(read.len).unwrap_or(u32::MAX);
            let entry = opcode::Read::new(fd, read.address as *mut u8, len)
                .offset(read.offset)
                .build()
                .user_data(tag as u64);
            // SAFETY: the buffer is the arena's, valid and ours alone until the read has ended, by
            // the contract of `push`; the file stays open as long as `self`.
            if unsafe { ring.submission().push(&entry) }.is_err() {
                self.queue.push_front(read);
                break;
            }
            self.flight[tag] = Some(read);
            self.in_flight += 1;
        }
        if ring.submission().is_empty() {
            return Ok(());
        }
        match call(&mut self.refusals, || ring.submit()) {
            Err(error) if !is_passing(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes in what has ended, and waits as `wait` says where something is outstanding. Without io_uring a
    /// read that is waited for is carried out, however long that takes.
    pub(super) fn reap(&mut self, wait: Wait, ended: &mut Vec<Done>) -> io::Result<()> {
        if matches!(self.way, Way::Blocking) {
            if wait != Wait::Not
                && let Some(read) = self.queue.pop_front()
            {
                let result = self.read_now(&read, 0);
                ended.push(Done {
                    owner: read.owner,
                    result,
                });
            }
            return Ok(());
        }
        let waited = self.start().and_then(|()| self.wait(wait));
        // Whatever was refused: what has ended is there, and makes room.
        let before = ended.len();
        self.collect(ended);
        if ended.len() > before {
            self.tries = 0;
        }
        waited.and(self.start())
    }

    /// Waits as `wait` says where reads are under way and none has ended. Where the kernel lacks memory for that it is
    /// as if none had ended, for some seconds.
    fn wait(&mut self, wait: Wait) -> io::Result<()> {
        let Way::Uring(ring) = &mut self.way else {
            return Ok(());
        };
        if wait == Wait::Not || self.in_flight == 0 || !ring.completion().is_empty() {
            return Ok(());
        }
        let waited = call(&mut self.refusals, || match wait {
            Wait::AtMost(time) if ring.params().is_feature_ext_arg() => wait_within(ring, time),
            _ => ring.submit_and_wait(1),
        });
        match waited {
            Err(error) if is_passing(&error) && self.tries < MOST_TRIES => {
                self.tries += 1;
                std::thread::sleep(TRY_STEP);
            }
            Err(error) => return Err(error),
            Ok(()) => self.tries = 0,
        }
        Ok(())
    }

    fn next_completion(&mut self) -> Option<(u64, i32)> {
        let Way::Uring(ring) = &mut self.way else {
            return None;
        };
        let ended = ring.completion().next()?;
        Some((ended.user_data(), ended.result()))
    }

    fn collect(&mut self, ended: &mut Vec<Done>) {
        while let Some((tag, result)) = self.next_completion() {
            let tag = usize::try_from(tag).unwrap_or(usize::MAX);
            let Some(read) = self.flight.get_mut(tag).and_then(Option::take) else {
                continue;
            };
            self.in_flight -= 1;
            let fails_now = self.fault == Some(Fault::ReadErrorOnce) && self.fails_now(&read);
            let result = match self.fault {
                Some(Fault::ShortRead) => result / 2,
                Some(Fault::ReadError) => -libc::EIO,
                Some(Fault::ReadErrorOnce) if fails_now => -libc::EIO,
                _ => result,
            };
            let result = match usize::try_from(result) {
                // Interrupted, too early, or given up since the thread that had begun it has ended.
                Err(_) if matches!(-result, libc::EINTR | libc::EAGAIN | libc::ECANCELED) => {
                    self.read_now(&read, 0)
                }
                Err(_) => Err(self.describe(&read, &io::Error::from_raw_os_error(-result))),
                Ok(got) if got >= read.least && self.fault != Some(Fault::EarlyEnd) => Ok(()),
                // Short: the rest is read at once. Rare enough to wait for.
                Ok(got) => self.read_now(&read, got),
            };
            ended.push(Done {
                owner: read.owner,
                result,
            });
        }
    }

    /// Whether the one read that is to fail is this one: the first part of an expert of which others
    /// are still to come, when no other first part is waited for.
    fn fails_now(&mut self, read: &Read) -> bool {
        let (id, part) = read.owner;
        let fails = !self.failed
            && part == 0
            && self.queue.iter().any(|other| other.owner.0 == id)
            && self.queue.iter().all(|other| other.owner.1 != 0);
        self.failed |= fails;
        fails
    }

    /// Reads what is missing of a read of which `got` bytes are there.
    fn read_now(&self, read: &Read, got: usize) -> Result<(), String> {
        let align = self.files.align;
        let mut got = if self.fault == Some(Fault::EarlyEnd) {
            0
        } else {
            got / align * align
        };
        let file = &self.files.shards[read.shard].file;
        while got < read.least {
            let offset = i64::try_from(read.offset + got as u64)
                .map_err(|_| "an offset beyond 2^63".to_owned())?;
            // SAFETY: the range is inside the read's buffer, which is ours until the read has ended.
            let code = unsafe {
                libc::pread(
                    file.as_raw_fd(),
                    (read.address + got) as *mut libc::c_void,
                    read.len - got,
                    offset,
                )
            };
            let code = match self.fault {
                Some(Fault::EarlyEnd) => 0,
                Some(Fault::ReadError) => {
                    return Err(self.describe(read, &io::Error::from_raw_os_error(libc::EIO)));
                }
                _ => code,
            };
            match usize::try_from(code) {
                Ok(0) => {
                    return Err(format!(
                        "the file ends {} bytes too early at offset {}; it must have been cut",
                        read.least - got,
                        read.offset
                    ));
                }
                Ok(more) if got + more >= read.least => return Ok(()),
                // Direct reads go on at aligned offsets only.
                Ok(more) if more >= align => got += more / align * align,
                Ok(_) => {
                    return Err(format!(
                        "reading at offset {} makes no progress",
                        read.offset
                    ));
                }
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(self.describe(read, &error));
                    }
                }
            }
        }
        Ok(())
    }

    fn describe(&self, read: &Read, error: &io::Error) -> String {
        format!(
            "reading {} bytes of expert weights at offset {} failed: {error}",
            read.len, read.offset
        )
    }

    /// Waits for everything under way and forgets what was queued.
    pub(super) fn drain(&mut self) {
        self.queue.clear();
        let Way::Uring(ring) = &mut self.way else {
            return;
        };
        // What the kernel never took goes with the ring.
        while self.in_flight > ring.submission().len() {
            match call(&mut self.refusals, || ring.submit_and_wait(1)) {
                Ok(()) => {}
                Err(error) if is_passing(&error) => std::thread::sleep(TRY_STEP),
                // The kernel may still write into the buffers: better to keep them for ever.
                Err(_) => std::process::abort(),
            }
            self.in_flight = self.in_flight.saturating_sub(ring.completion().count());
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.drain();
    }
}

/// Waits for a read to end, so long at most.
fn wait_within(ring: &IoUring, time: Duration) -> io::Result<usize> {
    let time = types::Timespec::from(time);
    let most = types::SubmitArgs::new().timespec(&time);
    match ring.submitter().submit_with_args(1, &most) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => Ok(0),
        answer => answer,
    }
}

/// Whether the kernel refused a call for want of memory, or until something that has ended is taken in. Nothing is
/// lost then: the call may be made again.
fn is_passing(error: &io::Error) -> bool {
    let passing = [libc::EAGAIN, libc::EBUSY, libc::ENOMEM];
    error
        .raw_os_error()
        .is_some_and(|code| passing.contains(&code))
}

/// Makes a call, again where a signal interrupted it. So many `refusals` come first, in tests.
fn call(refusals: &mut u32, mut call: impl FnMut() -> io::Result<usize>) -> io::Result<()> {
    if *refusals > 0 {
        *refusals -= 1;
        return Err(io::Error::from_raw_os_error(libc::EAGAIN));
    }
    loop {
        match call() {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
