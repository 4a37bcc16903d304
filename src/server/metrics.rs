//! `/metrics`, in Prometheus' text format.

use super::app::{App, Phase, Ready};
use super::degraded;
use super::stats::{Outcome, TOKEN_BOUNDS_S};
use crate::governor::{Monitor, Status, VramEntry};
use crate::store::program;
use crate::time::seconds;
use hdrhistogram::Histogram;
use hotpin_controllers::Ceiling;
use hotpin_controllers::vram::VramCeiling;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeMetric, NoLabelSet, prometheus_text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use std::fmt;
use std::sync::Arc;

/// Upper bounds of the buckets of tick times, seconds.
const TICK_BOUNDS_S: [f64; 12] = [
    0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0,
];

/// Content type of [`exposition`].
pub(super) const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

/// All metrics as text.
pub(super) fn exposition(app: &Arc<App>) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Metrics(Arc::clone(app))));
    let mut text = String::new();
    // Writing into a string does not fail.
    let _ = prometheus_text::encode(&mut text, &registry);
    text
}

struct Metrics(Arc<App>);

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        let ready = match self.0.phase() {
            Phase::Ready(ready) => Some(ready),
            Phase::Loading { .. } | Phase::Stopping => None,
        };
        server(&mut out, &self.0)?;
        if let Some(ready) = &ready {
            engine(&mut out, ready)?;
            let status = ready.monitor.as_ref().map(Monitor::status);
            let states = degraded::flags(&degraded::in_force(ready, status.as_ref()));
            out.gauges(
                "hotpin_degraded",
                "1 for what the session has to do without",
                states
                    .into_iter()
                    .map(|(state, is)| ("state", state, u64::from(is))),
            )?;
            if let (Some(monitor), Some(status)) = (&ready.monitor, &status) {
                governor(&mut out, status)?;
                ticks(&mut out, &monitor.tick_times())?;
            }
        }
        Ok(())
    }
}

struct Out<'a>(DescriptorEncoder<'a>);

