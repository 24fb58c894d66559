//! Protections that a control run takes away, one at a time, to see that the simulator would notice.
//!
//! Nothing of the product has a switch for this: the world rewrites what goes into the real parts, or plays its own
//! part wrongly.

/// One protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protection {
    /// The sink compares the epoch of a write with its fence.
    SinkEpoch,
    /// A commit of an offset is compared with the current grant.
    CommitEpoch,
    /// The grant is verified after the registration.
    Verify,
    /// The resume point is read after the registration.
    ResumeAfterRegister,
    /// A lease counts from the send of the heartbeat.
    LeaseFromSend,
    /// An expiry counts only in the term of the lease table that found it.
    ExpiryTerm,
    /// A snapshot keeps who is silent.
    SnapshotSilence,
    /// A release carries the final offset.
    FinalOffset,
    /// An acknowledgement counts only for the epoch that it names.
    AckEpoch,
    /// A snapshot keeps the epoch counter.
    SnapshotCounter,
}

impl Protection {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::SinkEpoch,
        Self::CommitEpoch,
        Self::Verify,
        Self::ResumeAfterRegister,
        Self::LeaseFromSend,
        Self::ExpiryTerm,
        Self::SnapshotSilence,
        Self::FinalOffset,
        Self::AckEpoch,
        Self::SnapshotCounter,
    ];

    /// Its name on the command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SinkEpoch => "sink-epoch",
            Self::CommitEpoch => "commit-epoch",
            Self::Verify => "verify",
            Self::ResumeAfterRegister => "resume-after-register",
            Self::LeaseFromSend => "lease-from-send",
            Self::ExpiryTerm => "expiry-term",
            Self::SnapshotSilence => "snapshot-silence",
            Self::FinalOffset => "final-offset",
            Self::AckEpoch => "ack-epoch",
            Self::SnapshotCounter => "snapshot-counter",
        }
    }
}
