//! Offsets whose home is the coordinator.
//!
//! The handler says which records are done, in any order; the low-water mark (everything before it is done) is
//! committed behind its back, one commit in flight per partition, the newest mark next. With a sink that only fences,
//! this home is *at least once*: what was done and not yet committed is done again by the next owner.

mod delivered;
mod mirror;
mod tracker;

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use dashmap::DashMap;
use tenure_model::limits::METADATA_BYTES_MAX;
use tenure_model::{CommitSequence, Epoch, ErrorCode, Home, NextOffset, Partition, RequestId};

pub use self::mirror::{MirroredOffset, OffsetMirror};
pub(crate) use self::tracker::{Tracker, grant_is_over};
use crate::consumer::{Counters, HandlerError, Link, OffsetMark};
use crate::grant::Grant;
use crate::lease::LeaseEnded;
use crate::sink::{
    Capabilities, Enforcement, FencedSink, FencedWriter, Registered, Resolved, Scope, SinkError,
    Takeover, Verified,
};
use crate::source::Record;

/// Records of one partition that may be delivered and not done at the same time; then the input waits.
pub const UNDONE_RECORDS_MAX: usize = 100_000;

/// Shortest time between two commits of one partition, unless it is flushed. Default of the setting.
pub const COMMIT_INTERVAL: Duration = Duration::from_millis(100);

/// Why an offset was not committed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// The coordinator refused it: a newer epoch exists, or the grant is over. Retrying cannot help.
    #[error("offset commit fenced: given {ours}, current is {}: stop working on the partition",
        current.map_or_else(|| "not known".to_owned(), |epoch| epoch.to_string()))]
    Fenced {
        /// Epoch of the writer.
        ours: Epoch,
        /// Epoch at the coordinator, if it said so.
        current: Option<Epoch>,
    },
    /// This process refused it: its lease has ended, nothing was sent.
    #[error(transparent)]
    LeaseEnded(#[from] LeaseEnded),
    /// The coordinator refused it for another reason; the code says whether anything can help.
    #[error("offset commit refused: {code}: {message}")]
    Refused {
        /// Stable code.
        code: ErrorCode,
        /// For people.
        message: String,
    },
    /// It may or may not be in: no answer came before the lease ended. The next owner resumes from what is in.
    #[error("outcome of the offset commit is unknown: {last}")]
    Unknown {
        /// What the last attempt said.
        last: String,
    },
    /// The partition was released; nothing is committed under this grant any more.
    #[error("the partition was released: nothing was sent")]
    Released,
}

/// More metadata than an offset may carry. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("offset metadata has {given_bytes} bytes: use at most {METADATA_BYTES_MAX}")]
pub struct MetadataTooLarge {
    /// What was given.
    pub given_bytes: usize,
}

impl From<CommitError> for SinkError {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::Fenced { ours, current } => Self::Fenced { ours, seen: current },
            CommitError::LeaseEnded(ended) => Self::LeaseEnded(ended),
            CommitError::Refused { .. } => Self::Misconfigured(error.to_string()),
            CommitError::Unknown { .. } => Self::Unknown(Box::new(error)),
            CommitError::Released => Self::LeaseEnded(LeaseEnded),
        }
    }
}

/// Home of the offsets at the coordinator. Cheap to clone; the builder makes it.
#[derive(Clone)]
pub struct CoordinatorOffsets {
    shared: Arc<Shared>,
}

struct Shared {
    link: RwLock<Option<Arc<dyn Link>>>,
    /// Written by the task of each grant, read by it and by the run loop.
    trackers: DashMap<(Partition, Epoch), Arc<Tracker>>,
    /// Everything before it was done by this process, under grants that are over.
    done: DashMap<Partition, NextOffset>,
    counters: Arc<Counters>,
    commit_interval: Duration,
    mirror: RwLock<Option<Arc<dyn OffsetMirror>>>,
}

impl fmt::Debug for CoordinatorOffsets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoordinatorOffsets")
            .field("partitions", &self.shared.trackers.len())
            .finish_non_exhaustive()
    }
}

impl CoordinatorOffsets {
    pub(crate) fn new(counters: Arc<Counters>, commit_interval: Duration) -> Self {
        let shared = Shared {
            link: RwLock::new(None),
            trackers: DashMap::new(),
            done: DashMap::new(),
            counters,
            commit_interval,
            mirror: RwLock::new(None),
        };
        Self { shared: Arc::new(shared) }
    }

