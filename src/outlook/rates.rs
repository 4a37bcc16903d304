//! What this machine does in which time, as `hotpin bench --calibrate` measured it.

use super::Range;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The figures of a calibration that an outlook needs. The file has more.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Rates {
    /// Memory beside expert bytes.
    engine_bytes: u64,
    /// A token with everything in memory while idle threads sleep soon, seconds.
    compute_quiet_s: f64,
    /// Exact ranges by readahead where room was made before, bytes per second.
    roomy_bytes_per_s: f64,
    /// A token with everything in the arena of store direct, seconds.
    direct_compute_s: Option<f64>,
    /// That store's reads, bytes per second.
    direct_bytes_per_s: Option<f64>,
}

/// Why a calibration was refused.
#[derive(Debug, thiserror::Error)]
pub enum RatesError {
    /// The file could not be read.
    #[error("calibration {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is no calibration.
    #[error("{} is no calibration as `hotpin bench --calibrate` writes it: {detail}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
}

impl Rates {
    /// Reads a calibration.
    ///
    /// # Errors
    /// [`RatesError`], see there.
    pub fn load(path: &Path) -> Result<Self, RatesError> {
        let text = std::fs::read_to_string(path).map_err(|source| RatesError::Io {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text).map_err(|detail| RatesError::Malformed {
            path: path.to_owned(),
            detail,
        })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let found: Self = toml::from_str(text).map_err(|e| e.to_string())?;
        let usable = |value: f64| value.is_finite() && value > 0.0;
        let figures = [
            ("compute_quiet_s", Some(found.compute_quiet_s)),
            ("roomy_bytes_per_s", Some(found.roomy_bytes_per_s)),
            ("direct_compute_s", found.direct_compute_s),
            ("direct_bytes_per_s", found.direct_bytes_per_s),
        ];
        match figures
            .into_iter()
            .find(|(_, value)| value.is_some_and(|value| !usable(value)))
        {
            Some((name, _)) => Err(format!("{name} must be above 0")),
            None => Ok(found),
        }
    }

    /// Memory that the engine needs beside dense weights and experts, bytes.
    #[must_use]
    pub fn buffer_bytes(&self, dense_bytes: u64) -> u64 {
        self.engine_bytes.saturating_sub(dense_bytes)
    }

    /// Seconds a token takes to compute, and bytes a second that are read: store direct's where it works.
    fn of_store(&self) -> (f64, f64) {
        match (self.direct_compute_s, self.direct_bytes_per_s) {
            (Some(compute), Some(bytes)) => (compute, bytes),
            _ => (self.compute_quiet_s, self.roomy_bytes_per_s),
        }
    }

    /// Tokens a second for these hits: at worst every read is waited for, at best it is hidden behind
    /// computing as far as that reaches.
    #[must_use]
    pub fn tok_s(&self, token_cycle_bytes: u64, hits: Range) -> Range {
        let (compute_s, bytes_per_s) = self.of_store();
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let read_s = |hits: f64| token_cycle_bytes as f64 * (1.0 - hits) / bytes_per_s;
        Range {
            low: 1.0 / (compute_s + read_s(hits.low)),
            high: 1.0 / compute_s.max(read_s(hits.high)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: &str = "host_bytes = 1\nengine_bytes = 1000\ncompute_s = 0.5\n\
        compute_quiet_s = 0.02\nroomy_bytes_per_s = 1e9\nevict_s_per_byte = 1e-10\n";

    #[test]
    fn speed_lies_between_waiting_for_all_and_hiding_all() {
        let hits = Range {
            low: 0.8,
            high: 0.9,
        };
        let range = Rates::parse(MEASURED).unwrap().tok_s(100_000_000, hits);
        // 20 ms of computing, 20 ms of reading at worst, 10 ms at best.
        assert!((range.low - 25.0).abs() < 1e-9, "{range:?}");
        assert!((range.high - 50.0).abs() < 1e-9, "{range:?}");
        let direct = format!("{MEASURED}direct_compute_s = 0.01\ndirect_bytes_per_s = 2e9\n");
        let range = Rates::parse(&direct).unwrap().tok_s(100_000_000, hits);
        assert!((range.low - 50.0).abs() < 1e-9, "{range:?}");
        assert!((range.high - 100.0).abs() < 1e-9, "{range:?}");
    }

    #[test]
    fn figures_that_cannot_be_are_refused_by_name() {
        for (name, value) in [("compute_quiet_s", "0.02"), ("roomy_bytes_per_s", "1e9")] {
            let text = MEASURED.replace(&format!("{name} = {value}"), &format!("{name} = 0.0"));
            assert!(Rates::parse(&text).unwrap_err().contains(name));
            let text = MEASURED.replace(name, "other");
            assert!(Rates::parse(&text).unwrap_err().contains(name));
        }
        assert_eq!(Rates::parse(MEASURED).unwrap().buffer_bytes(400), 600);
    }
}
