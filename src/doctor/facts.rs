//! What the checks are made from.

use super::DeviceFact;
use crate::files::folder_of;
use crate::model::{Demand, ModelMap};
use crate::sensors::{
    CgroupLevel, DegradedReason, HostSettings, ReadAhead, Roots, Sample, SensorError, Sensors,
    device_of, host_settings, map_count, read_ahead,
};
use crate::store::DiskTrial;
use hotpin_controllers::{AdaptiveConfig, Moment};
use std::path::{Path, PathBuf};

/// The model, and who asks.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The model's first file.
    pub model: PathBuf,
    /// What the model asks of memory.
    pub demand: Demand,
    /// Slices of experts, each of which may become a mapping of its own when it is locked.
    pub slices: u64,
    /// Device that the model lies on.
    pub device: Option<(u64, u64)>,
    /// The program, for commands that are about it.
    pub program: PathBuf,
    /// This user may do everything, so that commands need no `sudo`.
    pub root: bool,
}

impl Subject {
    /// A model that was read.
    #[must_use]
    pub fn new(map: &ModelMap, program: PathBuf) -> Self {
        let slices_in = |layer: &crate::model::MoeLayer| {
            u64::from(layer.experts).saturating_mul(layer.parts.len() as u64)
        };
        Self {
            model: map.path().to_owned(),
            demand: Demand::of(map),
            slices: map.layers().iter().map(slices_in).sum(),
            device: device_of(map.path()).ok(),
            program,
            root: nix::unistd::geteuid().is_root(),
        }
    }

    /// The folder that the model lies in.
    pub(super) fn folder(&self) -> &Path {
        folder_of(&self.model)
    }
}

/// Room on a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    /// A folder on it.
    pub folder: PathBuf,
    /// Bytes that this user may still write.
    pub free_bytes: u64,
}

impl Space {
    /// Looks at the file system that `folder` lies on.
    ///
    /// # Errors
    /// When there is no such folder.
    pub fn at(folder: &Path) -> nix::Result<Self> {
        let found = nix::sys::statvfs::statvfs(folder)?;
        Ok(Self {
            folder: folder.to_owned(),
            free_bytes: found
                .blocks_available()
                .saturating_mul(found.fragment_size()),
        })
    }
}

/// Everything that was read of the machine.
#[derive(Debug)]
pub struct Facts {
    /// The sensors' sample.
    pub sample: Sample,
    /// What the sensors cannot tell.
    pub degraded: Vec<DegradedReason>,
    /// Every cgroup level above us, nearest first.
    pub levels: Vec<Result<CgroupLevel, SensorError>>,
    /// Settings of the machine.
    pub host: HostSettings,
    /// Mappings of this process now.
    pub mappings: Result<u64, SensorError>,
    /// Readahead of the model's device.
    pub read_ahead: Option<Result<ReadAhead, SensorError>>,
    /// How the disk was read, or why it could not be.
    pub disk: Result<DiskTrial, String>,
    /// File systems that are read or written.
    pub spaces: Vec<Space>,
    /// To be left to others on the host and in a cgroup, bytes.
    pub reserves: (u64, u64),
    /// Graphics devices, or why none can be used; `None` where nobody looked.
    pub devices: Option<Result<Vec<DeviceFact>, String>>,
}

impl Facts {
    /// Reads the machine below `roots`. The disk was tried before, and the folders to look at are given,
    /// since both are about real files.
    #[must_use]
    pub fn read(
        roots: &Roots,
        subject: &Subject,
        disk: Result<DiskTrial, String>,
        spaces: Vec<Space>,
    ) -> Self {
        let now = Moment::default();
        let mut sensors = Sensors::open(roots, now);
        let control = AdaptiveConfig::default().capacity;
        Self {
            sample: sensors.sample(now),
            degraded: sensors.degraded(),
            levels: sensors.cgroup_levels(),
            host: host_settings(roots),
            mappings: map_count(roots),
            read_ahead: subject
                .device
                .map(|(major, minor)| read_ahead(roots, major, minor)),
            disk,
            spaces,
            reserves: (control.host_reserve_bytes, control.cgroup_reserve_bytes),
            devices: None,
        }
    }

    /// What weights may take on the host and in the tightest cgroup, after the reserves; `None` when
    /// neither is known.
    pub(super) fn usable_bytes(&self) -> Option<u64> {
        self.sample.usable_bytes(self.reserves.0, self.reserves.1)
    }

    /// Bytes of swap in all; `None` when that is not known.
    pub(super) fn swap_bytes(&self) -> Option<u64> {
        let swaps = self.host.swaps.as_ref().ok()?;
        Some(swaps.iter().map(|area| area.bytes).sum())
    }
}
