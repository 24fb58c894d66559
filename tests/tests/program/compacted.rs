//! A partition whose last records were compacted away: it ends past the last record that is there.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use rdkafka::{Message as _, Offset, TopicPartitionList};
use serde_json::Value;
use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_model::{GroupId, LeaseSettings, TopicName};
use tenure_sdk::consumer::Counters;
use tenure_sdk::offsets::CoordinatorOffsets;
use tenure_sdk::sink::BoxError;
use tenure_sdk::{Consumer, Owned, Stopper};
use tenure_tests::servers::{Kafka, require, unique_name, wait_until};
use tokio::runtime::Runtime;

use super::{Dev, LONGEST, read_on, until};

/// A broker looks for something to compact every 15 s by default, and takes tombstones away in its second pass.
const COMPACTED_WITHIN: Duration = Duration::from_secs(90);

/// Keys and values before the tail; no value: a tombstone.
const RECORDS: [(&str, Option<&str>); 5] =
    [("a", Some("stays")), ("b", Some("goes")), ("b", None), ("c", Some("goes")), ("c", None)];

/// Settings with which every record is in a segment of its own.
const SEGMENTS: (&str, &str) = ("segment.ms", "100");

/// Makes the topic, which is not compacted yet.
fn create(kafka: &Kafka, topic: &str) {
    let admin: AdminClient<DefaultClientContext> = kafka.client_config().create().unwrap();
    let (name, value) = SEGMENTS;
    let new = NewTopic::new(topic, 1, TopicReplication::Fixed(1)).set(name, value);
    let options = AdminOptions::new().operation_timeout(Some(LONGEST));
    let runtime = Runtime::new().unwrap();
    runtime.block_on(admin.create_topics([&new], &options)).unwrap()[0].as_ref().unwrap();
    assert_eq!(kafka.end_offset(topic, 0), 0, "the topic is there");
}

/// Lets the broker compact it, at the first chance.
fn compact(kafka: &Kafka, topic: &str) {
    let admin: AdminClient<DefaultClientContext> = kafka.client_config().create().unwrap();
    let (name, value) = SEGMENTS;
    let settings = AlterConfig::new(ResourceSpecifier::Topic(topic))
        .set(name, value)
        .set("cleanup.policy", "compact")
        .set("min.cleanable.dirty.ratio", "0.001")
        .set("delete.retention.ms", "0");
    let runtime = Runtime::new().unwrap();
    let altered = runtime.block_on(admin.alter_configs([&settings], &AdminOptions::new()));
    altered.unwrap()[0].as_ref().unwrap();
}

/// Writes what will go, older than anything that is written now: times a second apart roll segments.
fn write_records(kafka: &Kafka, topic: &str) {
    let producer: BaseProducer = kafka.client_config().create().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let start_ms = i64::try_from(now.as_millis()).unwrap() - 60_000;
    for ((key, value), at_ms) in RECORDS.into_iter().zip((start_ms..).step_by(1_000)) {
        let mut record = BaseRecord::to(topic).partition(0).key(key).timestamp(at_ms);
        record.payload = value;
        producer.send(record).map_err(|(error, _)| error).unwrap();
        producer.flush(LONGEST).unwrap();
    }
}

/// Offsets of the records that a reader of committed records is given.
fn offsets(kafka: &Kafka, topic: &str) -> Vec<i64> {
    let mut config = kafka.client_config();
    config.set("group.id", "nobody").set("enable.partition.eof", "true");
    let consumer: BaseConsumer = config.create().unwrap();
    let mut list = TopicPartitionList::new();
    list.add_partition_offset(topic, 0, Offset::Beginning).unwrap();
    consumer.assign(&list).unwrap();
    let mut found = Vec::new();
    while let Some(Ok(message)) = consumer.poll(LONGEST) {
        found.push(message.offset());
    }
    found
}

