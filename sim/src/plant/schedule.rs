//! What other processes claim, as a function of time.

/// Bytes over time: straight lines between points, constant outside. Two points at one time are a
/// step.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    points: Vec<(f64, u64)>,
}

impl Schedule {
    /// Always the same.
    #[must_use]
    pub fn constant(bytes: u64) -> Self {
        Self {
            points: vec![(0.0, bytes)],
        }
    }

    /// Lines between points of (seconds, bytes). Points are put in order of time; with none it is 0.
    #[must_use]
    pub fn new(mut points: Vec<(f64, u64)>) -> Self {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self { points }
    }

    /// `low` bytes, and `high` bytes during each interval of (start, end) seconds.
    #[must_use]
    pub fn pulses(low: u64, high: u64, intervals: &[(f64, f64)]) -> Self {
        let mut points = vec![(0.0, low)];
        for &(start_s, end_s) in intervals {
            points.extend([(start_s, low), (start_s, high), (end_s, high), (end_s, low)]);
        }
        Self { points }
    }

    /// Bytes claimed at a time. At a step, what holds after it.
    #[must_use]
    pub fn at(&self, s: f64) -> u64 {
        let after = self.points.partition_point(|point| point.0 <= s);
        let Some(&(start_s, start)) = after.checked_sub(1).and_then(|at| self.points.get(at))
        else {
            return self.points.first().map_or(0, |point| point.1);
        };
        let Some(&(end_s, end)) = self.points.get(after) else {
            return start;
        };
        let share = (s - start_s) / (end_s - start_s);
        super::to_bytes(start as f64 + (end as f64 - start as f64) * share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_lines() {
        let pulses = Schedule::pulses(10, 50, &[(1.0, 2.0), (3.0, 4.0)]);
        let at = [0.0, 0.9, 1.0, 1.9, 2.0, 2.9, 3.5, 4.0, 99.0].map(|s| pulses.at(s));
        assert_eq!(at, [10, 10, 50, 50, 10, 10, 50, 10, 10]);
        let ramp = Schedule::new(vec![(20.0, 200), (10.0, 100)]);
        assert_eq!([5.0, 15.0, 25.0].map(|s| ramp.at(s)), [100, 150, 200]);
        assert_eq!(Schedule::new(Vec::new()).at(1.0), 0);
    }
}
