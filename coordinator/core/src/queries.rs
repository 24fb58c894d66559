//! What the raft leader's driver and the gRPC layer ask. Level-triggered: the answer follows from the state alone, so
//! a new raft leader asks and knows what to do.

use std::collections::BTreeSet;

use tenure_model::{Epoch, GroupEpoch, GroupId, Index, MemberId, NextOffset, Partition, TopicName};

use crate::command::{AcknowledgePrepared, GrantRef, MemberRef};
use crate::state::{Away, Committed, Group, Member, PartitionState, Silence};
use crate::{Event, Rejection, State};

/// Everything that one member owns now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// Index of the last entry that changed it; a member ignores any below the highest it has seen.
    pub version: Index,
    /// Sorted by partition.
    pub partitions: Vec<Assigned>,
    /// What it is to prepare for; sorted by partition.
    pub preparing: Vec<Preparing>,
}

/// A partition that a member is to get, as it may know of it before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preparing {
    pub partition: Partition,
    pub topic: TopicName,
    /// Who owns it now.
    pub owner: Option<MemberId>,
    pub home_initialised: bool,
    /// The offset that is committed now; the resume point will be there or further on.
    pub committed: Option<NextOffset>,
}

/// One grant, as its owner needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assigned {
    pub partition: Partition,
    pub topic: TopicName,
    pub epoch: Epoch,
    /// The owner is to stop and release.
    pub revoking: bool,
    pub home_initialised: bool,
    /// The partition appeared after the group knew its topic: without an offset it starts at its earliest record.
    pub starts_at_earliest: bool,
    /// Index of the entry that last changed the ownership; names the handoff in both sides' logs.
    pub handoff: Index,
}

/// A partition that waits for the end of a back-off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    pub group: GroupId,
    pub partition: Partition,
    /// Failures in a row, from 1; the back-off grows with it.
    pub failures: u32,
    /// Index of the entry since which it is held back.
    pub since: Index,
}

impl State {
    /// The group named `id`.
    ///
    /// # Errors
    ///
    /// [`Rejection::UnknownGroup`].
    pub fn group(&self, id: &GroupId) -> Result<&Group, Rejection> {
        let group = self.groups.get(id).map(AsRef::as_ref);
        group.ok_or_else(|| Rejection::UnknownGroup { group: id.clone() })
    }

    /// The live member `member` of `group`, with its group.
    ///
    /// # Errors
    ///
    /// [`Rejection::UnknownGroup`], [`Rejection::MemberGone`] for one that left, expired or is away, else
    /// [`Rejection::UnknownMember`].
    pub fn member(&self, id: &GroupId, member: &MemberId) -> Result<(&Group, &Member), Rejection> {
        let group = self.group(id)?;
        let found = group.members.get(member);
        if let Some(found) = found.filter(|found| found.away.is_none()) {
            return Ok((group, found));
        }
        Err(if found.is_some() || group.tombstones.contains(member) {
            Rejection::MemberGone { group: id.clone(), member: member.clone() }
        } else {
            Rejection::UnknownMember { group: id.clone(), member: member.clone() }
        })
    }

    /// Groups whose target is older than their group epoch, with that group epoch.
    pub fn groups_to_plan(&self) -> impl Iterator<Item = (&GroupId, GroupEpoch)> {
        self.groups
            .iter()
            .filter(|(_, group)| group.target_epoch < group.epoch)
            .map(|(id, group)| (id, group.epoch))
    }

    /// Grants that owners were asked to release: owner, and index of the entry that asked.
    pub fn partitions_revoking(&self) -> impl Iterator<Item = (GrantRef, &MemberId, Index)> {
        self.groups.iter().flat_map(|(id, group)| grants(id, group, &group.derived.revoking))
    }

    /// Grants that owners have not acquired yet: owner, and index of the grant's entry.
    pub fn partitions_acquiring(&self) -> impl Iterator<Item = (GrantRef, &MemberId, Index)> {
        self.groups.iter().flat_map(|(id, group)| grants(id, group, &group.derived.acquiring))
    }

