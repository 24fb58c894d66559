//! The member's half of the protocol, without IO, clock or randomness of its own.

use tenure_model::{Epoch, NextOffset, Partition};

use super::event::{Phase, ReleaseReason};
use crate::source::TopicInfo;

/// What the run loop tells the session.
#[derive(Clone, Debug)]
pub enum Act {
    /// What is known of the topics.
    ReportTopics {
        /// All topics that were found.
        topics: Vec<TopicInfo>,
    },
    /// A grant is registered, verified and resumed.
    Acquired {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant.
        epoch: Epoch,
        /// The home now certainly has an offset.
        home_initialised: bool,
        /// Where it resumed.
        resume: NextOffset,
    },
    /// How far a grant has come.
    Phase {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant.
        epoch: Epoch,
        /// Phase it is in.
        phase: Phase,
        /// Next offset to deliver.
        position: NextOffset,
        /// Last error of this phase.
        error: Option<String>,
    },
    /// A grant is given back for good.
    Release {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant.
        epoch: Epoch,
        /// Final next offset; nothing: the committed one counts.
        next_offset: Option<NextOffset>,
        /// Why.
        reason: ReleaseReason,
        /// For people; may be empty.
        error: String,
    },
    /// The membership is to end; nothing is granted any more.
    Leave {
        /// For people.
        reason: String,
    },
}
