//! What the raft log holds.

use tenure_model::{
    CommitSequence, Epoch, FeatureLevel, GroupEpoch, GroupId, GroupSettings, Index, InstanceId,
    MemberEpoch, MemberId, NextOffset, Partition, RequestId, StateDigest, Term, Timestamp, TopicId,
    TopicName,
};

/// What the log says of the entry that a command came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// Term of the entry.
    pub term: Term,
    /// Index of the entry.
    pub index: Index,
    /// Wall clock of the proposing raft leader; clamped by the state, used for audit and history only.
    pub proposed_at: Timestamp,
}

/// One wish, decided the same way on every replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A member joins, or repeats its join.
    JoinGroup(JoinGroup),
    /// A member leaves and releases what it holds.
    LeaveGroup(LeaveGroup),
    /// A member says what topics look like.
    ReportTopics(ReportTopics),
    /// The raft leader found members whose lease ran out.
    ExpireMembers {
        /// Term of the lease table that found them.
        term: Term,
        members: Vec<MemberRef>,
    },
    /// The raft leader has not heard members for an interval plus slack (DESIGN.md, section 5, rule 4).
    MarkMembersSilent { term: Term, members: Vec<SilentMember> },
    /// Silent members were heard again.
    MarkMembersHeard { term: Term, members: Vec<MemberRef> },
    /// The raft leader found static members whose lease ran out while a process with their instance id waits for it:
    /// their places are kept for it.
    ReserveMembers { term: Term, members: Vec<MemberRef>, returning_within_ms: u64 },
    /// The planner's answer for one group epoch.
    InstallTarget(InstallTarget),
    /// A member lets go.
    ReleasePartitions(ReleasePartitions),
    /// A member registered, verified and resumed: it runs.
    AcknowledgeAcquired(AcknowledgeAcquired),
    /// A member moves offsets forward (home = coordinator).
    CommitOffsets(CommitOffsets),
    /// A member moves one offset back, or forward, by name (home = coordinator).
    RewindOffset(RewindOffset),
    /// Drain deadlines passed at the raft leader; the partitions are taken back.
    ExpireRevocations { term: Term, grants: Vec<GrantRef> },
    /// Acquire deadlines passed at the raft leader; the partitions are taken back.
    ExpireAcquisitions { term: Term, grants: Vec<GrantRef> },
    /// Owners have not named grants in their heartbeats for a while, although they run: they are asked for them.
    TakeBackUnserved { term: Term, grants: Vec<GrantRef> },
    /// A member has prepared for a partition that it is to get, or cannot: its present owner may be asked.
    AcknowledgePrepared(AcknowledgePrepared),
    /// Prepare deadlines passed at the raft leader; the moves go on without the preparation.
    ExpirePreparations { term: Term, preparations: Vec<AcknowledgePrepared> },
    /// The back-off after failed acquires passed at the raft leader; the partitions may be granted again.
    LiftHolds { term: Term, partitions: Vec<(GroupId, Partition)> },
    /// An operator moves one partition and pins it there.
    MovePartition(MovePartition),
    /// An operator installs a target planned afresh; lifts the pins of moves.
    RebalanceGroup(RebalanceGroup),
    /// An operator takes all partitions from a member, or allows them again.
    DrainMember(DrainMember),
    /// An operator lifts the epoch counter, for example after a restore.
    RaiseEpochFloor { operator: OperatorContext, floor: Epoch },
    /// The raft leader found that all nodes know the rules of a higher level.
    RaiseFeatureLevel { level: FeatureLevel },
    /// Every replica takes the digest of its state as of this entry.
    MarkDigest,
    /// The digest that a majority of the voters took as of an earlier entry; a replica with another one stops.
    CompareDigest { index: Index, digest: StateDigest },
}

/// Join of one member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinGroup {
    pub group: GroupId,
    pub member: MemberId,
    pub instance: Option<InstanceId>,
    /// Topics wanted, sorted, at least one.
    pub topics: Vec<TopicName>,
    pub settings: GroupSettings,
    pub ttl_ms: u64,
    pub heartbeat_interval_ms: u64,
    /// Host and process, for people.
    pub client: String,
    /// Largest number of partitions this member takes.
    pub partitions_max: Option<u32>,
    pub report: Vec<TopicReport>,
    /// Set when a broken session is taken up again.
    pub rejoin: Option<MemberEpoch>,
    /// It wants to be told ahead of partitions that it is to get, to prepare for them.
    pub prepares: bool,
    /// Share of partitions relative to others, 1 to `WEIGHT_MAX`.
    pub weight: u32,
}

