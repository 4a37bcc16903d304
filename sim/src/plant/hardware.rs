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
    /// Exact ranges where room was made before, so that nothing is reclaimed, bytes per second.
    pub roomy_bytes_per_s: f64,
    /// Until a batch of them begins, seconds.
    pub roomy_latency_s: f64,
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
            ("roomy_bytes_per_s", found.roomy_bytes_per_s),
            ("fault_bytes_per_s", found.fault_bytes_per_s),
            ("page_bytes_per_s", found.page_bytes_per_s),
        ];
        let not_negative = [
            ("fetch_latency_s", found.fetch_latency_s),
            ("roomy_latency_s", found.roomy_latency_s),
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

    /// The machine for an engine in a group of `cgroup_bytes`. How idle threads wait and who makes
    /// room depend on the policy, as in the live program.
    #[must_use]
    pub fn machine(&self, cgroup_bytes: Option<u64>, kind: PolicyKind) -> Machine {
        // Who keeps transit makes room for it.
        let (disk_bytes_per_s, disk_latency_s) = match kind {
            PolicyKind::Lru | PolicyKind::Adaptive => {
                (self.roomy_bytes_per_s, self.roomy_latency_s)
            }
            _ => (self.fetch_bytes_per_s, self.fetch_latency_s),
        };
        Machine {
            host_bytes: self.host_bytes,
            cgroup_bytes,
            dense_bytes: self.engine_bytes,
            disk_bytes_per_s,
            fault_bytes_per_s: self.page_bytes_per_s,
            disk_latency_s,
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

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: &str = "host_bytes = 25276514304\nengine_bytes = 108373248\n\
        compute_s = 0.0182\ncompute_quiet_s = 0.0183\nfetch_bytes_per_s = 9.8e8\n\
        fetch_latency_s = 0.0004\nroomy_bytes_per_s = 1.1e9\nroomy_latency_s = 0.0003\n\
        fault_bytes_per_s = 4.5e8\nfault_latency_s = 0.0\nfault_amplification = 1.07\n\
        page_bytes_per_s = 8.6e7\nlock_s_per_byte = 7.8e-11\nunlock_s_per_byte = 4.1e-11\n\
        evict_s_per_byte = 1.2e-10\n";

    #[test]
    fn rates_depend_on_who_makes_room_and_waits() {
        let found = Calibrated::parse(MEASURED).unwrap();
        let machine = |kind| found.machine(Some(1 << 30), kind);
        assert_eq!(machine(PolicyKind::Adaptive).disk_bytes_per_s, 1.1e9);
        assert_eq!(machine(PolicyKind::Fetch).disk_bytes_per_s, 9.8e8);
        assert_eq!(machine(PolicyKind::Off).compute_s, 0.0182);
        assert_eq!(machine(PolicyKind::Static).compute_s, 0.0183);
    }

    #[test]
    fn what_cannot_be_measured_is_refused_by_name() {
        let refused = |from: &str, to: &str| {
            let text = MEASURED.replace(from, to);
            assert_ne!(text, MEASURED);
            Calibrated::parse(&text).unwrap_err().to_string()
        };
        assert!(refused("compute_s = 0.0182", "compute_s = 0.0").contains("compute_s"));
        assert!(refused("lock_s_per_byte = 7.8e-11", "lock_s_per_byte = nan").contains("lock"));
        assert!(refused("evict_s_per_byte", "drop_s_per_byte").contains("drop_s_per_byte"));
    }
}
