//! Join, leave, silence, expiry, and what members say of topics.

use std::collections::{BTreeMap, BTreeSet};

use tenure_model::limits::{
    GROUP_PARTITIONS_MAX, GROUPS_MAX, MEMBERS_MAX, REASON_BYTES_MAX, RETURNING_WITHIN_MS_MAX,
    SUBSCRIPTION_TOPICS_MAX, TOPIC_PARTITIONS_MAX, TOPICS_MAX, TTL_MS_MAX, TTL_MS_MIN, WEIGHT_MAX,
};
use tenure_model::{GroupId, GroupSettings, MemberEpoch, MemberId, Partition, TopicId, TopicName};

use super::{Decided, Draft, Verdict, check_limit};
use crate::command::{JoinGroup, LeaveGroup, MemberRef, ReportTopics, SilentMember, TopicReport};
use crate::event::{FreeCause, MemberJoined};
use crate::state::{Group, Member};
use crate::{Context, Event, Rejection, Reply, State};

impl State {
    pub(super) fn join_group(&self, context: Context, join: &JoinGroup) -> Decided {
        check_join(join)?;
        let existing = self.groups.get(&join.group).map(AsRef::as_ref);
        let mut draft = Draft::default();
        match existing {
            Some(group) => check_settings(join, &group.settings)?,
            None => {
                check_limit("groups", self.groups.len() + 1, GROUPS_MAX)?;
                let settings = join
                    .settings
                    .clone()
                    .validate()
                    .map_err(|error| Rejection::Invalid { what: error.to_string() })?;
                draft.push(Event::GroupCreated { group: join.group.clone(), settings });
            }
        }
        let gone =
            || Rejection::MemberGone { group: join.group.clone(), member: join.member.clone() };
        if existing.is_some_and(|group| group.tombstones.contains(&join.member)) {
            return Err(gone());
        }
        let record = match existing.and_then(|group| group.members.get(&join.member)) {
            Some(member) if member.away.is_some() => return Err(gone()),
            Some(member) => rejoin(join, member, &mut draft)?,
            None if join.rejoin.is_some() => return Err(gone()),
            None => first_join(context, join, existing, &mut draft)?,
        };
        grow_topics(&join.group, existing, &join.report, &mut draft)?;
        let reply = Reply::Joined {
            member_epoch: record.member_epoch,
            ttl_ms: record.ttl_ms,
            heartbeat_interval_ms: record.heartbeat_interval_ms,
        };
        Ok((reply, draft.finish(self)))
    }

    pub(super) fn report_topics(&self, report: &ReportTopics) -> Decided {
        let (group, _) = self.member(&report.group, &report.member)?;
        let mut draft = Draft::default();
        grow_topics(&report.group, Some(group), &report.topics, &mut draft)?;
        Ok((Reply::Done, draft.finish(self)))
    }

    pub(super) fn leave_group(&self, leave: &LeaveGroup) -> Decided {
        let (group, member) = self.member(&leave.group, &leave.member)?;
        check_limit("bytes in the reason", leave.reason.len(), REASON_BYTES_MAX)?;
        check_return(leave, member)?;
        let mut draft = Draft::default();
        let (verdicts, released) =
            self.release(&leave.group, &leave.member, &leave.partitions, &mut draft)?;
        let rest = member.owned.difference(&released);
        free_all((&leave.group, group), &leave.member, rest, FreeCause::Left, &mut draft);
        if let Some(returning_within_ms) = leave.returning_within_ms {
            // Nothing to plan: the target goes on to name it.
            draft.push(Event::MemberAway {
                group: leave.group.clone(),
                member: leave.member.clone(),
                returning_within_ms,
            });
        } else {
            draft.push(Event::MemberLeft {
                group: leave.group.clone(),
                member: leave.member.clone(),
                reason: leave.reason.clone(),
            });
            draft.replan(&leave.group);
        }
        Ok((Reply::Verdicts(verdicts), draft.finish(self)))
    }

    pub(super) fn expire_members(&self, members: &[MemberRef]) -> (Reply, Vec<Event>) {
        let mut draft = Draft::default();
        let mut expired = BTreeSet::new();
        let verdicts = members
            .iter()
            .map(|named| {
                let (group, member) = self.membership_or_away(named)?;
                if !expired.insert(named) {
                    return Err(nothing_to_do(named, "is expired already"));
                }
                let all = member.owned.iter();
                free_all((&named.group, group), &named.member, all, FreeCause::Expired, &mut draft);
                draft.push(Event::MemberExpired {
                    group: named.group.clone(),
                    member: named.member.clone(),
                });
                draft.replan(&named.group);
                Ok(())
            })
            .collect();
        (Reply::Verdicts(verdicts), draft.finish(self))
    }

