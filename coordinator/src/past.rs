//! What observers are told of the past. Pure: from the state to the answers.

use tenure_core::State;
use tenure_core::command::ReleaseReason;
use tenure_core::event::{FreeCause, OperatorAction};
use tenure_core::history::{Change, Forgotten, Grant, Past, What};
use tenure_core::state::PartitionState;
use tenure_model::limits::WATCH_MESSAGE_CHANGES_MAX;
use tenure_model::{Epoch, GroupId, Index, MemberId, Partition, RequestId};
use tenure_proto::convert::partition_to_wire;
use tenure_proto::v1;

/// Changes that are looked at for one page, wanted or not. Entries wait meanwhile.
const PAGE_LOOKS_MAX: usize = 5_000;

/// Where a watcher stands: the first change that it was not told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cursor {
    pub(crate) revision: Index,
    pub(crate) position: u32,
}

/// The next few changes of one watcher.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Page {
    pub(crate) revisions: Vec<v1::RevisionChanges>,
    pub(crate) next: Cursor,
    /// What the node had applied.
    pub(crate) applied: Index,
    /// Whether this was all up to `applied`.
    pub(crate) is_last: bool,
}

/// What a watcher of `group`, or of all, is told next.
///
/// # Errors
///
/// [`Forgotten`] when some of it may be missing.
pub(crate) fn page(
    state: &State,
    cursor: Cursor,
    group: Option<&GroupId>,
) -> Result<Page, Forgotten> {
    let mut page = Page {
        revisions: Vec::new(),
        next: Cursor { revision: cursor.revision.max(Index(state.applied.0 + 1)), position: 0 },
        applied: state.applied,
        is_last: true,
    };
    if cursor.revision == page.next.revision {
        page.next.position = cursor.position;
    }
    let was_told = |change: &&Change| {
        change.at.revision == cursor.revision && change.position < cursor.position
    };
    let mut told = 0;
    for (looked, change) in state.changes.since(cursor.revision)?.skip_while(was_told).enumerate() {
        let is_wanted = match (group, &change.group) {
            (Some(wanted), Some(found)) => wanted == found,
            (None, _) | (_, None) => true,
        };
        // A page ends within a revision only before a change that is wanted: what follows is told.
        let is_full = (looked >= PAGE_LOOKS_MAX && change.position == 0)
            || (told >= WATCH_MESSAGE_CHANGES_MAX && is_wanted);
        if is_full {
            page.next = Cursor { revision: change.at.revision, position: change.position };
            page.is_last = false;
        }
        let of_revision =
            page.revisions.last_mut().filter(|last| last.revision == change.at.revision.0);
        match of_revision {
            Some(last) if is_full => last.last_of_revision = false,
            Some(last) if is_wanted => last.changes.push(change_to_wire(state, change)),
            None if is_wanted && !is_full => page.revisions.push(v1::RevisionChanges {
                revision: change.at.revision.0,
                time_unix_ms: change.at.time.0,
                changes: vec![change_to_wire(state, change)],
                last_of_revision: true,
            }),
            Some(_) | None => {}
        }
        if is_full {
            break;
        }
        told += usize::from(is_wanted);
    }
    Ok(page)
}

fn change_to_wire(state: &State, change: &Change) -> v1::Change {
    let mut wire = v1::Change {
        position: change.position,
        group: change.group.as_ref().map_or_else(String::new, ToString::to_string),
        ..v1::Change::default()
    };
    let mut set = |kind: v1::ChangeKind, member: Option<&MemberId>| {
        wire.kind = kind.into();
        wire.member = member.map_or_else(String::new, ToString::to_string);
    };
    match &change.what {
        What::Granted { partition, member, epoch } => {
            set(v1::ChangeKind::Granted, Some(member));
            name_grant(&mut wire, state, change.group.as_ref(), *partition, *epoch);
        }
        What::Acquired { partition, member, epoch } => {
            set(v1::ChangeKind::Acquired, Some(member));
            name_grant(&mut wire, state, change.group.as_ref(), *partition, *epoch);
        }
        What::Revoked { partition, member, epoch } => {
            set(v1::ChangeKind::Revoked, Some(member));
            name_grant(&mut wire, state, change.group.as_ref(), *partition, *epoch);
        }
        What::Released { partition, member, epoch, cause } => {
            set(v1::ChangeKind::Released, Some(member));
            name_grant(&mut wire, state, change.group.as_ref(), *partition, *epoch);
            wire.cause = cause_to_wire(*cause).into();
        }
        What::MemberJoined { member } => set(v1::ChangeKind::MemberJoined, Some(member)),
        What::MemberLeft { member } => set(v1::ChangeKind::MemberLeft, Some(member)),
        What::MemberExpired { member } => set(v1::ChangeKind::MemberExpired, Some(member)),
        What::MemberDrained { member, draining: true } => {
            set(v1::ChangeKind::MemberDrained, Some(member));
        }
        What::MemberDrained { member, draining: false } => {
            set(v1::ChangeKind::MemberUndrained, Some(member));
        }
        What::Operated { request, action } => {
            set(v1::ChangeKind::Operated, None);
            wire.operated = Some(operated(state, change.at.revision, request, *action));
        }
    }
    wire
}

