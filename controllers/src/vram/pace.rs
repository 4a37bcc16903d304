//! When changes are due: dwell after a change, quiet before growth, confirmation of what is better.

use crate::config::VramConfig;

/// Growth that is taken back within so many holds was a mistake: the hold doubles.
const REGRET_HOLDS: f64 = 4.0;

/// Yields in a row that are told apart.
const MOST_IN_A_ROW: u32 = 16;

/// Timers, in seconds of control time.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    dwell_s: f64,
    base_hold_s: f64,
    most_hold_s: f64,
    hold_s: f64,
    changed_s: f64,
    grown_s: f64,
    yielded_s: f64,
    /// Growth waits until then.
    quiet_from_s: f64,
    /// Yields that followed each other, and until when the next one does.
    in_a_row: (u32, f64),
    /// What is better, and since when.
    better: Vec<(&'static str, f64)>,
}

impl Pace {
    pub fn new(config: &VramConfig) -> Self {
        Self {
            dwell_s: config.dwell_s,
            base_hold_s: config.quiet_hold_s,
            most_hold_s: config.quiet_hold_max_s,
            hold_s: config.quiet_hold_s,
            changed_s: f64::NEG_INFINITY,
            grown_s: f64::NEG_INFINITY,
            yielded_s: f64::NEG_INFINITY,
            quiet_from_s: f64::NEG_INFINITY,
            in_a_row: (0, f64::NEG_INFINITY),
            better: Vec::new(),
        }
    }

    pub const fn reconfigure(&mut self, config: &VramConfig) {
        self.dwell_s = config.dwell_s;
        self.base_hold_s = config.quiet_hold_s;
        self.most_hold_s = config.quiet_hold_max_s;
        self.hold_s = self.hold_s.clamp(self.base_hold_s, self.most_hold_s);
    }

    /// Another arrangement is there.
    pub fn changed(&mut self, now_s: f64, grown: bool) {
        self.changed_s = now_s;
        self.quiet_from_s = self.quiet_from_s.max(now_s);
        self.better.clear();
        if grown {
            self.grown_s = now_s;
        }
    }

    /// Memory was given up. Soon after growth it was a mistake to grow.
    pub fn yielded(&mut self, now_s: f64) {
        if now_s - self.grown_s < REGRET_HOLDS * self.hold_s {
            self.hold_s = (self.hold_s * 2.0).min(self.most_hold_s);
            // One growth is regretted once.
            self.grown_s = f64::NEG_INFINITY;
        } else if now_s - self.yielded_s > 2.0 * REGRET_HOLDS * self.hold_s {
            self.hold_s = self.base_hold_s;
        }
        self.yielded_s = now_s;
        self.quiet_from_s = now_s;
        let (yields, until_s) = self.in_a_row;
        let yields = if now_s < until_s { yields + 1 } else { 1 };
        self.in_a_row = (yields.min(MOST_IN_A_ROW), now_s + self.base_hold_s);
    }

    /// How many reserves more than what is seen to be wanted should be given up: none the first time,
    /// then 1, 3, 7 while yields follow each other.
    pub fn insistence(&self, now_s: f64) -> f64 {
        let (yields, until_s) = self.in_a_row;
        if now_s < until_s {
            f64::from(yields).exp2() - 1.0
        } else {
            0.0
        }
    }

    /// A sensor went missing: growth waits as after a change.
    pub const fn blind(&mut self, now_s: f64) {
        self.quiet_from_s = now_s;
    }

    pub fn may_grow(&self, now_s: f64) -> bool {
        now_s - self.quiet_from_s >= self.hold_s
    }

    pub fn may_leave(&self, now_s: f64) -> bool {
        now_s - self.changed_s >= self.dwell_s
    }

    /// Whether an arrangement was better for long enough, up to now.
    pub fn confirmed(&mut self, now_s: f64, label: &'static str, confirm_s: f64) -> bool {
        let known = self.better.iter().find(|(better, _)| *better == label);
        let since_s = known.map(|&(_, since_s)| since_s);
        if since_s.is_none() {
            self.better.push((label, now_s));
        }
        now_s - since_s.unwrap_or(now_s) >= confirm_s
    }

    /// Forgets what is better no longer.
    pub fn unconfirm(&mut self, still: &[&str]) {
        self.better.retain(|(label, _)| still.contains(label));
    }
}
