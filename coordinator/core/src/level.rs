//! Which rules decide: the feature level of the state, and the list of all rules that have changed since the first.
//!
//! Two replicas that decide one command by different rules have different states for good. So a changed rule never
//! just replaces the old one:
//!
//! 1. [`NEWEST`] rises by one, once per release that changes anything.
//! 2. The rule becomes a variant of `Rule` with the level that it holds from.
//! 3. Where it is decided stands `if self.follows(Rule::…) { new } else { old }`.
//!
//! The same holds for what is stored: at one level, one state has one stored form. The old branch goes when no log or
//! snapshot of a level below can be met any more.

use tenure_model::FeatureLevel;

use crate::decide::Decided;
use crate::{Event, Rejection, Reply, State};

/// The highest level whose rules this build knows.
pub const NEWEST: FeatureLevel = FeatureLevel(if cfg!(feature = "next-level") { 2 } else { 1 });

/// A rule that is not what it was at the first level.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "next-level"), allow(dead_code, reason = "no rule has changed yet"))]
pub(crate) enum Rule {
    /// An offset committed without metadata keeps the metadata committed before it.
    #[cfg(feature = "next-level")]
    KeptMetadata,
}

#[cfg_attr(not(feature = "next-level"), allow(dead_code, reason = "no rule has changed yet"))]
impl Rule {
    /// The level from which on it is decided the new way.
    const fn since(self) -> FeatureLevel {
        match self {
            #[cfg(feature = "next-level")]
            Self::KeptMetadata => FeatureLevel(2),
        }
    }
}

/// Set by the negative control of the upgrade tests: changed rules hold whatever the level.
#[cfg(feature = "next-level")]
#[doc(hidden)]
pub static GATE_REMOVED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

impl State {
    /// Whether `rule` is decided the new way.
    #[cfg_attr(not(feature = "next-level"), allow(dead_code, reason = "no rule has changed yet"))]
    pub(crate) fn follows(&self, rule: Rule) -> bool {
        #[cfg(feature = "next-level")]
        if GATE_REMOVED.load(std::sync::atomic::Ordering::Relaxed) {
            return true;
        }
        self.level >= rule.since()
    }

    pub(crate) fn raise_feature_level(&self, level: FeatureLevel) -> Decided {
        if level <= self.level {
            let what = format!("the feature level is {} already", self.level);
            return Err(Rejection::NothingToDo { what });
        }
        Ok((Reply::Done, vec![Event::FeatureLevelRaised { level }]))
    }
}
