//! llama.cpp's pool of experts in the device's memory. Its size is a parameter of the context, so that
//! another size means another context: sequences are saved, the context is created anew, and they are
//! put back. The old context goes first, so that the device never has to hold both.

use super::context::Made;
use super::session::lost;
use super::{EngineError, Session, log};
use crate::time::nanos;
use llama_cpp_4::context::LlamaContext;
use std::time::Instant;

/// What llama.cpp says of one group of layers when it has made a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSlots {
    /// Layers whose experts share the slots.
    pub layers: u32,
    /// Slots.
    pub slots: u32,
}

/// Uses of a pool, as llama.cpp counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PoolCount {
    /// Routed experts that were there.
    pub hits: u64,
    /// Those that had to be copied to the device.
    pub misses: u64,
    /// Bytes copied, to a hundredth of a MiB.
    pub uploaded_bytes: f64,
}

/// What llama.cpp says of a pool when it gives it up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PoolTotals {
    /// Micro-batches of up to eight tokens.
    pub small: PoolCount,
    /// Larger ones.
    pub large: PoolCount,
    /// Experts that batches too large for the pool took from it.
    pub copied: u64,
}

/// What came of changing a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct Repooled {
    /// Bytes asked for.
    pub asked_bytes: u64,
    /// Bytes that the pool before had.
    pub before_bytes: u64,
    /// Bytes that it has now.
    pub bytes: u64,
    /// Slots of each group of layers, as llama.cpp made them.
    pub slots: Vec<PoolSlots>,
    /// What llama.cpp counted of the pool before; `None` where it had none, or did not use it.
    pub ended: Option<PoolTotals>,
    /// Bytes of the sequences that were saved and put back.
    pub state_bytes: u64,
    /// Time that it took, ns.
    pub took_ns: u64,
    /// Why it does not have what was asked for.
    pub refused: Option<String>,
}

/// One sequence's part of a context.
#[derive(Debug)]
struct Saved {
    sequence: i32,
    state: Vec<u8>,
}

