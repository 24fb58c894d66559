//! Figures over samples.

/// Middle sample, or the mean of the two middle ones.
///
/// # Panics
///
/// Without samples, or with one that is not a number.
#[must_use]
pub fn median(samples: &[f64]) -> f64 {
    let sorted = sorted(samples);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    }
}

/// Smallest sample that no less than `percent` of all are at or below.
///
/// # Panics
///
/// As [`median`].
#[must_use]
pub fn percentile(samples: &[f64], percent: usize) -> f64 {
    let sorted = sorted(samples);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted[rank.min(sorted.len()) - 1]
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    assert!(!samples.is_empty(), "a figure needs samples");
    let mut sorted = samples.to_vec();
    sorted.sort_by(|one, other| one.partial_cmp(other).expect("samples are numbers"));
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn middle_and_tail_of_few_samples() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&hundred, 99), 99.0);
        assert_eq!(percentile(&[7.0], 50), 7.0);
    }
}
