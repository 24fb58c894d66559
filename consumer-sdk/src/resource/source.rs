//! A source without records.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use tenure_model::{NextOffset, Partition, TopicId, TopicName};
use tokio::sync::mpsc;

use crate::source::{
    Fetched, ReadAhead, RecordSource, RecordStream, ResetPolicy, SourceError, TopicInfo,
};

type Start = dyn Fn() -> NextOffset + Send + Sync;

/// Source of resources: every name exists, has one partition, and never has a record. Its topic id is made from the
/// name, so that all members, and the single calls of `Leases`, mean the same resource.
pub struct ResourceSource {
    /// Streams stay open while the resource is owned.
    open: Mutex<BTreeMap<Partition, mpsc::Sender<Fetched>>>,
    start: Arc<Start>,
}

impl fmt::Debug for ResourceSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResourceSource").field("open", &self.open().len()).finish()
    }
}

impl Default for ResourceSource {
    fn default() -> Self {
        Self::new()
    }
}

impl ResourceSource {
    /// Source of resources.
    #[must_use]
    pub fn new() -> Self {
        Self::starting_at(|| NextOffset::ZERO)
    }

    /// Source of resources whose committed position starts at what `start` answers, when a resource is owned for the
    /// first time.
    pub(crate) fn starting_at(start: impl Fn() -> NextOffset + Send + Sync + 'static) -> Self {
        Self { open: Mutex::default(), start: Arc::new(start) }
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<Partition, mpsc::Sender<Fetched>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RecordSource for ResourceSource {
    fn topics<'a>(
        &'a self,
        names: &'a [TopicName],
    ) -> BoxFuture<'a, Result<Vec<TopicInfo>, SourceError>> {
        let resource = |name: &TopicName| TopicInfo {
            topic: name.clone(),
            topic_id: TopicId::of_name(name),
            partition_count: 1,
        };
        let resources = names.iter().map(resource).collect();
        Box::pin(async move { Ok(resources) })
    }

    fn start<'a>(
        &'a self,
        _topic: &'a TopicName,
        _partition: Partition,
        _policy: ResetPolicy,
    ) -> BoxFuture<'a, Result<NextOffset, SourceError>> {
        let start = (self.start)();
        Box::pin(async move { Ok(start) })
    }

    fn open<'a>(
        &'a self,
        _topic: &'a TopicName,
        partition: Partition,
        _from: NextOffset,
        _read_ahead: ReadAhead,
    ) -> BoxFuture<'a, Result<RecordStream, SourceError>> {
        let (sender, stream) = mpsc::channel(1);
        self.open().insert(partition, sender);
        Box::pin(async move { Ok(stream) })
    }

    fn close(&self, partition: Partition) -> BoxFuture<'_, ()> {
        self.open().remove(&partition);
        Box::pin(async {})
    }

    fn shutdown(&self, _deadline: Duration) -> BoxFuture<'_, ()> {
        self.open().clear();
        Box::pin(async {})
    }
}
