//! One open partition.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tenure_model::{NextOffset, Partition, TopicName};
use tenure_sdk::source::{ReadAhead, RecordStream, SourceError};

use crate::client::{Fetch, Hold};
use crate::ffi::Message;
use crate::outlet::{Chunk, ChunkLimit, Gone, Load, Outlet};
use crate::pack::{Origin, Unread};

/// How long a partition with records to read may bring none before it is assigned anew.
pub(crate) const STALL_AFTER: Duration = Duration::from_secs(10);
/// Limit of that time; it doubles with each new assignment that brought nothing, because control records and open
/// transactions also keep the watermark above the position.
const STALL_AFTER_MAX: Duration = Duration::from_secs(300);

/// How long a partition whose reader is behind may leave its records in the client; then they are dropped and fetched
/// again once the reader has caught up. Fetching again costs up to `fetch.wait.max.ms` (the broker may hold a request of
/// the other partitions) and reads twice, so it must not happen for each short delay of a reader.
const KEPT_MAX: Duration = Duration::from_secs(1);

/// Records kept back before no more are taken from the client, as a multiple of the stream's limit.
const HELD_RECORDS_FACTOR: usize = 4;
/// The same as a count, two batches, for streams with a small limit.
const HELD_RECORDS_MIN: usize = 1024;

/// What is to be done with the partition's assignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing.
    None,
    /// Take no more from the client: the reader is behind.
    Keep,
    /// Take again.
    Lead,
    /// Stop fetching: the reader is behind for long.
    Park,
    /// Fetch again from the position.
    Unpark,
    /// Forget the partition: the reader is gone, or has been told the last item.
    Remove,
}

/// What is done with the records that the client fetches.
///
/// | from   | because                           | to     |
/// |--------|-----------------------------------|--------|
/// | Led    | the reader is behind              | Kept   |
/// | Kept   | the reader has caught up          | Led    |
/// | Kept   | [`KEPT_MAX`] has passed           | Parked |
/// | Parked | the reader has caught up          | Led    |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fetching {
    /// They are taken as they come.
    Led,
    /// They wait in the client.
    Kept { since: Instant },
    /// Nothing is fetched.
    Parked,
}

/// One open partition. It lives from open to close, so a record that finds none, or another one, goes nowhere.
pub(crate) struct Part {
    pub(crate) topic: TopicName,
    pub(crate) partition: Partition,
    /// Offset it was opened at.
    pub(crate) from: NextOffset,
    /// The record to fetch next; all before it were put into the stream or are held.
    pub(crate) next: NextOffset,
    fetching: Fetching,
    outlet: Option<Outlet>,
    held: VecDeque<Chunk>,
    held_load: Load,
    failure: Option<SourceError>,
    progress_at: Instant,
    stall_after: Duration,
    /// The client has found nothing more to read at `next`.
    is_at_end: bool,
    /// `next` lies past the last record that was fetched, and the reader has not been told.
    passed: Option<NextOffset>,
}

impl Part {
    pub(crate) fn new(
        topic: TopicName,
        partition: Partition,
        from: NextOffset,
        read_ahead: ReadAhead,
        now: Instant,
    ) -> (Self, RecordStream) {
        let (outlet, stream) = Outlet::new(read_ahead);
        let part = Self {
            topic,
            partition,
            from,
            next: from,
            fetching: Fetching::Led,
            outlet: Some(outlet),
            held: VecDeque::new(),
            held_load: Load::default(),
            failure: None,
            progress_at: now,
            stall_after: STALL_AFTER,
            is_at_end: false,
            passed: None,
        };
        (part, stream)
    }

    /// Index in its topic, as librdkafka counts.
    pub(crate) fn index(&self) -> i32 {
        // Indexes are far below 2^31 (limits of the model).
        i32::try_from(self.partition.index.get()).unwrap_or(i32::MAX)
    }

    /// Whether records are fetched for it.
    pub(crate) fn is_assigned(&self) -> bool {
        self.fetching != Fetching::Parked && self.failure.is_none()
    }

    /// Whether its reader is told, or about to be told, that it cannot go on.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Whether what is fetched for it is taken at once.
    pub(crate) fn is_led(&self) -> bool {
        self.fetching == Fetching::Led && self.failure.is_none()
    }

