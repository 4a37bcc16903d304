//! Which arrangements are faster, by how much.

use super::decision::{Arrangement, VramRule};
use crate::config::VramConfig;

/// What could be had, with what a token takes, ns where that is known.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Compared {
    pub pool: Option<(Arrangement, Option<f64>)>,
    pub placed: Option<(Arrangement, Option<f64>)>,
    pub cpu: Option<Option<f64>>,
    /// What is applied, by the same estimate, else as measured.
    pub applied_ns: Option<f64>,
    pub present_ns: Option<f64>,
}

/// A better arrangement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Better {
    pub arrangement: Arrangement,
    /// The rule under which it is chosen.
    pub rule: VramRule,
    /// Share of a token's time that it saves.
    pub gain_share: f64,
}

impl Compared {
    /// Arrangements of other kinds that are better by the margin, the best first; or the rule that
    /// keeps what is applied. A pool that can grow is judged by what it will be.
    pub fn better(
        &self,
        config: &VramConfig,
        applied: Arrangement,
    ) -> Result<Vec<Better>, VramRule> {
        let own_label = applied.label();
        let known = [
            self.pool
                .and_then(|(pool, ns)| Some((pool, ns?, VramRule::Reload))),
            self.placed
                .and_then(|(placed, ns)| Some((placed, ns?, VramRule::Static))),
            self.cpu
                .flatten()
                .map(|ns| (Arrangement::Cpu, ns, VramRule::Cpu)),
        ];
        let (own, mut others): (Vec<_>, Vec<_>) = known
            .into_iter()
            .flatten()
            .partition(|(arrangement, ..)| arrangement.label() == own_label);
        let own_ns = own
            .iter()
            .map(|&(_, ns, _)| ns)
            .chain(self.applied_ns)
            .reduce(f64::min)
            .ok_or(VramRule::Unmeasured)?;
        others.retain(|&(_, ns, _)| ns < own_ns);
        if others.is_empty() {
            return Err(VramRule::Hold);
        }
        others.retain(|&(_, ns, _)| 1.0 - ns / own_ns >= config.margin_share);
        if others.is_empty() {
            return Err(VramRule::Margin);
        }
        others.sort_by(|a, b| a.1.total_cmp(&b.1));
        let better = others.into_iter().map(|(arrangement, ns, rule)| Better {
            arrangement,
            rule,
            gain_share: 1.0 - ns / own_ns,
        });
        Ok(better.collect())
    }
}
