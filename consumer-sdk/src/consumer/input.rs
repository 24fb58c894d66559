//! Records of one owned partition.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tenure_model::{Epoch, NextOffset, Partition, Tick};
use tokio::time::Instant;

use super::Counters;
use super::buffer::{Buffer, Room};
use super::doubts::Doubts;
use super::end::{Control, End};
use super::lifecycle::Told;
use super::link::Link;
use crate::lease::Lease;
use crate::offsets::Tracker;
use crate::session::{LostCause, Phase};
use crate::source::{Record, RecordSource, RecordStream};

/// How much one batch takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Records; 0 counts as 1. Default 500.
    pub records: usize,
    /// Bytes of keys and values; a single larger record is a batch of its own. Default 4 MiB.
    pub bytes: usize,
    /// How long to wait for more once the first record is there; the first batch of an ownership does not wait.
    /// Default 10 ms.
    pub wait: Duration,
}

impl Limits {
    /// The defaults, for a `const`.
    pub const DEFAULT: Self =
        Self { records: 500, bytes: 4 * 1024 * 1024, wait: Duration::from_millis(10) };
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Records that are delivered one by one before they are counted together.
const UNCOUNTED_MAX: usize = 16;

/// What a handler does, apart from being alive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HandlerPhase {
    /// It loads state and reads no records yet; the share that is done, 0 to 1.
    Loading(f32),
    /// It reads records.
    Running,
}

/// Records of one owned partition, in order. Ends when the partition is asked for, lost, or the consumer shuts down.
pub struct Input {
    pub(super) stream: RecordStream,
    pub(super) buffer: Buffer,
    pub(super) first_at: Option<Instant>,
    /// Whether a batch waits for more: not the first one, a new owner shows at once that it is at work.
    pub(super) waits: bool,
    /// Dead letters: passed over.
    pub(super) skipped: BTreeSet<NextOffset>,
    /// Batches of records before it hold one record each.
    pub(super) singly_before: NextOffset,
    pub(super) control: Arc<Control>,
    pub(super) tracker: Option<Arc<Tracker>>,
    pub(super) link: Arc<dyn Link>,
    pub(super) counters: Arc<Counters>,
    pub(super) told: Arc<Told>,
    pub(super) source: Arc<dyn RecordSource>,
    pub(super) doubts: Arc<Doubts>,
    pub(super) lease: Lease,
    pub(super) partition: Partition,
    pub(super) epoch: Epoch,
    /// Nothing before it is delivered: a stream that was opened early may still hold some.
    pub(super) resume: NextOffset,
    /// Records before it were done already, by this process.
    pub(super) done_before: NextOffset,
    /// Records that may be delivered one by one before the tracker is asked again.
    pub(super) room: usize,
    /// Delivered one by one and not counted yet: the counters are everybody's.
    pub(super) uncounted: usize,
}

impl Drop for Input {
    fn drop(&mut self) {
        self.count();
    }
}

impl std::fmt::Debug for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Input")
            .field("partition", &self.partition)
            .field("epoch", &self.epoch)
            .field("buffered", &self.buffer.record_count())
            .field("ending", &self.ending())
            .finish_non_exhaustive()
    }
}

impl Input {
    /// Waits for the next records. Nothing: the ownership ends, [`Input::ending`] says how; nothing comes after.
    ///
    /// Cancel-safe: dropped before it answers, it has taken nothing. With the offsets at the coordinator it also
    /// waits while [`UNDONE_RECORDS_MAX`](crate::offsets::UNDONE_RECORDS_MAX) delivered records are not done.
    pub async fn next_batch(&mut self, limits: &Limits) -> Option<Batch> {
        let control = Arc::clone(&self.control);
        loop {
            let limits = self.limits_here(limits);
            tokio::select! {
                biased;
                _end = control.ended() => return None,
                () = self.fill(&limits) => {}
            }
            let batch = self.take(&limits);
            // No batch and no end: there was nothing but dead letters.
            if batch.is_some() || control.ending().is_some() {
                return batch;
            }
        }
    }

