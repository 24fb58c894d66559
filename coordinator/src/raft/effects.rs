//! What reaches out of the log and the machine: flushes and blocking work. The simulation has one of its own.

use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use raft_log::RaftLog;
use raft_log::api::raft_log_writer::RaftLogWriter as _;

use super::log::{Durable, Records};
use crate::in_place::{is_in_place, off_thread};

/// The disk of one log.
#[derive(Clone)]
pub(super) struct Disk {
    /// Nothing unless the thread that writes is waited for.
    waited: Option<Arc<Waited>>,
}

type Written = (Durable, io::Result<()>);

struct Waited {
    written: Mutex<Sender<Written>>,
    returned: Mutex<Receiver<Written>>,
}

impl Waited {
    fn new() -> Arc<Self> {
        let (written, returned) = channel();
        Arc::new(Self { written: Mutex::new(written), returned: Mutex::new(returned) })
    }
}

impl Disk {
    /// The disk under `folder`.
    pub(super) fn of(_folder: &Path) -> Self {
        Self { waited: is_in_place().then(Waited::new) }
    }

    /// Writes what is pending. `durable` hears once it is on disk, or once it is written where no sync is asked for.
    pub(super) fn flush(
        &self,
        log: &mut RaftLog<Records>,
        sync: bool,
        durable: Durable,
    ) -> io::Result<()> {
        log.flush(sync, Some(durable))?;
        if let Some(waited) = &self.waited {
            let returned = waited.returned.lock().unwrap_or_else(PoisonError::into_inner);
            let (durable, result) = returned.recv().map_err(io::Error::other)?;
            durable.tell(result);
        }
        Ok(())
    }

    /// Told by the thread that has written.
    pub(super) fn written(&self, durable: Durable, result: io::Result<()>) {
        let Some(waited) = &self.waited else { return durable.tell(result) };
        let written = waited.written.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody waits once the log is closed.
        let _sent = written.send((durable, result));
    }
}

/// Runs what blocks away from the runtime's threads.
pub(super) async fn blocking<T: Send + 'static>(
    action: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    off_thread(action).await?
}
