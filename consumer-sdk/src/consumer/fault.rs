//! What is done about an error: try again, or give the partition back with a reason.

use std::error::Error;
use std::time::Duration;

use tenure_model::ErrorCode;

use crate::offsets::{CommitError, grant_is_over};
use crate::session::{CallError, ReleaseReason};
use crate::sink::SinkError;
use crate::source::SourceError;

/// Why a grant is given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Closing {
    pub(super) reason: ReleaseReason,
    /// For people; empty: nothing went wrong.
    pub(super) error: String,
    /// A sink said it.
    pub(super) by_sink: bool,
}

impl Closing {
    pub(super) fn new(reason: ReleaseReason, error: impl Into<String>) -> Self {
        Self { reason, error: error.into(), by_sink: false }
    }
}

/// What stands in the way of an acquire.
#[derive(Debug)]
pub(super) enum Obstacle {
    /// May pass.
    Passing { error: String, retry_after: Option<Duration> },
    /// Ends the grant.
    Final(Closing),
}

impl Obstacle {
    fn passing(error: impl ToString) -> Self {
        Self::Passing { error: error.to_string(), retry_after: None }
    }

    fn last(reason: ReleaseReason, error: impl ToString) -> Self {
        Self::Final(Closing::new(reason, error.to_string()))
    }
}

/// An error of a step that may be repeated; an unknown outcome of such a step is a reason to repeat it.
impl From<SinkError> for Obstacle {
    fn from(error: SinkError) -> Self {
        match &error {
            SinkError::Fenced { .. } => {
                let closing = Closing::new(ReleaseReason::Fenced, error.to_string());
                Self::Final(Closing { by_sink: true, ..closing })
            }
            SinkError::LeaseEnded(_) => Self::last(ReleaseReason::LeaseLost, error),
            SinkError::Transient { retry_after, .. } => {
                Self::Passing { error: error.to_string(), retry_after: *retry_after }
            }
            SinkError::Unknown(_) => Self::passing(error),
            SinkError::OffsetConflict { .. }
            | SinkError::Rejected(_)
            | SinkError::Misconfigured(_)
            | SinkError::FenceRegressed { .. } => Self::last(ReleaseReason::AcquireFailed, error),
        }
    }
}

impl From<CallError> for Obstacle {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Unknown { .. } => Self::passing(error),
            CallError::Refused(refused) => {
                let error = format!("{}: {}", refused.code, refused.message);
                if grant_is_over(refused.code) {
                    Self::last(ReleaseReason::Fenced, error)
                } else if refused.code.is_retryable() || refused.code == ErrorCode::Unknown {
                    Self::passing(error)
                } else {
                    Self::last(ReleaseReason::AcquireFailed, error)
                }
            }
        }
    }
}

impl From<SourceError> for Obstacle {
    fn from(error: SourceError) -> Self {
        match &error {
            // A partition that was just created may not be known everywhere yet.
            SourceError::Transient(_) | SourceError::UnknownPartition { .. } => {
                Self::passing(error)
            }
            SourceError::OtherTopicId { .. }
            | SourceError::OutOfRange { .. }
            | SourceError::Fatal(_) => Self::last(ReleaseReason::AcquireFailed, error),
        }
    }
}

/// Reads a handler's error: a fence or an ended lease anywhere in its chain is a quiet end.
pub(super) fn closing_of_handler_error(error: &(dyn Error + Send + Sync + 'static)) -> Closing {
    let mut link: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(current) = link {
        if let Some(sink) = current.downcast_ref::<SinkError>() {
            if let SinkError::Fenced { .. } = sink {
                let closing = Closing::new(ReleaseReason::Fenced, sink.to_string());
                return Closing { by_sink: true, ..closing };
            }
            if let SinkError::LeaseEnded(_) = sink {
                return Closing::new(ReleaseReason::LeaseLost, sink.to_string());
            }
        }
        if let Some(commit) = current.downcast_ref::<CommitError>() {
            match commit {
                CommitError::Fenced { .. } => {
                    return Closing::new(ReleaseReason::Fenced, commit.to_string());
                }
                CommitError::LeaseEnded(_) | CommitError::Released => {
                    return Closing::new(ReleaseReason::LeaseLost, commit.to_string());
                }
                CommitError::Refused { .. } | CommitError::Unknown { .. } => {}
            }
        }
        link = current.source();
    }
    Closing::new(ReleaseReason::HandlerFailed, describe(error))
}

/// An error with its causes, in one line.
fn describe(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(current) = cause {
        let more = current.to_string();
        // Many errors print their cause already.
        if !text.ends_with(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = current.source();
    }
    text
}
