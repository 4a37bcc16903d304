//! Where the memory controller is mounted, and where in it this process is.

use std::fs;
use std::path::{Path, PathBuf};

use procfs::process::MountInfos;
use procfs::{FromRead, ProcessCGroups};

use super::cgroup::CgroupError;

/// Which interface a hierarchy speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// The memory hierarchy of cgroup v1.
    V1,
    /// The unified hierarchy.
    V2,
}

impl Version {
    /// Holds the limit in bytes.
    pub(super) fn limit_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.limit_in_bytes",
            Self::V2 => "memory.max",
        }
    }

    /// Holds the highest use in bytes.
    pub(super) fn peak_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.max_usage_in_bytes",
            Self::V2 => "memory.peak",
        }
    }

    /// Has a line `oom_kill N`.
    pub(super) fn oom_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.oom_control",
            Self::V2 => "memory.events",
        }
    }
}

/// Finds the hierarchy that has the memory controller: its version, mount point and this process's
/// own directory in it.
pub(super) fn find(root: &Path) -> Result<(Version, PathBuf, PathBuf), CgroupError> {
    let mounts: MountInfos = read_proc(&root.join("proc/self/mountinfo"))?;
    let groups: ProcessCGroups = read_proc(&root.join("proc/self/cgroup"))?;
    for mount in &mounts {
        let version = match mount.fs_type.as_str() {
            "cgroup" if mount.super_options.contains_key("memory") => Version::V1,
            "cgroup2" => Version::V2,
            _ => continue,
        };
        let point = under(root, &mount.mount_point);
        if version == Version::V2 {
            let all = fs::read_to_string(point.join("cgroup.controllers")).unwrap_or_default();
            if !has_word(&all, "memory") {
                continue;
            }
        }
        let own = groups.0.iter().find(|group| match version {
            Version::V1 => group.controllers.iter().any(|name| name == "memory"),
            Version::V2 => group.hierarchy == 0,
        });
        // A container may see its own group as the mount's root; paths are given from the real one.
        let relative = own.map_or("", |group| {
            let path = Path::new(&group.pathname);
            path.strip_prefix(&mount.root)
                .ok()
                .and_then(Path::to_str)
                .unwrap_or("")
        });
        let own_dir = under(&point, Path::new(relative));
        let own_dir = if own_dir.is_dir() {
            own_dir
        } else {
            point.clone()
        };
        return Ok((version, point, own_dir));
    }
    Err(CgroupError::NoController)
}

fn read_proc<T: FromRead>(path: &Path) -> Result<T, CgroupError> {
    T::from_file(path).map_err(|error| CgroupError::Read {
        path: path.to_path_buf(),
        reason: error.to_string(),
    })
}

/// `path` below `root`, without letting it climb out.
fn under(root: &Path, path: &Path) -> PathBuf {
    let normal = path
        .components()
        .filter(|c| matches!(c, std::path::Component::Normal(_)));
    root.iter()
        .map(Path::new)
        .chain(normal.map(|c| Path::new(c.as_os_str())))
        .collect()
}

/// Whether a list of words, as cgroup files hold, has this one.
pub(super) fn has_word(text: &str, word: &str) -> bool {
    text.split_whitespace().any(|found| found == word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::cgroup::tests::tree;

    #[test]
    fn a_container_that_sees_its_group_as_the_root_finds_itself_there() {
        let mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let root = tree(&[
            ("proc/self/mountinfo", mounts),
            ("proc/self/cgroup", "4:memory:/docker/abc/inner\n"),
            ("sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "-1"),
        ]);
        let (_, _, own) = find(root.path()).expect("found");
        assert_eq!(own, root.path().join("sys/fs/cgroup/memory/inner"));
    }
}
