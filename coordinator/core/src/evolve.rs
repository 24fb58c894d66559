//! From events to the next state. Cannot fail and decides nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tenure_model::limits::{OPERATOR_HISTORY_MAX, TOMBSTONES_MAX};
use tenure_model::{
    Epoch, GroupId, MemberId, Partition, PartitionIndex, RequestId, TopicId, TopicName,
};

use crate::command::OffsetCommit;
use crate::event::MemberJoined;
use crate::state::{
    Away, Committed, Group, Member, Operation, Ownership, PartitionState, Preparation, Silence,
    Topic,
};
use crate::{Event, State};

impl State {
    pub(crate) fn evolve(&mut self, event: &Event) {
        self.tell(event);
        match event {
            Event::GroupCreated { group, settings } => {
                let created = Group { settings: settings.clone(), ..Group::default() };
                self.groups.insert(group.clone(), Arc::new(created));
            }
            Event::MemberJoined(joined) => self.add_member(joined),
            Event::MemberUpdated(joined) => self.update_member(joined),
            Event::MemberLeft { group, member, .. } | Event::MemberExpired { group, member } => {
                self.remove_member(group, member);
            }
            Event::MemberAway { group, member, returning_within_ms } => {
                let away = Away { since: self.applied, returning_within_ms: *returning_within_ms };
                self.change_member(group, member, |member| {
                    member.away = Some(away);
                    member.silent = None;
                    member.draining = false;
                });
            }
            Event::PlaceTaken { group, from, to } => {
                self.change_group(group, |group| group.hand_over_place(from, to));
            }
            Event::MemberSilenced { group, member, silent_for_ms } => {
                let silence = Silence { index: self.applied, silent_for_ms: *silent_for_ms };
                self.change_member(group, member, |member| member.silent = Some(silence));
            }
            Event::MemberHeard { group, member } => {
                self.change_member(group, member, |member| member.silent = None);
            }
            Event::MemberDrained { group, member, draining } => {
                self.change_member(group, member, |member| member.draining = *draining);
            }
            Event::TopicGrown { group, topic, topic_id, partition_count } => {
                self.change_group(group, |group| {
                    group.grow_topic(topic, *topic_id, *partition_count);
                });
            }
            Event::GroupEpochRaised { group, group_epoch } => {
                self.change_group(group, |group| group.epoch = *group_epoch);
            }
            Event::TargetInstalled { group, group_epoch, target } => {
                self.change_group(group, |group| {
                    group.target = target.iter().cloned().collect();
                    group.target_epoch = *group_epoch;
                    group.rebuild_derived();
                });
            }
            Event::TargetConfirmed { group, group_epoch } => {
                self.change_group(group, |group| group.target_epoch = *group_epoch);
            }
            Event::PartitionPinned { group, partition, member } => {
                self.change_group(group, |group| {
                    group.pins.insert(*partition, member.clone());
                    group.change_partition(*partition, |_, target| {
                        target.insert(*partition, member.clone());
                    });
                });
            }
            Event::PinsLifted { group } => self.change_group(group, |group| group.pins.clear()),
            Event::PartitionGranted { group, partition, member, epoch } => {
                self.grant(group, *partition, member, *epoch);
            }
            Event::PreparationBegun { group, partition, member } => {
                let preparation = Preparation { member: member.clone(), ready: false };
                self.change_preparation(group, *partition, member, Some(Box::new(preparation)));
            }
            Event::PreparationReady { group, partition, .. } => {
                self.change_partition(group, *partition, |state| {
                    if let Some(preparation) = &mut state.preparation {
                        preparation.ready = true;
                    }
                });
            }
            Event::PreparationCalledOff { group, partition, member } => {
                self.change_preparation(group, *partition, member, None);
            }
            Event::PartitionAcquired { group, partition, home_initialised, .. } => {
                self.change_partition(group, *partition, |state| {
                    state.home_initialised |= home_initialised;
                    if let Ownership::Held { acquired, .. } = &mut state.ownership {
                        *acquired = true;
                        state.trouble = None;
                    }
                });
            }
            Event::PartitionRevoked { group, partition, member, .. } => {
                self.change_ownership(group, *partition, member, |state, _| {
                    state.ownership = Ownership::Revoking { member: member.clone() };
                });
            }
            Event::PartitionReleased { group, partition, member, cause, .. } => {
                let ended = self.moment();
                let past_max = self.past_grants_max(group);
                self.change_ownership(group, *partition, member, |state, owned| {
                    state.end_grant(ended, *cause, past_max);
                    state.ownership = Ownership::Free;
                    state.freed_by = Some(*cause);
                    owned.remove(partition);
                });
            }
            Event::PartitionHeldBack { group, partition, member, error } => {
                self.change_partition(group, *partition, |state| {
                    let trouble = state.trouble.get_or_insert_default();
                    trouble.failures = trouble.failures.saturating_add(1);
                    trouble.members.insert(member.clone());
                    trouble.error.clone_from(error);
                    trouble.held_back = true;
                });
            }
            Event::HoldLifted { group, partition } => {
                self.change_group(group, |group| group.lift_hold(*partition));
            }
            Event::OffsetCommitted { group, commit, rewind, .. } => {
                self.commit(group, commit, rewind.as_ref());
            }
            Event::EpochFloorRaised { floor } => {
                self.epoch_counter = self.epoch_counter.max(floor.get());
            }
            Event::FeatureLevelRaised { level } => self.level = *level,
            Event::OperatorActed { .. } => self.remember(event),
        }
    }

