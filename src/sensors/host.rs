//! Settings of the machine that change at an administrator's pace and that only reports read.

use std::path::PathBuf;

use super::error::{ParseError, SensorError};
use super::roots::Roots;
use super::source::read_once;
use super::text::{self, single_number};

/// One area of swap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwapArea {
    /// Device or file.
    pub path: PathBuf,
    /// It is a file or lies on a loop device, so that swapping goes through a file system.
    pub is_file: bool,
    /// Size, bytes.
    pub bytes: u64,
    /// In use, bytes.
    pub used_bytes: u64,
}

/// What else runs the process: what may be changed from inside, and by whom, depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// Docker's mark is there.
    Docker,
    /// Podman's mark is there.
    Podman,
}

/// The machine's settings. What cannot be read is an error with its path.
#[derive(Debug)]
pub struct HostSettings {
    /// Areas of swap; empty without swap.
    pub swaps: Result<Vec<SwapArea>, SensorError>,
    /// zswap is on; an error where the kernel has none.
    pub zswap: Result<bool, SensorError>,
    /// `vm.overcommit_memory`: 0, 1, or 2 for strict accounting.
    pub overcommit: Result<u64, SensorError>,
    /// What strict accounting still grants, bytes.
    pub commit_left_bytes: Result<u64, SensorError>,
    /// Transparent huge pages: the word that is in force.
    pub huge_pages: Result<String, SensorError>,
    /// NUMA nodes with memory.
    pub numa_nodes: Result<u64, SensorError>,
    /// `kernel.io_uring_disabled`; an error on kernels before 6.6, which have no such switch.
    pub io_uring_disabled: Result<u64, SensorError>,
    /// System calls of this process are filtered (seccomp).
    pub filtered: bool,
    /// Initial user namespace, where capabilities to lock count.
    pub initial_user_namespace: bool,
    /// The hard `RLIMIT_MEMLOCK`, bytes; `None` when unlimited or unknown.
    pub memlock_hard_bytes: Option<u64>,
    /// The container that we run in, where it says so.
    pub container: Option<Container>,
    /// Name of the host, which inside a container is its id.
    pub hostname: Option<String>,
}

/// Reads the machine's settings once.
#[must_use]
pub fn host_settings(roots: &Roots) -> HostSettings {
    let proc = |path: &str| roots.in_proc(path);
    let sys = |path: &str| roots.sys.join(path);
    let mark = |path: &str| roots.root.join(path).exists();
    HostSettings {
        swaps: read_once(proc("swaps"), text::swaps),
        zswap: read_once(sys("module/zswap/parameters/enabled"), text::yes_or_no),
        overcommit: read_once(proc("sys/vm/overcommit_memory"), single_number),
        commit_left_bytes: read_once(proc("meminfo"), text::commit_left),
        huge_pages: read_once(sys("kernel/mm/transparent_hugepage/enabled"), text::chosen),
        numa_nodes: read_once(sys("devices/system/node/has_memory"), text::list_length),
        io_uring_disabled: read_once(proc("sys/kernel/io_uring_disabled"), single_number),
        filtered: read_once(proc("self/status"), text::filtered).unwrap_or(false),
        initial_user_namespace: read_once(proc("self/uid_map"), text::in_initial_user_namespace)
            .unwrap_or(true),
        memlock_hard_bytes: read_once(proc("self/limits"), text::hard_memlock_limit)
            .ok()
            .flatten(),
        container: [
            (".dockerenv", Container::Docker),
            ("run/.containerenv", Container::Podman),
        ]
        .into_iter()
        .find_map(|(path, container)| mark(path).then_some(container)),
        hostname: read_once(proc("sys/kernel/hostname"), first_word).ok(),
    }
}

fn first_word(text: &str) -> Result<String, ParseError> {
    let word = text.split_ascii_whitespace().next();
    word.map(str::to_owned)
        .ok_or_else(|| ParseError::missing(text, "hostname"))
}
