//! Partitions whose log may not have the offset that is to be read next.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tenure_model::{NextOffset, Partition, TopicName};

use crate::source::{RecordSource, ResetPolicy, SourceError};

/// Partitions whose stream has ended with [`SourceError::OutOfRange`].
///
/// Kafka says so in answer to the first fetch only, when a handler runs already. From then on the source is asked where
/// the log begins and ends before the partition is read again; to ask before every read would cost each handoff a round
/// trip.
#[derive(Debug, Default)]
pub(crate) struct Doubts(Mutex<BTreeSet<Partition>>);

impl Doubts {
    fn partitions(&self) -> MutexGuard<'_, BTreeSet<Partition>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes with what a stream has ended.
    pub(super) fn note(&self, partition: Partition, error: &SourceError) {
        match error {
            SourceError::OutOfRange { .. } => drop(self.partitions().insert(partition)),
            SourceError::UnknownPartition { .. }
            | SourceError::OtherTopicId { .. }
            | SourceError::Truncated { .. }
            | SourceError::Transient(_)
            | SourceError::Fatal(_) => {}
        }
    }

    /// Whether the log has `from`, where there is a doubt; there is none afterwards if it has.
    ///
    /// # Errors
    ///
    /// [`SourceError::OutOfRange`], or what [`RecordSource::start`] says.
    pub(super) async fn check(
        &self,
        source: &dyn RecordSource,
        topic: &TopicName,
        partition: Partition,
        from: NextOffset,
    ) -> Result<(), SourceError> {
        if !self.partitions().contains(&partition) {
            return Ok(());
        }
        let first = source.start(topic, partition, ResetPolicy::Earliest).await?;
        let end = source.start(topic, partition, ResetPolicy::Latest).await?;
        if (first..=end).contains(&from) {
            self.partitions().remove(&partition);
            return Ok(());
        }
        let (topic, index) = (topic.clone(), partition.index.get());
        Err(SourceError::OutOfRange { topic, index, wanted: from })
    }
}
