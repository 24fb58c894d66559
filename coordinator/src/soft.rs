//! What the raft leader knows of members from their heartbeats. Lost with the leadership, never truth.

use dashmap::DashMap;
use tenure_model::{Epoch, GroupId, MemberId, Partition, Tick};

/// Phase of a held partition, as its member says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Registering,
    Verifying,
    Resuming,
    Running,
    Draining,
}

impl Phase {
    /// The phase's text.
    pub const fn as_str(self) -> &'static str {
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
pub struct Held {
    pub partition: Partition,
    pub epoch: Epoch,
    pub phase: Phase,
    /// Next offset to deliver. Meaningful once running.
    pub position: u64,
    pub phase_ms: u64,
    /// Empty: none.
    pub error: String,
}

/// The last heartbeat of one member.
#[derive(Clone, Debug)]
pub struct Beat {
    /// When the lease runs out, on this node's clock.
    pub deadline: Tick,
    pub held: Vec<Held>,
    /// Process that waits for this member's place, for people; empty: none.
    pub awaited_by: String,
}

/// Last heartbeats of all members; written by the driver, read by whoever describes a group.
pub type Beats = DashMap<(GroupId, MemberId), Beat>;
