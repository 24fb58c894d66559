//! The replicated state. Read through its queries, changed only by [`State::apply`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use tenure_model::{
    CommitSequence, Epoch, FeatureLevel, GroupEpoch, GroupId, GroupSettings, Index, InstanceId,
    MemberEpoch, MemberId, NextOffset, Partition, RequestId, Timestamp, TopicId, TopicName,
};

use crate::event::{FreeCause, OperatorAction};
use crate::history::{Changes, Moment, PastGrants};
use crate::reply::PlannedMove;

/// Everything that the coordinators agree on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Which rules decide.
    pub level: FeatureLevel,
    /// Highest epoch ever drawn, or the floor; 0 in a new cluster.
    pub epoch_counter: u64,
    /// Index of the last entry applied.
    pub applied: Index,
    /// Highest `proposed_at` seen.
    pub now: Timestamp,
    /// Shared with copies of the state, such as one that a snapshot is written from: only the groups that change
    /// meanwhile are copied.
    pub groups: BTreeMap<GroupId, Arc<Group>>,
    /// Newest at the back; at most `OPERATOR_HISTORY_MAX`.
    pub operations: VecDeque<Operation>,
    /// What watchers are told.
    pub changes: Changes,
}

/// Consumers that share topics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    pub settings: GroupSettings,
    pub epoch: GroupEpoch,
    /// Group epoch that `target` was planned for. Below `epoch`: a plan is due.
    pub target_epoch: GroupEpoch,
    pub members: BTreeMap<MemberId, Member>,
    /// Members that left or expired, oldest first; at most `TOMBSTONES_MAX`.
    pub tombstones: VecDeque<MemberId>,
    pub topics: BTreeMap<TopicId, Topic>,
    pub partitions: BTreeMap<Partition, PartitionState>,
    pub target: BTreeMap<Partition, MemberId>,
    /// Moves that an operator wants to stay true until the next rebalance or the member's end.
    pub pins: BTreeMap<Partition, MemberId>,
    /// Follows from the rest; [`Group::rebuild_derived`] makes it anew after a snapshot was read.
    pub derived: Derived,
}

/// Look-ups that follow from a [`Group`]. Never part of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Derived {
    pub revoking: BTreeSet<Partition>,
    /// Held, not yet acquired.
    pub acquiring: BTreeSet<Partition>,
    pub held_back: BTreeSet<Partition>,
    /// Partitions by the member that prepares for them.
    pub preparing: BTreeMap<MemberId, BTreeSet<Partition>>,
    /// Partitions by the member that the target names and that does not own them.
    pub waiting: BTreeMap<MemberId, BTreeSet<Partition>>,
}

/// One running consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub epoch: MemberEpoch,
    pub instance: Option<InstanceId>,
    pub topics: Vec<TopicName>,
    pub ttl_ms: u64,
    pub heartbeat_interval_ms: u64,
    pub client: String,
    pub partitions_max: Option<u32>,
    /// It is told ahead of partitions that it is to get, and its moves wait for it.
    pub prepares: bool,
    /// Share of partitions relative to others.
    pub weight: u32,
    pub draining: bool,
    pub joined_at: Timestamp,
    /// Index of the last entry that changed what this member owns.
    pub assignment_version: Index,
    /// What it owns now, revoking or not.
    pub owned: BTreeSet<Partition>,
    /// Set while the log says that it is silent.
    pub silent: Option<Silence>,
    /// Set while its process is gone and its lines of the target wait for the next one with its instance id. It owns
    /// nothing then, and its member id is used up.
    pub away: Option<Away>,
}

/// A static member whose place is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Away {
    /// Index of the entry since which it is.
    pub since: Index,
    /// How long the raft leader waits for its return, in milliseconds.
    pub returning_within_ms: u64,
}

/// The log's word that a member was not heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// Index of the entry that said so.
    pub index: Index,
    /// How long it had been silent by then, in milliseconds.
    pub silent_for_ms: u64,
}

/// One life of a topic, as members reported it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topic {
    pub name: TopicName,
    /// The largest count reported.
    pub partition_count: u32,
    /// Partitions from this index on appeared after the group knew the topic: they start at their earliest record
    /// whatever the reset policy says. 0 for a later life of a name that the group knew.
    pub initial_partition_count: u32,
    /// The later life of the same name. Set: nobody is granted a partition of this one any more.
    pub frozen_by: Option<TopicId>,
}

