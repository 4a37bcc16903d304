//! A memory cgroup of its own for every run, under cgroup v1, v2 or a hybrid of both.
//!
//! The group is made below the cgroup of this process, or the nearest ancestor that allows it, so
//! that limits from above (a container's, a user slice's) go on to hold.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::hierarchy::{Version, find, has_word};
use super::protocol::CgroupJoin;

/// Names of our groups begin with this; the pid of the bench and a number follow.
const PREFIX: &str = "hotpin-bench-";
/// How long a group is given to empty itself after its last process was killed.
const REMOVE_WITHIN: Duration = Duration::from_secs(5);
const REMOVE_PAUSE: Duration = Duration::from_millis(20);
/// Under v1, "no limit" is the largest page-aligned i64; anything near it is no limit.
const V1_NO_LIMIT_BYTES: u64 = 1 << 62;

/// Why a run cannot have its own cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The system's own files could not be read.
    #[error("cannot read {}: {reason}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// What was wrong.
        reason: String,
    },
    /// Nothing mounted has the memory controller.
    #[error("no cgroup hierarchy with the memory controller is mounted")]
    NoController,
    /// No place allows a new group.
    #[error("no memory cgroup can be made here: {}", tried.join("; "))]
    NotAllowed {
        /// Each place and what it said.
        tried: Vec<String>,
    },
    /// A group above has a lower limit, which would bind instead.
    #[error(
        "--memory asks for {asked_bytes} bytes, but {} above limits this process to \
         {limit_bytes}", path.display()
    )]
    TighterAbove {
        /// What was asked for.
        asked_bytes: u64,
        /// The limit above.
        limit_bytes: u64,
        /// Where it is set.
        path: PathBuf,
    },
}

/// The place below which a run's group is made.
#[derive(Debug)]
pub struct CgroupParent {
    version: Version,
    dir: PathBuf,
    /// The mount point of the hierarchy: as far up as limits are looked for.
    mount: PathBuf,
    /// We switched the memory controller on for this directory, and switch it off again.
    enabled_controller: bool,
}

impl CgroupParent {
    /// Finds a place that allows a group, by making one and removing it again. `root` stands for
    /// `/`: tests give a directory that holds a fake `proc` and `sys`.
    ///
    /// # Errors
    /// [`CgroupError`] says what is missing and, for each place, why not.
    pub fn find(root: &Path) -> Result<Self, CgroupError> {
        let (version, mount, own) = find(root)?;
        let mut tried = Vec::new();
        for dir in own.ancestors().take_while(|dir| dir.starts_with(&mount)) {
            let mut parent = Self {
                version,
                dir: dir.to_path_buf(),
                mount: mount.clone(),
                enabled_controller: false,
            };
            let usable = parent
                .enable_controller()
                .and_then(|()| parent.create(None).map(drop));
            match usable {
                Ok(()) => {
                    parent.remove_stale();
                    return Ok(parent);
                }
                Err(error) => tried.push(format!("{}: {error}", dir.display())),
            }
        }
        Err(CgroupError::NotAllowed { tried })
    }

    /// Makes the group of one run, limited to `memory_bytes`, with no swap.
    ///
    /// # Errors
    /// [`CgroupError::TighterAbove`] when a group above binds first; [`CgroupError::NotAllowed`].
    pub fn run_group(&self, memory_bytes: u64) -> Result<RunCgroup, CgroupError> {
        if let Some((limit_bytes, path)) = self.tightest_limit()
            && limit_bytes < memory_bytes
        {
            return Err(CgroupError::TighterAbove {
                asked_bytes: memory_bytes,
                limit_bytes,
                path,
            });
        }
        self.create(Some(memory_bytes))
            .map_err(|error| CgroupError::NotAllowed {
                tried: vec![format!("{}: {error}", self.dir.display())],
            })
    }

