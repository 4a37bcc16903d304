//! A small seeded generator, so that a seed means the same on every platform.

/// xoshiro256++ seeded through splitmix64 (Blackman and Vigna, <https://prng.di.unimi.it>).
#[derive(Clone, Debug)]
pub(crate) struct Rng([u64; 4]);

impl Rng {
    /// A generator for one use: equal seeds and places give equal streams, others independent ones.
    pub(crate) fn new(seed: u64, place: [u64; 3]) -> Self {
        let mut state = seed;
        for part in place {
            state = splitmix(&mut state) ^ part;
        }
        Self(std::array::from_fn(|_| splitmix(&mut state)))
    }

    fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let shifted = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= shifted;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number below `bound` (0 for 0). The bias is below `bound` / 2^32.
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        (((self.next() >> 32) * u64::from(bound)) >> 32) as u32
    }

    /// A number in [0, 1) with 24 random bits.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 16_777_216.0
    }

    /// A number with mean 0 and deviation 1, near enough to normal and never beyond 6: the sum of 12
    /// uniform ones, which needs no library function whose last bit may differ.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }

    /// The numbers below `count` in random order.
    pub(crate) fn permutation(&mut self, count: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count).collect();
        for last in (1..count).rev() {
            let other = self.below(last + 1);
            order.swap(last as usize, other as usize);
        }
        order
    }
}

fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_hold_every_number_and_depend_on_seed_and_place() {
        let order = |seed, place| Rng::new(seed, place).permutation(100);
        let mut sorted = order(1, [0, 0, 0]);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_eq!(order(1, [1, 2, 3]), order(1, [1, 2, 3]));
        assert_ne!(order(1, [1, 2, 3]), order(2, [1, 2, 3]));
        assert_ne!(order(1, [1, 2, 3]), order(1, [1, 3, 2]));
    }

    #[test]
    fn normal_has_the_right_moments() {
        let mut rng = Rng::new(7, [0; 3]);
        let values: Vec<f32> = (0..20_000).map(|_| rng.normal()).collect();
        let mean = values.iter().sum::<f32>() / 20_000.0;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 20_000.0;
        assert!(
            mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05,
            "{mean} {variance}"
        );
    }
}
