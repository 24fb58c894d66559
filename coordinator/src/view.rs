//! What observers see of the state. Pure: from the state, and what the raft leader heard, to the answers.

use std::collections::BTreeMap;

use tenure_core::State;
use tenure_core::command::ReleaseReason;
use tenure_core::event::FreeCause;
use tenure_core::state::{Group, Member, Ownership, PartitionState};
use tenure_model::limits::SINK_UNREACHABLE_AFTER;
use tenure_model::{GroupId, InstanceId, MemberId, Partition, SINK_ERROR_PREFIX, Tick};
use tenure_proto::convert::{group_settings_to_wire, partition_to_wire};
use tenure_proto::v1;

use crate::lost;
use crate::soft::{Beats, Held, Phase};

/// What the raft leader heard of members, as of `now`; empty elsewhere.
#[derive(Clone, Copy)]
pub(crate) struct Heard<'a> {
    pub(crate) beats: &'a Beats,
    pub(crate) now: Tick,
    /// After how long a partition that stands still counts as not advancing.
    pub(crate) not_advancing_ms: u64,
}

/// All groups.
pub(crate) fn list_groups(state: &State, heard: Heard<'_>) -> v1::ListGroupsResponse {
    let mut standing: BTreeMap<GroupId, usize> = BTreeMap::new();
    for beat in heard.beats {
        let still = |held: &&Held| held.stands_still(heard.not_advancing_ms);
        let found = beat.lock().held.iter().filter(still).count();
        if found > 0 {
            *standing.entry(beat.key().0.clone()).or_default() += found;
        }
    }
    let groups = state.groups.iter().map(|(id, group)| v1::GroupSummary {
        not_advancing: standing.get(id).map_or(0, |found| count(*found)),
        ..summary(id, group)
    });
    v1::ListGroupsResponse { groups: groups.collect(), revision: state.applied.0 }
}

fn summary(id: &GroupId, group: &Group) -> v1::GroupSummary {
    let owned: usize = group.members.values().map(|member| member.owned.len()).sum();
    v1::GroupSummary {
        group: id.to_string(),
        group_epoch: group.epoch.0,
        members: count(group.members.len()),
        partitions: count(group.partitions.len()),
        unowned: count(group.partitions.len().saturating_sub(owned)),
        revoking: count(group.derived.revoking.len()),
        settings: Some(group_settings_to_wire(&group.settings)),
        not_advancing: 0,
    }
}

fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// One group with its members and partitions.
pub(crate) fn describe_group(
    state: &State,
    id: &GroupId,
    group: &Group,
    heard: Heard<'_>,
) -> v1::DescribeGroupResponse {
    let members = group.members.iter().map(|(name, member)| member_info(id, name, member, heard));
    let partitions: Vec<v1::PartitionInfo> = group
        .partitions
        .iter()
        .map(|(partition, found)| {
            let mut info = partition_info(id, group, *partition, found, heard);
            if let Some(seen) = lost::seen_above(state, found) {
                info.cause = format!("{}; {}", lost::advice(state, seen), info.cause);
            }
            info
        })
        .collect();
    let standing = partitions.iter().filter(|found| found.not_advancing).count();
    let topics = group.topics.iter().map(|(topic_id, topic)| v1::TopicInfo {
        topic: topic.name.to_string(),
        topic_id: topic_id.to_string(),
        partition_count: topic.partition_count,
    });
    v1::DescribeGroupResponse {
        summary: Some(v1::GroupSummary { not_advancing: count(standing), ..summary(id, group) }),
        members: members.collect(),
        partitions,
        topics: topics.collect(),
        revision: state.applied.0,
        target_epoch: group.target_epoch.0,
    }
}

fn member_info(
    group: &GroupId,
    name: &MemberId,
    member: &Member,
    heard: Heard<'_>,
) -> v1::MemberInfo {
    let beat = heard.beats.get(&(group.clone(), name.clone()));
    let beat = beat.as_ref().map(|beat| beat.lock());
    let remaining = beat.as_ref().map(|beat| beat.deadline.since(heard.now).as_millis());
    v1::MemberInfo {
        member: name.to_string(),
        member_epoch: member.epoch.0,
        instance_id: member.instance.as_ref().map_or_else(String::new, ToString::to_string),
        topics: member.topics.iter().map(ToString::to_string).collect(),
        client: member.client.clone(),
        ttl_ms: member.ttl_ms,
        heartbeat_interval_ms: member.heartbeat_interval_ms,
        draining: member.draining,
        owned: count(member.owned.len()),
        joined_at_unix_ms: member.joined_at.0,
        lease_remaining_ms: remaining.map(|ms| u64::try_from(ms).unwrap_or(u64::MAX)),
        returning_within_ms: member.away.map(|away| away.returning_within_ms),
        awaited_by: beat.as_ref().map_or_else(String::new, |beat| beat.awaited_by.clone()),
        labels: beat.map_or_else(Vec::new, |beat| {
            let labels = beat.labels.iter();
            labels
                .map(|(name, value)| v1::Label { name: name.to_string(), value: value.clone() })
                .collect()
        }),
    }
}

