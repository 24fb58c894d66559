//! What a command is answered with.

use tenure_model::{GroupEpoch, MemberEpoch, MemberId, Partition, RequestId};

use crate::{Event, Rejection};

/// Outcome of one command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The verdict.
    pub result: Result<Reply, Rejection>,
    /// What changed, in order. Empty after a rejection.
    pub events: Vec<Event>,
}

/// Positive verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To a join; also to a repeated one.
    Joined { member_epoch: MemberEpoch, ttl_ms: u64, heartbeat_interval_ms: u64 },
    /// Nothing more to say.
    Done,
    /// One verdict per partition, in the order of the command (commit, release, leave, expire).
    Verdicts(Vec<Result<(), Rejection>>),
    /// To an operator; the same to a repeated request id.
    Operated { request: RequestId, group_epoch: GroupEpoch, moves: Vec<PlannedMove> },
}

/// One partition that an operator's request moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedMove {
    pub partition: Partition,
    pub from: Option<MemberId>,
    pub to: Option<MemberId>,
}
