//! Parsers of the kernel's text files. Pure, and total: hostile text gives an error, never a panic.
//!
//! `procfs` parses `cgroup`, `mountinfo` and pressure records for us. Its parsers of `stat`,
//! `meminfo`, `io`, `limits` and `status` index into malformed lines unchecked, name no line in
//! their errors, refuse a whole file for one odd field that we do not read, and build a map of
//! strings; these files are read every tick, so they are parsed here.

use procfs::parse_pressure_record;

use super::error::{ParseError, Problem, excerpt};
use super::host::SwapArea;

const KIB: u64 = 1024;

/// `CAP_IPC_LOCK`'s bit in a capability mask.
const CAP_IPC_LOCK_BIT: u32 = 14;

/// Version 1 limits at or above this are "no limit": `i64::MAX` rounded down to a page, for any
/// page size up to 1 MiB.
const V1_NO_LIMIT_BYTES: u64 = 0x7FFF_FFFF_FFF0_0000;

/// What is read of `/proc/meminfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meminfo {
    /// `MemTotal`, bytes.
    pub total_bytes: u64,
    /// `MemAvailable`, bytes.
    pub available_bytes: u64,
    /// `Mlocked`, bytes, over all processes.
    pub mlocked_bytes: Option<u64>,
    /// `SwapTotal`, bytes.
    pub swap_total_bytes: Option<u64>,
}

/// What is read of `/proc/vmstat`: running totals since boot, for the whole machine. Reclaim at a
/// cgroup's limit is not counted here by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vmstat {
    /// Pages reclaimed by allocating tasks: the sum of all `pgsteal_direct*`.
    pub direct_steal_pages: u64,
    /// Pages scanned by allocating tasks: the sum of all `pgscan_direct*`.
    pub direct_scan_pages: Option<u64>,
    /// File pages that came back soon after being reclaimed (`workingset_refault_file`, or
    /// `workingset_refault` on kernels before 5.9).
    pub refault_file_pages: Option<u64>,
    /// Major faults (`pgmajfault`).
    pub major_faults: Option<u64>,
}

/// Totals of a pressure file, microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Psi {
    pub(crate) some_total_us: u64,
    pub(crate) full_total_us: u64,
}

/// What is read of `/proc/self/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    pub(crate) minor_faults: u64,
    pub(crate) major_faults: u64,
    /// `utime` + `stime`, clock ticks.
    pub(crate) cpu_ticks: u64,
}

/// What is read of `/proc/self/io`, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Io {
    /// Fetched from storage, page-cache readahead included.
    pub(crate) read_bytes: u64,
    /// Asked for through read calls.
    pub(crate) rchar_bytes: u64,
}

/// What is read of `/proc/self/status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) locked_bytes: Option<u64>,
    pub(crate) resident_bytes: Option<u64>,
    pub(crate) anonymous_bytes: Option<u64>,
    pub(crate) swapped_bytes: Option<u64>,
    /// `CAP_IPC_LOCK` is in the effective set.
    pub(crate) ipc_lock: bool,
}

/// What is read of a cgroup's `memory.stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CgroupStat {
    /// File pages on the inactive and active lists, bytes. Locked pages are on neither.
    pub(crate) reclaimable_file_bytes: u64,
    /// Pages reclaimed by allocating tasks; version 2 on kernels that tell.
    pub(crate) direct_steal_pages: Option<u64>,
}

/// Parses `/proc/meminfo`.
pub(crate) fn meminfo(text: &str) -> Result<Meminfo, ParseError> {
    let (mut total, mut available, mut mlocked, mut swap_total) = (None, None, None, None);
    for entry in entries(text) {
        let slot = match entry.key {
            "MemTotal" => &mut total,
            "MemAvailable" => &mut available,
            "Mlocked" => &mut mlocked,
            "SwapTotal" => &mut swap_total,
            _ => continue,
        };
        *slot = Some(entry.kib_as_bytes()?);
    }
    Ok(Meminfo {
        total_bytes: required(total, text, "MemTotal")?,
        available_bytes: required(available, text, "MemAvailable")?,
        mlocked_bytes: mlocked,
        swap_total_bytes: swap_total,
    })
}