    pub(crate) fn set_mirror(&self, mirror: Option<Arc<dyn OffsetMirror>>) {
        *self.shared.mirror.write().unwrap_or_else(PoisonError::into_inner) = mirror;
    }

    pub(crate) fn bind(&self, link: Arc<dyn Link>) {
        *self.shared.link.write().unwrap_or_else(PoisonError::into_inner) = Some(link);
    }

    /// Ends all commits: the run is over, and may have been dropped in the middle of its grants.
    pub(crate) fn unbind(&self) {
        *self.shared.link.write().unwrap_or_else(PoisonError::into_inner) = None;
        for tracker in &self.shared.trackers {
            tracker.close();
        }
        self.shared.trackers.clear();
    }

    /// The tracker of a grant; nothing when the home is elsewhere.
    pub(crate) fn tracker(&self, partition: Partition, epoch: Epoch) -> Option<Arc<Tracker>> {
        self.shared.trackers.get(&(partition, epoch)).map(|tracker| Arc::clone(&tracker))
    }

    /// Ends a grant's commits for good.
    pub(crate) fn forget(&self, partition: Partition, epoch: Epoch) {
        if let Some((_, tracker)) = self.shared.trackers.remove(&(partition, epoch)) {
            tracker.close();
            if let Some(low_water) = tracker.low_water() {
                let mut done = self.shared.done.entry(partition).or_insert(low_water);
                *done = low_water.max(*done);
            }
        }
    }

    /// Everything before it was done by this process under grants that are over.
    pub(crate) fn done_before(&self, partition: Partition) -> NextOffset {
        self.shared.done.get(&partition).map_or(NextOffset::ZERO, |done| *done)
    }
}

impl FencedSink for CoordinatorOffsets {
    type Writer = OffsetWriter;

    fn name(&self) -> &str {
        "coordinator"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            scope: Scope::Partition,
            home: Home::Coordinator,
            enforcement: Enforcement::Resource,
            takeover: Takeover::Bounded(Duration::ZERO),
        }
    }

    /// Sends nothing: the grant itself was the registration at the coordinator.
    async fn register(&self, grant: &Grant) -> Result<Registered<OffsetWriter>, SinkError> {
        let link = self.shared.link.read().unwrap_or_else(PoisonError::into_inner).clone();
        let link = link.ok_or_else(|| {
            SinkError::Misconfigured("the consumer is not running: call Consumer::run".to_owned())
        })?;
        // A failed handler is run again on the same grant: its commits go on in the sequence of the epoch.
        let before = self.tracker(grant.partition, grant.epoch);
        let sequence = before.as_ref().map_or(CommitSequence(0), |before| before.state().sequence);
        let tracker = Arc::new(Tracker::new(
            grant.clone(),
            link,
            Arc::clone(&self.shared.counters),
            self.shared.commit_interval,
            sequence,
            self.shared.mirror.read().unwrap_or_else(PoisonError::into_inner).clone(),
        ));
        let key = (grant.partition, grant.epoch);
        self.shared.trackers.insert(key, Arc::clone(&tracker));
        if let Some(before) = before {
            if before.state().rewound {
                // Wanted.
                self.shared.done.remove(&grant.partition);
            }
            before.close();
        }
        Ok(Registered { writer: OffsetWriter { tracker }, displaced: None })
    }
}

/// Offsets of one owned partition whose home is the coordinator.
///
/// [`OffsetWriter::done`] is all that a handler needs; marks are committed in the background, at the latest when the
/// partition is given back.
pub struct OffsetWriter {
    tracker: Arc<Tracker>,
}

impl fmt::Debug for OffsetWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OffsetWriter")
            .field("partition", &self.tracker.grant.partition)
            .field("epoch", &self.tracker.grant.epoch)
            .field("low_water", &self.low_water())
            .finish_non_exhaustive()
    }
}

impl OffsetWriter {
    /// Marks a delivered record as done, in any order. A record of another partition, one that was not delivered, and
    /// any record after the partition was given back change nothing.
    pub fn done(&mut self, record: &Record) {
        self.tracker.done(record.partition, record.offset);
    }

