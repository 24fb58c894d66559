//! The edge: from requests to commands. What is malformed is refused here, by the name of the field.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tenure_core::command::{
    AcknowledgeAcquired, AcknowledgePrepared, CommitOffsets, JoinGroup, LeaveGroup, MemberRef,
    OffsetCommit, OperatorContext, Release, ReleasePartitions, ReleaseReason, ReportTopics,
    RewindOffset, TopicReport,
};
use tenure_model::limits::{
    EPOCH_FLOOR_STEP_MAX, ERROR_TEXT_BYTES_MAX, LABELS_MAX, METADATA_BYTES_MAX, NAME_BYTES_MAX,
    REASON_BYTES_MAX, REQUEST_PARTITIONS_MAX, RETURNING_WITHIN_MS_MAX, SUBSCRIPTION_TOPICS_MAX,
    TOPIC_PARTITIONS_MAX, TOPICS_MAX, WEIGHT_MAX,
};
use tenure_model::{
    CommitSequence, Epoch, GroupId, Index, LabelName, LeaseSettings, MemberEpoch, MemberId,
    Partition, RequestId, TopicId, TopicName,
};
use tenure_proto::convert::{
    Malformed, at_most, epoch, group_settings, name, next_offset, partition,
};
use tenure_proto::v1;

use crate::driver::session::Said;
use crate::raft::NodeId;
use crate::settings::is_address;
use crate::soft::{Held, Labels, Phase};

/// Reads a join; lengths that are 0 are the coordinator's.
pub fn join(wire: &v1::Join, defaults: LeaseSettings) -> Result<JoinGroup, Malformed> {
    if wire.topics.is_empty() {
        return Err(Malformed::new("join.topics", "is empty: name at least one topic"));
    }
    at_most("join.topics", wire.topics.len(), SUBSCRIPTION_TOPICS_MAX)?;
    let mut topics = BTreeSet::new();
    for topic in &wire.topics {
        if !topics.insert(name::<TopicName>("join.topics", topic)?) {
            return Err(Malformed::new("join.topics", format!("names {topic} twice")));
        }
    }
    let (ttl_ms, heartbeat_interval_ms) = lease_lengths(wire, defaults)?;
    if wire.weight > WEIGHT_MAX {
        let problem = format!("is {}: use 1 to {WEIGHT_MAX}, or leave it out", wire.weight);
        return Err(Malformed::new("join.weight", problem));
    }
    Ok(JoinGroup {
        group: name("join.group", &wire.group)?,
        member: name("join.member", &wire.member)?,
        instance: match wire.instance_id.as_str() {
            "" => None,
            text => Some(name("join.instance_id", text)?),
        },
        topics: topics.into_iter().collect(),
        settings: group_settings("join.settings", wire.settings.as_ref())?,
        ttl_ms,
        heartbeat_interval_ms,
        client: text("join.client", &wire.client, REASON_BYTES_MAX)?,
        partitions_max: (wire.partitions_max != 0).then_some(wire.partitions_max),
        report: reports("join.report", &wire.report)?,
        rejoin: (wire.member_epoch != 0).then_some(MemberEpoch(wire.member_epoch)),
        prepares: wire.prepares,
        weight: wire.weight.max(1),
    })
}

/// Reads the labels of a member that joins.
pub fn labels(wire: &[v1::Label]) -> Result<Labels, Malformed> {
    const FIELD: &str = "join.labels";
    at_most(FIELD, wire.len(), LABELS_MAX)?;
    let mut labels = BTreeMap::new();
    for label in wire {
        let name: LabelName = name(FIELD, &label.name)?;
        let value = text(FIELD, &label.value, NAME_BYTES_MAX)?;
        if let Some(_twice) = labels.insert(name, value) {
            return Err(Malformed::new(FIELD, format!("names {} twice", label.name)));
        }
    }
    Ok(Arc::new(labels))
}

