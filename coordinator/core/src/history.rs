//! What was: the past grants of each partition, and the newest changes of the whole cluster.
//!
//! Both are bounded, both are part of the state, so every replica remembers and forgets the same. Nothing decides by
//! them.

use std::collections::VecDeque;

use tenure_model::limits::{CHANGE_HISTORY_MAX, GRANT_HISTORY_MAX, GROUP_GRANT_HISTORY_MAX};
use tenure_model::{Epoch, GroupId, Index, MemberId, Partition, RequestId, Timestamp};

use crate::State;
use crate::event::{Event, FreeCause, OperatorAction};
use crate::state::{Ownership, PartitionState};

/// When something happened, on both scales of a watcher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Index of the entry.
    pub revision: Index,
    /// When that entry was proposed; never runs backwards.
    pub time: Timestamp,
}

/// A point to look back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Past {
    /// After this entry.
    Revision(Index),
    /// After the last entry proposed at or before this time.
    Time(Timestamp),
}

/// A grant that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PastGrant {
    pub epoch: Epoch,
    pub member: MemberId,
    pub granted: Moment,
    pub ended: Moment,
    pub cause: FreeCause,
}

/// The grants of one partition that have ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PastGrants {
    /// Newest at the back; at most `GRANT_HISTORY_MAX`, fewer in large groups.
    pub grants: VecDeque<PastGrant>,
    /// End of the newest grant that is forgotten. What was before is not known.
    pub forgotten: Moment,
}

/// A grant, ended or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub epoch: Epoch,
    pub member: MemberId,
    pub granted: Moment,
    /// When and why it ended.
    pub end: Option<(Moment, FreeCause)>,
}

/// The past asked for is before what is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forgotten {
    /// What was before this moment is forgotten; what was at this revision is not.
    pub before: Moment,
}

/// The newest changes, whole revisions only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Newest at the back; at most `CHANGE_HISTORY_MAX`.
    pub newest: VecDeque<Change>,
    /// Changes up to this revision are forgotten; of later ones, none is missing.
    pub compacted: Index,
}

/// One change that watchers are told. Named by its revision and its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub at: Moment,
    /// From 0 within the revision.
    pub position: u32,
    /// Nothing for what concerns the whole cluster.
    pub group: Option<GroupId>,
    pub what: What,
}

/// What changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    Granted { partition: Partition, member: MemberId, epoch: Epoch },
    Acquired { partition: Partition, member: MemberId, epoch: Epoch },
    Revoked { partition: Partition, member: MemberId, epoch: Epoch },
    Released { partition: Partition, member: MemberId, epoch: Epoch, cause: FreeCause },
    MemberJoined { member: MemberId },
    MemberLeft { member: MemberId },
    MemberExpired { member: MemberId },
    MemberDrained { member: MemberId, draining: bool },
    Operated { request: RequestId, action: OperatorAction },
}

impl State {
    /// Past grants that each partition of the group may keep now. Falls as the group grows; a partition drops what
    /// is over at its next release.
    pub(crate) fn past_grants_max(&self, group: &GroupId) -> usize {
        let partitions = self.groups.get(group).map_or(0, |group| group.partitions.len());
        past_grants_max(partitions)
    }

    /// Remembers for watchers what `event` is about to change.
    pub(crate) fn tell(&mut self, event: &Event) {
        // The same event also notes that a home was initialised, by an owner that acquired before.
        if let Event::PartitionAcquired { group, partition, .. } = event
            && !self.partition(group, *partition).is_ok_and(PartitionState::is_acquiring)
        {
            return;
        }
        let at = self.moment();
        self.changes.record(at, event);
    }

    /// Where the entry that is applied now stands.
    pub(crate) const fn moment(&self) -> Moment {
        Moment { revision: self.applied, time: self.now }
    }
}

pub(crate) fn past_grants_max(partition_count: usize) -> usize {
    (GROUP_GRANT_HISTORY_MAX / partition_count.max(1)).clamp(1, GRANT_HISTORY_MAX)
}

impl PartitionState {
    /// Moves the grant that ends now to the past.
    pub(crate) fn end_grant(&mut self, ended: Moment, cause: FreeCause, past_max: usize) {
        let Some(grant) = self.last_grant() else { return };
        let past = self.past.get_or_insert_default();
        while past.grants.len() >= past_max
            && let Some(oldest) = past.grants.pop_front()
        {
            past.forgotten = oldest.ended;
        }
        if past.grants.len() == past.grants.capacity() {
            // Doubling would cost more than the grants themselves where there are few of them.
            past.grants.reserve_exact(if past.grants.is_empty() { 1 } else { 4 });
        }
        let Grant { epoch, member, granted, .. } = grant;
        past.grants.push_back(PastGrant { epoch, member, granted, ended, cause });
    }

    /// The grants, oldest first; the last one may go on.
    pub fn grants(&self) -> impl Iterator<Item = Grant> {
        let past = self.past.iter().flat_map(|past| &past.grants).map(PastGrant::to_grant);
        past.chain(self.last_grant())
    }

    /// What was before this moment is forgotten.
    #[must_use]
    pub fn forgotten(&self) -> Moment {
        self.past.as_ref().map_or_else(Moment::default, |past| past.forgotten)
    }

