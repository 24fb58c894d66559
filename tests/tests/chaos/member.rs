//! A consumer in the test's process: real Kafka, a real coordinator, offsets there, and a runtime of its own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_model::LeaseSettings;
use tenure_sdk::consumer::{ConsumerError, Stopped};
use tenure_sdk::offsets::CoordinatorOffsets;
use tenure_sdk::sink::BoxError;
use tenure_sdk::{Consumer, Limits, Owned, Stopper};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

/// Records done by partition and epoch, in the order of delivery.
pub(crate) type Done = Arc<Mutex<BTreeMap<(u32, u64), Vec<u64>>>>;

pub(crate) struct Member {
    pub(crate) runtime: Runtime,
    pub(crate) stopper: Stopper,
    pub(crate) done: Done,
    run: JoinHandle<Result<Stopped, ConsumerError>>,
}

/// Threads of the runtime.
pub(crate) const THREADS: u16 = 2;

impl Member {
    /// Joins; `each` runs after each batch, on a thread of the runtime.
    pub(crate) fn join(
        kafka: &str,
        coordinator: &str,
        group: &str,
        topic: &str,
        ttl_ms: u64,
        each: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS.into())
            .enable_all()
            .build()
            .unwrap();
        let done = Done::default();
        let Consuming { stopper, run } = runtime.block_on(async {
            Consuming::start(kafka, coordinator, group, topic, ttl_ms, &done, each)
        });
        Self { runtime, stopper, done, run }
    }

    /// Asks for the end and waits for it, at most `longest`; nothing: it has not ended by then.
    pub(crate) fn stop(self, deadline: Duration, longest: Duration) -> Option<Stopped> {
        let Self { runtime, stopper, done: _, run } = self;
        stopper.stop(deadline);
        let ended = runtime.block_on(async { tokio::time::timeout(longest, run).await });
        runtime.shutdown_background();
        Some(ended.ok()?.unwrap().unwrap())
    }

    pub(crate) fn count(&self) -> usize {
        self.done.lock().unwrap().values().map(Vec::len).sum()
    }
}

/// A consumer on the runtime that it was started in.
pub(crate) struct Consuming {
    pub(crate) stopper: Stopper,
    pub(crate) run: JoinHandle<Result<Stopped, ConsumerError>>,
}

impl Consuming {
    /// Starts it; `done` is noted and `each` runs after each batch.
    pub(crate) fn start(
        kafka: &str,
        coordinator: &str,
        group: &str,
        topic: &str,
        ttl_ms: u64,
        done: &Done,
        each: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let source = Arc::new(KafkaSource::new(KafkaSettings::new(kafka)).unwrap());
        let topics = vec![topic.parse().unwrap()];
        let addresses = vec![coordinator.to_owned()];
        let consumer = Consumer::builder(group.parse().unwrap(), topics, source, addresses)
            .lease(LeaseSettings::for_ttl(ttl_ms))
            .build()
            .unwrap();
        let stopper = consumer.stopper();
        let (noted, each) = (Arc::clone(done), Arc::new(each));
        let handler = move |owned| work(owned, Arc::clone(&noted), Arc::clone(&each));
        Self { stopper, run: tokio::spawn(consumer.run(handler)) }
    }
}

async fn work(
    owned: Owned<CoordinatorOffsets>,
    done: Done,
    each: Arc<impl Fn() + Send + Sync + 'static>,
) -> Result<(), BoxError> {
    let key = (owned.grant().partition.index.get(), owned.grant().epoch.get());
    let (mut input, mut offsets) = owned.split();
    while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
        let numbers = batch.iter().map(|record| record.offset.get());
        done.lock().unwrap().entry(key).or_default().extend(numbers);
        offsets.done_before(batch.next());
        each();
    }
    Ok(())
}
