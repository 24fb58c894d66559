//! One pure step per partition: (target, who holds what) → revoke, wait, grant.
//!
//! | owned by        | target        | step                                                         |
//! |-----------------|---------------|--------------------------------------------------------------|
//! | nobody          | none          | wait for a plan                                              |
//! | nobody          | m             | grant to m at the next epoch; wait while held back, or m may not own it, is away, or is full |
//! | a               | a             | nothing                                                      |
//! | a               | none          | revoke                                                       |
//! | a               | m             | revoke; wait while m may not own it, is away, or is full     |
//! | a, acquired     | m, prepares   | tell m to prepare, and revoke once it is ready               |
//! | a, revoking     | anything      | wait for the release, even where the target is a again        |

use std::collections::{BTreeMap, BTreeSet};

use tenure_model::{Epoch, GroupId, MemberId, Partition};

use crate::state::{Group, Ownership};
use crate::{Event, State};

/// Which partitions of a group to look at again.
#[derive(Default)]
struct Dirty<'a> {
    all: bool,
    /// What was promised to some member may be another's now, which matters where members have caps.
    promises: bool,
    partitions: BTreeSet<Partition>,
    /// Members that may have more room than before.
    members: BTreeSet<&'a MemberId>,
}

impl State {
    /// What can be granted or must be revoked after `events`, which are in the state already.
    pub(crate) fn reconcile(&self, events: &[Event]) -> Vec<Event> {
        let mut counter = self.epoch_counter;
        let mut steps = Vec::new();
        for (id, dirty) in dirty(events) {
            let Some(group) = self.groups.get(id) else { continue };
            let mut rooms = Rooms::new(group);
            if dirty.all || (dirty.promises && group.has_caps()) {
                for partition in group.partitions.keys() {
                    steps.extend(call_off(id, group, *partition));
                    steps.extend(step(id, group, *partition, &mut rooms, &mut counter));
                }
                continue;
            }
            let mut partitions = dirty.partitions;
            for member in dirty.members {
                partitions.extend(group.derived.waiting.get(member).into_iter().flatten());
            }
            for partition in partitions {
                steps.extend(call_off(id, group, partition));
                steps.extend(step(id, group, partition, &mut rooms, &mut counter));
            }
        }
        steps
    }

    /// Revokes one partition where full members wait for each other in a ring, which would otherwise stand for ever.
    pub(crate) fn open_rings(&self, events: &[Event]) -> Vec<Event> {
        dirty(events).into_keys().filter_map(|id| open_ring(id, self.groups.get(id)?)).collect()
    }

    /// Whether every epoch is used up: nothing can be granted any more.
    #[must_use]
    pub const fn epochs_exhausted(&self) -> bool {
        self.epoch_counter >= Epoch::MAX
    }
}

impl Group {
    fn prepares(&self, member: &MemberId) -> bool {
        self.members.get(member).is_some_and(|record| record.prepares)
    }

    fn has_caps(&self) -> bool {
        self.members.values().any(|member| member.partitions_max.is_some())
    }
}

fn dirty(events: &[Event]) -> BTreeMap<&GroupId, Dirty<'_>> {
    let mut dirty: BTreeMap<&GroupId, Dirty<'_>> = BTreeMap::new();
    for event in events {
        match event {
            Event::TargetInstalled { group, .. } => dirty.entry(group).or_default().all = true,
            Event::PartitionPinned { group, partition, .. } => {
                let dirty = dirty.entry(group).or_default();
                dirty.partitions.insert(*partition);
                dirty.promises = true;
            }
            Event::PartitionReleased { group, partition, member, .. } => {
                let dirty = dirty.entry(group).or_default();
                dirty.partitions.insert(*partition);
                dirty.members.insert(member);
            }
            Event::HoldLifted { group, partition }
            | Event::PreparationReady { group, partition, .. } => {
                dirty.entry(group).or_default().partitions.insert(*partition);
            }
            Event::MemberJoined(joined) | Event::MemberUpdated(joined) => {
                dirty.entry(&joined.group).or_default().members.insert(&joined.member);
            }
            Event::MemberDrained { group, member, .. } => {
                dirty.entry(group).or_default().members.insert(member);
            }
            Event::GroupCreated { .. }
            | Event::MemberLeft { .. }
            | Event::MemberExpired { .. }
            | Event::MemberAway { .. }
            | Event::PlaceTaken { .. }
            | Event::MemberSilenced { .. }
            | Event::MemberHeard { .. }
            | Event::TopicGrown { .. }
            | Event::GroupEpochRaised { .. }
            | Event::TargetConfirmed { .. }
            | Event::PinsLifted { .. }
            | Event::PreparationBegun { .. }
            | Event::PreparationCalledOff { .. }
            | Event::PartitionGranted { .. }
            | Event::PartitionAcquired { .. }
            | Event::PartitionRevoked { .. }
            | Event::PartitionHeldBack { .. }
            | Event::OffsetCommitted { .. }
            | Event::EpochFloorRaised { .. }
            | Event::FeatureLevelRaised { .. }
            | Event::OperatorActed { .. } => {}
        }
    }
    dirty
}