    /// The grant that covers a point in the past; nothing where nobody owned the partition.
    ///
    /// # Errors
    ///
    /// [`Forgotten`] before what is remembered.
    pub fn grant_at(&self, past: Past) -> Result<Option<Grant>, Forgotten> {
        let before = self.forgotten();
        let found = self.grants().filter(|grant| past.reaches(grant.granted)).last();
        match found {
            Some(Grant { end: Some((ended, _)), .. }) if past.reaches(ended) => Ok(None),
            None if !past.reaches(before) => Err(Forgotten { before }),
            found => Ok(found),
        }
    }

    fn last_grant(&self) -> Option<Grant> {
        match &self.ownership {
            Ownership::Free => None,
            Ownership::Held { member, .. } | Ownership::Revoking { member } => Some(Grant {
                epoch: self.epoch?,
                member: member.clone(),
                granted: self.granted,
                end: None,
            }),
        }
    }
}

impl PastGrant {
    fn to_grant(&self) -> Grant {
        Grant {
            epoch: self.epoch,
            member: self.member.clone(),
            granted: self.granted,
            end: Some((self.ended, self.cause)),
        }
    }
}

impl Past {
    /// Whether what happened at `moment` had happened by then.
    fn reaches(self, moment: Moment) -> bool {
        match self {
            Self::Revision(revision) => moment.revision <= revision,
            Self::Time(time) => moment.time <= time,
        }
    }
}

impl Changes {
    /// The changes of `from` and later revisions, in order.
    ///
    /// # Errors
    ///
    /// [`Forgotten`] when some of them may be missing.
    pub fn since(&self, from: Index) -> Result<impl Iterator<Item = &Change>, Forgotten> {
        if from <= self.compacted {
            let before = Moment { revision: self.compacted, time: Timestamp::default() };
            return Err(Forgotten { before });
        }
        let start = self.newest.partition_point(|change| change.at.revision < from);
        Ok(self.newest.range(start..))
    }

    /// Remembers what `event` changed. Forgets whole revisions, so that none is ever told in part.
    pub(crate) fn record(&mut self, at: Moment, event: &Event) {
        let Some(what) = What::of(event) else { return };
        // The rest of a revision that has more changes than are remembered.
        if at.revision <= self.compacted {
            return;
        }
        let position = match self.newest.back() {
            Some(last) if last.at.revision == at.revision => last.position + 1,
            Some(_) | None => 0,
        };
        self.newest.push_back(Change { at, position, group: event.group().cloned(), what });
        if self.newest.len() > CHANGE_HISTORY_MAX
            && let Some(oldest) = self.newest.front()
        {
            self.compacted = oldest.at.revision;
            while self.newest.front().is_some_and(|oldest| oldest.at.revision <= self.compacted) {
                self.newest.pop_front();
            }
        }
    }

    pub(crate) fn check(&self, applied: Index) -> Result<(), String> {
        if self.newest.len() > CHANGE_HISTORY_MAX {
            return Err("too many changes".to_owned());
        }
        let mut last = (self.compacted, 0);
        for change in &self.newest {
            let (revision, position) = (change.at.revision, change.position);
            let follows = if revision == last.0 {
                revision > self.compacted && position == last.1 + 1
            } else {
                revision > last.0 && position == 0
            };
            if !follows || revision > applied {
                return Err(format!("change {position} of {revision} is out of order"));
            }
            last = (revision, position);
        }
        Ok(())
    }
}

impl What {
    /// What watchers are told of an event; nothing of offsets and of what only prepares a change.
    pub(crate) fn of(event: &Event) -> Option<Self> {
        Some(match event {
            Event::PartitionGranted { partition, member, epoch, .. } => {
                Self::Granted { partition: *partition, member: member.clone(), epoch: *epoch }
            }
            Event::PartitionAcquired { partition, member, epoch, .. } => {
                Self::Acquired { partition: *partition, member: member.clone(), epoch: *epoch }
            }
            Event::PartitionRevoked { partition, member, epoch, .. } => {
                Self::Revoked { partition: *partition, member: member.clone(), epoch: *epoch }
            }
            Event::PartitionReleased { partition, member, epoch, cause, .. } => Self::Released {
                partition: *partition,
                member: member.clone(),
                epoch: *epoch,
                cause: *cause,
            },
            Event::MemberJoined(joined) => Self::MemberJoined { member: joined.member.clone() },
            Event::MemberLeft { member, .. } => Self::MemberLeft { member: member.clone() },
            Event::MemberExpired { member, .. } => Self::MemberExpired { member: member.clone() },
            Event::MemberDrained { member, draining, .. } => {
                Self::MemberDrained { member: member.clone(), draining: *draining }
            }
            Event::OperatorActed { request, action, .. } => {
                Self::Operated { request: request.clone(), action: *action }
            }
            Event::GroupCreated { .. }
            | Event::MemberUpdated(_)
            | Event::MemberAway { .. }
            | Event::PlaceTaken { .. }
            | Event::MemberSilenced { .. }
            | Event::MemberHeard { .. }
            | Event::TopicGrown { .. }
            | Event::GroupEpochRaised { .. }
            | Event::TargetInstalled { .. }
            | Event::TargetConfirmed { .. }
            | Event::PartitionPinned { .. }
            | Event::PinsLifted { .. }
            | Event::PartitionHeldBack { .. }
            | Event::HoldLifted { .. }
            | Event::PreparationBegun { .. }
            | Event::PreparationReady { .. }
            | Event::PreparationCalledOff { .. }
            | Event::OffsetCommitted { .. }
            | Event::EpochFloorRaised { .. }
            | Event::FeatureLevelRaised { .. } => return None,
        })
    }
}
