//! Memory of the cgroups above us, every level up to the mount.

use std::fs;
use std::io;
use std::path::PathBuf;

use hotpin_controllers::CgroupMemory;
use serde::Serialize;

use super::cgroup_paths::{Place, Version, places};
use super::error::SensorError;
use super::roots::Roots;
use super::source::{Sensor, Source, read_once};
use super::text::{self, CgroupStat, Psi};

/// One cgroup level, read now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CgroupLevel {
    /// The level's directory.
    pub path: PathBuf,
    /// `memory.max`, or `memory.high` when lower, or version 1's `memory.limit_in_bytes`, bytes;
    /// `None` when unlimited.
    pub limit_bytes: Option<u64>,
    /// The file that sets this limit, or could.
    pub limit_file: PathBuf,
    /// Bytes charged to the level and all below it, locked pages and page cache included.
    pub usage_bytes: u64,
    /// Bytes of file pages that the kernel can drop (inactive and active lists; locked pages are on
    /// neither).
    pub reclaimable_file_bytes: u64,
    /// `limit - usage + reclaimable`, at most the limit; `None` when unlimited.
    pub available_bytes: Option<u64>,
}

/// A limited level, as read in one tick.
#[derive(Clone, Copy, Debug)]
struct Limited {
    memory: CgroupMemory,
    stat: CgroupStat,
}

/// The pressure of our nearest limited cgroup.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CgroupPressure {
    /// Which level it comes from; stable between rescans.
    pub(crate) level: usize,
    pub(crate) psi: Psi,
    pub(crate) direct_steal_pages: Option<u64>,
}

/// What one tick learns from the cgroups.
#[derive(Debug, Default)]
pub(crate) struct CgroupReading {
    pub(crate) tightest: Option<(usize, CgroupMemory)>,
    pub(crate) pressure: Option<CgroupPressure>,
    /// The first level that could not be read, if any.
    pub(crate) skipped: Option<SensorError>,
}

/// The levels above us, nearest first.
#[derive(Debug)]
pub(crate) struct Cgroups {
    roots: Roots,
    self_cgroup: Source,
    mountinfo: Source,
    levels: Vec<Level>,
    hidden: bool,
}

impl Cgroups {
    pub(crate) fn new(roots: &Roots) -> Self {
        Self {
            roots: roots.clone(),
            self_cgroup: Source::new(roots.in_proc("self/cgroup")),
            mountinfo: Source::new(roots.in_proc("self/mountinfo")),
            levels: Vec::new(),
            hidden: false,
        }
    }

    /// Directory of a level.
    pub(crate) fn path(&self, level: usize) -> Option<&PathBuf> {
        self.levels.get(level).map(|level| &level.directory)
    }

    /// Whether a namespace hides levels between the mount and us.
    pub(crate) fn hides_levels(&self) -> bool {
        self.hidden
    }

    /// Finds the levels anew; the process may have been moved. `Ok(false)` when no hierarchy with
    /// memory files can be seen. Levels that are still there keep their files open. Where it cannot be
    /// told which level is ours, those found before stay, unless what tells it has gone.
    pub(crate) fn rescan(&mut self, buffer: &mut Vec<u8>) -> Result<bool, SensorError> {
        self.self_cgroup.reopen();
        self.mountinfo.reopen();
        let (mut levels, hidden) = match self.find(buffer) {
            Ok(found) => found,
            Err(error) => {
                if error.is_absent() {
                    self.levels.clear();
                    self.hidden = false;
                }
                return Err(error);
            }
        };
        for level in &mut levels {
            let known = self.levels.iter().position(|l| l.is_at(level));
            if let Some(at) = known {
                *level = self.levels.swap_remove(at);
                level.reopen();
            }
        }
        self.levels = levels;
        self.hidden = hidden;
        Ok(!self.levels.is_empty())
    }

    /// The levels above us, nearest first, and whether others are hidden.
    fn find(&mut self, buffer: &mut Vec<u8>) -> Result<(Vec<Level>, bool), SensorError> {
        let cgroup_text = self.self_cgroup.read(buffer)?.into_owned();
        let mountinfo_text = self.mountinfo.read(buffer)?;
        let places = places(&cgroup_text, &mountinfo_text)
            .map_err(|e| SensorError::parse(self.self_cgroup.path(), e))?;
        // The memory controller lives in one hierarchy only; of several mounts of it, the one
        // that shows most levels is the most telling.
        let mut found = (Vec::new(), false);
        for place in places {
            let levels = levels_of(&self.roots, &place);
            if levels.len() > found.0.len() {
                found = (levels, place.hidden);
            }
        }
        Ok(found)
    }

    /// Reads every limited level. A level that cannot be read is passed over.
    pub(crate) fn read(&mut self, buffer: &mut Vec<u8>) -> CgroupReading {
        let mut reading = CgroupReading::default();
        for (index, level) in self.levels.iter_mut().enumerate() {
            let limited = match level.read_limited(buffer) {
                Ok(Some(limited)) => limited,
                Ok(None) => continue,
                Err(error) => {
                    reading.skipped.get_or_insert(error);
                    continue;
                }
            };
            let available = limited.memory.available_bytes;
            if reading
                .tightest
                .is_none_or(|(_, t)| available < t.available_bytes)
            {
                reading.tightest = Some((index, limited.memory));
            }
            if reading.pressure.is_none() {
                let direct_steal_pages = limited.stat.direct_steal_pages;
                let psi = level.pressure.as_mut().and_then(|p| p.read(buffer).ok());
                reading.pressure = psi.map(|psi| CgroupPressure {
                    level: index,
                    psi,
                    direct_steal_pages,
                });
            }
        }
        reading
    }

