//! Source and sink in memory, for tests and examples.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use tenure_model::{Epoch, Home, NextOffset, Partition, PartitionIndex, TopicId, TopicName};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::grant::{Grant, Resource};
use crate::sink::{
    Capabilities, Enforcement, FencedSink, FencedWriter, Registered, Resolved, Scope, SinkError,
    Takeover, Verified,
};
use crate::source::{
    Fetched, Payload, ReadAhead, Record, RecordSource, RecordStream, ResetPolicy, SourceError,
    TopicInfo,
};

/// Records that go into a partition's stream at once, at most.
const CHUNK_RECORDS: usize = 100;

/// Topics in memory, and one reader of them. Cheap to clone; all clones are the same reader.
#[derive(Clone, Default)]
pub struct MemorySource {
    log: Arc<Log>,
    reader: Arc<Reader>,
}

#[derive(Default)]
struct Log {
    topics: Mutex<BTreeMap<TopicName, Topic>>,
    appended: watch::Sender<u64>,
}

#[derive(Default)]
struct Reader {
    open: Mutex<BTreeMap<Partition, JoinHandle<()>>>,
    hangs: watch::Sender<bool>,
}

struct Topic {
    id: TopicId,
    /// By offset; nothing where a marker takes one.
    partitions: Vec<Vec<Option<Record>>>,
}

impl fmt::Debug for MemorySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemorySource").field("topics", &self.topics().len()).finish()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemorySource {
    /// Source without topics.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Another reader of the same topics, with streams of its own: one for each consumer.
    #[must_use]
    pub fn reader(&self) -> Self {
        Self { log: Arc::clone(&self.log), reader: Arc::default() }
    }

    /// Makes a topic, or grows it; answers its partitions.
    pub fn create_topic(&self, name: &TopicName, partition_count: u32) -> Vec<Partition> {
        let mut topics = self.topics();
        let topic = topics
            .entry(name.clone())
            .or_insert_with(|| Topic { id: TopicId::of_name(name), partitions: Vec::new() });
        let count = topic.partitions.len().max(partition_count as usize);
        topic.partitions.resize_with(count, Vec::new);
        let indexes = (0..partition_count).filter_map(PartitionIndex::new);
        indexes.map(|index| Partition { topic_id: topic.id, index }).collect()
    }

    /// Appends a record; answers its offset, or nothing when there is no such partition.
    pub fn append(
        &self,
        topic: &TopicName,
        index: u32,
        value: impl Into<Bytes>,
    ) -> Option<NextOffset> {
        self.append_at(topic, index, value, None)
    }

    /// As [`MemorySource::append`], with a timestamp in milliseconds since 1970.
    pub fn append_at(
        &self,
        topic: &TopicName,
        index: u32,
        value: impl Into<Bytes>,
        timestamp_ms: Option<i64>,
    ) -> Option<NextOffset> {
        let mut topics = self.topics();
        let known = topics.get_mut(topic)?;
        let partition = Partition { topic_id: known.id, index: PartitionIndex::new(index)? };
        let slots = known.partitions.get_mut(index as usize)?;
        let offset = NextOffset::new(slots.len() as u64).ok()?;
        slots.push(Some(Record {
            partition,
            topic: topic.clone(),
            offset,
            timestamp_ms,
            key: None,
            value: Some(value.into().into()),
            headers: Vec::new(),
        }));
        drop(topics);
        self.log.appended.send_modify(|count| *count += 1);
        Some(offset)
    }

    /// Takes an offset without a record, as the end of a transaction does in Kafka; answers as
    /// [`MemorySource::append`].
    pub fn append_marker(&self, topic: &TopicName, index: u32) -> Option<NextOffset> {
        let mut topics = self.topics();
        let slots = topics.get_mut(topic)?.partitions.get_mut(index as usize)?;
        let offset = NextOffset::new(slots.len() as u64).ok()?;
        slots.push(None);
        drop(topics);
        self.log.appended.send_modify(|count| *count += 1);
        Some(offset)
    }

    /// Makes `close` and `shutdown` answer nothing while `hangs` is set, past any deadline, as a broken client may.
    pub fn set_hangs(&self, hangs: bool) {
        self.reader.hangs.send_replace(hangs);
    }

    fn topics(&self) -> MutexGuard<'_, BTreeMap<TopicName, Topic>> {
        locked(&self.log.topics)
    }

    async fn while_hanging(&self) {
        let mut hangs = self.reader.hangs.subscribe();
        // The sender lives in `self`.
        let _free = hangs.wait_for(|hangs| !hangs).await;
    }

    /// End of a partition, if it exists under this topic id.
    fn end_of(&self, topic: &TopicName, partition: Partition) -> Result<NextOffset, SourceError> {
        let unknown =
            || SourceError::UnknownPartition { topic: topic.clone(), index: partition.index.get() };
        let topics = self.topics();
        let known = topics.get(topic).ok_or_else(unknown)?;
        if known.id != partition.topic_id {
            let (wanted, found) = (partition.topic_id, known.id);
            return Err(SourceError::OtherTopicId { topic: topic.clone(), wanted, found });
        }
        let records = known.partitions.get(partition.index.get() as usize).ok_or_else(unknown)?;
        Ok(NextOffset::new(records.len() as u64).unwrap_or(NextOffset::ZERO))
    }

    fn first_at(
        &self,
        topic: &TopicName,
        partition: Partition,
        from_ms: i64,
        end: NextOffset,
    ) -> NextOffset {
        let topics = self.topics();
        let records = topics
            .get(topic)
            .and_then(|topic| topic.partitions.get(partition.index.get() as usize));
        let mut records = records.into_iter().flatten().flatten();
        let is_late = |record: &&Record| record.timestamp_ms.is_some_and(|at| at >= from_ms);
        records.find(is_late).map_or(end, |record| record.offset)
    }

    /// What is there from `from` on: its records, and how many offsets it takes.
    fn read(
        &self,
        topic: &TopicName,
        partition: Partition,
        from: NextOffset,
    ) -> (Vec<Record>, usize) {
        let topics = self.topics();
        let slots = topics
            .get(topic)
            .and_then(|topic| topic.partitions.get(partition.index.get() as usize));
        let skip = usize::try_from(from.get()).unwrap_or(usize::MAX);
        let slots = slots.into_iter().flatten().skip(skip).take(CHUNK_RECORDS);
        (slots.clone().flatten().cloned().collect(), slots.count())
    }

    async fn feed(
        self,
        topic: TopicName,
        partition: Partition,
        mut position: NextOffset,
        stream: mpsc::Sender<Fetched>,
    ) {
        let mut appended = self.log.appended.subscribe();
        loop {
            appended.mark_unchanged();
            let (records, count) = self.read(&topic, partition, position);
            if count == 0 {
                if appended.changed().await.is_err() {
                    return;
                }
                continue;
            }
            let read_to = position.get() + count as u64;
            position = NextOffset::new(read_to).unwrap_or(position);
            let ends_in_gap = records.last().is_none_or(|last| last.next() < position);
            if !records.is_empty() && stream.send(Fetched::Records(records)).await.is_err() {
                return;
            }
            if ends_in_gap && stream.send(Fetched::Passed(position)).await.is_err() {
                return;
            }
        }
    }
}

