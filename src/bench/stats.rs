//! Medians, ratios and their intervals.

/// Repeats from which an interval for the median is given: with five, even the extremes cover the
/// median with a probability of 0.9375 only.
pub const MIN_REPEATS_FOR_INTERVAL: usize = 6;

/// Middle value, or the mean of the two middle ones; none of none.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    let sorted = sorted(values);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Median of whole numbers, halves rounded down; none of none.
#[must_use]
pub fn median_u64(values: &[u64]) -> Option<u64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(u64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Smallest and largest value; none of none.
#[must_use]
pub fn range(values: &[f64]) -> Option<(f64, f64)> {
    let sorted = sorted(values);
    Some((*sorted.first()?, *sorted.last()?))
}

/// An interval that holds the median with a probability of at least 95%, from order statistics: the
/// sign test turned round, so nothing is assumed of the distribution and nothing is random.
///
/// With n values, the k-th smallest and k-th largest miss the median with probability
/// 2 P(Bin(n, 1/2) < k); the largest such k that keeps this at or below 5% is used.
#[must_use]
pub fn median_interval_95(values: &[f64]) -> Option<(f64, f64)> {
    if values.len() < MIN_REPEATS_FOR_INTERVAL {
        return None;
    }
    let sorted = sorted(values);
    let count = sorted.len();
    let mut term = 0.5_f64.powi(i32::try_from(count).ok()?);
    let mut below = 0.0;
    let mut rank = 0;
    while rank < count / 2 && 2.0 * (below + term) <= 0.05 {
        below += term;
        term *= (count - rank) as f64 / (rank + 1) as f64;
        rank += 1;
    }
    let low = rank.checked_sub(1)?;
    Some((sorted[low], sorted[count - 1 - low]))
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn medians_of_few() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median_u64(&[u64::MAX, u64::MAX]), Some(u64::MAX));
        assert_eq!(median_u64(&[]), None);
    }

    #[test]
    fn interval_ranks_are_those_of_the_sign_test() {
        let first = |n: u32| -> Vec<f64> { (1..=n).map(f64::from).collect() };
        assert_eq!(median_interval_95(&first(5)), None);
        assert_eq!(median_interval_95(&first(6)), Some((1.0, 6.0)));
        assert_eq!(median_interval_95(&first(8)), Some((1.0, 8.0)));
        assert_eq!(median_interval_95(&first(9)), Some((2.0, 8.0)));
        assert_eq!(median_interval_95(&first(20)), Some((6.0, 15.0)));
    }

    proptest! {
        #[test]
        fn the_interval_holds_the_sample_median(values in prop::collection::vec(0.1..1e6, 6..60)) {
            let (low, high) = median_interval_95(&values).expect("enough values");
            let middle = median(&values).expect("not empty");
            prop_assert!(low <= middle && middle <= high);
        }
    }
}