    /// Waits for the next record; for work that is done one by one, at less cost than batches of one. Nothing: as
    /// [`Input::next_batch`], with which it may be mixed. Cancel-safe in the same way.
    pub async fn next_record(&mut self) -> Option<Record> {
        loop {
            if self.has_ended() {
                return None;
            }
            if self.has_room()
                && let Some(record) = self.take_one()
            {
                return Some(record);
            }
            let control = Arc::clone(&self.control);
            tokio::select! {
                biased;
                _end = control.ended() => return None,
                () = self.fill(&Limits { records: 1, ..Limits::DEFAULT }) => {}
            }
        }
    }

    /// One record at a time where an earlier run of the handler failed.
    fn limits_here(&self, limits: &Limits) -> Limits {
        if self.position() < self.singly_before {
            Limits { records: 1, ..*limits }
        } else {
            *limits
        }
    }

    /// How the ownership ends; nothing while it goes on.
    #[must_use]
    pub fn ending(&self) -> Option<End> {
        self.control.ending()
    }

    /// Waits until the ownership ends, for a `select!` in long work.
    pub async fn ended(&self) -> End {
        self.control.ended().await
    }

    /// Waits until the partition is lost; an orderly end (revoked, shutdown) is passed over.
    pub async fn lost(&self) -> End {
        self.control.lost().await
    }

    /// Waits until the member's lease is at risk: two heartbeats in a row have no answer. Answers when it ends, on the
    /// clock of the grant's lease, unless one comes before.
    pub async fn lease_at_risk(&self) -> Tick {
        self.told.lease_at_risk().await
    }

    /// Whether the member's lease is at risk now.
    #[must_use]
    pub fn is_lease_at_risk(&self) -> bool {
        self.told.is_at_risk()
    }

    /// The next offset to be delivered.
    #[must_use]
    pub fn position(&self) -> NextOffset {
        self.control.position()
    }

    /// Records between the next one to be delivered and the end of the partition, as the source last heard it; nothing
    /// where it does not tell. Asks nobody.
    #[must_use]
    pub fn lag(&self) -> Option<u64> {
        let end = self.source.end_offset(self.partition)?;
        Some(end.get().saturating_sub(self.position().get()))
    }

    /// Says what the handler does, so that loading state is not taken for a partition that does not advance. It counts
    /// until the next report or record.
    pub fn report(&self, phase: HandlerPhase) {
        self.control.set_loading(matches!(phase, HandlerPhase::Loading(_)));
        let phase = match phase {
            HandlerPhase::Loading(_) => Phase::Resuming,
            HandlerPhase::Running => Phase::Running,
        };
        self.link.phase(self.partition, self.epoch, phase, self.position(), None);
    }

    fn is_full(&self, limits: &Limits) -> bool {
        self.buffer.record_count() >= limits.records.max(1)
            || self.buffer.size_bytes() >= limits.bytes
            || !(self.waits || self.buffer.is_empty())
    }

    fn has_room(&mut self) -> bool {
        if self.room == 0 {
            self.room = self.tracker.as_deref().map_or(usize::MAX, Tracker::room_left);
        }
        self.room > 0
    }

    fn count(&mut self) {
        self.counters.add_records_delivered(std::mem::take(&mut self.uncounted));
    }

    /// Waits until the buffer holds what a batch needs. All that was received stays in `self` when it is dropped.
    async fn fill(&mut self, limits: &Limits) {
        self.count();
        if let Some(tracker) = self.tracker.as_deref().filter(|tracker| tracker.room_left() == 0) {
            tracker.room().await;
        }
        while !self.is_full(limits) {
            self.pass_over_gap();
            let received = match self.first_at {
                None => {
                    self.control.set_holds_records(false);
                    self.stream.recv().await
                }
                Some(first_at) => {
                    tokio::select! {
                        biased;
                        received = self.stream.recv() => received,
                        () = tokio::time::sleep_until(first_at + limits.wait) => return,
                    }
                }
            };
            match received.map(|fetched| self.buffer.take_in(fetched, self.resume)) {
                Some(Ok(())) => {
                    if !self.buffer.is_empty() {
                        self.first_at.get_or_insert_with(Instant::now);
                    }
                }
                Some(Err(error)) => {
                    self.doubts.note(self.partition, &error);
                    self.control.end(End::Lost { cause: LostCause::Source(error.to_string()) });
                    return;
                }
                None => {
                    let cause = LostCause::Source("the source ended the partition".to_owned());
                    self.control.end(End::Lost { cause });
                    return;
                }
            }
        }
    }

