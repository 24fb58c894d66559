//! Stable error codes.

use std::fmt;

use crate::Epoch;

/// How the error of an acquire begins that a sink stood in the way of; the sink's name follows.
pub const SINK_ERROR_PREFIX: &str = "sink ";

/// What stands before the epoch that a fence has seen, in the text of the error that says so.
pub const SEEN_EPOCH_MARK: &str = "current is ";

/// The epoch that a sink has seen, as the error of a refused acquire tells it; nothing: it is not such an error.
#[must_use]
pub fn seen_epoch(error: &str) -> Option<Epoch> {
    let said = error.strip_prefix(SINK_ERROR_PREFIX)?;
    let (_, seen) = said.rsplit_once(SEEN_EPOCH_MARK)?;
    let digits: &str = seen.strip_prefix('e')?.split(|next: char| !next.is_ascii_digit()).next()?;
    Epoch::new(digits.parse().ok()?).ok()
}

/// May the caller try again, and did anything happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryClass {
    /// Retrying the same request cannot help.
    Never,
    /// Nothing happened; the same request may be sent again after a pause.
    AfterBackoff,
    /// Nothing happened; the same request belongs to another node.
    OtherNode,
    /// It may or may not have happened; read back, or repeat only what is safe to repeat.
    Unknown,
}

macro_rules! codes {
    ($( $(#[$doc:meta])* $name:ident = $text:literal, $class:ident; )*) => {
        /// Stable code of a refusal or failure. Part of the protocol: never renamed, never reused.
        ///
        /// `docs/errors.md` has a section for each.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum ErrorCode {
            $( $(#[$doc])* $name, )*
        }

        impl ErrorCode {
            /// Every code, in order.
            pub const ALL: &[Self] = &[$( Self::$name, )*];

            /// The text that goes over the wire.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $( Self::$name => $text, )* }
            }

            /// Whether and where the request may be sent again.
            #[must_use]
            pub const fn retry_class(self) -> RetryClass {
                match self { $( Self::$name => RetryClass::$class, )* }
            }

            /// Reads a code; nothing when this version does not know it.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                match text { $( $text => Some(Self::$name), )* _ => None }
            }
        }
    };
}

codes! {
    /// A newer epoch exists. The caller lost the partition and must stop writing to it.
    Fenced = "FENCED", Never;
    /// The partition has no owner, or never had one. Refresh the assignment.
    NotOwned = "NOT_OWNED", Never;
    /// The group does not exist.
    UnknownGroup = "UNKNOWN_GROUP", Never;
    /// The member does not exist; it never joined, or it left or expired.
    UnknownMember = "UNKNOWN_MEMBER", Never;
    /// The member id was used by a membership that has ended. Join under a new id.
    MemberGone = "MEMBER_GONE", Never;
    /// The member epoch is of another membership.
    StaleMember = "STALE_MEMBER", Never;
    /// Another live process has this instance id.
    InstanceInUse = "INSTANCE_IN_USE", Never;
    /// An earlier process with this instance id is not heard, but its lease has not ended yet.
    InstanceWaits = "INSTANCE_WAITS", AfterBackoff;
    /// The group does not know the topic or the partition.
    UnknownPartition = "UNKNOWN_PARTITION", Never;
    /// The join contradicts the group's settings.
    SettingsConflict = "SETTINGS_CONFLICT", Never;
    /// An offset would move back without a named rewind.
    OffsetRegressed = "OFFSET_REGRESSED", Never;
    /// A later commit of the same grant is already in.
    StaleCommit = "STALE_COMMIT", Never;
    /// The group's offsets live elsewhere.
    WrongHome = "WRONG_HOME", Never;
    /// The home was initialised before; the start is set once.
    HomeInitialised = "HOME_INITIALISED", Never;
    /// The target was computed for an earlier group epoch.
    StaleTarget = "STALE_TARGET", Never;
    /// The command belongs to an earlier raft term.
    StaleTerm = "STALE_TERM", Never;
    /// The epoch asked for is not the one that is in this state now.
    NothingToDo = "NOTHING_TO_DO", Never;
    /// A limit would be passed.
    LimitReached = "LIMIT_REACHED", Never;
    /// The epoch counter is used up or a floor is demanded.
    EpochExhausted = "EPOCH_EXHAUSTED", Never;
    /// The past that was asked for is forgotten. List the present, and watch from there.
    Compacted = "COMPACTED", Never;
    /// The watcher let messages pile up and was cut. Resume after the last revision that was seen whole.
    SlowWatcher = "SLOW_WATCHER", AfterBackoff;
    /// The request is malformed; the message names the field.
    InvalidArgument = "INVALID_ARGUMENT", Never;
    /// The request is larger than allowed.
    TooLarge = "TOO_LARGE", Never;
    /// The operation is not known to this version, or to the cluster's feature level.
    Unsupported = "UNSUPPORTED", Never;
    /// Another node is the raft leader; the answer carries its address.
    NotLeader = "NOT_LEADER", OtherNode;
    /// There is no raft leader at the moment.
    NoLeader = "NO_LEADER", AfterBackoff;
    /// The node has more work than it takes in.
    Overloaded = "OVERLOADED", AfterBackoff;
    /// The node is shutting down.
    ShuttingDown = "SHUTTING_DOWN", OtherNode;
    /// No answer in time; it may or may not have happened.
    Unknown = "UNKNOWN", Unknown;
    /// A bug or a failed disk on the node; its log has the details.
    Internal = "INTERNAL", Unknown;
}

impl ErrorCode {
    /// Whether sending the same request again may succeed.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        match self.retry_class() {
            RetryClass::AfterBackoff | RetryClass::OtherNode => true,
            RetryClass::Never | RetryClass::Unknown => false,
        }
    }

    /// Whether it is certain that nothing happened.
    #[must_use]
    pub const fn has_no_side_effects(self) -> bool {
        match self.retry_class() {
            RetryClass::Never | RetryClass::AfterBackoff | RetryClass::OtherNode => true,
            RetryClass::Unknown => false,
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epoch_that_a_sink_has_seen_is_read_from_its_error_and_from_no_other() {
        let seen = |text| seen_epoch(text).map(Epoch::get);
        assert_eq!(
            seen("sink rows: fenced: given e1, current is e40001: stop writing"),
            Some(40_001)
        );
        assert_eq!(
            seen("sink current is e5: fenced: given e1, current is e7"),
            Some(7),
            "the last"
        );
        for other in [
            "fenced: given e1, current is e40001: stop writing",
            "verify: current is e9",
            "sink rows: fenced: given e1, current is not known: stop writing",
            "sink rows: current is e",
            "sink rows: current is e99999999999999999999",
            "sink rows: connection refused",
        ] {
            assert_eq!(seen(other), None, "{other}");
        }
    }

    #[test]
    fn every_code_reads_back_what_it_prints() {
        for code in ErrorCode::ALL {
            assert_eq!(ErrorCode::parse(code.as_str()), Some(*code));
        }
        assert_eq!(ErrorCode::parse("FENCED_"), None);
    }
}