    pub(super) fn reserve_members(
        &self,
        members: &[MemberRef],
        returning_within_ms: u64,
    ) -> (Reply, Vec<Event>) {
        let mut draft = Draft::default();
        let mut reserved = BTreeSet::new();
        let verdicts = members
            .iter()
            .map(|named| {
                let (group, member) = self.membership(named)?;
                if !reserved.insert(named) {
                    return Err(nothing_to_do(named, "is away already"));
                }
                if member.instance.is_none() {
                    return Err(Rejection::Invalid {
                        what: format!("{} has no instance id: no place is kept", named.member),
                    });
                }
                check_return_length(returning_within_ms)?;
                let all = member.owned.iter();
                free_all((&named.group, group), &named.member, all, FreeCause::Expired, &mut draft);
                draft.push(Event::MemberAway {
                    group: named.group.clone(),
                    member: named.member.clone(),
                    returning_within_ms,
                });
                Ok(())
            })
            .collect();
        (Reply::Verdicts(verdicts), draft.finish(self))
    }

    pub(super) fn mark_members_silent(&self, members: &[SilentMember]) -> (Reply, Vec<Event>) {
        let mut draft = Draft::default();
        let mut marked = BTreeSet::new();
        let verdicts = members
            .iter()
            .map(|silent| {
                let named = &silent.member;
                let (_, member) = self.membership(named)?;
                if member.silent.is_some() || !marked.insert(named) {
                    return Err(nothing_to_do(named, "is silent already"));
                }
                draft.push(Event::MemberSilenced {
                    group: named.group.clone(),
                    member: named.member.clone(),
                    silent_for_ms: silent.silent_for_ms,
                });
                Ok(())
            })
            .collect();
        (Reply::Verdicts(verdicts), draft.finish(self))
    }

    pub(super) fn mark_members_heard(&self, members: &[MemberRef]) -> (Reply, Vec<Event>) {
        let mut draft = Draft::default();
        let mut marked = BTreeSet::new();
        let verdicts = members
            .iter()
            .map(|named| {
                let (_, member) = self.membership(named)?;
                if member.silent.is_none() || !marked.insert(named) {
                    return Err(nothing_to_do(named, "is not silent"));
                }
                draft.push(Event::MemberHeard {
                    group: named.group.clone(),
                    member: named.member.clone(),
                });
                Ok(())
            })
            .collect();
        (Reply::Verdicts(verdicts), draft.finish(self))
    }

    /// The member that `named` means, if it is still that membership.
    fn membership(&self, named: &MemberRef) -> Result<(&Group, &Member), Rejection> {
        let (group, member) = self.member(&named.group, &named.member)?;
        check_member_epoch(named.member_epoch, member.epoch, || named.member.clone())?;
        Ok((group, member))
    }

    /// As [`State::membership`], also of one that is away.
    fn membership_or_away(&self, named: &MemberRef) -> Result<(&Group, &Member), Rejection> {
        let group = self.group(&named.group)?;
        match group.members.get(&named.member) {
            Some(member) if member.away.is_some() => {
                check_member_epoch(named.member_epoch, member.epoch, || named.member.clone())?;
                Ok((group, member))
            }
            Some(_) | None => self.membership(named),
        }
    }
}

/// Frees what `member` owns.
fn free_all<'a>(
    (id, group): (&GroupId, &Group),
    member: &MemberId,
    owned: impl Iterator<Item = &'a Partition>,
    cause: FreeCause,
    draft: &mut Draft,
) {
    for partition in owned {
        let Some(epoch) = group.partitions.get(partition).and_then(|state| state.epoch) else {
            continue;
        };
        draft.push(Event::PartitionReleased {
            group: id.clone(),
            partition: *partition,
            member: member.clone(),
            epoch,
            cause,
        });
    }
}

/// Refuses a return of a member that nothing would tell from another.
fn check_return(leave: &LeaveGroup, member: &Member) -> Verdict {
    let Some(returning_within_ms) = leave.returning_within_ms else { return Ok(()) };
    if member.instance.is_none() {
        return Err(Rejection::Invalid {
            what: format!(
                "member {} has no instance id to return by: leave for good, or join with one",
                leave.member
            ),
        });
    }
    check_return_length(returning_within_ms)
}

