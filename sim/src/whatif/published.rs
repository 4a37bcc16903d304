//! What others have measured, beside what the model says.
//!
//! Every point names what had to be assumed. Where a publication leaves a constant open, the constant
//! is taken from one of its figures, marked as fitted, and used to predict the others.

use super::hardware::Hardware;
use super::locality::{Locality, Source};
use super::model::ModelSizes;
use super::{Setup, Strategy, WhatIfError, evaluate};
use serde::Serialize;

/// A published figure and the model's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// What was measured, with its unit.
    pub what: &'static str,
    /// The published figure; `null` where there is none.
    pub published: Option<f64>,
    /// The model's.
    pub model: f64,
    /// What the comparison proves.
    pub kind: Kind,
    /// What the publication leaves open, and what was assumed for it.
    pub assumed: &'static str,
}

/// What a comparison proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Nothing: the model's constants were chosen so that this one agrees.
    Fitted,
    /// The constants come from elsewhere.
    Predicted,
    /// Published is only that the figure lies below this.
    Below,
}

/// All points.
///
/// # Errors
/// When a description that comes with the program is refused.
pub fn published() -> Result<Vec<Comparison>, WhatIfError> {
    let mut points = expert_cache();
    points.extend(hit_ratios()?);
    points.push(full_reload()?);
    points.extend(slow_link()?);
    points.extend(small_ram()?);
    Ok(points)
}

/// Decoding with a cache of experts whose misses the processor computes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Assisted {
    /// Everything but experts, seconds a token.
    rest_s: f64,
    /// All routed experts on the processor, seconds a token.
    experts_s: f64,
}

impl Assisted {
    /// From a pair of speeds without the cache and with it at a hit ratio.
    fn fit(without_tok_s: f64, with_tok_s: f64, hit_ratio: f64) -> Self {
        let (without_s, with_s) = (1.0 / without_tok_s, 1.0 / with_tok_s);
        let experts_s = (without_s - with_s) / hit_ratio;
        Self {
            rest_s: without_s - experts_s,
            experts_s,
        }
    }

    /// Hits cost next to nothing beside misses: the card computes them meanwhile.
    fn tok_s(self, hit_ratio: f64) -> f64 {
        1.0 / (self.rest_s + self.experts_s * (1.0 - hit_ratio))
    }
}

const EXPERT_CACHE: &str = "expert cache of llama.cpp: the model is not stated. Time of the \
    experts on the EPYC 7742 is taken from the 4090's pair and kept for the 5090, whose other time \
    is taken from its own baseline; misses are computed on the processor, hits meanwhile on the card";

/// EPYC 7742 with an RTX 4090 and an RTX 5090.
fn expert_cache() -> Vec<Comparison> {
    let first = Assisted::fit(25.0, 39.4, 0.72);
    let second = Assisted {
        rest_s: 1.0 / 30.8 - first.experts_s,
        ..first
    };
    let point = |what, published: f64, model, kind| Comparison {
        what,
        published: Some(published),
        model,
        kind,
        assumed: EXPERT_CACHE,
    };
    vec![
        point(
            "EPYC 7742 + RTX 4090, no cache, tok/s",
            25.0,
            first.tok_s(0.0),
            Kind::Fitted,
        ),
        point(
            "EPYC 7742 + RTX 4090, 72% hits, tok/s",
            39.4,
            first.tok_s(0.72),
            Kind::Fitted,
        ),
        point(
            "EPYC 7742 + RTX 5090, no cache, tok/s",
            30.8,
            second.tok_s(0.0),
            Kind::Fitted,
        ),
        point(
            "EPYC 7742 + RTX 5090, 77% hits, tok/s",
            54.5,
            second.tok_s(0.77),
            Kind::Predicted,
        ),
    ]
}

const HIT_RATIOS: &str = "hit ratios of an LRU cache for Qwen3-30B-A3B (kekzl/imp, pull request \
    1374: 24, 73, 146 and 244 of 384 slices a layer): routing is drawn with the locality fitted to \
    gpt-oss-20b's trace, one cache for all layers; the card is not stated, so speeds are not compared";