fn lease_lengths(wire: &v1::Join, defaults: LeaseSettings) -> Result<(u64, u64), Malformed> {
    let ttl_ms = if wire.ttl_ms == 0 { defaults.ttl_ms } else { wire.ttl_ms };
    let heartbeat_interval_ms = match wire.heartbeat_interval_ms {
        0 if wire.ttl_ms == 0 => defaults.heartbeat_interval_ms,
        0 => LeaseSettings::for_ttl(ttl_ms).heartbeat_interval_ms.max(1),
        given => given,
    };
    let clock_drift_max_ms = defaults.clock_drift_max_ms;
    LeaseSettings { ttl_ms, heartbeat_interval_ms, clock_drift_max_ms }
        .validate()
        .map_err(|error| Malformed::new("join.ttl_ms", error))?;
    Ok((ttl_ms, heartbeat_interval_ms))
}

fn reports(field: &'static str, wire: &[v1::TopicReport]) -> Result<Vec<TopicReport>, Malformed> {
    at_most(field, wire.len(), TOPICS_MAX)?;
    let mut ids = BTreeSet::new();
    wire.iter()
        .map(|report| {
            let topic_id =
                TopicId::parse(&report.topic_id).map_err(|error| Malformed::new(field, error))?;
            if !ids.insert(topic_id) {
                return Err(Malformed::new(field, format!("names topic id {topic_id} twice")));
            }
            let topic = name(field, &report.topic)?;
            let count = report.partition_count;
            if !(1..=TOPIC_PARTITIONS_MAX).contains(&count) {
                let problem = format!(
                    "partition_count of {topic} is {count}: use 1 to {TOPIC_PARTITIONS_MAX}"
                );
                return Err(Malformed::new(field, problem));
            }
            Ok(TopicReport { topic, topic_id, partition_count: count })
        })
        .collect()
}

/// Reads what a member of a session says of topics.
pub fn report_topics(
    member: &MemberRef,
    wire: &v1::ReportTopics,
) -> Result<ReportTopics, Malformed> {
    Ok(ReportTopics {
        group: member.group.clone(),
        member: member.member.clone(),
        topics: reports("report_topics.topics", &wire.topics)?,
    })
}

/// Reads what a heartbeat says is held.
pub fn said(beat: v1::Heartbeat) -> Result<Said, Malformed> {
    const FIELD: &str = "heartbeat.as_listed";
    let Some(v1::HeldAsListed { version, positions, lags }) = beat.as_listed else {
        return held(&beat.held).map(Said::List);
    };
    if !beat.held.is_empty() {
        return Err(Malformed::new(FIELD, "stands beside heartbeat.held: give one of them"));
    }
    at_most("heartbeat.as_listed.positions", positions.len(), REQUEST_PARTITIONS_MAX)?;
    for position in &positions {
        next_offset("heartbeat.as_listed.positions", *position)?;
    }
    if !lags.is_empty() && lags.len() != positions.len() {
        let problem = format!("has {} lags for {} positions", lags.len(), positions.len());
        return Err(Malformed::new(FIELD, problem));
    }
    Ok(Said::AsListed { version: Index(version), positions, lags })
}

fn held(wire: &[v1::HeldPartition]) -> Result<Vec<Held>, Malformed> {
    const FIELD: &str = "heartbeat.held";
    at_most(FIELD, wire.len(), REQUEST_PARTITIONS_MAX)?;
    let mut seen = Seen::new(FIELD);
    wire.iter()
        .map(|held| {
            let phase = match v1::Phase::try_from(held.phase) {
                Ok(v1::Phase::Registering) => Phase::Registering,
                Ok(v1::Phase::Verifying) => Phase::Verifying,
                Ok(v1::Phase::Resuming) => Phase::Resuming,
                Ok(v1::Phase::Running) => Phase::Running,
                Ok(v1::Phase::Draining) => Phase::Draining,
                Ok(v1::Phase::Unspecified) | Err(_) => {
                    let problem = format!("phase {} is not known", held.phase);
                    return Err(Malformed::new(FIELD, problem));
                }
            };
            Ok(Held {
                partition: seen.once(partition(FIELD, held.partition.as_ref())?)?,
                epoch: epoch(FIELD, held.epoch)?,
                phase,
                position: next_offset(FIELD, held.position)?.get(),
                phase_ms: held.phase_ms,
                error: text(FIELD, &held.error, ERROR_TEXT_BYTES_MAX)?,
                still_ms: held.still_ms,
                end_offset: match held.end_offset {
                    Some(end) => Some(next_offset(FIELD, end)?.get()),
                    None => None,
                },
            })
        })
        .collect()
}

