//! What an error of Redis means.

use redis::{ErrorKind, RedisError, ServerErrorKind};
use tenure_sdk::sink::{BoxError, SinkError};

/// Codes at the head of a refusal that may pass: out of memory, too few replicas, a disk that fails, a long script,
/// a server that starts.
const PASSING: [&str; 8] =
    ["OOM", "NOREPLICAS", "MISCONF", "BUSY", "LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN"];

/// Meaning of a call that the server refused, or that never left this process: nothing was written.
pub(crate) fn classify(error: RedisError) -> SinkError {
    if error.is_io_error() || is_passing(error.code().unwrap_or_default()) {
        return transient(error);
    }
    let kind = error.kind();
    if kind == ErrorKind::Server(ServerErrorKind::NoScript) {
        return transient(error);
    }
    SinkError::Misconfigured(error.to_string())
}

/// Meaning of a command's refusal inside the script, before anything was written.
pub(crate) fn refusal(text: String) -> SinkError {
    let code = text.trim_start_matches('-').split(' ').next().unwrap_or_default();
    if is_passing(code) { transient(text) } else { SinkError::Rejected(text.into()) }
}

/// Whether the outcome is not known: it was sent, and no answer came.
pub(crate) fn is_lost(error: &RedisError) -> bool {
    error.is_io_error() || error.kind() == ErrorKind::Parse
}

/// It certainly did not happen.
pub(crate) fn transient(error: impl Into<BoxError>) -> SinkError {
    SinkError::Transient { retry_after: None, source: error.into() }
}

fn is_passing(code: &str) -> bool {
    PASSING.contains(&code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_told_from_what_the_data_did() {
        for text in ["OOM command not allowed", "-NOREPLICAS Not enough", "MISCONF Redis is"] {
            let meaning = refusal(text.into());
            assert!(matches!(meaning, SinkError::Transient { .. }), "{meaning}");
        }
        let meaning = refusal("WRONGTYPE Operation against a key".into());
        assert!(matches!(meaning, SinkError::Rejected(_)), "{meaning}");
    }
}