    /// Reads every level, unlimited ones too.
    pub(crate) fn all_levels(
        &mut self,
        buffer: &mut Vec<u8>,
    ) -> Vec<Result<CgroupLevel, SensorError>> {
        self.levels
            .iter_mut()
            .map(|level| level.read_all(buffer))
            .collect()
    }
}

/// The levels of one mount that have memory files, nearest first. A level without them (version 2's
/// root, or where the controller is not enabled) limits nothing.
fn levels_of(roots: &Roots, place: &Place) -> Vec<Level> {
    let mount = roots.mounted(&place.mount_point);
    let mut levels: Vec<Level> = Vec::new();
    for below in place.ascending() {
        let directory = if below.as_os_str().is_empty() {
            mount.clone()
        } else {
            mount.join(below)
        };
        // Without version 1's use_hierarchy, a child is not charged to its parent.
        if place.version == Version::V1 && !levels.is_empty() {
            let inherits = read_once(directory.join("memory.use_hierarchy"), text::single_number);
            if matches!(inherits, Ok(0)) {
                break;
            }
        }
        levels.extend(Level::at(directory, place.version));
    }
    levels
}

/// The files of one level.
#[derive(Debug)]
struct Level {
    directory: PathBuf,
    limit: Sensor<Option<u64>>,
    /// Version 2's soft ceiling, where the kernel throttles and reclaims.
    high: Option<Sensor<Option<u64>>>,
    usage: Sensor<u64>,
    stat: Sensor<CgroupStat>,
    pressure: Option<Sensor<Psi>>,
}

impl Level {
    /// The level at `directory`, if it has memory files; files that are there but not readable
    /// count, so that they get reported.
    fn at(directory: PathBuf, version: Version) -> Option<Self> {
        let file = |name: &str| directory.join(name);
        let limit_name = match version {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        };
        match fs::metadata(file(limit_name)) {
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                return None;
            }
            _ => {}
        }
        Some(match version {
            Version::V1 => Self {
                limit: Sensor::new(file(limit_name), text::v1_limit),
                high: None,
                usage: Sensor::new(file("memory.usage_in_bytes"), text::single_number),
                stat: Sensor::new(file("memory.stat"), text::v1_stat),
                pressure: None,
                directory,
            },
            Version::V2 => Self {
                limit: Sensor::new(file(limit_name), text::v2_limit),
                high: Some(Sensor::new(file("memory.high"), text::v2_limit)),
                usage: Sensor::new(file("memory.current"), text::single_number),
                stat: Sensor::new(file("memory.stat"), text::v2_stat),
                pressure: Some(Sensor::new(file("memory.pressure"), text::psi)),
                directory,
            },
        })
    }

    /// Whether both are the same level of the same kind of hierarchy.
    fn is_at(&self, other: &Self) -> bool {
        self.limit.path() == other.limit.path()
    }

    /// The cgroup may have been removed and made again.
    fn reopen(&mut self) {
        self.limit.reopen();
        self.usage.reopen();
        self.stat.reopen();
        if let Some(high) = &mut self.high {
            high.reopen();
        }
        if let Some(pressure) = &mut self.pressure {
            pressure.reopen();
        }
    }

    fn read_limit(&mut self, buffer: &mut Vec<u8>) -> Result<Option<u64>, SensorError> {
        let (hard, soft) = self.read_limits(buffer)?;
        Ok(hard.into_iter().chain(soft).min())
    }

    /// The hard and the soft limit.
    fn read_limits(
        &mut self,
        buffer: &mut Vec<u8>,
    ) -> Result<(Option<u64>, Option<u64>), SensorError> {
        let hard = self.limit.read(buffer)?;
        let soft = match self.high.as_mut().map(|high| high.read(buffer)) {
            Some(Err(error)) if !error.is_absent() => return Err(error),
            Some(Ok(soft)) => soft,
            _ => None,
        };
        Ok((hard, soft))
    }

    /// Usage is read only where there is a limit to compare it with.
    fn read_limited(&mut self, buffer: &mut Vec<u8>) -> Result<Option<Limited>, SensorError> {
        let Some(limit_bytes) = self.read_limit(buffer)? else {
            return Ok(None);
        };
        let usage_bytes = self.usage.read(buffer)?;
        let stat = self.stat.read(buffer)?;
        let available_bytes = available(limit_bytes, usage_bytes, stat.reclaimable_file_bytes);
        Ok(Some(Limited {
            memory: CgroupMemory {
                limit_bytes,
                available_bytes,
            },
            stat,
        }))
    }

    fn read_all(&mut self, buffer: &mut Vec<u8>) -> Result<CgroupLevel, SensorError> {
        let (hard, soft) = self.read_limits(buffer)?;
        let limit_bytes = hard.into_iter().chain(soft).min();
        let binding = match &self.high {
            Some(high) if soft.is_some() && soft == limit_bytes && soft != hard => high,
            _ => &self.limit,
        };
        let limit_file = binding.path().to_owned();
        let usage_bytes = self.usage.read(buffer)?;
        let reclaimable_file_bytes = self.stat.read(buffer)?.reclaimable_file_bytes;
        Ok(CgroupLevel {
            path: self.directory.clone(),
            limit_bytes,
            limit_file,
            usage_bytes,
            reclaimable_file_bytes,
            available_bytes: limit_bytes
                .map(|limit| available(limit, usage_bytes, reclaimable_file_bytes)),
        })
    }
}

/// `limit - usage + reclaimable`, from 0 to the limit. Usage above a limit (`memory.high` may be
/// exceeded) takes from what could be reclaimed.
fn available(limit_bytes: u64, usage_bytes: u64, reclaimable_bytes: u64) -> u64 {
    limit_bytes
        .saturating_add(reclaimable_bytes)
        .saturating_sub(usage_bytes)
        .min(limit_bytes)
}