    /// Whether it needs a visit although nothing was fetched for it.
    pub(crate) fn is_waiting(&self) -> bool {
        self.fetching != Fetching::Led
            || !self.held.is_empty()
            || self.passed.is_some()
            || self.failure.is_some()
    }

    /// Whether the record at `offset` is still to come.
    pub(crate) fn wants(&self, offset: i64) -> bool {
        self.failure.is_none() && offset >= self.next.signed()
    }

    /// Whether offsets are left out before or within `run`. Compaction and transactions leave them out, and so does a
    /// record that went astray.
    pub(crate) fn is_past_gap(&self, run: &[Message]) -> bool {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { return false };
        let next = self.next.signed();
        if first.is_error() {
            return run.iter().any(|message| message.offset() > next);
        }
        let span = last.offset().saturating_sub(first.offset()).saturating_add(1);
        first.offset() > next || i64::try_from(run.len()).is_ok_and(|length| span > length)
    }

    /// Takes records, those that are still to come. Offsets may jump: compaction and transactions leave gaps.
    pub(crate) fn accept(
        &mut self,
        mut messages: Vec<Message>,
        hold: &Hold,
        with_headers: bool,
        unread: &mut Unread,
        now: Instant,
    ) {
        let Some(limit) = self.outlet.as_ref().map(Outlet::chunk_limit) else { return };
        let mut next = self.next.signed();
        messages.retain(|message| {
            let is_wanted = message.offset() >= next;
            if is_wanted {
                next = message.offset().saturating_add(1);
            }
            is_wanted
        });
        while let Some((load, last)) = measure(&messages, limit) {
            let Ok(next) = NextOffset::from_signed(last.saturating_add(1)) else { return };
            let rest = messages.split_off(load.records);
            let origin =
                Origin { topic: self.topic.clone(), partition: self.partition, with_headers };
            let pack = unread.pack(origin, load, Fetch::new(messages, hold.clone()));
            messages = rest;
            self.hold(Chunk { pack, load, next }, now);
        }
    }

    fn hold(&mut self, chunk: Chunk, now: Instant) {
        self.next = chunk.next;
        self.is_at_end = false;
        // A record says as much.
        self.passed = None;
        self.progress_at = now;
        self.stall_after = STALL_AFTER;
        self.held_load.add(chunk.load);
        self.held.push_back(chunk);
    }

    /// The client has read all that can be read before `offset`, which is the end for now. What lies between the last
    /// record and it are markers of transactions, aborted records, or what compaction has left empty.
    pub(crate) fn read_to(&mut self, offset: i64) {
        let Ok(offset) = NextOffset::from_signed(offset) else { return };
        if self.has_failed() || offset < self.next {
            return;
        }
        self.is_at_end = true;
        if offset > self.next {
            self.next = offset;
            self.passed = Some(offset);
        }
    }

    /// One past the last record that can be read, with `high` as the last known watermark. Records of a transaction that
    /// is still open cannot be read yet.
    pub(crate) fn end(&self, high: Option<i64>) -> Option<NextOffset> {
        let high = NextOffset::from_signed(high?).ok()?;
        Some(if self.is_at_end { self.next } else { high.max(self.next) })
    }

    /// Ends the partition with `error`, once the reader has room for what was fetched before. The first error counts.
    pub(crate) fn fail(&mut self, error: SourceError) {
        self.failure.get_or_insert(error);
    }

    /// Gives the reader what it has room for.
    pub(crate) fn flush(&mut self, now: Instant) -> Step {
        let Some(outlet) = self.outlet.as_mut() else { return Step::Remove };
        match outlet.push(&mut self.held) {
            Ok(moved) => self.held_load.subtract(moved),
            Err(Gone) => return Step::Remove,
        }
        if self.held.is_empty()
            && let Some(next) = self.passed
            && outlet.pass(next)
        {
            self.passed = None;
        }
        if self.failure.is_some() {
            return self.tell_failure();
        }
        let limit = outlet.limit();
        let records_max = limit.records.saturating_mul(HELD_RECORDS_FACTOR).max(HELD_RECORDS_MIN);
        let held = self.held_load;
        let is_behind = held.records >= records_max || held.bytes >= limit.bytes;
        let has_caught_up = held.records <= records_max / 2 && held.bytes <= limit.bytes / 2;
        let (fetching, step) = match self.fetching {
            Fetching::Led if is_behind => (Fetching::Kept { since: now }, Step::Keep),
            Fetching::Kept { .. } if has_caught_up => (Fetching::Led, Step::Lead),
            Fetching::Kept { since } if now.duration_since(since) >= KEPT_MAX => {
                (Fetching::Parked, Step::Park)
            }
            Fetching::Parked if has_caught_up => (Fetching::Led, Step::Unpark),
            same @ (Fetching::Led | Fetching::Kept { .. } | Fetching::Parked) => (same, Step::None),
        };
        self.fetching = fetching;
        step
    }

