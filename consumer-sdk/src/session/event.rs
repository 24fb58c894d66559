//! What a session says and what it is told.

use tenure_model::{Epoch, ErrorCode, MemberEpoch, NextOffset, Partition, Tick, TopicName};

use crate::grant::Grant;

/// What happened to the membership or to one of its grants.
#[derive(Clone, Debug)]
pub enum SessionEvent {
    /// The member is in the group. Comes again when an expired membership is followed by a new one.
    Joined {
        /// Identity of the membership.
        member_epoch: MemberEpoch,
    },
    /// Two heartbeats in a row have no answer: every grant ends at this moment, unless one comes.
    LeaseAtRisk {
        /// End of the member's lease.
        ends_at: Tick,
    },
    /// The lease that was at risk was renewed.
    LeaseRenewed,
    /// A partition that is to come, while another still owns it: load what it will need. No grant: nothing may be
    /// registered or written for it.
    Prepare(Preparing),
    /// The partition does not come.
    PreparationEnded {
        /// The partition.
        partition: Partition,
    },
    /// A partition under a new epoch; its lease is live.
    Granted(Grant),
    /// Drain until the deadline, then release. The lease may end earlier, if heartbeats are not answered.
    Revoked {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant that ends.
        epoch: Epoch,
        /// When the coordinator may take the partition without a release.
        deadline: Tick,
    },
    /// Stop at once; nothing may be committed under this epoch any more. It needs no release: the session says it.
    Lost {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant that ended.
        epoch: Epoch,
        /// Why.
        cause: LostCause,
    },
    /// The membership is over; the last event.
    Ended {
        /// Why.
        cause: EndCause,
    },
}

/// A partition that is to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preparing {
    /// Name of the topic.
    pub topic: TopicName,
    /// The partition.
    pub partition: Partition,
    /// Whether the home of the offset certainly has one.
    pub home_initialised: bool,
    /// A hint: where the owner reads now. The resume point may be another.
    pub next_offset: Option<NextOffset>,
    /// When the move goes on without the preparation.
    pub deadline: Tick,
}

/// Why a grant ended without a drain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LostCause {
    /// The lease ran out by this process's clock.
    LeaseEnded,
    /// The coordinator or a sink knows a newer epoch.
    Fenced {
        /// The newer epoch, if it was told.
        current: Option<Epoch>,
    },
    /// The assignment does not list it any more.
    Gone,
    /// The membership ended; the text says why.
    MembershipEnded(String),
    /// The source cannot go on.
    Source(String),
    /// The handler failed.
    Handler(String),
    /// A sink cannot go on.
    Sink(String),
}

/// Why a membership is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndCause {
    /// The member left, and the coordinator said so.
    Left,
    /// The member wanted to leave, but no answer came within the deadline: the coordinator ends the membership when
    /// its ttl has passed.
    LeaveUnanswered,
    /// The coordinator refused the member for good.
    Refused {
        /// Stable code.
        code: ErrorCode,
        /// For people, with the next step.
        message: String,
    },
    /// The session's thread could not be started or ended by itself.
    Failed(String),
}

/// How far a grant has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The epoch is being registered at the sinks.
    Registering,
    /// The grant is being verified at the coordinator.
    Verifying,
    /// The resume point is being read.
    Resuming,
    /// Records are delivered.
    Running,
    /// Revoked or shutting down: what is in flight is finished.
    Draining,
}

/// How a running grant gets on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Next offset to deliver.
    pub position: NextOffset,
    /// End of the partition as the source last heard it.
    pub end_offset: Option<NextOffset>,
    /// The handler has no records in hand, and none are known to wait for it: that nothing moves is no fault.
    pub is_idle: bool,
}

/// Why a grant is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseReason {
    /// The coordinator asked for it.
    Revoked,
    /// The process shuts down.
    Shutdown,
    /// The lease ran out by this process's clock.
    LeaseLost,
    /// A sink or the coordinator refused the epoch.
    Fenced,
    /// The grant could not be acquired.
    AcquireFailed,
    /// The handler failed.
    HandlerFailed,
}
