//! `/api/explain`: why one expert is where it is, in numbers and in a sentence.

use super::app::Ready;
use super::metrics::word;
use super::openai::ApiError;
use crate::governor::{Event, Monitor, Standing, VramEntry};
use axum::http::StatusCode;
use hotpin_controllers::{ModelShape, Reason, Residence};
use serde_json::{Value, json};

/// Explains an expert, given by its MoE layer and its index in the layer.
pub(super) fn explain(
    ready: &Ready,
    monitor: &Monitor,
    layer: &str,
    expert: &str,
) -> Result<Value, ApiError> {
    let shape = ready
        .shape
        .as_ref()
        .ok_or_else(|| absent(layer, expert, None))?;
    let fail = || absent(layer, expert, Some(shape));
    let layer_index: usize = layer.parse().map_err(|_| fail())?;
    let index: u32 = expert.parse().map_err(|_| fail())?;
    if layer_index >= shape.layers() || index >= shape.experts_in(layer_index) {
        return Err(fail());
    }
    let id = shape.id(layer_index, index);
    let standing = monitor.standing(id).ok_or_else(fail)?;
    let last = monitor.status().entry;
    let tier = last.as_ref().and_then(|entry| entry.vram.as_ref());
    Ok(json!({
        "layer": layer_index,
        "block": ready.blocks.get(layer_index),
        "expert": index,
        "bytes": shape.bytes(id),
        "residence": residence(standing.residence),
        "since_s": standing.fate.since_s,
        "score": standing.score,
        "place": standing.better + 1,
        "experts": shape.total_experts(),
        "pinned": standing.fate.pinned,
        "unpinned": standing.fate.unpinned,
        "evicted_s": standing.fate.evicted_s,
        "now_s": last.as_ref().map(|entry| entry.t_s),
        // The tier in a device's memory, where there is one.
        "vram": tier,
        "text": sentence(layer_index, index, &standing, tier),
    }))
}

fn absent(layer: &str, expert: &str, shape: Option<&ModelShape>) -> ApiError {
    let there = shape.map_or_else(
        || "this model has no experts".to_owned(),
        |shape| {
            format!(
                "layers count from 0 to {}, experts from 0",
                shape.layers().saturating_sub(1)
            )
        },
    );
    ApiError::plain(
        StatusCode::NOT_FOUND,
        "invalid_request_error",
        format!("there is no expert {expert} in MoE layer {layer}; {there}"),
    )
    .with_code("no_such_expert")
}

fn residence(residence: Residence) -> &'static str {
    match residence {
        Residence::Pinned => "pinned",
        Residence::Transit => "transit",
        Residence::Absent => "absent",
    }
}

fn because(event: &Event) -> String {
    let rule = match event.reason {
        Reason::Profile => "the starting profile names it",
        Reason::Fill => "there was room and it had the best score",
        Reason::Swap => "it outscored a pinned expert by the margin",
        Reason::Swapped => "a better one took its place",
        Reason::Stale => "it has not been routed for longer than chance explains",
        Reason::Shrink => "the budget for pins fell",
        Reason::LockAll => "everything fits",
        Reason::Recent => "it was used recently",
        Reason::InVram => "it is stable in VRAM",
    };
    format!(
        "at {:.1} s, because {rule} ({}, score {:.3})",
        event.t_s,
        word(event.reason),
        event.score
    )
}

fn sentence(layer: usize, expert: u32, standing: &Standing, tier: Option<&VramEntry>) -> String {
    let there = tier.map_or_else(String::new, |tier| {
        format!(" The graphics device has {}.", tier.words())
    });
    let placed = tier.is_some_and(|tier| tier.static_layers.contains(&layer));
    stands(layer, expert, standing, placed) + &there
}

/// Where an expert is; `placed` ones are on the device for good, so that the store has nothing of them.
fn stands(layer: usize, expert: u32, standing: &Standing, placed: bool) -> String {
    let fate = &standing.fate;
    let since = fate.since_s.map_or_else(
        || "since the start".to_owned(),
        |s| format!("since {s:.1} s"),
    );
    let now = format!(
        "Expert {expert} of MoE layer {layer} scores {:.3} (place {})",
        standing.score,
        standing.better + 1
    );
    if placed {
        return format!(
            "{now}. It is in the graphics device's memory, as all of its layer, and not in this machine's."
        );
    }
    let unpinned = fate
        .unpinned
        .as_ref()
        .map(|event| format!(" It was unpinned {}.", because(event)))
        .unwrap_or_default();
    match standing.residence {
        Residence::Pinned => {
            let why = fate
                .pinned
                .as_ref()
                .map_or_else(String::new, |event| format!(": {}", because(event)));
            format!("{now}. It is pinned {since}{why}.")
        }
        Residence::Transit => {
            format!("{now}. It is in memory and not locked {since}.{unpinned}")
        }
        Residence::Absent => match fate.evicted_s {
            Some(at) => format!(
                "{now}. It was evicted at {at:.1} s, because what transit holds beyond its budget goes, lowest rank first.{unpinned}"
            ),
            None => format!("{now}. It has not been in memory since the start."),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::sentence;
    use crate::governor::{Event, Fate, Standing, VramEntry};
    use hotpin_controllers::{Reason, Residence};

    #[test]
    fn sentences_say_where_since_when_and_why() {
        let event = |t_s, reason| Event {
            t_s,
            reason,
            score: 0.42,
        };
        let pinned = Standing {
            residence: Residence::Pinned,
            score: 0.5,
            better: 2,
            fate: Fate {
                since_s: Some(3.0),
                pinned: Some(event(3.0, Reason::Swap)),
                ..Fate::default()
            },
        };
        let text = sentence(1, 7, &pinned, None);
        for words in [
            "pinned since 3.0 s",
            "score 0.420",
            "because it outscored",
            "place 3",
        ] {
            assert!(text.contains(words), "no {words:?} in {text}");
        }
        let evicted = Standing {
            residence: Residence::Absent,
            fate: Fate {
                since_s: Some(9.0),
                unpinned: Some(event(8.0, Reason::Stale)),
                evicted_s: Some(9.0),
                ..Fate::default()
            },
            ..pinned
        };
        let placed = VramEntry {
            static_layers: vec![1],
            ..VramEntry::example()
        };
        let text = sentence(1, 7, &evicted, Some(&placed));
        assert!(
            text.contains("memory, as all of its layer") && !text.contains("evicted"),
            "{text}"
        );
        let text = sentence(2, 7, &evicted, Some(&placed));
        assert!(text.contains("evicted at 9.0 s"), "{text}");
        let text = sentence(1, 7, &evicted, Some(&VramEntry::example()));
        for words in [
            "evicted at 9.0 s, because",
            "unpinned at 8.0 s",
            "stale",
            "The graphics device has a pool of 3.00 MiB for experts, 3 slots (rule yield",
        ] {
            assert!(text.contains(words), "no {words:?} in {text}");
        }
    }
}
