//! What came of the orders for a device's memory: what changes cost, what failed, and the uses of pools that
//! are no more.

use super::vram::VramPart;
use crate::engine::PoolTotals;
use crate::plant::{Moved, Outcome};
use hotpin_controllers::vram::{Arrangement, ChangeCosts, PoolCounts};

/// What is known of the changes so far.
#[derive(Debug)]
pub(super) struct Outcomes {
    costs: ChangeCosts,
    /// Time of the last change of placement, ns, and bytes that were loaded for it.
    last_load: (u64, u64),
    failed: Option<Arrangement>,
    /// Uses of the pools before this one.
    pub(super) earlier: PoolCounts,
    /// What came in last.
    pub(super) last: Vec<Outcome>,
    /// Changes since the start.
    pub(super) changed: u64,
}

impl Outcomes {
    /// None yet; loading anew takes as long as the first time.
    pub(super) fn new(part: &VramPart) -> Self {
        Self {
            costs: ChangeCosts {
                dense_bytes: Some(part.dense_bytes),
                context_bytes: Some(part.context_bytes),
                ..ChangeCosts::default()
            },
            last_load: (part.load_ns, part.dense_bytes),
            failed: None,
            earlier: PoolCounts::default(),
            last: Vec::new(),
            changed: 0,
        }
    }

    /// Takes in what came of orders since the last tick.
    pub(super) fn take(&mut self, outcomes: Vec<Outcome>, part: &VramPart) {
        for outcome in &outcomes {
            match outcome {
                Outcome::Pool(pool) => {
                    self.changed += u64::from(pool.bytes != pool.before_bytes);
                    self.note_end(pool.ended.as_ref());
                    if pool.refused.is_some() {
                        self.failed = Some(Arrangement::Reload {
                            pool_bytes: pool.asked_bytes,
                        });
                    } else {
                        self.costs.recreate_ns = Some(pool.took_ns);
                        self.costs.state_bytes = Some(pool.state_bytes);
                    }
                }
                Outcome::Placed(moved) => self.note_move(moved, part),
            }
        }
        self.last = outcomes;
    }

    fn note_move(&mut self, moved: &Moved, part: &VramPart) {
        self.changed += u64::from(moved.now != moved.before);
        self.note_end(moved.ended.as_ref());
        if moved.refused.is_some() && moved.now != moved.asked {
            self.failed = Some(moved.asked);
            return;
        }
        self.last_load = (
            moved.took_ns,
            part.dense_bytes + part.static_bytes(moved.now),
        );
        self.costs.state_bytes = Some(moved.state_bytes);
    }

    /// Takes in the uses of a pool that is no more.
    fn note_end(&mut self, ended: Option<&PoolTotals>) {
        let Some(ended) = ended else { return };
        for count in [ended.small, ended.large] {
            self.earlier.hits += count.hits;
            self.earlier.misses += count.misses;
            self.earlier.upload_bytes += bytes_of(count.uploaded_bytes);
        }
    }

    /// What failed since this was asked last.
    pub(super) fn failed(&mut self) -> Option<Arrangement> {
        self.failed.take()
    }

    /// What changes cost while `applied` is there and the device has so much free memory. Loading anew takes
    /// as long as it took last, and with more to be loaded longer in proportion. Sequences have grown since they
    /// were saved last, or never were: they may take as much as the context takes of the device.
    pub(super) fn costs(
        &self,
        part: &VramPart,
        applied: Arrangement,
        free_bytes: Option<u64>,
    ) -> ChangeCosts {
        let (took_ns, loaded_bytes) = self.last_load;
        let experts_bytes = free_bytes
            .unwrap_or(u64::MAX)
            .saturating_add(applied.bytes())
            .min(part.layout.host_bytes());
        let bytes = part.dense_bytes.saturating_add(experts_bytes);
        let scaled = u128::from(took_ns) * u128::from(bytes.max(loaded_bytes))
            / u128::from(loaded_bytes.max(1));
        ChangeCosts {
            reload_ns: Some(u64::try_from(scaled).unwrap_or(u64::MAX)),
            state_bytes: self.costs.state_bytes.max(Some(part.context_bytes)),
            ..self.costs
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "llama.cpp's MiB, not negative"
)]
fn bytes_of(bytes: f64) -> u64 {
    bytes.max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn loading_anew_costs_what_it_took_last_for_its_bytes() {
        let part = VramPart::example();
        let mut outcomes = Outcomes::new(&part);
        let load_ns = |outcomes: &Outcomes, applied, free_bytes| {
            let costs = outcomes.costs(&part, applied, free_bytes);
            costs.reload_ns.expect("known")
        };
        assert_eq!(
            load_ns(&outcomes, Arrangement::Cpu, None),
            5 * SECOND,
            "all 32 MiB more"
        );
        assert_eq!(
            load_ns(&outcomes, Arrangement::Cpu, Some(8 * MIB)),
            2 * SECOND,
            "as much as fits"
        );
        let asked = Arrangement::Static { bytes: 17 * MIB };
        let moved = Moved {
            asked,
            before: Arrangement::Cpu,
            now: asked,
            ended: None,
            state_bytes: 7,
            took_ns: 9 * SECOND,
            refused: None,
        };
        outcomes.take(vec![Outcome::Placed(moved.clone())], &part);
        assert_eq!((outcomes.failed(), outcomes.changed), (None, 1));
        let costs = outcomes.costs(&part, asked, Some(0));
        assert_eq!(costs.state_bytes, Some(MIB), "it may grow to that");
        // Two layers of it and the dense weights took 9 s; 17 MiB and those take a little more.
        assert_eq!(costs.reload_ns, Some(9 * SECOND * 25 / 24));
        let refused = Moved {
            asked,
            before: Arrangement::Cpu,
            now: Arrangement::Cpu,
            took_ns: SECOND,
            refused: Some("no room".into()),
            ..moved
        };
        outcomes.take(vec![Outcome::Placed(refused)], &part);
        assert_eq!((outcomes.failed(), outcomes.changed), (Some(asked), 1));
        assert_eq!(outcomes.failed(), None, "told once");
        let costs = outcomes.costs(&part, asked, Some(0));
        assert_eq!(
            costs.reload_ns,
            Some(9 * SECOND * 25 / 24),
            "it tells no time"
        );
    }
}