fn check_return_length(returning_within_ms: u64) -> Verdict {
    if (1..=RETURNING_WITHIN_MS_MAX).contains(&returning_within_ms) {
        return Ok(());
    }
    Err(Rejection::Invalid {
        what: format!(
            "returning_within_ms is {returning_within_ms}: use 1 to {RETURNING_WITHIN_MS_MAX}"
        ),
    })
}

fn nothing_to_do(named: &MemberRef, what: &str) -> Rejection {
    Rejection::NothingToDo { what: format!("{} {what}", named.member) }
}

fn check_member_epoch(
    given: MemberEpoch,
    current: MemberEpoch,
    member: impl FnOnce() -> MemberId,
) -> Verdict {
    if given == current {
        Ok(())
    } else {
        Err(Rejection::StaleMember { member: member(), given, current })
    }
}

/// Checks what the state must never take in, whoever checked before.
fn check_join(join: &JoinGroup) -> Verdict {
    check_limit("topics in the subscription", join.topics.len(), SUBSCRIPTION_TOPICS_MAX)?;
    check_limit("bytes in client", join.client.len(), REASON_BYTES_MAX)?;
    let problem = if join.topics.is_empty() {
        "topics is empty: name at least one".to_owned()
    } else if !(TTL_MS_MIN..=TTL_MS_MAX).contains(&join.ttl_ms) {
        format!("ttl_ms is {}: use {TTL_MS_MIN} to {TTL_MS_MAX}", join.ttl_ms)
    } else if join.heartbeat_interval_ms == 0 || join.heartbeat_interval_ms > join.ttl_ms / 3 {
        format!(
            "heartbeat_interval_ms is {}: use 1 to {}, a third of ttl_ms",
            join.heartbeat_interval_ms,
            join.ttl_ms / 3
        )
    } else if join.partitions_max == Some(0) {
        "partitions_max is 0: leave it out, or give at least 1".to_owned()
    } else if !(1..=WEIGHT_MAX).contains(&join.weight) {
        format!("weight is {}: use 1 to {WEIGHT_MAX}", join.weight)
    } else {
        return Ok(());
    };
    Err(Rejection::Invalid { what: problem })
}

fn check_settings(join: &JoinGroup, existing: &GroupSettings) -> Verdict {
    let mut given = join.settings.clone();
    given.sinks.sort();
    let sinks = |settings: &GroupSettings| {
        let names: Vec<String> = settings
            .sinks
            .iter()
            .map(|sink| {
                let kind = if sink.enforces_epoch { "fenced" } else { "not fenced" };
                format!("{} ({kind})", sink.name)
            })
            .collect();
        format!("[{}]", names.join(", "))
    };
    let (setting, existing, given) = if given.home != existing.home {
        ("home", existing.home.as_str().to_owned(), given.home.as_str().to_owned())
    } else if given.takeover != existing.takeover {
        ("takeover", existing.takeover.as_str().to_owned(), given.takeover.as_str().to_owned())
    } else if given.sinks != existing.sinks {
        ("sinks", sinks(existing), sinks(&given))
    } else {
        return Ok(());
    };
    Err(Rejection::SettingsConflict { group: join.group.clone(), setting, existing, given })
}

fn record_of(join: &JoinGroup, member_epoch: MemberEpoch) -> MemberJoined {
    let topics: BTreeSet<TopicName> = join.topics.iter().cloned().collect();
    MemberJoined {
        group: join.group.clone(),
        member: join.member.clone(),
        member_epoch,
        instance: join.instance.clone(),
        topics: topics.into_iter().collect(),
        ttl_ms: join.ttl_ms,
        heartbeat_interval_ms: join.heartbeat_interval_ms,
        client: join.client.clone(),
        partitions_max: join.partitions_max,
        prepares: join.prepares,
        weight: join.weight,
    }
}

