//! The body of one raft entry.

use bytes::Bytes;
use prost::Message as _;
use tenure_core::Command;
use tenure_core::command::{
    AcknowledgeAcquired, AcknowledgePrepared, CommitOffsets, DrainMember, InstallTarget, JoinGroup,
    LeaveGroup, MovePartition, OffsetCommit, RebalanceGroup, ReleasePartitions, ReportTopics,
    RewindOffset, SilentMember,
};
use tenure_model::{
    CommitSequence, FeatureLevel, GroupEpoch, Index, MemberEpoch, Partition, StateDigest, Term,
    Timestamp, TopicId,
};
use tenure_proto::stored as form;
use tenure_proto::stored::command::Command as Form;

use super::pieces::{
    damaged, read_epoch, read_grant, read_group, read_member, read_name, read_offset,
    read_operator, read_partition, read_release, read_report, read_settings, read_target,
    read_topics, read_weight, write_grant, write_member, write_operator, write_partition,
    write_release, write_report, write_settings, write_target, write_topic_id, write_topics,
    write_weight,
};
use super::{FORMAT, StoredError};

/// What one raft entry says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Wall clock of the proposing raft leader.
    pub proposed_at: Timestamp,
    /// Each has a verdict of its own.
    pub commands: Vec<Command>,
}

/// Writes the body of an entry.
#[must_use]
pub fn encode_batch(proposed_at: Timestamp, commands: &[Command]) -> Bytes {
    let commands = commands.iter().map(|c| form::Command { command: Some(write(c)) }).collect();
    let batch = form::Batch { format: FORMAT, proposed_at_unix_ms: proposed_at.0, commands };
    batch.encode_to_vec().into()
}

/// Reads the body of an entry.
///
/// # Errors
///
/// [`StoredError`] for damage, a newer format or an unknown command; the node stops on any of them.
pub fn decode_batch(bytes: &Bytes) -> Result<Batch, StoredError> {
    let batch = form::Batch::decode(bytes.clone()).map_err(|error| damaged("raft entry", error))?;
    if batch.format != FORMAT {
        return Err(StoredError::Format { what: "raft entry", found: batch.format });
    }
    let commands =
        batch.commands.iter().enumerate().map(|(position, command)| match &command.command {
            Some(form) => read(form),
            None => Err(StoredError::UnknownCommand { position }),
        });
    Ok(Batch {
        proposed_at: Timestamp(batch.proposed_at_unix_ms),
        commands: commands.collect::<Result<_, _>>()?,
    })
}