/// One partition of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartitionState {
    pub ownership: Ownership,
    /// Epoch of the last grant.
    pub epoch: Option<Epoch>,
    pub committed: Option<Committed>,
    /// Whether the home of the offset certainly has one for this partition.
    pub home_initialised: bool,
    /// Index of the entry that last changed the ownership; for a held partition it names the handoff.
    pub changed_at: Index,
    pub changed_time: Timestamp,
    /// Why it last became free.
    pub freed_by: Option<FreeCause>,
    /// When the last grant was made.
    pub granted: Moment,
    /// The grants before the last one, and the last one too once it has ended. Boxed because a partition whose first
    /// grant goes on has none.
    pub past: Option<Box<PastGrants>>,
    /// Boxed because hardly any partition has one.
    pub trouble: Option<Box<Trouble>>,
    /// The member that prepares for it: always the one that the target names. Until the grant.
    pub preparation: Option<Box<Preparation>>,
}

/// Who may write to a partition.
///
/// | from           | event             | to                        | epoch |
/// |----------------|-------------------|---------------------------|-------|
/// | Free           | granted           | Held, not acquired        | next  |
/// | Held           | acquired          | Held, acquired            | same  |
/// | Held           | revoked           | Revoking                  | same  |
/// | Held, Revoking | released          | Free                      | same  |
///
/// Expiry, leave and passed deadlines are `released` with another cause.
/// There is no edge from Revoking back to Held, and none from one member's Held to another's: every hand-over passes
/// through Free, in the same apply or a later one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Ownership {
    /// Nobody may write.
    #[default]
    Free,
    /// `member` may write.
    Held {
        member: MemberId,
        /// It said that it registered, verified and resumed.
        acquired: bool,
    },
    /// `member` was asked to stop and may still write until it releases or is taken to have stopped.
    Revoking { member: MemberId },
}

/// An offset that was committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    pub next_offset: NextOffset,
    /// Epoch under which it was committed.
    pub epoch: Epoch,
    pub sequence: CommitSequence,
    pub metadata: Vec<u8>,
    /// The last rewind that was applied.
    pub rewind: Option<RequestId>,
}

/// Failed acquires since the last one that succeeded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trouble {
    pub failures: u32,
    /// Members that failed; planning avoids them while another is free to take it.
    pub members: BTreeSet<MemberId>,
    pub error: String,
    /// No grant while set; the raft leader lifts it after a back-off.
    pub held_back: bool,
}

/// A member that prepares for a partition which another still owns.
///
/// | from    | event      | to    |
/// |---------|------------|-------|
/// | none    | begun      | begun |
/// | begun   | ready      | ready |
/// | any     | called off | none  |
/// | any     | granted    | none  |
///
/// Only a ready one lets the owner be asked; the deadline makes it ready too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preparation {
    pub member: MemberId,
    pub ready: bool,
}

/// One thing that an operator did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    pub request: RequestId,
    pub index: Index,
    pub time: Timestamp,
    pub actor: String,
    pub reason: String,
    pub action: OperatorAction,
    pub group: Option<GroupId>,
    pub group_epoch: GroupEpoch,
    pub moves: Vec<PlannedMove>,
}

impl Ownership {
    /// The member that may write now.
    #[must_use]
    pub const fn owner(&self) -> Option<&MemberId> {
        match self {
            Self::Free => None,
            Self::Held { member, .. } | Self::Revoking { member } => Some(member),
        }
    }

    /// Whether the owner was asked to stop.
    #[must_use]
    pub const fn is_revoking(&self) -> bool {
        matches!(self, Self::Revoking { .. })
    }
}

impl State {
    /// Makes everything derived anew. Called once after a state was put together from a snapshot.
    pub fn rebuild_derived(&mut self) {
        for group in self.groups.values_mut() {
            Arc::make_mut(group).rebuild_derived();
        }
    }
}

impl Group {
    /// Makes [`Derived`] anew from the rest of the group.
    pub fn rebuild_derived(&mut self) {
        self.derived = Derived::default();
        let partitions: Vec<Partition> = self.partitions.keys().copied().collect();
        for partition in partitions {
            self.index_partition(partition);
        }
    }

    /// Changes one partition and its line of the target, and keeps [`Derived`] true to it.
    pub(crate) fn change_partition<T>(
        &mut self,
        partition: Partition,
        change: impl FnOnce(&mut PartitionState, &mut BTreeMap<Partition, MemberId>) -> T,
    ) -> Option<T> {
        self.unindex_partition(partition);
        let changed = change(self.partitions.get_mut(&partition)?, &mut self.target);
        self.index_partition(partition);
        Some(changed)
    }

