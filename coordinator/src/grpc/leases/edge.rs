//! The edge: what is malformed is refused here, by the name of the field.

use tenure_core::command::{JoinGroup, TopicReport};
use tenure_model::limits::REASON_BYTES_MAX;
use tenure_model::{
    Epoch, GroupId, GroupSettings, LeaseSettings, MemberEpoch, MemberId, Partition, PartitionIndex,
    TopicId, TopicName,
};
use tenure_proto::convert::{Malformed, epoch, name};
use tenure_proto::v1;

use super::super::edge::text;
use crate::settings::LeaseLengths;

/// A resource and who asks for it.
pub(super) struct Named {
    pub(super) group: GroupId,
    pub(super) resource: TopicName,
    pub(super) holder: MemberId,
    pub(super) partition: Partition,
}

impl Named {
    fn read(group: &str, resource: &str, holder: &str) -> Result<Self, Malformed> {
        let resource: TopicName = name("resource", resource)?;
        let topic_id = TopicId::of_name(&resource);
        let index = PartitionIndex::new(0).expect("0 is below every limit");
        Ok(Self {
            group: name("group", group)?,
            holder: name("holder", holder)?,
            partition: Partition { topic_id, index },
            resource,
        })
    }
}

/// Reads an acquire, as a join of a member that wants one topic of one partition.
pub(super) fn acquire(
    wire: &v1::AcquireRequest,
    defaults: LeaseLengths,
) -> Result<(Named, JoinGroup), Malformed> {
    let named = Named::read(&wire.group, &wire.resource, &wire.holder)?;
    let client = text("client", &wire.client, REASON_BYTES_MAX)?;
    let defaults = LeaseSettings::from(defaults);
    let lengths = match wire.ttl_ms {
        0 => defaults,
        ttl_ms => LeaseSettings {
            clock_drift_max_ms: defaults.clock_drift_max_ms,
            heartbeat_interval_ms: (ttl_ms / 10 * 3).max(1),
            ttl_ms,
        },
    };
    let lengths = lengths.validate().map_err(|error| Malformed::new("ttl_ms", error))?;
    let join = JoinGroup {
        group: named.group.clone(),
        member: named.holder.clone(),
        instance: None,
        topics: vec![named.resource.clone()],
        settings: GroupSettings::default(),
        ttl_ms: lengths.ttl_ms,
        heartbeat_interval_ms: lengths.heartbeat_interval_ms,
        client,
        partitions_max: None,
        report: vec![TopicReport {
            topic: named.resource.clone(),
            topic_id: named.partition.topic_id,
            partition_count: 1,
        }],
        rejoin: None,
        prepares: false,
        weight: 1,
    };
    Ok((named, join))
}

/// Reads a renewal.
pub(super) fn renew(wire: &v1::RenewRequest) -> Result<(Named, MemberEpoch, Epoch), Malformed> {
    let named = Named::read(&wire.group, &wire.resource, &wire.holder)?;
    if wire.member_epoch == 0 {
        return Err(Malformed::new("member_epoch", "is 0: give the one of the lease"));
    }
    Ok((named, MemberEpoch(wire.member_epoch), epoch("epoch", wire.epoch)?))
}

/// Reads a verification.
pub(super) fn verify(wire: &v1::VerifyLeaseRequest) -> Result<(Named, Epoch), Malformed> {
    let named = Named::read(&wire.group, &wire.resource, &wire.holder)?;
    Ok((named, epoch("epoch", wire.epoch)?))
}

/// Reads a release; without an epoch only the place in the queue is given back.
pub(super) fn release(wire: &v1::ReleaseLeaseRequest) -> Result<(Named, Option<Epoch>), Malformed> {
    let named = Named::read(&wire.group, &wire.resource, &wire.holder)?;
    let given = (wire.epoch != 0).then(|| epoch("epoch", wire.epoch)).transpose()?;
    Ok((named, given))
}