/// Reads the word that a member is prepared.
pub fn prepared(member: &MemberRef, wire: &v1::Prepared) -> Result<AcknowledgePrepared, Malformed> {
    text("prepared.error", &wire.error, ERROR_TEXT_BYTES_MAX)?;
    Ok(AcknowledgePrepared {
        group: member.group.clone(),
        member: member.member.clone(),
        partition: partition("prepared.partition", wire.partition.as_ref())?,
    })
}

/// Reads the word that a grant was acquired.
pub fn acquired(member: &MemberRef, wire: &v1::Acquired) -> Result<AcknowledgeAcquired, Malformed> {
    next_offset("acquired.resume", wire.resume)?;
    Ok(AcknowledgeAcquired {
        group: member.group.clone(),
        member: member.member.clone(),
        partition: partition("acquired.partition", wire.partition.as_ref())?,
        epoch: epoch("acquired.epoch", wire.epoch)?,
        home_initialised: wire.home_initialised,
    })
}

/// Reads a release.
pub fn release(member: &MemberRef, wire: &v1::Release) -> Result<ReleasePartitions, Malformed> {
    Ok(ReleasePartitions {
        group: member.group.clone(),
        member: member.member.clone(),
        partitions: releases("release.partitions", &wire.partitions)?,
    })
}

/// Reads a leave.
pub fn leave(member: &MemberRef, wire: &v1::Leave) -> Result<LeaveGroup, Malformed> {
    Ok(LeaveGroup {
        group: member.group.clone(),
        member: member.member.clone(),
        partitions: releases("leave.partitions", &wire.partitions)?,
        reason: text("leave.reason", &wire.reason, REASON_BYTES_MAX)?,
        returning_within_ms: match wire.returning_within_ms {
            0 => None,
            length if length <= RETURNING_WITHIN_MS_MAX => Some(length),
            length => {
                let problem = format!("is {length}: give at most {RETURNING_WITHIN_MS_MAX}");
                return Err(Malformed::new("leave.returning_within_ms", problem));
            }
        },
    })
}

fn releases(field: &'static str, wire: &[v1::Released]) -> Result<Vec<Release>, Malformed> {
    at_most(field, wire.len(), REQUEST_PARTITIONS_MAX)?;
    let mut seen = Seen::new(field);
    wire.iter()
        .map(|released| {
            let offset = released.next_offset.map(|offset| next_offset(field, offset));
            let epoch = epoch(field, released.epoch)?;
            Ok(Release {
                partition: seen.once_at(partition(field, released.partition.as_ref())?, epoch)?,
                epoch,
                next_offset: offset.transpose()?,
                reason: release_reason(field, released.reason)?,
                error: text(field, &released.error, ERROR_TEXT_BYTES_MAX)?,
            })
        })
        .collect()
}

fn release_reason(field: &'static str, wire: i32) -> Result<ReleaseReason, Malformed> {
    match v1::ReleaseReason::try_from(wire) {
        Ok(v1::ReleaseReason::Revoked) => Ok(ReleaseReason::Revoked),
        Ok(v1::ReleaseReason::Shutdown) => Ok(ReleaseReason::Shutdown),
        Ok(v1::ReleaseReason::LeaseLost) => Ok(ReleaseReason::LeaseLost),
        Ok(v1::ReleaseReason::Fenced) => Ok(ReleaseReason::Fenced),
        Ok(v1::ReleaseReason::AcquireFailed) => Ok(ReleaseReason::AcquireFailed),
        Ok(v1::ReleaseReason::HandlerFailed) => Ok(ReleaseReason::HandlerFailed),
        Ok(v1::ReleaseReason::Unspecified) | Err(_) => {
            Err(Malformed::new(field, format!("reason {wire} is not known")))
        }
    }
}

