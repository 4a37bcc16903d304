//! Sums that fade with the tokens that come after.

/// A mean that fades with tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mean {
    pub tokens: f64,
    pub sum: f64,
    /// When it was last added to, seconds.
    pub at_s: f64,
}

impl Mean {
    pub fn add(&mut self, value: f64, tokens: f64, half_life: f64, now_s: f64) {
        let fade = (-tokens / half_life).exp2();
        self.tokens = self.tokens * fade + tokens;
        self.sum = self.sum * fade + value * tokens;
        self.at_s = now_s;
    }

    pub fn get(&self, least_tokens: f64) -> Option<f64> {
        (self.tokens >= least_tokens && self.tokens > 0.0).then(|| self.sum / self.tokens)
    }
}

/// Sums for the slope of time over uploaded bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    /// Tokens.
    pub n: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl Sums {
    pub fn add(&mut self, x: f64, y: f64, tokens: f64, half_life: f64) {
        let fade = (-tokens / half_life).exp2();
        for (sum, value) in [
            (&mut self.n, 1.0),
            (&mut self.x, x),
            (&mut self.y, y),
            (&mut self.xx, x * x),
            (&mut self.xy, x * y),
        ] {
            *sum = *sum * fade + value * tokens;
        }
    }

    /// Tokens times variance of x, and times covariance; and tokens times the square of x's mean.
    pub fn spread(&self) -> (f64, f64, f64) {
        if self.n <= 0.0 {
            return (0.0, 0.0, 0.0);
        }
        let mean = self.x / self.n;
        let variance = (self.xx - self.x * mean).max(0.0);
        (variance, self.xy - self.y * mean, self.n * mean * mean)
    }
}
