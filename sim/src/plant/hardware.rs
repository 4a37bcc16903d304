//! A machine as `hotpin bench --calibrate` measured it.

use super::{Machine, StoreKind};
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
    /// Page faults with the kernel's readahead, bytes read per second.
    pub fault_bytes_per_s: f64,
    /// Until a batch of them begins, seconds.
    pub fault_latency_s: f64,
    /// Bytes read for a byte used by such faults where nothing is cached: what is read around an expert
    /// is its neighbours', and takes up memory like everything else.
    pub fault_amplification: f64,
    /// Page faults of one page each, bytes per second.
    pub page_bytes_per_s: f64,
    /// Locking a resident byte, seconds.
    pub lock_s_per_byte: f64,
    /// Unlocking a byte, seconds.
    pub unlock_s_per_byte: f64,
    /// Dropping a byte from the page cache, seconds. It is done beside the reads of what replaces it.
    pub evict_s_per_byte: f64,
    /// A token with everything in the arena of the store `direct`, seconds. This and the next three are
    /// absent where that store cannot work.
    pub direct_compute_s: Option<f64>,
    /// Direct reads of experts into that arena while the engine waits for them, bytes per second.
    pub direct_bytes_per_s: Option<f64>,
    /// What a byte costs, beyond the read, of memory that the arena uses for the first time, seconds.
    pub direct_fresh_s_per_byte: Option<f64>,
    /// What a byte that the engine reads costs it beside the wait, seconds.
    pub direct_handling_s_per_byte: Option<f64>,
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
    /// There are no measurements of the store `direct`.
    #[error(
        "the calibration has no figures of the store direct; `hotpin bench --calibrate` measures them where it works"
    )]
    NoDirect,
}

impl Calibrated {
    /// Reads a calibration.
    ///
    /// # Errors
    /// When it is no TOML, has unknown or missing keys, or a value cannot be.
    pub fn parse(text: &str) -> Result<Self, CalibratedError> {
        let found: Self = toml::from_str(text).map_err(Box::new)?;
        let optional = |value: Option<f64>, otherwise| value.unwrap_or(otherwise);
        let direct_bytes_per_s = optional(found.direct_bytes_per_s, 1e9);
        let direct_fresh_s_per_byte = optional(found.direct_fresh_s_per_byte, 0.0);
        let direct_handling_s_per_byte = optional(found.direct_handling_s_per_byte, 0.0);
        let direct_compute_s = optional(found.direct_compute_s, 1.0);
        let (rate, time, latency, cost) = (1e3..=1e15, 1e-9..=1e5, 0.0..=1e5, 0.0..=1.0);
        let fields = [
            ("host_bytes", found.host_bytes as f64, &(1.0..=1e18)),
            ("engine_bytes", found.engine_bytes as f64, &(0.0..=1e18)),
            ("compute_s", found.compute_s, &time),
            ("compute_quiet_s", found.compute_quiet_s, &time),
            ("fetch_bytes_per_s", found.fetch_bytes_per_s, &rate),
            ("fetch_latency_s", found.fetch_latency_s, &latency),
            ("roomy_bytes_per_s", found.roomy_bytes_per_s, &rate),
            ("roomy_latency_s", found.roomy_latency_s, &latency),
            ("fault_bytes_per_s", found.fault_bytes_per_s, &rate),
            ("fault_latency_s", found.fault_latency_s, &latency),
            (
                "fault_amplification",
                found.fault_amplification,
                &(1.0..=1e3),
            ),
            ("page_bytes_per_s", found.page_bytes_per_s, &rate),
            ("lock_s_per_byte", found.lock_s_per_byte, &cost),
            ("unlock_s_per_byte", found.unlock_s_per_byte, &cost),
            ("evict_s_per_byte", found.evict_s_per_byte, &cost),
            ("direct_compute_s", direct_compute_s, &time),
            ("direct_bytes_per_s", direct_bytes_per_s, &rate),
            ("direct_fresh_s_per_byte", direct_fresh_s_per_byte, &cost),
            (
                "direct_handling_s_per_byte",
                direct_handling_s_per_byte,
                &cost,
            ),
        ];
        // NaN lies in no range.
        let refused = fields
            .into_iter()
            .find(|(_, value, range)| !range.contains(value));
        match refused {
            Some((field, value, _)) => Err(CalibratedError::Value { field, value }),
            None => Ok(found),
        }
    }

