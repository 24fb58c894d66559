//! Where records come from.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use tenure_model::{NextOffset, Partition, TopicId, TopicName};
use tokio::sync::mpsc;

use crate::sink::BoxError;

mod payload;

pub use payload::{Lender, Payload};

/// One record. A clone copies what is lent of its key and value, see [`Payload`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Where it lies.
    pub partition: Partition,
    /// Name of the topic.
    pub topic: TopicName,
    /// Its offset.
    pub offset: NextOffset,
    /// Milliseconds since 1970; absent when the broker has none.
    pub timestamp_ms: Option<i64>,
    /// Key.
    pub key: Option<Payload>,
    /// Value; absent in a tombstone.
    pub value: Option<Payload>,
    /// Headers, in order.
    pub headers: Vec<(String, Option<Bytes>)>,
}

impl Record {
    /// Offset of the record to read after this one.
    #[must_use]
    pub fn next(&self) -> NextOffset {
        NextOffset::new(self.offset.get().saturating_add(1)).unwrap_or(self.offset)
    }

    /// Name of the effect of this record: `topic id/partition/offset`. The epoch is not in it, or the next owner's
    /// replay would have a new one.
    #[must_use]
    pub fn idempotency_key(&self) -> String {
        format!("{}/{}/{}", self.partition.topic_id, self.partition.index, self.offset)
    }
}

/// A topic as the source sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicInfo {
    /// Name.
    pub topic: TopicName,
    /// Which life of it.
    pub topic_id: TopicId,
    /// Partitions, at least 1.
    pub partition_count: u32,
}

/// Where to start a partition whose home has no offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResetPolicy {
    /// At the first record that is still there.
    #[default]
    Earliest,
    /// After the last record.
    Latest,
    /// At the first record whose timestamp is not before this many milliseconds since 1970; after the last record when
    /// there is none.
    Timestamp(i64),
    /// None: the partition stands still, says so, and waits until an offset is set by name.
    Fail,
}

/// Limits of what is read ahead, per partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadAhead {
    /// Records. Default 1000.
    pub records: usize,
    /// Bytes of keys and values. Default 8 MiB.
    pub bytes: usize,
}

impl Default for ReadAhead {
    fn default() -> Self {
        Self { records: 1000, bytes: 8 * 1024 * 1024 }
    }
}

/// What a stream of records carries.
#[derive(Debug)]
pub enum Fetched {
    /// Records with rising offsets. Never empty.
    Records(Vec<Record>),
    /// The same in the source's own form: whoever reads the stream makes records of them, where they are used next.
    Packed(Box<dyn Packed>),
    /// There is no record between the last one and this offset, and there will be none: what lies there are markers of
    /// transactions, aborted records, or what compaction has left empty. For the end of a partition; a gap before a
    /// record needs no word.
    Passed(NextOffset),
    /// The partition cannot go on: out of range, deleted topic, fatal client error. The last item.
    Failed(SourceError),
}

impl Fetched {
    /// The records, made here if they are not yet; none of [`Fetched::Passed`] alone.
    ///
    /// # Errors
    ///
    /// Why the partition cannot go on.
    pub fn into_records(self) -> Result<Vec<Record>, SourceError> {
        match self {
            Self::Records(records) => Ok(records),
            Self::Packed(packed) => Ok(packed.unpack()),
            Self::Passed(_) => Ok(Vec::new()),
            Self::Failed(error) => Err(error),
        }
    }
}

/// Records that a source has fetched and not made yet.
///
/// A source that copies out of buffers of its own, or lends them, leaves that to its readers: the bytes are then touched on
/// the thread that works on them alone, and one slow reader costs the others nothing.
pub trait Packed: fmt::Debug + Send {
    /// Makes the records: with rising offsets, never empty. Does not wait for anything.
    fn unpack(self: Box<Self>) -> Vec<Record>;
}

/// Records of one partition, in order. Bounded: a reader that stops makes the source pause this partition alone.
pub type RecordStream = mpsc::Receiver<Fetched>;

