//! The Kafka client of the owner thread.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::types::RDKafkaErrorCode;
use rdkafka::{Message as _, Offset, TopicPartitionList};
use tenure_model::{Partition, TopicName};

use crate::ffi::{FanIn, Message, PartitionQueue, TopicHandle, Waker, cached_high};
use crate::part::Part;
use crate::settings::{KafkaSettings, create};

/// Messages taken at once: those of one partition fill a batch of the default limits, so that none is taken apart.
const BATCH_MAX: usize = 500;
/// Topics that a client gets to know before anything of them is assigned.
const KNOWN_MAX: usize = 1000;
/// Events served at once, so that a storm of them leaves time for records.
const EVENTS_MAX: usize = 1000;
/// How often a client that readers keep alive is looked at.
const OUTLAST_INTERVAL: Duration = Duration::from_millis(100);

/// Sends the client's errors to the log. A broker that is away is information: the client comes back by itself.
pub(crate) struct Context;

impl ClientContext for Context {
    fn error(&self, error: KafkaError, reason: &str) {
        tracing::info!(%error, reason, "kafka client reports");
    }
}

impl ConsumerContext for Context {}

/// A record that came on the queue of events, past the order of its partition.
pub(crate) struct Stray {
    pub(crate) topic: String,
    pub(crate) index: i32,
    pub(crate) offset: i64,
}

/// Outcome of serving events.
#[derive(Default)]
pub(crate) struct Events {
    pub(crate) strays: Vec<Stray>,
    /// Why the client can do nothing more.
    pub(crate) fatal: Option<String>,
}

/// Keeps what messages need of their client, librdkafka's handle, when the [`Client`] is gone.
#[derive(Clone)]
pub(crate) struct Hold {
    _consumer: Arc<BaseConsumer<Context>>,
}

/// Messages for readers. Fields drop in this order: the end of a handle waits for its messages for ever.
pub(crate) struct Fetch {
    pub(crate) messages: Vec<Message>,
    _hold: Hold,
}

impl Fetch {
    /// `hold` is of the client that the messages came from.
    pub(crate) const fn new(messages: Vec<Message>, hold: Hold) -> Self {
        Self { messages, _hold: hold }
    }
}

/// A consumer that reads assigned partitions through one queue. Fields drop in this order: queues before the consumer.
///
/// Dropped, it fetches nothing more, and librdkafka's handle ends: at once, or on a thread of its own once readers let go
/// of the last message.
pub(crate) struct Client {
    assigned: BTreeMap<Partition, PartitionQueue>,
    known: BTreeMap<TopicName, TopicHandle>,
    fan_in: FanIn,
    consumer: Arc<BaseConsumer<Context>>,
    #[cfg(test)]
    pub(crate) assign_calls: usize,
}

impl Client {
    pub(crate) fn new(settings: &KafkaSettings, waker: &Arc<Waker>) -> KafkaResult<Self> {
        let consumer: BaseConsumer<Context> = create(&settings.reader(), Context)?;
        let fan_in = FanIn::new(consumer.client(), waker);
        let consumer = Arc::new(consumer);
        Ok(Self {
            assigned: BTreeMap::new(),
            known: BTreeMap::new(),
            fan_in,
            consumer,
            #[cfg(test)]
            assign_calls: 0,
        })
    }

    /// For messages that leave the thread of the client.
    pub(crate) fn hold(&self) -> Hold {
        Hold { _consumer: Arc::clone(&self.consumer) }
    }

    /// Fetches nothing more, and lets go of what was fetched and not taken.
    fn quiet(&self) {
        if let Err(error) = self.consumer.unassign() {
            tracing::debug!(%error, "kafka client does not stop to fetch");
        }
        let mut rest = Vec::new();
        for queue in self.assigned.values() {
            queue.lead(&self.fan_in);
        }
        loop {
            self.take(Duration::ZERO, &mut rest);
            if rest.is_empty() {
                return;
            }
        }
    }

    /// Makes the client look for the topic's leaders in the background, so that an assignment finds them.
    pub(crate) fn get_to_know(&mut self, topic: &TopicName) {
        if self.known.len() < KNOWN_MAX
            && !self.known.contains_key(topic)
            && let Some(handle) = TopicHandle::new(self.consumer.client(), topic.as_str())
        {
            self.known.insert(topic.clone(), handle);
        }
    }

    /// Starts to fetch partitions at their positions, in one step, so that the first fetch is for all of them. Where
    /// that is refused, one by one; answers what was refused then.
    pub(crate) fn assign(&mut self, parts: &[&Part]) -> Vec<(Partition, KafkaError)> {
        match (parts, self.assign_together(parts)) {
            (_, Ok(())) => Vec::new(),
            ([part], Err(error)) => vec![(part.partition, error)],
            (parts, Err(error)) => {
                tracing::info!(count = parts.len(), %error, "cannot assign together, assigning one by one");
                let refused = parts.iter().filter_map(|part| {
                    let error = self.assign_together(std::slice::from_ref(part)).err()?;
                    Some((part.partition, error))
                });
                refused.collect()
            }
        }
    }

