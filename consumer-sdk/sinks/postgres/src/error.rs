//! What an error of PostgreSQL means.

use tenure_sdk::sink::{BoxError, SinkError};

/// Meaning of an error before COMMIT was sent: nothing was written.
///
/// | SQLSTATE | Meaning |
/// |---|---|
/// | 40001, 40P01, 55P03, 57014, 25P03, 53xxx, 57P0x, 58xxx, 08xxx; no SQLSTATE: the connection broke | `Transient` |
/// | 22xxx, 23xxx, 25P02, P0001 (raised by a function of the database) | `Rejected` |
/// | everything else: 42P01 (no such table), 25006 (a replica), 28xxx, 3D000, TN001, TN002 | `Misconfigured` |
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
    match (code.code(), code.code().get(..2).unwrap_or_default()) {
        ("40001" | "40P01" | "55P03" | "57014" | "25P03", _) | (_, "08" | "53" | "57" | "58") => {
            transient(error)
        }
        ("25P02" | "P0001", _) | (_, "22" | "23") => SinkError::Rejected(Box::new(error)),
        _ => SinkError::Misconfigured(describe(&error)),
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
