//! Release, acquire, deadlines and holds.

use std::collections::BTreeSet;

use tenure_model::limits::{ERROR_TEXT_BYTES_MAX, REQUEST_PARTITIONS_MAX};
use tenure_model::{Epoch, GroupId, Home, MemberId, Partition, Takeover};

use super::{Decided, Draft, Verdict, check_limit};
use crate::command::{
    AcknowledgeAcquired, GrantRef, OffsetCommit, Release, ReleasePartitions, ReleaseReason,
};
use crate::event::FreeCause;
use crate::state::{Group, Ownership, PartitionState};
use crate::{Event, Rejection, Reply, State};

impl State {
    /// Whether `member` holds `partition` now, revoking or not, at exactly `epoch`. This is the *verify* of an acquire.
    ///
    /// The epoch is compared, not only the owner: with A → B → A the first sleeper would pass. Group epoch and member
    /// epoch are deliberately not compared; that check fences honest members.
    ///
    /// # Errors
    ///
    /// [`Rejection::Fenced`] when a newer epoch exists, [`Rejection::NotOwned`] when it does not hold that grant,
    /// [`Rejection::UnknownGroup`] and [`Rejection::UnknownPartition`].
    pub fn check_owner(
        &self,
        group: &GroupId,
        member: &MemberId,
        partition: Partition,
        epoch: Epoch,
    ) -> Result<&PartitionState, Rejection> {
        check_owner(group, self.group(group)?, member, partition, epoch)
    }

    pub(super) fn release_partitions(&self, command: &ReleasePartitions) -> Decided {
        let mut draft = Draft::default();
        let (verdicts, _) =
            self.release(&command.group, &command.member, &command.partitions, &mut draft)?;
        let stops =
            command.partitions.iter().zip(&verdicts).any(|(release, verdict)| {
                verdict.is_ok() && release.reason == ReleaseReason::Shutdown
            });
        if stops && self.member(&command.group, &command.member).is_ok_and(|(_, m)| !m.draining) {
            draft.push(Event::MemberDrained {
                group: command.group.clone(),
                member: command.member.clone(),
                draining: true,
            });
            draft.replan(&command.group);
        }
        Ok((Reply::Verdicts(verdicts), draft.finish(self)))
    }

    /// Releases what `member` lists and holds; also says which partitions those were.
    pub(super) fn release(
        &self,
        id: &GroupId,
        member: &MemberId,
        releases: &[Release],
        draft: &mut Draft,
    ) -> Result<(Vec<Verdict>, BTreeSet<Partition>), Rejection> {
        let group = self.group(id)?;
        check_limit("partitions in one request", releases.len(), REQUEST_PARTITIONS_MAX)?;
        let mut released = BTreeSet::new();
        let verdicts = releases
            .iter()
            .map(|release| {
                let Release { partition, epoch, .. } = *release;
                let state = check_owner(id, group, member, partition, epoch)?;
                check_limit("bytes in the error", release.error.len(), ERROR_TEXT_BYTES_MAX)?;
                if !released.insert(partition) {
                    return Err(Rejection::NotOwned { partition, member: member.clone() });
                }
                if let Some(commit) = final_offset(group, state, release) {
                    draft.push(Event::OffsetCommitted {
                        group: id.clone(),
                        member: member.clone(),
                        commit,
                        rewind: None,
                    });
                }
                let grant = GrantRef { group: id.clone(), partition, epoch };
                let cause = FreeCause::Released(release.reason);
                let error =
                    is_trouble(release.reason, &state.ownership).then(|| release.error.clone());
                free(&grant, member, cause, error, draft);
                Ok(())
            })
            .collect();
        Ok((verdicts, released))
    }

    pub(super) fn acknowledge_acquired(&self, command: &AcknowledgeAcquired) -> Decided {
        let AcknowledgeAcquired { group, member, partition, epoch, home_initialised } = command;
        let state = self.check_owner(group, member, *partition, *epoch)?;
        let acquires = match &state.ownership {
            Ownership::Held { acquired, .. } => !acquired,
            Ownership::Revoking { .. } | Ownership::Free => false,
        };
        let mut draft = Draft::default();
        if acquires || (*home_initialised && !state.home_initialised) {
            draft.push(Event::PartitionAcquired {
                group: group.clone(),
                partition: *partition,
                member: member.clone(),
                epoch: *epoch,
                home_initialised: *home_initialised,
            });
        }
        Ok((Reply::Done, draft.finish(self)))
    }

