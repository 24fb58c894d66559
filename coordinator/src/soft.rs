//! What the raft leader knows of members from their heartbeats. Lost with the leadership, never truth.

use dashmap::DashMap;
use tenure_model::{Epoch, GroupId, MemberId, Partition, Tick};

/// Phase of a held partition, as its member says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Registering,
    Verifying,
    Resuming,
    Running,
    Draining,
}

impl Phase {
    /// The phase's text.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Registering => "registering",
            Self::Verifying => "verifying",
            Self::Resuming => "resuming",
            Self::Running => "running",
            Self::Draining => "draining",
        }
    }
}

/// A partition that a member believes to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) partition: Partition,
    pub(crate) epoch: Epoch,
    pub(crate) phase: Phase,
    /// Next offset to deliver. Meaningful once running.
    pub(crate) position: u64,
    pub(crate) phase_ms: u64,
    /// Empty: none.
    pub(crate) error: String,
}

/// The last heartbeat of one member.
#[derive(Clone, Debug)]
pub(crate) struct Beat {
    /// When the lease runs out, on this node's clock.
    pub(crate) deadline: Tick,
    pub(crate) held: Vec<Held>,
}

/// Last heartbeats of all members; written by the driver, read by whoever describes a group.
pub(crate) type Beats = DashMap<(GroupId, MemberId), Beat>;
