//! Seeded random numbers: SplitMix64 (Steele, Lea and Flood 2014), small and well mixed from any seed.

/// A stream of random numbers, fixed by its seed.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// A stream for a list of keys, such as a seed, a domain and a layer; equal keys give equal
    /// streams.
    #[must_use]
    pub fn keyed(keys: &[u64]) -> Self {
        let state = keys.iter().fold(0x6a09_e667_f3bc_c908, |state, &key| {
            mix(state ^ mix(key.wrapping_add(0x9e37_79b9_7f4a_7c15)))
        });
        Self { state }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// Uniform in (0, 1].
    pub fn unit(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Shuffles a slice (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            let at = self.bits() % (end as u64 + 1);
            items.swap(end, usize::try_from(at).unwrap_or(0));
        }
    }
}

const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