    fn unindex_partition(&mut self, partition: Partition) {
        let Some(state) = self.partitions.get(&partition) else { return };
        match &state.ownership {
            Ownership::Free | Ownership::Held { acquired: true, .. } => {}
            Ownership::Held { acquired: false, .. } => {
                self.derived.acquiring.remove(&partition);
            }
            Ownership::Revoking { .. } => {
                self.derived.revoking.remove(&partition);
            }
        }
        if state.is_held_back() {
            self.derived.held_back.remove(&partition);
        }
        if let Some(preparation) = &state.preparation
            && let Some(preparing) = self.derived.preparing.get_mut(&preparation.member)
        {
            preparing.remove(&partition);
            if preparing.is_empty() {
                self.derived.preparing.remove(&preparation.member);
            }
        }
        if let Some(member) = self.target.get(&partition)
            && state.ownership.owner() != Some(member)
            && let Some(waiting) = self.derived.waiting.get_mut(member)
        {
            waiting.remove(&partition);
            if waiting.is_empty() {
                self.derived.waiting.remove(member);
            }
        }
    }

    fn index_partition(&mut self, partition: Partition) {
        let Some(state) = self.partitions.get(&partition) else { return };
        match &state.ownership {
            Ownership::Free | Ownership::Held { acquired: true, .. } => {}
            Ownership::Held { acquired: false, .. } => {
                self.derived.acquiring.insert(partition);
            }
            Ownership::Revoking { .. } => {
                self.derived.revoking.insert(partition);
            }
        }
        if state.is_held_back() {
            self.derived.held_back.insert(partition);
        }
        if let Some(preparation) = &state.preparation {
            let member = preparation.member.clone();
            self.derived.preparing.entry(member).or_default().insert(partition);
        }
        if let Some(member) = self.target.get(&partition)
            && state.ownership.owner() != Some(member)
        {
            self.derived.waiting.entry(member.clone()).or_default().insert(partition);
        }
    }

    /// Whether the partition appeared after the group knew its topic: without an offset it starts at its earliest record,
    /// whatever the reset policy says.
    #[must_use]
    pub fn starts_at_earliest(&self, partition: Partition) -> bool {
        let topic = self.topics.get(&partition.topic_id);
        topic.is_some_and(|topic| partition.index.get() >= topic.initial_partition_count)
    }

    /// The member with this instance id, live or away.
    #[must_use]
    pub fn instance(&self, instance: &InstanceId) -> Option<(&MemberId, &Member)> {
        self.members.iter().find(|(_, member)| member.instance.as_ref() == Some(instance))
    }

    /// Whether a target may give `partition` to `member`: it wants the topic, is not draining, and lives or is away, and
    /// the topic is not frozen.
    #[must_use]
    pub fn may_own(&self, member: &MemberId, partition: Partition) -> bool {
        let topic = self.topics.get(&partition.topic_id);
        let Some(topic) = topic.filter(|topic| topic.frozen_by.is_none()) else { return false };
        self.members
            .get(member)
            .is_some_and(|member| !member.draining && member.subscribes_to(&topic.name))
    }

    /// Whether `member` may be granted `partition` now: a target may give it to it, and it is not away.
    #[must_use]
    pub fn may_be_granted(&self, member: &MemberId, partition: Partition) -> bool {
        let is_here = self.members.get(member).is_some_and(|member| member.away.is_none());
        is_here && self.may_own(member, partition)
    }
}

impl Member {
    /// Whether `topic` is in the subscription.
    #[must_use]
    pub fn subscribes_to(&self, topic: &TopicName) -> bool {
        self.topics.binary_search(topic).is_ok()
    }
}

impl PartitionState {
    /// Whether its owner said that it runs, and was not asked to stop since.
    #[must_use]
    pub const fn runs(&self) -> bool {
        matches!(self.ownership, Ownership::Held { acquired: true, .. })
    }

    /// Whether its owner has not acquired it yet.
    #[must_use]
    pub const fn is_acquiring(&self) -> bool {
        matches!(self.ownership, Ownership::Held { acquired: false, .. })
    }

    /// Whether a grant waits for the raft leader to lift a hold.
    #[must_use]
    pub fn is_held_back(&self) -> bool {
        self.trouble.as_ref().is_some_and(|trouble| trouble.held_back)
    }
}
