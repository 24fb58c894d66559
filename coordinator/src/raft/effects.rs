//! What reaches out of the log and the machine: flushes and blocking work. The simulation has one of its own.

use std::io;
use std::path::Path;

use raft_log::RaftLog;
use raft_log::api::raft_log_writer::RaftLogWriter as _;

use super::log::{Durable, Records};

/// The disk of one log.
#[derive(Clone)]
pub(super) struct Disk;

impl Disk {
    /// The disk under `folder`.
    pub(super) const fn of(_folder: &Path) -> Self {
        Self
    }

    /// Writes what is pending. `durable` hears once it is on disk, or once it is written where no sync is asked for.
    pub(super) fn flush(
        &self,
        log: &mut RaftLog<Records>,
        sync: bool,
        durable: Durable,
    ) -> io::Result<()> {
        log.flush(sync, Some(durable))
    }

    /// Told by the thread that has written.
    pub(super) fn written(&self, durable: Durable, result: io::Result<()>) {
        durable.tell(result);
    }
}

/// Runs what blocks away from the runtime's threads.
pub(super) async fn blocking<T: Send + 'static>(
    action: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(action).await.map_err(io::Error::other)?
}