    /// All or none, by explicit offsets.
    ///
    /// Led before, so that no record ever comes on the client's own queue. Led again after: the end of an earlier
    /// assignment runs late on librdkafka's thread and undoes the first; records then wait in the partition's queue.
    fn assign_together(&mut self, parts: &[&Part]) -> KafkaResult<()> {
        let mut list = TopicPartitionList::with_capacity(parts.len());
        let mut queues = Vec::with_capacity(parts.len());
        for part in parts {
            let (topic, offset) = (part.topic.as_str(), Offset::Offset(part.next.signed()));
            list.add_partition_offset(topic, part.index(), offset)?;
            let queue = PartitionQueue::new(self.consumer.client(), topic, part.index());
            let queue = queue.ok_or_else(|| {
                KafkaError::ClientCreation("partition queue not available".into())
            })?;
            queue.lead(&self.fan_in);
            queues.push((part.partition, queue));
        }
        #[cfg(test)]
        {
            self.assign_calls += 1;
        }
        self.consumer.incremental_assign(&list)?;
        for (partition, queue) in queues {
            queue.lead(&self.fan_in);
            self.assigned.insert(partition, queue);
        }
        Ok(())
    }

    /// Stops to fetch a partition. Messages of it that were fetched before are never taken after this returned.
    pub(crate) fn unassign(&mut self, part: &Part) {
        let Some(queue) = self.assigned.remove(&part.partition) else { return };
        let done = list(part, Offset::Invalid)
            .and_then(|partitions| self.consumer.incremental_unassign(&partitions));
        if let Err(error) = done {
            tracing::warn!(topic = %part.topic, partition = %part.partition.index, %error, "cannot unassign");
        }
        drop(queue);
    }

    /// Takes what was fetched into `taken`, in place of what was there.
    pub(crate) fn take(&self, wait: Duration, taken: &mut Vec<Message>) {
        self.fan_in.take(wait, BATCH_MAX, taken);
    }

    /// Takes nothing more of a partition; what is fetched for it waits in its own queue, within the client's limits.
    pub(crate) fn keep(&self, partition: Partition) {
        if let Some(queue) = self.assigned.get(&partition) {
            queue.keep();
        }
    }

    /// Takes records of a kept partition again, first what waits in its queue.
    pub(crate) fn lead(&self, partition: Partition) {
        if let Some(queue) = self.assigned.get(&partition) {
            queue.lead(&self.fan_in);
        }
    }

    /// Last known high watermark of a partition.
    pub(crate) fn high(&self, part: &Part) -> Option<i64> {
        cached_high(self.consumer.client(), part.topic.as_str(), part.index())
    }

    /// Serves logs, errors and statistics, which arrive only here.
    pub(crate) fn serve_events(&self) -> Events {
        let mut events = Events::default();
        for _ in 0..EVENTS_MAX {
            match self.consumer.poll(Duration::ZERO) {
                None => break,
                Some(Ok(message)) => events.strays.push(Stray {
                    topic: message.topic().to_owned(),
                    index: message.partition(),
                    offset: message.offset(),
                }),
                Some(Err(error)) => tracing::debug!(%error, "kafka client event"),
            }
        }
        events.fatal = self.fatal();
        events
    }

    pub(crate) fn fatal(&self) -> Option<String> {
        let (code, text): (RDKafkaErrorCode, String) = self.consumer.client().fatal_error()?;
        Some(format!("{code}: {text}"))
    }

    /// Lets what is fetched for a partition go to the queue of events, as the late end of an assignment does.
    #[cfg(test)]
    pub(crate) fn mislead(&self, partition: Partition) {
        self.assigned[&partition].mislead(self.consumer.client());
    }

    /// Goes on at the part's position, as one that was read under a leader of `epoch`.
    #[cfg(test)]
    pub(crate) fn seek(&self, part: &Part, epoch: i32) {
        let partitions = list(part, Offset::Offset(part.next.signed())).expect("a position");
        crate::ffi::set_leader_epoch(&partitions, part.topic.as_str(), part.index(), epoch);
        let sought = self.consumer.seek_partitions(partitions, Duration::from_secs(10));
        sought.expect("an assigned partition");
    }

    /// Assigns a partition that it then knows nothing of.
    #[cfg(test)]
    pub(crate) fn occupy(&self, topic: &str, index: i32) {
        let mut list = TopicPartitionList::with_capacity(1);
        list.add_partition_offset(topic, index, Offset::Offset(0)).expect("an offset");
        self.consumer.incremental_assign(&list).expect("a partition that is free");
    }

    #[cfg(test)]
    pub(crate) fn consumer_weak(&self) -> std::sync::Weak<BaseConsumer<Context>> {
        Arc::downgrade(&self.consumer)
    }

    #[cfg(test)]
    pub(crate) fn break_for_good(&self) {
        crate::ffi::break_client(self.consumer.client());
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Only readers hold it beside this; they have what they have, and get nothing more from it.
        if Arc::strong_count(&self.consumer) > 1 {
            self.quiet();
            outlast_readers(Arc::clone(&self.consumer));
        }
    }
}

/// Ends the consumer once nobody else has it, on a thread of its own, and serves its events meanwhile: they would pile up.
fn outlast_readers(consumer: Arc<BaseConsumer<Context>>) {
    let wait = move || {
        while Arc::strong_count(&consumer) > 1 {
            std::thread::sleep(OUTLAST_INTERVAL);
            (0..EVENTS_MAX).map_while(|_| consumer.poll(Duration::ZERO)).for_each(drop);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("tenure-kafka-end".into()).spawn(wait) {
        tracing::warn!(%error, "no thread for the end of a kafka client, it ends where the last record is let go");
    }
}

fn list(part: &Part, offset: Offset) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::with_capacity(1);
    list.add_partition_offset(part.topic.as_str(), part.index(), offset)?;
    Ok(list)
}

/// Drops something whose destructor may block.
pub(crate) fn drop_elsewhere<T: Send + 'static>(value: T) {
    let spawned =
        std::thread::Builder::new().name("tenure-kafka-drop".into()).spawn(move || drop(value));
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread to drop a kafka client on, it was dropped here");
    }
}
