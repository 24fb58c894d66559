//! What is done when a handler fails.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use rand::Rng;
use tenure_model::NextOffset;

use crate::grant::Grant;
use crate::sink::BoxError;
use crate::source::Record;

/// Pauses between two runs of a failed handler: each is twice the last, up to a maximum, and cut by up to half at
/// random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// Pause after the first failure. Default 100 ms.
    pub first: Duration,
    /// Longest pause. Default 30 s.
    pub max: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_millis(100), max: Duration::from_secs(30) }
    }
}

impl Backoff {
    /// Pause after this many failures in a row.
    pub(super) fn pause(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        let pause = self.first.saturating_mul(1 << doublings).min(self.max);
        pause.mul_f64(rand::rng().random_range(0.5..=1.0))
    }
}

/// What is done when a handler fails or panics while its partition is owned. Default: no retry, [`Then::Fail`].
///
/// The handler is run again on the same grant, from the offset that the home has, with a writer and an input of its
/// own. It is run again at most `count` times in a row; once the home's offset has moved, the count starts anew. After
/// a failure the input hands out one record at a time until the records that the failed run had are passed, so that a
/// handler that commits each batch stops at the record that it fails on.
///
/// Nothing is run again once the partition is revoked, lost or shut down, after an error that says fenced, or after a
/// handler that returned `Ok` though its input had not ended.
///
/// ```
/// use std::time::Duration;
/// use tenure_sdk::consumer::{Backoff, ErrorPolicy, Then};
///
/// let policy = ErrorPolicy::retry(5, Backoff::default()).then(Then::dead_letter(|letter| async move {
///     // Keep it under letter.record.idempotency_key(): it may come again.
///     println!("{}: {}", letter.record.idempotency_key(), letter.error);
///     Ok(())
/// }));
/// # let _ = policy;
/// ```
#[derive(Clone, Debug, Default)]
pub struct ErrorPolicy {
    pub(super) retries: u32,
    pub(super) backoff: Backoff,
    pub(super) then: Then,
}

impl ErrorPolicy {
    /// Runs a failed handler again at most `count` times in a row; then [`Then::Fail`].
    #[must_use]
    pub fn retry(count: u32, backoff: Backoff) -> Self {
        Self { retries: count, backoff, then: Then::Fail }
    }

    /// What follows the last retry.
    #[must_use]
    pub fn then(self, then: Then) -> Self {
        Self { then, ..self }
    }
}

/// What follows the last retry.
#[derive(Clone, Debug, Default)]
pub enum Then {
    /// The partition is given back with the error; the coordinator grants it again, later, perhaps elsewhere.
    #[default]
    Fail,
    /// The partition stays owned and stands still, with the error shown, until it is revoked (an operator's move, a
    /// rebalance) or the process ends.
    Park,
    /// The failing record goes to a function and is skipped.
    DeadLetter(DeadLetterSink),
    /// The failing record goes to the home, in the step that moves the offset past it: see
    /// [`ConsumerBuilder::dead_letters_at_home`](super::ConsumerBuilder::dead_letters_at_home).
    DeadLetterAtHome,
}

impl Then {
    /// Hands the failing record to `sink`, and skips it once that answered `Ok`; an error or a panic of `sink` is
    /// tried again, with the policy's pauses, while the partition is owned.
    ///
    /// The failing record is the one that the handler names by [`HandlerError::failed_at`], or else the first one that
    /// the home does not have. A failure without a delivered record to blame gives the partition back, as
    /// [`Then::Fail`].
    ///
    /// With the offsets at the coordinator, the offset moves past the record only after `sink` answered. With a sink
    /// as home, it moves with the handler's next write. In both cases the same record may come again after a crash:
    /// keep it under its [idempotency key](Record::idempotency_key).
    #[must_use]
    pub fn dead_letter<F, Fut>(sink: F) -> Self
    where
        F: Fn(DeadLetter) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        Self::DeadLetter(DeadLetterSink(Arc::new(move |letter| Box::pin(sink(letter)))))
    }
}

/// Writes a dead letter with the writer of the home, and moves the offset past it.
pub(crate) type LettersAtHome<W> = std::sync::Arc<
    dyn for<'a> Fn(DeadLetter, &'a mut W) -> BoxFuture<'a, Result<(), BoxError>> + Send + Sync,
>;

type DeadLetterFn = dyn Fn(DeadLetter) -> BoxFuture<'static, Result<(), BoxError>> + Send + Sync;

/// Where failing records go. Cheap to clone.
#[derive(Clone)]
pub struct DeadLetterSink(Arc<DeadLetterFn>);

impl fmt::Debug for DeadLetterSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeadLetterSink").finish_non_exhaustive()
    }
}

impl DeadLetterSink {
    pub(super) async fn put(&self, letter: DeadLetter) -> Result<(), BoxError> {
        (self.0)(letter).await
    }
}

/// A record that its handler could not do.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    /// The record.
    pub record: Record,
    /// The last error, with its causes, in one line.
    pub error: String,
    /// How often the handler failed in a row, at least 1.
    pub attempts: u32,
    /// The grant that it failed under, for a fenced sink.
    pub grant: Grant,
}

/// Error of a handler that says more than that it failed. It counts anywhere in the chain of what the handler returns.
#[derive(Debug, thiserror::Error)]
pub enum HandlerError {
    /// One record is to blame.
    #[error("record {offset}: {source}")]
    FailedAt {
        /// Offset of the record.
        offset: NextOffset,
        /// What went wrong.
        source: BoxError,
    },
    /// Nothing is to blame: the handler is run again after a pause. Never counted as a failure.
    #[error("paused for {length:?}: {source}")]
    PauseFor {
        /// How long.
        length: Duration,
        /// What is waited for, shown to operators.
        source: BoxError,
    },
}

impl HandlerError {
    /// Blames one record.
    pub fn failed_at(record: &Record, source: impl Into<BoxError>) -> Self {
        Self::FailedAt { offset: record.offset, source: source.into() }
    }

    /// Asks to be run again after `length`, without this being a failure; `reason` is shown to operators meanwhile.
    pub fn pause_for(length: Duration, reason: impl Into<BoxError>) -> Self {
        Self::PauseFor { length, source: reason.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_maximum_and_are_cut_by_at_most_half() {
        let backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(5) };
        for (failures, longest) in [(1, 1), (2, 2), (3, 4), (4, 5), (40, 5), (u32::MAX, 5)] {
            let (pause, longest) = (backoff.pause(failures), Duration::from_secs(longest));
            assert!((longest / 2..=longest).contains(&pause), "{failures}: {pause:?}");
        }
    }
}
