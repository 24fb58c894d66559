//! Numbers that only rise.

use std::fmt;
use std::num::NonZeroU64;

/// Fencing token of one grant of a partition.
///
/// Drawn from one counter of the whole cluster, so that it rises with every grant of a partition, also
/// when the group or the topic was deleted and created again in between.
/// 1 to 2^53 − 1, so that every language and store can compare it (Lua's numbers are doubles).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(NonZeroU64);

/// A number that is no epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("epoch {given} is outside 1 to {}", Epoch::MAX)]
pub struct EpochError {
    /// What was given.
    pub given: u64,
}

impl Epoch {
    /// Epoch of the first grant in a new cluster.
    pub const FIRST: Self = Self(NonZeroU64::MIN);

    /// Highest epoch, 2^53 − 1.
    pub const MAX: u64 = (1 << 53) - 1;

    /// Checks `value` and makes an epoch of it.
    ///
    /// # Errors
    ///
    /// [`EpochError`] outside 1 to [`Epoch::MAX`].
    pub const fn new(value: u64) -> Result<Self, EpochError> {
        match NonZeroU64::new(value) {
            Some(nonzero) if value <= Self::MAX => Ok(Self(nonzero)),
            _ => Err(EpochError { given: value }),
        }
    }

    /// The plain number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// Epoch of the grant after this one; nothing once [`Epoch::MAX`] is reached.
    #[must_use]
    pub const fn next(self) -> Option<Self> {
        match Self::new(self.get() + 1) {
            Ok(next) => Some(next),
            Err(_) => None,
        }
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "e{}", self.0)
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

macro_rules! counter {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(pub u64);

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

counter!(
    /// Rises when a group's membership, subscriptions, weights, intents or partition counts change.
    GroupEpoch
);
counter!(
    /// Identity of one membership: the raft index of the entry in which the member joined.
    MemberEpoch
);
counter!(
    /// Raft term.
    Term
);
counter!(
    /// Raft index; also the *revision* that watchers see and the *version* of an assignment.
    Index
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_end_where_a_double_stops_counting() {
        assert_eq!(Epoch::new(0), Err(EpochError { given: 0 }));
        assert_eq!(Epoch::new(Epoch::MAX + 1), Err(EpochError { given: Epoch::MAX + 1 }));
        assert_eq!(Epoch::new(Epoch::MAX).unwrap().next(), None);
        assert_eq!(Epoch::FIRST.next().unwrap().to_string(), "e2");
    }
}