    /// The grant of `partition`, and its owner, if the owner was asked to release it.
    #[must_use]
    pub fn revoking(&self, id: &GroupId, partition: Partition) -> Option<(GrantRef, &MemberId)> {
        let state = self.groups.get(id)?.partitions.get(&partition)?;
        let owner = state.ownership.owner().filter(|_| state.ownership.is_revoking())?;
        Some((GrantRef { group: id.clone(), partition, epoch: state.epoch? }, owner))
    }

    /// The grant of `partition`, if its owner has not acquired it yet.
    #[must_use]
    pub fn acquiring(&self, id: &GroupId, partition: Partition) -> Option<GrantRef> {
        let state = self.groups.get(id)?.partitions.get(&partition)?;
        let epoch = state.epoch.filter(|_| state.is_acquiring())?;
        Some(GrantRef { group: id.clone(), partition, epoch })
    }

    /// The hold of `partition`, if it is held back after a failure.
    #[must_use]
    pub fn hold(&self, id: &GroupId, partition: Partition) -> Option<Hold> {
        let state = self.groups.get(id)?.partitions.get(&partition)?;
        hold(id, partition, state)
    }

    /// Partitions that are held back after a failure.
    pub fn holds(&self) -> impl Iterator<Item = Hold> {
        self.groups.iter().flat_map(|(id, group)| {
            group
                .derived
                .held_back
                .iter()
                .filter_map(|partition| hold(id, *partition, group.partitions.get(partition)?))
        })
    }

    /// Static members that are away.
    pub fn members_away(&self) -> impl Iterator<Item = (MemberRef, Away)> {
        self.groups.iter().flat_map(|(id, group)| {
            group.members.iter().filter_map(|(name, member)| {
                let (group, member_epoch) = (id.clone(), member.epoch);
                Some((MemberRef { group, member: name.clone(), member_epoch }, member.away?))
            })
        })
    }

    /// Live members: ttl and heartbeat interval in milliseconds, and the log's word that it is silent.
    pub fn members(&self) -> impl Iterator<Item = (MemberRef, u64, u64, Option<Silence>)> {
        self.groups.iter().flat_map(|(id, group)| {
            let here = group.members.iter().filter(|(_, member)| member.away.is_none());
            here.map(|(name, member)| {
                let named = MemberRef {
                    group: id.clone(),
                    member: name.clone(),
                    member_epoch: member.epoch,
                };
                (named, member.ttl_ms, member.heartbeat_interval_ms, member.silent)
            })
        })
    }

    /// What `member` owns now.
    ///
    /// # Errors
    ///
    /// As [`State::member`].
    pub fn assignment(&self, id: &GroupId, member: &MemberId) -> Result<Assignment, Rejection> {
        let (group, record) = self.member(id, member)?;
        let partitions = record
            .owned
            .iter()
            .filter_map(|partition| {
                let state = group.partitions.get(partition)?;
                let topic = group.topics.get(&partition.topic_id)?;
                Some(Assigned {
                    partition: *partition,
                    topic: topic.name.clone(),
                    epoch: state.epoch?,
                    revoking: state.ownership.is_revoking(),
                    home_initialised: state.home_initialised,
                    starts_at_earliest: group.starts_at_earliest(*partition),
                    handoff: state.changed_at,
                })
            })
            .collect();
        let preparing = group.derived.preparing.get(member).into_iter().flatten();
        let preparing = preparing
            .filter_map(|partition| {
                let state = group.partitions.get(partition)?;
                Some(Preparing {
                    partition: *partition,
                    topic: group.topics.get(&partition.topic_id)?.name.clone(),
                    owner: state.ownership.owner().cloned(),
                    home_initialised: state.home_initialised,
                    committed: state.committed.as_ref().map(|committed| committed.next_offset),
                })
            })
            .collect();
        Ok(Assignment { version: record.assignment_version, partitions, preparing })
    }

