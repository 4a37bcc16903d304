//! What a build made, and how its routing concentrates and drifts.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use super::calibration::Domain;
use super::options::{Options, Quant};
use super::router::Router;

/// The domain that the others are compared with, when it is among them; the first one otherwise.
const REFERENCE: &str = "prose";

/// A finished demo model.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The file.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// MoE layers.
    pub layers: u32,
    /// Experts in each layer.
    pub experts: u32,
    /// Experts that a token is routed to in each layer.
    pub top_k: u32,
    /// Number format of the experts.
    pub quant: Quant,
    /// Seed of the build.
    pub seed: u64,
    /// Routing of the calibration tokens, layer by layer.
    pub routing: Vec<LayerRouting>,
    /// How far each domain's routing is from the reference's.
    pub drift: Vec<DomainDrift>,
    /// Time taken.
    pub seconds: Seconds,
}

/// How one layer spreads calibration tokens over its experts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerRouting {
    /// The layer.
    pub layer: usize,
    /// Share of routings that go to the busiest 10% of experts.
    pub top10_share: f64,
    /// Share of routings that go to the busiest 25%.
    pub top25_share: f64,
    /// Share of routings that go to the busiest half.
    pub top50_share: f64,
    /// Factor between the unit directions and the router's rows.
    pub router_scale: f32,
    /// Mean weight of the first of the experts that a token is routed to.
    pub first_weight: f32,
}

/// How one domain's routing relates to the reference domain's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DomainDrift {
    /// The domain.
    pub domain: String,
    /// Its calibration tokens.
    pub tokens: usize,
    /// The domain that it is compared with.
    pub reference: String,
    /// Share of its routings that fall on the reference's hottest 40% of (layer, expert) pairs.
    pub share_in_reference_hot40: f64,
    /// Share of its routings that fall on its own hottest 40% of pairs.
    pub share_in_own_hot40: f64,
    /// Share of the reference's hottest 25% of pairs that are among its own hottest 25%.
    pub hot25_overlap: f64,
}

/// Wall-clock seconds of each stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Seconds {
    /// Reading the calibration texts.
    pub calibrate: f64,
    /// Clustering the routers.
    pub cluster: f64,
    /// Writing the model.
    pub write: f64,
}

impl Report {
    pub(super) fn new(
        options: &Options,
        bytes: u64,
        domains: &[Domain],
        routers: &[Router],
        seconds: Seconds,
    ) -> Self {
        Self {
            path: options.output.clone(),
            bytes,
            layers: u32::try_from(routers.len()).unwrap_or(u32::MAX),
            experts: options.experts,
            top_k: options.top_k,
            quant: options.quant,
            seed: options.seed,
            routing: routers
                .iter()
                .enumerate()
                .map(|(i, r)| layer_routing(i, r))
                .collect(),
            drift: drift(domains, routers),
            seconds,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Seconds {
            calibrate,
            cluster,
            write,
        } = self.seconds;
        writeln!(
            f,
            "{}: {:.2} GB, {} layers of {} experts, top-{}, in {:.0} s \
             (texts {calibrate:.0} s, routers {cluster:.0} s, experts {write:.0} s)",
            self.path.display(),
            self.bytes as f64 / 1e9,
            self.layers,
            self.experts,
            self.top_k,
            calibrate + cluster + write,
        )?;
        let mean = |of: fn(&LayerRouting) -> f64| {
            self.routing.iter().map(of).sum::<f64>() / self.routing.len().max(1) as f64 * 100.0
        };
        writeln!(
            f,
            "routing, mean over layers: busiest 10/25/50% of experts take {:.0}/{:.0}/{:.0}%",
            mean(|r| r.top10_share),
            mean(|r| r.top25_share),
            mean(|r| r.top50_share),
        )?;
        for d in &self.drift {
            writeln!(
                f,
                "{:>10}: {:.0}% of routings in {}'s hottest 40% of experts, {:.0}% in its own; \
                 {:.0}% of the hottest 25% shared",
                d.domain,
                d.share_in_reference_hot40 * 100.0,
                d.reference,
                d.share_in_own_hot40 * 100.0,
                d.hot25_overlap * 100.0,
            )?;
        }
        Ok(())
    }
}

fn layer_routing(layer: usize, router: &Router) -> LayerRouting {
    let experts = router.routings.first().map_or(0, Vec::len);
    let mut totals: Vec<u64> = (0..experts)
        .map(|expert| {
            router
                .routings
                .iter()
                .map(|counts| u64::from(counts[expert]))
                .sum()
        })
        .collect();
    totals.sort_unstable_by(|a, b| b.cmp(a));
    let share = |percent: usize| {
        let count = (experts * percent / 100).max(1);
        ratio(totals.iter().take(count).sum(), totals.iter().sum())
    };
    LayerRouting {
        layer,
        top10_share: share(10),
        top25_share: share(25),
        top50_share: share(50),
        router_scale: router.scale,
        first_weight: router.first_share,
    }
}

fn drift(domains: &[Domain], routers: &[Router]) -> Vec<DomainDrift> {
    let counts: Vec<Vec<u32>> = (0..domains.len())
        .map(|domain| {
            routers
                .iter()
                .flat_map(|r| r.routings[domain].iter().copied())
                .collect()
        })
        .collect();
    let reference = domains
        .iter()
        .position(|d| d.name == REFERENCE)
        .unwrap_or(0);
    let Some(reference_counts) = counts.get(reference) else {
        return Vec::new();
    };
    let hot40 = hottest(reference_counts, 40);
    let hot25 = hottest(reference_counts, 25);
    domains
        .iter()
        .zip(&counts)
        .map(|(domain, counts)| {
            let own = hottest(counts, 25);
            let shared = own.iter().zip(&hot25).filter(|(a, b)| **a && **b).count() as u64;
            DomainDrift {
                domain: domain.name.clone(),
                tokens: domain.rows.len(),
                reference: domains[reference].name.clone(),
                share_in_reference_hot40: share_within(counts, &hot40),
                share_in_own_hot40: share_within(counts, &hottest(counts, 40)),
                hot25_overlap: ratio(shared, hot25.iter().filter(|hot| **hot).count() as u64),
            }
        })
        .collect()
}

/// Marks the `percent` of entries with the largest counts; ties go to the lower index.
fn hottest(counts: &[u32], percent: usize) -> Vec<bool> {
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(counts[index]));
    let mut hot = vec![false; counts.len()];
    for &index in order.iter().take(counts.len() * percent / 100) {
        hot[index] = true;
    }
    hot
}

/// Share of all counts that belongs to marked entries.
fn share_within(counts: &[u32], marked: &[bool]) -> f64 {
    let within = counts.iter().zip(marked).filter(|(_, marked)| **marked);
    ratio(
        within.map(|(&count, _)| u64::from(count)).sum(),
        counts.iter().map(|&count| u64::from(count)).sum(),
    )
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concentration_counts_the_busiest_experts_of_all_domains() {
        let routings = vec![vec![6, 0, 1, 1], vec![0, 0, 1, 1]];
        let router = Router {
            rows: vec![],
            scale: 1.0,
            first_share: 0.5,
            routings,
        };
        let routing = layer_routing(0, &router);
        assert!((routing.top25_share - 0.6).abs() < 1e-9);
        assert!((routing.top50_share - 0.8).abs() < 1e-9);
    }

    #[test]
    fn the_hottest_are_marked() {
        assert_eq!(hottest(&[1, 5, 3, 5], 50), [false, true, false, true]);
        assert_eq!(hottest(&[], 40), Vec::<bool>::new());
    }
}