impl RecordSource for MemorySource {
    fn topics<'a>(
        &'a self,
        names: &'a [TopicName],
    ) -> BoxFuture<'a, Result<Vec<TopicInfo>, SourceError>> {
        let topics = MemorySource::topics(self);
        let found = names.iter().filter_map(|name| {
            let topic = topics.get(name)?;
            let partition_count = u32::try_from(topic.partitions.len()).ok()?;
            Some(TopicInfo { topic: name.clone(), topic_id: topic.id, partition_count })
        });
        let found = found.collect();
        Box::pin(async move { Ok(found) })
    }

    fn topic_names(&self) -> BoxFuture<'_, Result<Vec<TopicName>, SourceError>> {
        let names = MemorySource::topics(self).keys().cloned().collect();
        Box::pin(async move { Ok(names) })
    }

    fn start<'a>(
        &'a self,
        topic: &'a TopicName,
        partition: Partition,
        policy: ResetPolicy,
    ) -> BoxFuture<'a, Result<NextOffset, SourceError>> {
        let start = self.end_of(topic, partition).map(|end| match policy {
            ResetPolicy::Earliest | ResetPolicy::Fail => NextOffset::ZERO,
            ResetPolicy::Latest => end,
            ResetPolicy::Timestamp(from_ms) => self.first_at(topic, partition, from_ms, end),
        });
        Box::pin(async move { start })
    }

    fn end_offset(&self, partition: Partition) -> Option<NextOffset> {
        let topics = MemorySource::topics(self);
        let topic = topics.values().find(|topic| topic.id == partition.topic_id)?;
        let records = topic.partitions.get(partition.index.get() as usize)?;
        NextOffset::new(records.len() as u64).ok()
    }

    fn open<'a>(
        &'a self,
        topic: &'a TopicName,
        partition: Partition,
        from: NextOffset,
        read_ahead: ReadAhead,
    ) -> BoxFuture<'a, Result<RecordStream, SourceError>> {
        Box::pin(async move {
            if from > self.end_of(topic, partition)? {
                let index = partition.index.get();
                return Err(SourceError::OutOfRange { topic: topic.clone(), index, wanted: from });
            }
            let mut open = locked(&self.reader.open);
            if open.get(&partition).is_some_and(|feeder| !feeder.is_finished()) {
                let error = format!("{topic}/{} is open already", partition.index);
                return Err(SourceError::Fatal(error.into()));
            }
            let (sender, stream) = mpsc::channel((read_ahead.records / CHUNK_RECORDS).max(1));
            let feed = self.clone().feed(topic.clone(), partition, from, sender);
            open.insert(partition, tokio::spawn(feed));
            Ok(stream)
        })
    }

    fn close(&self, partition: Partition) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.while_hanging().await;
            let feeder = locked(&self.reader.open).remove(&partition);
            if let Some(feeder) = feeder {
                feeder.abort();
                // Cancelled or through: both mean that nothing more comes.
                let _ended = feeder.await;
            }
        })
    }

    fn shutdown(&self, _deadline: Duration) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.while_hanging().await;
            for feeder in std::mem::take(&mut *locked(&self.reader.open)).into_values() {
                feeder.abort();
            }
        })
    }
}