/// LRU hit ratios by the share of experts cached.
fn hit_ratios() -> Result<Vec<Comparison>, WhatIfError> {
    let cases = [
        ("Qwen3-30B-A3B, LRU over 6.2% of experts, hits", 24.0, 0.366),
        ("Qwen3-30B-A3B, LRU over 19% of experts, hits", 73.0, 0.741),
        ("Qwen3-30B-A3B, LRU over 38% of experts, hits", 146.0, 0.894),
        ("Qwen3-30B-A3B, LRU over 64% of experts, hits", 244.0, 0.962),
    ];
    let mut points = Vec::new();
    for (what, slots, published) in cases {
        let mut setup = Setup::new(
            Hardware::preset("rtx-4090")?,
            ModelSizes::preset("qwen3-30b-a3b")?,
        );
        give_cache(&mut setup, slots / 384.0);
        // Cold, as it was measured: 256 tokens from the start.
        setup.warm_up_steps = 0;
        setup.steps = 256;
        let figures = evaluate(&setup, Strategy::ReloadLru)?;
        points.push(Comparison {
            what,
            published: Some(published),
            model: figures.vram_hit_ratio.unwrap_or(0.0),
            kind: Kind::Predicted,
            assumed: HIT_RATIOS,
        });
    }
    Ok(points)
}

const FULL_RELOAD: &str = "all experts of Qwen3-30B-A3B (4.85 bits a weight) in host memory, an LRU cache with 88.7% \
    hits before a bus of 25.6 GB/s (kekzl/imp, pull request 1365): what is resident takes the time of the \
    run with everything resident, 311.24 tok/s, and each miss its bytes over the bus, nothing else";

/// Bits of a weight that the full reload was measured with.
const FULL_RELOAD_BITS: f64 = 4.85;

/// A token whose misses are all copied and awaited.
fn full_reload() -> Result<Comparison, WhatIfError> {
    let (resident_tok_s, hit_ratio, bus_bytes_per_s) = (311.24, 0.887, 25.6e9);
    let model = ModelSizes::preset("qwen3-30b-a3b")?;
    let expert_bytes = model.expert_bytes * FULL_RELOAD_BITS / model.weight_bits;
    let routed = f64::from(model.layers) * f64::from(model.top_k);
    let copied_s = routed * (1.0 - hit_ratio) * expert_bytes / bus_bytes_per_s;
    Ok(Comparison {
        what: "Qwen3-30B-A3B, reload, 88.7% hits, tok/s",
        published: Some(24.98),
        model: 1.0 / (1.0 / resident_tok_s + copied_s),
        kind: Kind::Predicted,
        assumed: FULL_RELOAD,
    })
}

/// Makes VRAM just large enough for a share of the experts.
fn give_cache(setup: &mut Setup, share: f64) {
    let model = &setup.model;
    let kv_bytes = f64::from(model.layers) * model.kv_layer_bytes(setup.sequences, setup.context);
    if let Some(gpu) = &mut setup.hardware.gpu {
        gpu.vram_bytes = gpu.reserved_bytes
            + (model.dense_bytes() + kv_bytes + share * model.experts_bytes())
                / f64::from(gpu.cards);
    }
}

const SLOW_LINK: &str = "the 3090's bus is taken as 6 GB/s (PCIe 3.0 x8), the model as gpt-oss-120b; \
    published is only that the cache loses, so 1 is the bar and the model's figure is the ratio of \
    reload-lru to the better static placement";

/// Sixteen sequences on a 3090 over a slow bus.
fn slow_link() -> Result<Vec<Comparison>, WhatIfError> {
    let mut setup = Setup::new(
        Hardware::preset("rtx-3090")?,
        ModelSizes::preset("gpt-oss-120b")?,
    );
    setup.sequences = 16;
    setup.warm_up_steps = 60;
    setup.steps = 60;
    if let Some(link) = &mut setup.hardware.link {
        link.bytes_per_s = 6e9;
    }
    let tok_s = |strategy| evaluate(&setup, strategy).map(|figures| figures.tok_s);
    let fixed = tok_s(Strategy::CpuExperts)?.max(tok_s(Strategy::LayerOffload)?);
    Ok(vec![Comparison {
        what: "RTX 3090, slow bus, 16 requests: reload / static (bar: < 1)",
        published: Some(1.0),
        model: tok_s(Strategy::ReloadLru)? / fixed,
        kind: Kind::Below,
        assumed: SLOW_LINK,
    }])
}

const SMALL_RAM: &str = "12-core Zen 5 with 23.6 GB: the disk is not stated. Its bandwidth is the one \
    that gives the published speed of gpt-oss-120b under a static pin, and what page faults reach of it \
    is the share that gives the published gain of WILLNEED; locality as in gpt-oss-20b's trace, the \
    profile of other topics, RAM bandwidth 60 GB/s, the kernel an LRU of whole experts";

