//! A cache size as given on the command line.

use hotpin_controllers::ModelShape;
use std::str::FromStr;

/// Experts that a cache holds: a share of the model, a count, or what fits into so many bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Capacity {
    /// Percent of all experts, rounded down.
    Percent(f64),
    /// A number of experts.
    Experts(u32),
    /// A number of bytes.
    Bytes(u64),
}

/// Units of bytes, longest first.
const UNITS: [(&str, u64); 7] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];

/// Why a capacity was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CapacityError {
    /// Neither a count nor a percentage.
    #[error(
        "capacity {given:?} is neither a number of experts, a percentage such as 25% nor a size such as 4GiB"
    )]
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
    /// Sizes say nothing about the number of experts when those differ or are unknown.
    #[error(
        "experts of {least} to {most} bytes do not make a size a number of experts; give a number or a percentage"
    )]
    Uneven {
        /// The smallest expert, bytes.
        least: u64,
        /// The largest, bytes.
        most: u64,
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
            None => text.parse().ok().map(Self::Experts).or_else(|| bytes(text)),
        };
        parsed.ok_or_else(|| CapacityError::Syntax {
            given: text.to_owned(),
        })
    }
}

impl Capacity {
    /// The number of experts of a model.
    ///
    /// # Errors
    /// When it is 0 or more than there are, or a size and experts are not all alike.
    pub fn experts(self, shape: &ModelShape) -> Result<usize, CapacityError> {
        let total = shape.total_experts();
        let experts = match self {
            Self::Bytes(bytes) => {
                let sizes = (0..shape.layers()).map(|layer| shape.layer_expert_bytes(layer));
                let least = sizes.clone().min().unwrap_or(0);
                let most = sizes.max().unwrap_or(0);
                // Traces of unknown sizes say 1.
                if least != most || most <= 1 {
                    return Err(CapacityError::Uneven { least, most });
                }
                usize::try_from(bytes / most)
                    .unwrap_or(usize::MAX)
                    .min(total)
            }
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

fn bytes(text: &str) -> Option<Capacity> {
    let (number, unit) = UNITS
        .iter()
        .find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?, *bytes)))?;
    number
        .parse::<u64>()
        .ok()?
        .checked_mul(unit)
        .map(Capacity::Bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_round_down_and_nonsense_is_refused() {
        let shape = ModelShape::uniform(24, 32, 1 << 20, 4).unwrap();
        let experts = |text: &str| text.parse::<Capacity>().map(|c| c.experts(&shape));
        let cases = [
            ("15%", 115),
            ("25%", 192),
            ("40%", 307),
            ("50%", 384),
            ("100%", 768),
            ("7", 7),
            ("64MiB", 64),
            ("1GB", 768),
            ("3145727B", 2),
        ];
        for (text, expected) in cases {
            assert_eq!(experts(text), Ok(Ok(expected)), "{text}");
        }
        for text in [
            "",
            "%",
            "-1",
            "101%",
            "NaN%",
            "0.25",
            "1GiBs",
            "99999999999GiB",
        ] {
            assert!(experts(text).is_err(), "{text}");
        }
        for text in ["0", "769", "0.1%", "1kB"] {
            assert!(matches!(experts(text), Ok(Err(_))), "{text}");
        }
        let uneven = ModelShape::new(vec![4, 4], vec![10, 20], vec![1, 1]).unwrap();
        let refused = Capacity::Bytes(40).experts(&uneven);
        assert_eq!(
            refused,
            Err(CapacityError::Uneven {
                least: 10,
                most: 20
            })
        );
    }
}
