//! The journal's file, written by a thread of its own: a disk that takes seconds for a line must not keep the
//! governor from giving memory back.

use super::journal::Entry;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

/// Lines that wait for the disk at most: seven minutes of ticks that all change something.
const MOST_WAITING: usize = 4096;
/// How long the end of a session waits for the disk.
const PATIENCE: Duration = Duration::from_secs(5);

/// The journal file could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("journal {path}: {source}")]
pub struct JournalError {
    /// The file.
    pub path: PathBuf,
    /// The cause.
    pub source: io::Error,
}

/// What the thread is told.
enum Order {
    Write(Vec<u8>),
    /// To answer when everything before has been written.
    Tell(SyncSender<()>),
}

/// An open journal file. A line is written whole or, after an error, no more at all.
#[derive(Debug)]
pub struct JournalFile {
    path: PathBuf,
    /// `None` once nothing more is written.
    orders: Option<SyncSender<Order>>,
}

impl JournalFile {
    /// Creates or truncates the file.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn create(path: &Path) -> Result<Self, JournalError> {
        let failed = |source| JournalError {
            path: path.to_owned(),
            source,
        };
        let file = File::create(path).map_err(failed)?;
        let (orders, told) = sync_channel(MOST_WAITING);
        let name = path.to_owned();
        super::spawn("hotpin-journal", move || {
            let written = write_all(&told, BufWriter::new(file));
            // A full disk must not stop a session; it is said once.
            if let Err(error) = written {
                let path = name.display();
                tracing::error!("journal {path}: {error}; no more is written to it");
            }
        })
        .map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            orders: Some(orders),
        })
    }

    /// Leaves a line to the thread; nobody waits for it.
    pub(super) fn write(&mut self, entry: &Entry) {
        let Some(orders) = &self.orders else {
            return;
        };
        let line = serde_json::to_vec(entry).map(|mut line| {
            line.push(b'\n');
            line
        });
        let why = match line {
            Ok(line) => match orders.try_send(Order::Write(line)) {
                Ok(()) => return,
                Err(error) => error.to_string(),
            },
            Err(error) => error.to_string(),
        };
        // Where the thread has ended it has said why.
        tracing::warn!(
            "journal {}: no more is written ({why})",
            self.path.display()
        );
        self.orders = None;
    }

    /// Waits until all lines have been written, for a while.
    pub(super) fn flush(&self) {
        let Some(orders) = &self.orders else {
            return;
        };
        let (tell, told) = sync_channel(1);
        let asked = orders.try_send(Order::Tell(tell)).is_ok();
        // A thread that has ended answers at once.
        if asked && told.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let path = self.path.display();
            tracing::warn!(
                "journal {path}: the disk has not taken the last lines for {PATIENCE:?}"
            );
        }
    }
}

/// Writes what comes until nobody sends any more. Whoever reads the file sees each line as soon as no other one
/// waits behind it.
fn write_all(orders: &Receiver<Order>, mut file: impl Write) -> io::Result<()> {
    loop {
        let order = match orders.try_recv() {
            Ok(order) => order,
            Err(TryRecvError::Empty) => {
                file.flush()?;
                match orders.recv() {
                    Ok(order) => order,
                    Err(_) => return Ok(()),
                }
            }
            Err(TryRecvError::Disconnected) => return file.flush(),
        };
        match order {
            Order::Write(line) => file.write_all(&line)?,
            Order::Tell(done) => {
                file.flush()?;
                let _ = done.send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Condvar, Mutex};
    use std::time::Instant;

    #[derive(Default)]
    struct Disk {
        takes: bool,
        bytes: Vec<u8>,
    }

    /// Takes nothing at first.
    #[derive(Clone, Default)]
    struct Slow(Arc<(Mutex<Disk>, Condvar)>);

    impl Slow {
        fn disk(&self) -> std::sync::MutexGuard<'_, Disk> {
            self.0.0.lock().unwrap()
        }

        fn goes_on(&self) {
            self.disk().takes = true;
            self.0.1.notify_all();
        }
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let stands = |disk: &mut Disk| !disk.takes;
            let mut disk = self.0.1.wait_while(self.disk(), stands).unwrap();
            disk.bytes.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn quiet() -> Entry {
        let text = r#"{"t_s": 0.1, "capacity_bytes": 1, "binding": "model", "ceilings": {}, "pin_budget_bytes": 1,
            "pin_limit": "share", "pinned_bytes": 1, "transit_bytes": 0, "available_bytes": null,
            "cgroup_available_bytes": null, "decode_tokens": 0, "hit_ratio": null, "stall_ms": 0.0,
            "major_faults": 0, "drift": false, "pinned": [], "unpinned": [], "lock_error": null,
            "lost_bytes": null, "quiet_ticks": 0}"#;
        serde_json::from_str(text).unwrap()
    }

    fn with(slow: &Slow) -> JournalFile {
        let (orders, told) = sync_channel(MOST_WAITING);
        let disk = slow.clone();
        std::thread::spawn(move || write_all(&told, disk));
        JournalFile {
            path: PathBuf::from("journal"),
            orders: Some(orders),
        }
    }

    #[test]
    fn nobody_waits_for_the_disk_and_the_end_of_a_session_does() {
        let slow = Slow::default();
        let mut file = with(&slow);
        let entry = quiet();
        let began = Instant::now();
        for _ in 0..1000 {
            file.write(&entry);
        }
        assert!(began.elapsed() < Duration::from_secs(1));
        assert!(slow.disk().bytes.is_empty());
        slow.goes_on();
        file.flush();
        let lines = String::from_utf8(slow.disk().bytes.clone()).unwrap();
        assert_eq!(lines.lines().count(), 1000);
        for line in lines.lines() {
            serde_json::from_str::<Entry>(line).unwrap();
        }
    }

    #[test]
    fn a_disk_that_takes_nothing_for_long_ends_the_journal_after_a_whole_beginning() {
        let slow = Slow::default();
        let mut file = with(&slow);
        let entry = quiet();
        for _ in 0..MOST_WAITING + 2 {
            file.write(&entry);
        }
        assert!(file.orders.is_none(), "no more is taken");
        slow.goes_on();
        let until = Instant::now() + Duration::from_secs(10);
        let count = || {
            let bytes = slow.disk().bytes.clone();
            bytes.iter().filter(|&&byte| byte == b'\n').count()
        };
        while count() < MOST_WAITING && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        // One may have been on its way to the disk.
        assert!(
            (MOST_WAITING..=MOST_WAITING + 1).contains(&count()),
            "{}",
            count()
        );
    }
}
