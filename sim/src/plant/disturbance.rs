//! What goes wrong in a run, and when. Times are seconds of virtual time, ends are excluded.

/// A sensor that may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sensor {
    /// Host memory.
    Host,
    /// PSI and reclaim counters.
    Pressure,
    /// Engine totals and routing counts.
    Engine,
}

/// Everything that goes wrong.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Disturbances {
    /// The sensors' clock jumps at a time by so many seconds.
    pub clock_jumps: Vec<(f64, f64)>,
    /// A sensor says nothing from one time to another.
    pub dropouts: Vec<(Sensor, f64, f64)>,
    /// What the sensors of memory say is so many ticks old.
    pub delay_ticks: usize,
    /// Every lock fails from one time to another.
    pub failed_locks: Vec<(f64, f64)>,
    /// The disk runs at a share of its speed from one time to another.
    pub slow_disk: Vec<(f64, f64, f64)>,
    /// A prompt of so many tokens is read in one batch, in order of time.
    pub prefills: Vec<(f64, u32)>,
}

impl Disturbances {
    /// By how much the clock has jumped.
    pub(super) fn clock_s(&self, at_s: f64) -> f64 {
        let past = self.clock_jumps.iter().filter(|jump| jump.0 <= at_s);
        past.map(|jump| jump.1).sum()
    }

    pub(super) fn is_blind(&self, sensor: Sensor, at_s: f64) -> bool {
        self.dropouts
            .iter()
            .any(|&(which, from_s, to_s)| which == sensor && (from_s..to_s).contains(&at_s))
    }

    pub(super) fn locks_fail(&self, at_s: f64) -> bool {
        self.failed_locks
            .iter()
            .any(|&(from_s, to_s)| (from_s..to_s).contains(&at_s))
    }

    /// Share of the disk's speed.
    pub(super) fn disk_speed(&self, at_s: f64) -> f64 {
        let slow = self.slow_disk.iter();
        slow.filter(|&&(from_s, to_s, _)| (from_s..to_s).contains(&at_s))
            .map(|&(_, _, share)| share)
            .fold(1.0, f64::min)
    }
}