    pub(super) fn expire_revocations(&self, grants: &[GrantRef]) -> (Reply, Vec<Event>) {
        self.take_back(grants, FreeCause::DrainDeadline, |ownership| match ownership {
            Ownership::Revoking { member } => Some((member.clone(), None)),
            Ownership::Held { .. } | Ownership::Free => None,
        })
    }

    pub(super) fn expire_acquisitions(&self, grants: &[GrantRef]) -> (Reply, Vec<Event>) {
        self.take_back(grants, FreeCause::AcquireDeadline, |ownership| match ownership {
            Ownership::Held { member, acquired: false } => {
                Some((member.clone(), Some("not acquired before the deadline".to_owned())))
            }
            Ownership::Held { acquired: true, .. }
            | Ownership::Revoking { .. }
            | Ownership::Free => None,
        })
    }

    /// Takes back the grants that `due` still finds due, with the owner and, where it counts as trouble, the error.
    fn take_back(
        &self,
        grants: &[GrantRef],
        cause: FreeCause,
        due: impl Fn(&Ownership) -> Option<(MemberId, Option<String>)>,
    ) -> (Reply, Vec<Event>) {
        let mut draft = Draft::default();
        let mut taken = BTreeSet::new();
        let verdicts = grants
            .iter()
            .map(|grant| {
                let state = self.partition(&grant.group, grant.partition)?;
                let nothing = || Rejection::NothingToDo {
                    what: format!(
                        "partition {} at {} does not wait for this deadline",
                        grant.partition, grant.epoch
                    ),
                };
                if state.epoch != Some(grant.epoch) {
                    return Err(nothing());
                }
                let (member, error) = due(&state.ownership).ok_or_else(nothing)?;
                if !taken.insert(grant) {
                    return Err(nothing());
                }
                let takeover = self.group(&grant.group)?.settings.takeover;
                match error {
                    // Its lease may well be live: it is asked to stop, and the drain outlasts the lease.
                    Some(error) if takeover == Takeover::Lease => {
                        ask_back(grant, member, error, &mut draft);
                    }
                    error => free(grant, &member, cause, error, &mut draft),
                }
                Ok(())
            })
            .collect();
        (Reply::Verdicts(verdicts), draft.finish(self))
    }

    /// Asks the owners, whatever the takeover: they are heard, so they answer.
    pub(super) fn take_back_unserved(&self, grants: &[GrantRef]) -> (Reply, Vec<Event>) {
        let mut draft = Draft::default();
        let mut taken = BTreeSet::new();
        let verdicts = grants
            .iter()
            .map(|grant| {
                let state = self.partition(&grant.group, grant.partition)?;
                let owner = match &state.ownership {
                    Ownership::Held { member, acquired: true } => Some(member),
                    Ownership::Held { acquired: false, .. }
                    | Ownership::Revoking { .. }
                    | Ownership::Free => None,
                };
                match owner.filter(|_| state.epoch == Some(grant.epoch)) {
                    Some(member) if taken.insert(grant) => {
                        let error = "held, but not served by its owner".to_owned();
                        ask_back(grant, member.clone(), error, &mut draft);
                        Ok(())
                    }
                    Some(_) | None => Err(Rejection::NothingToDo {
                        what: format!(
                            "partition {} does not run under {}",
                            grant.partition, grant.epoch
                        ),
                    }),
                }
            })
            .collect();
        (Reply::Verdicts(verdicts), draft.finish(self))
    }

    pub(super) fn lift_holds(&self, partitions: &[(GroupId, Partition)]) -> (Reply, Vec<Event>) {
        let mut draft = Draft::default();
        let mut lifted = BTreeSet::new();
        let verdicts = partitions
            .iter()
            .map(|(id, partition)| {
                let group = self.group(id)?;
                let state = self.partition(id, *partition)?;
                if !state.is_held_back() || !lifted.insert((id, *partition)) {
                    return Err(Rejection::NothingToDo {
                        what: format!("partition {partition} is not held back"),
                    });
                }
                draft.push(Event::HoldLifted { group: id.clone(), partition: *partition });
                if group.trouble_is_everywhere(*partition) {
                    draft.replan(id);
                }
                Ok(())
            })
            .collect();
        (Reply::Verdicts(verdicts), draft.finish(self))
    }

    /// One partition of one group.
    ///
    /// # Errors
    ///
    /// [`Rejection::UnknownGroup`] and [`Rejection::UnknownPartition`].
    pub fn partition(
        &self,
        id: &GroupId,
        partition: Partition,
    ) -> Result<&PartitionState, Rejection> {
        find_partition(id, self.group(id)?, partition)
    }
}

