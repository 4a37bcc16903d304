//! All sensors together, read once a tick.

use std::path::{Path, PathBuf};

use hotpin_controllers::{CgroupMemory, Faults, HostMemory, LockLimits, Moment, Pressure};

use super::cgroup::{CgroupLevel, CgroupPressure, Cgroups};
use super::degraded::{Degraded, DegradedReason, DegradedSet, States};
use super::error::SensorError;
use super::roots::Roots;
use super::source::Sensor;
use super::text::{self, Io, Meminfo, Psi, Stat, Status, Vmstat};

/// How often files that may have come, gone or moved are looked for anew.
const RESCAN_NS: u64 = 1_000_000_000;

/// What the system lets us lock, as far as it can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Locks {
    /// The soft `RLIMIT_MEMLOCK`, bytes; `None` when unlimited or unknown.
    pub rlimit_bytes: Option<u64>,
    /// `CAP_IPC_LOCK` is held where `mlock` honours it: in the initial user namespace.
    pub ipc_lock: bool,
    /// Bytes that this process holds locked now (`VmLck`).
    pub locked_bytes: Option<u64>,
    /// `vm.max_map_count`, mappings.
    pub max_map_count: Option<u64>,
}

impl Locks {
    /// Bytes that we may lock; `None` when nothing known limits it.
    #[must_use]
    pub fn memlock_bytes(&self) -> Option<u64> {
        self.rlimit_bytes.filter(|_| !self.ipc_lock)
    }

    /// The controllers' view, with what only the store knows: bytes locked besides experts, and the
    /// bytes that the map-count budget still permits.
    #[must_use]
    pub fn limits(&self, locked_elsewhere_bytes: u64, map_budget_bytes: Option<u64>) -> LockLimits {
        let memlock_bytes = self.memlock_bytes();
        LockLimits {
            memlock_bytes,
            locked_elsewhere_bytes,
            map_budget_bytes,
        }
    }
}

/// Everything the sensors tell in one tick. What cannot be read is `None`, never a zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When it was taken.
    pub now: Moment,
    /// Host memory.
    pub host: Option<HostMemory>,
    /// The tightest limited cgroup level; `None` when no level has a limit.
    pub cgroup: Option<CgroupMemory>,
    /// Memory pressure of our nearest limited version 2 cgroup, else of the machine; without PSI the
    /// machine's reclaim counter alone. The totals stay continuous when the source changes.
    pub pressure: Option<Pressure>,
    /// Major faults of this process.
    pub faults: Option<Faults>,
    /// Minor faults of this process, running total.
    pub minor_faults: Option<u64>,
    /// CPU time of this process, clock ticks (`_SC_CLK_TCK` a second), running total.
    pub cpu_ticks: Option<u64>,
    /// Bytes that this process fetched from storage, running total.
    pub read_bytes: Option<u64>,
    /// Bytes that this process asked for in read calls, running total.
    pub rchar_bytes: Option<u64>,
    /// Resident bytes of this process.
    pub resident_bytes: Option<u64>,
    /// Those of them that are of no file (`RssAnon`).
    pub anonymous_bytes: Option<u64>,
    /// Bytes of this process that were swapped out (`VmSwap`).
    pub swapped_bytes: Option<u64>,
    /// Reclaim counters of the machine.
    pub vmstat: Option<Vmstat>,
    /// Lock limits.
    pub locks: Locks,
    /// What the sensors cannot tell; [`Sensors::degraded`] has the reasons.
    pub degraded: DegradedSet,
}

impl Sample {
    /// What is available on the host and in the tightest cgroup.
    #[must_use]
    pub fn available(&self) -> Available {
        Available {
            host_bytes: self.host.map(|host| host.available_bytes),
            cgroup_bytes: self.cgroup.map(|cgroup| cgroup.available_bytes),
        }
    }

    /// Bytes that are available beyond a reserve on the host and one in the tightest cgroup, whichever
    /// are fewer; `None` when neither is known.
    #[must_use]
    pub fn usable_bytes(&self, host_reserve_bytes: u64, cgroup_reserve_bytes: u64) -> Option<u64> {
        let reserves = [host_reserve_bytes, cgroup_reserve_bytes];
        self.available().beyond(reserves)
    }
}

