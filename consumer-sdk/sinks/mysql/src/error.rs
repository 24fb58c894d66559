//! What an error of MySQL or MariaDB means.

use sqlx::mysql::MySqlDatabaseError;
use tenure_sdk::sink::{BoxError, SinkError};

/// A key is there already.
pub(crate) const DUPLICATE_KEY: u16 = 1062;

/// Meaning of an error before COMMIT was sent: nothing was written, once the transaction is rolled back.
///
/// | Number | Meaning |
/// |---|---|
/// | 1205 (lock wait), 1213 (deadlock), 1969, 3024 (statement took too long), 1317, 1927, 4031 (ended by the server), 1040, 1203, 1226 (too many connections), 1053 (shutdown), 1021, 1037, 1038, 1041, 1114, 1206 (out of something), 1047, 3101 (cluster), 1180, 1181, 1158 to 1161; no number: the connection broke | `Transient` |
/// | SQLSTATE 22xxx, 23xxx, 45000; 1153 (packet too large), 1265, 1364, 1366, 3819, 4025 | `Rejected` |
/// | everything else: 1146 (no such table), 1054, 1064, 1044, 1045, 1142, 1290 and 1836 (read-only), 1305 | `Misconfigured` |
#[must_use]
pub fn classify(error: sqlx::Error) -> SinkError {
    if let Some(cause) = database_error(&error) {
        return match meaning(cause.number(), cause.code().unwrap_or_default()) {
            Meaning::Transient => transient(error),
            Meaning::Rejected => SinkError::Rejected(Box::new(error)),
            Meaning::Misconfigured => {
                SinkError::Misconfigured(format!("{} ({})", cause.message(), cause.number()))
            }
        };
    }
    if let sqlx::Error::Configuration(cause) = &error {
        return SinkError::Misconfigured(cause.to_string());
    }
    let broke = matches!(
        error,
        sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed
    );
    if broke {
        return transient(error);
    }
    // A value that does not fit, or a row that does not fit the question.
    SinkError::Rejected(Box::new(error))
}

/// It certainly did not happen.
pub(crate) fn transient(error: impl Into<BoxError>) -> SinkError {
    SinkError::Transient { retry_after: None, source: error.into() }
}

/// Number of the server's error.
pub(crate) fn number(error: &sqlx::Error) -> Option<u16> {
    database_error(error).map(MySqlDatabaseError::number)
}

fn database_error(error: &sqlx::Error) -> Option<&MySqlDatabaseError> {
    error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>()
}

#[derive(Debug, PartialEq, Eq)]
enum Meaning {
    Transient,
    Rejected,
    Misconfigured,
}

fn meaning(number: u16, state: &str) -> Meaning {
    match (number, state.get(..2).unwrap_or_default()) {
        (
            1021
            | 1037
            | 1038
            | 1040
            | 1041
            | 1047
            | 1053
            | 1114
            | 1158..=1161
            | 1180
            | 1181
            | 1203
            | 1205
            | 1206
            | 1213
            | 1226
            | 1317
            | 1927
            | 1969
            | 3024
            | 3101
            | 4031,
            _,
        ) => Meaning::Transient,
        (1153 | 1265 | 1364 | 1366 | 3819 | 4025, _) | (_, "22" | "23" | "45") => Meaning::Rejected,
        _ => Meaning::Misconfigured,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_told_from_what_someone_must_look_at() {
        for (number, state, expected) in [
            (1205, "HY000", Meaning::Transient),
            (1213, "40001", Meaning::Transient),
            (1969, "70100", Meaning::Transient),
            (1062, "23000", Meaning::Rejected),
            (1406, "22001", Meaning::Rejected),
            (1644, "45000", Meaning::Rejected),
            (1146, "42S02", Meaning::Misconfigured),
            (1045, "28000", Meaning::Misconfigured),
            (1836, "HY000", Meaning::Misconfigured),
            (1305, "42000", Meaning::Misconfigured),
        ] {
            assert_eq!(meaning(number, state), expected, "{number}");
        }
    }
}
