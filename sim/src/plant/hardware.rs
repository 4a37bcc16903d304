//! A machine as `hotpin bench --calibrate` measured it.

use super::Machine;
use hotpin_controllers::PolicyKind;
use serde::Deserialize;

/// What was measured. Without a policy: rates of single calls, and decoding with everything in memory.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibrated {
    /// Memory, bytes.
    pub host_bytes: u64,
    /// Memory of the engine beside expert bytes.
    pub engine_bytes: u64,
    /// A token with everything in memory while idle threads spin, seconds.
    pub compute_s: f64,
    /// The same while they sleep soon.
    pub compute_quiet_s: f64,
    /// Exact ranges by readahead, bytes per second.
    pub fetch_bytes_per_s: f64,
    /// Until a batch of them begins, seconds.
    pub fetch_latency_s: f64,
    /// Page faults with the kernel's readahead, bytes used per second.
    pub fault_bytes_per_s: f64,
    /// Until a batch of them begins, seconds.
    pub fault_latency_s: f64,
    /// Bytes read for a byte used by such faults.
    pub fault_amplification: f64,
    /// Page faults of one page each, bytes per second.
    pub page_bytes_per_s: f64,
    /// Locking a resident byte, seconds.
    pub lock_s_per_byte: f64,
    /// Unlocking a byte, seconds.
    pub unlock_s_per_byte: f64,
    /// Dropping a byte from the page cache, seconds. It is done beside the reads of what replaces it.
    pub evict_s_per_byte: f64,
}

/// Why a calibration was refused.
#[derive(Debug, thiserror::Error)]
pub enum CalibratedError {
    /// Not TOML, or not of this form.
    #[error("{0}")]
    Syntax(#[from] Box<toml::de::Error>),
    /// A number that cannot be.
    #[error("{field} = {value} is not a usable measurement")]
    Value {
        /// The field.
        field: &'static str,
        /// What it says.
        value: f64,
    },
}

impl Calibrated {
    /// Reads a calibration.
    ///
    /// # Errors
    /// When it is no TOML, has unknown or missing keys, or a value cannot be.
    pub fn parse(text: &str) -> Result<Self, CalibratedError> {
        let found: Self = toml::from_str(text).map_err(Box::new)?;
        let positive = [
            ("compute_s", found.compute_s),
            ("compute_quiet_s", found.compute_quiet_s),
            ("fetch_bytes_per_s", found.fetch_bytes_per_s),
            ("fault_bytes_per_s", found.fault_bytes_per_s),
            ("page_bytes_per_s", found.page_bytes_per_s),
        ];
        let not_negative = [
            ("fetch_latency_s", found.fetch_latency_s),
            ("fault_latency_s", found.fault_latency_s),
            ("fault_amplification", found.fault_amplification),
            ("lock_s_per_byte", found.lock_s_per_byte),
            ("unlock_s_per_byte", found.unlock_s_per_byte),
            ("evict_s_per_byte", found.evict_s_per_byte),
        ];
        let refused = positive
            .into_iter()
            .find(|(_, value)| !(value.is_finite() && *value > 0.0))
            .or_else(|| {
                let mut values = not_negative.into_iter();
                values.find(|(_, value)| !(value.is_finite() && *value >= 0.0))
            });
        match refused {
            Some((field, value)) => Err(CalibratedError::Value { field, value }),
            None => Ok(found),
        }
    }

    /// The machine for an engine in a group of `cgroup_bytes`. How idle threads wait depends on the
    /// policy, as in the live program.
    #[must_use]
    pub fn machine(&self, cgroup_bytes: Option<u64>, kind: PolicyKind) -> Machine {
        Machine {
            host_bytes: self.host_bytes,
            cgroup_bytes,
            dense_bytes: self.engine_bytes,
            disk_bytes_per_s: self.fetch_bytes_per_s,
            fault_bytes_per_s: self.page_bytes_per_s,
            disk_latency_s: self.fetch_latency_s,
            reclaim_bytes_per_s: RECLAIM_BYTES_PER_S,
            own_refault_share: 0.0,
            compute_s: if kind == PolicyKind::Off {
                self.compute_s
            } else {
                self.compute_quiet_s
            },
            readahead_bytes_per_s: self.fault_bytes_per_s,
            readahead_latency_s: self.fault_latency_s,
            lock_s_per_byte: self.lock_s_per_byte,
            unlock_s_per_byte: self.unlock_s_per_byte,
        }
    }
}

/// Direct reclaim of clean pages. Its time is inside the rates above, which were measured in a full
/// group; this is how much of it PSI counts.
const RECLAIM_BYTES_PER_S: f64 = 4e9;
