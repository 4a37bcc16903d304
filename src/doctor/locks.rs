//! What may be locked in memory.

use super::Check;
use super::facts::{Facts, Subject};
use super::memory::unread;
use super::remedy::{from_outside, quoted};
use crate::sensors::Degraded;
use crate::size::format_bytes;

/// Mappings beyond those of now and of locked experts: libraries, threads, buffers.
const SPARE_MAPPINGS: u64 = 1024;
/// A locked slice inside a mapping makes two more of it.
const MAPPINGS_A_SLICE: u64 = 2;
/// Numbers of mappings in commands are rounded up to this.
const ROUND_MAPPINGS: u64 = 1 << 16;

pub(super) fn checks(subject: &Subject, facts: &Facts) -> Vec<Check> {
    vec![memlock(subject, facts), mappings(subject, facts)]
}

fn memlock(subject: &Subject, facts: &Facts) -> Check {
    const NAME: &str = "lock limit";
    let locks = facts.sample.locks;
    if locks.ipc_lock {
        return Check::ok(NAME, "none: CAP_IPC_LOCK is held");
    }
    let unknown = facts.sample.degraded.contains(Degraded::NoLockLimit);
    let Some(limit) = locks.rlimit_bytes.filter(|_| !unknown) else {
        return if unknown {
            let fix = subject.by_root("mount -t proc proc /proc");
            Check::warn(NAME, "unknown; it shows when locking fails", fix)
        } else {
            Check::ok(NAME, "RLIMIT_MEMLOCK is unlimited")
        };
    };
    let demand = subject.demand;
    let whole = demand.dense_bytes.saturating_add(demand.expert_bytes);
    let wanted = facts
        .usable_bytes()
        .map_or(whole, |usable| usable.min(whole));
    if limit >= wanted {
        let said = format!("RLIMIT_MEMLOCK is {}", format_bytes(limit));
        return Check::ok(NAME, said);
    }
    let consequence = match facts.swap_bytes() {
        Some(0) => "without swap, store direct keeps experts in memory all the same",
        _ if limit < demand.dense_bytes => "not even the dense weights can be kept from reclaim",
        _ => "the rest can be taken away under pressure",
    };
    let said = format!(
        "RLIMIT_MEMLOCK is {} and {} could be locked: {consequence}",
        format_bytes(limit),
        format_bytes(wanted),
    );
    Check::warn(NAME, said, raise(subject, facts, wanted))
}

fn raise(subject: &Subject, facts: &Facts, wanted_bytes: u64) -> String {
    let host = &facts.host;
    if host
        .memlock_hard_bytes
        .is_none_or(|hard| hard >= wanted_bytes)
    {
        return format!("ulimit -l {}", wanted_bytes.div_ceil(1024));
    }
    let update = "run --ulimit memlock=-1:-1 ...";
    if let Some(command) = from_outside(facts, update) {
        return command;
    }
    if host.initial_user_namespace {
        let program = quoted(&subject.program);
        subject.by_root(&format!("setcap cap_ipc_lock+ep {program}"))
    } else {
        // Capabilities do not count in here; only who is outside may raise the limit.
        "sudo prlimit --pid $$ --memlock=unlimited:unlimited".to_owned()
    }
}

fn mappings(subject: &Subject, facts: &Facts) -> Check {
    const NAME: &str = "max_map_count";
    let now = match &facts.mappings {
        Ok(now) => *now,
        Err(error) => return unread(NAME, error),
    };
    let wanted = subject
        .slices
        .saturating_mul(MAPPINGS_A_SLICE)
        .saturating_add(now)
        .saturating_add(SPARE_MAPPINGS);
    let round = wanted
        .div_ceil(ROUND_MAPPINGS)
        .saturating_mul(ROUND_MAPPINGS);
    let fix = || subject.sysctl("vm.max_map_count", round);
    match facts.sample.locks.max_map_count {
        None => Check::warn(NAME, "unknown; it shows when locking fails", fix()),
        Some(limit) if limit >= wanted => Check::ok(
            NAME,
            format!("{limit}, and at most {wanted} are needed to lock every expert"),
        ),
        Some(limit) => Check::warn(
            NAME,
            format!(
                "{limit}: store mapped may need {wanted} to lock every expert, and locks fewer; store \
                 direct needs no more than now"
            ),
            fix(),
        ),
    }
}