/// Waits until the broker has taken all but the first record away. What is left at the end is of transactions that were
/// aborted: the newest segment is never compacted, and gives the cleaner something to do again.
fn wait_for_the_cleaner(kafka: &Kafka, topic: &str) {
    let producer: BaseProducer =
        kafka.client_config().set("transactional.id", topic).create().unwrap();
    producer.init_transactions(LONGEST).unwrap();
    let is_compacted = wait_until(COMPACTED_WITHIN, || {
        producer.begin_transaction().unwrap();
        let record = BaseRecord::to(topic).partition(0).key("d").payload("aborted");
        producer.send(record).map_err(|(error, _)| error).unwrap();
        producer.flush(LONGEST).unwrap();
        producer.abort_transaction(LONGEST).unwrap();
        std::thread::sleep(Duration::from_millis(500));
        offsets(kafka, topic) == [0]
    });
    assert!(is_compacted, "records at {:?} are there still", offsets(kafka, topic));
}

/// Takes the first two records and no more, as an owner that ends in what will be the gap.
pub(super) async fn take_two(owned: Owned<CoordinatorOffsets>) -> Result<(), BoxError> {
    let (mut input, mut offsets) = owned.split();
    for _ in 0..2 {
        let Some(record) = input.next_record().await else { return Ok(()) };
        offsets.done(&record);
    }
    offsets.flush().await?;
    input.ended().await;
    Ok(())
}

/// A consumer of the topic in a group.
pub(super) struct Member<'m> {
    dev: &'m Dev,
    runtime: &'m Runtime,
    group: &'static str,
    stopper: Stopper,
    counters: Arc<Counters>,
    run: tokio::task::JoinHandle<bool>,
}

impl<'m> Member<'m> {
    pub(super) fn start<F, R>(
        dev: &'m Dev,
        runtime: &'m Runtime,
        kafka: &Kafka,
        topic: &str,
        group: &'static str,
        handler: F,
    ) -> Self
    where
        F: Fn(Owned<CoordinatorOffsets>) -> R + Send + Sync + 'static,
        R: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let _guard = runtime.enter();
        let consumer = Consumer::builder(
            GroupId::new(group).unwrap(),
            vec![TopicName::new(topic).unwrap()],
            Arc::new(KafkaSource::new(KafkaSettings::new(kafka.bootstrap())).unwrap()),
            vec![dev.address.clone()],
        )
        .lease(LeaseSettings::for_ttl(3_000))
        .build()
        .unwrap();
        let (stopper, counters) = (consumer.stopper(), consumer.counters());
        let run = runtime.spawn(async move { consumer.run(handler).await.unwrap().clean });
        Self { dev, runtime, group, stopper, counters, run }
    }

    pub(super) fn wait(&self, committed: i64, lag: Option<u64>) {
        until(&format!("offset {committed} of {}", self.group), || {
            let listed = self.dev.run(&["partitions", self.group, "--output", "json"]);
            // The group is there once its first member has joined.
            let Ok(listed) = serde_json::from_slice::<Value>(&listed.stdout) else { return false };
            let line = &listed["partitions"][0];
            line["committed"] == committed && lag.is_none_or(|lag| line["lag"] == lag)
        });
    }

    /// Stops it and tells how many records it was given.
    pub(super) fn stop(self) -> u64 {
        self.stopper.stop(LONGEST);
        assert!(self.runtime.block_on(self.run).unwrap());
        self.counters.records_delivered()
    }
}

#[test]
fn position_passes_a_tail_that_was_compacted_away_and_the_lag_ends_at_nothing() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let (dev, topic) = (Dev::start(), unique_name("compacted"));
    create(kafka, &topic);
    write_records(kafka, &topic);
    assert_eq!(offsets(kafka, &topic), [0, 1, 2, 3, 4]);
    let runtime = Runtime::new().unwrap();
    let in_the_gap = Member::start(&dev, &runtime, kafka, &topic, "gap", take_two);
    in_the_gap.wait(2, None);
    in_the_gap.stop();

    compact(kafka, &topic);
    wait_for_the_cleaner(kafka, &topic);
    let end = kafka.end_offset(&topic, 0);
    assert!(end >= 7, "the end lies past the last record, which is at 0: {end}");

    for (group, delivered) in [("fresh", 1), ("gap", 0)] {
        let member = Member::start(&dev, &runtime, kafka, &topic, group, read_on);
        member.wait(end, Some(0));
        assert_eq!(member.stop(), delivered, "{group}");
        // Opened at the very end: nothing is there, and nothing is out of range.
        let again = Member::start(&dev, &runtime, kafka, &topic, group, read_on);
        again.wait(end, Some(0));
        assert_eq!(again.stop(), 0, "{group}");
    }
}
