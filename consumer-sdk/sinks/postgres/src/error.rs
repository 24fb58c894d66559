//! What an error of PostgreSQL means.

use tenure_sdk::sink::{BoxError, SinkError};

use crate::sqlstate::Meaning;

/// Meaning of an error before COMMIT was sent: nothing was written. By [`Meaning`]; without a SQLSTATE, a connection that
/// broke is `Transient`.
#[must_use]
pub fn classify(error: tokio_postgres::Error) -> SinkError {
    let Some(code) = error.code() else {
        return if error.is_closed() || is_connection(&error) {
            transient(error)
        } else {
            // A parameter that does not fit its column's type, or a row that does not fit the question.
            SinkError::Rejected(Box::new(error))
        };
    };
    match Meaning::of(code.code()) {
        Meaning::Transient => transient(error),
        Meaning::Rejected => SinkError::Rejected(Box::new(error)),
        Meaning::Misconfigured => SinkError::Misconfigured(describe(&error)),
    }
}

/// Meaning of an error while a connection was made: the server may come back.
pub(crate) fn transient(error: impl Into<BoxError>) -> SinkError {
    SinkError::Transient { retry_after: None, source: error.into() }
}

/// Meaning of an error of the pool.
pub(crate) fn no_connection(error: deadpool_postgres::PoolError) -> SinkError {
    match error {
        deadpool_postgres::PoolError::Backend(cause) if cause.code().is_some() => classify(cause),
        deadpool_postgres::PoolError::Backend(cause) => transient(cause),
        deadpool_postgres::PoolError::Timeout(_)
        | deadpool_postgres::PoolError::Closed
        | deadpool_postgres::PoolError::NoRuntimeSpecified
        | deadpool_postgres::PoolError::PostCreateHook(_) => transient(error),
    }
}

fn is_connection(error: &tokio_postgres::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(found) = cause {
        if found.is::<std::io::Error>() {
            return true;
        }
        cause = found.source();
    }
    false
}

/// The server's own words: the driver's text is only `db error`.
fn describe(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(cause) => format!("{} ({})", cause.message(), cause.code().code()),
        None => error.to_string(),
    }
}
