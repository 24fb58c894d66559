//! What a snapshot holds of the past.

use tenure_core::event::FreeCause;
use tenure_core::history::{Change, Moment, PastGrant, PastGrants, What};
use tenure_model::{Index, MemberId, Partition, Timestamp};
use tenure_proto::stored as form;

use super::StoredError;
use super::pieces::{
    damaged, read_action, read_cause, read_epoch, read_group, read_name, read_partition,
    write_action, write_cause, write_partition,
};

const fn read_moment(index: u64, time_unix_ms: u64) -> Moment {
    Moment { revision: Index(index), time: Timestamp(time_unix_ms) }
}

fn read_end_cause(number: u32) -> Result<FreeCause, StoredError> {
    read_cause(number)?.ok_or_else(|| damaged("end of a grant", "has no cause"))
}

pub(super) fn write_past(past: Option<&PastGrants>) -> Vec<form::PastGrant> {
    let grants = past.into_iter().flat_map(|past| &past.grants).map(|grant| form::PastGrant {
        epoch: grant.epoch.get(),
        member: grant.member.to_string(),
        granted_at: grant.granted.revision.0,
        granted_unix_ms: grant.granted.time.0,
        ended_at: grant.ended.revision.0,
        ended_unix_ms: grant.ended.time.0,
        cause: write_cause(Some(grant.cause)),
    });
    grants.collect()
}

/// When the last grant was made. A snapshot from before there was a history says it only of grants that go on, and
/// only as the time of their last change.
pub(super) const fn read_granted(form: &form::PartitionState) -> Moment {
    if form.granted_at == 0 && form.ownership != 0 {
        return read_moment(form.changed_at, form.changed_unix_ms);
    }
    read_moment(form.granted_at, form.granted_unix_ms)
}

pub(super) fn read_past(
    form: &form::PartitionState,
) -> Result<Option<Box<PastGrants>>, StoredError> {
    let forgotten = if form.granted_at == 0 && form.epoch != 0 {
        read_moment(form.changed_at, form.changed_unix_ms)
    } else {
        read_moment(form.forgotten_at, form.forgotten_unix_ms)
    };
    if form.past.is_empty() && forgotten == Moment::default() {
        return Ok(None);
    }
    let grants = form.past.iter().map(|form| {
        Ok(PastGrant {
            epoch: read_epoch(form.epoch)?,
            member: read_name("member", &form.member)?,
            granted: read_moment(form.granted_at, form.granted_unix_ms),
            ended: read_moment(form.ended_at, form.ended_unix_ms),
            cause: read_end_cause(form.cause)?,
        })
    });
    Ok(Some(Box::new(PastGrants { grants: grants.collect::<Result<_, _>>()?, forgotten })))
}

pub(super) fn write_change(change: &Change) -> form::Change {
    let mut form = form::Change {
        index: change.at.revision.0,
        time_unix_ms: change.at.time.0,
        position: change.position,
        group: change.group.as_ref().map(ToString::to_string),
        ..form::Change::default()
    };
    let (kind, member) = match &change.what {
        What::Granted { partition, member, epoch } => {
            write_grant(&mut form, *partition, epoch.get());
            (1, Some(member))
        }
        What::Acquired { partition, member, epoch } => {
            write_grant(&mut form, *partition, epoch.get());
            (2, Some(member))
        }
        What::Revoked { partition, member, epoch } => {
            write_grant(&mut form, *partition, epoch.get());
            (3, Some(member))
        }
        What::Released { partition, member, epoch, cause } => {
            write_grant(&mut form, *partition, epoch.get());
            form.cause = write_cause(Some(*cause));
            (4, Some(member))
        }
        What::MemberJoined { member } => (5, Some(member)),
        What::MemberLeft { member } => (6, Some(member)),
        What::MemberExpired { member } => (7, Some(member)),
        What::MemberDrained { member, draining: true } => (8, Some(member)),
        What::MemberDrained { member, draining: false } => (9, Some(member)),
        What::Operated { request, action } => {
            form.request = request.to_string();
            form.action = write_action(*action);
            (10, None)
        }
    };
    form.kind = kind;
    form.member = member.map_or_else(String::new, ToString::to_string);
    form
}

fn write_grant(form: &mut form::Change, partition: Partition, epoch: u64) {
    form.partition = Some(write_partition(partition));
    form.epoch = epoch;
}

pub(super) fn read_change(form: &form::Change) -> Result<Change, StoredError> {
    let partition = || read_partition(form.partition.as_ref());
    let member = || read_name::<MemberId>("member", &form.member);
    let epoch = || read_epoch(form.epoch);
    let what = match form.kind {
        1 => What::Granted { partition: partition()?, member: member()?, epoch: epoch()? },
        2 => What::Acquired { partition: partition()?, member: member()?, epoch: epoch()? },
        3 => What::Revoked { partition: partition()?, member: member()?, epoch: epoch()? },
        4 => What::Released {
            partition: partition()?,
            member: member()?,
            epoch: epoch()?,
            cause: read_end_cause(form.cause)?,
        },
        5 => What::MemberJoined { member: member()? },
        6 => What::MemberLeft { member: member()? },
        7 => What::MemberExpired { member: member()? },
        8 => What::MemberDrained { member: member()?, draining: true },
        9 => What::MemberDrained { member: member()?, draining: false },
        10 => What::Operated {
            request: read_name("request id", &form.request)?,
            action: read_action(form.action)?,
        },
        other => return Err(damaged("change", format!("kind {other} is not known"))),
    };
    Ok(Change {
        at: read_moment(form.index, form.time_unix_ms),
        position: form.position,
        group: form.group.as_deref().map(read_group).transpose()?,
        what,
    })
}
