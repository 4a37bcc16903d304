//! How local routing must be for a cache in VRAM to pay.

use super::locality::{Locality, Sequence, Source};
use super::{Figures, Setup, Strategy, WhatIfError, evaluate};
use serde::Serialize;
use std::collections::HashSet;

/// Halvings of the interval of localities.
const HALVINGS: u32 = 7;

/// Tokens over which reuse is counted.
const REUSE_TOKENS: u32 = 200;

/// The locality at which a cache draws level with the best static placement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BreakEven {
    /// The caching strategy.
    pub strategy: Strategy,
    /// The faster of `layer-offload` and `cpu-experts`.
    pub against: Strategy,
    /// Its tokens a second.
    pub against_tok_s: f64,
    /// Where the cache draws level; `null` when it is slower at any locality.
    pub at: Option<Level>,
}

/// A locality, as a recording of any model shows it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Level {
    /// Share of a token's experts that the token before was routed to as well.
    pub reuse: f64,
    /// Hit ratio of the cache.
    pub hit_ratio: f64,
    /// Tokens a second.
    pub tok_s: f64,
    /// It pays even with a uniform router: the level is that router's.
    pub always: bool,
}

/// Looks for the locality at which `strategy` draws level, between a uniform router and one that
/// nearly repeats itself.
///
/// # Errors
/// When the question is refused or nothing fits.
pub fn break_even(setup: &Setup, strategy: Strategy) -> Result<BreakEven, WhatIfError> {
    let statics = [Strategy::LayerOffload, Strategy::CpuExperts].map(|against| {
        // A static placement does not know locality: any will do.
        evaluate(setup, against).map(|figures| (against, figures.tok_s))
    });
    let [first, second] = statics;
    let (against, against_tok_s) = match (first, second) {
        (Ok(a), Ok(b)) if b.1 > a.1 => b,
        (Ok(a), _) => a,
        (Err(_), Ok(b)) => b,
        (Err(error), Err(_)) => return Err(error),
    };
    let at = |degree: f64| -> Result<(Setup, Figures), WhatIfError> {
        let setup = Setup {
            source: Source::Drawn(degree_of_locality(degree)),
            ..setup.clone()
        };
        let figures = evaluate(&setup, strategy)?;
        Ok((setup, figures))
    };
    let (mut low, mut high) = (0.0, 1.0);
    let always = at(low)?.1.tok_s >= against_tok_s;
    if !always && at(high)?.1.tok_s < against_tok_s {
        return Ok(BreakEven {
            strategy,
            against,
            against_tok_s,
            at: None,
        });
    }
    if always {
        high = low;
    }
    for _ in 0..HALVINGS {
        if always {
            break;
        }
        let middle = f64::midpoint(low, high);
        if at(middle)?.1.tok_s >= against_tok_s {
            high = middle;
        } else {
            low = middle;
        }
    }
    let (setup, figures) = at(high)?;
    Ok(BreakEven {
        strategy,
        against,
        against_tok_s,
        at: Some(Level {
            reuse: reuse(&setup)?,
            hit_ratio: figures.vram_hit_ratio.unwrap_or(0.0),
            tok_s: figures.tok_s,
            always,
        }),
    })
}

/// From a uniform router (0) to one that nearly repeats itself (1), all sources of locality in step.
fn degree_of_locality(degree: f64) -> Locality {
    Locality {
        common_spread: 1.5 * degree,
        topic_spread: 2.1 * degree,
        persistence: 0.9 * degree,
        ..Locality::default()
    }
}

/// Share of a token's experts that the token before was routed to as well.
pub(super) fn reuse(setup: &Setup) -> Result<f64, WhatIfError> {
    let shape = setup.model.shape()?;
    let mut sequence = Sequence::new(&setup.source, &shape, setup.seed, 0, 1);
    let mut before: HashSet<u32> = sequence.next_token().iter().copied().collect();
    let (mut again, mut all) = (0usize, 0usize);
    for _ in 1..REUSE_TOKENS {
        let token: HashSet<u32> = sequence.next_token().iter().copied().collect();
        again += token.intersection(&before).count();
        all += token.len();
        before = token;
    }
    Ok(again as f64 / all.max(1) as f64)
}
