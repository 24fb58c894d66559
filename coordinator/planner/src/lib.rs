//! Target assignments of Tenure: pure functions from members, topics and the present to a target.
//!
//! What a plan promises, in this order:
//!
//! 1. Every partition that some member may take and has room for has exactly one owner, who subscribes to its topic,
//!    is not draining and is within its cap. Pins hold.
//! 2. Loads are as even as subscriptions, pins and caps allow: no chain of moves narrows a gap of 2 or more. Members
//!    with equal subscriptions and weights differ by at most 1; with other weights, no move brings loads nearer to them.
//! 3. Few moves: who owns a partition keeps it unless 1 or 2 need it. Planning again on a plan moves nothing.
//!
//! Totals are promised, evenness within each topic is not: it is preferred wherever a partition moves anyway.
//! Member and topic names never decide more than ties.

mod balance;

use std::collections::{BTreeMap, BTreeSet};

use tenure_model::{MemberId, Partition, TopicId, TopicName};

/// A member as the planner sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Topics wanted.
    pub topics: BTreeSet<TopicName>,
    /// Largest number of partitions this member takes.
    pub partitions_max: Option<u32>,
    /// Share relative to others, 1 to `WEIGHT_MAX`: one of weight 2 gets twice as many as one of weight 1.
    pub weight: u32,
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
    /// When each came to where it is, as a number that only rises; absent: 0. Of what one member has to give, the
    /// latest moves, so that a member that restarts gets back what the others took over from it.
    pub since: BTreeMap<Partition, u64>,
    /// Partitions that must go to a member, if it lives, subscribes and is not draining.
    pub pins: BTreeMap<Partition, MemberId>,
    /// Members to avoid for a partition while another can take it.
    pub avoid: BTreeMap<Partition, BTreeSet<MemberId>>,
}

/// One partition that changes its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Which one.
    pub partition: Partition,
    /// Who has it.
    pub from: Option<MemberId>,
    /// Who is to have it.
    pub to: Option<MemberId>,
}

/// Plans who should own what. A partition that is absent has nobody who may take it, or nobody with room.
///
/// What `input` says of members and topics that do not exist is ignored line by line.
#[must_use]
pub fn plan(input: &Input) -> BTreeMap<Partition, MemberId> {
    balance::Plan::new(input).finish()
}

/// The differences between who owns what and a target, sorted by partition.
#[must_use]
pub fn moves(
    current: &BTreeMap<Partition, MemberId>,
    target: &BTreeMap<Partition, MemberId>,
) -> Vec<Move> {
    let partitions: BTreeSet<&Partition> = current.keys().chain(target.keys()).collect();
    partitions
        .into_iter()
        .filter_map(|partition| {
            let (from, to) = (current.get(partition), target.get(partition));
            (from != to).then(|| Move {
                partition: *partition,
                from: from.cloned(),
                to: to.cloned(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests;
