//! How much one run repeats, and from which seed.

use std::env;

use crate::servers::announce_skip;

/// How much of the repetitions to run. Set by `tests/run` in `TENURE_TEST_TIER`; default `Ci`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// `fast`: nothing that the build does not need itself, so real parts are left out; about a fiftieth of the
    /// repetitions.
    Fast,
    /// `ci`: about a tenth of the repetitions.
    Ci,
    /// `full`: all repetitions.
    Full,
}

impl Tier {
    /// Tier of this run.
    #[must_use]
    pub fn current() -> Self {
        match env::var("TENURE_TEST_TIER").as_deref() {
            Ok("fast") => Self::Fast,
            Ok("full") => Self::Full,
            Ok("ci") | Err(_) => Self::Ci,
            Ok(other) => panic!("TENURE_TEST_TIER is {other:?}; give fast, ci or full"),
        }
    }

    /// Repetitions out of `full`: all, a tenth, or a fiftieth; rounded up.
    #[must_use]
    pub fn repetitions(self, full: usize) -> usize {
        match self {
            Self::Fast => full.div_ceil(50),
            Self::Ci => full.div_ceil(10),
            Self::Full => full,
        }
    }
}

/// Whether a test that takes its time runs: not in the fast tier, where it is announced as skipped.
#[must_use]
pub fn has_time() -> bool {
    match Tier::current() {
        Tier::Ci | Tier::Full => true,
        Tier::Fast => {
            announce_skip("the fast tier leaves out what takes long");
            false
        }
    }
}

/// Number of simulation seeds: `TENURE_SEEDS` (`tests/run --seeds N`), else the tier's share of
/// `full`.
#[must_use]
pub fn seed_count(full: usize) -> usize {
    number("TENURE_SEEDS").map_or_else(
        || Tier::current().repetitions(full),
        |count| usize::try_from(count).expect("TENURE_SEEDS fits this machine's words"),
    )
}

/// Seed of this run: `TENURE_SEED`, or a random one. A test prints it before it uses it.
#[must_use]
pub fn seed() -> u64 {
    number("TENURE_SEED").unwrap_or_else(rand::random)
}

fn number(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}; give a whole number")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ci_runs_a_tenth_of_the_repetitions_and_at_least_one() {
        assert_eq!(Tier::Full.repetitions(20), 20);
        assert_eq!(Tier::Ci.repetitions(20), 2);
        assert_eq!(Tier::Ci.repetitions(21), 3);
        assert_eq!(Tier::Ci.repetitions(1), 1);
        assert_eq!(Tier::Fast.repetitions(101), 3);
    }
}
