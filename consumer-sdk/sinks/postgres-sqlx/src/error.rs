//! What an error of sqlx means.

use tenure_sdk::sink::{BoxError, SinkError};
use tenure_sink_postgres::Meaning;

/// Meaning of an error before COMMIT was sent: nothing was written. By its SQLSTATE, as `tenure-sink-postgres` has it;
/// without one, a connection that broke or was not to be had is `Transient`, and a value that does not fit is `Rejected`.
#[must_use]
pub fn classify(error: sqlx::Error) -> SinkError {
    if let Some(cause) = error.as_database_error() {
        let code = cause.code().unwrap_or_default().into_owned();
        return match Meaning::of(&code) {
            Meaning::Transient => transient(error),
            Meaning::Rejected => SinkError::Rejected(Box::new(error)),
            Meaning::Misconfigured => {
                SinkError::Misconfigured(format!("{} ({code})", cause.message()))
            }
        };
    }
    let is_connection = matches!(
        error,
        sqlx::Error::Io(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed
            | sqlx::Error::BeginFailed
    );
    if is_connection {
        return transient(error);
    }
    if matches!(error, sqlx::Error::Configuration(_) | sqlx::Error::Tls(_)) {
        return SinkError::Misconfigured(error.to_string());
    }
    // A value that does not fit, or a row that does not fit the question.
    SinkError::Rejected(Box::new(error))
}

/// It certainly did not happen.
pub(crate) fn transient(error: impl Into<BoxError>) -> SinkError {
    SinkError::Transient { retry_after: None, source: error.into() }
}
