//! Copies of committed offsets, for tools that look elsewhere.

use std::time::Duration;

use futures::future::BoxFuture;
use tenure_model::{Epoch, NextOffset, Partition, TopicName};

/// Where committed offsets are copied to, so that lag exporters and the broker's own tools keep working.
///
/// A copy is never read back: it is late, it may be lost, and its place is not fenced. The epoch goes with it, so that
/// a reader can tell a stale one.
pub trait OffsetMirror: Send + Sync + 'static {
    /// Notes an offset. Returns at once; a later one of the same partition replaces it.
    fn note(&self, offset: MirroredOffset);

    /// Writes what is noted, as far as that is done within `deadline`. Called once, at the end.
    fn flush(&self, deadline: Duration) -> BoxFuture<'_, ()>;
}

/// An offset to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirroredOffset {
    /// Name of the topic.
    pub topic: TopicName,
    /// The partition.
    pub partition: Partition,
    /// Epoch under which it was committed.
    pub epoch: Epoch,
    /// The offset. With a sink as home, the first record that its handler has not taken yet.
    pub next_offset: NextOffset,
}
