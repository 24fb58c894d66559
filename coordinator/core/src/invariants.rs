//! What is true of every state that [`State::apply`] can reach.

use tenure_model::limits::{
    GRANT_HISTORY_MAX, GROUP_PARTITIONS_MAX, GROUPS_MAX, MEMBERS_MAX, OPERATOR_HISTORY_MAX,
    TOMBSTONES_MAX, TOPICS_MAX,
};
use tenure_model::{GroupId, Partition};

use crate::State;
use crate::state::{Group, PartitionState};

impl State {
    /// Checks every invariant.
    ///
    /// # Errors
    ///
    /// The first one that is broken, in words.
    pub fn invariants(&self) -> Result<(), String> {
        ensure(self.groups.len() <= GROUPS_MAX, || "too many groups".to_owned())?;
        ensure(self.operations.len() <= OPERATOR_HISTORY_MAX, || "too many operations".to_owned())?;
        self.changes.check(self.applied)?;
        self.groups.iter().try_for_each(|(id, group)| self.group_invariants(id, group))
    }

    pub(crate) fn group_invariants(&self, id: &GroupId, group: &Group) -> Result<(), String> {
        let check = || {
            check_limits(group)?;
            check_members(group)?;
            check_target(group)?;
            for (partition, state) in &group.partitions {
                check_partition(group, *partition, state, self.epoch_counter)
                    .map_err(|broken| format!("partition {partition}: {broken}"))?;
            }
            let mut rebuilt = group.clone();
            rebuilt.rebuild_derived();
            ensure(rebuilt.derived == group.derived, || {
                "derived look-ups differ from what they follow from".to_owned()
            })
        };
        check().map_err(|broken: String| format!("group {id}: {broken}"))
    }
}

fn ensure(holds: bool, broken: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(broken()) }
}

fn check_limits(group: &Group) -> Result<(), String> {
    ensure(group.members.len() <= MEMBERS_MAX, || "too many members".to_owned())?;
    ensure(group.tombstones.len() <= TOMBSTONES_MAX, || "too many tombstones".to_owned())?;
    ensure(group.topics.len() <= TOPICS_MAX, || "too many topics".to_owned())?;
    ensure(group.partitions.len() <= GROUP_PARTITIONS_MAX, || "too many partitions".to_owned())
}

fn check_members(group: &Group) -> Result<(), String> {
    for (name, member) in &group.members {
        ensure(!group.tombstones.contains(name), || format!("{name} is alive and gone"))?;
        let is_away = member.away.is_some();
        ensure(!is_away || (member.instance.is_some() && member.owned.is_empty()), || {
            format!("{name} is away, and not static or still an owner")
        })?;
        for partition in &member.owned {
            let owner = group.partitions.get(partition).and_then(|state| state.ownership.owner());
            ensure(owner == Some(name), || {
                format!("{name} counts {partition} as its own, whose owner is {owner:?}")
            })?;
        }
    }
    Ok(())
}

fn check_target(group: &Group) -> Result<(), String> {
    ensure(group.target_epoch <= group.epoch, || "the target is ahead of its group".to_owned())?;
    for (partition, member) in &group.pins {
        ensure(group.members.contains_key(member), || {
            format!("{partition} is pinned to {member}, who is gone")
        })?;
    }
    let is_current = group.target_epoch == group.epoch;
    for (partition, member) in &group.target {
        ensure(group.partitions.contains_key(partition), || {
            format!("the target names the unknown partition {partition}")
        })?;
        ensure(!is_current || group.may_own(member, *partition), || {
            format!("the current target gives {partition} to {member}, who may not own it")
        })?;
    }
    let count: usize = group.topics.values().map(|topic| topic.partition_count as usize).sum();
    ensure(count == group.partitions.len(), || {
        format!("topics have {count} partitions, the group {}", group.partitions.len())
    })
}

fn check_partition(
    group: &Group,
    partition: Partition,
    state: &PartitionState,
    epoch_counter: u64,
) -> Result<(), String> {
    let drawn = state.epoch.map_or(0, tenure_model::Epoch::get);
    ensure(drawn <= epoch_counter, || format!("epoch {drawn} was never drawn"))?;
    if let Some(owner) = state.ownership.owner() {
        ensure(state.epoch.is_some(), || "it is owned without an epoch".to_owned())?;
        let held_back = state.is_held_back() && !state.ownership.is_revoking();
        ensure(!held_back, || "it is owned, not revoking, and held back".to_owned())?;
        let counts =
            group.members.get(owner).is_some_and(|member| member.owned.contains(&partition));
        ensure(counts, || format!("its owner {owner} does not count it as its own"))?;
    }
    check_grants(state)?;
    if let Some(committed) = &state.committed {
        ensure(committed.epoch.get() <= drawn, || {
            format!("its offset was committed at {}, after its last grant", committed.epoch)
        })?;
        ensure(state.home_initialised, || "it has an offset and no initialised home".to_owned())?;
    }
    Ok(())
}

/// Grants follow each other: each ends before the next begins, under a lower epoch.
fn check_grants(state: &PartitionState) -> Result<(), String> {
    let Some(past) = &state.past else { return Ok(()) };
    ensure(past.grants.len() <= GRANT_HISTORY_MAX, || "too many past grants".to_owned())?;
    let mut free_since = past.forgotten;
    let mut last = None;
    for grant in &past.grants {
        ensure(Some(grant.epoch) > last, || format!("{} is out of order", grant.epoch))?;
        ensure(free_since <= grant.granted && grant.granted <= grant.ended, || {
            format!("the grant at {} overlaps the one before", grant.epoch)
        })?;
        (free_since, last) = (grant.ended, Some(grant.epoch));
    }
    let is_owned = state.ownership.owner().is_some();
    ensure(!is_owned || (state.epoch > last && free_since <= state.granted), || {
        "its grant overlaps the one before".to_owned()
    })
}
