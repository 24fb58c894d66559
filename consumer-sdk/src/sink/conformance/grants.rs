//! Grants that no coordinator gave.

use tenure_model::{
    Epoch, GroupId, Index, MemberId, Partition, PartitionIndex, TopicId, TopicName,
};

use crate::grant::{Grant, Resource};
use crate::lease::Lease;

/// Grant of partition `index` of a topic `conformance` under `epoch` to `member`, with a lease that never ends by
/// itself. Nobody gave it: for driving a sink in tests.
///
/// # Panics
///
/// If `member` is no name.
#[must_use]
pub fn grant(member: &str, index: u32, epoch: Epoch) -> Grant {
    let topic = TopicName::new("conformance").expect("the name is one");
    let group = GroupId::new("conformance").expect("the name is one");
    let partition = Partition {
        topic_id: TopicId::of_name(&topic),
        index: PartitionIndex::new(index).expect("tests use low indexes"),
    };
    Grant {
        resource: Resource::of_partition(&group, partition),
        member: MemberId::new(member).expect("tests name members"),
        group,
        topic,
        partition,
        epoch,
        handoff: Index(epoch.get()),
        home_initialised: false,
        token: None,
        lease: Lease::endless(),
    }
}