/// Reads a commit of offsets.
pub fn commit(wire: v1::CommitRequest) -> Result<CommitOffsets, Malformed> {
    const FIELD: &str = "commits";
    let group = name("group", &wire.group)?;
    let member = name("member", &wire.member)?;
    if wire.commits.is_empty() {
        return Err(Malformed::new(FIELD, "is empty: name at least one partition"));
    }
    at_most(FIELD, wire.commits.len(), REQUEST_PARTITIONS_MAX)?;
    let mut seen = Seen::new(FIELD);
    let commits = wire.commits.into_iter().map(|commit| {
        if commit.sequence == 0 {
            return Err(Malformed::new(FIELD, "sequence is 0: count from 1 within an epoch"));
        }
        at_most("commits.metadata", commit.metadata.len(), METADATA_BYTES_MAX)?;
        Ok(OffsetCommit {
            partition: seen.once(partition(FIELD, commit.partition.as_ref())?)?,
            epoch: epoch(FIELD, commit.epoch)?,
            sequence: CommitSequence(commit.sequence),
            next_offset: next_offset(FIELD, commit.next_offset)?,
            metadata: commit.metadata,
        })
    });
    Ok(CommitOffsets { group, member, commits: commits.collect::<Result<_, Malformed>>()? })
}

/// Reads a rewind of one offset.
pub fn rewind(wire: v1::RewindRequest) -> Result<RewindOffset, Malformed> {
    let v1::RewindRequest { group, member, commit, request } = wire;
    let one = v1::CommitRequest { group, member, commits: commit.into_iter().collect() };
    let CommitOffsets { group, member, commits } = self::commit(one)?;
    let commit = commits.into_iter().next();
    let commit = commit.ok_or_else(|| Malformed::new("commit", "is missing: name the offset"))?;
    Ok(RewindOffset { group, member, commit, request: name("request", &request)? })
}

/// Reads a fetch: the group, and the partitions; none means all.
pub fn fetch(wire: &v1::FetchRequest) -> Result<(GroupId, Vec<Partition>), Malformed> {
    let group = name("group", &wire.group)?;
    at_most("partitions", wire.partitions.len(), REQUEST_PARTITIONS_MAX)?;
    let mut seen = Seen::new("partitions");
    let partitions =
        wire.partitions.iter().map(|wire| seen.once(partition("partitions", Some(wire))?));
    Ok((group, partitions.collect::<Result<_, _>>()?))
}

/// Grants to verify, and whose they are said to be.
pub type Verify = (GroupId, MemberId, Vec<(Partition, Epoch)>);

/// Reads a verify.
pub fn verify(wire: &v1::VerifyRequest) -> Result<Verify, Malformed> {
    let group = name("group", &wire.group)?;
    let member = name("member", &wire.member)?;
    if wire.grants.is_empty() {
        return Err(Malformed::new("grants", "is empty: name at least one grant"));
    }
    at_most("grants", wire.grants.len(), REQUEST_PARTITIONS_MAX)?;
    let mut seen = Seen::new("grants");
    let grants = wire.grants.iter().map(|grant| {
        let partition = seen.once(partition("grants", grant.partition.as_ref())?)?;
        Ok((partition, epoch("grants", grant.epoch)?))
    });
    Ok((group, member, grants.collect::<Result<_, Malformed>>()?))
}

/// Reads who asks and why; makes a request id when there is none. Also says whether it is a dry run.
pub fn operator(wire: Option<&v1::OperatorContext>) -> Result<(OperatorContext, bool), Malformed> {
    let wire = wire.ok_or_else(|| {
        Malformed::new("context", "is missing: say who asks (actor) and why (reason)")
    })?;
    let request = match wire.request_id.as_str() {
        "" => name("context.request_id", &format!("op-{:032x}", rand::random::<u128>()))?,
        given => name::<RequestId>("context.request_id", given)?,
    };
    if wire.reason.trim().is_empty() {
        let problem = format!("is empty: say why, in 1 to {REASON_BYTES_MAX} bytes");
        return Err(Malformed::new("context.reason", problem));
    }
    if wire.actor.trim().is_empty() {
        let problem = format!("is empty: say who asks, in 1 to {NAME_BYTES_MAX} bytes");
        return Err(Malformed::new("context.actor", problem));
    }
    let operator = OperatorContext {
        request,
        reason: text("context.reason", &wire.reason, REASON_BYTES_MAX)?,
        actor: text("context.actor", &wire.actor, NAME_BYTES_MAX)?,
    };
    Ok((operator, wire.dry_run))
}

/// Who changes the cluster, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterChange {
    pub actor: String,
    pub reason: String,
}

