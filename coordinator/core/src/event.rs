//! What happened. Events are the only thing that changes the state.

use tenure_model::{
    Epoch, FeatureLevel, GroupEpoch, GroupId, GroupSettings, InstanceId, MemberEpoch, MemberId,
    Partition, RequestId, TopicId, TopicName,
};

use crate::command::{OffsetCommit, ReleaseReason};
use crate::reply::PlannedMove;

/// One change of the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    GroupCreated {
        group: GroupId,
        settings: GroupSettings,
    },
    MemberJoined(Box<MemberJoined>),
    /// The session was taken up again with new wishes (subscription, cap, client, lengths).
    MemberUpdated(Box<MemberJoined>),
    MemberLeft {
        group: GroupId,
        member: MemberId,
        reason: String,
    },
    MemberExpired {
        group: GroupId,
        member: MemberId,
    },
    /// It owns nothing any more; its lines of the target wait for the next process with its instance id.
    MemberAway {
        group: GroupId,
        member: MemberId,
        returning_within_ms: u64,
    },
    /// The place of `from` in the target is that of `to` now. `from` leaves right after it.
    PlaceTaken {
        group: GroupId,
        from: MemberId,
        to: MemberId,
    },
    MemberSilenced {
        group: GroupId,
        member: MemberId,
        silent_for_ms: u64,
    },
    MemberHeard {
        group: GroupId,
        member: MemberId,
    },
    MemberDrained {
        group: GroupId,
        member: MemberId,
        draining: bool,
    },
    TopicGrown {
        group: GroupId,
        topic: TopicName,
        topic_id: TopicId,
        partition_count: u32,
    },
    GroupEpochRaised {
        group: GroupId,
        group_epoch: GroupEpoch,
    },
    TargetInstalled {
        group: GroupId,
        group_epoch: GroupEpoch,
        target: Vec<(Partition, MemberId)>,
    },
    /// The target is valid for this group epoch too.
    TargetConfirmed {
        group: GroupId,
        group_epoch: GroupEpoch,
    },
    /// Sets the pin and the partition's line of the target.
    PartitionPinned {
        group: GroupId,
        partition: Partition,
        member: MemberId,
    },
    PinsLifted {
        group: GroupId,
    },
    PartitionGranted {
        group: GroupId,
        partition: Partition,
        member: MemberId,
        epoch: Epoch,
    },
    /// The member is told to prepare; the owner goes on meanwhile.
    PreparationBegun {
        group: GroupId,
        partition: Partition,
        member: MemberId,
    },
    /// The owner may be asked now.
    PreparationReady {
        group: GroupId,
        partition: Partition,
        member: MemberId,
    },
    /// The partition goes elsewhere.
    PreparationCalledOff {
        group: GroupId,
        partition: Partition,
        member: MemberId,
    },
    PartitionAcquired {
        group: GroupId,
        partition: Partition,
        member: MemberId,
        epoch: Epoch,
        home_initialised: bool,
    },
    PartitionRevoked {
        group: GroupId,
        partition: Partition,
        member: MemberId,
        epoch: Epoch,
    },
    PartitionReleased {
        group: GroupId,
        partition: Partition,
        member: MemberId,
        epoch: Epoch,
        cause: FreeCause,
    },
    /// No grant until the raft leader lifts the hold.
    PartitionHeldBack {
        group: GroupId,
        partition: Partition,
        member: MemberId,
        error: String,
    },
    HoldLifted {
        group: GroupId,
        partition: Partition,
    },
    OffsetCommitted {
        group: GroupId,
        member: MemberId,
        commit: OffsetCommit,
        /// Set where it was a rewind.
        rewind: Option<RequestId>,
    },
    EpochFloorRaised {
        floor: Epoch,
    },
    FeatureLevelRaised {
        level: FeatureLevel,
    },
    OperatorActed {
        request: RequestId,
        actor: String,
        reason: String,
        action: OperatorAction,
        group: Option<GroupId>,
        group_epoch: GroupEpoch,
        moves: Vec<PlannedMove>,
    },
}

/// A member's record as its join says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberJoined {
    pub group: GroupId,
    pub member: MemberId,
    pub member_epoch: MemberEpoch,
    pub instance: Option<InstanceId>,
    pub topics: Vec<TopicName>,
    pub ttl_ms: u64,
    pub heartbeat_interval_ms: u64,
    pub client: String,
    pub partitions_max: Option<u32>,
    pub prepares: bool,
    pub weight: u32,
}

/// Why a partition became free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FreeCause {
    /// The owner let go.
    Released(ReleaseReason),
    /// The owner's lease ran out.
    Expired,
    /// The owner left.
    Left,
    /// The drain deadline passed.
    DrainDeadline,
    /// The acquire deadline passed.
    AcquireDeadline,
}

/// What an operator did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OperatorAction {
    Move,
    Rebalance,
    Drain,
    Undrain,
    RaiseEpochFloor,
}

impl Event {
    /// The group that it changes; nothing for what concerns the whole cluster.
    #[must_use]
    pub const fn group(&self) -> Option<&GroupId> {
        match self {
            Self::MemberJoined(joined) | Self::MemberUpdated(joined) => Some(&joined.group),
            Self::GroupCreated { group, .. }
            | Self::MemberLeft { group, .. }
            | Self::MemberExpired { group, .. }
            | Self::MemberAway { group, .. }
            | Self::PlaceTaken { group, .. }
            | Self::MemberSilenced { group, .. }
            | Self::MemberHeard { group, .. }
            | Self::MemberDrained { group, .. }
            | Self::TopicGrown { group, .. }
            | Self::GroupEpochRaised { group, .. }
            | Self::TargetInstalled { group, .. }
            | Self::TargetConfirmed { group, .. }
            | Self::PartitionPinned { group, .. }
            | Self::PinsLifted { group }
            | Self::PartitionGranted { group, .. }
            | Self::PreparationBegun { group, .. }
            | Self::PreparationReady { group, .. }
            | Self::PreparationCalledOff { group, .. }
            | Self::PartitionAcquired { group, .. }
            | Self::PartitionRevoked { group, .. }
            | Self::PartitionReleased { group, .. }
            | Self::PartitionHeldBack { group, .. }
            | Self::HoldLifted { group, .. }
            | Self::OffsetCommitted { group, .. } => Some(group),
            Self::EpochFloorRaised { .. } | Self::FeatureLevelRaised { .. } => None,
            Self::OperatorActed { group, .. } => group.as_ref(),
        }
    }
}
