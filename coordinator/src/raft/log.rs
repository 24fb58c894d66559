//! The raft log, vote and entry-committed index on disk, in a write-ahead log of `raft-log`.
//!
//! A record that is incomplete at the end of the newest file, or zeros there, is cut: it was never acknowledged.
//! Anything else that does not match its checksum stops the node; cutting it could forget an acknowledged entry.

use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use openraft::entry::RaftEntry as _;
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::{OptionalSend, RaftLogReader};
use raft_log::RaftLog;
use raft_log::api::raft_log_writer::RaftLogWriter as _;
use raft_log::api::types::Types;
use tokio::sync::oneshot;

use super::effects::Disk;
use super::failure::Failure;
use super::stored::{EntryRecord, LogIdRecord, VoteRecord};
use super::types::{Entry, LogId, TypeConfig, Vote};

/// Bytes of entries kept in memory for followers that are nearly up to date.
const CACHE_BYTES: usize = 64 * 1024 * 1024;
/// Buffer for reading the log once, at start.
const REPLAY_BUFFER_BYTES: usize = 4 * 1024 * 1024;
/// Entries sent to a follower in one message have about this many bytes, or are a single entry.
const MESSAGE_BYTES: u64 = 4 * 1024 * 1024;

/// What the write-ahead log is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Records;

impl Types for Records {
    type LogId = LogIdRecord;
    type LogPayload = EntryRecord;
    type Vote = VoteRecord;
    type Callback = Durable;
    type UserData = u8;

    fn log_index(log_id: &LogIdRecord) -> u64 {
        log_id.index
    }

    fn payload_size(payload: &EntryRecord) -> u64 {
        EntryRecord::size_bytes(&payload.0)
    }
}

/// Told when a write is on disk.
pub(super) struct Durable {
    failure: Failure,
    operation: &'static str,
    waiter: Waiter,
    disk: Disk,
}

enum Waiter {
    Entries(IOFlushed<TypeConfig>),
    Caller(oneshot::Sender<io::Result<()>>),
    Nobody,
}

impl raft_log::Callback for Durable {
    fn send(self, result: io::Result<()>) {
        self.disk.clone().written(self, result);
    }
}

impl Durable {
    /// It is on disk, or will never be.
    pub(super) fn tell(self, result: io::Result<()>) {
        let result = self.failure.check(self.operation, result);
        match self.waiter {
            Waiter::Entries(flushed) => flushed.io_completed(result),
            // A caller that is gone has stopped the node.
            Waiter::Caller(sender) => drop(sender.send(result)),
            Waiter::Nobody => {}
        }
    }
}

/// Handle of the log. Clones share it.
#[derive(Clone)]
pub(crate) struct Wal {
    /// Nothing once closed.
    log: Arc<Mutex<Option<RaftLog<Records>>>>,
    failure: Failure,
    disk: Disk,
}