/// Parses `/proc/vmstat`. Kernels before 4.8 split the reclaim counters by zone.
pub(crate) fn vmstat(text: &str) -> Result<Vmstat, ParseError> {
    let (mut steal, mut scan, mut refault, mut old_refault, mut major) =
        (None, None, None, None, None);
    for entry in entries(text) {
        let slot = match entry.key {
            // Counts throttled tasks, not pages.
            "pgscan_direct_throttle" => continue,
            "workingset_refault_file" => &mut refault,
            "workingset_refault" => &mut old_refault,
            "pgmajfault" => &mut major,
            key if key.starts_with("pgsteal_direct") => &mut steal,
            key if key.starts_with("pgscan_direct") => &mut scan,
            _ => continue,
        };
        *slot = Some(slot.unwrap_or(0u64).saturating_add(entry.number()?));
    }
    Ok(Vmstat {
        direct_steal_pages: required(steal, text, "pgsteal_direct")?,
        direct_scan_pages: scan,
        refault_file_pages: refault.or(old_refault),
        major_faults: major,
    })
}

/// Parses a `memory.pressure` or `/proc/pressure/memory` file.
pub(crate) fn psi(text: &str) -> Result<Psi, ParseError> {
    let total_us = |kind: &str| -> Result<u64, ParseError> {
        let (index, line) = text
            .lines()
            .enumerate()
            .find(|(_, line)| line.split(' ').next() == Some(kind) && line.len() > kind.len())
            .ok_or_else(|| ParseError::missing(text, kind))?;
        let record = parse_pressure_record(line);
        record
            .map(|r| r.total)
            .map_err(|_| ParseError::malformed(index + 1, kind, line))
    };
    Ok(Psi {
        some_total_us: total_us("some")?,
        full_total_us: total_us("full")?,
    })
}

/// Parses `/proc/self/stat`. The command name may hold spaces and parentheses, so fields are
/// counted from the last `)`.
pub(crate) fn stat(text: &str) -> Result<Stat, ParseError> {
    let malformed = || ParseError::malformed(1, "comm", text);
    let (_, rest) = text.rsplit_once(')').ok_or_else(malformed)?;
    // Field 3 of proc(5), the state, is the first here.
    let field = |number: usize, item: &str| -> Result<u64, ParseError> {
        let found = rest.split_ascii_whitespace().nth(number - 3);
        parse_number(
            1,
            item,
            found.ok_or_else(|| ParseError::missing(text, item))?,
        )
    };
    Ok(Stat {
        minor_faults: field(10, "minflt")?,
        major_faults: field(12, "majflt")?,
        cpu_ticks: field(14, "utime")?.saturating_add(field(15, "stime")?),
    })
}

/// Parses `/proc/self/io`.
pub(crate) fn io(text: &str) -> Result<Io, ParseError> {
    let (mut read, mut rchar) = (None, None);
    for entry in entries(text) {
        match entry.key {
            "read_bytes" => read = Some(entry.number()?),
            "rchar" => rchar = Some(entry.number()?),
            _ => {}
        }
    }
    Ok(Io {
        read_bytes: required(read, text, "read_bytes")?,
        rchar_bytes: required(rchar, text, "rchar")?,
    })
}

/// Parses `/proc/self/status`.
pub(crate) fn status(text: &str) -> Result<Status, ParseError> {
    let (mut locked, mut resident, mut capabilities) = (None, None, None);
    let (mut anonymous, mut swapped) = (None, None);
    for entry in entries(text) {
        match entry.key {
            "VmLck" => locked = Some(entry.kib_as_bytes()?),
            "VmRSS" => resident = Some(entry.kib_as_bytes()?),
            "RssAnon" => anonymous = Some(entry.kib_as_bytes()?),
            "VmSwap" => swapped = Some(entry.kib_as_bytes()?),
            "CapEff" => capabilities = Some(entry.hex()?),
            _ => {}
        }
    }
    let capabilities = required(capabilities, text, "CapEff")?;
    Ok(Status {
        locked_bytes: locked,
        resident_bytes: resident,
        anonymous_bytes: anonymous,
        swapped_bytes: swapped,
        ipc_lock: capabilities >> CAP_IPC_LOCK_BIT & 1 == 1,
    })
}

/// Parses `/proc/self/limits` for the soft `RLIMIT_MEMLOCK`, bytes; `None` is unlimited.
pub(crate) fn memlock_limit(text: &str) -> Result<Option<u64>, ParseError> {
    memlock_column(text, 0)
}

