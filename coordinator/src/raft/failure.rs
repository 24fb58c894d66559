//! The first failure of the disk or the machine. The node stops on it.

use std::io;
use std::sync::{Arc, OnceLock};

/// Remembers the first failure. Clones share it.
///
/// After it every write is refused and none is acknowledged: when a flush fails once, the kernel may drop the
/// dirty pages and let the next one succeed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Failure(Arc<OnceLock<String>>);

impl Failure {
    /// Passes `result` on, and turns it into a failure when there was one, now or before.
    pub(crate) fn check<T>(&self, operation: &str, result: io::Result<T>) -> io::Result<T> {
        match result {
            Ok(value) => self.refuse().map(|()| value),
            Err(error) => {
                if self.0.set(format!("{operation}: {error}")).is_ok() {
                    tracing::error!(operation, %error, "storage or state machine failed, this node stops");
                }
                Err(error)
            }
        }
    }

    /// Fails when something has failed before.
    pub(crate) fn refuse(&self) -> io::Result<()> {
        match self.0.get() {
            None => Ok(()),
            Some(first) => Err(io::Error::other(format!("stopped by an earlier failure: {first}"))),
        }
    }

    /// The first failure.
    pub(crate) fn get(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
}