/// Why the source could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The topic or partition does not exist, or not any more.
    #[error("{topic}/{index} does not exist at the source")]
    UnknownPartition {
        /// Topic.
        topic: TopicName,
        /// Index in it.
        index: u32,
    },
    /// The topic under this name has another id: it was deleted and created again.
    #[error("topic {topic} has id {found} now, not {wanted}: it was created again")]
    OtherTopicId {
        /// Topic.
        topic: TopicName,
        /// Id asked for.
        wanted: TopicId,
        /// Id found.
        found: TopicId,
    },
    /// The offset is outside what the source still has. Never reset silently.
    #[error("offset {wanted} of {topic}/{index} is out of range: reset the offset by name")]
    OutOfRange {
        /// Topic.
        topic: TopicName,
        /// Index in it.
        index: u32,
        /// Offset asked for.
        wanted: NextOffset,
    },
    /// Records that were read are not in the log any more, and others may stand at their offsets: the log was cut back,
    /// as by an election of a replica that was behind. Never passed over silently.
    #[error(
        "the log of {topic}/{index} was cut back: records before offset {wanted}, which were read, are gone; look at what \
         they did, then reset the offset by name"
    )]
    Truncated {
        /// Topic.
        topic: TopicName,
        /// Index in it.
        index: u32,
        /// Offset that was to be read next.
        wanted: NextOffset,
    },
    /// Not reachable, or an error that may pass.
    #[error("source failed for now: {0}")]
    Transient(#[source] BoxError),
    /// An error that does not pass by itself.
    #[error("source failed: {0}")]
    Fatal(#[source] BoxError),
}

/// Source of records, read by explicit offsets. It never decides who owns what.
pub trait RecordSource: Send + Sync + 'static {
    /// Looks topics up; one that does not exist is left out, a look-up that failed is an error, never an absence.
    ///
    /// # Errors
    ///
    /// [`SourceError::Transient`] or [`SourceError::Fatal`].
    fn topics<'a>(
        &'a self,
        names: &'a [TopicName],
    ) -> BoxFuture<'a, Result<Vec<TopicInfo>, SourceError>>;

    /// Names of all topics that there are, for subscriptions by pattern; without those that the source keeps for
    /// itself.
    ///
    /// # Errors
    ///
    /// [`SourceError::Transient`]; [`SourceError::Fatal`] from a source that lists none, which is the default.
    fn topic_names(&self) -> BoxFuture<'_, Result<Vec<TopicName>, SourceError>> {
        Box::pin(async { Err(SourceError::Fatal("this source lists no topics: name them".into())) })
    }

    /// First (`Earliest`), next (`Latest`) or timed (`Timestamp`) offset of a partition at this moment.
    ///
    /// # Errors
    ///
    /// Any [`SourceError`]; `Fail` is answered with `OutOfRange` by the caller, never asked here.
    fn start<'a>(
        &'a self,
        topic: &'a TopicName,
        partition: Partition,
        policy: ResetPolicy,
    ) -> BoxFuture<'a, Result<NextOffset, SourceError>>;

    /// End of an open partition, one past its last record, as the source last heard it; nothing while it has not, and
    /// from a source that does not tell, which is the default. Asks nobody, and costs next to nothing.
    fn end_offset(&self, _partition: Partition) -> Option<NextOffset> {
        None
    }

    /// Starts to read a partition at `from`. It must not be open already.
    ///
    /// # Errors
    ///
    /// Any [`SourceError`].
    fn open<'a>(
        &'a self,
        topic: &'a TopicName,
        partition: Partition,
        from: NextOffset,
        read_ahead: ReadAhead,
    ) -> BoxFuture<'a, Result<RecordStream, SourceError>>;

    /// Stops to read a partition. Once it answers, nothing more is put into the partition's stream; a partition that
    /// is not open is fine.
    fn close(&self, partition: Partition) -> BoxFuture<'_, ()>;

    /// Ends the source; answers within `deadline` even when the broker is gone.
    fn shutdown(&self, deadline: Duration) -> BoxFuture<'_, ()>;
}