fn write(command: &Command) -> Form {
    match command {
        Command::JoinGroup(c) => Form::JoinGroup(form::JoinGroup {
            group: c.group.to_string(),
            member: c.member.to_string(),
            instance: c.instance.as_ref().map(ToString::to_string),
            topics: write_topics(&c.topics),
            settings: Some(write_settings(&c.settings)),
            ttl_ms: c.ttl_ms,
            heartbeat_interval_ms: c.heartbeat_interval_ms,
            client: c.client.clone(),
            partitions_max: c.partitions_max,
            report: c.report.iter().map(write_report).collect(),
            rejoin: c.rejoin.map(|epoch| epoch.0),
            prepares: c.prepares,
            weight: write_weight(c.weight),
        }),
        Command::LeaveGroup(c) => Form::LeaveGroup(form::LeaveGroup {
            group: c.group.to_string(),
            member: c.member.to_string(),
            partitions: c.partitions.iter().map(write_release).collect(),
            reason: c.reason.clone(),
            returning_within_ms: c.returning_within_ms,
        }),
        Command::ReportTopics(c) => Form::ReportTopics(form::ReportTopics {
            group: c.group.to_string(),
            member: c.member.to_string(),
            topics: c.topics.iter().map(write_report).collect(),
        }),
        Command::ExpireMembers { term, members } => Form::ExpireMembers(form::ExpireMembers {
            term: term.0,
            members: members.iter().map(write_member).collect(),
        }),
        Command::MarkMembersSilent { term, members } => {
            let silent = |m: &SilentMember| form::SilentMember {
                member: Some(write_member(&m.member)),
                silent_for_ms: m.silent_for_ms,
            };
            Form::MarkMembersSilent(form::MarkMembersSilent {
                term: term.0,
                members: members.iter().map(silent).collect(),
            })
        }
        Command::MarkMembersHeard { term, members } => {
            Form::MarkMembersHeard(form::MarkMembersHeard {
                term: term.0,
                members: members.iter().map(write_member).collect(),
            })
        }
        Command::ReserveMembers { term, members, returning_within_ms } => {
            Form::ReserveMembers(form::ReserveMembers {
                term: term.0,
                members: members.iter().map(write_member).collect(),
                returning_within_ms: *returning_within_ms,
            })
        }
        Command::InstallTarget(c) => Form::InstallTarget(form::InstallTarget {
            group: c.group.to_string(),
            group_epoch: c.group_epoch.0,
            target: write_target(&c.target),
            line_by_line: c.line_by_line,
        }),
        Command::ReleasePartitions(c) => Form::ReleasePartitions(form::ReleasePartitions {
            group: c.group.to_string(),
            member: c.member.to_string(),
            partitions: c.partitions.iter().map(write_release).collect(),
        }),
        Command::AcknowledgeAcquired(c) => Form::AcknowledgeAcquired(form::AcknowledgeAcquired {
            group: c.group.to_string(),
            member: c.member.to_string(),
            partition: Some(write_partition(c.partition)),
            epoch: c.epoch.get(),
            home_initialised: c.home_initialised,
        }),
        Command::AcknowledgePrepared(c) => Form::AcknowledgePrepared(write_prepared(c)),
        Command::ExpirePreparations { term, preparations } => {
            Form::ExpirePreparations(form::ExpirePreparations {
                term: term.0,
                preparations: preparations.iter().map(write_prepared).collect(),
            })
        }
        Command::CommitOffsets(c) => Form::CommitOffsets(form::CommitOffsets {
            group: c.group.to_string(),
            member: c.member.to_string(),
            commits: write_commits(&c.commits),
        }),
        Command::RewindOffset(c) => Form::RewindOffset(form::RewindOffset {
            group: c.group.to_string(),
            member: c.member.to_string(),
            commit: Some(write_commit(&c.commit, write_partition(c.commit.partition))),
            request: c.request.to_string(),
        }),
        Command::ExpireRevocations { term, grants } => {
            Form::ExpireRevocations(form::ExpireGrants {
                term: term.0,
                grants: grants.iter().map(write_grant).collect(),
            })
        }
        Command::ExpireAcquisitions { term, grants } => {
            Form::ExpireAcquisitions(form::ExpireGrants {
                term: term.0,
                grants: grants.iter().map(write_grant).collect(),
            })
        }
        Command::TakeBackUnserved { term, grants } => Form::TakeBackUnserved(form::ExpireGrants {
            term: term.0,
            grants: grants.iter().map(write_grant).collect(),
        }),
        Command::LiftHolds { term, partitions } => {
            let line = |(group, partition): &(tenure_model::GroupId, tenure_model::Partition)| {
                form::GroupPartition {
                    group: group.to_string(),
                    partition: Some(write_partition(*partition)),
                }
            };
            Form::LiftHolds(form::LiftHolds {
                term: term.0,
                partitions: partitions.iter().map(line).collect(),
            })
        }
        Command::MovePartition(c) => Form::MovePartition(form::MovePartition {
            operator: write_operator(&c.operator),
            group: c.group.to_string(),
            partition: Some(write_partition(c.partition)),
            to: c.to.to_string(),
        }),
        Command::RebalanceGroup(c) => Form::RebalanceGroup(form::RebalanceGroup {
            operator: write_operator(&c.operator),
            group: c.group.to_string(),
            group_epoch: c.group_epoch.0,
            target: write_target(&c.target),
        }),
        Command::DrainMember(c) => Form::DrainMember(form::DrainMember {
            operator: write_operator(&c.operator),
            group: c.group.to_string(),
            member: c.member.to_string(),
            undrain: c.undrain,
        }),
        Command::RaiseEpochFloor { operator, floor } => {
            Form::RaiseEpochFloor(form::RaiseEpochFloor {
                operator: write_operator(operator),
                floor: floor.get(),
            })
        }
        Command::RaiseFeatureLevel { level } => {
            Form::RaiseFeatureLevel(form::RaiseFeatureLevel { level: level.0 })
        }
        Command::MarkDigest => Form::MarkDigest(form::MarkDigest {}),
        Command::CompareDigest { index, digest } => {
            Form::CompareDigest(form::CompareDigest { index: index.0, digest: digest.0 })
        }
    }
}