impl Session<'_> {
    /// Bytes of the pool; 0 without one.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        self.pool_bytes
    }

    /// Bytes of the largest pool that is made.
    #[must_use]
    pub fn pool_limit_bytes(&self) -> u64 {
        self.pool_limit_bytes
    }

    /// Allows pools of up to `bytes`: of larger ones llama.cpp aborts the process. Until this is called
    /// none is made.
    pub fn limit_pool(&mut self, bytes: u64) {
        self.pool_limit_bytes = bytes;
    }

    /// Changes the pool to `bytes`, 0 for none, between two decodes. Sequences stay as they are; logits of
    /// the last decode are gone. Where llama.cpp refuses the size, the pool stays what it was, or is
    /// given up.
    ///
    /// # Errors
    /// [`EngineError::Lost`] when no context could be created at all: no decode succeeds any more.
    pub fn set_pool(&mut self, bytes: u64) -> Result<Repooled, EngineError> {
        let began = Instant::now();
        let before_bytes = self.pool_bytes;
        let mut outcome = Repooled {
            asked_bytes: bytes,
            before_bytes,
            bytes: before_bytes,
            slots: Vec::new(),
            ended: None,
            state_bytes: 0,
            took_ns: 0,
            refused: None,
        };
        if bytes > self.pool_limit_bytes {
            outcome.refused = Some(format!(
                "the device bears no pool above {} bytes",
                self.pool_limit_bytes
            ));
            return Ok(outcome);
        }
        let saved = match self.save() {
            Ok(saved) => saved,
            Err(cause) => {
                outcome.refused = Some(cause);
                return Ok(outcome);
            }
        };
        outcome.state_bytes = saved.iter().map(|s| s.state.len() as u64).sum();
        let ((), said) = log::listen(|| drop(self.context.take()));
        outcome.ended = totals(&said);
        let mut sizes = vec![bytes, before_bytes, 0];
        sizes.dedup();
        for size in sizes {
            let made = self.create_with_pool(size).map_err(|e| e.to_string());
            let made = made.and_then(|mut made| {
                restore(&mut made.context, &saved)?;
                Ok(made)
            });
            match made {
                Ok(Made { context, said }) => {
                    self.context = Some(context);
                    self.pool_bytes = size;
                    outcome.bytes = size;
                    outcome.slots = said.iter().filter_map(|line| slots(line)).collect();
                    break;
                }
                Err(cause) => {
                    outcome.refused.get_or_insert(cause);
                }
            }
        }
        let Some(_) = &self.context else {
            let cause = outcome.refused.unwrap_or_default();
            tracing::error!("no context could be created again: {cause}");
            return Err(EngineError::Lost(cause));
        };
        let streams = self.streams.take().unwrap_or(false);
        self.attach(streams);
        outcome.took_ns = nanos(began.elapsed());
        Ok(outcome)
    }

    /// Bytes that saving all sequences takes now.
    #[must_use]
    pub fn state_bytes(&mut self) -> u64 {
        let sequences = self.sequences();
        let Some(context) = &mut self.context else {
            return 0;
        };
        filled(context, sequences)
            .into_iter()
            .map(|sequence| context.state_seq_get_size(sequence) as u64)
            .sum()
    }

    fn save(&mut self) -> Result<Vec<Saved>, String> {
        let sequences = self.sequences();
        let context = self.context.as_mut().ok_or_else(|| lost().to_string())?;
        filled(context, sequences)
            .into_iter()
            .map(|sequence| {
                let size = context.state_seq_get_size(sequence);
                let mut state = Vec::new();
                let room = state.try_reserve_exact(size);
                room.map_err(|_| format!("no memory to save the {size} bytes of a sequence"))?;
                state.resize(size, 0);
                if context.state_seq_get_data(&mut state, sequence) == size {
                    Ok(Saved { sequence, state })
                } else {
                    Err(format!("sequence {sequence} could not be saved"))
                }
            })
            .collect()
    }

    /// Whether there may be a pool.
    #[must_use]
    pub fn may_have_pool(&self) -> bool {
        self.pool_limit_bytes > 0
    }

    /// Changes the pool where the sink of the routing asks for it. Each decode does this first; it is for
    /// the time between.
    ///
    /// # Errors
    /// As [`Self::set_pool`].
    pub fn follow_orders(&mut self) -> Result<(), EngineError> {
        let order = self.tap.as_mut().and_then(|tap| tap.get_mut().pool_order());
        let Some(bytes) = order.filter(|&bytes| bytes != self.pool_bytes) else {
            return Ok(());
        };
        let outcome = self.set_pool(bytes);
        if let Some(tap) = &mut self.tap {
            match &outcome {
                Ok(outcome) => tap.get_mut().repooled(outcome),
                Err(error) => tap.get_mut().lost(&error.to_string()),
            }
        }
        outcome.map(drop)
    }
}

/// What of a session outlives its model.
#[derive(Debug)]
pub struct Kept {
    sequences: Vec<Saved>,
    position: usize,
    /// Why there are none, where they could not be saved.
    lost: Option<String>,
    /// What llama.cpp counted of the pool that went with the context.
    pub ended: Option<PoolTotals>,
    /// Bytes of the sequences.
    pub state_bytes: u64,
}

