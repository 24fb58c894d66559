//! Which refusals each kind of fault has met.

use std::collections::BTreeMap;
use std::fmt;

use super::faults::Kind;

/// Refusals that every fault meets sooner or later.
pub const REACHABLE: &[&str] = &[
    "FENCED",
    "MEMBER_GONE",
    "NOTHING_TO_DO",
    "NOT_LEADER",
    "NOT_OWNED",
    "NO_LEADER",
    "STALE_COMMIT",
    "STALE_TARGET",
    "STALE_TERM",
    "UNKNOWN",
    "member: ended",
    "member: lease checked",
    "member: lease ended",
    "member: not assigned",
    "sink: fenced",
    "sink: offset conflict",
    "sink: transient",
    "unknown",
];

/// Refusals that no run of this world meets, with the reason.
pub const UNREACHABLE: &[(&str, &str)] = &[
    ("UNKNOWN_GROUP", "a group is never deleted, and every command follows a join"),
    ("UNKNOWN_MEMBER", "an ended membership is remembered longer than a run lasts"),
    ("STALE_MEMBER", "a member id is never used for a second membership"),
    ("INSTANCE_IN_USE", "no member is static"),
    ("INSTANCE_WAITS", "no member is static"),
    ("UNKNOWN_PARTITION", "every member reports the one topic as it is"),
    ("SETTINGS_CONFLICT", "all members of a run name the same settings"),
    ("OFFSET_REGRESSED", "an owner resumes at or after what is committed and only goes on"),
    ("WRONG_HOME", "members commit where the group's home is"),
    ("HOME_INITIALISED", "no run sets the start of a home by name"),
    ("LIMIT_REACHED", "a run is far below every limit"),
    ("EPOCH_EXHAUSTED", "a run draws a few hundred epochs"),
    ("INVALID_ARGUMENT", "both ends are of this version and well-formed"),
    ("TOO_LARGE", "a run's messages are small"),
    ("UNSUPPORTED", "both ends are of this version"),
    ("OVERLOADED", "the modelled proposer has no bound"),
    ("SHUTTING_DOWN", "a node ends by a crash"),
    ("INTERNAL", "it would be a bug"),
];

/// Counts by fault and refusal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matrix {
    counts: BTreeMap<(Kind, &'static str), u64>,
}

impl Matrix {
    /// Counts a refusal while a fault was at work.
    pub fn count(&mut self, fault: Kind, refusal: &'static str) {
        *self.counts.entry((fault, refusal)).or_default() += 1;
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        for (cell, count) in &other.counts {
            *self.counts.entry(*cell).or_default() += count;
        }
    }

    /// How often a refusal met a fault.
    #[must_use]
    pub fn get(&self, fault: Kind, refusal: &'static str) -> u64 {
        self.counts.get(&(fault, refusal)).copied().unwrap_or(0)
    }

    /// Reachable cells that are still zero.
    #[must_use]
    pub fn empty(&self) -> Vec<(Kind, &'static str)> {
        let cells = Kind::ALL
            .iter()
            .flat_map(|fault| REACHABLE.iter().map(move |refusal| (*fault, *refusal)));
        cells.filter(|(fault, refusal)| self.get(*fault, refusal) == 0).collect()
    }
}

impl fmt::Display for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let refusals: std::collections::BTreeSet<&str> =
            self.counts.keys().map(|(_, refusal)| *refusal).collect();
        write!(f, "{:22}", "refusal")?;
        for fault in Kind::ALL {
            write!(f, "{:>15}", fault.as_str())?;
        }
        for refusal in refusals {
            write!(f, "\n{refusal:22}")?;
            for fault in Kind::ALL {
                let count = self.counts.get(&(*fault, refusal)).copied().unwrap_or(0);
                write!(f, "{count:>15}")?;
            }
        }
        Ok(())
    }
}