impl Out<'_> {
    fn counter(
        &mut self,
        name: &str,
        help: &str,
        value: &(impl EncodeCounterValue + fmt::Debug),
    ) -> fmt::Result {
        let encoder = self
            .0
            .encode_descriptor(name, help, None, MetricType::Counter)?;
        let mut encoder = encoder;
        encoder.encode_counter::<NoLabelSet, _, u64>(value, None)
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let mut encoder = self
            .0
            .encode_descriptor(name, help, None, MetricType::Gauge)?;
        encoder.encode_gauge(&value)
    }

    fn counters<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        values: impl Iterator<Item = ([(&'static str, String); N], u64)>,
    ) -> fmt::Result {
        let mut encoder = self
            .0
            .encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in values {
            ConstCounter::new(value).encode(encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn gauges(
        &mut self,
        name: &str,
        help: &str,
        values: impl Iterator<Item = (&'static str, &'static str, u64)>,
    ) -> fmt::Result {
        let mut encoder = self
            .0
            .encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (label, word, value) in values {
            ConstGauge::new(value).encode(encoder.encode_family(&[(label, word)])?)?;
        }
        Ok(())
    }

    fn histogram(
        &mut self,
        name: &str,
        help: &str,
        sum: f64,
        buckets: &[(f64, u64)],
    ) -> fmt::Result {
        let count = buckets.iter().map(|(_, n)| n).sum();
        let mut encoder = self
            .0
            .encode_descriptor(name, help, None, MetricType::Histogram)?;
        encoder.encode_histogram::<NoLabelSet>(sum, count, buckets, None)
    }
}

fn server(out: &mut Out<'_>, app: &App) -> fmt::Result {
    let counts = app.stats.counts();
    out.gauge(
        "hotpin_requests_running",
        "Requests that are being decoded",
        counts.running,
    )?;
    out.gauge(
        "hotpin_requests_queued",
        "Requests that wait for a sequence",
        app.queue.waiting() as u64,
    )?;
    out.counters(
        "hotpin_requests",
        "Requests that have ended, by outcome",
        Outcome::ALL.iter().map(|&outcome| {
            let labels = [("outcome", outcome.label().to_owned())];
            (labels, app.stats.outcome(outcome))
        }),
    )?;
    out.counter(
        "hotpin_prompt_tokens",
        "Prompt tokens decoded",
        &counts.prompt_tokens,
    )?;
    out.counter(
        "hotpin_cached_prompt_tokens",
        "Prompt tokens that were in the context already",
        &counts.cached_tokens,
    )?;
    out.counter(
        "hotpin_generated_tokens",
        "Tokens generated",
        &counts.generated_tokens,
    )?;
    let times = app.stats.token_times();
    let bounds = TOKEN_BOUNDS_S.into_iter().chain([f64::INFINITY]);
    let buckets: Vec<(f64, u64)> = bounds.zip(times.counts).collect();
    out.histogram(
        "hotpin_decode_token_seconds",
        "Time to generate one token",
        times.sum_s,
        &buckets,
    )
}

fn engine(out: &mut Out<'_>, ready: &Ready) -> fmt::Result {
    let totals = ready.counters.totals();
    if let Some(store) = ready.monitor.as_ref().and_then(Monitor::store) {
        out.gauge(
            "hotpin_locked_bytes",
            "Bytes locked by the books, dense weights included, in whole pages",
            store.locked_bytes(),
        )?;
        out.gauge(
            "hotpin_program_locked_bytes",
            "Bytes of the program and its libraries that are kept in memory once they are used",
            program::locked_bytes(),
        )?;
    }
    out.counter(
        "hotpin_expert_hits",
        "Routed experts that were resident",
        &totals.hits,
    )?;
    out.counter(
        "hotpin_expert_misses",
        "Routed experts that were not resident",
        &totals.misses,
    )?;
    out.counter(
        "hotpin_fetch_bytes",
        "Expert bytes that reads were started for",
        &totals.fetch_bytes,
    )?;
    out.counter(
        "hotpin_stall_seconds",
        "Time that the engine waited for expert bytes",
        &seconds(totals.stall_ns),
    )
}

fn governor(out: &mut Out<'_>, status: &Status) -> fmt::Result {
    out.gauge(
        "hotpin_pinned_bytes",
        "Bytes of experts locked in memory",
        status.pinned_bytes,
    )?;
    out.gauge(
        "hotpin_transit_bytes",
        "Bytes of experts in memory and not locked",
        status.transit_bytes,
    )?;
    out.gauge(
        "hotpin_capacity_bytes",
        "Budget for pinned and transit",
        status.decision.capacity_bytes,
    )?;
    out.gauges(
        "hotpin_ceiling_bytes",
        "Upper bounds on capacity that are known",
        Ceiling::ALL
            .iter()
            .zip(status.decision.ceilings)
            .filter_map(|(ceiling, bytes)| Some(("ceiling", ceiling.label(), bytes?))),
    )?;
    out.gauges(
        "hotpin_binding_ceiling",
        "1 for the ceiling that sets capacity",
        Ceiling::ALL.iter().map(|&ceiling| {
            let binds = u64::from(ceiling == status.decision.binding);
            ("ceiling", ceiling.label(), binds)
        }),
    )?;
    if let Some(faults) = status.major_faults {
        out.counter(
            "hotpin_major_faults",
            "Major page faults of the process",
            &faults,
        )?;
    }
    if let Some(us) = status.pressure_stall_us {
        out.counter(
            "hotpin_pressure_stall_seconds",
            "Time that tasks stalled on memory (PSI some)",
            &seconds(us.saturating_mul(1000)),
        )?;
    }
    out.counters(
        "hotpin_swaps",
        "Experts pinned and unpinned, by the rule that decided",
        status.swaps.iter().map(|(&(swap, reason), &count)| {
            let labels = [
                ("result", swap.label().to_owned()),
                ("reason", word(reason)),
            ];
            (labels, count)
        }),
    )?;
    out.counters(
        "hotpin_mlock_errors",
        "Lock calls that failed",
        status
            .lock_errnos
            .iter()
            .map(|(errno, &count)| ([("errno", errno.clone())], count)),
    )?;
    out.counter(
        "hotpin_drift_events",
        "Times that drift was detected",
        &status.drift_events,
    )?;
    match status.entry.as_ref().and_then(|entry| entry.vram.as_ref()) {
        Some(tier) => vram(out, status, tier),
        None => Ok(()),
    }
}

/// Where experts can be used from.
const ARRANGEMENTS: [&str; 3] = ["cpu", "reload", "static"];

/// The tier in a device's memory.
fn vram(out: &mut Out<'_>, status: &Status, vram: &VramEntry) -> fmt::Result {
    out.gauge(
        "hotpin_vram_pool_bytes",
        "Bytes of the pool of experts in the device's memory",
        vram.pool_bytes,
    )?;
    out.gauge(
        "hotpin_vram_pool_slots",
        "Slots of that pool, each for one expert",
        vram.slots,
    )?;
    out.gauge(
        "hotpin_vram_static_bytes",
        "Bytes of whole layers' experts that are there for good",
        vram.static_bytes,
    )?;
    out.gauges(
        "hotpin_vram_arrangement",
        "1 for where experts are used from",
        ARRANGEMENTS.iter().map(|&name| {
            let is = u64::from(name == vram.arrangement);
            ("arrangement", name, is)
        }),
    )?;
    out.gauge(
        "hotpin_vram_wanted_bytes",
        "Bytes that the law wants experts to have there",
        vram.wanted_bytes,
    )?;
    if let Some(free_bytes) = vram.free_bytes {
        out.gauge(
            "hotpin_vram_free_bytes",
            "Free memory of the device",
            free_bytes,
        )?;
    }
    out.gauges(
        "hotpin_vram_ceiling_bytes",
        "Upper bounds on the pool that are known",
        VramCeiling::ALL.iter().filter_map(|ceiling| {
            let bytes = *vram.ceilings.get(ceiling.label())?;
            Some(("ceiling", ceiling.label(), bytes))
        }),
    )?;
    out.gauges(
        "hotpin_vram_binding_ceiling",
        "1 for the ceiling that bounds the pool",
        VramCeiling::ALL.iter().map(|&ceiling| {
            let binds = u64::from(ceiling == vram.binding);
            ("ceiling", ceiling.label(), binds)
        }),
    )?;
    out.gauge(
        "hotpin_vram_covered_experts",
        "Experts that are stable in the device's memory",
        vram.covered_experts,
    )?;
    out.counter(
        "hotpin_vram_hits",
        "Routed experts found in the device's memory",
        &vram.hits,
    )?;
    out.counter(
        "hotpin_vram_misses",
        "Routed experts copied to the device",
        &vram.misses,
    )?;
    out.counter(
        "hotpin_vram_upload_bytes",
        "Bytes of experts copied to the device",
        &vram.uploaded_bytes,
    )?;
    out.counter(
        "hotpin_vram_changes",
        "Changes of the pool's size or of the arrangement",
        &status.vram_changes,
    )
}

/// A reason as it is written in journals.
pub(super) fn word(reason: hotpin_controllers::Reason) -> String {
    serde_json::to_value(reason)
        .ok()
        .and_then(|value| value.as_str().map(str::to_owned))
        .unwrap_or_default()
}

fn ticks(out: &mut Out<'_>, times: &Histogram<u64>) -> fmt::Result {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "bounds of at most a second"
    )]
    let ns = |s: f64| (s * 1e9) as u64;
    let mut below = 0;
    let mut buckets = Vec::with_capacity(TICK_BOUNDS_S.len() + 1);
    for bound in TICK_BOUNDS_S {
        let upto = times.count_between(0, ns(bound));
        buckets.push((bound, upto.saturating_sub(below)));
        below = below.max(upto);
    }
    buckets.push((f64::INFINITY, times.len().saturating_sub(below)));
    #[expect(clippy::cast_precision_loss, reason = "a count of ticks")]
    let sum = times.mean() * times.len() as f64 / 1e9;
    out.histogram(
        "hotpin_tick_seconds",
        "Time that one decision took",
        sum,
        &buckets,
    )
}

#[cfg(test)]
mod tests {
    use super::prometheus_text;
    use super::{Collector, DescriptorEncoder, Out, Registry, Status, VramEntry, fmt, vram};

    /// A tier alone.
    #[derive(Debug)]
    struct Tier(VramEntry);

    impl Collector for Tier {
        fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
            let status = Status {
                vram_changes: 4,
                ..Status::default()
            };
            vram(&mut Out(encoder), &status, &self.0)
        }
    }

    #[test]
    fn every_figure_of_the_tier_is_a_metric() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Tier(VramEntry::example())));
        let mut text = String::new();
        prometheus_text::encode(&mut text, &registry).expect("a string takes all");
        for line in [
            "hotpin_vram_pool_bytes 3145728",
            "hotpin_vram_pool_slots 3",
            "hotpin_vram_static_bytes 0",
            "hotpin_vram_arrangement{arrangement=\"reload\"} 1",
            "hotpin_vram_arrangement{arrangement=\"static\"} 0",
            "hotpin_vram_wanted_bytes 2097152",
            "hotpin_vram_free_bytes 1048576",
            "hotpin_vram_ceiling_bytes{ceiling=\"memory\"} 2097152",
            "hotpin_vram_binding_ceiling{ceiling=\"memory\"} 1",
            "hotpin_vram_binding_ceiling{ceiling=\"value\"} 0",
            "hotpin_vram_covered_experts 2",
            "hotpin_vram_hits_total 30",
            "hotpin_vram_misses_total 10",
            "hotpin_vram_upload_bytes_total 5242880",
            "hotpin_vram_changes_total 4",
        ] {
            assert!(
                text.lines().any(|own| own == line),
                "no {line:?} in\n{text}"
            );
        }
        assert!(
            !text.contains("ceiling_bytes{ceiling=\"value\"}"),
            "not known"
        );
    }
}
