//! A pool of experts in a device's memory that nobody regulates: what `--policy off` has.

use super::{Rig, RigError, VramSize, pool_layout};
use crate::engine::{Device, PoolTotals};
use crate::model::ModelMap;

/// The pool, while there is one.
#[derive(Debug)]
pub(super) struct FixedPool {
    bytes: u64,
    slots: u64,
    /// Tokens that were decoded without it.
    tokens_before: u64,
}

/// What a pool was and did, by llama.cpp's own count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolUse {
    /// Its size.
    pub bytes: u64,
    /// Slots of all groups of layers.
    pub slots: u64,
    /// Tokens decoded while there was one.
    pub tokens: u64,
    /// Uses; none where no batch went through it.
    pub totals: PoolTotals,
}

impl Rig<'_> {
    /// Makes the pool.
    pub(super) fn fix_pool(
        &mut self,
        map: &ModelMap,
        device: Device,
        size: VramSize,
    ) -> Result<(), RigError> {
        let VramSize::Bytes(bytes) = size else {
            return Ok(());
        };
        let fail = |cause: String| RigError::NoPool { bytes, cause };
        let layout = pool_layout(map, self.session.model().placement(), device)
            .map_err(|e| fail(e.to_string()))?;
        self.session.limit_pool(layout.largest_bytes());
        layout.plan(bytes).map_err(|e| fail(e.to_string()))?;
        let made = self.session.set_pool(bytes)?;
        if let Some(cause) = made.refused {
            return Err(fail(cause));
        }
        self.fixed_pool = Some(FixedPool {
            bytes: made.bytes,
            slots: made.slots.iter().map(|group| u64::from(group.slots)).sum(),
            tokens_before: self.session.decoded_tokens(),
        });
        Ok(())
    }

    /// Gives up a pool that nobody regulated, and tells what came of it: llama.cpp says so only then. `None` where there
    /// is none.
    ///
    /// # Errors
    /// As [`crate::engine::Session::set_pool`].
    pub fn end_fixed_pool(&mut self) -> Result<Option<PoolUse>, RigError> {
        let Some(pool) = self.fixed_pool.take() else {
            return Ok(None);
        };
        let tokens = self.session.decoded_tokens() - pool.tokens_before;
        let ended = self.session.set_pool(0)?.ended;
        Ok(Some(PoolUse {
            bytes: pool.bytes,
            slots: pool.slots,
            tokens,
            totals: ended.unwrap_or_default(),
        }))
    }
}

impl PoolUse {
    /// Routed experts that were there, and those that were not.
    #[must_use]
    pub const fn uses(&self) -> (u64, u64) {
        let (small, large) = (self.totals.small, self.totals.large);
        (small.hits + large.hits, small.misses + large.misses)
    }

    /// Bytes copied to the device.
    #[must_use]
    pub fn uploaded_bytes(&self) -> f64 {
        self.totals.small.uploaded_bytes + self.totals.large.uploaded_bytes
    }
}
