//! What is done and what is committed under one grant.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_model::limits::METADATA_BYTES_MAX;
use tenure_model::{CommitSequence, ErrorCode, NextOffset, Partition, RequestId, RetryClass};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::delivered::Delivered;
use super::{CommitError, MetadataTooLarge, MirroredOffset, OffsetMirror, UNDONE_RECORDS_MAX};
use crate::consumer::{Counters, Link, OffsetMark};
use crate::grant::Grant;
use crate::lease::LeaseEnded;
use crate::session::{CallError, Refused};
use crate::source::Record;

/// How long a commit is tried when the lease does not bound it, because the check is off.
const UNCHECKED_COMMIT_MAX: Duration = Duration::from_secs(10);

/// Longest single call; a commit whose outcome is unknown is repeated with the same sequence.
const CALL_MAX: Duration = Duration::from_secs(5);

/// Pause after a call that was not answered.
const REPEAT_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct State {
    /// At or after the low-water mark.
    delivered: Delivered,
    /// The input waits for records to be done.
    room_wanted: bool,
    /// Everything before it is done.
    pub(super) low_water: NextOffset,
    committed: NextOffset,
    pub(super) sequence: CommitSequence,
    /// Goes with every commit from now on.
    metadata: Arc<[u8]>,
    /// How often it was set, and up to which time it is committed.
    metadata_set: u64,
    metadata_committed: u64,
    /// Ends the grant; every later commit answers the same.
    failed: Option<CommitError>,
    flush_wanted: bool,
    started: bool,
    /// The offset was moved by name: nothing that this run of the handler still reads moves it.
    pub(super) rewound: bool,
    closed: bool,
}

impl State {
    /// Whether there is something to commit.
    fn is_behind(&self) -> bool {
        self.low_water > self.committed || self.metadata_set > self.metadata_committed
    }
}

/// What is done and what is committed under one grant.
pub(crate) struct Tracker {
    pub(super) grant: Grant,
    link: Arc<dyn Link>,
    counters: Arc<Counters>,
    commit_interval: Duration,
    mirror: Option<Arc<dyn OffsetMirror>>,
    state: Mutex<State>,
    work: Notify,
    /// Rises whenever a commit was answered, there is room again, or the tracker was closed. Not for each record:
    /// those who wait on it would be woken by all of them.
    moved: watch::Sender<u64>,
}