    /// Marks every delivered record before `next` as done.
    pub fn done_before(&mut self, next: NextOffset) {
        self.tracker.done_before(next);
    }

    /// Moves the offset to `to`, also back, and has the handler run again from there: return what this answers.
    ///
    /// `name` makes it happen once. A handler that finds the same reason again, after a crash or a move, rewinds under
    /// the same name and nothing happens: its offset stays where it has come to since.
    ///
    /// ```no_run
    /// # use tenure_sdk::{OffsetWriter, model::{NextOffset, RequestId}};
    /// # async fn example(offsets: OffsetWriter) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// let again = RequestId::new("prices-were-wrong-2026-11")?;
    /// Err(offsets.rewind(NextOffset::ZERO, &again).await?.into())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`OffsetWriter::flush`].
    pub async fn rewind(
        self,
        to: NextOffset,
        name: &RequestId,
    ) -> Result<HandlerError, CommitError> {
        self.tracker.rewind(to, name).await?;
        Ok(HandlerError::pause_for(Duration::ZERO, format!("rewound to {to} as {name}")))
    }

    /// Moves the position forward without a record, for sources that have none.
    pub(crate) fn move_to(&mut self, next: NextOffset) {
        self.tracker.move_to(next);
    }

    /// Everything before it is done.
    #[must_use]
    pub fn low_water(&self) -> NextOffset {
        self.tracker.state().low_water
    }

    /// Puts `metadata` beside every offset that is committed from now on under this grant, in place of what was put
    /// there before; empty: none. It is committed with the next offset, and within a commit interval where none
    /// follows. At most 4096 bytes.
    ///
    /// The coordinator keeps it with the offset, for whoever asks: [`OffsetWriter::committed_metadata`],
    /// [`CoordinatorClient::fetch`](crate::session::CoordinatorClient::fetch). A handler that sets any has its last offset
    /// committed before the partition is given back, which costs the next owner a round of the raft log.
    ///
    /// # Errors
    ///
    /// [`MetadataTooLarge`].
    pub fn set_metadata(&mut self, metadata: impl Into<Vec<u8>>) -> Result<(), MetadataTooLarge> {
        self.tracker.set_metadata(metadata.into())
    }

    /// Asks the coordinator for the metadata of the committed offset, as this or an earlier owner has left it; empty
    /// when there is none.
    ///
    /// # Errors
    ///
    /// [`CommitError::Refused`], or [`CommitError::Unknown`] when no answer came before the lease ended.
    pub async fn committed_metadata(&self) -> Result<Vec<u8>, CommitError> {
        self.tracker.committed_metadata().await
    }

    /// Waits until everything that is done now is committed; answers the committed offset.
    ///
    /// # Errors
    ///
    /// [`CommitError`]; one that ends the grant comes again at each later call.
    pub async fn flush(&mut self) -> Result<NextOffset, CommitError> {
        self.tracker.flush().await
    }

    /// Marks every delivered record before `next` as done and waits until that is committed.
    ///
    /// # Errors
    ///
    /// As [`OffsetWriter::flush`].
    pub async fn commit(&mut self, next: NextOffset) -> Result<NextOffset, CommitError> {
        self.done_before(next);
        self.flush().await
    }
}

impl FencedWriter for OffsetWriter {
    async fn resume(&mut self, verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        match verified.next_offset() {
            Some(next) => {
                self.tracker.start(next);
                Ok(Some(next))
            }
            None if verified.home_initialised() => Err(SinkError::Misconfigured(
                "the coordinator's home was initialised and has no offset".to_owned(),
            )),
            None => Ok(None),
        }
    }

    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        let sequence = CommitSequence(self.tracker.state().sequence.0 + 1);
        let mark = OffsetMark { sequence, next_offset: start, metadata: Arc::default() };
        self.tracker.commit_until_known(&mark).await?;
        self.tracker.state().sequence = sequence;
        self.tracker.start(start);
        Ok(start)
    }

    async fn resolve(&mut self) -> Result<Resolved, SinkError> {
        Ok(Resolved::Applied(self.flush().await?))
    }

    async fn retire(mut self) -> Result<(), SinkError> {
        self.flush().await?;
        Ok(())
    }
}
