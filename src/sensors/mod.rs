//! Sensors: readers of `/proc`, `/sys`, pressure stall information and cgroups.
//!
//! Every reader looks below an injectable [`Roots`], and everything it reads may be absent: what
//! cannot be read is `None` in the [`Sample`] and a named [`Degraded`] state with its reason, never
//! a zero. [`Sensors`] keeps files open and reads them again each tick; [`system_summary`] is the
//! one-off view for reports.
#![forbid(unsafe_code)]

mod block;
mod cgroup;
mod cgroup_paths;
mod degraded;
mod error;
mod host;
mod live;
mod maps;
mod roots;
mod source;
mod summary;
mod text;
#[cfg(test)]
mod text_tests;

pub use block::{
    ReadAhead, device_of, read_ahead, read_ahead_kb, read_ahead_kb_of_device,
    readahead_request_bytes,
};
pub use cgroup::CgroupLevel;
pub use degraded::{Degraded, DegradedReason, DegradedSet};
pub use error::{ParseError, Problem, SensorError};
pub use host::{Container, HostSettings, SwapArea, host_settings};
pub use live::{Available, Locks, Sample, Sensors};
pub use maps::map_count;
pub use roots::Roots;
pub use summary::{SystemSummary, system_summary};
pub use text::{Meminfo, Vmstat};