fn write_prepared(prepared: &AcknowledgePrepared) -> form::AcknowledgePrepared {
    form::AcknowledgePrepared {
        group: prepared.group.to_string(),
        member: prepared.member.to_string(),
        partition: Some(write_partition(prepared.partition)),
    }
}

fn read_prepared(form: &form::AcknowledgePrepared) -> Result<AcknowledgePrepared, StoredError> {
    Ok(AcknowledgePrepared {
        group: read_group(&form.group)?,
        member: read_name("member", &form.member)?,
        partition: read_partition(form.partition.as_ref())?,
    })
}

/// Lines of one topic share its id: this is the most frequent command.
fn write_commits(commits: &[OffsetCommit]) -> Vec<form::OffsetCommit> {
    let mut last: Option<(TopicId, Bytes)> = None;
    let line = |commit: &OffsetCommit| {
        let Partition { topic_id, index } = commit.partition;
        let known = last.take().filter(|(known, _)| *known == topic_id);
        let (_, written) = known.unwrap_or_else(|| (topic_id, write_topic_id(topic_id)));
        last = Some((topic_id, written.clone()));
        write_commit(commit, form::Partition { topic_id: written, index: index.get() })
    };
    commits.iter().map(line).collect()
}

fn write_commit(commit: &OffsetCommit, partition: form::Partition) -> form::OffsetCommit {
    form::OffsetCommit {
        partition: Some(partition),
        epoch: commit.epoch.get(),
        sequence: commit.sequence.0,
        next_offset: commit.next_offset.get(),
        metadata: commit.metadata.clone().into(),
    }
}

fn read_commit(form: &form::OffsetCommit) -> Result<OffsetCommit, StoredError> {
    Ok(OffsetCommit {
        partition: read_partition(form.partition.as_ref())?,
        epoch: read_epoch(form.epoch)?,
        sequence: CommitSequence(form.sequence),
        next_offset: read_offset(form.next_offset)?,
        metadata: form.metadata.to_vec(),
    })
}

fn read_all<F, T>(
    forms: &[F],
    read: impl Fn(&F) -> Result<T, StoredError>,
) -> Result<Vec<T>, StoredError> {
    forms.iter().map(read).collect()
}

fn read_silent(form: &form::SilentMember) -> Result<SilentMember, StoredError> {
    let member = form.member.as_ref().ok_or_else(|| damaged("silent member", "is missing"))?;
    Ok(SilentMember { member: read_member(member)?, silent_for_ms: form.silent_for_ms })
}