/// One row of a [`MemorySink`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryRow {
    /// Epoch under which it was written.
    pub epoch: Epoch,
    /// Offset of the record that it came from.
    pub offset: NextOffset,
    /// Value of that record.
    pub value: Option<Bytes>,
}

#[derive(Debug, Default)]
struct Fence {
    epoch: Option<Epoch>,
    next_offset: Option<NextOffset>,
    rows: Vec<MemoryRow>,
}

/// Fenced sink in memory: data and offset move in one step, under one lock. Cheap to clone.
#[derive(Clone, Debug)]
pub struct MemorySink {
    name: Arc<str>,
    is_fenced: bool,
    fences: Arc<Mutex<BTreeMap<Resource, Fence>>>,
}

impl MemorySink {
    /// Empty sink.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.into(), is_fenced: true, fences: Arc::default() }
    }

    /// Sink that takes every write, whatever its epoch and offset: the control of a drill.
    pub(crate) fn without_fence(name: &str) -> Self {
        Self { is_fenced: false, ..Self::new(name) }
    }

    /// Everything written for a resource, in order.
    #[must_use]
    pub fn rows(&self, resource: &Resource) -> Vec<MemoryRow> {
        locked(&self.fences).get(resource).map(|fence| fence.rows.clone()).unwrap_or_default()
    }

    /// Epoch of a resource's fence.
    #[must_use]
    pub fn fence(&self, resource: &Resource) -> Option<Epoch> {
        locked(&self.fences).get(resource).and_then(|fence| fence.epoch)
    }

    /// Offset of a resource.
    #[must_use]
    pub fn next_offset(&self, resource: &Resource) -> Option<NextOffset> {
        locked(&self.fences).get(resource).and_then(|fence| fence.next_offset)
    }
}

impl FencedSink for MemorySink {
    type Writer = MemoryWriter;

    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            scope: Scope::Partition,
            home: Home::Sink,
            enforcement: Enforcement::Resource,
            takeover: Takeover::Bounded(Duration::ZERO),
        }
    }

    async fn register(&self, grant: &Grant) -> Result<Registered<MemoryWriter>, SinkError> {
        let mut fences = locked(&self.fences);
        let fence = fences.entry(grant.resource.clone()).or_default();
        let displaced = fence.epoch.filter(|epoch| *epoch != grant.epoch);
        if displaced.is_some_and(|epoch| epoch > grant.epoch) {
            return Err(SinkError::Fenced { ours: grant.epoch, seen: displaced });
        }
        fence.epoch = Some(grant.epoch);
        let writer = MemoryWriter { sink: self.clone(), grant: grant.clone() };
        Ok(Registered { writer, displaced })
    }
}

/// Writes of one grant to a [`MemorySink`].
#[derive(Debug)]
pub struct MemoryWriter {
    sink: MemorySink,
    grant: Grant,
}

impl MemoryWriter {
    /// Writes a row for each record and moves the offset from `expected` to `next`, in one step.
    ///
    /// # Errors
    ///
    /// [`SinkError::Fenced`], [`SinkError::FenceRegressed`], [`SinkError::LeaseEnded`] or
    /// [`SinkError::OffsetConflict`]; nothing was written then.
    pub fn write(
        &mut self,
        records: &[Record],
        expected: NextOffset,
        next: NextOffset,
    ) -> Result<(), SinkError> {
        self.grant.lease.check()?;
        let epoch = self.grant.epoch;
        self.fenced(|fence| {
            let found = fence.next_offset.unwrap_or(NextOffset::ZERO);
            if found != expected && self.sink.is_fenced {
                return Err(SinkError::OffsetConflict { expected, found });
            }
            fence.rows.extend(records.iter().map(|record| MemoryRow {
                epoch,
                offset: record.offset,
                value: record.value.as_ref().map(Payload::to_bytes),
            }));
            fence.next_offset = Some(next);
            Ok(())
        })
    }

