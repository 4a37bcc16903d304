//! The offline optimum: keep what is used soonest (Belady 1966).
//!
//! With bypass: an expert that is needed later than everything in the cache is read and not kept.
//! A store may do so, since an expert used once need not stay; without it the optimum is lower by
//! less than .001 on the reference trace.

use super::Tally;

/// An expert that is not used again.
const NEVER: u32 = u32::MAX;

/// For each access, the position of the next access to the same expert.
pub(super) fn next_use(routed: &[u32], experts: usize) -> Vec<u32> {
    let mut next = vec![NEVER; experts];
    let mut uses = vec![NEVER; routed.len()];
    for (at, &id) in routed.iter().enumerate().rev() {
        let position = u32::try_from(at).unwrap_or(NEVER);
        uses[at] = std::mem::replace(&mut next[id as usize], position);
    }
    uses
}

/// The optimum with a cache of `capacity` experts.
pub(super) fn run(routed: &[u32], next_use: &[u32], experts: usize, capacity: usize) -> Tally {
    // Slots hold the next use of their expert; the slot of an expert is `NEVER` when it has none.
    let mut slot_of = vec![NEVER; experts];
    let mut owner: Vec<u32> = Vec::with_capacity(capacity);
    let mut due: Vec<u32> = Vec::with_capacity(capacity);
    let mut tally = Tally::default();
    for (&id, &next) in routed.iter().zip(next_use) {
        let slot = slot_of[id as usize];
        if slot != NEVER {
            tally.hits += 1;
            due[slot as usize] = next;
        } else if due.len() < capacity {
            slot_of[id as usize] = u32::try_from(due.len()).unwrap_or(NEVER);
            due.push(next);
            owner.push(id);
        } else {
            let last = due.iter().fold(0, |last, &due| last.max(due));
            if next < last
                && let Some(victim) = due.iter().position(|&due| due == last)
            {
                slot_of[id as usize] = slot_of[owner[victim] as usize];
                slot_of[owner[victim] as usize] = NEVER;
                owner[victim] = id;
                due[victim] = next;
                tally.replaced += 1;
            }
        }
    }
    tally
}