fn partition_info(
    id: &GroupId,
    group: &Group,
    partition: Partition,
    found: &PartitionState,
    heard: Heard<'_>,
) -> v1::PartitionInfo {
    let (state, acquired) = match &found.ownership {
        Ownership::Free => (v1::OwnershipState::Free, false),
        Ownership::Held { acquired, .. } => (v1::OwnershipState::Held, *acquired),
        Ownership::Revoking { .. } => (v1::OwnershipState::Revoking, false),
    };
    let owner = found.ownership.owner();
    let held = owner.and_then(|owner| held_by(id, owner, partition, found, heard));
    let topic = group.topics.get(&partition.topic_id);
    let target = group.target.get(&partition);
    let text = |member: Option<&MemberId>| member.map_or_else(String::new, ToString::to_string);
    let unreachable = match is_sink_unreachable(group, partition, found) {
        true => "sink unreachable; ",
        false => "",
    };
    v1::PartitionInfo {
        partition: Some(partition_to_wire(partition)),
        topic: topic.map_or_else(String::new, |topic| topic.name.to_string()),
        state: state.into(),
        member: text(owner),
        epoch: found.epoch.map_or(0, tenure_model::Epoch::get),
        committed: found.committed.as_ref().map(|committed| committed.next_offset.get()),
        target_member: text(target),
        acquired,
        since_unix_ms: found.changed_time.0,
        cause: unreachable.to_owned()
            + &match (topic.and_then(|topic| topic.frozen_by), kept_for(group, target)) {
                (Some(later), _) => {
                    let before = cause(found, held.as_ref());
                    format!("{before}; frozen: the topic was created anew as {later}")
                }
                (None, Some(instance)) if owner.is_none() => {
                    format!("{}; kept for instance {instance}", cause(found, None))
                }
                (None, Some(_) | None) => match found.preparation.as_ref().filter(|one| !one.ready)
                {
                    Some(preparation) => {
                        let before = cause(found, held.as_ref());
                        format!("{before}; {} prepares for it", preparation.member)
                    }
                    None => cause(found, held.as_ref()),
                },
            },
        position: held.as_ref().filter(|held| is_reading(held.phase)).map(|held| held.position),
        error: error(found, held.as_ref()),
        still_ms: held
            .as_ref()
            .filter(|held| held.phase == Phase::Running)
            .map(|held| held.still_ms),
        not_advancing: acquired
            && held.as_ref().is_some_and(|held| held.stands_still(heard.not_advancing_ms)),
        end_offset: held.as_ref().and_then(|held| held.end_offset),
    }
}

/// The static member whose return the partition waits for.
fn kept_for<'a>(group: &'a Group, target: Option<&MemberId>) -> Option<&'a InstanceId> {
    let member = group.members.get(target?)?;
    member.away.and(member.instance.as_ref())
}

/// Whether one member after the other could not reach a sink. The partition is tried again all the same, ever more
/// rarely, and by each member that may own it.
fn is_sink_unreachable(group: &Group, partition: Partition, found: &PartitionState) -> bool {
    let Some(trouble) = found.trouble.as_ref() else { return false };
    let may_own = |member: &&MemberId| group.may_own(member, partition);
    let members = count(group.members.keys().filter(may_own).count()).max(1);
    trouble.error.starts_with(SINK_ERROR_PREFIX)
        && trouble.failures >= members.min(SINK_UNREACHABLE_AFTER)
}

/// What the owner's last heartbeat says of this very grant.
fn held_by(
    group: &GroupId,
    owner: &MemberId,
    partition: Partition,
    found: &PartitionState,
    heard: Heard<'_>,
) -> Option<Held> {
    let beat = heard.beats.get(&(group.clone(), owner.clone()))?;
    let same = |held: &&Held| held.partition == partition && Some(held.epoch) == found.epoch;
    beat.lock().held.iter().find(same).cloned()
}

const fn is_reading(phase: Phase) -> bool {
    match phase {
        Phase::Running | Phase::Draining => true,
        Phase::Registering | Phase::Verifying | Phase::Resuming => false,
    }
}

fn error(found: &PartitionState, held: Option<&Held>) -> String {
    match held {
        Some(held) if !held.error.is_empty() => held.error.clone(),
        Some(_) | None => {
            found.trouble.as_ref().map_or_else(String::new, |trouble| trouble.error.clone())
        }
    }
}

/// Why the partition is where it is, for people.
fn cause(found: &PartitionState, held: Option<&Held>) -> String {
    let freed = found.freed_by.map(freed_by);
    match &found.ownership {
        Ownership::Free => match (&found.trouble, freed) {
            (Some(trouble), Some(freed)) if trouble.held_back => {
                format!("{freed}; held back after {} failed acquires", trouble.failures)
            }
            (_, Some(freed)) => freed.to_owned(),
            (_, None) => "never owned".to_owned(),
        },
        Ownership::Held { acquired: false, .. } => match held {
            Some(held) => format!("acquiring: {} for {} ms", held.phase.as_str(), held.phase_ms),
            None => "acquiring".to_owned(),
        },
        Ownership::Held { acquired: true, .. } => match freed {
            Some(freed) => format!("granted after: {freed}"),
            None => "first grant".to_owned(),
        },
        Ownership::Revoking { .. } => match held {
            Some(held) => format!("revoked; {} for {} ms", held.phase.as_str(), held.phase_ms),
            None => "revoked".to_owned(),
        },
    }
}

const fn freed_by(cause: FreeCause) -> &'static str {
    match cause {
        FreeCause::Released(ReleaseReason::Revoked) => "released when asked",
        FreeCause::Released(ReleaseReason::Shutdown) => "owner shut down",
        FreeCause::Released(ReleaseReason::LeaseLost) => "owner stopped: its lease ran out",
        FreeCause::Released(ReleaseReason::Fenced) => "owner was fenced",
        FreeCause::Released(ReleaseReason::AcquireFailed) => "owner could not acquire it",
        FreeCause::Released(ReleaseReason::HandlerFailed) => "owner's handler failed",
        FreeCause::Expired => "owner's lease expired",
        FreeCause::Left => "owner left",
        FreeCause::DrainDeadline => "drain deadline passed",
        FreeCause::AcquireDeadline => "acquire deadline passed",
    }
}