/// Parses `/proc/self/limits` for the hard `RLIMIT_MEMLOCK`, bytes; `None` is unlimited.
pub(crate) fn hard_memlock_limit(text: &str) -> Result<Option<u64>, ParseError> {
    memlock_column(text, 1)
}

fn memlock_column(text: &str, column: usize) -> Result<Option<u64>, ParseError> {
    const ITEM: &str = "Max locked memory";
    let found = text
        .lines()
        .enumerate()
        .find_map(|(i, l)| Some((i + 1, l.strip_prefix(ITEM)?)));
    let (line, rest) = found.ok_or_else(|| ParseError::missing(text, ITEM))?;
    match rest.split_ascii_whitespace().nth(column) {
        None => Err(ParseError::malformed(line, ITEM, rest)),
        Some("unlimited") => Ok(None),
        Some(limit) => parse_number(line, ITEM, limit).map(Some),
    }
}

/// Parses `/proc/swaps`.
pub(crate) fn swaps(text: &str) -> Result<Vec<SwapArea>, ParseError> {
    let area = |(index, line): (usize, &str)| {
        let number = index + 1;
        let malformed = || ParseError::malformed(number, "swap", line);
        // The kernel escapes blanks in names, so that each column is one word.
        let mut words = line.split_ascii_whitespace();
        let mut word = || words.next().ok_or_else(malformed);
        let (path, kind, size, used) = (word()?, word()?, word()?, word()?);
        let bytes = |item: &str, text: &str| {
            parse_number(number, item, text).map(|kib| kib.saturating_mul(KIB))
        };
        Ok(SwapArea {
            path: path.into(),
            is_file: kind == "file" || path.starts_with("/dev/loop"),
            bytes: bytes("Size", size)?,
            used_bytes: bytes("Used", used)?,
        })
    };
    text.lines().enumerate().skip(1).map(area).collect()
}

/// Parses a module's switch: `Y` or `N`, also `1` or `0`.
pub(crate) fn yes_or_no(text: &str) -> Result<bool, ParseError> {
    match text.trim() {
        "Y" | "y" | "1" => Ok(true),
        "N" | "n" | "0" => Ok(false),
        _ => Err(ParseError::malformed(1, "switch", text)),
    }
}

/// Parses `/proc/meminfo` for what strict overcommit accounting still grants, bytes.
pub(crate) fn commit_left(text: &str) -> Result<u64, ParseError> {
    let find = |key: &str| {
        let entry = entries(text).find(|entry| entry.key == key);
        entry
            .ok_or_else(|| ParseError::missing(text, key))?
            .kib_as_bytes()
    };
    Ok(find("CommitLimit")?.saturating_sub(find("Committed_AS")?))
}

/// Parses a choice among words, of which the one in force is in brackets: `always [madvise] never`.
pub(crate) fn chosen(text: &str) -> Result<String, ParseError> {
    let inside = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    inside
        .map(|(word, _)| word.to_owned())
        .ok_or_else(|| ParseError::malformed(1, "choice", text))
}

/// How many numbers a list such as `0-3,5` has.
pub(crate) fn list_length(text: &str) -> Result<u64, ParseError> {
    let length = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (
            parse_number(1, "list", first)?,
            parse_number(1, "list", last)?,
        );
        last.checked_sub(first)
            .and_then(|more| more.checked_add(1))
            .ok_or_else(|| ParseError::malformed(1, "list", text))
    };
    text.trim()
        .split(',')
        .map(length)
        .try_fold(0, |sum, next| Ok(u64::saturating_add(sum, next?)))
}

/// Parses `/proc/self/status`: whether system calls are filtered.
pub(crate) fn filtered(text: &str) -> Result<bool, ParseError> {
    let mode = entries(text).find(|entry| entry.key == "Seccomp");
    let mode = mode.ok_or_else(|| ParseError::missing(text, "Seccomp"))?;
    Ok(mode.number()? > 0)
}

/// Parses `/proc/self/uid_map`: whether this is the initial user namespace. `mlock` honours
/// `CAP_IPC_LOCK` only there, so a rootless container's capability is worth nothing.
pub(crate) fn in_initial_user_namespace(text: &str) -> Result<bool, ParseError> {
    let mut lines = text.lines();
    let first = lines
        .next()
        .ok_or_else(|| ParseError::missing(text, "uid_map"))?;
    let whole = first.split_ascii_whitespace().eq(["0", "0", "4294967295"]);
    Ok(whole && lines.next().is_none())
}

