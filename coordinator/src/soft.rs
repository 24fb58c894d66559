//! What the raft leader knows of members from their heartbeats. Lost with the leadership, never truth.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dashmap::DashMap;
use tenure_model::{Epoch, GroupId, LabelName, MemberId, Partition, Tick};

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
    /// How long it has stood still; meaningful while running.
    pub still_ms: u64,
    /// End of the partition as its owner last heard it.
    pub end_offset: Option<u64>,
}

impl Held {
    /// Whether it is running and has stood still for at least `bound_ms`.
    pub const fn stands_still(&self, bound_ms: u64) -> bool {
        let is_running = match self.phase {
            Phase::Running => true,
            Phase::Registering | Phase::Verifying | Phase::Resuming | Phase::Draining => false,
        };
        is_running && self.still_ms >= bound_ms
    }
}

/// Labels of a member, as its process names them.
pub type Labels = Arc<BTreeMap<LabelName, String>>;

/// The last heartbeat of one member.
#[derive(Clone, Debug, Default)]
pub struct Beat {
    /// When the lease runs out, on this node's clock.
    pub deadline: Tick,
    pub held: Vec<Held>,
    /// Process that waits for this member's place, for people; empty: none.
    pub awaited_by: String,
    pub labels: Labels,
}

/// The last heartbeat of one member, as its session and `Beats` share it.
#[derive(Clone, Debug, Default)]
pub struct SharedBeat(Arc<Mutex<Beat>>);

impl SharedBeat {
    /// Nobody keeps it for long.
    pub fn lock(&self) -> MutexGuard<'_, Beat> {
        // What a heartbeat says is replaced as a whole with the next one.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<Beat> for SharedBeat {
    fn from(beat: Beat) -> Self {
        Self(Arc::new(Mutex::new(beat)))
    }
}

/// Last heartbeats of all members; written by the driver, read by whoever describes a group.
pub type Beats = DashMap<(GroupId, MemberId), SharedBeat>;
