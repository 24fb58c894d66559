//! What an error of SQLite means.

use rusqlite::ErrorCode as Code;
use tenure_sdk::sink::SinkError;

/// Meaning of an error before COMMIT was sent: nothing was written.
///
/// What is not named is wrong until someone changes it; a statement that does not parse or names a missing table comes
/// as `Unknown`.
#[allow(clippy::wildcard_enum_match_arm, reason = "the driver's enum, which grows")]
pub(crate) fn classify(error: rusqlite::Error) -> SinkError {
    let Some(code) = error.sqlite_error_code() else {
        return SinkError::Rejected(Box::new(error));
    };
    match code {
        Code::ConstraintViolation | Code::TypeMismatch | Code::TooBig => {
            SinkError::Rejected(Box::new(error))
        }
        Code::DatabaseBusy
        | Code::DatabaseLocked
        | Code::DiskFull
        | Code::OutOfMemory
        | Code::SystemIoFailure
        | Code::OperationInterrupted
        | Code::OperationAborted
        | Code::FileLockingProtocolFailed
        | Code::SchemaChanged => {
            SinkError::Transient { retry_after: None, source: Box::new(error) }
        }
        _ => SinkError::Misconfigured(error.to_string()),
    }
}

pub(crate) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(Code::DatabaseBusy | Code::DatabaseLocked))
}
