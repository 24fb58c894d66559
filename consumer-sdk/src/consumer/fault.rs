//! What is done about an error: try again, or give the partition back with a reason.

use std::any::Any;
use std::error::Error;
use std::time::Duration;

use tenure_model::{ErrorCode, NextOffset};

use super::policy::HandlerError;
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
    /// Nobody else could do better: the partition is kept and stands still, until the cause is gone.
    pub(super) freezes: bool,
}

impl Closing {
    pub(super) fn new(reason: ReleaseReason, error: impl Into<String>) -> Self {
        Self { reason, error: error.into(), by_sink: false, freezes: false }
    }

    /// The partition stands still where it is.
    pub(super) fn frozen(error: impl Into<String>) -> Self {
        Self { freezes: true, ..Self::new(ReleaseReason::AcquireFailed, error) }
    }
}

/// A handler's failure that does not end its grant by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) error: String,
    /// The record that the handler blames.
    pub(super) failed_at: Option<NextOffset>,
    /// Not a failure at all: the handler asks to be run again after this.
    pub(super) pause: Option<Duration>,
}

impl Failure {
    pub(super) fn new(error: String) -> Self {
        Self { error, failed_at: None, pause: None }
    }

    /// The end of a grant that does not survive it.
    pub(super) fn closing(&self) -> Closing {
        Closing::new(ReleaseReason::HandlerFailed, self.error.clone())
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
            // Whoever owns it finds the same: moving it on would only make noise.
            SourceError::OtherTopicId { .. }
            | SourceError::OutOfRange { .. }
            | SourceError::Truncated { .. } => Self::Final(Closing::frozen(error.to_string())),
            SourceError::Fatal(_) => Self::last(ReleaseReason::AcquireFailed, error),
        }
    }
}

/// Reads a handler's error: a fence or an ended lease anywhere in its chain is a quiet end of the grant.
pub(super) fn read_handler_error(
    error: &(dyn Error + Send + Sync + 'static),
) -> Result<Failure, Closing> {
    let mut failure = Failure::new(describe(error));
    let mut link: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(current) = link {
        if let Some(sink) = current.downcast_ref::<SinkError>() {
            if let SinkError::Fenced { .. } = sink {
                let closing = Closing::new(ReleaseReason::Fenced, sink.to_string());
                return Err(Closing { by_sink: true, ..closing });
            }
            if let SinkError::LeaseEnded(_) = sink {
                return Err(Closing::new(ReleaseReason::LeaseLost, sink.to_string()));
            }
        }
        if let Some(commit) = current.downcast_ref::<CommitError>() {
            match commit {
                CommitError::Fenced { .. } => {
                    return Err(Closing::new(ReleaseReason::Fenced, commit.to_string()));
                }
                CommitError::LeaseEnded(_) | CommitError::Released => {
                    return Err(Closing::new(ReleaseReason::LeaseLost, commit.to_string()));
                }
                CommitError::Refused { .. } | CommitError::Unknown { .. } => {}
            }
        }
        match current.downcast_ref::<HandlerError>() {
            Some(HandlerError::FailedAt { offset, .. }) => failure.failed_at = Some(*offset),
            Some(HandlerError::PauseFor { length, .. }) => failure.pause = Some(*length),
            None => {}
        }
        link = current.source();
    }
    Ok(failure)
}

/// What a panic said.
pub(super) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panicked: {}", text.as_deref().unwrap_or("no text"))
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
