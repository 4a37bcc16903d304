//! Finds our place in the cgroup hierarchies from `/proc/self/cgroup` and `/proc/self/mountinfo`.
//! Pure text work; which place really has memory files is for [`super::cgroup`] to see.

use std::path::PathBuf;

use procfs::process::MountInfo;
use procfs::{FromBufRead, ProcessCGroups};

use super::error::ParseError;

/// The deepest nesting that is followed; kernels refuse far less in practice.
pub(crate) const MAX_LEVELS: usize = 64;

/// Which interface a hierarchy has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V2,
}

/// One mount of a hierarchy in which we can see ourselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) version: Version,
    /// Where the hierarchy, or the part of it that we may see, is mounted.
    pub(crate) mount_point: PathBuf,
    /// Directory names from the mount point down to our cgroup.
    pub(crate) below: Vec<String>,
    /// Levels between the mount point and our cgroup exist whose names cannot be known from here.
    pub(crate) hidden: bool,
}

impl Place {
    /// Paths relative to the mount point, from our own cgroup up to the mount point itself.
    pub(crate) fn ascending(&self) -> impl Iterator<Item = PathBuf> {
        let depth = self.below.len();
        (0..=depth)
            .rev()
            .take(MAX_LEVELS)
            .map(|kept| self.below[..kept].iter().collect())
    }
}

/// All mounts in which we can see ourselves, of version 1's memory hierarchy and of version 2.
pub(crate) fn places(cgroup_text: &str, mountinfo_text: &str) -> Result<Vec<Place>, ParseError> {
    let ours = our_paths(cgroup_text)?;
    let mut places = Vec::new();
    for mount in mountinfo_text.lines().filter_map(cgroup_mount) {
        let Some((_, path)) = ours.iter().find(|(version, _)| *version == mount.version) else {
            continue;
        };
        if let Some((below, hidden)) = below_mount(&mount.root, path) {
            let Mount {
                version,
                mount_point,
                ..
            } = mount;
            places.push(Place {
                version,
                mount_point,
                below,
                hidden,
            });
        }
    }
    Ok(places)
}

/// Our paths in version 1's memory hierarchy and in version 2, as far as there are such.
fn our_paths(text: &str) -> Result<Vec<(Version, String)>, ParseError> {
    let mut paths = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let malformed = || ParseError::malformed(index + 1, "cgroup", line);
        let groups = ProcessCGroups::from_buf_read(line.as_bytes()).map_err(|_| malformed())?;
        for group in groups {
            if group.controllers.iter().any(|name| name == "memory") {
                paths.push((Version::V1, group.pathname));
            } else if group.hierarchy == 0 && group.controllers.is_empty() {
                paths.push((Version::V2, group.pathname));
            }
        }
    }
    Ok(paths)
}

struct Mount {
    version: Version,
    /// The cgroup that is mounted, relative to our cgroup namespace's root.
    root: String,
    mount_point: PathBuf,
}

/// A line of `mountinfo`, if it is a mount of a hierarchy that may account memory. Other lines, odd
/// ones among them, are none of our business.
fn cgroup_mount(line: &str) -> Option<Mount> {
    if !line.contains(" - cgroup") {
        return None;
    }
    let mount = MountInfo::from_line(line).ok()?;
    let version = match mount.fs_type.as_str() {
        "cgroup2" => Version::V2,
        "cgroup" if mount.super_options.contains_key("memory") => Version::V1,
        _ => return None,
    };
    let mount_point = PathBuf::from(unescape(mount.mount_point.to_str()?));
    Some(Mount {
        version,
        root: unescape(&mount.root),
        mount_point,
    })
}