    /// The member whose preparation for `partition` a move waits for.
    #[must_use]
    pub fn preparing(&self, id: &GroupId, partition: Partition) -> Option<&MemberId> {
        let state = self.groups.get(id)?.partitions.get(&partition)?;
        let preparation = state.preparation.as_ref().filter(|found| !found.ready)?;
        Some(&preparation.member)
    }

    /// Preparations that moves wait for.
    pub fn preparations(&self) -> impl Iterator<Item = AcknowledgePrepared> {
        self.groups.iter().flat_map(|(id, group)| {
            let lines = group.derived.preparing.iter();
            let lines = lines.flat_map(|(member, partitions)| {
                partitions.iter().map(move |partition| (member, *partition))
            });
            lines.filter_map(move |(member, partition)| {
                let preparation = group.partitions.get(&partition)?.preparation.as_ref()?;
                (!preparation.ready).then(|| AcknowledgePrepared {
                    group: id.clone(),
                    member: member.clone(),
                    partition,
                })
            })
        })
    }

    /// The offset committed for `partition`; nothing when there is none yet.
    ///
    /// # Errors
    ///
    /// [`Rejection::UnknownGroup`] and [`Rejection::UnknownPartition`]: neither is "no offset".
    pub fn committed(
        &self,
        id: &GroupId,
        partition: Partition,
    ) -> Result<Option<&Committed>, Rejection> {
        self.partition(id, partition).map(|state| state.committed.as_ref())
    }

    /// Members whose assignment or membership `events` changed.
    #[must_use]
    pub fn touched(events: &[Event]) -> BTreeSet<(GroupId, MemberId)> {
        events
            .iter()
            .filter_map(|event| match event {
                Event::MemberJoined(joined) | Event::MemberUpdated(joined) => {
                    Some((joined.group.clone(), joined.member.clone()))
                }
                Event::MemberLeft { group, member, .. }
                | Event::MemberExpired { group, member }
                | Event::PreparationBegun { group, member, .. }
                | Event::PreparationCalledOff { group, member, .. }
                | Event::MemberAway { group, member, .. }
                | Event::PartitionGranted { group, member, .. }
                | Event::PartitionRevoked { group, member, .. }
                | Event::PartitionReleased { group, member, .. } => {
                    Some((group.clone(), member.clone()))
                }
                Event::GroupCreated { .. }
                | Event::PlaceTaken { .. }
                | Event::MemberSilenced { .. }
                | Event::MemberHeard { .. }
                | Event::MemberDrained { .. }
                | Event::TopicGrown { .. }
                | Event::GroupEpochRaised { .. }
                | Event::TargetInstalled { .. }
                | Event::TargetConfirmed { .. }
                | Event::PartitionPinned { .. }
                | Event::PinsLifted { .. }
                | Event::PreparationReady { .. }
                | Event::PartitionAcquired { .. }
                | Event::PartitionHeldBack { .. }
                | Event::HoldLifted { .. }
                | Event::OffsetCommitted { .. }
                | Event::EpochFloorRaised { .. }
                | Event::FeatureLevelRaised { .. }
                | Event::OperatorActed { .. } => None,
            })
            .collect()
    }
}

fn hold(id: &GroupId, partition: Partition, state: &PartitionState) -> Option<Hold> {
    let trouble = state.trouble.as_ref().filter(|trouble| trouble.held_back)?;
    let (failures, since) = (trouble.failures, state.changed_at);
    Some(Hold { group: id.clone(), partition, failures, since })
}

fn grants<'a>(
    id: &'a GroupId,
    group: &'a Group,
    partitions: &'a BTreeSet<Partition>,
) -> impl Iterator<Item = (GrantRef, &'a MemberId, Index)> {
    partitions.iter().filter_map(move |partition| {
        let PartitionState { ownership, epoch, changed_at, .. } =
            group.partitions.get(partition)?;
        let grant = GrantRef { group: id.clone(), partition: *partition, epoch: (*epoch)? };
        Some((grant, ownership.owner()?, *changed_at))
    })
}
