//! Offsets whose home is the coordinator.
//!
//! The handler says which records are done, in any order; the low-water mark (everything before it is done) is
//! committed behind its back, one commit in flight per partition, the newest mark next. With a sink that only fences,
//! this home is *at least once*: what was done and not yet committed is done again by the next owner.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use dashmap::DashMap;
use tenure_model::{CommitSequence, Epoch, ErrorCode, Home, NextOffset, Partition};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::consumer::{Counters, Link};
use crate::grant::Grant;
use crate::lease::LeaseEnded;
use crate::session::{CallError, Refused};
use crate::sink::{
    Capabilities, Enforcement, FencedSink, FencedWriter, Registered, Resolved, Scope, SinkError,
    Takeover, Verified,
};
use crate::source::Record;

/// Records of one partition that may be delivered and not done at the same time; then the input waits.
pub const UNDONE_RECORDS_MAX: usize = 100_000;

/// Shortest time between two commits of one partition, unless it is flushed. Default of the setting.
pub const COMMIT_INTERVAL: Duration = Duration::from_millis(100);

/// How long a commit is tried when the lease does not bound it, because the check is off.
const UNCHECKED_COMMIT_MAX: Duration = Duration::from_secs(10);

/// Longest single call; a commit whose outcome is unknown is repeated with the same sequence.
const CALL_MAX: Duration = Duration::from_secs(5);