fn name_grant(
    wire: &mut v1::Change,
    state: &State,
    group: Option<&GroupId>,
    partition: Partition,
    epoch: Epoch,
) {
    wire.partition = Some(partition_to_wire(partition));
    wire.topic = group.map_or_else(String::new, |group| topic_of(state, group, partition));
    wire.epoch = epoch.get();
}

fn topic_of(state: &State, group: &GroupId, partition: Partition) -> String {
    let topic = state.groups.get(group).and_then(|group| group.topics.get(&partition.topic_id));
    topic.map_or_else(String::new, |topic| topic.name.to_string())
}

fn operated(
    state: &State,
    revision: Index,
    request: &RequestId,
    action: OperatorAction,
) -> v1::Operated {
    let start = state.operations.partition_point(|operation| operation.index < revision);
    let found = state.operations.range(start..).find(|operation| operation.request == *request);
    v1::Operated {
        request_id: request.to_string(),
        action: match action {
            OperatorAction::Move => "move",
            OperatorAction::Rebalance => "rebalance",
            OperatorAction::Drain => "drain",
            OperatorAction::Undrain => "undrain",
            OperatorAction::RaiseEpochFloor => "raise-epoch-floor",
        }
        .to_owned(),
        actor: found.map_or_else(String::new, |operation| operation.actor.clone()),
        reason: found.map_or_else(String::new, |operation| operation.reason.clone()),
    }
}

const fn cause_to_wire(cause: FreeCause) -> v1::EndCause {
    match cause {
        FreeCause::Released(ReleaseReason::Revoked) => v1::EndCause::Revoked,
        FreeCause::Released(ReleaseReason::Shutdown) => v1::EndCause::Shutdown,
        FreeCause::Released(ReleaseReason::LeaseLost) => v1::EndCause::LeaseLost,
        FreeCause::Released(ReleaseReason::Fenced) => v1::EndCause::Fenced,
        FreeCause::Released(ReleaseReason::AcquireFailed) => v1::EndCause::AcquireFailed,
        FreeCause::Released(ReleaseReason::HandlerFailed) => v1::EndCause::HandlerFailed,
        FreeCause::Expired => v1::EndCause::Expired,
        FreeCause::Left => v1::EndCause::Left,
        FreeCause::DrainDeadline => v1::EndCause::DrainDeadline,
        FreeCause::AcquireDeadline => v1::EndCause::AcquireDeadline,
    }
}

/// The grants of one partition, or the one that covers a point in the past.
///
/// # Errors
///
/// [`Forgotten`] when that point is before what is remembered.
pub(crate) fn history(
    state: &State,
    group: &GroupId,
    partition: Partition,
    found: &PartitionState,
    past: Option<Past>,
) -> Result<v1::HistoryResponse, Forgotten> {
    let grants: Vec<Grant> = match past {
        None => found.grants().collect(),
        Some(past) => found.grant_at(past)?.into_iter().collect(),
    };
    let known_from = found.forgotten();
    Ok(v1::HistoryResponse {
        grants: grants.into_iter().map(grant_to_wire).collect(),
        topic: topic_of(state, group, partition),
        known_from_revision: known_from.revision.0,
        known_from_unix_ms: known_from.time.0,
        revision: state.applied.0,
    })
}

fn grant_to_wire(grant: Grant) -> v1::GrantRecord {
    v1::GrantRecord {
        member: grant.member.to_string(),
        epoch: grant.epoch.get(),
        granted_revision: grant.granted.revision.0,
        granted_unix_ms: grant.granted.time.0,
        end: grant.end.map(|(ended, cause)| v1::GrantEnd {
            revision: ended.revision.0,
            time_unix_ms: ended.time.0,
            cause: cause_to_wire(cause).into(),
        }),
    }
}

#[cfg(test)]
mod tests;
