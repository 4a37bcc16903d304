//! Where the kernel's files are looked for.

use std::path::{Path, PathBuf};

/// The directories below which every sensor reads. Tests point them at recorded trees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// Instead of `/proc`.
    pub proc: PathBuf,
    /// Instead of `/sys`.
    pub sys: PathBuf,
    /// Instead of `/`, for cgroup hierarchies that are mounted outside `/sys`.
    pub root: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self::under(Path::new("/"))
    }
}

impl Roots {
    /// The roots of a tree that was recorded below `directory`: its `proc`, its `sys` and itself.
    #[must_use]
    pub fn under(directory: &Path) -> Self {
        let root = directory.to_owned();
        Self {
            proc: root.join("proc"),
            sys: root.join("sys"),
            root,
        }
    }

    /// A file of `/proc`.
    pub(crate) fn in_proc(&self, path: &str) -> PathBuf {
        self.proc.join(path)
    }

    /// The place of a mount point that the kernel names by its absolute path.
    pub(crate) fn mounted(&self, mount_point: &Path) -> PathBuf {
        if let Ok(below) = mount_point.strip_prefix("/sys") {
            return self.sys.join(below);
        }
        self.root
            .join(mount_point.strip_prefix("/").unwrap_or(mount_point))
    }
}
