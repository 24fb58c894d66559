//! Test kit: a coordinator, a source and a sink in memory, a clock that follows the runtime's, and a [`Drill`] that stops
//! a handler at each of its awaits.
//!
//! For tests of handlers and sinks without a network. The coordinator in memory does as it is told and elects,
//! expires and replicates nothing.

mod coordinator;
mod drill;

use tenure_model::{
    Clock, Epoch, GroupId, Index, MemberId, Partition, PartitionIndex, Tick, TopicId, TopicName,
};
use tokio::time::Instant;

pub use self::coordinator::MemoryCoordinator;
pub use self::drill::{Drill, DrillReport, Fault, STOPS_MAX};
use crate::grant::{Grant, Resource};
use crate::lease::Lease;
pub use crate::memory::{MemoryRow, MemorySink, MemorySource, MemoryWriter};

/// Clock of the tokio runtime: it stands still and jumps with a paused one. Made within the runtime.
#[derive(Clone, Copy, Debug)]
pub struct RuntimeClock {
    origin: Instant,
}

impl RuntimeClock {
    /// Clock that starts now.
    #[must_use]
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Default for RuntimeClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for RuntimeClock {
    fn now(&self) -> Tick {
        // From 1, so that no moment is taken for a stopped lease.
        Tick(1).after(Instant::now().saturating_duration_since(self.origin))
    }
}

/// Grant of partition 0 of topic `t` in group `g` to member `m`, under `epoch`, with an endless lease.
///
/// # Panics
///
/// When `epoch` is no epoch.
#[must_use]
pub fn grant_for_tests(epoch: u64) -> Grant {
    let topic = TopicName::new("t").expect("a name");
    let partition = Partition {
        topic_id: TopicId::of_name(&topic),
        index: PartitionIndex::new(0).expect("an index"),
    };
    let group = GroupId::new("g").expect("a name");
    Grant {
        resource: Resource::of_partition(&group, partition),
        group,
        member: MemberId::new("m").expect("a name"),
        topic,
        partition,
        epoch: Epoch::new(epoch).expect("an epoch"),
        handoff: Index(epoch),
        home_initialised: false,
        token: None,
        lease: Lease::endless(),
    }
}