fn step(
    id: &GroupId,
    group: &Group,
    partition: Partition,
    rooms: &mut Rooms<'_>,
    counter: &mut u64,
) -> Option<Event> {
    let state = group.partitions.get(&partition)?;
    let target = group.target.get(&partition);
    match (&state.ownership, target) {
        (Ownership::Free, Some(member)) => {
            let may = group.may_be_granted(member, partition);
            if state.is_held_back() || !may || !rooms.has_room(member) {
                return None;
            }
            let epoch = Epoch::new(counter.checked_add(1)?).ok()?;
            *counter = epoch.get();
            rooms.take(member);
            Some(Event::PartitionGranted {
                group: id.clone(),
                partition,
                member: member.clone(),
                epoch,
            })
        }
        (Ownership::Held { member: owner, .. }, None) => revoke(id, group, partition, owner),
        (Ownership::Held { member: owner, acquired }, Some(next)) if owner != next => {
            if !group.may_be_granted(next, partition) || !rooms.has_room(next) {
                return None;
            }
            let preparation = state.preparation.as_ref().filter(|found| found.member == *next);
            match preparation {
                Some(preparation) if !preparation.ready => return None,
                // An owner that does not run yet has nothing to go on with meanwhile.
                None if *acquired && group.prepares(next) => {
                    return Some(Event::PreparationBegun {
                        group: id.clone(),
                        partition,
                        member: next.clone(),
                    });
                }
                Some(_) | None => {}
            }
            rooms.take(next);
            revoke(id, group, partition, owner)
        }
        (Ownership::Free, None)
        | (Ownership::Held { .. }, Some(_))
        | (Ownership::Revoking { .. }, _) => None,
    }
}

/// Ends a preparation by a member that the target does not name any more.
fn call_off(id: &GroupId, group: &Group, partition: Partition) -> Option<Event> {
    let preparation = group.partitions.get(&partition)?.preparation.as_ref()?;
    if group.target.get(&partition) == Some(&preparation.member) {
        return None;
    }
    let member = preparation.member.clone();
    Some(Event::PreparationCalledOff { group: id.clone(), partition, member })
}

fn revoke(id: &GroupId, group: &Group, partition: Partition, owner: &MemberId) -> Option<Event> {
    let epoch = group.partitions.get(&partition)?.epoch?;
    Some(Event::PartitionRevoked { group: id.clone(), partition, member: owner.clone(), epoch })
}

/// How many partitions members own or are promised, for those that have a cap.
struct Rooms<'a> {
    group: &'a Group,
    loads: BTreeMap<MemberId, usize>,
}

impl<'a> Rooms<'a> {
    const fn new(group: &'a Group) -> Self {
        Self { group, loads: BTreeMap::new() }
    }

    fn has_room(&mut self, member: &MemberId) -> bool {
        let Some(record) = self.group.members.get(member) else { return false };
        let Some(limit) = record.partitions_max else { return true };
        if !self.loads.contains_key(member) {
            self.loads.insert(member.clone(), record.owned.len() + self.promised(member));
        }
        self.loads.get(member).is_some_and(|load| *load < limit as usize)
    }

    /// Partitions that others were asked to release for `member`.
    fn promised(&self, member: &MemberId) -> usize {
        let derived = &self.group.derived;
        derived
            .waiting
            .get(member)
            .map_or(0, |waiting| waiting.intersection(&derived.revoking).count())
    }

    fn take(&mut self, member: &MemberId) {
        if let Some(load) = self.loads.get_mut(member) {
            *load += 1;
        }
    }
}

/// Follows full members that wait for each other until one comes round again, and revokes what it has to give.
fn open_ring(id: &GroupId, group: &Group) -> Option<Event> {
    let is_at_rest = group.derived.revoking.is_empty() && group.target_epoch == group.epoch;
    if !is_at_rest || !group.has_caps() {
        return None;
    }
    for start in group.derived.waiting.keys() {
        let mut seen = BTreeSet::new();
        let mut member = start;
        while let Some((partition, next)) = leaving(group, member) {
            if !seen.insert(member) {
                return revoke(id, group, partition, member);
            }
            member = next;
        }
    }
    None
}

/// The first partition that `member` holds and another should own, with that other.
fn leaving<'a>(group: &'a Group, member: &MemberId) -> Option<(Partition, &'a MemberId)> {
    group.members.get(member)?.owned.iter().find_map(|partition| {
        let next = group.target.get(partition)?;
        (next != member).then_some((*partition, next))
    })
}
