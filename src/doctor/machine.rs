//! What the loop can see, and how memory is laid out.

use super::Check;
use super::facts::{Facts, Subject};
use super::memory::unread;
use super::remedy::{from_outside, quoted};
use crate::sensors::{Degraded, DegradedReason};
use std::path::Path;

pub(super) fn checks(subject: &Subject, facts: &Facts) -> Vec<Check> {
    let mut checks = vec![
        pressure(subject, facts),
        huge_pages(subject, facts),
        numa(subject, facts),
    ];
    checks.extend(
        facts
            .degraded
            .iter()
            .filter_map(|degraded| unseen(subject, facts, degraded)),
    );
    checks
}

fn pressure(subject: &Subject, facts: &Facts) -> Check {
    const NAME: &str = "psi";
    match facts.degraded.iter().find(|d| d.state == Degraded::NoPsi) {
        None => Check::ok(NAME, "stalls on memory are seen"),
        Some(degraded) => Check::warn(
            NAME,
            said(degraded),
            format!(
                "{} && {} && {}",
                subject.by_root(r#"sed -i 's/^GRUB_CMDLINE_LINUX="/&psi=1 /' /etc/default/grub"#),
                subject.by_root("update-grub"),
                subject.by_root("reboot")
            ),
        ),
    }
}

fn said(degraded: &DegradedReason) -> String {
    format!(
        "{}: {} ({})",
        degraded.state.name(),
        degraded.state.meaning(),
        degraded.reason
    )
}

/// A sensor that is missing and has no check of its own.
fn unseen(subject: &Subject, facts: &Facts, degraded: &DegradedReason) -> Option<Check> {
    let mount = |what: &str| subject.by_root(&format!("mount -t {what}"));
    let fix = match degraded.state {
        Degraded::NoPsi
        | Degraded::NoMeminfo
        | Degraded::NoLockLimit
        | Degraded::NoMaxMapCount
        | Degraded::CgroupLevelSkipped => return None,
        Degraded::NoVmstat | Degraded::NoStat | Degraded::NoSelfIo | Degraded::NoStatus => {
            mount("proc proc /proc")
        }
        Degraded::NoCgroup => mount("cgroup2 cgroup2 /sys/fs/cgroup"),
        Degraded::CgroupLevelHidden => from_outside(facts, "run --cgroupns=host ...")
            .unwrap_or_else(|| subject.by_root("nsenter --target 1 --cgroup $SHELL")),
    };
    Some(Check::warn("sensors", said(degraded), fix))
}

fn huge_pages(subject: &Subject, facts: &Facts) -> Check {
    const NAME: &str = "huge pages";
    match &facts.host.huge_pages {
        Err(error) if error.is_absent() => Check::ok(NAME, "not in this kernel"),
        Err(error) => unread(NAME, error),
        Ok(mode) if mode == "never" => Check::warn(
            NAME,
            "never: the arena of store direct is made of small pages, which cost more to touch",
            subject.write(
                "madvise",
                Path::new("/sys/kernel/mm/transparent_hugepage/enabled"),
            ),
        ),
        Ok(mode) => Check::ok(
            NAME,
            format!("{mode}: the arena of store direct may have them"),
        ),
    }
}

fn numa(subject: &Subject, facts: &Facts) -> Check {
    const NAME: &str = "numa";
    match &facts.host.numa_nodes {
        Err(error) if error.is_absent() => Check::ok(NAME, "one node"),
        Err(error) => unread(NAME, error),
        Ok(1) => Check::ok(NAME, "one node"),
        Ok(nodes) => Check::warn(
            NAME,
            format!(
                "{nodes} nodes: experts land on the node that reads them, and half of all uses are remote"
            ),
            format!(
                "numactl --interleave=all {} run {} -p ...",
                quoted(&subject.program),
                quoted(&subject.model)
            ),
        ),
    }
}
