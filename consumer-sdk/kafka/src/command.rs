//! What the owner thread can be asked to do.

#[cfg(test)]
use std::sync::mpsc::Receiver;

use tenure_model::{NextOffset, Partition, TopicId, TopicName};
use tenure_sdk::source::{ReadAhead, RecordStream, SourceError};
use tokio::sync::oneshot;

/// Stops the thread once the client is gone, and says so.
pub(crate) type Stopped = oneshot::Sender<()>;

/// Tells the outcome of an open.
pub(crate) type Opened = oneshot::Sender<Result<RecordStream, SourceError>>;

/// What the thread can be asked to do.
pub(crate) enum Command {
    /// Read a partition from `from`.
    Open {
        topic: TopicName,
        partition: Partition,
        from: NextOffset,
        read_ahead: ReadAhead,
        reply: Opened,
    },
    /// Stop to read a partition.
    Close { partition: Partition, reply: oneshot::Sender<()> },
    /// A look-up found the topic with this id.
    TopicSeen { topic: TopicName, topic_id: TopicId },
    /// The topic does not exist any more.
    TopicGone { topic: TopicName },
    /// Drop the client and end.
    Stop { reply: Stopped },
    /// Make the client fail for good.
    #[cfg(test)]
    Break,
    /// Let what is fetched for a partition go astray, until `end` is told, and wait for `on` before anything is taken.
    #[cfg(test)]
    Mislead {
        partition: Partition,
        begun: oneshot::Sender<()>,
        end: Receiver<()>,
        on: Receiver<()>,
    },
    /// Go on as if a partition had been read up to there, under a leader of that epoch.
    #[cfg(test)]
    Pretend { partition: Partition, next: NextOffset, leader_epoch: i32 },
    /// Wait for `on`, with all that is asked meanwhile.
    #[cfg(test)]
    Wait { begun: oneshot::Sender<()>, on: Receiver<()> },
    /// Assign a partition past all that is kept of the open ones.
    #[cfg(test)]
    Occupy { topic: TopicName, partition: Partition },
    /// Say what there is.
    #[cfg(test)]
    Count { reply: oneshot::Sender<Counts> },
}

#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    /// So far.
    pub(crate) clients: u64,
    /// Attempts to assign something with this client.
    pub(crate) assign_calls: usize,
    pub(crate) open: usize,
}
