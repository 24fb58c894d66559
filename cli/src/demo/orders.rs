//! The orders: a topic, and a producer that writes to it while the story goes on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use tenure_kafka::mock::MockKafka;
use tenure_kafka::producer::{NewRecord, Producer};
use tenure_model::{PartitionIndex, TopicName};

/// Pause between two rounds; each round writes [`PER_ROUND`] records to each partition.
const ROUND: Duration = Duration::from_millis(40);

/// Records per partition and round.
const PER_ROUND: u64 = 2;

/// Kafka with the topic of the demo.
pub(crate) struct Orders {
    pub(crate) topic: TopicName,
    pub(crate) bootstrap: String,
    /// Embedded brokers live in this process.
    embedded: Option<MockKafka>,
}

/// A producer that runs until it is stopped.
pub(crate) struct Production {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<BTreeMap<u64, u64>, String>>,
}

impl Orders {
    /// Starts embedded brokers, or uses running ones, and creates the topic.
    pub(crate) async fn prepare(kafka: Option<&str>, partitions: u16) -> Result<Self, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        match kafka {
            None => {
                let topic = "orders".parse::<TopicName>().map_err(|error| text(&error))?;
                let embedded = MockKafka::start(1).map_err(|error| text(&error))?;
                embedded.create_topic(topic.as_str(), partitions).map_err(|error| text(&error))?;
                Ok(Self { topic, bootstrap: embedded.bootstrap(), embedded: Some(embedded) })
            }
            Some(bootstrap) => {
                let name = format!("tenure-demo-orders-{:08x}", rand::random::<u32>());
                create_topic(bootstrap, &name, partitions).await?;
                let topic = name.parse::<TopicName>().map_err(|error| text(&error))?;
                Ok(Self { topic, bootstrap: bootstrap.to_owned(), embedded: None })
            }
        }
    }

    pub(crate) fn is_embedded(&self) -> bool {
        self.embedded.is_some()
    }

    /// Starts to write orders to all partitions, on a thread of its own.
    pub(crate) fn produce(&self, partitions: u16) -> std::io::Result<Production> {
        let stop = Arc::new(AtomicBool::new(false));
        let (topic, bootstrap, stopped) =
            (self.topic.clone(), self.bootstrap.clone(), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("orders".to_owned()).spawn(move || {
            let mut producer = Producer::new(&bootstrap).map_err(|error| error.to_string())?;
            let mut counts = BTreeMap::new();
            while !stopped.load(Ordering::SeqCst) {
                let records: Vec<NewRecord> = (0..u32::from(partitions))
                    .filter_map(PartitionIndex::new)
                    .flat_map(|partition| {
                        let next = counts.entry(u64::from(partition.get())).or_insert(0_u64);
                        let first = std::mem::replace(next, *next + PER_ROUND);
                        (first..first + PER_ROUND).map(move |number| {
                            let key = format!("order-{}-{number}", partition.get());
                            NewRecord::new(partition, &key, &format!("{{\"order\":{number}}}"))
                        })
                    })
                    .collect();
                producer.produce(&topic, records).map_err(|error| error.to_string())?;
                std::thread::sleep(ROUND);
            }
            Ok(counts)
        })?;
        Ok(Production { stop, thread })
    }
}

impl Production {
    /// Stops it; answers how many records each partition got.
    pub(crate) async fn stop(self) -> Result<BTreeMap<u64, u64>, String> {
        self.stop.store(true, Ordering::SeqCst);
        tokio::task::spawn_blocking(move || self.thread.join())
            .await
            .map_err(|error| error.to_string())?
            .map_err(|_| "the producer's thread ended badly".to_owned())?
    }
}

async fn create_topic(bootstrap: &str, name: &str, partitions: u16) -> Result<(), String> {
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", bootstrap)
        .create()
        .map_err(|error| error.to_string())?;
    let topic = NewTopic::new(name, i32::from(partitions), TopicReplication::Fixed(1));
    let options = AdminOptions::new().operation_timeout(Some(Duration::from_secs(10)));
    let results = admin
        .create_topics([&topic], &options)
        .await
        .map_err(|error| format!("no topic could be created at {bootstrap}: {error}"))?;
    for result in results {
        result.map_err(|(topic, code)| {
            format!("topic {topic} was not created at {bootstrap}: {code}")
        })?;
    }
    // Dropping a Kafka client may block.
    drop(tokio::task::spawn_blocking(move || drop(admin)));
    Ok(())
}
