//! Which store is faster here, by measurement.

use super::ExpertStore;
use super::probe::{Arrival, Probe};
use crate::model::ModelMap;
use hotpin_controllers::ExpertId;
use std::fmt;
use std::io;
use std::time::Duration;

/// How long the page cache's speed is measured, of arrivals alone.
const MEASURED_FOR: Duration = Duration::from_millis(60);
/// Experts that arrive at once.
const AT_ONCE: usize = 4;
/// From one batch to the next: a prime, so that batches lie all over the file.
const STRIDE: usize = 7919;
/// Batches that are looked at to find some that are not cached.
const MOST_BATCHES: usize = 200;

/// How much faster the page cache has to be, since what comes through it costs reclaim and locks later on
/// (docs/performance.md: at equal reads a session on `mapped` was slower by a third).
const MAPPED_MARGIN: f64 = 1.3;

/// Bytes a second by which experts that are not in memory become usable.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speeds {
    /// Of store `direct`; `None` where it could not be measured.
    pub direct: Option<f64>,
    /// Of store `mapped`; `None` where nothing was found that is not cached.
    pub mapped: Option<f64>,
}

impl Speeds {
    /// Measures both. What was brought into the page cache is dropped again.
    #[must_use]
    pub fn measure(
        map: &ModelMap,
        direct: &dyn ExpertStore,
        piece_bytes: usize,
        threads: usize,
    ) -> Self {
        Self {
            mapped: time_arrivals(map, piece_bytes, threads).ok().flatten(),
            direct: direct.read_bandwidth(),
        }
    }

    /// Whether store `mapped` is so much faster that it makes up for what else it costs.
    #[must_use]
    pub fn prefer_mapped(&self) -> bool {
        match (self.direct, self.mapped) {
            (Some(direct), Some(mapped)) => mapped > direct * MAPPED_MARGIN,
            _ => false,
        }
    }
}

impl fmt::Display for Speeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let speed = |speed: Option<f64>, unknown: &str| {
            speed.map_or_else(
                || unknown.to_owned(),
                |speed| format!("{:.2} GB/s", speed / 1e9),
            )
        };
        write!(
            f,
            "O_DIRECT reads {}, the page cache {}",
            speed(self.direct, "at an unknown speed"),
            speed(self.mapped, "not measured, since the file is in it"),
        )
    }
}

/// Bytes a second by which cold experts arrive through the page cache, as store `mapped` fetches them; `None`
/// where none was found cold.
fn time_arrivals(map: &ModelMap, piece_bytes: usize, threads: usize) -> io::Result<Option<f64>> {
    let probe = Probe::open(map)?;
    let shape = map.shape();
    let experts = shape.total_experts();
    let (mut bytes, mut spent) = (0_u64, Duration::ZERO);
    for batch in 0..MOST_BATCHES {
        if spent >= MEASURED_FOR || experts == 0 {
            break;
        }
        let at = |number: usize| (batch * AT_ONCE + number) * STRIDE % experts;
        let mut ids: Vec<ExpertId> = (0..AT_ONCE.min(experts))
            .filter_map(|number| u32::try_from(at(number)).ok().map(ExpertId))
            .collect();
        ids.dedup();
        if !probe.is_cold(&ids)? {
            continue;
        }
        spent += probe.arrive(&ids, Arrival::Fetched(piece_bytes), threads.max(1))?;
        bytes += ids.iter().map(|&id| shape.bytes(id)).sum::<u64>();
        let _ = probe.evict(&ids);
    }
    #[expect(clippy::cast_precision_loss, reason = "some hundred MB")]
    let bytes = bytes as f64;
    Ok((bytes > 0.0).then(|| bytes / spent.as_secs_f64().max(1e-9)))
}

#[cfg(test)]
mod tests {
    use super::Speeds;

    #[test]
    fn only_a_much_faster_page_cache_is_preferred() {
        let speeds = |direct, mapped| Speeds { direct, mapped };
        assert!(speeds(Some(1e9), Some(1.4e9)).prefer_mapped());
        assert!(!speeds(Some(1e9), Some(1.2e9)).prefer_mapped());
        assert!(!speeds(Some(1e9), None).prefer_mapped());
        assert!(!speeds(None, Some(1e9)).prefer_mapped());
        assert_eq!(
            speeds(Some(1.5e9), None).to_string(),
            "O_DIRECT reads 1.50 GB/s, the page cache not measured, since the file is in it"
        );
    }
}
