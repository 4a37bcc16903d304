//! A cache size as given on the command line.

use std::str::FromStr;

/// Experts that a cache holds: a share of the model or a count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Capacity {
    /// Percent of all experts, rounded down.
    Percent(f64),
    /// A number of experts.
    Experts(u32),
}

/// Why a capacity was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CapacityError {
    /// Neither a count nor a percentage.
    #[error("capacity {given:?} is neither a number of experts nor a percentage such as 25%")]
    Syntax {
        /// What was given.
        given: String,
    },
    /// It comes to no expert, or to more than there are.
    #[error("a capacity of {experts} experts does not lie between 1 and the model's {total}")]
    Range {
        /// Experts asked for.
        experts: u64,
        /// Experts of the model.
        total: usize,
    },
}

impl FromStr for Capacity {
    type Err = CapacityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = match text.strip_suffix('%') {
            Some(percent) => percent
                .parse()
                .ok()
                .filter(|percent: &f64| percent.is_finite() && (0.0..=100.0).contains(percent))
                .map(Self::Percent),
            None => text.parse().ok().map(Self::Experts),
        };
        parsed.ok_or_else(|| CapacityError::Syntax {
            given: text.to_owned(),
        })
    }
}

impl Capacity {
    /// The number of experts of a model with `total` of them.
    ///
    /// # Errors
    /// When it is 0 or more than `total`.
    pub fn experts(self, total: usize) -> Result<usize, CapacityError> {
        let experts = match self {
            Self::Experts(experts) => experts as usize,
            // The largest count whose share does not exceed the percentage, free of rounding.
            Self::Percent(percent) => (0..=total)
                .rfind(|&n| n as f64 * 100.0 <= percent * total as f64)
                .unwrap_or(0),
        };
        if experts == 0 || experts > total {
            return Err(CapacityError::Range {
                experts: experts as u64,
                total,
            });
        }
        Ok(experts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_round_down_and_nonsense_is_refused() {
        let experts = |text: &str| text.parse::<Capacity>().map(|c| c.experts(768));
        let cases = [
            ("15%", 115),
            ("25%", 192),
            ("40%", 307),
            ("50%", 384),
            ("100%", 768),
            ("7", 7),
        ];
        for (text, expected) in cases {
            assert_eq!(experts(text), Ok(Ok(expected)), "{text}");
        }
        for text in ["", "%", "-1", "101%", "NaN%", "0.25", "1GiB"] {
            assert!(experts(text).is_err(), "{text}");
        }
        for text in ["0", "769", "0.1%"] {
            assert!(matches!(experts(text), Ok(Err(_))), "{text}");
        }
    }
}
