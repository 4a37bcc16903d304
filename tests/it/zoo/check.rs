//! What is shown on one model.

use super::make::{Made, VOCABULARY};
use super::plain::{Batches, N_CTX, Plain, Used};
use super::weights::Random;
use hotpin::engine::{EngineOptions, Model, Pass, RouteSink, Routed, Session};
use hotpin::model::ModelMap;
use hotpin::plant::{Rig, RigOptions};
use hotpin::store::{DirectOptions, Layout, StoreKind};
use hotpin_controllers::{AdaptiveConfig, ExpertId, PolicyKind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a check found: nothing, or what is wrong.
pub type Outcome = Result<(), String>;

/// Tokens decoded one by one, and tokens of the prompt: three micro-batches in two batches.
const DECODED: usize = 12;
const PROMPT: usize = 75;

/// Logits, bit by bit, of every step.
#[derive(PartialEq, Eq)]
pub struct Bits {
    decode: Vec<Vec<u32>>,
    prefill: Vec<Vec<u32>>,
}

/// Tokens that are forced, the same for every model.
pub fn tokens() -> Vec<i32> {
    let mut random = Random::of("tokens");
    let below = VOCABULARY - 8;
    (0..DECODED + PROMPT + 2)
        .map(|_| i32::try_from(random.below(below)).expect("small"))
        .collect()
}

/// Everything that is shown on one model, in the order of the table's columns.
pub struct Checks {
    pub loads: Outcome,
    pub routed: Outcome,
    pub slices: Outcome,
    pub mapped: [Outcome; 2],
    pub direct: [Outcome; 2],
    /// Layers whose experts were computed as they were read.
    pub split_layers: u64,
}

/// Three micro-batches in two batches, or one for whole prompts.
fn batches(made: &Made) -> Batches {
    if made.whole_prompts {
        return Batches {
            batch: 128,
            ubatch: 128,
        };
    }
    Batches {
        batch: 64,
        ubatch: 32,
    }
}

/// Logits after each of some tokens.
fn one_by_one<E>(
    tokens: &[i32],
    decode: &mut impl FnMut(&[i32]) -> Result<Vec<u32>, E>,
) -> Result<Vec<Vec<u32>>, E> {
    tokens.chunks(1).map(decode).collect()
}

/// Runs the steps that everybody takes: tokens one by one, then a prompt in an empty context and
/// what follows it.
fn steps<E>(
    mut clear: impl FnMut(),
    mut decode: impl FnMut(&[i32]) -> Result<Vec<u32>, E>,
) -> Result<Bits, E> {
    let tokens = tokens();
    clear();
    let decoded = one_by_one(&tokens[..DECODED], &mut decode)?;
    clear();
    let mut prefill = vec![decode(&tokens[DECODED..DECODED + PROMPT])?];
    let after = one_by_one(&tokens[DECODED + PROMPT..], &mut decode)?;
    prefill.extend(after);
    Ok(Bits {
        decode: decoded,
        prefill,
    })
}

/// What llama.cpp alone computes. An error is llama.cpp's own.
pub fn stock(made: &Made) -> Result<Bits, String> {
    let plain =
        Plain::load(&made.path, batches(made), false).ok_or("llama.cpp does not load it")?;
    let plain = std::cell::RefCell::new(plain);
    let bits = steps(
        || plain.borrow_mut().clear(),
        |tokens| {
            plain
                .borrow_mut()
                .decode(tokens)
                .ok_or("llama.cpp does not decode it")
        },
    )?;
    for logits in bits.decode.iter().chain(&bits.prefill) {
        let values = || logits.iter().map(|&bits| f32::from_bits(bits));
        if !values().all(f32::is_finite) {
            return Err("the logits are not finite".into());
        }
        let (low, high) = values().fold((f32::MAX, f32::MIN), |(l, h), x| (l.min(x), h.max(x)));
        if high - low < 1e-3 {
            return Err("the logits are all alike".into());
        }
    }
    if bits.decode[0] == bits.decode[1] {
        return Err("the logits do not depend on the token".into());
    }
    Ok(bits)
}

/// Compares the two parts of what was computed with stock.
fn compare(stock: &Bits, found: Result<&Bits, String>) -> [Outcome; 2] {
    let found = match found {
        Ok(found) => found,
        Err(why) => return [Err(why.clone()), Err(why)],
    };
    let same = |what: &str, stock: &[Vec<u32>], found: &[Vec<u32>]| {
        let differs = stock.iter().zip(found).position(|(a, b)| a != b);
        match differs {
            None if stock.len() == found.len() => Ok(()),
            at => Err(format!("{what} differs from step {at:?} on")),
        }
    };
    [
        same("decode", &stock.decode, &found.decode),
        same("prefill", &stock.prefill, &found.prefill),
    ]
}

fn engine_options(made: &Made) -> EngineOptions {
    let Batches { batch, ubatch } = batches(made);
    EngineOptions {
        threads: 1,
        n_ctx: N_CTX,
        n_batch: batch,
        n_ubatch: ubatch,
        ..EngineOptions::default()
    }
}

fn rig_options(made: &Made, store: StoreKind) -> RigOptions {
    let mut control = AdaptiveConfig::default();
    // The smallest there is: whatever a layer routed to is dropped when the next one needs room.
    control.capacity.limit_bytes = Some(0);
    control.pins.transit_floor_bytes = 0;
    RigOptions {
        direct: DirectOptions {
            verify: true,
            ..DirectOptions::default()
        },
        control,
        tick: Duration::from_millis(20),
        ..RigOptions::new(PolicyKind::Lru, store, engine_options(made))
    }
}

/// What a session under a store computes when it may keep nothing.
fn under(
    made: &Made,
    model: &Model,
    map: &ModelMap,
    store: StoreKind,
) -> Result<(Bits, u64), String> {
    let rig = Rig::assemble(model, map, rig_options(made, store), &mut |_, _| {});
    let rig = std::cell::RefCell::new(rig.map_err(|e| e.to_string())?);
    let bits = steps(
        || rig.borrow_mut().session.clear(),
        |tokens| {
            let session = &mut rig.borrow_mut().session;
            session.decode(tokens).map_err(|e| e.to_string())?;
            Ok::<_, String>(
                session
                    .logits()
                    .iter()
                    .map(|logit| logit.to_bits())
                    .collect(),
            )
        },
    )?;
    let rig = rig.into_inner();
    if rig.store_kind != store {
        return Err(format!(
            "the store is {:?}: {:?}",
            rig.store_kind, rig.notes
        ));
    }
    evicted(&rig, map)?;
    let split = rig.session.arena_use().map_or(0, |used| used.split_layers);
    Ok((bits, split))
}

/// Experts must have been evicted and fetched again, or nothing was shown.
fn evicted(rig: &Rig<'_>, map: &ModelMap) -> Outcome {
    let experts = map.shape().total_experts();
    let (mut decode, mut prefill) = (vec![0; experts], vec![0; experts]);
    rig.counters.decode_into(&mut decode);
    rig.counters.prefill_into(&mut prefill);
    let used = decode
        .iter()
        .zip(&prefill)
        .filter(|&(&d, &p)| d + p > 0)
        .count();
    let totals = rig.counters.totals();
    if totals.misses > used as u64 {
        return Ok(());
    }
    Err(format!(
        "{} misses of {used} experts: none was evicted",
        totals.misses
    ))
}

/// Blocks, and the experts that they routed to.
type Told = Vec<(u32, Vec<i32>)>;

/// Notes what it is told.
#[derive(Default)]
struct Witness(Arc<Mutex<Told>>);

impl RouteSink for Witness {
    fn routed(&mut self, routed: &Routed<'_>) -> Result<(), String> {
        let told = (routed.block, routed.experts.to_vec());
        self.0.lock().expect("told").push(told);
        Ok(())
    }

    fn decoded(&mut self, _: Pass, _: usize, _: u64, _: u64) {}

    fn streams(&self) -> bool {
        false
    }
}

/// Compares what the tap tells with what llama.cpp alone multiplied by.
fn routed(made: &Made, model: &Model, map: &ModelMap) -> Outcome {
    let plain = Plain::load(&made.path, batches(made), true).ok_or("llama.cpp does not load it")?;
    let plain = std::cell::RefCell::new(plain);
    steps(
        || plain.borrow_mut().clear(),
        |tokens| {
            plain
                .borrow_mut()
                .decode(tokens)
                .ok_or("llama.cpp does not decode it")
        },
    )?;
    let used: Used = plain.into_inner().take_used();
    let mut session =
        Session::new(model, &engine_options(made), true).map_err(|e| e.to_string())?;
    session.warm_up().map_err(|e| e.to_string())?;
    let witness = Witness::default();
    let told = Arc::clone(&witness.0);
    session.route_to(Box::new(witness), None);
    let session = std::cell::RefCell::new(session);
    steps(
        || session.borrow_mut().clear(),
        |tokens| {
            session
                .borrow_mut()
                .decode(tokens)
                .map_err(|e| e.to_string())?;
            Ok::<_, String>(Vec::new())
        },
    )?;
    let told = told.lock().expect("told");
    for layer in map.layers() {
        let of_block: Vec<i32> = told
            .iter()
            .filter(|(block, _)| *block == layer.block)
            .flat_map(|(_, experts)| experts.iter().copied())
            .collect();
        let weights = layer.parts.iter().filter(|part| part.weight);
        for part in weights {
            let name = &map.tensors()[part.tensor as usize].info.name;
            let used = used
                .get(name.as_ref())
                .ok_or_else(|| format!("{name} is not used"))?;
            if &of_block != used {
                return Err(format!(
                    "of {} experts that {name} was multiplied by, the tap told {}",
                    used.len(),
                    of_block.len()
                ));
            }
        }
        let distinct: std::collections::HashSet<i32> = of_block.iter().copied().collect();
        if distinct.len() <= layer.top_k as usize && layer.experts > layer.top_k {
            return Err(format!("block {} routes every token alike", layer.block));
        }
    }
    Ok(())
}

/// Compares every slice of every expert, in the file and in memory, with what was written.
fn slices(made: &Made, model: &Model, map: &ModelMap) -> Outcome {
    let mut session =
        Session::new(model, &engine_options(made), true).map_err(|e| e.to_string())?;
    session.warm_up().map_err(|e| e.to_string())?;
    let learned = session.learned().ok_or("nothing was learned")?;
    let layout = Layout::new(map, learned).map_err(|e| e.to_string())?;
    let shape = map.shape();
    let shards = map.shards().iter().map(|shard| std::fs::read(&shard.path));
    let shards: Vec<Vec<u8>> = shards
        .collect::<Result<_, _>>()
        .map_err(|e| e.to_string())?;
    let mut compared = 0;
    for (index, layer) in map.layers().iter().enumerate() {
        for expert in 0..layer.experts {
            let id = shape.id(index, expert);
            check_expert(made, map, &layout, (id, expert as usize), &shards)?;
            let files = map.expert_slices(id);
            compared += files.iter().map(|slice| slice.len).sum::<u64>();
        }
    }
    let written: usize = made
        .experts
        .iter()
        .filter(|(name, _)| name.ends_with(".weight") && hotpin::model::is_of_experts(name))
        .filter(|(name, _)| {
            map.tensor(name)
                .is_some_and(|t| t.kind != hotpin::model::TensorKind::Idle)
        })
        .map(|(_, bytes)| bytes.len())
        .sum();
    if compared < written as u64 {
        return Err(format!(
            "{compared} of {written} bytes of experts belong to one"
        ));
    }
    Ok(())
}

fn check_expert(
    made: &Made,
    map: &ModelMap,
    layout: &Layout,
    (id, expert): (ExpertId, usize),
    shards: &[Vec<u8>],
) -> Outcome {
    let files = map.expert_slices(id);
    let mapped = &layout.slices()[layout.slices_of(id)];
    if mapped.len() != files.len() {
        return Err(format!(
            "expert {id:?} has {} slices in memory",
            mapped.len()
        ));
    }
    for slice in files {
        let tensor = &map.tensors()[slice.tensor as usize].info;
        let written = &made.experts[tensor.name.as_ref()];
        let len = usize::try_from(slice.len).expect("small");
        let expected = &written[expert * len..(expert + 1) * len];
        let shard = slice.shard as usize;
        let start = usize::try_from(slice.offset).expect("small");
        if &shards[shard][start..start + len] != expected {
            return Err(format!(
                "{}: wrong bytes of {expert} in the file",
                tensor.name
            ));
        }
        let at = mapped
            .iter()
            .find(|m| m.shard == shard && m.offset == slice.offset)
            .ok_or_else(|| format!("{}: no address", tensor.name))?;
        // SAFETY: the layout says that this is mapped, and the model is still loaded.
        let memory = unsafe { std::slice::from_raw_parts(at.address as *const u8, at.len) };
        if memory != expected {
            return Err(format!(
                "{}: wrong bytes of {expert} in memory",
                tensor.name
            ));
        }
    }
    Ok(())
}

/// Runs every check. `Err` when llama.cpp itself does not run the model.
pub fn run(made: &Made) -> Result<Checks, String> {
    let stock = stock(made)?;
    let loaded = ModelMap::open(&made.path)
        .map_err(|e| e.to_string())
        .and_then(|map| {
            let model = Model::open(&made.path, |_| true).map_err(|e| e.to_string())?;
            Ok((map, model))
        });
    let (map, model) = match loaded {
        Ok(loaded) => loaded,
        Err(why) => {
            let all = || [Err(why.clone()), Err(why.clone())];
            return Ok(Checks {
                loads: Err(why.clone()),
                routed: Err(why.clone()),
                slices: Err(why.clone()),
                mapped: all(),
                direct: all(),
                split_layers: 0,
            });
        }
    };
    let loads = if map.is_moe() {
        Ok(())
    } else {
        Err("no experts were found".into())
    };
    let under = |store| under(made, &model, &map, store);
    let (mapped, direct) = (under(StoreKind::Mapped), under(StoreKind::Direct));
    let same = |found: &Result<(Bits, u64), String>| {
        let found = found.as_ref().map(|(bits, _)| bits);
        compare(&stock, found.map_err(Clone::clone))
    };
    Ok(Checks {
        loads,
        routed: routed(made, &model, &map),
        slices: slices(made, &model, &map),
        mapped: same(&mapped),
        direct: same(&direct),
        split_layers: direct.map_or(0, |(_, split)| split),
    })
}