const PROFILED: &str = "as above, but the skew of the router, as large as before, is all common to every \
    text: whoever asks keeps to what was profiled, as a benchmark does that profiles its own prompt";

/// The fitted locality with its whole skew common to all texts.
fn profiled() -> Locality {
    let fitted = Locality::default();
    Locality {
        common_spread: fitted.common_spread.hypot(fitted.topic_spread),
        topic_spread: 0.0,
        ..fitted
    }
}

/// A model larger than RAM on a processor alone, with a disk and the share of it that faults reach.
fn small(
    model: &str,
    total_bytes: f64,
    ram_bytes: f64,
    disk_bytes_per_s: f64,
    fault_share: f64,
) -> Result<Setup, WhatIfError> {
    let mut hardware = Hardware::preset("laptop-32gb")?;
    hardware.cpu.ram_reserved_bytes = 0.0;
    hardware.cpu.ram_bytes = ram_bytes;
    hardware.disk.bytes_per_s = disk_bytes_per_s;
    hardware.disk.fault_bytes_per_s = fault_share * disk_bytes_per_s;
    let mut setup = Setup::new(hardware, ModelSizes::preset(model)?.scaled_to(total_bytes));
    setup.warm_up_steps = 150;
    setup.steps = 350;
    Ok(setup)
}

/// Models larger than RAM on a processor alone.
fn small_ram() -> Result<Vec<Comparison>, WhatIfError> {
    let routed = |locality, strategy, disk_bytes_per_s, fault_share| -> Result<f64, WhatIfError> {
        let mut setup = small(
            "gpt-oss-120b",
            58.5e9,
            19.1e9,
            disk_bytes_per_s,
            fault_share,
        )?;
        setup.source = Source::Drawn(locality);
        Ok(evaluate(&setup, strategy)?.tok_s)
    };
    let large = |strategy, disk_bytes_per_s, fault_share| {
        routed(Locality::default(), strategy, disk_bytes_per_s, fault_share)
    };
    let disk = solve(1e8, 2e10, 3.84, |disk| large(Strategy::Static, disk, 1.0))?;
    let fetched = large(Strategy::Fetch, disk, 1.0)?;
    let share = solve(0.05, 1.0, fetched / 1.15, |share| {
        large(Strategy::Mmap, disk, share)
    })?;
    let fixed = large(Strategy::Static, disk, share)?;
    let mapped = large(Strategy::Mmap, disk, share)?;
    let kept = |strategy| routed(profiled(), strategy, disk, share);
    let gain = kept(Strategy::Static)? / kept(Strategy::Mmap)?;
    let qwen = small("qwen3-30b-a3b", 21.6e9, 10.4e9, disk, share)?;
    let point = |what, published, model, kind| Comparison {
        what,
        published,
        model,
        kind,
        assumed: SMALL_RAM,
    };
    Ok(vec![
        point(
            "gpt-oss-120b, 58.5 GB in 19.1 GB, tok/s",
            Some(3.84),
            fixed,
            Kind::Fitted,
        ),
        point(
            "  the disk that this takes, GB/s",
            None,
            disk / 1e9,
            Kind::Fitted,
        ),
        point(
            "WILLNEED alone / plain mmap",
            Some(1.15),
            fetched / mapped,
            Kind::Fitted,
        ),
        point(
            "  the share of it that page faults reach",
            None,
            share,
            Kind::Fitted,
        ),
        point(
            "static pin and WILLNEED / plain mmap",
            Some(1.45),
            fixed / mapped,
            Kind::Predicted,
        ),
        Comparison {
            assumed: PROFILED,
            ..point(
                "  the same where texts keep to the profile",
                Some(1.45),
                gain,
                Kind::Predicted,
            )
        },
        point(
            "Qwen3-30B-A3B, 21.6 GB in 10.4 GB, tok/s",
            Some(6.12),
            evaluate(&qwen, Strategy::Static)?.tok_s,
            Kind::Predicted,
        ),
    ])
}

/// The argument within bounds at which a growing function has a value, by bisection on its
/// logarithm.
fn solve(
    low: f64,
    high: f64,
    value: f64,
    of: impl Fn(f64) -> Result<f64, WhatIfError>,
) -> Result<f64, WhatIfError> {
    let (mut low, mut high) = (low.ln(), high.ln());
    for _ in 0..12 {
        let middle = f64::midpoint(low, high);
        if of(middle.exp())? < value {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(high.exp())
}