    /// The machine for an engine in a group of `cgroup_bytes`. How idle threads wait and who makes
    /// room depend on the policy, as in the live program; `off` uses no store.
    ///
    /// # Errors
    /// [`CalibratedError::NoDirect`].
    pub fn machine(
        &self,
        cgroup_bytes: Option<u64>,
        kind: PolicyKind,
        store: StoreKind,
    ) -> Result<Machine, CalibratedError> {
        let mut machine = self.mapped(cgroup_bytes, kind);
        if store == StoreKind::Direct && kind != PolicyKind::Off {
            let known = |value: Option<f64>| value.ok_or(CalibratedError::NoDirect);
            machine.compute_s = known(self.direct_compute_s)?;
            machine.disk_bytes_per_s = known(self.direct_bytes_per_s)?;
            machine.fresh_s_per_byte = known(self.direct_fresh_s_per_byte)?;
            machine.handling_s_per_byte = known(self.direct_handling_s_per_byte)?;
            // Several reads are always under way.
            machine.disk_latency_s = 0.0;
            // What is in the arena is locked already; pins are entries in the books.
            machine.lock_s_per_byte = 0.0;
            machine.unlock_s_per_byte = 0.0;
        }
        Ok(machine)
    }

    fn mapped(&self, cgroup_bytes: Option<u64>, kind: PolicyKind) -> Machine {
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
            readahead_amplification: self.fault_amplification,
            lock_s_per_byte: self.lock_s_per_byte,
            unlock_s_per_byte: self.unlock_s_per_byte,
            fresh_s_per_byte: 0.0,
            handling_s_per_byte: 0.0,
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
        let machine = |kind| {
            let machine = found.machine(Some(1 << 30), kind, StoreKind::Mapped);
            machine.unwrap()
        };
        assert_eq!(machine(PolicyKind::Adaptive).disk_bytes_per_s, 1.1e9);
        assert_eq!(machine(PolicyKind::Fetch).disk_bytes_per_s, 9.8e8);
        assert_eq!(machine(PolicyKind::Off).compute_s, 0.0182);
        assert_eq!(machine(PolicyKind::Static).compute_s, 0.0183);
    }

    #[test]
    fn the_store_direct_needs_its_own_figures() {
        let found = Calibrated::parse(MEASURED).unwrap();
        let refused = found.machine(None, PolicyKind::Fetch, StoreKind::Direct);
        assert!(matches!(refused, Err(CalibratedError::NoDirect)));
        let off = found.machine(None, PolicyKind::Off, StoreKind::Direct);
        assert_eq!(off.unwrap().compute_s, 0.0182, "off uses no store");
        let more = "direct_compute_s = 0.017\ndirect_bytes_per_s = 2.1e9\n\
                    direct_fresh_s_per_byte = 1e-9\ndirect_handling_s_per_byte = 2e-10\n";
        let found = Calibrated::parse(&format!("{MEASURED}{more}")).unwrap();
        let machine = found.machine(None, PolicyKind::Fetch, StoreKind::Direct);
        let machine = machine.unwrap();
        assert_eq!(machine.disk_bytes_per_s, 2.1e9);
        assert_eq!(machine.compute_s, 0.017);
        assert_eq!(machine.fresh_s_per_byte, 1e-9);
        assert_eq!(machine.handling_s_per_byte, 2e-10);
        assert_eq!(machine.lock_s_per_byte, 0.0);
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
        assert!(refused("page_bytes_per_s = 8.6e7", "page_bytes_per_s = 1e-300").contains("page"));
        assert!(refused("fetch_latency_s = 0.0004", "fetch_latency_s = 1e300").contains("fetch"));
        assert!(refused("host_bytes = 25276514304", "host_bytes = 0").contains("host_bytes"));
    }
}