/// A topic as one member sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicReport {
    pub topic: TopicName,
    pub topic_id: TopicId,
    /// 1 to `TOPIC_PARTITIONS_MAX`.
    pub partition_count: u32,
}

/// See [`Command::ReportTopics`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportTopics {
    pub group: GroupId,
    pub member: MemberId,
    pub topics: Vec<TopicReport>,
}

/// See [`Command::LeaveGroup`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaveGroup {
    pub group: GroupId,
    pub member: MemberId,
    pub partitions: Vec<Release>,
    pub reason: String,
    /// Static members only: their place is kept for the next process with their instance id, this long at most. 1 to
    /// `RETURNING_WITHIN_MS_MAX`.
    pub returning_within_ms: Option<u64>,
}

/// One membership.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemberRef {
    pub group: GroupId,
    pub member: MemberId,
    pub member_epoch: MemberEpoch,
}

/// A membership that is silent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SilentMember {
    pub member: MemberRef,
    /// Time since the raft leader last heard it, in milliseconds.
    pub silent_for_ms: u64,
}

/// See [`Command::InstallTarget`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstallTarget {
    pub group: GroupId,
    /// Group epoch that it was planned for.
    pub group_epoch: GroupEpoch,
    /// Sorted by partition; a partition that is absent gets no owner.
    pub target: Vec<(Partition, MemberId)>,
    /// After repeated refusals: take the lines that hold although the group epoch moved on.
    pub line_by_line: bool,
}

/// See [`Command::ReleasePartitions`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReleasePartitions {
    pub group: GroupId,
    pub member: MemberId,
    pub partitions: Vec<Release>,
}

/// Release of one grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    pub partition: Partition,
    pub epoch: Epoch,
    /// Final next offset; the maximum of it and the committed one counts.
    pub next_offset: Option<NextOffset>,
    pub reason: ReleaseReason,
    /// For people.
    pub error: String,
}

/// Why a member let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReleaseReason {
    /// It was asked to.
    Revoked,
    /// It stops.
    Shutdown,
    /// It stopped by itself because its lease ran out.
    LeaseLost,
    /// A sink or the coordinator refused its epoch.
    Fenced,
    /// It could not register, verify or resume.
    AcquireFailed,
    /// The service's code failed.
    HandlerFailed,
}

/// See [`Command::AcknowledgeAcquired`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcknowledgeAcquired {
    pub group: GroupId,
    pub member: MemberId,
    pub partition: Partition,
    pub epoch: Epoch,
    pub home_initialised: bool,
}

/// See [`Command::AcknowledgePrepared`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AcknowledgePrepared {
    pub group: GroupId,
    pub member: MemberId,
    pub partition: Partition,
}

/// See [`Command::CommitOffsets`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitOffsets {
    pub group: GroupId,
    pub member: MemberId,
    pub commits: Vec<OffsetCommit>,
}

/// See [`Command::RewindOffset`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RewindOffset {
    pub group: GroupId,
    pub member: MemberId,
    pub commit: OffsetCommit,
    /// Applied once: the same name again does nothing, whatever was committed since.
    pub request: RequestId,
}

/// One offset to commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffsetCommit {
    pub partition: Partition,
    pub epoch: Epoch,
    pub sequence: CommitSequence,
    pub next_offset: NextOffset,
    /// At most `METADATA_BYTES_MAX`.
    pub metadata: Vec<u8>,
}

/// One grant, by the partition and its epoch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrantRef {
    pub group: GroupId,
    pub partition: Partition,
    pub epoch: Epoch,
}

/// Who asks, why, and under which name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorContext {
    pub request: RequestId,
    pub reason: String,
    pub actor: String,
}

/// See [`Command::MovePartition`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovePartition {
    pub operator: OperatorContext,
    pub group: GroupId,
    pub partition: Partition,
    pub to: MemberId,
}

/// See [`Command::RebalanceGroup`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RebalanceGroup {
    pub operator: OperatorContext,
    pub group: GroupId,
    /// Group epoch that the target was planned for.
    pub group_epoch: GroupEpoch,
    pub target: Vec<(Partition, MemberId)>,
}

/// See [`Command::DrainMember`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainMember {
    pub operator: OperatorContext,
    pub group: GroupId,
    pub member: MemberId,
    /// Allow partitions again.
    pub undrain: bool,
}