impl Tracker {
    pub(super) fn new(
        grant: Grant,
        link: Arc<dyn Link>,
        counters: Arc<Counters>,
        commit_interval: Duration,
        sequence: CommitSequence,
        mirror: Option<Arc<dyn OffsetMirror>>,
    ) -> Self {
        let state = State {
            delivered: Delivered::default(),
            room_wanted: false,
            low_water: NextOffset::ZERO,
            committed: NextOffset::ZERO,
            sequence,
            metadata: Arc::default(),
            metadata_set: 0,
            metadata_committed: 0,
            failed: None,
            flush_wanted: false,
            started: false,
            rewound: false,
            closed: false,
        };
        Self {
            grant,
            link,
            counters,
            commit_interval,
            mirror,
            state: Mutex::new(state),
            work: Notify::new(),
            moved: watch::Sender::new(0),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce(&self) {
        self.moved.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Sets the resume point and starts to commit in the background.
    pub(super) fn start(self: &Arc<Self>, resume: NextOffset) {
        let mut state = self.state();
        state.low_water = resume;
        state.committed = resume;
        if !std::mem::replace(&mut state.started, true) {
            drop(tokio::spawn(commit_in_background(Arc::clone(self))));
        }
    }

    /// Notes records as delivered, before the handler sees them.
    pub(crate) fn delivered(&self, records: &[Record]) {
        self.state().delivered.add(records);
    }

    /// Notes that no record lies before `next` beyond those that were delivered: the mark goes there once all of them
    /// are done.
    pub(crate) fn pass(&self, next: NextOffset) {
        if !self.state().rewound {
            self.advance(|delivered| delivered.pass(next));
        }
    }

    /// How many more records may be delivered before [`UNDONE_RECORDS_MAX`] of them are not done.
    pub(crate) fn room_left(&self) -> usize {
        UNDONE_RECORDS_MAX.saturating_sub(self.state().delivered.count())
    }

    /// Waits until there is room.
    pub(crate) async fn room(&self) {
        let mut moved = self.moved.subscribe();
        loop {
            {
                let mut state = self.state();
                state.room_wanted = state.delivered.count() >= UNDONE_RECORDS_MAX;
                if !state.room_wanted {
                    return;
                }
            }
            // The sender lives in `self`.
            moved.changed().await.expect("the tracker outlives those who wait on it");
        }
    }

    pub(crate) fn done(&self, partition: Partition, offset: NextOffset) {
        if partition != self.grant.partition {
            return;
        }
        self.advance(|delivered| delivered.done(offset));
    }

    pub(super) fn done_before(&self, next: NextOffset) {
        self.advance(|delivered| delivered.done_before(next));
    }

    /// Moves the low-water mark forward where nothing is delivered.
    pub(super) fn move_to(&self, next: NextOffset) {
        let current = self.state().low_water;
        self.advance(|delivered| (delivered.count() == 0 && next > current).then_some(next));
    }

    /// Marks records and moves the low-water mark over what is done without a hole.
    fn advance(&self, mark: impl FnOnce(&mut Delivered) -> Option<NextOffset>) {
        let mut state = self.state();
        if state.closed {
            return;
        }
        let Some(low_water) = mark(&mut state.delivered) else { return };
        // Behind already: the task that commits looks again by itself.
        let is_news = !state.is_behind() && low_water > state.committed;
        state.low_water = low_water;
        let has_room = state.room_wanted && state.delivered.count() < UNDONE_RECORDS_MAX;
        state.room_wanted &= !has_room;
        drop(state);
        if is_news {
            self.work.notify_one();
        }
        if has_room {
            self.announce();
        }
    }

    /// Everything before it is done; nothing before the resume point is known.
    pub(crate) fn low_water(&self) -> Option<NextOffset> {
        let state = self.state();
        state.started.then_some(state.low_water)
    }

    pub(super) fn set_metadata(&self, metadata: Vec<u8>) -> Result<(), MetadataTooLarge> {
        if metadata.len() > METADATA_BYTES_MAX {
            return Err(MetadataTooLarge { given_bytes: metadata.len() });
        }
        let mut state = self.state();
        state.metadata = metadata.into();
        state.metadata_set += 1;
        drop(state);
        self.work.notify_one();
        Ok(())
    }

    pub(super) async fn committed_metadata(&self) -> Result<Vec<u8>, CommitError> {
        let lease = &self.grant.lease;
        lease.check()?;
        let bound = if lease.is_live() { lease.remaining() } else { UNCHECKED_COMMIT_MAX };
        self.link.committed_metadata(&self.grant, bound).await.map_err(|error| match error {
            CallError::Refused(refused) => self.refused(refused),
            CallError::Unknown { last, .. } => CommitError::Unknown { last },
        })
    }

    /// Commits what is done together with its metadata, if there is any: a release takes the offset along, not that.
    pub(crate) async fn flush_metadata(&self) -> Result<(), CommitError> {
        let is_due = {
            let state = self.state();
            state.metadata_set > 0 && state.is_behind()
        };
        if is_due {
            self.flush().await?;
        }
        Ok(())
    }

    /// Waits until everything that is done now is committed.
    pub(crate) async fn flush(&self) -> Result<NextOffset, CommitError> {
        let mut moved = self.moved.subscribe();
        let (wanted, metadata) = {
            let mut state = self.state();
            state.flush_wanted = true;
            (state.low_water, state.metadata_set)
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
                if state.committed >= wanted && state.metadata_committed >= metadata {
                    return Ok(state.committed);
                }
            }
            // The sender lives in `self`.
            moved.changed().await.expect("the tracker outlives those who wait on it");
        }
    }

    /// Commits everything that is done and then nothing more: another tracker of the same grant takes over.
    pub(crate) async fn settle(&self) -> Result<(), CommitError> {
        loop {
            self.flush().await?;
            let mut state = self.state();
            // No commit is under way.
            if !state.is_behind() {
                state.closed = true;
                break;
            }
        }
        self.work.notify_one();
        self.announce();
        Ok(())
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

    pub(super) fn close(&self) {
        self.state().closed = true;
        self.work.notify_one();
        self.announce();
    }

    /// The next mark to commit, and which metadata it is; nothing once there is none for good.
    async fn next_commit(&self, not_before: Instant) -> Option<(OffsetMark, u64)> {
        loop {
            let due = {
                let mut state = self.state();
                if state.closed || state.failed.is_some() {
                    return None;
                }
                let behind = state.started && state.is_behind();
                if behind && (state.flush_wanted || Instant::now() >= not_before) {
                    state.flush_wanted = false;
                    state.sequence = CommitSequence(state.sequence.0 + 1);
                    let mark = OffsetMark {
                        sequence: state.sequence,
                        next_offset: state.low_water,
                        metadata: Arc::clone(&state.metadata),
                    };
                    return Some((mark, state.metadata_set));
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
    pub(super) async fn commit_until_known(&self, mark: &OffsetMark) -> Result<(), CommitError> {
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
            let call = self.link.commit(&self.grant, mark.clone(), bound);
            let last = match tokio::time::timeout(bound, call).await {
                Ok(Ok(())) => {
                    self.counters.add_commits(1);
                    if let Some(mirror) = &self.mirror {
                        mirror.note(MirroredOffset {
                            topic: self.grant.topic.clone(),
                            partition: self.grant.partition,
                            epoch: self.grant.epoch,
                            next_offset: mark.next_offset,
                        });
                    }
                    return Ok(());
                }
                Ok(Err(CallError::Refused(refused))) => match refused.code.retry_class() {
                    RetryClass::Never => return Err(self.refused(refused)),
                    RetryClass::AfterBackoff | RetryClass::OtherNode | RetryClass::Unknown => {
                        refused.to_string()
                    }
                },
                Ok(Err(CallError::Unknown { last, .. })) => last,
                Err(_elapsed) => "no answer in time".to_owned(),
            };
            tracing::debug!(
                partition = %self.grant.partition, epoch = %self.grant.epoch,
                sequence = %mark.sequence, error = %last,
                "outcome of an offset commit is unknown, repeating it"
            );
            unknown = Some(CommitError::Unknown { last });
            tokio::time::sleep(REPEAT_PAUSE).await;
        }
    }

    /// Moves the offset to `to`, once for each `request`. Nothing may be done under this tracker meanwhile.
    pub(super) async fn rewind(
        &self,
        to: NextOffset,
        request: &RequestId,
    ) -> Result<(), CommitError> {
        self.flush().await?;
        let sequence = CommitSequence(self.state().sequence.0 + 1);
        loop {
            self.grant.lease.check()?;
            let bound = self.grant.lease.remaining().clamp(REPEAT_PAUSE, CALL_MAX);
            match self.link.rewind(&self.grant, sequence, to, request, bound).await {
                Ok(()) => break,
                Err(CallError::Refused(refused)) => match refused.code.retry_class() {
                    RetryClass::Never => return Err(self.refused(refused)),
                    RetryClass::AfterBackoff | RetryClass::OtherNode | RetryClass::Unknown => {}
                },
                Err(CallError::Unknown { .. }) => {}
            }
            tokio::time::sleep(REPEAT_PAUSE).await;
        }
        let mut state = self.state();
        state.sequence = sequence;
        state.rewound = true;
        state.delivered = Delivered::default();
        // What lay beside the old offset says nothing of the new one.
        state.metadata = Arc::default();
        state.metadata_committed = state.metadata_set;
        // The release must not move the offset forward again; the next run of the handler reads it anew.
        state.low_water = NextOffset::ZERO;
        state.committed = NextOffset::ZERO;
        Ok(())
    }

    fn refused(&self, refused: Refused) -> CommitError {
        let Refused { code, message, current_epoch, .. } = refused;
        if grant_is_over(code) {
            // A commit that was under way when its grant was given back may come after the release.
            if !self.state().closed {
                self.counters.add_refused_by_coordinator(1);
            }
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
    while let Some((mark, metadata)) = tracker.next_commit(not_before).await {
        not_before = Instant::now() + tracker.commit_interval;
        match tracker.commit_until_known(&mark).await {
            Ok(()) => {
                let mut state = tracker.state();
                state.committed = mark.next_offset;
                state.metadata_committed = metadata;
            }
            Err(error) => tracker.state().failed = Some(error),
        }
        tracker.announce();
    }
}
