//! Capacity that changes at random once a second while a run decodes. What is computed must not depend on
//! it, and what the kernel has locked must be what the books say, each time and at the end.

use crate::governor::Monitor;
use crate::plant::Rig;
use crate::rng::Rng;
use crate::sensors::{Roots, Sensors};
use crate::size::format_bytes;
use crate::store::{ExpertStore, program};
use anyhow::{Context, Result, ensure};
use hotpin_controllers::Moment;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time from one change to the next.
const EVERY: Duration = Duration::from_secs(1);
/// How long the books are given to say what the kernel says, with control paused. Experts that are under
/// way when it is paused still arrive.
const SETTLED_WITHIN: u32 = 40;
const SETTLING: Duration = Duration::from_millis(50);
/// Least and most capacity, percent of the model's experts.
const LEAST_PERCENT: u32 = 5;
const MOST_PERCENT: u32 = 100;

/// What was changed, and what was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Shaken {
    /// Changes of the ceiling on capacity.
    pub changes: u64,
    /// Least capacity that was in force at a change, bytes.
    pub least_bytes: u64,
    /// Most capacity that was in force at a change, bytes.
    pub most_bytes: u64,
    /// Comparisons of the books with the kernel's count of locked bytes, all equal.
    pub compared: u64,
    /// Most memory of the process that is neither in the files nor an expert's, bytes.
    pub most_beside_bytes: u64,
    /// The same at the end, bytes.
    pub beside_bytes: u64,
}

impl std::fmt::Display for Shaken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "capacity was changed {} times, to between {} and {}; locked bytes were what the books say at \
             {} of {} looks; beside experts the process had at most {}, {} at the end",
            self.changes,
            format_bytes(self.least_bytes),
            format_bytes(self.most_bytes),
            self.compared,
            self.compared,
            format_bytes(self.most_beside_bytes),
            format_bytes(self.beside_bytes),
        )
    }
}

/// Changes under way.
pub(super) struct Shaking {
    stop: Sender<()>,
    thread: JoinHandle<Result<Shaken>>,
}

/// Starts to change the capacity of a session, by a seed.
///
/// # Errors
/// When nothing regulates the session.
pub(super) fn shake(rig: &Rig<'_>, expert_bytes: u64, seed: u64) -> Result<Shaking> {
    let governor = rig.governor.as_ref();
    let monitor = governor.context("capacity cannot be changed where no policy regulates it")?;
    let (monitor, store) = (monitor.monitor(), rig.store.clone().context("no store")?);
    let (stop, stopped) = channel();
    let mut random = Rng::new(seed, [0; 3]);
    let thread = std::thread::spawn(move || {
        let mut watch = Watch::new(monitor, store);
        while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
            let percent = LEAST_PERCENT + random.below(MOST_PERCENT - LEAST_PERCENT + 1);
            watch.change(expert_bytes / 100 * u64::from(percent))?;
        }
        watch.compare()?;
        Ok(watch.found)
    });
    Ok(Shaking { stop, thread })
}

impl Shaking {
    /// Ends the changes.
    ///
    /// # Errors
    /// When books and kernel differed.
    pub(super) fn end(self) -> Result<Shaken> {
        let _ = self.stop.send(());
        let joined = self.thread.join();
        joined.map_err(|_| anyhow::anyhow!("the thread that changed capacity panicked"))?
    }
}

struct Watch {
    monitor: Monitor,
    store: Arc<dyn ExpertStore>,
    sensors: Sensors,
    found: Shaken,
}

impl Watch {
    fn new(monitor: Monitor, store: Arc<dyn ExpertStore>) -> Self {
        Self {
            monitor,
            store,
            sensors: Sensors::open(&Roots::default(), Moment::default()),
            found: Shaken::default(),
        }
    }

    /// Looks at what the last change came to, and makes the next one.
    fn change(&mut self, bytes: u64) -> Result<()> {
        self.compare()?;
        let capacity = self.monitor.status().decision.capacity_bytes;
        let found = &mut self.found;
        if found.changes > 0 {
            let least = if found.changes == 1 {
                capacity
            } else {
                found.least_bytes
            };
            found.least_bytes = least.min(capacity);
            found.most_bytes = found.most_bytes.max(capacity);
        }
        found.changes += 1;
        self.monitor.limit_capacity(Some(bytes));
        Ok(())
    }

    /// Compares locked bytes while the pinned set is frozen.
    fn compare(&mut self) -> Result<()> {
        self.monitor.pause(true);
        let mut differed = (0, 0);
        let mut equal = false;
        for _ in 0..SETTLED_WITHIN {
            let before = self.store.locked_bytes();
            let sample = self.sensors.sample(Moment::default());
            let locked = sample.locks.locked_bytes.context("VmLck cannot be read")?;
            let kernel = locked.saturating_sub(program::locked_bytes());
            let beside = sample.anonymous_bytes.context("RssAnon cannot be read")?;
            let held = self.store.held().pinned_bytes + self.store.private_transit_bytes();
            differed = (before, kernel);
            equal = before == kernel && before == self.store.locked_bytes();
            if equal {
                self.found.beside_bytes = beside.saturating_sub(held);
                break;
            }
            std::thread::sleep(SETTLING);
        }
        self.monitor.pause(false);
        ensure!(
            equal,
            "the books have {} bytes locked, the kernel {}",
            differed.0,
            differed.1
        );
        self.found.compared += 1;
        self.found.most_beside_bytes = self.found.most_beside_bytes.max(self.found.beside_bytes);
        Ok(())
    }
}