impl Wal {
    /// Opens or makes the log in `folder` and cuts an incomplete tail.
    ///
    /// # Errors
    ///
    /// With the file's name when a record is damaged; another error when the folder cannot be used.
    pub(crate) fn open(folder: &Path, chunk_bytes: usize, failure: Failure) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let mut config = raft_log::Config::new(folder.display());
        // The raft library already groups entries: waiting for more only adds delay.
        config.wal.flush_batch_wait = Some(Duration::ZERO);
        config.wal.chunk_max_size = Some(chunk_bytes);
        config.wal.read_buffer_size = Some(REPLAY_BUFFER_BYTES);
        config.log_cache_capacity = Some(CACHE_BYTES);
        match RaftLog::open(Arc::new(config)) {
            Ok(log) => {
                let disk = Disk::of(folder);
                Ok(Self { log: Arc::new(Mutex::new(Some(log))), failure, disk })
            }
            Err(error) => Err(name_file(folder, error)),
        }
    }

    /// Whether nothing was ever written: no entry and no vote.
    pub(crate) fn is_fresh(&self) -> io::Result<bool> {
        self.with(|log| {
            let state = log.log_state();
            state.vote().is_none() && state.last().is_none() && state.purged().is_none()
        })
    }

    /// Bytes on disk; nothing once closed.
    pub(crate) fn size_bytes(&self) -> Option<u64> {
        self.lock().as_ref().map(RaftLog::on_disk_size)
    }

    /// Gives the folder free. Every later call fails.
    pub(crate) fn close(&self) {
        let log = self.lock().take();
        drop(log);
    }

    fn lock(&self) -> MutexGuard<'_, Option<RaftLog<Records>>> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, action: impl FnOnce(&RaftLog<Records>) -> T) -> io::Result<T> {
        let guard = self.lock();
        guard.as_ref().map(action).ok_or_else(closed)
    }

    /// Writes and flushes; the waiter hears when it is on disk, or when it failed.
    fn write<T>(
        &self,
        operation: &'static str,
        sync: bool,
        waiter: Waiter,
        action: impl FnOnce(&mut RaftLog<Records>) -> io::Result<T>,
    ) -> io::Result<()> {
        self.failure.refuse()?;
        let mut guard = self.lock();
        let log = guard.as_mut().ok_or_else(closed)?;
        let (failure, disk) = (self.failure.clone(), self.disk.clone());
        let durable = Durable { failure, operation, waiter, disk };
        let written = action(log).and_then(|_segment| self.disk.flush(log, sync, durable));
        self.failure.check(operation, written)
    }

    async fn write_through<T>(
        &self,
        operation: &'static str,
        action: impl FnOnce(&mut RaftLog<Records>) -> io::Result<T>,
    ) -> io::Result<()> {
        let (sender, receiver) = oneshot::channel();
        self.write(operation, true, Waiter::Caller(sender), action)?;
        receiver.await.map_err(|_dropped| closed())?
    }

    fn read(&self, start: u64, end: u64, limit_bytes: u64) -> io::Result<Vec<Entry>> {
        let entries: io::Result<Vec<Entry>> = self.with(|log| {
            let end = end.min(Records::next_log_index(log.log_state().last()));
            let mut entries = Vec::new();
            let mut size_bytes = 0;
            for found in log.read(start, end.max(start)) {
                let (_, EntryRecord(entry)) = found?;
                size_bytes += EntryRecord::size_bytes(&entry);
                if size_bytes > limit_bytes && !entries.is_empty() {
                    break;
                }
                entries.push(entry);
            }
            Ok(entries)
        })?;
        self.failure.check("read entries", entries)
    }
}

fn closed() -> io::Error {
    io::Error::other("the raft log is closed")
}

/// Puts the name of the damaged file before an error that only has its id.
fn name_file(folder: &Path, error: io::Error) -> io::Error {
    let text = error.to_string();
    let file = files(folder).into_iter().find(|file| {
        let id = file
            .file_stem()
            .and_then(|stem| stem.to_str())
            .and_then(|stem| stem.strip_prefix("r-"));
        id.is_some_and(|id| text.contains(id))
    });
    let place = file.unwrap_or_else(|| folder.to_owned());
    io::Error::new(error.kind(), format!("{}: {text}", place.display()))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

impl RaftLogReader<TypeConfig> for Wal {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> io::Result<Vec<Entry>> {
        let start = match range.start_bound() {
            Bound::Included(index) => *index,
            Bound::Excluded(index) => index + 1,
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(index) => index + 1,
            Bound::Excluded(index) => *index,
            Bound::Unbounded => u64::MAX,
        };
        self.read(start, end, u64::MAX)
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        self.read(start, end, MESSAGE_BYTES)
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        self.with(|log| log.log_state().vote().map(|vote| vote.0))
    }
}

impl RaftLogStorage<TypeConfig> for Wal {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<TypeConfig>> {
        self.with(|log| {
            let state = log.log_state();
            LogState {
                last_purged_log_id: state.purged().map(|id| (*id).into()),
                last_log_id: state.last().map(|id| (*id).into()),
            }
        })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        self.write_through("save vote", |log| log.save_vote(VoteRecord(*vote))).await
    }

    /// Not synced: a lost one only makes the node wait for the leader's word after a restart.
    async fn save_committed(&mut self, committed: Option<LogId>) -> io::Result<()> {
        let Some(committed) = committed else { return Ok(()) };
        self.write("save entry committed", false, Waiter::Nobody, |log| {
            log.commit(committed.into())
        })
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogId>> {
        self.with(|log| log.log_state().committed().map(|id| (*id).into()))
    }

    async fn append<I>(&mut self, entries: I, flushed: IOFlushed<TypeConfig>) -> io::Result<()>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        self.write("append entries", true, Waiter::Entries(flushed), |log| {
            log.append(entries.into_iter().map(|entry| (entry.log_id().into(), EntryRecord(entry))))
        })
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> io::Result<()> {
        let next = last.map_or(0, |id| id.index + 1);
        self.write_through("truncate", |log| log.truncate(next)).await
    }

    async fn purge(&mut self, upto: LogId) -> io::Result<()> {
        self.write_through("purge", |log| log.purge(upto.into())).await
    }
}