impl Group {
    /// Whether every live member that could own `partition` failed to.
    pub(crate) fn trouble_is_everywhere(&self, partition: Partition) -> bool {
        let Some(state) = self.partitions.get(&partition) else { return false };
        let Some(topic) = self.topics.get(&partition.topic_id) else { return false };
        state.trouble.as_ref().is_some_and(|trouble| {
            self.members
                .iter()
                .filter(|(_, member)| member.away.is_none() && member.subscribes_to(&topic.name))
                .all(|(id, _)| trouble.members.contains(id))
        })
    }
}

pub(super) fn find_partition<'a>(
    id: &GroupId,
    group: &'a Group,
    partition: Partition,
) -> Result<&'a PartitionState, Rejection> {
    group
        .partitions
        .get(&partition)
        .ok_or_else(|| Rejection::UnknownPartition { group: id.clone(), partition })
}

/// The fencing check: member and partition epoch, nothing else. See [`State::check_owner`].
pub(super) fn check_owner<'a>(
    id: &GroupId,
    group: &'a Group,
    member: &MemberId,
    partition: Partition,
    epoch: Epoch,
) -> Result<&'a PartitionState, Rejection> {
    let state = find_partition(id, group, partition)?;
    match state.epoch {
        Some(current) if current == epoch && state.ownership.owner() == Some(member) => Ok(state),
        Some(current) if current > epoch => {
            Err(Rejection::Fenced { partition, given: epoch, current })
        }
        Some(_) | None => Err(Rejection::NotOwned { partition, member: member.clone() }),
    }
}

/// The offset that a release leaves behind, if it is ahead of the committed one.
fn final_offset(group: &Group, state: &PartitionState, release: &Release) -> Option<OffsetCommit> {
    let next_offset = release.next_offset.filter(|_| group.settings.home == Home::Coordinator)?;
    let committed = state.committed.as_ref();
    if committed.is_some_and(|committed| committed.next_offset >= next_offset) {
        return None;
    }
    let newest = committed
        .filter(|committed| committed.epoch == release.epoch)
        .map_or(0, |committed| committed.sequence.0);
    Some(OffsetCommit {
        partition: release.partition,
        epoch: release.epoch,
        sequence: tenure_model::CommitSequence(newest.saturating_add(1)),
        next_offset,
        metadata: committed.map_or_else(Vec::new, |committed| committed.metadata.clone()),
    })
}

/// Whether a release says that this member cannot serve the partition. One that was being revoked goes elsewhere
/// anyway, so it does not count.
const fn is_trouble(reason: ReleaseReason, ownership: &Ownership) -> bool {
    match (reason, ownership) {
        (ReleaseReason::AcquireFailed | ReleaseReason::HandlerFailed, Ownership::Held { .. })
        | (ReleaseReason::Fenced, Ownership::Held { acquired: false, .. }) => true,
        (
            ReleaseReason::AcquireFailed
            | ReleaseReason::HandlerFailed
            | ReleaseReason::Fenced
            | ReleaseReason::Revoked
            | ReleaseReason::Shutdown
            | ReleaseReason::LeaseLost,
            Ownership::Held { .. } | Ownership::Revoking { .. } | Ownership::Free,
        ) => false,
    }
}

/// The owner is asked to stop, and once it is free nobody gets it before the hold is lifted.
fn ask_back(grant: &GrantRef, member: MemberId, error: String, draft: &mut Draft) {
    let GrantRef { group, partition, epoch } = grant.clone();
    draft.replan(&group);
    draft.push(Event::PartitionRevoked {
        group: group.clone(),
        partition,
        member: member.clone(),
        epoch,
    });
    draft.push(Event::PartitionHeldBack { group, partition, member, error });
}

/// Frees one grant; with an error it is also held back, and planning avoids the member.
fn free(
    grant: &GrantRef,
    member: &MemberId,
    cause: FreeCause,
    error: Option<String>,
    draft: &mut Draft,
) {
    let GrantRef { group, partition, epoch } = grant.clone();
    draft.push(Event::PartitionReleased {
        group: group.clone(),
        partition,
        member: member.clone(),
        epoch,
        cause,
    });
    if let Some(error) = error {
        draft.replan(&group);
        draft.push(Event::PartitionHeldBack { group, partition, member: member.clone(), error });
    }
}
