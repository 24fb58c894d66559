//! What replicas of different versions must agree on.

use std::fmt;

/// Which rules the replicas decide by; a property of the replicated state, raised by an entry of its own.
///
/// Not the version of a program: one program knows several levels, and the oldest node of the cluster says which one
/// counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FeatureLevel(pub u32);

impl FeatureLevel {
    /// Where every cluster begins.
    pub const FIRST: Self = Self(1);
}

impl Default for FeatureLevel {
    fn default() -> Self {
        Self::FIRST
    }
}

impl fmt::Display for FeatureLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Sum over a whole replicated state: equal states have equal ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateDigest(pub u64);

impl fmt::Display for StateDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
