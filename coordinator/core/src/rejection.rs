//! Legal questions with the answer no.

use tenure_model::{
    CommitSequence, Epoch, ErrorCode, GroupEpoch, GroupId, Home, InstanceId, MemberEpoch, MemberId,
    NextOffset, Partition, Term,
};

/// Why a command, or one partition of it, was refused. Deterministic and part of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error(
        "partition {partition} is fenced: given {given}, current is {current}: stop writing to it"
    )]
    Fenced { partition: Partition, given: Epoch, current: Epoch },
    #[error("partition {partition} is not owned by {member}: wait for a grant")]
    NotOwned { partition: Partition, member: MemberId },
    #[error("group {group} does not exist: list the groups, or join it first")]
    UnknownGroup { group: GroupId },
    #[error("member {member} is not in group {group}: join first")]
    UnknownMember { group: GroupId, member: MemberId },
    #[error("membership of {member} in group {group} has ended: join under a new member id")]
    MemberGone { group: GroupId, member: MemberId },
    #[error(
        "member {member} is at member epoch {current}, given {given}: this membership has ended"
    )]
    StaleMember { member: MemberId, given: MemberEpoch, current: MemberEpoch },
    #[error(
        "instance id {instance} is used by the live member {member}: stop it, or wait until its lease ends"
    )]
    InstanceInUse { instance: InstanceId, member: MemberId },
    #[error(
        "partition {partition} is not known to group {group}: a member that reads its topic reports it"
    )]
    UnknownPartition { group: GroupId, partition: Partition },
    #[error(
        "{setting} of group {group} is {existing}, the join says {given}: use the same setting in every member"
    )]
    SettingsConflict { group: GroupId, setting: &'static str, existing: String, given: String },
    #[error(
        "offset {given} of partition {partition} is below the committed {committed}: \
         use an offset reset to go back"
    )]
    OffsetRegressed { partition: Partition, given: NextOffset, committed: NextOffset },
    #[error(
        "commit {given} of partition {partition} is older than commit {newest} of the same grant: \
         nothing to do, sequences rise within a grant"
    )]
    StaleCommit { partition: Partition, given: CommitSequence, newest: CommitSequence },
    #[error("offsets of group {group} live in {}: commit them there", home.as_str())]
    WrongHome { group: GroupId, home: Home },
    #[error(
        "target of group {group} was planned for group epoch {given}, current is {current}: plan again"
    )]
    StaleTarget { group: GroupId, given: GroupEpoch, current: GroupEpoch },
    #[error("command of term {given} in an entry of term {current}")]
    StaleTerm { given: Term, current: Term },
    #[error("nothing to do: {what}")]
    NothingToDo { what: String },
    #[error("{what}: the limit is {limit}")]
    LimitReached { what: String, limit: u64 },
    #[error(
        "the epoch counter is at {counter} and cannot rise to {wanted}: raise the epoch floor within 2^53 − 1"
    )]
    EpochExhausted { counter: u64, wanted: u64 },
    #[error("{what}")]
    Invalid { what: String },
}

impl Rejection {
    /// Stable code. Exhaustive, so that a new rejection does not compile until it has one.
    #[must_use]
    pub const fn code(&self) -> ErrorCode {
        match self {
            Self::Fenced { .. } => ErrorCode::Fenced,
            Self::NotOwned { .. } => ErrorCode::NotOwned,
            Self::UnknownGroup { .. } => ErrorCode::UnknownGroup,
            Self::UnknownMember { .. } => ErrorCode::UnknownMember,
            Self::MemberGone { .. } => ErrorCode::MemberGone,
            Self::StaleMember { .. } => ErrorCode::StaleMember,
            Self::InstanceInUse { .. } => ErrorCode::InstanceInUse,
            Self::UnknownPartition { .. } => ErrorCode::UnknownPartition,
            Self::SettingsConflict { .. } => ErrorCode::SettingsConflict,
            Self::OffsetRegressed { .. } => ErrorCode::OffsetRegressed,
            Self::StaleCommit { .. } => ErrorCode::StaleCommit,
            Self::WrongHome { .. } => ErrorCode::WrongHome,
            Self::StaleTarget { .. } => ErrorCode::StaleTarget,
            Self::StaleTerm { .. } => ErrorCode::StaleTerm,
            Self::NothingToDo { .. } => ErrorCode::NothingToDo,
            Self::LimitReached { .. } => ErrorCode::LimitReached,
            Self::EpochExhausted { .. } => ErrorCode::EpochExhausted,
            Self::Invalid { .. } => ErrorCode::InvalidArgument,
        }
    }

    /// Epoch that is current where the caller's was refused.
    #[must_use]
    pub const fn current_epoch(&self) -> Option<Epoch> {
        if let Self::Fenced { current, .. } = self { Some(*current) } else { None }
    }
}