/// Parses a file that is one number.
pub(crate) fn single_number(text: &str) -> Result<u64, ParseError> {
    parse_number(1, "value", text.trim())
}

/// Parses version 2's `memory.max` or `memory.high`, bytes; `None` is no limit.
pub(crate) fn v2_limit(text: &str) -> Result<Option<u64>, ParseError> {
    match text.trim() {
        "max" => Ok(None),
        number => parse_number(1, "value", number).map(Some),
    }
}

/// Parses version 1's `memory.limit_in_bytes`; `None` is no limit.
pub(crate) fn v1_limit(text: &str) -> Result<Option<u64>, ParseError> {
    single_number(text).map(|limit| Some(limit).filter(|&bytes| bytes < V1_NO_LIMIT_BYTES))
}

/// Parses version 2's `memory.stat`, whose values include descendants.
pub(crate) fn v2_stat(text: &str) -> Result<CgroupStat, ParseError> {
    cgroup_stat(text, ["inactive_file", "active_file"])
}

/// Parses version 1's `memory.stat`, where only the `total_` values include descendants.
pub(crate) fn v1_stat(text: &str) -> Result<CgroupStat, ParseError> {
    cgroup_stat(text, ["total_inactive_file", "total_active_file"])
}

fn cgroup_stat(text: &str, file_lists: [&str; 2]) -> Result<CgroupStat, ParseError> {
    let mut lists = [None, None];
    let mut direct_steal_pages = None;
    for entry in entries(text) {
        if entry.key == file_lists[0] {
            lists[0] = Some(entry.number()?);
        } else if entry.key == file_lists[1] {
            lists[1] = Some(entry.number()?);
        } else if entry.key == "pgsteal_direct" {
            direct_steal_pages = Some(entry.number()?);
        }
    }
    let inactive = required(lists[0], text, file_lists[0])?;
    let active = required(lists[1], text, file_lists[1])?;
    Ok(CgroupStat {
        reclaimable_file_bytes: inactive.saturating_add(active),
        direct_steal_pages,
    })
}

/// A line `key: value` or `key value`.
struct Entry<'a> {
    line: usize,
    key: &'a str,
    value: &'a str,
}

impl Entry<'_> {
    fn number(&self) -> Result<u64, ParseError> {
        parse_number(self.line, self.key, self.value)
    }

    fn hex(&self) -> Result<u64, ParseError> {
        u64::from_str_radix(self.value, 16).map_err(|_| self.error(not_a_number(self.value)))
    }

    /// The value of a line that ends in `kB`, which is KiB, in bytes.
    fn kib_as_bytes(&self) -> Result<u64, ParseError> {
        let number = self.value.strip_suffix("kB").map(str::trim_end);
        let number = number.ok_or_else(|| self.error(not_a_number(self.value)))?;
        let kib = parse_number(self.line, self.key, number)?;
        let too_large = || {
            self.error(Problem::TooLarge {
                text: excerpt(self.value),
            })
        };
        kib.checked_mul(KIB).ok_or_else(too_large)
    }

    fn error(&self, problem: Problem) -> ParseError {
        ParseError {
            line: self.line,
            item: self.key.to_owned(),
            problem,
        }
    }
}

/// The lines of `text` that have a key and a value.
fn entries(text: &str) -> impl Iterator<Item = Entry<'_>> {
    text.lines().enumerate().filter_map(|(index, line)| {
        let (key, value) = line.split_once([':', ' ', '\t'])?;
        Some(Entry {
            line: index + 1,
            key,
            value: value.trim(),
        })
    })
}

fn required<T>(found: Option<T>, text: &str, item: &str) -> Result<T, ParseError> {
    found.ok_or_else(|| ParseError::missing(text, item))
}

fn parse_number(line: usize, item: &str, text: &str) -> Result<u64, ParseError> {
    text.parse().map_err(|_| ParseError {
        line,
        item: item.to_owned(),
        problem: not_a_number(text),
    })
}

fn not_a_number(text: &str) -> Problem {
    Problem::NotANumber {
        text: excerpt(text),
    }
}