/// What is available on the host and in the tightest cgroup, bytes; `None` where that is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Available {
    host_bytes: Option<u64>,
    cgroup_bytes: Option<u64>,
}

impl Available {
    /// What is available beyond the reserves of host and cgroup, whichever are fewer bytes; `None` when
    /// neither is known.
    #[must_use]
    pub fn beyond(self, reserves: [u64; 2]) -> Option<u64> {
        let beyond = |bytes: Option<u64>, reserve| bytes.map(|b| b.saturating_sub(reserve));
        beyond(self.host_bytes, reserves[0])
            .into_iter()
            .chain(beyond(self.cgroup_bytes, reserves[1]))
            .min()
    }
}

/// The open sensors.
#[derive(Debug)]
pub struct Sensors {
    meminfo: Sensor<Meminfo>,
    vmstat: Sensor<Vmstat>,
    psi: Sensor<Psi>,
    stat: Sensor<Stat>,
    io: Sensor<Io>,
    status: Sensor<Status>,
    memlock: Sensor<Option<u64>>,
    user_namespace: Sensor<bool>,
    max_map_count: Sensor<u64>,
    cgroups: Cgroups,
    binding_cgroup: Option<usize>,
    slow: Slow,
    splice: Splice,
    states: States,
    rescanned: Option<Moment>,
    buffer: Vec<u8>,
}

/// Readings that change at an administrator's pace, taken at each rescan.
#[derive(Clone, Copy, Debug, Default)]
struct Slow {
    rlimit_bytes: Option<u64>,
    initial_user_namespace: bool,
    max_map_count: Option<u64>,
}

impl Sensors {
    /// Opens what is there below `roots` and takes a first look, so that [`Self::degraded`] is
    /// known at once. Never fails: what is not there is degraded.
    #[must_use]
    pub fn open(roots: &Roots, now: Moment) -> Self {
        let proc = |path: &str| roots.in_proc(path);
        let mut sensors = Self {
            meminfo: Sensor::new(proc("meminfo"), text::meminfo),
            vmstat: Sensor::new(proc("vmstat"), text::vmstat),
            psi: Sensor::new(proc("pressure/memory"), text::psi),
            stat: Sensor::new(proc("self/stat"), text::stat),
            io: Sensor::new(proc("self/io"), text::io),
            status: Sensor::new(proc("self/status"), text::status),
            memlock: Sensor::new(proc("self/limits"), text::memlock_limit),
            user_namespace: Sensor::new(proc("self/uid_map"), text::in_initial_user_namespace),
            max_map_count: Sensor::new(proc("sys/vm/max_map_count"), text::single_number),
            cgroups: Cgroups::new(roots),
            binding_cgroup: None,
            slow: Slow::default(),
            splice: Splice::default(),
            states: States::default(),
            rescanned: None,
            buffer: Vec::new(),
        };
        sensors.sample(now);
        sensors
    }