fn first_join(
    context: Context,
    join: &JoinGroup,
    existing: Option<&Group>,
    draft: &mut Draft,
) -> Result<MemberJoined, Rejection> {
    let earlier = existing.and_then(|group| group.instance(join.instance.as_ref()?));
    if let (Some((member, record)), Some(instance)) = (earlier, &join.instance)
        && record.away.is_none()
    {
        let (instance, member) = (instance.clone(), member.clone());
        return Err(Rejection::InstanceInUse { instance, member });
    }
    if let (Some(group), None) = (existing, earlier) {
        check_limit("members of the group", group.members.len() + 1, MEMBERS_MAX)?;
    }
    let record = record_of(join, MemberEpoch(context.index.0));
    draft.push(Event::MemberJoined(Box::new(record.clone())));
    if let Some((member, _)) = earlier {
        let group = join.group.clone();
        draft.push(Event::PlaceTaken {
            group: group.clone(),
            from: member.clone(),
            to: join.member.clone(),
        });
        let reason = format!("returned as {}", join.member);
        draft.push(Event::MemberLeft { group, member: member.clone(), reason });
    }
    draft.replan(&join.group);
    Ok(record)
}

/// A join of a live member: a retry, or a session that is taken up again. It is the same membership.
fn rejoin(join: &JoinGroup, member: &Member, draft: &mut Draft) -> Result<MemberJoined, Rejection> {
    if let Some(given) = join.rejoin {
        check_member_epoch(given, member.epoch, || join.member.clone())?;
    }
    if join.instance != member.instance {
        return Err(Rejection::Invalid {
            what: format!("instance id of the live member {} cannot change", join.member),
        });
    }
    let mut record = record_of(join, member.epoch);
    // The member may still count on the longer lease (DESIGN.md, section 5, rule 9).
    record.ttl_ms = record.ttl_ms.max(member.ttl_ms);
    record.heartbeat_interval_ms = record.heartbeat_interval_ms.max(member.heartbeat_interval_ms);
    if member.silent.is_some() {
        draft.push(Event::MemberHeard { group: join.group.clone(), member: join.member.clone() });
    }
    let plans_differ = record.topics != member.topics
        || record.partitions_max != member.partitions_max
        || record.weight != member.weight;
    let rest_differs = record.ttl_ms != member.ttl_ms
        || record.heartbeat_interval_ms != member.heartbeat_interval_ms
        || record.client != member.client
        || record.prepares != member.prepares;
    if plans_differ || rest_differs {
        draft.push(Event::MemberUpdated(Box::new(record.clone())));
    }
    if plans_differ {
        draft.replan(&join.group);
    }
    Ok(record)
}

/// Takes in what a member sees. Counts only grow; what it does not see stays.
fn grow_topics(
    id: &GroupId,
    existing: Option<&Group>,
    reports: &[TopicReport],
    draft: &mut Draft,
) -> Verdict {
    let mut largest: BTreeMap<TopicId, (&TopicName, u32)> = BTreeMap::new();
    for report in reports {
        if !(1..=TOPIC_PARTITIONS_MAX).contains(&report.partition_count) {
            return Err(Rejection::Invalid {
                what: format!(
                    "partition count of topic {} is {}: use 1 to {TOPIC_PARTITIONS_MAX}",
                    report.topic, report.partition_count
                ),
            });
        }
        let known = existing.and_then(|group| group.topics.get(&report.topic_id));
        let slot = largest
            .entry(report.topic_id)
            .or_insert((known.map_or(&report.topic, |topic| &topic.name), 0));
        if slot.0 != &report.topic {
            return Err(Rejection::Invalid {
                what: format!(
                    "topic id {} is known as {}, not {}: report it under its name",
                    report.topic_id, slot.0, report.topic
                ),
            });
        }
        slot.1 = slot.1.max(report.partition_count);
    }
    let mut topic_count = existing.map_or(0, |group| group.topics.len());
    let mut partition_count = existing.map_or(0, |group| group.partitions.len());
    for (topic_id, (topic, count)) in largest {
        let known = existing.and_then(|group| group.topics.get(&topic_id));
        let before = known.map_or(0, |topic| topic.partition_count);
        // A member with an old look at a topic that was created anew changes nothing.
        if count <= before || known.is_some_and(|topic| topic.frozen_by.is_some()) {
            continue;
        }
        topic_count += usize::from(known.is_none());
        partition_count += (count - before) as usize;
        check_limit("topics of the group", topic_count, TOPICS_MAX)?;
        check_limit("partitions of the group", partition_count, GROUP_PARTITIONS_MAX)?;
        draft.push(Event::TopicGrown {
            group: id.clone(),
            topic: topic.clone(),
            topic_id,
            partition_count: count,
        });
        draft.replan(id);
    }
    Ok(())
}
