//! What an error of the store means.

use object_store::Error;
use tenure_sdk::sink::{BoxError, SinkError};

/// Reads an error of a call that certainly changed nothing that counts.
pub(crate) fn classify(error: Error) -> SinkError {
    if is_final(&error) { SinkError::Misconfigured(error.to_string()) } else { transient(error) }
}

/// Whether the store refused for good: it did nothing, and would do nothing the next time.
pub(crate) const fn is_final(error: &Error) -> bool {
    matches!(
        error,
        Error::NotImplemented { .. }
            | Error::NotSupported { .. }
            | Error::PermissionDenied { .. }
            | Error::Unauthenticated { .. }
            | Error::UnknownConfigurationKey { .. }
            | Error::InvalidPath { .. }
    )
}

pub(crate) fn transient(why: impl Into<BoxError>) -> SinkError {
    SinkError::Transient { retry_after: None, source: why.into() }
}
