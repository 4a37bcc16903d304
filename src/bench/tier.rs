//! What a run's pool of experts in a device's memory did.

use crate::governor::VramEntry;
use crate::plant::PoolUse;
use serde::{Deserialize, Serialize};

/// The tier in a device's memory, at the end of a run and over all that it decoded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tier {
    /// Where experts were used from at the end: `cpu`, `reload` or `static`.
    pub arrangement: String,
    /// Bytes for experts there at the end.
    pub bytes: u64,
    /// Slots of the pool at the end.
    pub slots: u64,
    /// Part of the routed experts that pools had.
    pub hit_ratio: Option<f64>,
    /// Bytes copied to the device for a token, prompts and warm-up included.
    pub uploaded_bytes_per_token: Option<f64>,
    /// Changes of size or arrangement.
    pub changes: u64,
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
impl Tier {
    /// Of a pool that nobody regulated.
    #[must_use]
    pub fn of_pool(pool: &PoolUse) -> Self {
        let (hits, misses) = pool.uses();
        Self {
            arrangement: "reload".into(),
            bytes: pool.bytes,
            slots: pool.slots,
            hit_ratio: (hits + misses > 0).then(|| hits as f64 / (hits + misses) as f64),
            uploaded_bytes_per_token: (pool.tokens > 0)
                .then(|| pool.uploaded_bytes() / pool.tokens as f64),
            changes: 0,
        }
    }

    /// Of the last tick, after `tokens` in all.
    #[must_use]
    pub fn of(last: &VramEntry, changes: u64, tokens: u64) -> Self {
        Self {
            arrangement: last.arrangement.clone(),
            bytes: last.pool_bytes + last.static_bytes,
            slots: last.slots,
            hit_ratio: last.hit_ratio(),
            uploaded_bytes_per_token: (tokens > 0)
                .then(|| last.uploaded_bytes as f64 / tokens as f64),
            changes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{PoolUse, Tier};
    use crate::engine::{PoolCount, PoolTotals};
    use crate::governor::VramEntry;

    #[test]
    fn uploads_are_told_a_token_and_unknown_is_not_zero() {
        let entry = VramEntry {
            hits: 3,
            misses: 1,
            uploaded_bytes: 500,
            ..VramEntry::example()
        };
        let tier = Tier::of(&entry, 2, 10);
        assert_eq!(tier.hit_ratio, Some(0.75));
        assert_eq!(tier.uploaded_bytes_per_token, Some(50.0));
        let unused = VramEntry {
            hits: 0,
            misses: 0,
            ..entry
        };
        let tier = Tier::of(&unused, 0, 0);
        assert_eq!(
            (tier.hit_ratio, tier.uploaded_bytes_per_token),
            (None, None)
        );
    }

    #[test]
    fn a_pool_that_nobody_regulated_is_told_by_llama_cpps_own_count() {
        let count = |hits, misses, uploaded_bytes| PoolCount {
            hits,
            misses,
            uploaded_bytes,
        };
        let pool = PoolUse {
            bytes: 7,
            slots: 3,
            tokens: 4,
            totals: PoolTotals {
                small: count(5, 1, 300.0),
                large: count(1, 1, 100.0),
                copied: 9,
            },
        };
        let tier = Tier::of_pool(&pool);
        assert_eq!((tier.bytes, tier.slots, tier.changes), (7, 3, 0));
        assert_eq!(tier.arrangement, "reload");
        assert_eq!(tier.hit_ratio, Some(0.75));
        assert_eq!(tier.uploaded_bytes_per_token, Some(100.0));
        let unused = PoolUse {
            tokens: 0,
            totals: PoolTotals::default(),
            ..pool
        };
        let tier = Tier::of_pool(&unused);
        assert_eq!(
            (tier.hit_ratio, tier.uploaded_bytes_per_token),
            (None, None)
        );
    }
}
