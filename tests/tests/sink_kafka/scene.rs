//! A topic of the test's own and owners of one partition.

use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::{ClientConfig, Message, Offset, TopicPartitionList};
use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::grant;
use tenure_sdk::sink::{FencedSink, FencedWriter, Resolved, SinkError, Verified};
use tenure_sink_kafka::{KafkaSink, KafkaSinkSettings, KafkaWriter};
use tenure_tests::servers::{Kafka, require};

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A topic for records and the way to a sink; the offsets are kept under the same topic.
#[derive(Clone)]
pub(crate) struct Scene {
    pub(crate) bootstrap: String,
    pub(crate) topic: String,
}

impl Scene {
    /// Nothing, and the test is skipped, where there is no Kafka.
    pub(crate) fn new(name: &str) -> Option<Self> {
        let kafka = require(Kafka::shared())?;
        static WARM: std::sync::Once = std::sync::Once::new();
        WARM.call_once(|| kafka.warm_up_transactions());
        Some(Self { bootstrap: kafka.bootstrap().to_owned(), topic: kafka.new_topic(name, 1) })
    }

    pub(crate) fn settings(&self) -> KafkaSinkSettings {
        KafkaSinkSettings {
            anchor: Some(self.topic.clone()),
            // Groups and transactional ids of its own.
            prefix: self.topic.clone(),
            ..KafkaSinkSettings::new(&self.bootstrap)
        }
    }

    pub(crate) fn sink(&self) -> KafkaSink {
        KafkaSink::new(self.settings()).unwrap()
    }

    /// Payloads that a reader of committed records sees, in order.
    pub(crate) fn committed(&self) -> Vec<String> {
        let reader: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", &self.bootstrap)
            .set("group.id", "reader")
            .set("isolation.level", "read_committed")
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            .set("fetch.wait.max.ms", "20")
            .create()
            .unwrap();
        let mut from = TopicPartitionList::new();
        from.add_partition_offset(&self.topic, 0, Offset::Beginning).unwrap();
        reader.assign(&from).unwrap();
        let mut found = Vec::new();
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "the reader reached no end of the partition");
            match reader.poll(Duration::from_millis(100)) {
                Some(Ok(message)) => {
                    found.push(String::from_utf8(message.payload().unwrap().to_vec()).unwrap());
                }
                Some(Err(rdkafka::error::KafkaError::PartitionEOF(_))) => return found,
                Some(Err(error)) => println!("reader: {error}"),
                None => {}
            }
        }
    }

    pub(crate) async fn read(&self) -> Vec<String> {
        let scene = self.clone();
        tokio::task::spawn_blocking(move || scene.committed()).await.unwrap()
    }

    /// A producer outside the sink that initialises the transactional id of `grant`, as a sleeper would.
    pub(crate) fn intrude(&self, grant: &Grant) -> BaseProducer {
        let producer: BaseProducer = ClientConfig::new()
            .set("bootstrap.servers", &self.bootstrap)
            .set("transactional.id", self.sink().transactional_id(grant))
            .create()
            .unwrap();
        producer.init_transactions(PATIENCE).unwrap();
        producer
    }
}

pub(crate) fn epoch(value: u64) -> Epoch {
    Epoch::new(value).unwrap()
}

pub(crate) fn offset(value: u64) -> NextOffset {
    NextOffset::new(value).unwrap()
}

pub(crate) fn owner(value: u64) -> Grant {
    grant(&format!("owner-{value}"), 0, epoch(value))
}

pub(crate) async fn acquire(
    sink: &KafkaSink,
    grant: &Grant,
) -> Result<(KafkaWriter, u64), SinkError> {
    let mut writer = sink.register(grant).await?.writer;
    let next = match writer.resume(&Verified::without_coordinator(false)).await? {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await?,
    };
    Ok((writer, next.get()))
}

/// Writes records `first` to `next - 1` and the offset, once.
pub(crate) async fn write(
    scene: &Scene,
    writer: &mut KafkaWriter,
    first: u64,
    next: u64,
) -> Result<(), SinkError> {
    let mut tx = writer.begin().await?;
    for value in first..next {
        let payload = value.to_string();
        tx.send(BaseRecord::to(&scene.topic).key("").payload(&payload).partition(0)).await?;
    }
    tx.commit(offset(next)).await
}

/// As [`write`], until it is in: what is transient is repeated, what is unknown is resolved.
pub(crate) async fn write_surely(scene: &Scene, writer: &mut KafkaWriter, first: u64, next: u64) {
    loop {
        match write(scene, writer, first, next).await {
            Ok(()) => return,
            Err(SinkError::Transient { .. }) => {}
            Err(SinkError::Unknown(_)) => loop {
                match writer.resolve().await {
                    Ok(Resolved::Applied(_)) => return,
                    Ok(Resolved::NotApplied(_)) => break,
                    Err(SinkError::Unknown(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            },
            Err(error) => panic!("{error}"),
        }
    }
}

pub(crate) fn numbers(range: std::ops::Range<u64>) -> Vec<String> {
    range.map(|value| value.to_string()).collect()
}