    /// Reads all sensors. Values, limits among them, are read each time; cgroup paths, lock limits
    /// and files that came or went are looked for once a second, or when a cgroup level fails.
    pub fn sample(&mut self, now: Moment) -> Sample {
        let due = self
            .rescanned
            .is_none_or(|then| now < then || now.ns.saturating_sub(then.ns) >= RESCAN_NS);
        if due {
            self.rescan(now);
        }
        let (cgroup, cgroup_pressure) = self.read_cgroups(now, due);
        let meminfo = self
            .states
            .reading(Degraded::NoMeminfo, self.meminfo.read(&mut self.buffer));
        let vmstat = self
            .states
            .reading(Degraded::NoVmstat, self.vmstat.read(&mut self.buffer));
        let stat = self
            .states
            .reading(Degraded::NoStat, self.stat.read(&mut self.buffer));
        let io = self
            .states
            .reading(Degraded::NoSelfIo, self.io.read(&mut self.buffer));
        let status = self
            .states
            .reading(Degraded::NoStatus, self.status.read(&mut self.buffer));
        let pressure = self.read_pressure(cgroup_pressure, vmstat);
        let ipc_lock = self.slow.initial_user_namespace && status.is_some_and(|s| s.ipc_lock);
        Sample {
            now,
            host: meminfo.map(|m| HostMemory {
                total_bytes: m.total_bytes,
                available_bytes: m.available_bytes,
            }),
            cgroup,
            pressure,
            faults: stat.map(|s| Faults {
                major: s.major_faults,
            }),
            minor_faults: stat.map(|s| s.minor_faults),
            cpu_ticks: stat.map(|s| s.cpu_ticks),
            read_bytes: io.map(|io| io.read_bytes),
            rchar_bytes: io.map(|io| io.rchar_bytes),
            resident_bytes: status.and_then(|s| s.resident_bytes),
            anonymous_bytes: status.and_then(|s| s.anonymous_bytes),
            swapped_bytes: status.and_then(|s| s.swapped_bytes),
            vmstat,
            locks: Locks {
                rlimit_bytes: self.slow.rlimit_bytes,
                ipc_lock,
                locked_bytes: status.and_then(|s| s.locked_bytes),
                max_map_count: self.slow.max_map_count,
            },
            degraded: self.states.set(),
        }
    }

    /// Only what is available, as [`Sample::available`] has it; for looks between samples.
    pub fn available(&mut self) -> Available {
        let cgroup = self.cgroups.read(&mut self.buffer).tightest;
        let host = self.meminfo.read(&mut self.buffer).ok();
        Available {
            host_bytes: host.map(|host| host.available_bytes),
            cgroup_bytes: cgroup.map(|(_, cgroup)| cgroup.available_bytes),
        }
    }

    /// What the sensors cannot tell now, each with the failure that began it.
    #[must_use]
    pub fn degraded(&self) -> Vec<DegradedReason> {
        self.states.reasons()
    }

    /// Directory of the cgroup level that [`Sample::cgroup`] was last read from.
    #[must_use]
    pub fn binding_cgroup(&self) -> Option<&Path> {
        self.binding_cgroup
            .and_then(|level| self.cgroups.path(level))
            .map(PathBuf::as_path)
    }

    /// Reads every cgroup level above us, nearest first, unlimited ones too.
    pub fn cgroup_levels(&mut self) -> Vec<Result<CgroupLevel, SensorError>> {
        self.cgroups.all_levels(&mut self.buffer)
    }

    /// Reads host memory with the values that only reports need.
    ///
    /// # Errors
    /// When `meminfo` is absent or malformed.
    pub fn meminfo(&mut self) -> Result<Meminfo, SensorError> {
        self.meminfo.read(&mut self.buffer)
    }

    /// Opens everything anew and reads what is not read each tick.
    fn rescan(&mut self, now: Moment) {
        self.rescanned = Some(now);
        self.meminfo.reopen();
        self.vmstat.reopen();
        self.psi.reopen();
        self.stat.reopen();
        self.io.reopen();
        self.status.reopen();
        self.memlock.reopen();
        self.user_namespace.reopen();
        self.max_map_count.reopen();
        let (states, buffer) = (&mut self.states, &mut self.buffer);
        self.slow = Slow {
            rlimit_bytes: states
                .reading(Degraded::NoLockLimit, self.memlock.read(buffer))
                .flatten(),
            // Kernels without user namespaces have no such file.
            initial_user_namespace: self.user_namespace.read(buffer).unwrap_or(true),
            max_map_count: states.reading(Degraded::NoMaxMapCount, self.max_map_count.read(buffer)),
        };
        self.rescan_cgroups();
    }

    fn rescan_cgroups(&mut self) {
        let found = self.cgroups.rescan(&mut self.buffer);
        if self.states.reading(Degraded::NoCgroup, found) == Some(false) {
            let reason = "no mounted hierarchy has memory files";
            self.states.put(Degraded::NoCgroup, Some(reason));
        }
        let hidden = self.cgroups.hides_levels();
        let reason = "the cgroup mount lies above this cgroup namespace's root";
        self.states
            .put(Degraded::CgroupLevelHidden, hidden.then_some(reason));
    }