    /// Runs `act` on the fence if the fence is ours.
    fn fenced<T>(
        &self,
        act: impl FnOnce(&mut Fence) -> Result<T, SinkError>,
    ) -> Result<T, SinkError> {
        let ours = self.grant.epoch;
        let mut fences = locked(&self.sink.fences);
        match fences.get_mut(&self.grant.resource) {
            Some(fence) if fence.epoch == Some(ours) || !self.sink.is_fenced => act(fence),
            Some(fence) if fence.epoch > Some(ours) => {
                Err(SinkError::Fenced { ours, seen: fence.epoch })
            }
            other => {
                Err(SinkError::FenceRegressed { ours, seen: other.and_then(|fence| fence.epoch) })
            }
        }
    }
}

impl FencedWriter for MemoryWriter {
    async fn resume(&mut self, verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        match self.fenced(|fence| Ok(fence.next_offset))? {
            None if verified.home_initialised() => Err(SinkError::Misconfigured(format!(
                "the home was initialised and {} has no offset",
                self.grant.resource
            ))),
            next => Ok(next),
        }
    }

    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        self.fenced(|fence| Ok(*fence.next_offset.get_or_insert(start)))
    }

    async fn resolve(&mut self) -> Result<Resolved, SinkError> {
        // A write in memory is known at once.
        self.fenced(|fence| Ok(Resolved::Applied(fence.next_offset.unwrap_or(NextOffset::ZERO))))
    }

    async fn retire(self) -> Result<(), SinkError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::grant_for_tests;

    #[tokio::test]
    async fn registration_only_raises_the_fence_and_shuts_earlier_writers_out() {
        let sink = MemorySink::new("mem");
        let (first, second) = (grant_for_tests(1), grant_for_tests(2));
        let mut old = sink.register(&first).await.unwrap().writer;
        assert_eq!(old.initialise(NextOffset::ZERO).await.unwrap(), NextOffset::ZERO);
        let again = sink.register(&first).await.unwrap();
        assert_eq!(again.displaced, None, "repeating a registration does nothing");
        let newer = sink.register(&second).await.unwrap();
        assert_eq!(newer.displaced, Some(first.epoch));
        let late = sink.register(&first).await.map(|_| ());
        assert_eq!(late.unwrap_err().to_string(), "fenced: given e1, current is e2: stop writing");
        let one = NextOffset::new(1).unwrap();
        let write = old.write(&[], NextOffset::ZERO, one).unwrap_err();
        assert_eq!(write.to_string(), "fenced: given e1, current is e2: stop writing");
        assert_eq!(sink.next_offset(&first.resource), Some(NextOffset::ZERO));
        assert_eq!(sink.fence(&first.resource), Some(second.epoch));
        old.retire().await.unwrap();
        assert_eq!(sink.fence(&first.resource), Some(second.epoch), "retire lowers no fence");
    }

    #[tokio::test]
    async fn absent_offset_of_an_initialised_home_is_misconfigured() {
        let sink = MemorySink::new("mem");
        let mut writer = sink.register(&grant_for_tests(1)).await.unwrap().writer;
        let fresh = writer.resume(&Verified::without_coordinator(false)).await.unwrap();
        assert_eq!(fresh, None);
        let emptied = writer.resume(&Verified::without_coordinator(true)).await;
        assert!(matches!(emptied, Err(SinkError::Misconfigured(_))), "{emptied:?}");
    }

    #[tokio::test]
    async fn stopped_lease_refuses_a_write_before_it_is_sent() {
        let sink = MemorySink::new("mem");
        let grant = grant_for_tests(1);
        let mut writer = sink.register(&grant).await.unwrap().writer;
        grant.lease.stop();
        let one = NextOffset::new(1).unwrap();
        let refused = writer.write(&[], NextOffset::ZERO, one);
        assert!(matches!(refused, Err(SinkError::LeaseEnded(_))), "{refused:?}");
    }

    #[tokio::test]
    async fn source_puts_nothing_into_a_stream_after_close_answered() {
        let source = MemorySource::new();
        let topic = TopicName::new("t").unwrap();
        let partition = source.create_topic(&topic, 1)[0];
        source.append(&topic, 0, "a").unwrap();
        let (from, ahead) = (NextOffset::ZERO, ReadAhead::default());
        let mut stream = source.open(&topic, partition, from, ahead).await.unwrap();
        assert!(source.open(&topic, partition, from, ahead).await.is_err(), "it is open already");
        assert!(
            matches!(stream.recv().await, Some(Fetched::Records(records)) if records.len() == 1)
        );
        source.close(partition).await;
        source.append(&topic, 0, "b").unwrap();
        assert!(stream.recv().await.is_none());
    }
}
