//! Offsets.

use std::fmt;

/// The record to read next: one past the last one done, never the last one read.
///
/// 0 to 2^63 − 1, as in Kafka.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NextOffset(u64);

/// A number that is no offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("offset {given} is outside 0 to {}", NextOffset::MAX)]
pub struct OffsetError {
    /// What was given.
    pub given: i128,
}

impl NextOffset {
    /// Start of a partition.
    pub const ZERO: Self = Self(0);

    /// Highest offset, 2^63 − 1.
    pub const MAX: u64 = i64::MAX as u64;

    /// Checks `value` and makes an offset of it.
    ///
    /// # Errors
    ///
    /// [`OffsetError`] above [`NextOffset::MAX`].
    pub const fn new(value: u64) -> Result<Self, OffsetError> {
        if value <= Self::MAX { Ok(Self(value)) } else { Err(OffsetError { given: value as i128 }) }
    }

    /// Checks a signed number, as Kafka and SQL carry it.
    ///
    /// # Errors
    ///
    /// [`OffsetError`] below 0.
    pub const fn from_signed(value: i64) -> Result<Self, OffsetError> {
        if value >= 0 { Ok(Self(value as u64)) } else { Err(OffsetError { given: value as i128 }) }
    }

    /// The plain number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The number as Kafka and SQL carry it.
    #[must_use]
    pub const fn signed(self) -> i64 {
        self.0 as i64
    }
}

impl fmt::Display for NextOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Position of a commit among those of one grant, from 1; a late one of the same epoch is told by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommitSequence(pub u64);

impl fmt::Display for CommitSequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
