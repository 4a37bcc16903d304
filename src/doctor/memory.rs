//! How much memory there is: the host's, every cgroup's, and what stands behind it.

use super::facts::{Facts, Subject};
use super::remedy::{from_outside, quoted};
use super::{Check, Level};
use crate::model::Fit;
use crate::sensors::{CgroupLevel, SensorError};
use crate::size::format_bytes;
use std::path::Path;

/// Limits in commands are rounded up to this.
const ROUND_BYTES: u64 = 1 << 20;

pub(super) fn checks(subject: &Subject, facts: &Facts) -> Vec<Check> {
    let mut checks = vec![host(subject, facts)];
    checks.extend(cgroups(subject, facts));
    checks.extend([
        swap(subject, facts),
        zswap(subject, facts),
        overcommit(subject, facts),
    ]);
    checks
}

/// Whether a model can run well with so much, and how to say it.
fn judge(subject: &Subject, usable_bytes: u64) -> (Level, &'static str) {
    match Fit::of(subject.demand, usable_bytes) {
        Fit::All => (Level::Ok, "the whole model fits"),
        Fit::Control => (Level::Ok, "the hot experts fit"),
        Fit::BelowTokenCycle => (
            Level::Fail,
            "not even the experts of one token fit beside the dense weights",
        ),
        Fit::BelowDense => (Level::Fail, "not even the dense weights fit"),
        Fit::Dense if subject.demand.dense_bytes <= usable_bytes => (Level::Ok, "the model fits"),
        Fit::Dense => (Level::Fail, "this dense model does not fit"),
    }
}

fn host(subject: &Subject, facts: &Facts) -> Check {
    const NAME: &str = "memory";
    let Some(host) = facts.sample.host else {
        let said = "the host's available memory is unknown, so that nothing bounds what is held";
        let fix = subject.by_root("mount -t proc proc /proc");
        return Check::warn(NAME, said, fix);
    };
    let reserve = facts.reserves.0;
    let usable = host.available_bytes.saturating_sub(reserve);
    let (level, words) = judge(subject, usable);
    let said = format!(
        "{} available of {}, {} without the reserve: {words}",
        format_bytes(host.available_bytes),
        format_bytes(host.total_bytes),
        format_bytes(usable),
    );
    Check {
        name: NAME,
        level,
        said,
        fix: (level > Level::Ok).then(Subject::list_programs),
    }
}

fn cgroups(subject: &Subject, facts: &Facts) -> Vec<Check> {
    const NAME: &str = "cgroup limit";
    let mut checks: Vec<Check> = facts
        .levels
        .iter()
        .filter_map(|level| match level {
            Ok(level) => limited(subject, facts, level),
            Err(error) => Some(unread(NAME, error)),
        })
        .collect();
    if checks.is_empty() {
        let said = match facts.levels.len() {
            0 => "no cgroup that accounts memory is seen".to_owned(),
            1 => "none on the one level above us".to_owned(),
            levels => format!("none on any of the {levels} levels above us"),
        };
        checks.push(Check::ok(NAME, said));
    }
    checks
}

/// A file that is there and could not be read.
pub(super) fn unread(name: &'static str, error: &SensorError) -> Check {
    let fix = format!("ls -lL {}", quoted(error.path()));
    Check::warn(name, format!("cannot be read: {error}"), fix)
}

fn limited(subject: &Subject, facts: &Facts, level: &CgroupLevel) -> Option<Check> {
    let (limit, available) = (level.limit_bytes?, level.available_bytes?);
    let usable = available.saturating_sub(facts.reserves.1);
    let (verdict, words) = judge(subject, usable);
    let said = format!(
        "{} of {} left at {}, {} without the reserve: {words}",
        format_bytes(available),
        format_bytes(limit),
        level.path.display(),
        format_bytes(usable),
    );
    Some(Check {
        name: "cgroup limit",
        level: verdict,
        said,
        fix: (verdict > Level::Ok).then(|| raise(subject, facts, level)),
    })
}