    fn tell_failure(&mut self) -> Step {
        if !self.held.is_empty() || self.passed.is_some() {
            return Step::None;
        }
        if let (Some(error), Some(outlet)) = (self.failure.take(), self.outlet.take())
            && outlet.fail(error).is_err()
        {
            tracing::debug!(topic = %self.topic, partition = %self.partition.index, "reader left before the failure");
        }
        Step::Remove
    }

    /// Whether the reader has dropped its stream.
    pub(crate) fn is_gone(&self) -> bool {
        self.outlet.as_ref().is_none_or(Outlet::is_gone)
    }

    /// Whether there are records to read (`high` is the last known watermark) and none has come for too long.
    pub(crate) fn is_stalled(&mut self, high: Option<i64>, now: Instant) -> bool {
        if !self.is_led() || high.is_some_and(|high| high <= self.next.signed()) {
            self.progress_at = now;
            return false;
        }
        if now.duration_since(self.progress_at) < self.stall_after {
            return false;
        }
        self.progress_at = now;
        self.stall_after = (self.stall_after * 2).min(STALL_AFTER_MAX);
        true
    }

    /// It is assigned now, led into the fan-in; the time of a stall counts from here.
    pub(crate) fn assigned_now(&mut self, now: Instant) {
        self.progress_at = now;
        self.fetching = Fetching::Led;
    }
}

/// What the first of `messages` that fit one chunk amount to, and the offset of their last; nothing without messages.
fn measure(messages: &[Message], limit: ChunkLimit) -> Option<(Load, i64)> {
    let (mut load, mut last) = (Load::default(), None);
    for message in messages {
        let size = Load { records: 1, bytes: message.size_bytes() };
        let is_full = load.records == limit.records || load.bytes + size.bytes > limit.bytes;
        if is_full && load.records > 0 {
            break;
        }
        load.add(size);
        last = Some(message.offset());
    }
    last.map(|last| (load, last))
}

#[cfg(test)]
mod tests {
    use tenure_model::{PartitionIndex, TopicId};

    use tenure_sdk::source::Fetched;

    use super::*;
    use crate::outlet::tests::chunks;

    fn part(limit: ReadAhead, now: Instant) -> (Part, RecordStream) {
        let topic = TopicName::new("t").unwrap();
        let index = PartitionIndex::new(0).unwrap();
        let partition = Partition { topic_id: TopicId::of_name(&topic), index };
        Part::new(topic, partition, NextOffset::ZERO, limit, now)
    }

    #[test]
    fn end_is_the_watermark_unless_the_client_has_found_nothing_more() {
        let start = Instant::now();
        let (mut part, _stream) = part(ReadAhead::default(), start);
        let end = |part: &Part, high| part.end(high).map(NextOffset::get);
        assert_eq!(end(&part, None), None, "no fetch was ever answered");
        assert_eq!(end(&part, Some(4)), Some(4));
        hold(&mut part, 0, 3, 1, start);
        assert_eq!(end(&part, Some(2)), Some(3), "the watermark is of an earlier fetch");
        part.read_to(4);
        assert_eq!(end(&part, Some(9)), Some(4), "a transaction is open");
        hold(&mut part, 5, 1, 1, start);
        assert_eq!(end(&part, Some(9)), Some(9), "it is not known whether there is more");
    }