    fn create(&self, limit_bytes: Option<u64>) -> io::Result<RunCgroup> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = self
            .dir
            .join(format!("{PREFIX}{}-{number}", std::process::id()));
        fs::create_dir(&dir)?;
        // From here on the directory is removed by Drop, whatever fails.
        let mut group = RunCgroup {
            version: self.version,
            dir,
            notes: Vec::new(),
        };
        let limit_text = limit_bytes.map_or_else(
            || {
                if self.version == Version::V1 {
                    "-1".into()
                } else {
                    "max".to_owned()
                }
            },
            |bytes| bytes.to_string(),
        );
        fs::write(group.dir.join(self.version.limit_file()), limit_text)?;
        if limit_bytes.is_some() {
            group.forbid_swap();
        }
        Ok(group)
    }

    /// v2 gives a group its memory files only once the directory above delegates the controller.
    fn enable_controller(&mut self) -> io::Result<()> {
        if self.version == Version::V1 {
            return Ok(());
        }
        let path = self.dir.join("cgroup.subtree_control");
        if has_word(&fs::read_to_string(&path)?, "memory") {
            return Ok(());
        }
        if !has_word(
            &fs::read_to_string(self.dir.join("cgroup.controllers"))?,
            "memory",
        ) {
            return Err(io::Error::other(
                "the memory controller is not delegated to it",
            ));
        }
        fs::write(&path, "+memory").map_err(|error| {
            let why = format!("its memory controller cannot be passed on: {error}");
            io::Error::new(error.kind(), why)
        })?;
        self.enabled_controller = true;
        Ok(())
    }

    fn tightest_limit(&self) -> Option<(u64, PathBuf)> {
        let above = self
            .dir
            .ancestors()
            .take_while(|dir| dir.starts_with(&self.mount));
        above
            .filter_map(|dir| {
                let path = dir.join(self.version.limit_file());
                let limit: u64 = fs::read_to_string(&path).ok()?.trim().parse().ok()?;
                (limit < V1_NO_LIMIT_BYTES).then_some((limit, path))
            })
            .min()
    }

    /// Removes groups of benches that were killed before they could do it themselves.
    fn remove_stale(&self) {
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let owner = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
            let Some((pid, _)) = owner.and_then(|rest| rest.split_once('-')) else {
                continue;
            };
            let gone = pid.parse().is_ok_and(|pid: i32| {
                pid > 0 && kill(Pid::from_raw(pid), None) == Err(nix::errno::Errno::ESRCH)
            });
            if gone {
                // Fails while processes are in it, and then it is not ours to remove.
                fs::remove_dir(entry.path()).ok();
            }
        }
    }
}

impl Drop for CgroupParent {
    fn drop(&mut self) {
        if self.enabled_controller {
            // Refused when somebody else relies on it by now, which is then right.
            fs::write(self.dir.join("cgroup.subtree_control"), "-memory").ok();
        }
    }
}

/// The group of one run. Whatever still runs in it is killed and it is removed on drop.
#[derive(Debug)]
pub struct RunCgroup {
    version: Version,
    dir: PathBuf,
    notes: Vec<String>,
}

impl RunCgroup {
    /// What the child needs to join.
    #[must_use]
    pub fn join(&self) -> CgroupJoin {
        let version = if self.version == Version::V1 { 1 } else { 2 };
        CgroupJoin {
            version,
            procs: self.dir.join("cgroup.procs"),
        }
    }

    /// What the reader of the figures has to know about this group.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Highest use so far in bytes, page cache included; none where the kernel does not keep it.
    #[must_use]
    pub fn peak_bytes(&self) -> Option<u64> {
        fs::read_to_string(self.dir.join(self.version.peak_file()))
            .ok()?
            .trim()
            .parse()
            .ok()
    }

    /// Processes that the kernel killed in this group for want of memory.
    #[must_use]
    pub fn oom_kills(&self) -> Option<u64> {
        let text = fs::read_to_string(self.dir.join(self.version.oom_file())).ok()?;
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }

    fn forbid_swap(&mut self) {
        let (file, value) = match self.version {
            Version::V1 => ("memory.swappiness", "0"),
            Version::V2 => ("memory.swap.max", "0"),
        };
        match fs::write(self.dir.join(file), value) {
            Ok(()) => {}
            // No swap accounting, no file: the kernel then has no swap for the group to use.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                self.notes.push(format!(
                    "swap could not be forbidden to the run ({file}: {error})"
                ));
            }
        }
    }

    fn kill_members(&self) {
        if self.version == Version::V2 && fs::write(self.dir.join("cgroup.kill"), "1").is_ok() {
            return;
        }
        let members = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        for pid in members
            .lines()
            .filter_map(|line| line.trim().parse::<i32>().ok())
        {
            if pid > 0 {
                kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
            }
        }
    }
}