/// Reads who changes the cluster and why.
pub fn cluster_change(wire: Option<&v1::ClusterChange>) -> Result<ClusterChange, Malformed> {
    let wire = wire.ok_or_else(|| {
        Malformed::new("change", "is missing: say who asks (actor) and why (reason)")
    })?;
    if wire.reason.trim().is_empty() {
        let problem = format!("is empty: say why, in 1 to {REASON_BYTES_MAX} bytes");
        return Err(Malformed::new("change.reason", problem));
    }
    if wire.actor.trim().is_empty() {
        let problem = format!("is empty: say who asks, in 1 to {NAME_BYTES_MAX} bytes");
        return Err(Malformed::new("change.actor", problem));
    }
    Ok(ClusterChange {
        actor: text("change.actor", &wire.actor, NAME_BYTES_MAX)?,
        reason: text("change.reason", &wire.reason, REASON_BYTES_MAX)?,
    })
}

/// Refuses a floor that gives up more epochs than a cluster can have given.
pub fn floor(floor: Epoch, counter: u64) -> Result<(), Malformed> {
    let highest = counter.saturating_add(EPOCH_FLOOR_STEP_MAX);
    if floor.get() > highest {
        let problem = format!(
            "is {floor}, more than {EPOCH_FLOOR_STEP_MAX} above the highest epoch {counter}: take the highest epoch that \
             a sink has refused an owner with"
        );
        return Err(Malformed::new("floor", problem));
    }
    Ok(())
}

/// Reads the id of a node.
pub fn node(field: &'static str, node: u64) -> Result<NodeId, Malformed> {
    if node == 0 || node >> 63 != 0 {
        return Err(Malformed::new(field, format!("is {node}: give 1 to 2^63 - 1")));
    }
    Ok(NodeId(node))
}

/// Reads an address as `host:port`.
pub fn address(field: &'static str, address: &str) -> Result<String, Malformed> {
    if !is_address(address) {
        return Err(Malformed::new(field, format!("is {address:?}: write host:port")));
    }
    text(field, address, REASON_BYTES_MAX)
}

/// Checks the length of free text.
pub fn text(field: &'static str, text: &str, max: usize) -> Result<String, Malformed> {
    if text.len() > max {
        let problem = format!("has {} bytes, at most {max} are allowed: shorten it", text.len());
        return Err(Malformed::new(field, problem));
    }
    Ok(text.to_owned())
}

/// Refuses a partition, or one grant of it, that one request names twice.
struct Seen {
    field: &'static str,
    /// Those that came in order, as they do from the SDK: they need no set.
    ascending: Vec<(Partition, Option<Epoch>)>,
    /// The others, each below the last of `ascending` when it came.
    others: BTreeSet<(Partition, Option<Epoch>)>,
}

impl Seen {
    const fn new(field: &'static str) -> Self {
        Self { field, ascending: Vec::new(), others: BTreeSet::new() }
    }

    fn once(&mut self, partition: Partition) -> Result<Partition, Malformed> {
        self.insert(partition, None)
    }

    /// Two grants of one partition may stand in one request: a release of the earlier one can still be unanswered.
    fn once_at(&mut self, partition: Partition, epoch: Epoch) -> Result<Partition, Malformed> {
        self.insert(partition, Some(epoch))
    }

    fn insert(
        &mut self,
        partition: Partition,
        epoch: Option<Epoch>,
    ) -> Result<Partition, Malformed> {
        let key = (partition, epoch);
        let is_new = if self.ascending.last().is_none_or(|last| *last < key) {
            self.ascending.push(key);
            true
        } else {
            self.ascending.binary_search(&key).is_err() && self.others.insert(key)
        };
        if is_new {
            Ok(partition)
        } else {
            Err(Malformed::new(self.field, format!("names partition {partition} twice")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leave_may_name_two_grants_of_one_partition_and_neither_twice() {
        let released = |epoch| v1::Released {
            partition: Some(v1::Partition {
                topic_id: TopicId::from_bits(7).to_string(),
                index: 2,
            }),
            epoch,
            next_offset: None,
            reason: v1::ReleaseReason::Shutdown.into(),
            error: String::new(),
        };
        assert!(releases("leave.partitions", &[released(1), released(2)]).is_ok());
        let twice = releases("leave.partitions", &[released(1), released(1)]).unwrap_err();
        assert!(twice.to_string().contains("twice"), "{twice}");
    }
}
