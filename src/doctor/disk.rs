//! Where the model lies, and how fast it comes from there.

use super::Check;
use super::facts::{Facts, Space, Subject};
use super::memory::unread;
use super::remedy::{from_outside, quoted};
use crate::model::Fit;
use crate::size::format_bytes;
use crate::store::DiskTrial;

/// The kernel's default; more of it only reads what is not used.
const READ_AHEAD_KB: u64 = 128;
/// Below this an SSD is on a slow bus, or it is no SSD.
const SLOW_BYTES_PER_S: f64 = 400e6;
/// Journals, traces and profiles need little; less than this is soon full.
const LEAST_FREE_BYTES: u64 = 256 << 20;

pub(super) fn checks(subject: &Subject, facts: &Facts) -> Vec<Check> {
    let mut checks = Vec::new();
    checks.extend(read_ahead(subject, facts));
    match &facts.disk {
        Err(error) => {
            let fix = format!("ls -lL {}", quoted(&subject.model));
            checks.push(Check::fail(
                "disk",
                format!("the model cannot be read: {error}"),
                fix,
            ));
        }
        Ok(trial) => checks.extend([
            direct(subject, trial),
            uring(subject, facts, trial),
            bandwidth(subject, facts, trial),
        ]),
    }
    checks.extend(facts.spaces.iter().map(space));
    checks
}

fn read_ahead(subject: &Subject, facts: &Facts) -> Option<Check> {
    const NAME: &str = "read_ahead_kb";
    Some(match facts.read_ahead.as_ref()? {
        Err(error) if error.is_absent() => Check::ok(NAME, "not a file system with readahead"),
        Err(error) => unread(NAME, error),
        Ok(setting) if setting.kb <= READ_AHEAD_KB => Check::ok(NAME, setting.kb.to_string()),
        Ok(setting) => Check::warn(
            NAME,
            format!(
                "{}: each page fault reads far more than is used; hotpin's own reads are exact, \
                 llama.cpp's are not",
                setting.kb
            ),
            subject.write(READ_AHEAD_KB, &setting.path),
        ),
    })
}

/// Brings the model to another file system.
fn elsewhere(subject: &Subject) -> String {
    let model = quoted(&subject.model);
    if subject.folder().starts_with("/var/tmp") {
        format!("df -hT; cp {model} FOLDER_ON_EXT4_OR_XFS")
    } else {
        format!("cp {model} /var/tmp/")
    }
}

fn direct(subject: &Subject, trial: &DiskTrial) -> Check {
    const NAME: &str = "O_DIRECT";
    match &trial.not_direct {
        None => Check::ok(NAME, "works"),
        Some(why) => Check::warn(
            NAME,
            format!("{why}; experts come through the page cache, which takes memory as well"),
            elsewhere(subject),
        ),
    }
}

fn uring(subject: &Subject, facts: &Facts, trial: &DiskTrial) -> Check {
    const NAME: &str = "io_uring";
    let Some(why) = &trial.not_uring else {
        return Check::ok(NAME, "works");
    };
    let said = format!("{why}: reading and computing do not overlap");
    if matches!(facts.host.io_uring_disabled, Ok(1 | 2)) {
        return Check::warn(NAME, said, subject.sysctl("kernel.io_uring_disabled", 0));
    }
    let fix = if facts.host.filtered {
        from_outside(facts, "run --security-opt seccomp=unconfined ...").unwrap_or_else(|| {
            let (program, model) = (quoted(&subject.program), quoted(&subject.model));
            // A service manager's child is outside whatever filters us.
            format!("systemd-run --user --pty {program} doctor {model}")
        })
    } else {
        "uname -r  # Linux 5.6 or newer has what is needed".to_owned()
    };
    Check::warn(NAME, said, fix)
}

fn bandwidth(subject: &Subject, facts: &Facts, trial: &DiskTrial) -> Check {
    const NAME: &str = "disk";
    let Some(bytes_per_s) = trial.bytes_per_s else {
        let said = "its speed cannot be told through the page cache";
        return Check::warn(NAME, said, elsewhere(subject));
    };
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    let cycle = subject.demand.token_cycle_bytes as f64;
    let mut said = format!(
        "{:.2} GB/s in reads of {}",
        bytes_per_s / 1e9,
        format_bytes(trial.read_bytes as u64)
    );
    if cycle > 0.0 {
        said += &format!(
            ": {:.1} tok/s at most where every expert is read for every token",
            bytes_per_s / cycle
        );
    }
    let fits = facts
        .usable_bytes()
        .is_some_and(|usable| Fit::of(subject.demand, usable) == Fit::All);
    if bytes_per_s >= SLOW_BYTES_PER_S || fits {
        return Check::ok(NAME, said);
    }
    Check::warn(
        NAME,
        format!("{said}; slow for a model that does not fit in memory"),
        "lsblk -d -o NAME,ROTA,TRAN,SIZE,MODEL",
    )
}

fn space(space: &Space) -> Check {
    const NAME: &str = "free space";
    let said = format!(
        "{} at {}",
        format_bytes(space.free_bytes),
        space.folder.display()
    );
    if space.free_bytes >= LEAST_FREE_BYTES {
        return Check::ok(NAME, said);
    }
    Check::warn(
        NAME,
        format!("{said}: traces, journals and profiles may not be written to their end"),
        format!(
            "du -xh --max-depth=1 {} | sort -h | tail",
            quoted(&space.folder)
        ),
    )
}