    fn add_member(&mut self, joined: &MemberJoined) {
        let member = Member {
            epoch: joined.member_epoch,
            instance: joined.instance.clone(),
            topics: joined.topics.clone(),
            ttl_ms: joined.ttl_ms,
            heartbeat_interval_ms: joined.heartbeat_interval_ms,
            client: joined.client.clone(),
            partitions_max: joined.partitions_max,
            prepares: joined.prepares,
            weight: joined.weight,
            draining: false,
            joined_at: self.now,
            assignment_version: self.applied,
            owned: BTreeSet::new(),
            silent: None,
            away: None,
        };
        self.change_group(&joined.group, |group| {
            group.members.insert(joined.member.clone(), member);
        });
    }

    fn update_member(&mut self, joined: &MemberJoined) {
        self.change_member(&joined.group, &joined.member, |member| {
            member.topics.clone_from(&joined.topics);
            member.ttl_ms = joined.ttl_ms;
            member.heartbeat_interval_ms = joined.heartbeat_interval_ms;
            member.client.clone_from(&joined.client);
            member.partitions_max = joined.partitions_max;
            member.prepares = joined.prepares;
            member.weight = joined.weight;
        });
    }

    fn remove_member(&mut self, group: &GroupId, member: &MemberId) {
        self.change_group(group, |group| {
            group.members.remove(member);
            group.pins.retain(|_, pinned| pinned != member);
            if group.tombstones.len() >= TOMBSTONES_MAX {
                group.tombstones.pop_front();
            }
            group.tombstones.push_back(member.clone());
        });
    }

    fn grant(&mut self, group: &GroupId, partition: Partition, member: &MemberId, epoch: Epoch) {
        self.epoch_counter = self.epoch_counter.max(epoch.get());
        let granted = self.moment();
        self.change_ownership(group, partition, member, |state, owned| {
            state.ownership = Ownership::Held { member: member.clone(), acquired: false };
            state.epoch = Some(epoch);
            state.granted = granted;
            state.preparation = None;
            owned.insert(partition);
        });
    }

    fn commit(&mut self, group: &GroupId, commit: &OffsetCommit, rewind: Option<&RequestId>) {
        // The derived look-ups do not depend on offsets, and this is the most frequent event.
        let state = self
            .groups
            .get_mut(group)
            .and_then(|group| Arc::make_mut(group).partitions.get_mut(&commit.partition));
        debug_assert!(state.is_some(), "an offset is committed for a known partition");
        if let Some(state) = state {
            state.home_initialised = true;
            let before = state.committed.take().and_then(|committed| committed.rewind);
            state.committed = Some(Committed {
                rewind: rewind.cloned().or(before),
                next_offset: commit.next_offset,
                epoch: commit.epoch,
                sequence: commit.sequence,
                metadata: commit.metadata.clone(),
            });
        }
    }

    fn remember(&mut self, event: &Event) {
        let Event::OperatorActed { request, actor, reason, action, group, group_epoch, moves } =
            event
        else {
            return;
        };
        if self.operations.len() >= OPERATOR_HISTORY_MAX {
            self.operations.pop_front();
        }
        self.operations.push_back(Operation {
            request: request.clone(),
            index: self.applied,
            time: self.now,
            actor: actor.clone(),
            reason: reason.clone(),
            action: *action,
            group: group.clone(),
            group_epoch: *group_epoch,
            moves: moves.clone(),
        });
    }

