//! Lists of experts by age, threaded through arrays: an expert is in one of `N` lists or in none.

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    newer: u32,
    older: u32,
    list: u32,
}

/// `N` lists; each has an anchor behind the experts, whose `older` is the newest.
#[derive(Debug)]
pub(super) struct Lists<const N: usize> {
    links: Vec<Link>,
    experts: u32,
    len: [usize; N],
}

impl<const N: usize> Lists<N> {
    pub fn new(experts: usize) -> Self {
        let first = u32::try_from(experts).unwrap_or(NONE);
        let free = Link {
            newer: NONE,
            older: NONE,
            list: NONE,
        };
        let mut links = vec![free; experts];
        links.extend((first..).take(N).map(|anchor| Link {
            newer: anchor,
            older: anchor,
            list: NONE,
        }));
        Self {
            links,
            experts: first,
            len: [0; N],
        }
    }

    /// The list that an expert is in.
    pub fn list_of(&self, id: u32) -> Option<usize> {
        let list = self.links[id as usize].list;
        (list != NONE).then_some(list as usize)
    }

    pub fn len(&self, list: usize) -> usize {
        self.len[list]
    }

    /// Puts an expert at the newest end of a list, out of any other.
    pub fn put(&mut self, list: usize, id: u32) {
        self.remove(id);
        let number = u32::try_from(list).unwrap_or(NONE);
        let anchor = self.experts + number;
        let older = self.links[anchor as usize].older;
        self.links[id as usize] = Link {
            newer: anchor,
            older,
            list: number,
        };
        self.links[older as usize].newer = id;
        self.links[anchor as usize].older = id;
        self.len[list] += 1;
    }

    pub fn remove(&mut self, id: u32) {
        let Link { newer, older, list } = self.links[id as usize];
        if list != NONE {
            self.links[newer as usize].older = older;
            self.links[older as usize].newer = newer;
            self.links[id as usize].list = NONE;
            self.len[list as usize] -= 1;
        }
    }

    /// The oldest expert of a list.
    pub fn oldest(&self, list: usize) -> Option<u32> {
        let anchor = self.experts as usize + list;
        (self.len[list] > 0).then(|| self.links[anchor].newer)
    }

    /// Takes the oldest expert out of a list.
    pub fn take_oldest(&mut self, list: usize) -> Option<u32> {
        let oldest = self.oldest(list)?;
        self.remove(oldest);
        Some(oldest)
    }
}