    #[test]
    fn reader_is_told_of_a_tail_without_records_after_the_records_before_it() {
        let start = Instant::now();
        let (mut part, mut stream) = part(ReadAhead { records: 2, bytes: 100 }, start);
        let mut check = |part: &mut Part, want: &[&str]| {
            for want in want {
                part.flush(start);
                let got = match stream.try_recv() {
                    Ok(Fetched::Passed(next)) => format!("passed {next}"),
                    Ok(fetched) => fetched.into_records().unwrap()[0].offset.to_string(),
                    Err(_) => "nothing".to_owned(),
                };
                assert_eq!(got, *want);
            }
        };
        hold(&mut part, 0, 3, 1, start);
        part.read_to(5);
        assert_eq!(part.next.get(), 5, "what is assigned anew starts there");
        check(&mut part, &["0", "1", "2", "passed 5", "nothing"]);
        part.read_to(5);
        part.read_to(4);
        assert!(!part.is_waiting());
        check(&mut part, &["nothing"]);
        part.read_to(7);
        hold(&mut part, 8, 1, 1, start);
        check(&mut part, &["8", "nothing"]);
        for next in [10, 12, 14, 16] {
            part.read_to(next);
            part.flush(start);
        }
        assert!(part.is_waiting(), "the stream is full");
        check(&mut part, &["passed 10", "passed 12", "passed 16", "nothing"]);
    }

    /// Takes records one by one.
    fn hold(part: &mut Part, first: u64, count: u64, size_bytes: usize, now: Instant) {
        for chunk in chunks(first, count, 1, size_bytes) {
            part.hold(chunk, now);
        }
    }

    #[test]
    fn stall_is_seen_only_with_records_to_read_and_ever_more_rarely_until_one_comes() {
        let start = Instant::now();
        let (mut part, _stream) = part(ReadAhead::default(), start);
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!part.is_stalled(Some(0), at(100)), "nothing to read");
        assert!(!part.is_stalled(Some(5), at(109)), "not yet");
        assert!(part.is_stalled(Some(5), at(110)));
        assert!(!part.is_stalled(Some(5), at(129)), "twice as long the second time");
        assert!(part.is_stalled(Some(5), at(130)));
        hold(&mut part, 3, 1, 1, at(131));
        assert!(!part.is_stalled(Some(5), at(140)), "a record came");
        assert!(part.is_stalled(None, at(141)), "no fetch was ever answered");
        part.fetching = Fetching::Parked;
        assert!(!part.is_stalled(Some(5), at(1000)), "parked on purpose");
    }

    #[test]
    fn reader_that_is_behind_keeps_its_records_in_the_client_and_is_parked_only_when_that_lasts() {
        let start = Instant::now();
        let (mut part, mut stream) = part(ReadAhead { records: 1000, bytes: 100 }, start);
        hold(&mut part, 0, 20, 10, start);
        assert_eq!(part.flush(start), Step::Keep);
        assert!(part.is_assigned() && !part.is_led());
        assert_eq!(part.flush(start), Step::None, "the reader has taken nothing");
        let mut read = || while stream.try_recv().is_ok() {};
        read();
        assert_eq!(part.flush(start), Step::Lead);
        hold(&mut part, 20, 10, 10, start);
        assert_eq!(part.flush(start), Step::Keep);
        let later = start + KEPT_MAX;
        assert_eq!(part.flush(later), Step::Park);
        assert!(!part.is_assigned());
        assert_eq!(part.flush(later), Step::None);
        read();
        assert_eq!(part.flush(later), Step::Unpark);
    }

    #[test]
    fn failure_comes_after_all_records_that_were_fetched_before() {
        let now = Instant::now();
        let (mut part, mut stream) = part(ReadAhead { records: 2, bytes: 100 }, now);
        hold(&mut part, 0, 3, 10, now);
        part.fail(SourceError::Transient("x".into()));
        assert!(!part.wants(3));
        assert_eq!(part.flush(now), Step::None);
        let mut offsets = Vec::new();
        let mut last = Step::None;
        while let Ok(item) = stream.try_recv() {
            match item.into_records() {
                Ok(records) => offsets.extend(records.iter().map(|r| r.offset.get())),
                Err(_) => offsets.push(u64::MAX),
            }
            if last == Step::None {
                last = part.flush(now);
            }
        }
        assert_eq!(offsets, [0, 1, 2, u64::MAX]);
        assert_eq!(last, Step::Remove);
    }
}
