//! Target assignments of Tenure: pure functions from members, topics and the present to a target.

use std::collections::{BTreeMap, BTreeSet};

use tenure_model::{MemberId, Partition, TopicId, TopicName};

/// A member as the planner sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Topics wanted.
    pub topics: BTreeSet<TopicName>,
    /// Largest number of partitions this member takes.
    pub partitions_max: Option<u32>,
    /// Gets nothing.
    pub draining: bool,
}

/// One life of a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topic {
    /// Its name; two lives may share it.
    pub name: TopicName,
    /// At least 1.
    pub partition_count: u32,
}

/// What a plan is made from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Input {
    /// Live members.
    pub members: BTreeMap<MemberId, Member>,
    /// Known topics.
    pub topics: BTreeMap<TopicId, Topic>,
    /// Who owns what now, or is meant to by the last target; the plan stays close to it.
    pub current: BTreeMap<Partition, MemberId>,
    /// Partitions that must go to a member, if it lives, subscribes and is not draining.
    pub pins: BTreeMap<Partition, MemberId>,
    /// Members to avoid for a partition while another can take it.
    pub avoid: BTreeMap<Partition, BTreeSet<MemberId>>,
}