fn read(form: &Form) -> Result<Command, StoredError> {
    Ok(match form {
        Form::JoinGroup(f) => Command::JoinGroup(JoinGroup {
            group: read_group(&f.group)?,
            member: read_name("member", &f.member)?,
            instance: f
                .instance
                .as_deref()
                .map(|text| read_name("instance id", text))
                .transpose()?,
            topics: read_topics(&f.topics)?,
            settings: read_settings(f.settings.as_ref())?,
            ttl_ms: f.ttl_ms,
            heartbeat_interval_ms: f.heartbeat_interval_ms,
            client: f.client.clone(),
            partitions_max: f.partitions_max,
            report: read_all(&f.report, read_report)?,
            rejoin: f.rejoin.map(MemberEpoch),
            prepares: f.prepares,
            weight: read_weight(f.weight),
        }),
        Form::LeaveGroup(f) => Command::LeaveGroup(LeaveGroup {
            group: read_group(&f.group)?,
            member: read_name("member", &f.member)?,
            partitions: read_all(&f.partitions, read_release)?,
            reason: f.reason.clone(),
            returning_within_ms: f.returning_within_ms,
        }),
        Form::ReportTopics(f) => Command::ReportTopics(ReportTopics {
            group: read_group(&f.group)?,
            member: read_name("member", &f.member)?,
            topics: read_all(&f.topics, read_report)?,
        }),
        Form::ExpireMembers(f) => Command::ExpireMembers {
            term: Term(f.term),
            members: read_all(&f.members, read_member)?,
        },
        Form::MarkMembersSilent(f) => Command::MarkMembersSilent {
            term: Term(f.term),
            members: read_all(&f.members, read_silent)?,
        },
        Form::MarkMembersHeard(f) => Command::MarkMembersHeard {
            term: Term(f.term),
            members: read_all(&f.members, read_member)?,
        },
        Form::ReserveMembers(f) => Command::ReserveMembers {
            term: Term(f.term),
            members: read_all(&f.members, read_member)?,
            returning_within_ms: f.returning_within_ms,
        },
        Form::InstallTarget(f) => Command::InstallTarget(InstallTarget {
            group: read_group(&f.group)?,
            group_epoch: GroupEpoch(f.group_epoch),
            target: read_target(&f.target)?,
            line_by_line: f.line_by_line,
        }),
        Form::ReleasePartitions(f) => Command::ReleasePartitions(ReleasePartitions {
            group: read_group(&f.group)?,
            member: read_name("member", &f.member)?,
            partitions: read_all(&f.partitions, read_release)?,
        }),
        Form::AcknowledgeAcquired(f) => Command::AcknowledgeAcquired(AcknowledgeAcquired {
            group: read_group(&f.group)?,
            member: read_name("member", &f.member)?,
            partition: read_partition(f.partition.as_ref())?,
            epoch: read_epoch(f.epoch)?,
            home_initialised: f.home_initialised,
        }),
        Form::AcknowledgePrepared(f) => Command::AcknowledgePrepared(read_prepared(f)?),
        Form::ExpirePreparations(f) => Command::ExpirePreparations {
            term: Term(f.term),
            preparations: read_all(&f.preparations, read_prepared)?,
        },
        Form::CommitOffsets(f) => Command::CommitOffsets(CommitOffsets {
            group: read_group(&f.group)?,
            member: read_name("member", &f.member)?,
            commits: read_all(&f.commits, read_commit)?,
        }),
        Form::RewindOffset(f) => Command::RewindOffset(RewindOffset {
            group: read_group(&f.group)?,
            member: read_name("member", &f.member)?,
            commit: read_commit(
                f.commit.as_ref().ok_or_else(|| damaged("rewind", "has no offset"))?,
            )?,
            request: read_name("request id", &f.request)?,
        }),
        Form::ExpireRevocations(f) => Command::ExpireRevocations {
            term: Term(f.term),
            grants: read_all(&f.grants, read_grant)?,
        },
        Form::ExpireAcquisitions(f) => Command::ExpireAcquisitions {
            term: Term(f.term),
            grants: read_all(&f.grants, read_grant)?,
        },
        Form::TakeBackUnserved(f) => Command::TakeBackUnserved {
            term: Term(f.term),
            grants: read_all(&f.grants, read_grant)?,
        },
        Form::LiftHolds(f) => {
            let line = |line: &form::GroupPartition| {
                Ok((read_group(&line.group)?, read_partition(line.partition.as_ref())?))
            };
            Command::LiftHolds { term: Term(f.term), partitions: read_all(&f.partitions, line)? }
        }
        Form::MovePartition(f) => Command::MovePartition(MovePartition {
            operator: read_operator(f.operator.as_ref())?,
            group: read_group(&f.group)?,
            partition: read_partition(f.partition.as_ref())?,
            to: read_name("member", &f.to)?,
        }),
        Form::RebalanceGroup(f) => Command::RebalanceGroup(RebalanceGroup {
            operator: read_operator(f.operator.as_ref())?,
            group: read_group(&f.group)?,
            group_epoch: GroupEpoch(f.group_epoch),
            target: read_target(&f.target)?,
        }),
        Form::DrainMember(f) => Command::DrainMember(DrainMember {
            operator: read_operator(f.operator.as_ref())?,
            group: read_group(&f.group)?,
            member: read_name("member", &f.member)?,
            undrain: f.undrain,
        }),
        Form::RaiseEpochFloor(f) => Command::RaiseEpochFloor {
            operator: read_operator(f.operator.as_ref())?,
            floor: read_epoch(f.floor)?,
        },
        Form::RaiseFeatureLevel(f) => Command::RaiseFeatureLevel { level: FeatureLevel(f.level) },
        Form::MarkDigest(form::MarkDigest {}) => Command::MarkDigest,
        Form::CompareDigest(f) => {
            Command::CompareDigest { index: Index(f.index), digest: StateDigest(f.digest) }
        }
    })
}
