//! What the kit found.

use std::fmt;

use super::tally::Answers;

/// One check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Check {
    /// A write of the old epoch after the new one is registered is refused, and stays refused.
    StaleWrite,
    /// A registration of the old epoch after the new one is refused.
    LateRegistration,
    /// A registration may be repeated and answers what it displaced.
    ReRegistration,
    /// The resume point has everything that the old owner got in before the fence.
    ReadOrder,
    /// The start is set once.
    InitialiseOnce,
    /// An absent offset at an initialised home is a fault.
    AbsentOffset,
    /// A grant that is not registered cannot write.
    Unregistered,
    /// Retiring never lowers the fence.
    Retire,
    /// The fence survives the process.
    Restart,
    /// A paused holder with an open write delays the next owner as declared, and does not get its write in.
    PausedHolder,
    /// Eight writers of the old epoch do not starve a registration.
    Starvation,
    /// A write that is given up between sending and its answer is in or out, and both its writer and the next owner find
    /// out which.
    CutOff,
    /// Hand-overs with random pauses: no row twice, none lost, none beyond the offset, epochs rise.
    Hammer,
}

impl Check {
    /// All checks, in the order in which they run.
    pub const ALL: [Self; 13] = [
        Self::StaleWrite,
        Self::LateRegistration,
        Self::ReRegistration,
        Self::ReadOrder,
        Self::InitialiseOnce,
        Self::AbsentOffset,
        Self::Unregistered,
        Self::Retire,
        Self::Restart,
        Self::PausedHolder,
        Self::Starvation,
        Self::CutOff,
        Self::Hammer,
    ];

    /// Name in tables.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::StaleWrite => "stale write",
            Self::LateRegistration => "late registration",
            Self::ReRegistration => "re-registration",
            Self::ReadOrder => "read order",
            Self::InitialiseOnce => "initialise once",
            Self::AbsentOffset => "absent offset",
            Self::Unregistered => "unregistered writer",
            Self::Retire => "retire",
            Self::Restart => "restart",
            Self::PausedHolder => "paused holder",
            Self::Starvation => "starvation",
            Self::CutOff => "cut off",
            Self::Hammer => "hammer",
        }
    }

    /// First of the partitions that the check uses; it has a hundred.
    pub(super) const fn partition(self) -> u32 {
        self as u32 * 100
    }
}

/// What came of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Holds; with figures.
    Passed(String),
    /// Does not hold, and why.
    Failed(String),
    /// The sink has no such thing.
    Skipped(&'static str),
}

/// A check and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The check.
    pub check: Check,
    /// What came of it.
    pub verdict: Verdict,
    /// How often the sink said *not now*.
    pub answers: Answers,
}

/// All checks. Prints as a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Seed of the run.
    pub seed: u64,
    /// In the order in which they ran.
    pub outcomes: Vec<Outcome>,
}

impl Report {
    /// Checks that do not hold; empty when the sink conforms.
    #[must_use]
    pub fn failed(&self) -> Vec<Check> {
        let failed = |outcome: &&Outcome| matches!(outcome.verdict, Verdict::Failed(_));
        self.outcomes.iter().filter(failed).map(|outcome| outcome.check).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<20} {:<7} {:>10} seed {}", "check", "verdict", "transient", self.seed)?;
        for outcome in &self.outcomes {
            writeln!(f, "{outcome}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (verdict, text) = match &self.verdict {
            Verdict::Passed(figures) => ("passed", figures.as_str()),
            Verdict::Failed(why) => ("FAILED", why.as_str()),
            Verdict::Skipped(why) => ("skipped", *why),
        };
        let Answers { calls, transient } = self.answers;
        let share = format!("{transient}/{calls}");
        write!(f, "{:<20} {verdict:<7} {share:>10} {text}", self.check.as_str())
    }
}