impl Drop for RunCgroup {
    fn drop(&mut self) {
        let deadline = Instant::now() + REMOVE_WITHIN;
        loop {
            match fs::remove_dir(&self.dir) {
                Ok(()) => return,
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    self.kill_members();
                    if Instant::now() < deadline {
                        std::thread::sleep(REMOVE_PAUSE);
                        continue;
                    }
                    tracing::warn!(group = %self.dir.display(), "still busy, not removed");
                }
                Err(error) => {
                    tracing::warn!(group = %self.dir.display(), %error, "not removed");
                }
            }
            return;
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const HYBRID: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
    const UNIFIED: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";

    /// A fake `/`: each pair is a file and its text.
    pub(crate) fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("temp dir");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("has a parent")).expect("dirs");
            fs::write(path, text).expect("write");
        }
        root
    }

    #[test]
    fn a_hybrid_machine_is_used_through_v1() {
        let root = tree(&[
            ("proc/self/mountinfo", HYBRID),
            ("proc/self/cgroup", "4:memory:/a/b\n0::/\n"),
            (
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            ("sys/fs/cgroup/unified/cgroup.controllers", "hugetlb\n"),
        ]);
        let parent = CgroupParent::find(root.path()).expect("found");
        assert_eq!(parent.version, Version::V1);
        assert_eq!(parent.dir, root.path().join("sys/fs/cgroup/memory/a/b"));
        let group = parent.run_group(2_500_000_000).expect("group");
        let read = |file: &str| fs::read_to_string(group.dir.join(file)).expect("file");
        assert_eq!(read("memory.limit_in_bytes"), "2500000000");
        assert_eq!(read("memory.swappiness"), "0");
        assert_eq!(group.join().version, 1);
        assert!(group.join().procs.starts_with(root.path()));
    }

    #[test]
    fn under_v2_the_nearest_directory_that_delegates_memory_is_taken() {
        let root = tree(&[
            ("proc/self/mountinfo", UNIFIED),
            ("proc/self/cgroup", "0::/user.slice/shell.scope\n"),
            ("sys/fs/cgroup/cgroup.controllers", "cpu memory\n"),
            (
                "sys/fs/cgroup/user.slice/cgroup.controllers",
                "cpu memory\n",
            ),
            (
                "sys/fs/cgroup/user.slice/cgroup.subtree_control",
                "cpu memory\n",
            ),
            ("sys/fs/cgroup/user.slice/memory.max", "3000000000\n"),
            (
                "sys/fs/cgroup/user.slice/shell.scope/cgroup.controllers",
                "cpu\n",
            ),
            (
                "sys/fs/cgroup/user.slice/shell.scope/cgroup.subtree_control",
                "\n",
            ),
        ]);
        let parent = CgroupParent::find(root.path()).expect("found");
        assert_eq!(parent.version, Version::V2);
        assert_eq!(parent.dir, root.path().join("sys/fs/cgroup/user.slice"));
        let group = parent.run_group(2_500_000_000).expect("group");
        assert_eq!(
            fs::read_to_string(group.dir.join("memory.swap.max")).expect("swap"),
            "0"
        );
        assert_eq!((group.peak_bytes(), group.oom_kills()), (None, None));
        fs::write(group.dir.join("memory.peak"), "77\n").expect("peak");
        fs::write(
            group.dir.join("memory.events"),
            "low 0\noom 3\noom_kill 2\n",
        )
        .expect("events");
        assert_eq!((group.peak_bytes(), group.oom_kills()), (Some(77), Some(2)));
        let error = parent
            .run_group(4_000_000_000)
            .expect_err("tighter above")
            .to_string();
        assert!(
            error.contains("3000000000") && error.contains("user.slice"),
            "{error}"
        );
    }

    #[test]
    fn the_controller_is_switched_on_where_possible_and_off_again() {
        let root = tree(&[
            ("proc/self/mountinfo", UNIFIED),
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/cgroup.controllers", "cpu memory\n"),
            ("sys/fs/cgroup/cgroup.subtree_control", "cpu\n"),
        ]);
        let switch = root.path().join("sys/fs/cgroup/cgroup.subtree_control");
        let parent = CgroupParent::find(root.path()).expect("found");
        assert_eq!(fs::read_to_string(&switch).expect("switch"), "+memory");
        drop(parent);
        assert_eq!(fs::read_to_string(&switch).expect("switch"), "-memory");
    }

    #[test]
    fn what_is_missing_is_said() {
        let check = |files: &[(&str, &str)], expect: &str| {
            let root = tree(files);
            let error = CgroupParent::find(root.path())
                .expect_err("nothing usable")
                .to_string();
            assert!(error.contains(expect), "{error}");
        };
        check(&[], "mountinfo");
        let group = ("proc/self/cgroup", "0::/\n");
        check(&[("proc/self/mountinfo", ""), group], "no cgroup hierarchy");
        let bare = ("sys/fs/cgroup/cgroup.controllers", "cpu\n");
        check(
            &[("proc/self/mountinfo", UNIFIED), group, bare],
            "no cgroup hierarchy",
        );
        let full = ("sys/fs/cgroup/cgroup.controllers", "memory\n");
        check(
            &[("proc/self/mountinfo", UNIFIED), group, full],
            "can be made here",
        );
        check(&[("proc/self/mountinfo", "nonsense"), group], "mountinfo");
    }
}
