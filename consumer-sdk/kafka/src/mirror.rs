//! Copies committed offsets to Kafka's own store.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::KafkaResult;
use rdkafka::{Offset, TopicPartitionList};
use tenure_model::{Epoch, NextOffset, TopicName};
use tenure_sdk::offsets::{MirroredOffset, OffsetMirror};
use tokio::sync::oneshot;

use crate::client::Context;
use crate::settings::{KafkaSettings, create};
use crate::source::StartError;

/// Shortest time between two commits.
pub const MIRROR_INTERVAL: Duration = Duration::from_secs(1);

/// What the metadata of a mirrored offset begins with; the epoch follows.
pub const MIRROR_METADATA: &str = "tenure epoch=";

/// Copies offsets to Kafka's own store under a consumer group's name, with the epoch in the metadata, so that
/// `kafka-consumer-groups --describe` and lag exporters keep working.
///
/// Kafka takes such a commit from anybody while the group has no members: a stale owner's copy may land last, and stays
/// until the next one. Never use the group of a transactional home for it, and never read it back.
///
/// A thread of its own does the writing, at most once a second; a broker that is away costs nothing but age.
pub struct KafkaMirror {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    noted: BTreeMap<(TopicName, u32), (NextOffset, Epoch)>,
    flushes: Vec<oneshot::Sender<()>>,
    ends: bool,
}

impl std::fmt::Debug for KafkaMirror {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaMirror").field("noted", &self.shared.state().noted.len()).finish()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KafkaMirror {
    /// Starts to mirror under the consumer group `kafka_group`. Does not wait for a broker.
    ///
    /// # Errors
    ///
    /// [`StartError`] when the settings are refused or the machine has no thread left.
    pub fn new(settings: &KafkaSettings, kafka_group: &str) -> Result<Self, StartError> {
        settings.validate()?;
        let mut config = settings.lookup();
        config.set("client.id", format!("{}-mirror", settings.client_id));
        config.set("group.id", kafka_group);
        let client: BaseConsumer<Context> = create(&config, Context)?;
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        let write = move || of_thread.write_until_the_end(&client);
        std::thread::Builder::new().name("tenure-mirror".into()).spawn(write)?;
        Ok(Self { shared })
    }
}

impl Drop for KafkaMirror {
    fn drop(&mut self) {
        self.shared.state().ends = true;
        self.shared.changed.notify_all();
    }
}

impl OffsetMirror for KafkaMirror {
    fn note(&self, offset: MirroredOffset) {
        let MirroredOffset { topic, partition, epoch, next_offset } = offset;
        let key = (topic, partition.index.get());
        self.shared.state().noted.insert(key, (next_offset, epoch));
        self.shared.changed.notify_all();
    }

    fn flush(&self, deadline: Duration) -> BoxFuture<'_, ()> {
        let (written, done) = oneshot::channel();
        self.shared.state().flushes.push(written);
        self.shared.changed.notify_all();
        Box::pin(async move {
            if tokio::time::timeout(deadline, done).await.is_err() {
                tracing::warn!("offsets were not mirrored in time: the copies are old");
            }
        })
    }
}

impl Shared {
    fn write_until_the_end(&self, client: &BaseConsumer<Context>) {
        let mut is_broken = false;
        loop {
            let (noted, flushes, ends) = self.wait();
            if !noted.is_empty() {
                match commit(client, &noted) {
                    Ok(()) => is_broken = false,
                    Err(error) => {
                        // Once: the next attempts fail for the same reason.
                        if !is_broken {
                            tracing::warn!(%error, "offsets are not mirrored, the copies grow old");
                        }
                        is_broken = true;
                        self.put_back(noted);
                    }
                }
            }
            // Logs and errors pile up in the client until someone serves them.
            while client.poll(Duration::ZERO).is_some() {}
            for flush in flushes {
                // Nobody may wait any more.
                let _told = flush.send(());
            }
            if ends {
                return;
            }
        }
    }

    /// Waits for something to write; a flush and the end do not wait for the interval.
    #[allow(clippy::type_complexity, reason = "the parts of the state, taken out")]
    fn wait(
        &self,
    ) -> (BTreeMap<(TopicName, u32), (NextOffset, Epoch)>, Vec<oneshot::Sender<()>>, bool) {
        let mut state = self.state();
        let is_idle =
            |state: &mut State| state.noted.is_empty() && state.flushes.is_empty() && !state.ends;
        state = self.changed.wait_while(state, is_idle).unwrap_or_else(PoisonError::into_inner);
        let is_early = |state: &mut State| state.flushes.is_empty() && !state.ends;
        let waited = self.changed.wait_timeout_while(state, MIRROR_INTERVAL, is_early);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        (std::mem::take(&mut state.noted), std::mem::take(&mut state.flushes), state.ends)
    }

    fn put_back(&self, failed: BTreeMap<(TopicName, u32), (NextOffset, Epoch)>) {
        let mut state = self.state();
        for (key, value) in failed {
            state.noted.entry(key).or_insert(value);
        }
    }
}

fn commit(
    client: &BaseConsumer<Context>,
    noted: &BTreeMap<(TopicName, u32), (NextOffset, Epoch)>,
) -> KafkaResult<()> {
    let mut list = TopicPartitionList::with_capacity(noted.len());
    for ((topic, index), (next, epoch)) in noted {
        let index = i32::try_from(*index).unwrap_or(i32::MAX);
        list.add_partition_offset(topic.as_str(), index, Offset::Offset(next.signed()))?;
        if let Some(mut line) = list.find_partition(topic.as_str(), index) {
            line.set_metadata(format!("{MIRROR_METADATA}{}", epoch.get()));
        }
    }
    client.commit(&list, CommitMode::Sync)
}