/// Directory names from a mount of cgroup `root` down to cgroup `path`, and whether some are
/// hidden. `None` when `path` is not below `root`, as far as one can tell.
///
/// Both are relative to the root of our cgroup namespace and begin with `/..` for each level above
/// it. When the mount reaches above that root, the mounted cgroup is our ancestor, but the names
/// between it and the namespace's root are not told.
fn below_mount(root: &str, path: &str) -> Option<(Vec<String>, bool)> {
    let (root, path) = (components(root), components(path));
    if let Some(rest) = path.strip_prefix(root.as_slice()) {
        let inside = !rest.contains(&"..");
        return inside.then(|| (rest.iter().map(|&name| name.to_owned()).collect(), false));
    }
    let levels_up = path.iter().take_while(|&&name| name == "..").count();
    let is_ancestor = root.iter().all(|&name| name == "..") && root.len() > levels_up;
    is_ancestor.then(|| (Vec::new(), true))
}

fn components(path: &str) -> Vec<&str> {
    path.split('/')
        .filter(|name| !name.is_empty() && *name != ".")
        .collect()
}

/// Undoes `mountinfo`'s octal escapes of blanks and backslashes (`\040`).
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        out.push_str(before);
        let code = escape
            .get(1..4)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code.filter(u8::is_ascii) {
            Some(byte) => {
                out.push(char::from(byte));
                rest = &escape[4..];
            }
            None => {
                out.push('\\');
                rest = &escape[1..];
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_below(root: &str, path: &str, expect: Option<(&str, bool)>) {
        let found = below_mount(root, path).map(|(below, hidden)| (below.join("/"), hidden));
        let expect = expect.map(|(below, hidden)| (below.to_owned(), hidden));
        assert_eq!(found, expect, "mount of {root}, process in {path}");
    }

    #[test]
    fn a_path_is_placed_below_the_mount_that_shows_it() {
        check_below("/", "/", Some(("", false)));
        check_below("/", "/a/b", Some(("a/b", false)));
        // A container without a cgroup namespace whose own cgroup is bind-mounted.
        check_below("/docker/abc", "/docker/abc", Some(("", false)));
        check_below("/docker/abc", "/docker/abc/x", Some(("x", false)));
        check_below("/docker/abc", "/docker/abcd", None);
        check_below("/docker/abc", "/docker", None);
        // A cgroup namespace: the mount was made outside, so its root is above ours.
        check_below("/..", "/", Some(("", true)));
        check_below("/../..", "/..", Some(("", true)));
        check_below("/../..", "/x", Some(("", true)));
        check_below("/..", "/../x", Some(("x", false)));
        // The process was moved out of its namespace's root.
        check_below("/", "/../x", None);
        check_below("/..", "/../../x", None);
    }

    #[test]
    fn escapes_are_undone_and_broken_ones_kept() {
        for (text, expect) in [
            (r"/a\040b", "/a b"),
            (r"\134", r"\"),
            (r"/a\04", r"/a\04"),
            (r"/a\9z", r"/a\9z"),
            (r"\777", r"\777"),
            ("\\é00", "\\é00"),
        ] {
            assert_eq!(unescape(text), expect);
        }
    }

    #[test]
    fn mounts_anywhere_are_found_and_odd_lines_passed_over() {
        let mountinfo = "garbage\n\
            30 1 0:9 / /run/with\\040blank rw - cgroup cgroup rw,cpu,memory\n\
            31 1 0:8 / /run/cpu rw - cgroup cgroup rw,cpuset\n\
            32 1 0:7 / /run/unified rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let places = places("7:cpu,memory:/a:b/c\n1:name=systemd:/\n0::/u\n", mountinfo).unwrap();
        assert_eq!(places.len(), 2);
        assert_eq!(places[0].version, Version::V1);
        assert_eq!(places[0].mount_point, PathBuf::from("/run/with blank"));
        assert_eq!(places[0].below, ["a:b", "c"]);
        assert_eq!(places[1].below, ["u"]);
        let ascending: Vec<PathBuf> = places[0].ascending().collect();
        assert_eq!(
            ascending,
            [PathBuf::from("a:b/c"), PathBuf::from("a:b"), PathBuf::new()]
        );
    }

    #[test]
    fn a_malformed_cgroup_file_names_the_line() {
        let error = places("0::/\nnonsense\n", "").unwrap_err();
        assert_eq!((error.line, error.item.as_str()), (2, "cgroup"));
    }
}
