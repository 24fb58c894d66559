//! Between wire shapes and what the session speaks in.

use std::sync::Arc;

use tenure_model::{Epoch, ErrorCode, Index, LabelName, NextOffset, Partition, TopicName, limits};
use tenure_proto::convert::{self, Malformed, partition_to_wire};
use tenure_proto::v1;

use super::client::{CommittedOffset, OffsetCommit, Refused, VerifyOk};
use super::event::{Phase, ReleaseReason};
use crate::source::TopicInfo;

/// A checked assignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Assignment {
    pub(super) version: Index,
    pub(super) partitions: Vec<Assigned>,
    pub(super) preparing: Vec<Preparing>,
}

/// One partition that is to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Preparing {
    pub(super) partition: Partition,
    pub(super) topic: TopicName,
    pub(super) home_initialised: bool,
    pub(super) next_offset: Option<NextOffset>,
    pub(super) remaining: std::time::Duration,
}

/// One partition of an assignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Assigned {
    pub(super) partition: Partition,
    pub(super) topic: TopicName,
    pub(super) epoch: Epoch,
    /// What remains of the drain; nothing while the partition is not revoked.
    pub(super) drain_remaining: Option<std::time::Duration>,
    pub(super) home_initialised: bool,
    pub(super) handoff: Index,
    pub(super) token: Option<Arc<str>>,
}

pub(super) fn assignment(wire: v1::Assignment) -> Result<Assignment, Malformed> {
    let found = wire.partitions.len();
    convert::at_most("assignment.partitions", found, limits::GROUP_PARTITIONS_MAX)?;
    let partitions = wire.partitions.into_iter().map(assigned).collect::<Result<_, _>>()?;
    let found = wire.preparing.len();
    convert::at_most("assignment.preparing", found, limits::GROUP_PARTITIONS_MAX)?;
    let preparing = wire.preparing.into_iter().map(preparing).collect::<Result<_, _>>()?;
    Ok(Assignment { version: Index(wire.version), partitions, preparing })
}

fn preparing(wire: v1::Preparing) -> Result<Preparing, Malformed> {
    Ok(Preparing {
        partition: convert::partition("preparing.partition", wire.partition.as_ref())?,
        topic: convert::name("preparing.topic", &wire.topic)?,
        home_initialised: wire.home_initialised,
        next_offset: optional_offset("preparing.next_offset", wire.next_offset)?,
        remaining: std::time::Duration::from_millis(wire.remaining_ms),
    })
}

fn assigned(wire: v1::Assigned) -> Result<Assigned, Malformed> {
    Ok(Assigned {
        partition: convert::partition("assigned.partition", wire.partition.as_ref())?,
        topic: convert::name("assigned.topic", &wire.topic)?,
        epoch: convert::epoch("assigned.epoch", wire.epoch)?,
        drain_remaining: wire
            .revoking
            .then(|| std::time::Duration::from_millis(wire.drain_remaining_ms)),
        home_initialised: wire.home_initialised,
        handoff: Index(wire.handoff),
        token: Some(wire.token).filter(|token| !token.is_empty()).map(Into::into),
    })
}

pub(super) fn label((name, value): (&LabelName, &String)) -> v1::Label {
    v1::Label { name: name.to_string(), value: value.clone() }
}

/// A refusal; a code that this version does not know is `INTERNAL`: what happened is not known.
pub(super) fn refused(wire: &v1::Error) -> Refused {
    Refused {
        code: ErrorCode::parse(&wire.code).unwrap_or(ErrorCode::Internal),
        message: wire.message.clone(),
        current_epoch: Epoch::new(wire.current_epoch).ok(),
    }
}

pub(super) fn offset_commit(commit: &OffsetCommit) -> v1::OffsetCommit {
    v1::OffsetCommit {
        partition: Some(partition_to_wire(commit.partition)),
        epoch: commit.epoch.get(),
        sequence: commit.sequence.0,
        next_offset: commit.next_offset.get(),
        metadata: commit.metadata.clone(),
    }
}

pub(super) fn grant(partition: Partition, epoch: Epoch) -> v1::GrantRef {
    v1::GrantRef { partition: Some(partition_to_wire(partition)), epoch: epoch.get() }
}

pub(super) fn verify_verdict(
    wire: v1::VerifyVerdict,
) -> Result<Result<VerifyOk, Refused>, Malformed> {
    if let Some(error) = wire.error {
        return Ok(Err(refused(&error)));
    }
    let next_offset = optional_offset("verdict.next_offset", wire.next_offset)?;
    Ok(Ok(VerifyOk {
        next_offset,
        home_initialised: wire.home_initialised,
        starts_at_earliest: wire.starts_at_earliest,
    }))
}

pub(super) fn committed_offset(wire: v1::CommittedOffset) -> Result<CommittedOffset, Malformed> {
    Ok(CommittedOffset {
        partition: convert::partition("offset.partition", wire.partition.as_ref())?,
        topic: convert::name("offset.topic", &wire.topic)?,
        next_offset: optional_offset("offset.next_offset", wire.next_offset)?,
        epoch: Epoch::new(wire.epoch).ok(),
        metadata: wire.metadata,
    })
}

fn optional_offset(
    field: &'static str,
    wire: Option<u64>,
) -> Result<Option<NextOffset>, Malformed> {
    wire.map(|value| convert::next_offset(field, value)).transpose()
}

pub(super) fn topic_report(topic: &TopicInfo) -> v1::TopicReport {
    v1::TopicReport {
        topic: topic.topic.to_string(),
        topic_id: topic.topic_id.to_string(),
        partition_count: topic.partition_count,
    }
}

pub(super) fn phase(phase: Phase) -> i32 {
    let wire = match phase {
        Phase::Registering => v1::Phase::Registering,
        Phase::Verifying => v1::Phase::Verifying,
        Phase::Resuming => v1::Phase::Resuming,
        Phase::Running => v1::Phase::Running,
        Phase::Draining => v1::Phase::Draining,
    };
    wire.into()
}

pub(super) fn release_reason(reason: ReleaseReason) -> i32 {
    let wire = match reason {
        ReleaseReason::Revoked => v1::ReleaseReason::Revoked,
        ReleaseReason::Shutdown => v1::ReleaseReason::Shutdown,
        ReleaseReason::LeaseLost => v1::ReleaseReason::LeaseLost,
        ReleaseReason::Fenced => v1::ReleaseReason::Fenced,
        ReleaseReason::AcquireFailed => v1::ReleaseReason::AcquireFailed,
        ReleaseReason::HandlerFailed => v1::ReleaseReason::HandlerFailed,
    };
    wire.into()
}

/// Cuts an error text to what the coordinator takes, at a character's edge.
pub(super) fn error_text(mut text: String) -> String {
    if text.len() > limits::ERROR_TEXT_BYTES_MAX {
        let mut end = limits::ERROR_TEXT_BYTES_MAX;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
    }
    text
}