    /// Reads the cgroups; a level that fails after it worked means that we may have been moved.
    fn read_cgroups(
        &mut self,
        now: Moment,
        just_scanned: bool,
    ) -> (Option<CgroupMemory>, Option<CgroupPressure>) {
        let mut reading = self.cgroups.read(&mut self.buffer);
        let known = self.states.set().contains(Degraded::CgroupLevelSkipped);
        if reading.skipped.is_some() && !just_scanned && !known {
            self.rescanned = Some(now);
            self.rescan_cgroups();
            reading = self.cgroups.read(&mut self.buffer);
        }
        self.states
            .put(Degraded::CgroupLevelSkipped, reading.skipped);
        self.binding_cgroup = reading.tightest.map(|(level, _)| level);
        (reading.tightest.map(|(_, memory)| memory), reading.pressure)
    }

    /// The pressure of the nearest limited cgroup, else the machine's.
    ///
    /// Reclaim at a cgroup's own limit is counted in that cgroup only, so its stalls are confirmed
    /// by its own counter and the machine's stalls by the machine's.
    fn read_pressure(
        &mut self,
        cgroup: Option<CgroupPressure>,
        vmstat: Option<Vmstat>,
    ) -> Option<Pressure> {
        let (path, psi, pages) = match cgroup {
            Some(cgroup) => {
                self.states.put(Degraded::NoPsi, None::<SensorError>);
                (
                    self.cgroups.path(cgroup.level),
                    Some(cgroup.psi),
                    cgroup.direct_steal_pages,
                )
            }
            None => {
                let psi = self.psi.read(&mut self.buffer);
                let psi = self.states.reading(Degraded::NoPsi, psi);
                (None, psi, vmstat.map(|v| v.direct_steal_pages))
            }
        };
        if psi.is_none() && pages.is_none() {
            return None;
        }
        Some(self.splice.extend(path.map(PathBuf::as_path), psi, pages))
    }
}

/// Makes one continuous running total of counters whose source may change: the controllers take
/// differences, and a jump between two sources would look like a stall.
#[derive(Debug, Default)]
struct Splice {
    /// Totals have been seen.
    begun: bool,
    /// The cgroup that the totals come from; `None` is the machine.
    source: Option<PathBuf>,
    last: Option<Psi>,
    last_pages: Option<u64>,
    some_total_us: u64,
    full_total_us: u64,
    pages_total: u64,
}

impl Splice {
    /// Adds what a source has grown by since it was last seen. Nothing is added when the source has
    /// changed, or when its counters fell, or when they were absent meanwhile.
    fn extend(&mut self, source: Option<&Path>, psi: Option<Psi>, pages: Option<u64>) -> Pressure {
        let first = !std::mem::replace(&mut self.begun, true);
        if first || self.source.as_deref() != source {
            self.source = source.map(Path::to_owned);
            // The first source's totals are taken as they are, a later one's only from here on.
            self.last = if first { Some(Psi::default()) } else { psi };
            self.last_pages = first.then_some(0);
        }
        let last = std::mem::replace(&mut self.last, psi);
        if let (Some(last), Some(now)) = (last, psi) {
            let (some, full) = (&mut self.some_total_us, &mut self.full_total_us);
            add_growth(some, last.some_total_us, now.some_total_us);
            add_growth(full, last.full_total_us, now.full_total_us);
        }
        if let Some(now) = pages {
            let last = self.last_pages.replace(now).unwrap_or(now);
            add_growth(&mut self.pages_total, last, now);
        }
        Pressure {
            psi_absent: psi.is_none(),
            some_total_us: self.some_total_us,
            full_total_us: self.full_total_us,
            direct_reclaim_pages: pages.map(|_| self.pages_total),
        }
    }
}

fn add_growth(total: &mut u64, last: u64, now: u64) {
    *total = total.saturating_add(now.saturating_sub(last));
}
