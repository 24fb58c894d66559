//! Disks that forget: what was written and not synced is lost when the node falls.
//!
//! The write-ahead log writes its real files. A sync takes simulated time; until it is over, the bytes behind the last
//! sync are only written. A fall cuts each file somewhere between the two, in the middle of a record as well.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use openraft::{AsyncRuntime as _, Instant as _};
use openraft_rt_sim::{SimInstant, SimRuntime};
use raft_log::RaftLog;
use raft_log::api::raft_log_writer::RaftLogWriter as _;

use super::Rng;
use super::log::{Durable, Records};

/// The thread that writes is waited for no longer than this, of real time.
const WRITER_WAIT: Duration = Duration::from_secs(60);

thread_local! {
    /// Disks of the run on this thread, by folder.
    static DISKS: RefCell<BTreeMap<PathBuf, Disk>> = const { RefCell::new(BTreeMap::new()) };
}

type Written = (Durable, io::Result<()>);

/// The disk of one node, from one start to its fall.
#[derive(Clone)]
pub(super) struct Disk(Arc<Shared>);

struct Shared {
    folder: PathBuf,
    written: Mutex<Sender<Written>>,
    returned: Mutex<Receiver<Written>>,
    state: Mutex<State>,
}

struct State {
    /// Bytes of each file that survive a fall.
    synced: BTreeMap<PathBuf, u64>,
    busy_until: SimInstant,
    has_fallen: bool,
    rng: Rng,
    /// How many milliseconds a sync takes at most, beyond the usual.
    stall_ms: u64,
    /// A protection removed: writes are acknowledged before they are synced.
    acknowledges_early: bool,
}

impl Disk {
    /// Puts a disk under `folder`, for the log that is opened there next.
    pub(super) fn insert(folder: &Path, rng: Rng, acknowledges_early: bool) -> Self {
        let (written, returned) = channel();
        let disk = Self(Arc::new(Shared {
            folder: folder.to_owned(),
            written: Mutex::new(written),
            returned: Mutex::new(returned),
            state: Mutex::new(State {
                synced: BTreeMap::new(),
                busy_until: SimInstant::now(),
                has_fallen: false,
                rng,
                stall_ms: 0,
                acknowledges_early,
            }),
        }));
        DISKS.with_borrow_mut(|disks| disks.insert(folder.to_owned(), disk.clone()));
        disk
    }

    /// The disk under `folder`; what is there at this moment is synced.
    pub(super) fn of(folder: &Path) -> Self {
        let disk = DISKS.with_borrow(|disks| disks[folder].clone());
        disk.state().synced = lengths(folder);
        disk
    }

    /// The run on this thread is over.
    pub(super) fn forget_all() {
        DISKS.with_borrow_mut(BTreeMap::clear);
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Syncs take up to so much longer from now on.
    pub(super) fn stall(&self, stall_ms: u64) {
        self.state().stall_ms = stall_ms;
    }

    pub(super) fn flush(
        &self,
        log: &mut RaftLog<Records>,
        sync: bool,
        durable: Durable,
    ) -> io::Result<()> {
        log.flush(false, Some(durable))?;
        // The writing thread is waited for: whatever it does happens at this moment of simulated time.
        let returned = self.0.returned.lock().unwrap_or_else(PoisonError::into_inner);
        let (durable, result) = returned.recv_timeout(WRITER_WAIT).map_err(io::Error::other)?;
        drop(returned);
        if !sync {
            durable.tell(result);
            return Ok(());
        }
        let written = lengths(&self.0.folder);
        let mut state = self.state();
        let mut micros = state.rng.within(50, 3_000);
        let stall_ms = state.stall_ms;
        micros += state.rng.within(0, stall_ms * 1_000);
        let done_at = state.busy_until.max(SimInstant::now() + Duration::from_micros(micros));
        state.busy_until = done_at;
        let early = state.acknowledges_early;
        drop(state);
        let mut waiting = Some((durable, result));
        if early && let Some((durable, result)) = waiting.take() {
            durable.tell(result);
        }
        let disk = self.clone();
        SimRuntime::spawn(async move {
            SimRuntime::sleep_until(done_at).await;
            let mut state = disk.state();
            if state.has_fallen {
                return;
            }
            state.synced = written;
            drop(state);
            if let Some((durable, result)) = waiting {
                durable.tell(result);
            }
        });
        Ok(())
    }

    pub(super) fn written(&self, durable: Durable, result: io::Result<()>) {
        let sender = self.0.written.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // Nobody listens to a disk that has fallen.
        let _returned = sender.send((durable, result));
    }

    /// Nothing is synced or told any more.
    pub(super) fn fall(&self) {
        self.state().has_fallen = true;
    }

    /// Loses what was not synced. The log must be closed. Gives how many bytes were lost.
    pub(super) fn lose(&self) -> u64 {
        let mut state = self.state();
        let synced = state.synced.clone();
        let mut lost = 0;
        for (file, length) in lengths(&self.0.folder) {
            let path = self.0.folder.join(&file);
            match synced.get(&file) {
                // Its name in the folder was not synced either.
                None => {
                    fs::remove_file(&path).expect("a file of this run");
                    lost += length;
                }
                Some(kept) => {
                    let kept = state.rng.within(*kept, length);
                    let opened = fs::OpenOptions::new().write(true).open(&path);
                    opened.and_then(|file| file.set_len(kept)).expect("a file of this run");
                    lost += length - kept;
                }
            }
        }
        lost
    }
}

fn lengths(folder: &Path) -> BTreeMap<PathBuf, u64> {
    let entries = fs::read_dir(folder).expect("the folder of this run").map(|entry| {
        let entry = entry.expect("an entry of the folder");
        let length = entry.metadata().expect("a file of this run").len();
        (PathBuf::from(entry.file_name()), length)
    });
    entries.filter(|(name, _)| name.extension().is_some_and(|found| found == "wal")).collect()
}

/// Runs it here and now: it takes no simulated time.
pub(super) async fn blocking<T: Send + 'static>(
    action: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    action()
}