/// The command that raises a level's limit so far that the model fits, or as far as the host reaches.
fn raise(subject: &Subject, facts: &Facts, level: &CgroupLevel) -> String {
    let demand = subject.demand;
    let wanted = demand
        .dense_bytes
        .saturating_add(demand.expert_bytes)
        .saturating_add(facts.reserves.1);
    let used = level
        .usage_bytes
        .saturating_sub(level.reclaimable_file_bytes);
    let most = facts.sample.host.map_or(u64::MAX, |h| h.total_bytes);
    let bytes = used
        .saturating_add(wanted)
        .min(most)
        .div_ceil(ROUND_BYTES)
        .saturating_mul(ROUND_BYTES);
    let update = format!("update --memory={bytes} --memory-swap={bytes} {{name}}");
    if let Some(command) = from_outside(facts, &update) {
        return command;
    }
    let name = level.path.file_name().and_then(|name| name.to_str());
    let is_unit = |name: &&str| {
        [".service", ".scope", ".slice"]
            .iter()
            .any(|kind| name.ends_with(kind))
    };
    let limit = level.limit_file.file_name().and_then(|name| name.to_str());
    let property = match limit {
        Some("memory.max") => Some("MemoryMax"),
        Some("memory.high") => Some("MemoryHigh"),
        _ => None,
    };
    match (name.filter(is_unit), property) {
        (Some(unit), Some(property)) => {
            let set = format!("set-property {unit} {property}={bytes}");
            if belongs_to_user(&level.path) {
                format!("systemctl --user {set}")
            } else {
                subject.by_root(&format!("systemctl {set}"))
            }
        }
        _ => subject.write(bytes, &level.limit_file),
    }
}

/// Whether a unit is run by a user's own systemd.
fn belongs_to_user(path: &Path) -> bool {
    let manager = |name: &str| name.starts_with("user@") && name.ends_with(".service");
    path.parent()
        .is_some_and(|above| above.iter().any(|part| part.to_str().is_some_and(manager)))
}

fn swap(subject: &Subject, facts: &Facts) -> Check {
    const NAME: &str = "swap";
    let areas = match &facts.host.swaps {
        Ok(areas) => areas,
        Err(error) => return unread(NAME, error),
    };
    let Some(bytes) = facts.swap_bytes().filter(|&bytes| bytes > 0) else {
        return Check::ok(NAME, "none: what is held stays in memory");
    };
    let total = format_bytes(bytes);
    if let Some(area) = areas.iter().find(|area| area.is_file) {
        let said = format!(
            "{total}, some of it in a file ({}): giving memory back may wait for a file system that \
             wants memory itself",
            area.path.display()
        );
        let fix = subject.by_root(&format!("swapoff {}", quoted(&area.path)));
        return Check::warn(NAME, said, fix);
    }
    if facts.sample.locks.memlock_bytes().is_none() {
        return Check::ok(NAME, format!("{total}; locked memory is never swapped out"));
    }
    let said = format!("{total}: what may not be locked can be swapped out");
    Check::warn(NAME, said, subject.by_root("swapoff -a"))
}

fn zswap(subject: &Subject, facts: &Facts) -> Check {
    const NAME: &str = "zswap";
    match &facts.host.zswap {
        Err(error) if error.is_absent() => Check::ok(NAME, "not in this kernel"),
        Err(error) => unread(NAME, error),
        Ok(false) => Check::ok(NAME, "off"),
        Ok(true) if facts.swap_bytes() == Some(0) => Check::ok(NAME, "on, and nothing to swap to"),
        Ok(true) => Check::warn(
            NAME,
            "on: its pool takes memory that is not counted as available, up to a fifth of all",
            subject.write("N", Path::new("/sys/module/zswap/parameters/enabled")),
        ),
    }
}

fn overcommit(subject: &Subject, facts: &Facts) -> Check {
    const NAME: &str = "overcommit";
    let mode = match &facts.host.overcommit {
        Ok(mode) => *mode,
        Err(error) => return unread(NAME, error),
    };
    if mode != 2 {
        let said = format!("vm.overcommit_memory is {mode}: address space may be reserved");
        return Check::ok(NAME, said);
    }
    let wanted = subject.demand.expert_bytes;
    match facts.host.commit_left_bytes {
        Ok(left) if left >= wanted => {
            let said = format!("strict, and {} may still be reserved", format_bytes(left));
            Check::ok(NAME, said)
        }
        _ => {
            let said = format!(
                "strict: store direct reserves address space for all experts ({}), which may be refused",
                format_bytes(wanted)
            );
            Check::warn(NAME, said, subject.sysctl("vm.overcommit_memory", 0))
        }
    }
}
