//! How often a sink says *not now*.

use std::sync::atomic::{AtomicU64, Ordering};

/// Answers of this kind that a check may always have: one stall of a busy machine is no habit of the sink's.
const TRANSIENT_FREE: u64 = 2;

/// Calls of one check and how many of them were answered `Transient`.
///
/// Counted where nobody else holds the resource, and in the hammer; not where the check itself makes a call wait.
#[derive(Debug, Default)]
pub(super) struct Tally {
    calls: AtomicU64,
    transient: AtomicU64,
}

impl Tally {
    pub(super) fn note(&self, is_transient: bool) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.transient.fetch_add(u64::from(is_transient), Ordering::Relaxed);
    }

    pub(super) fn answers(&self) -> Answers {
        Answers {
            calls: self.calls.load(Ordering::Relaxed),
            transient: self.transient.load(Ordering::Relaxed),
        }
    }
}

/// Calls of one check, as [`Outcome`](super::Outcome) has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answers {
    /// Calls that were counted.
    pub calls: u64,
    /// Those of them that were answered `Transient`.
    pub transient: u64,
}

impl Answers {
    /// Whether more of them were `Transient` than `percent_max` of a hundred.
    pub(super) const fn exceed(self, percent_max: u32) -> bool {
        self.transient > TRANSIENT_FREE && self.transient * 100 > self.calls * percent_max as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_are_free_and_then_the_share_counts() {
        let answers = |calls, transient| Answers { calls, transient };
        assert!(!answers(2, 2).exceed(5));
        assert!(!answers(60, 3).exceed(5));
        assert!(answers(59, 3).exceed(5));
    }
}
