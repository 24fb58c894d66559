//! A grant: the right to one partition under one epoch.

use std::fmt;
use std::sync::Arc;

use tenure_model::{Epoch, GroupId, Index, MemberId, Partition, TopicName};

use crate::lease::Lease;

/// Name under which a sink keeps the fence of one partition: `group/topic id/index`, or a name of one's own.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Resource(Arc<str>);

impl Resource {
    /// Resource of a group's partition.
    #[must_use]
    pub fn of_partition(group: &GroupId, partition: Partition) -> Self {
        Self(format!("{group}/{}/{}", partition.topic_id, partition.index).into())
    }

    /// The resource as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The right to one partition under one epoch. Cheap to clone; all clones end together.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Group that the member consumes in.
    pub group: GroupId,
    /// Holder.
    pub member: MemberId,
    /// Name of the topic.
    pub topic: TopicName,
    /// The partition.
    pub partition: Partition,
    /// Fencing token.
    pub epoch: Epoch,
    /// Names the handoff in the logs of both sides.
    pub handoff: Index,
    /// Whether the home of the offset certainly has one; if so, an absent offset is a fault, never a fresh start.
    pub home_initialised: bool,
    /// Name of the fence at every sink.
    pub resource: Resource,
    /// Live lease.
    pub lease: Lease,
}
