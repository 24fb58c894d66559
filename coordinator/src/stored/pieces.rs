//! Parts that commands and snapshots share.

use bytes::Bytes;
use tenure_core::command::{
    GrantRef, MemberRef, OperatorContext, Release, ReleaseReason, TopicReport,
};
use tenure_core::event::{FreeCause, OperatorAction};
use tenure_core::reply::PlannedMove;
use tenure_model::{
    Epoch, GroupId, GroupSettings, Home, MemberEpoch, MemberId, NextOffset, Partition,
    PartitionIndex, SinkSetting, Takeover, TopicId, TopicName,
};
use tenure_proto::stored as form;

use super::StoredError;

pub(super) fn damaged(what: &'static str, problem: impl std::fmt::Display) -> StoredError {
    StoredError::Damaged { what, problem: problem.to_string() }
}

pub(super) fn read_name<T>(what: &'static str, text: &str) -> Result<T, StoredError>
where
    T: std::str::FromStr,
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|error| damaged(what, error))
}

pub(super) fn read_epoch(value: u64) -> Result<Epoch, StoredError> {
    Epoch::new(value).map_err(|error| damaged("epoch", error))
}

pub(super) fn read_offset(value: u64) -> Result<NextOffset, StoredError> {
    NextOffset::new(value).map_err(|error| damaged("offset", error))
}

pub(super) fn write_topic_id(id: TopicId) -> Bytes {
    Bytes::copy_from_slice(&id.bits().to_be_bytes())
}

pub(super) fn read_topic_id(bytes: &[u8]) -> Result<TopicId, StoredError> {
    let bits = bytes.try_into().map_err(|_| damaged("topic id", "is not 16 bytes"))?;
    Ok(TopicId::from_bits(u128::from_be_bytes(bits)))
}

pub(super) fn write_partition(partition: Partition) -> form::Partition {
    form::Partition { topic_id: write_topic_id(partition.topic_id), index: partition.index.get() }
}

pub(super) fn read_partition(form: Option<&form::Partition>) -> Result<Partition, StoredError> {
    let form = form.ok_or_else(|| damaged("partition", "is missing"))?;
    let index = PartitionIndex::new(form.index)
        .ok_or_else(|| damaged("partition", "index out of range"))?;
    Ok(Partition { topic_id: read_topic_id(&form.topic_id)?, index })
}

/// Entries and snapshots from before there were weights read as 1, and a weight of 1 is written as they have it.
pub(super) const fn write_weight(weight: u32) -> u32 {
    if weight == 1 { 0 } else { weight }
}

pub(super) const fn read_weight(form: u32) -> u32 {
    if form == 0 { 1 } else { form }
}

pub(super) fn write_settings(settings: &GroupSettings) -> form::Settings {
    let home = match settings.home {
        Home::Coordinator => 1,
        Home::Sink => 2,
        Home::KafkaTransaction => 3,
    };
    let takeover = match settings.takeover {
        Takeover::Lease => 1,
        Takeover::Fence => 2,
    };
    let sink = |sink: &SinkSetting| form::Sink {
        name: sink.name.clone(),
        enforces_epoch: sink.enforces_epoch,
    };
    form::Settings { home, takeover, sinks: settings.sinks.iter().map(sink).collect() }
}

pub(super) fn read_settings(form: Option<&form::Settings>) -> Result<GroupSettings, StoredError> {
    let form = form.ok_or_else(|| damaged("settings", "are missing"))?;
    let home = match form.home {
        1 => Home::Coordinator,
        2 => Home::Sink,
        3 => Home::KafkaTransaction,
        other => return Err(damaged("settings", format!("home {other} is not known"))),
    };
    let takeover = match form.takeover {
        1 => Takeover::Lease,
        2 => Takeover::Fence,
        other => return Err(damaged("settings", format!("takeover {other} is not known"))),
    };
    let sink = |sink: &form::Sink| SinkSetting {
        name: sink.name.clone(),
        enforces_epoch: sink.enforces_epoch,
    };
    Ok(GroupSettings { home, takeover, sinks: form.sinks.iter().map(sink).collect() })
}

pub(super) fn write_report(report: &TopicReport) -> form::TopicReport {
    form::TopicReport {
        topic: report.topic.to_string(),
        topic_id: write_topic_id(report.topic_id),
        partition_count: report.partition_count,
    }
}

pub(super) fn read_report(form: &form::TopicReport) -> Result<TopicReport, StoredError> {
    Ok(TopicReport {
        topic: read_name("topic", &form.topic)?,
        topic_id: read_topic_id(&form.topic_id)?,
        partition_count: form.partition_count,
    })
}

const REASONS: [(u32, ReleaseReason); 6] = [
    (1, ReleaseReason::Revoked),
    (2, ReleaseReason::Shutdown),
    (3, ReleaseReason::LeaseLost),
    (4, ReleaseReason::Fenced),
    (5, ReleaseReason::AcquireFailed),
    (6, ReleaseReason::HandlerFailed),
];

const fn reason_number(reason: ReleaseReason) -> u32 {
    match reason {
        ReleaseReason::Revoked => 1,
        ReleaseReason::Shutdown => 2,
        ReleaseReason::LeaseLost => 3,
        ReleaseReason::Fenced => 4,
        ReleaseReason::AcquireFailed => 5,
        ReleaseReason::HandlerFailed => 6,
    }
}

fn read_reason(number: u32) -> Result<ReleaseReason, StoredError> {
    let found = REASONS.iter().find(|(known, _)| *known == number);
    found
        .map(|(_, reason)| *reason)
        .ok_or_else(|| damaged("release reason", format!("{number} is not known")))
}

