//! The graph as warm-up saw it, kept to find out what is used where.

use super::tap::{name_of, original};
use llama_cpp_sys_4 as sys;
use std::collections::HashMap;

/// Which source of a multiplication by experts selects them.
const CHOICE: usize = 2;

/// One node, by addresses: nothing is read through them.
struct Seen {
    address: usize,
    sources: Vec<usize>,
    /// The block whose experts it multiplies by.
    block: Option<u32>,
    name: Box<[u8]>,
    /// Name of the tensor that selects the experts of a multiplication.
    choice: Option<Box<[u8]>>,
}

/// The nodes of one graph, in order.
#[derive(Default)]
pub(super) struct Trail(Vec<Seen>);

impl Trail {
    /// Forgets the graph before.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Adds a node; `block` is that whose experts it multiplies by.
    pub(super) fn add(&mut self, node: &sys::ggml_tensor, block: Option<u32>) {
        let sources = node.src.iter().filter(|s| !s.is_null());
        // SAFETY: sources of a scheduled node are null or valid for the life of the graph.
        let choice = block.and_then(|_| unsafe { node.src[CHOICE].as_ref() });
        self.0.push(Seen {
            address: std::ptr::from_ref(node) as usize,
            sources: sources.map(|&s| s as usize).collect(),
            block,
            name: name_of(node).into(),
            choice: choice.map(|choice| original(name_of(choice)).into()),
        });
    }

    /// Blocks whose experts are selected by a copy of one of several nodes of the same name.
    pub(super) fn unclear_blocks(&self) -> Vec<u32> {
        let mut unclear: Vec<u32> = self
            .0
            .iter()
            .filter(|seen| {
                let node = seen.sources.get(CHOICE);
                let is_copy = !self.0.iter().any(|s| Some(&s.address) == node);
                let named = self
                    .0
                    .iter()
                    .filter(|s| Some(&s.name) == seen.choice.as_ref());
                is_copy && named.count() > 1
            })
            .filter_map(|seen| seen.block)
            .collect();
        unclear.dedup();
        unclear
    }

    /// Blocks whose experts are selected by one of several nodes of the same name: which one, counted
    /// from 0, and of how many.
    pub(super) fn namesakes(&self) -> HashMap<u32, (usize, usize)> {
        let mut found = HashMap::new();
        for seen in &self.0 {
            let (Some(block), Some(choice)) = (seen.block, seen.sources.get(CHOICE)) else {
                continue;
            };
            let Some(chosen_by) = self.0.iter().find(|s| s.address == *choice) else {
                continue;
            };
            let named = self.0.iter().filter(|s| s.name == chosen_by.name);
            let own = named.clone().position(|s| s.address == *choice);
            let all = named.count();
            if let Some(own) = own.filter(|_| all > 1) {
                found.insert(block, (own, all));
            }
        }
        found
    }

    /// Blocks of which something from the first expert multiplication on, but before the last, is
    /// used after the last.
    pub(super) fn shared_blocks(&self) -> Vec<u32> {
        let mut ranges: HashMap<u32, (usize, usize)> = HashMap::new();
        for (at, seen) in self.0.iter().enumerate() {
            if let Some(block) = seen.block {
                ranges.entry(block).or_insert((at, at)).1 = at;
            }
        }
        let mut block_of: HashMap<usize, (u32, usize)> = HashMap::new();
        for (&block, &(first, last)) in &ranges {
            for seen in &self.0[first..last] {
                block_of.insert(seen.address, (block, last));
            }
        }
        let mut shared: Vec<u32> = self
            .0
            .iter()
            .enumerate()
            .flat_map(|(at, seen)| seen.sources.iter().map(move |source| (at, source)))
            .filter_map(|(at, source)| {
                let &(block, last) = block_of.get(source)?;
                (at > last).then_some(block)
            })
            .collect();
        shared.sort_unstable();
        shared.dedup();
        shared
    }
}

#[cfg(test)]
mod tests {
    use super::{Seen, Trail};

    #[test]
    fn only_what_is_used_after_the_last_multiplication_is_shared() {
        let seen = |address, sources: &[usize], block| Seen {
            address,
            sources: sources.to_vec(),
            block,
            name: Box::default(),
            choice: None,
        };
        let mut trail = Trail(vec![
            seen(1, &[], None),
            seen(2, &[1], Some(0)),
            seen(3, &[2], None),
            seen(4, &[3], Some(0)),
            seen(5, &[4, 1], None),
            seen(6, &[5], Some(1)),
            seen(7, &[6], None),
            seen(8, &[7], Some(1)),
        ]);
        assert!(trail.shared_blocks().is_empty());
        trail.0.push(seen(9, &[8, 7], None));
        assert_eq!(trail.shared_blocks(), [1]);
    }

    #[test]
    fn of_several_nodes_of_one_name_the_one_that_selects_is_known() {
        let seen = |address, sources: &[usize], block, name: &str| Seen {
            address,
            sources: sources.to_vec(),
            block,
            name: name.as_bytes().into(),
            choice: block.map(|block| format!("choice-{block}").into_bytes().into()),
        };
        let trail = Trail(vec![
            seen(1, &[], None, "choice-0"),
            seen(2, &[50, 1, 1], Some(0), "up"),
            seen(3, &[2], None, "choice-1"),
            seen(4, &[2], None, "choice-1"),
            seen(5, &[51, 4, 4], Some(1), "up"),
            seen(6, &[5], None, "choice-1"),
        ]);
        assert_eq!(trail.namesakes(), [(1, (1, 3))].into());
        assert!(trail.unclear_blocks().is_empty());
        let copied = Trail(vec![
            seen(1, &[], None, "choice-0"),
            seen(2, &[50, 1, 90], Some(0), "up"),
            seen(3, &[2], None, "choice-1"),
            seen(4, &[2], None, "choice-1"),
            seen(5, &[51, 4, 91], Some(1), "up"),
        ]);
        assert_eq!(copied.unclear_blocks(), [1]);
    }
}
