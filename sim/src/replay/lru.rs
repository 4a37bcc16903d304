//! Least recently used: a list threaded through arrays, the expert's id being its node.

use super::Tally;

/// Marks an expert that is not in the list.
const OUT: u32 = u32::MAX;

/// An LRU cache of `capacity` experts, which must not be 0.
pub(super) fn run(routed: &[u32], experts: usize, capacity: usize) -> Tally {
    let mut list = List::new(experts);
    let (mut hits, mut held) = (0, 0usize);
    for &id in routed {
        if list.contains(id) {
            hits += 1;
            if list.newest() != id {
                list.unlink(id);
                list.push(id);
            }
            continue;
        }
        if held == capacity {
            let oldest = list.oldest();
            list.unlink(oldest);
            list.links[oldest as usize].older = OUT;
        } else {
            held += 1;
        }
        list.push(id);
    }
    Tally {
        hits,
        replaced: routed.len() as u64 - hits - held as u64,
    }
}

#[derive(Clone, Copy, Debug)]
struct Link {
    newer: u32,
    older: u32,
}

/// A ring of links; the last is the anchor, whose `older` is the newest expert.
#[derive(Debug)]
struct List {
    links: Vec<Link>,
    anchor: u32,
}

impl List {
    fn new(experts: usize) -> Self {
        let anchor = u32::try_from(experts).unwrap_or(OUT);
        let mut links = vec![
            Link {
                newer: OUT,
                older: OUT
            };
            experts
        ];
        links.push(Link {
            newer: anchor,
            older: anchor,
        });
        Self { links, anchor }
    }

    fn contains(&self, id: u32) -> bool {
        self.links[id as usize].older != OUT
    }

    fn newest(&self) -> u32 {
        self.links[self.anchor as usize].older
    }

    fn oldest(&self) -> u32 {
        self.links[self.anchor as usize].newer
    }

    fn unlink(&mut self, id: u32) {
        let Link { newer, older } = self.links[id as usize];
        self.links[newer as usize].older = older;
        self.links[older as usize].newer = newer;
    }

    fn push(&mut self, id: u32) {
        let newest = self.newest();
        self.links[id as usize] = Link {
            newer: self.anchor,
            older: newest,
        };
        self.links[newest as usize].newer = id;
        self.links[self.anchor as usize].older = id;
    }
}