/// Pause after a call that was not answered.
const REPEAT_PAUSE: Duration = Duration::from_millis(50);

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
    counters: Arc<Counters>,
    commit_interval: Duration,
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
        let shared =
            Shared { link: RwLock::new(None), trackers: DashMap::new(), counters, commit_interval };
        Self { shared: Arc::new(shared) }
    }

    pub(crate) fn bind(&self, link: Arc<dyn Link>) {
        *self.shared.link.write().unwrap_or_else(PoisonError::into_inner) = Some(link);
    }

    pub(crate) fn unbind(&self) {
        *self.shared.link.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The tracker of a grant; nothing when the home is elsewhere.
    pub(crate) fn tracker(&self, partition: Partition, epoch: Epoch) -> Option<Arc<Tracker>> {
        self.shared.trackers.get(&(partition, epoch)).map(|tracker| Arc::clone(&tracker))
    }

    /// Ends a grant's commits for good.
    pub(crate) fn forget(&self, partition: Partition, epoch: Epoch) {
        if let Some((_, tracker)) = self.shared.trackers.remove(&(partition, epoch)) {
            tracker.close();
        }
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
        let tracker = Arc::new(Tracker::new(
            grant.clone(),
            link,
            Arc::clone(&self.shared.counters),
            self.shared.commit_interval,
        ));
        let key = (grant.partition, grant.epoch);
        self.shared.trackers.insert(key, Arc::clone(&tracker));
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

    /// Everything before it is done.
    #[must_use]
    pub fn low_water(&self) -> NextOffset {
        self.tracker.state().low_water
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
        self.tracker.commit_until_known(CommitSequence(1), start).await?;
        self.tracker.state().sequence = CommitSequence(1);
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

#[derive(Debug)]
struct Delivered {
    offset: NextOffset,
    next: NextOffset,
    done: bool,
}

#[derive(Debug)]
struct State {
    /// Delivered and at or after the low-water mark, in order.
    delivered: VecDeque<Delivered>,
    /// Everything before it is done.
    low_water: NextOffset,
    committed: NextOffset,
    sequence: CommitSequence,
    /// Ends the grant; every later commit answers the same.
    failed: Option<CommitError>,
    flush_wanted: bool,
    started: bool,
    closed: bool,
}

/// What is done and what is committed under one grant.
pub(crate) struct Tracker {
    grant: Grant,
    link: Arc<dyn Link>,
    counters: Arc<Counters>,
    commit_interval: Duration,
    state: Mutex<State>,
    work: Notify,
    /// Rises whenever a commit was answered, a record was done, or the tracker was closed.
    moved: watch::Sender<u64>,
}

impl Tracker {
    fn new(
        grant: Grant,
        link: Arc<dyn Link>,
        counters: Arc<Counters>,
        commit_interval: Duration,
    ) -> Self {
        let state = State {
            delivered: VecDeque::new(),
            low_water: NextOffset::ZERO,
            committed: NextOffset::ZERO,
            sequence: CommitSequence(0),
            failed: None,
            flush_wanted: false,
            started: false,
            closed: false,
        };
        Self {
            grant,
            link,
            counters,
            commit_interval,
            state: Mutex::new(state),
            work: Notify::new(),
            moved: watch::Sender::new(0),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce(&self) {
        self.moved.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Sets the resume point and starts to commit in the background.
    fn start(self: &Arc<Self>, resume: NextOffset) {
        let mut state = self.state();
        state.low_water = resume;
        state.committed = resume;
        if !std::mem::replace(&mut state.started, true) {
            drop(tokio::spawn(commit_in_background(Arc::clone(self))));
        }
    }

    /// Notes records as delivered, before the handler sees them.
    pub(crate) fn delivered(&self, records: &[Record]) {
        let mut state = self.state();
        state.delivered.extend(records.iter().map(|record| Delivered {
            offset: record.offset,
            next: record.next(),
            done: false,
        }));
    }

    /// Waits until fewer than [`UNDONE_RECORDS_MAX`] records are delivered and not done.
    pub(crate) async fn room(&self) {
        let mut moved = self.moved.subscribe();
        while self.state().delivered.len() >= UNDONE_RECORDS_MAX {
            // The sender lives in `self`.
            moved.changed().await.expect("the tracker outlives those who wait on it");
        }
    }

    fn done(&self, partition: Partition, offset: NextOffset) {
        if partition != self.grant.partition {
            return;
        }
        self.advance(|state| {
            if let Ok(at) = state.delivered.binary_search_by_key(&offset, |entry| entry.offset) {
                state.delivered[at].done = true;
            }
        });
    }

    fn done_before(&self, next: NextOffset) {
        self.advance(|state| {
            let count = state.delivered.partition_point(|entry| entry.offset < next);
            state.delivered.range_mut(..count).for_each(|entry| entry.done = true);
        });
    }

    /// Marks records and moves the low-water mark over what is done without a hole.
    fn advance(&self, mark: impl FnOnce(&mut State)) {
        let mut state = self.state();
        if state.closed {
            return;
        }
        mark(&mut state);
        let before = state.low_water;
        while let Some(entry) = state.delivered.front().filter(|entry| entry.done) {
            state.low_water = entry.next;
            state.delivered.pop_front();
        }
        let moved = state.low_water > before;
        drop(state);
        if moved {
            self.work.notify_one();
            self.announce();
        }
    }

    /// Everything before it is done; nothing before the resume point is known.
    pub(crate) fn low_water(&self) -> Option<NextOffset> {
        let state = self.state();
        state.started.then_some(state.low_water)
    }

    /// Waits until everything that is done now is committed.
    pub(crate) async fn flush(&self) -> Result<NextOffset, CommitError> {
        let mut moved = self.moved.subscribe();
        let wanted = {
            let mut state = self.state();
            state.flush_wanted = true;
            state.low_water
        };
        self.work.notify_one();
        loop {
            {
                let state = self.state();
                if let Some(error) = &state.failed {
                    return Err(error.clone());
                }
                if state.closed {
                    return Err(CommitError::Released);
                }
                if state.committed >= wanted {
                    return Ok(state.committed);
                }
            }
            // The sender lives in `self`.
            moved.changed().await.expect("the tracker outlives those who wait on it");
        }
    }

    /// Waits until a commit was refused for good.
    pub(crate) async fn failed(&self) -> CommitError {
        let mut moved = self.moved.subscribe();
        loop {
            if let Some(error) = &self.state().failed {
                return error.clone();
            }
            // The sender lives in `self`.
            moved.changed().await.expect("the tracker outlives those who wait on it");
        }
    }

    fn close(&self) {
        self.state().closed = true;
        self.work.notify_one();
        self.announce();
    }

    /// The next mark to commit; nothing once there is none for good.
    async fn next_commit(&self, not_before: Instant) -> Option<(CommitSequence, NextOffset)> {
        loop {
            let due = {
                let mut state = self.state();
                if state.closed || state.failed.is_some() {
                    return None;
                }
                let behind = state.low_water > state.committed;
                if behind && (state.flush_wanted || Instant::now() >= not_before) {
                    state.flush_wanted = false;
                    state.sequence = CommitSequence(state.sequence.0 + 1);
                    return Some((state.sequence, state.low_water));
                }
                behind.then_some(not_before)
            };
            match due {
                None => self.work.notified().await,
                Some(at) => {
                    // Woken or due: the loop looks again in both cases.
                    let _woken = tokio::time::timeout_at(at, self.work.notified()).await;
                }
            }
        }
    }

    /// Commits one offset; one whose outcome is unknown is repeated with the same sequence until the lease ends.
    async fn commit_until_known(
        &self,
        sequence: CommitSequence,
        next: NextOffset,
    ) -> Result<(), CommitError> {
        let lease = &self.grant.lease;
        let give_up_at = Instant::now() + UNCHECKED_COMMIT_MAX;
        let mut unknown = None;
        loop {
            if let Err(ended) = lease.check() {
                self.counters.add_refused_locally(1);
                return Err(unknown.unwrap_or(CommitError::LeaseEnded(ended)));
            }
            // A lease that passed the check and is not live: the check is off.
            let unchecked = give_up_at.saturating_duration_since(Instant::now());
            let bound = if lease.is_live() { lease.remaining() } else { unchecked };
            if bound.is_zero() {
                return Err(unknown.unwrap_or(CommitError::LeaseEnded(LeaseEnded)));
            }
            let bound = bound.min(CALL_MAX);
            let call = self.link.commit(&self.grant, sequence, next, bound);
            let last = match tokio::time::timeout(bound, call).await {
                Ok(Ok(())) => {
                    self.counters.add_commits(1);
                    return Ok(());
                }
                Ok(Err(CallError::Refused(refused))) => return Err(self.refused(refused)),
                Ok(Err(CallError::Unknown { last, .. })) => last,
                Err(_elapsed) => "no answer in time".to_owned(),
            };
            tracing::debug!(
                partition = %self.grant.partition, epoch = %self.grant.epoch, %sequence, error = %last,
                "outcome of an offset commit is unknown, repeating it"
            );
            unknown = Some(CommitError::Unknown { last });
            tokio::time::sleep(REPEAT_PAUSE).await;
        }
    }

    fn refused(&self, refused: Refused) -> CommitError {
        let Refused { code, message, current_epoch, .. } = refused;
        if grant_is_over(code) {
            self.counters.add_refused_by_coordinator(1);
            CommitError::Fenced { ours: self.grant.epoch, current: current_epoch }
        } else {
            CommitError::Refused { code, message }
        }
    }
}

/// Whether a refused commit says that the grant is over.
pub(crate) fn grant_is_over(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::Fenced
            | ErrorCode::NotOwned
            | ErrorCode::UnknownMember
            | ErrorCode::MemberGone
            | ErrorCode::StaleMember
    )
}

async fn commit_in_background(tracker: Arc<Tracker>) {
    let mut not_before = Instant::now();
    while let Some((sequence, next)) = tracker.next_commit(not_before).await {
        not_before = Instant::now() + tracker.commit_interval;
        match tracker.commit_until_known(sequence, next).await {
            Ok(()) => tracker.state().committed = next,
            Err(error) => tracker.state().failed = Some(error),
        }
        tracker.announce();
    }
}