    /// Whether nothing may be handed out any more. After a pause of the whole process the lease is over before anyone
    /// could say so: what an old owner does beside its sinks no resource refuses.
    fn has_ended(&self) -> bool {
        if !self.control.has_ended() && self.lease.check().is_err() {
            self.control.end(End::Lost { cause: LostCause::LeaseEnded });
        }
        self.control.has_ended()
    }

    /// Takes a batch, in one step without a wait, unless the end was told meanwhile.
    fn take(&mut self, limits: &Limits) -> Option<Batch> {
        if self.has_ended() {
            return None;
        }
        let before = self.pass_over_dead_letters();
        let room = Room { records: limits.records.max(1), bytes: limits.bytes, before };
        let records = self.buffer.take(room);
        // What is left has waited already.
        self.first_at = self.first_at.filter(|_| !self.buffer.is_empty());
        let next = records.last()?.next();
        self.waits = true;
        self.note_delivered(&records, next);
        let next = self.pass_over_gap().unwrap_or(next);
        self.count();
        Some(Batch { records, next })
    }

    fn take_one(&mut self) -> Option<Record> {
        if !self.skipped.is_empty() {
            self.pass_over_dead_letters();
        }
        let record = self.buffer.pop()?;
        self.note_delivered(std::slice::from_ref(&record), record.next());
        if self.buffer.is_empty() {
            self.first_at = None;
            self.pass_over_gap();
        }
        if self.uncounted >= UNCOUNTED_MAX {
            self.count();
        }
        Some(record)
    }

    fn note_delivered(&mut self, records: &[Record], next: NextOffset) {
        self.control.set_holds_records(true);
        if self.control.is_loading() {
            self.control.set_loading(false);
        }
        if records.first().is_some_and(|first| first.offset < self.done_before) {
            let again = records.iter().take_while(|record| record.offset < self.done_before);
            self.counters.add_handled_twice(again.count());
        }
        if let Some(tracker) = &self.tracker {
            tracker.delivered(records);
        }
        self.control.set_position(next);
        self.room = self.room.saturating_sub(records.len());
        self.uncounted += records.len();
    }

    /// Passes over what lies after the last record and is none, once that was handed out; answers where it ends.
    fn pass_over_gap(&mut self) -> Option<NextOffset> {
        let next = self.buffer.take_passed().filter(|next| *next > self.position())?;
        if let Some(tracker) = &self.tracker {
            tracker.pass(next);
        }
        self.control.set_position(next);
        Some(next)
    }

    /// Passes over the dead letters at the front: the offset moves as if a handler had done them. Answers where the
    /// next one lies.
    fn pass_over_dead_letters(&mut self) -> Option<NextOffset> {
        loop {
            let front = self.buffer.front()?.offset;
            let next = self.skipped.range(front..).next().copied()?;
            if next > front {
                return Some(next);
            }
            let record = self.buffer.pop()?;
            if let Some(tracker) = &self.tracker {
                tracker.delivered(std::slice::from_ref(&record));
                tracker.done(record.partition, record.offset);
            }
            self.control.set_position(record.next());
            self.pass_over_gap();
        }
    }
}

/// Records with rising offsets; never empty.
#[derive(Clone, Debug)]
pub struct Batch {
    records: Vec<Record>,
    next: NextOffset,
}

impl Batch {
    /// The records.
    #[must_use]
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// The records, one by one.
    pub fn iter(&self) -> std::slice::Iter<'_, Record> {
        self.records.iter()
    }

    /// Offset of the first record.
    #[must_use]
    pub fn first(&self) -> NextOffset {
        self.records.first().map_or(self.next, |record| record.offset)
    }

    /// Offset to read after the last record: what to commit once all of them are done. Past what follows it and is no
    /// record, as far as that is known.
    #[must_use]
    pub const fn next(&self) -> NextOffset {
        self.next
    }

    /// Number of records, at least 1.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a batch is never empty")]
    pub fn len(&self) -> usize {
        self.records.len()
    }
}

impl<'a> IntoIterator for &'a Batch {
    type Item = &'a Record;
    type IntoIter = std::slice::Iter<'a, Record>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl IntoIterator for Batch {
    type Item = Record;
    type IntoIter = std::vec::IntoIter<Record>;

    fn into_iter(self) -> Self::IntoIter {
        self.records.into_iter()
    }
}
