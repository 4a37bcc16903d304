//! Files that the process may have open at once: without a bound, connections would take those that the sensors need.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Kept for all else that is opened while the server runs: the model, sensors, journals, profiles.
const KEPT: u64 = 128;

/// Raises the soft limit of open files to the hard one. Returns how many of `wanted` connections there is room
/// for; the log tells when these are fewer.
#[must_use]
pub fn make_room(wanted: usize) -> usize {
    let most = raised();
    let connections = room(most, wanted);
    if connections < wanted {
        tracing::warn!(
            "{connections} connections at once instead of {wanted}: this process may open {most} files; raise its hard limit (`ulimit -Hn`, `LimitNOFILE=`) for more"
        );
    }
    connections
}

/// The limit of open files, as high as it may be without privilege; where it cannot be known, none is taken to be.
fn raised() -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return u64::MAX;
    };
    if soft >= hard {
        return soft;
    }
    match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(error) => {
            tracing::debug!("the limit of open files stays at {soft}: {error}");
            soft
        }
    }
}

/// Connections out of `wanted` that leave enough of `files`; one in any case.
fn room(files: u64, wanted: usize) -> usize {
    let most = files.saturating_sub(KEPT).max(1);
    usize::try_from(most).map_or(wanted, |most| wanted.min(most))
}

#[cfg(test)]
mod tests {
    use super::room;

    #[test]
    fn connections_leave_files_for_the_rest() {
        assert_eq!(room(1024, 1024), 896);
        assert_eq!(room(1024, 100), 100);
        assert_eq!(room(65_536, 1024), 1024);
        assert_eq!(room(u64::MAX, 1024), 1024);
        assert_eq!(room(20, 1024), 1, "the server answers");
    }
}