    fn change_group(&mut self, id: &GroupId, change: impl FnOnce(&mut Group)) {
        let group = self.groups.get_mut(id);
        debug_assert!(group.is_some(), "an event names a group that exists, not {id}");
        if let Some(group) = group {
            change(Arc::make_mut(group));
        }
    }

    fn change_member(&mut self, id: &GroupId, member: &MemberId, change: impl FnOnce(&mut Member)) {
        self.change_group(id, |group| {
            let record = group.members.get_mut(member);
            debug_assert!(record.is_some(), "an event names a live member, not {member}");
            if let Some(record) = record {
                change(record);
            }
        });
    }

    fn change_partition(
        &mut self,
        id: &GroupId,
        partition: Partition,
        change: impl FnOnce(&mut PartitionState),
    ) {
        self.change_group(id, |group| {
            let changed = group.change_partition(partition, |state, _| change(state));
            debug_assert!(changed.is_some(), "an event names a known partition, not {partition}");
        });
    }

    /// Changes who prepares for a partition, and says to `member` that its assignment is another. It may be gone.
    fn change_preparation(
        &mut self,
        id: &GroupId,
        partition: Partition,
        member: &MemberId,
        preparation: Option<Box<Preparation>>,
    ) {
        let index = self.applied;
        self.change_group(id, |group| {
            if let Some(record) = group.members.get_mut(member) {
                record.assignment_version = index;
            }
            group.change_partition(partition, |state, _| state.preparation = preparation);
        });
    }

    /// Changes who may write: says when, and to `member` that its assignment is another.
    fn change_ownership(
        &mut self,
        id: &GroupId,
        partition: Partition,
        member: &MemberId,
        change: impl FnOnce(&mut PartitionState, &mut BTreeSet<Partition>),
    ) {
        let (index, now) = (self.applied, self.now);
        self.change_group(id, |group| {
            let mut members = std::mem::take(&mut group.members);
            let record = members.get_mut(member);
            debug_assert!(record.is_some(), "an event names a live member, not {member}");
            if let Some(record) = record {
                record.assignment_version = index;
                let changed = group.change_partition(partition, |state, _| {
                    change(state, &mut record.owned);
                    state.changed_at = index;
                    state.changed_time = now;
                });
                debug_assert!(changed.is_some(), "an event names a known partition: {partition}");
            }
            group.members = members;
        });
    }
}

/// How many partitions may be moved within a map for each one that comes.
const MOVES_MAX: usize = 8;

/// Puts in partitions that are new. Where they are many, the map is built anew: its nodes are full then, and stay so as
/// long as partitions only change. Those of a map that grows one by one are little more than half full, which is much
/// with a million partitions.
fn put_in(
    partitions: &mut BTreeMap<Partition, PartitionState>,
    mut new: BTreeMap<Partition, PartitionState>,
) {
    if partitions.len() <= new.len() * MOVES_MAX {
        partitions.append(&mut new);
    } else {
        partitions.extend(new);
    }
}

impl Group {
    fn grow_topic(&mut self, name: &TopicName, topic_id: TopicId, partition_count: u32) {
        let mut is_later_life = false;
        if !self.topics.contains_key(&topic_id) {
            for topic in self.topics.values_mut().filter(|topic| topic.name == *name) {
                is_later_life = true;
                topic.frozen_by.get_or_insert(topic_id);
            }
        }
        let topic = self.topics.entry(topic_id).or_insert_with(|| Topic {
            name: name.clone(),
            partition_count: 0,
            initial_partition_count: if is_later_life { 0 } else { partition_count },
            frozen_by: None,
        });
        let new = topic.partition_count..partition_count;
        topic.partition_count = topic.partition_count.max(partition_count);
        let new = new.filter_map(|index| {
            let partition = Partition { topic_id, index: PartitionIndex::new(index)? };
            Some((partition, PartitionState::default()))
        });
        put_in(&mut self.partitions, new.collect());
    }

    /// Lines of the target and pins of `from` are those of `to` now.
    fn hand_over_place(&mut self, from: &MemberId, to: &MemberId) {
        for member in self.target.values_mut().chain(self.pins.values_mut()) {
            if member == from {
                member.clone_from(to);
            }
        }
        self.rebuild_derived();
    }

    fn lift_hold(&mut self, partition: Partition) {
        let everywhere = self.trouble_is_everywhere(partition);
        let members = std::mem::take(&mut self.members);
        self.change_partition(partition, |state, _| {
            if let Some(trouble) = &mut state.trouble {
                trouble.held_back = false;
                trouble.members.retain(|member| !everywhere && members.contains_key(member));
            }
        });
        self.members = members;
    }
}
