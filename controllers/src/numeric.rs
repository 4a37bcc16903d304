//! Arithmetic of the learner: the same on every machine, and in a form that compilers vectorise.

/// 1.5 x 2^23: adding it to a small number rounds that to a whole one.
const ROUND: f32 = 12_582_912.0;

/// `2^x`, to 3e-7 of itself. Beyond 2^126 either way it stays there.
#[inline]
pub(crate) fn exp2(x: f32) -> f32 {
    let x = x.clamp(-126.0, 126.0);
    let shifted = x + ROUND;
    let whole = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    let t = x - (shifted - ROUND);
    // Taylor's series of 2^t within half of 1; the rest is below 2e-8 of the sum.
    let series = 1.0
        + t * (std::f32::consts::LN_2
            + t * (0.240_226_5
                + t * (0.055_504_11
                    + t * (0.009_618_129 + t * (0.001_333_356 + t * 0.000_154_035_3)))));
    f32::from_bits(series.to_bits().wrapping_add(whole << 23))
}

/// Base-2 logarithm of a positive, normal number, to 1e-6 of 1 or of itself.
#[inline]
pub(crate) fn log2(x: f32) -> f32 {
    // The exponent is chosen so that the rest lies between sqrt(1/2) and sqrt(2).
    let bits = x.to_bits().wrapping_sub(0x3f35_04f3);
    let exponent = bits.cast_signed() >> 23;
    let rest = f32::from_bits((bits & 0x007f_ffff).wrapping_add(0x3f35_04f3));
    // ln x = 2 atanh((x - 1) / (x + 1)).
    let s = (rest - 1.0) / (rest + 1.0);
    let q = s * s;
    let series = 2.0 + q * (0.666_666_7 + q * (0.4 + q * (0.285_714_3 + q * 0.222_222_2)));
    exponent as f32 + s * series * std::f32::consts::LOG2_E
}

/// Pseudo-random signs of length 1 together (SplitMix64, Steele et al. 2014).
pub(crate) fn signs<const N: usize>(seed: u64) -> [f32; N] {
    let length = 1.0 / (N as f32).sqrt();
    let mut state = seed.wrapping_mul(0xd1b5_4a32_d192_ed03);
    let mut bits = 0u64;
    std::array::from_fn(|i| {
        if i % 64 == 0 {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            bits = z ^ (z >> 31);
        }
        let negative = bits >> (i % 64) & 1 == 1;
        if negative { -length } else { length }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_and_logarithms_are_close() {
        for i in -2000..2000 {
            let x = i as f32 * 0.05;
            let exact = f64::from(x).exp2();
            assert!((f64::from(exp2(x)) / exact - 1.0).abs() < 3e-7, "2^{x}");
            let back = f64::from(log2(narrow(exact)));
            let allowed = 1e-6 * f64::from(x).abs().max(1.0);
            assert!((back - f64::from(x)).abs() < allowed, "{x} {back}");
        }
        assert!(exp2(f32::INFINITY).is_finite());
        assert!(exp2(f32::NEG_INFINITY) > 0.0);
    }

    #[test]
    fn signs_are_balanced_and_unlike() {
        let all: Vec<[f32; 64]> = (0..if cfg!(miri) { 8 } else { 64 }).map(signs).collect();
        let sum: f32 = all.iter().flatten().sum::<f32>() * 8.0;
        assert!(sum.abs() < 4.0 * 64.0, "{sum}");
        for (i, a) in all.iter().enumerate() {
            for b in &all[..i] {
                let cosine: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                assert!(cosine.abs() < 0.6, "{cosine}");
            }
        }
    }

    fn narrow(x: f64) -> f32 {
        crate::num::narrow(x)
    }
}