/// Numbers above 10 are releases by the owner: 10 + reason.
pub(super) const fn write_cause(cause: Option<FreeCause>) -> u32 {
    match cause {
        None => 0,
        Some(FreeCause::Expired) => 1,
        Some(FreeCause::Left) => 2,
        Some(FreeCause::DrainDeadline) => 3,
        Some(FreeCause::AcquireDeadline) => 4,
        Some(FreeCause::Released(reason)) => 10 + reason_number(reason),
    }
}

pub(super) fn read_cause(number: u32) -> Result<Option<FreeCause>, StoredError> {
    Ok(match number {
        0 => None,
        1 => Some(FreeCause::Expired),
        2 => Some(FreeCause::Left),
        3 => Some(FreeCause::DrainDeadline),
        4 => Some(FreeCause::AcquireDeadline),
        other => Some(FreeCause::Released(read_reason(other.saturating_sub(10))?)),
    })
}

pub(super) const fn write_action(action: OperatorAction) -> u32 {
    match action {
        OperatorAction::Move => 1,
        OperatorAction::Rebalance => 2,
        OperatorAction::Drain => 3,
        OperatorAction::Undrain => 4,
        OperatorAction::RaiseEpochFloor => 5,
    }
}

pub(super) fn read_action(number: u32) -> Result<OperatorAction, StoredError> {
    Ok(match number {
        1 => OperatorAction::Move,
        2 => OperatorAction::Rebalance,
        3 => OperatorAction::Drain,
        4 => OperatorAction::Undrain,
        5 => OperatorAction::RaiseEpochFloor,
        other => return Err(damaged("operator action", format!("{other} is not known"))),
    })
}

pub(super) fn write_release(release: &Release) -> form::Release {
    form::Release {
        partition: Some(write_partition(release.partition)),
        epoch: release.epoch.get(),
        next_offset: release.next_offset.map(NextOffset::get),
        reason: reason_number(release.reason),
        error: release.error.clone(),
    }
}

pub(super) fn read_release(form: &form::Release) -> Result<Release, StoredError> {
    Ok(Release {
        partition: read_partition(form.partition.as_ref())?,
        epoch: read_epoch(form.epoch)?,
        next_offset: form.next_offset.map(read_offset).transpose()?,
        reason: read_reason(form.reason)?,
        error: form.error.clone(),
    })
}

pub(super) fn write_member(member: &MemberRef) -> form::MemberRef {
    form::MemberRef {
        group: member.group.to_string(),
        member: member.member.to_string(),
        member_epoch: member.member_epoch.0,
    }
}

pub(super) fn read_member(form: &form::MemberRef) -> Result<MemberRef, StoredError> {
    Ok(MemberRef {
        group: read_name("group", &form.group)?,
        member: read_name("member", &form.member)?,
        member_epoch: MemberEpoch(form.member_epoch),
    })
}

pub(super) fn write_target(target: &[(Partition, MemberId)]) -> Vec<form::TargetLine> {
    let line = |(partition, member): &(Partition, MemberId)| form::TargetLine {
        partition: Some(write_partition(*partition)),
        member: member.to_string(),
    };
    target.iter().map(line).collect()
}

pub(super) fn read_target(
    form: &[form::TargetLine],
) -> Result<Vec<(Partition, MemberId)>, StoredError> {
    form.iter()
        .map(|line| {
            Ok((read_partition(line.partition.as_ref())?, read_name("member", &line.member)?))
        })
        .collect()
}

pub(super) fn write_grant(grant: &GrantRef) -> form::GrantRef {
    form::GrantRef {
        group: grant.group.to_string(),
        partition: Some(write_partition(grant.partition)),
        epoch: grant.epoch.get(),
    }
}

pub(super) fn read_grant(form: &form::GrantRef) -> Result<GrantRef, StoredError> {
    Ok(GrantRef {
        group: read_name("group", &form.group)?,
        partition: read_partition(form.partition.as_ref())?,
        epoch: read_epoch(form.epoch)?,
    })
}

pub(super) fn write_operator(operator: &OperatorContext) -> Option<form::OperatorContext> {
    Some(form::OperatorContext {
        request: operator.request.to_string(),
        reason: operator.reason.clone(),
        actor: operator.actor.clone(),
    })
}

pub(super) fn read_operator(
    form: Option<&form::OperatorContext>,
) -> Result<OperatorContext, StoredError> {
    let form = form.ok_or_else(|| damaged("operator context", "is missing"))?;
    Ok(OperatorContext {
        request: read_name("request id", &form.request)?,
        reason: form.reason.clone(),
        actor: form.actor.clone(),
    })
}

pub(super) fn write_move(planned: &PlannedMove) -> form::PlannedMove {
    form::PlannedMove {
        partition: Some(write_partition(planned.partition)),
        from: planned.from.as_ref().map(ToString::to_string),
        to: planned.to.as_ref().map(ToString::to_string),
    }
}

pub(super) fn read_move(form: &form::PlannedMove) -> Result<PlannedMove, StoredError> {
    Ok(PlannedMove {
        partition: read_partition(form.partition.as_ref())?,
        from: form.from.as_deref().map(|text| read_name("member", text)).transpose()?,
        to: form.to.as_deref().map(|text| read_name("member", text)).transpose()?,
    })
}

pub(super) fn write_topics(topics: &[TopicName]) -> Vec<String> {
    topics.iter().map(ToString::to_string).collect()
}

pub(super) fn read_topics(form: &[String]) -> Result<Vec<TopicName>, StoredError> {
    form.iter().map(|text| read_name("topic", text)).collect()
}

pub(super) fn read_group(text: &str) -> Result<GroupId, StoredError> {
    read_name("group", text)
}