impl Session<'_> {
    /// Saves the sequences and gives up the context, so that the model can be loaded anew. Sequences that
    /// cannot be saved are lost, as [`Self::take_over`] tells.
    pub fn give_up(&mut self) -> Kept {
        let (sequences, lost) = match self.save() {
            Ok(sequences) => (sequences, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        let ((), said) = log::listen(|| drop(self.context.take()));
        self.pool_bytes = 0;
        Kept {
            state_bytes: sequences.iter().map(|s| s.state.len() as u64).sum(),
            sequences,
            position: self.position,
            lost,
            ended: totals(&said),
        }
    }

    /// Puts back what another session over the same model file was given up with.
    ///
    /// # Errors
    /// When they were not saved, or llama.cpp does not take them; the context is empty then.
    pub fn take_over(&mut self, kept: &Kept) -> Result<(), String> {
        self.clear();
        if let Some(why) = &kept.lost {
            return Err(why.clone());
        }
        let context = self.context.as_mut().ok_or_else(|| lost().to_string())?;
        if let Err(cause) = restore(context, &kept.sequences) {
            self.clear();
            return Err(cause);
        }
        self.position = kept.position;
        Ok(())
    }
}

/// Sequences that have anything in a context.
fn filled(context: &LlamaContext<'_>, sequences: usize) -> Vec<i32> {
    (0..i32::try_from(sequences).unwrap_or(i32::MAX))
        .filter(|&sequence| context.memory_seq_pos_min(sequence) >= 0)
        .collect()
}

fn restore(context: &mut LlamaContext<'_>, saved: &[Saved]) -> Result<(), String> {
    for Saved { sequence, state } in saved {
        if context.state_seq_set_data(state, *sequence) != state.len() {
            return Err(format!("sequence {sequence} could not be put back"));
        }
    }
    Ok(())
}

/// A number behind `name` in a line.
fn number<T: std::str::FromStr>(line: &str, name: &str) -> Option<T> {
    let rest = line.split_once(name)?.1.trim_start();
    let end = rest
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(rest.len());
    rest[..end].parse().ok()
}

/// `... 30 layers, q4_0:   140 slots (58.3%)`.
fn slots(line: &str) -> Option<PoolSlots> {
    let head = line.split_once(" slots (")?.0;
    let (head, slots) = head.rsplit_once(':')?;
    let layers = head.split_once(" layers,")?.0;
    Some(PoolSlots {
        layers: layers.rsplit([' ', ':']).next()?.parse().ok()?,
        slots: slots.trim().parse().ok()?,
    })
}

/// What a pool that was used says at its end.
fn totals(lines: &[String]) -> Option<PoolTotals> {
    let mut found = None;
    for line in lines
        .iter()
        .filter(|line| line.contains("llama_moe_cache: "))
    {
        let totals: &mut PoolTotals = found.get_or_insert_default();
        if let Some(copied) = number(line, "large batches:") {
            totals.copied = copied;
            continue;
        }
        let uploaded_mib: f64 = number(line, "uploaded =")?;
        let count = PoolCount {
            hits: number(line, "hits =")?,
            misses: number(line, "misses =")?,
            uploaded_bytes: uploaded_mib * 1024.0 * 1024.0,
        };
        if line.contains("ubatch <= 8") {
            totals.small = count;
        } else {
            totals.large = count;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{PoolCount, PoolSlots, PoolTotals, slots, totals};

    #[test]
    fn what_llama_cpp_says_of_its_pool_is_read() {
        let line = "impl: 30 layers, q4_0:   140 slots (58.3%)";
        let read = PoolSlots {
            layers: 30,
            slots: 140,
        };
        assert_eq!(slots(line), Some(read));
        assert_eq!(slots("impl:  2 layers, q8_0: no slots"), None);
        let said = [
            "llama_moe_cache: ubatch <= 8: hits = 607, misses = 2524, hit rate = 19.39%, uploaded = 6788.00 MiB",
            "llama_moe_cache: ubatch  > 8: hits = 1, misses = 2, hit rate = 33.33%, uploaded = 0.50 MiB",
            "llama_moe_cache: large batches: 12 experts copied from the cache, 3.00 MiB",
            "~llama_context: something else",
        ]
        .map(str::to_owned);
        let read = PoolTotals {
            small: PoolCount {
                hits: 607,
                misses: 2524,
                uploaded_bytes: 6788.0 * 1024.0 * 1024.0,
            },
            large: PoolCount {
                hits: 1,
                misses: 2,
                uploaded_bytes: 512.0 * 1024.0,
            },
            copied: 12,
        };
        assert_eq!(totals(&said), Some(read));
        assert_eq!(totals(&said[3..]), None);
    }
}
