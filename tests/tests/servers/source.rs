//! The source of records against a real broker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use tenure_kafka::producer::{NewRecord, Producer};
use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_model::{GroupId, MemberId, NextOffset, Partition, PartitionIndex, TopicId, TopicName};
use tenure_sdk::lease::LeaseCheck;
use tenure_sdk::offsets::CoordinatorOffsets;
use tenure_sdk::source::{
    Fetched, ReadAhead, RecordSource, RecordStream, ResetPolicy, SourceError, TopicInfo,
};
use tenure_sdk::testing::{MemoryCoordinator, RuntimeClock};
use tenure_sdk::{Consumer, Owned};
use tenure_tests::servers::{Kafka, require, unique_name};
use tokio::sync::OnceCell;

const PATIENCE: Duration = Duration::from_secs(30);

struct Broker {
    bootstrap: String,
    admin: AdminClient<DefaultClientContext>,
    source: KafkaSource,
    topic: TopicName,
}

impl Broker {
    /// The broker and a topic name of the test's own, or nothing where there is no broker.
    fn named(test: &str) -> Option<Self> {
        let kafka = require(tokio::task::block_in_place(Kafka::shared))?;
        let bootstrap = kafka.bootstrap().to_owned();
        let admin = ClientConfig::new().set("bootstrap.servers", &bootstrap).create().unwrap();
        let source = KafkaSource::new(KafkaSettings::new(&bootstrap)).unwrap();
        let topic = TopicName::new(&unique_name(test)).unwrap();
        Some(Self { bootstrap, admin, source, topic })
    }

    async fn create(&self, partitions: i32) {
        let topic = NewTopic::new(self.topic.as_str(), partitions, TopicReplication::Fixed(1));
        let limit = Instant::now() + PATIENCE;
        // A deletion that is under way refuses the name for a moment.
        while self.admin.create_topics([&topic], &AdminOptions::new()).await.unwrap()[0].is_err() {
            assert!(Instant::now() < limit, "topic is not created");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn delete(&self) {
        let deleted =
            self.admin.delete_topics(&[self.topic.as_str()], &AdminOptions::new()).await.unwrap();
        assert!(deleted[0].is_ok(), "{deleted:?}");
    }

    async fn look_up(&self) -> Vec<TopicInfo> {
        self.source.topics(std::slice::from_ref(&self.topic)).await.unwrap()
    }

    /// Waits until the topic is there (in another life than `before`).
    async fn id(&self, before: Option<TopicId>) -> TopicId {
        let limit = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < limit, "topic is not seen");
            match self.source.topics(std::slice::from_ref(&self.topic)).await.as_deref() {
                Ok([info]) if Some(info.topic_id) != before => return info.topic_id,
                Ok(_) | Err(SourceError::Transient(_)) => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    async fn produce(&self, count: u64) {
        let (bootstrap, topic) = (self.bootstrap.clone(), self.topic.clone());
        let index = PartitionIndex::new(0).unwrap();
        let write = move || {
            let records = (0..count).map(|number| NewRecord::new(index, "k", &number.to_string()));
            Producer::new(&bootstrap).unwrap().produce(&topic, records).unwrap()
        };
        assert_eq!(tokio::task::spawn_blocking(write).await.unwrap(), count);
    }

    /// Makes a transactional producer, under the topic's name.
    fn transactions(&self) -> Transactions {
        let producer: BaseProducer = ClientConfig::new()
            .set("bootstrap.servers", &self.bootstrap)
            .set("transactional.id", self.topic.as_str())
            .create()
            .unwrap();
        let producer = Arc::new(producer);
        Transactions { producer, topic: self.topic.clone(), is_initialised: OnceCell::new() }
    }

    /// Waits until the source says that the partition ends there.
    async fn ends_at(&self, topic_id: TopicId, wanted: u64) {
        let started = Instant::now();
        let end = || self.source.end_offset(partition(topic_id)).map(NextOffset::get);
        while end() != Some(wanted) {
            assert!(started.elapsed() < PATIENCE, "the end is {:?}, not {wanted}", end());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn open(&self, topic_id: TopicId, from: u64) -> RecordStream {
        let partition = partition(topic_id);
        let from = NextOffset::new(from).unwrap();
        self.source.open(&self.topic, partition, from, ReadAhead::default()).await.unwrap()
    }
}

/// Transactions of one record each, in partition 0.
struct Transactions {
    producer: Arc<BaseProducer>,
    topic: TopicName,
    is_initialised: OnceCell<()>,
}

impl Transactions {
    /// Writes transactions to their ends: value, and whether it is committed or aborted.
    async fn write(&self, transactions: &[(&str, bool)]) {
        for (value, commit) in transactions {
            self.begin(value).await;
            self.end(*commit).await;
        }
    }

    async fn call(&self, call: impl FnOnce(&BaseProducer) + Send + 'static) {
        let producer = Arc::clone(&self.producer);
        tokio::task::spawn_blocking(move || call(&producer)).await.unwrap();
    }

    async fn begin(&self, value: &str) {
        let init = self.call(|producer| producer.init_transactions(PATIENCE).unwrap());
        self.is_initialised.get_or_init(|| init).await;
        let (topic, value) = (self.topic.clone(), value.to_owned());
        self.call(move |producer| {
            producer.begin_transaction().unwrap();
            let record = BaseRecord::<(), str>::to(topic.as_str()).partition(0).payload(&value);
            producer.send(record).map_err(|(error, _)| error).unwrap();
            producer.flush(PATIENCE).unwrap();
        })
        .await;
    }

    async fn end(&self, commit: bool) {
        self.call(move |producer| {
            let ended = match commit {
                true => producer.commit_transaction(PATIENCE),
                false => producer.abort_transaction(PATIENCE),
            };
            ended.unwrap();
        })
        .await;
    }
}

fn partition(topic_id: TopicId) -> Partition {
    Partition { topic_id, index: PartitionIndex::new(0).unwrap() }
}

async fn item(stream: &mut RecordStream) -> Fetched {
    let item = tokio::time::timeout(PATIENCE, stream.recv()).await.expect("an item in time");
    item.expect("the stream goes on")
}

async fn values(stream: &mut RecordStream, count: usize) -> Vec<String> {
    let mut values = Vec::new();
    while values.len() < count {
        let records = item(stream).await.into_records().unwrap();
        values.extend(
            records.iter().map(|r| String::from_utf8_lossy(r.value.as_ref().unwrap()).into()),
        );
    }
    values
}

#[tokio::test(flavor = "multi_thread")]
async fn topic_that_is_created_again_has_another_id_and_its_old_stream_ends() {
    let Some(broker) = Broker::named("recreated") else { return };
    broker.create(1).await;
    let first = broker.id(None).await;
    assert_ne!(first, TopicId::of_name(&broker.topic), "the id is the broker's");
    assert_eq!(broker.look_up().await[0].topic_id, first, "the id is stable");
    broker.produce(10).await;
    let mut stream = broker.open(first, 0).await;
    assert_eq!(values(&mut stream, 10).await.len(), 10);

    broker.delete().await;
    broker.create(1).await;
    let second = broker.id(Some(first)).await;
    let ended = loop {
        if let Err(error) = item(&mut stream).await.into_records() {
            break error;
        }
    };
    eprintln!("the stream of the first life ended with: {ended}");
    assert!(
        matches!(
            ended,
            SourceError::OtherTopicId { .. }
                | SourceError::UnknownPartition { .. }
                | SourceError::OutOfRange { .. }
        ),
        "{ended:?}"
    );
    broker.produce(3).await;
    let refused = broker
        .source
        .open(&broker.topic, partition(first), NextOffset::ZERO, ReadAhead::default())
        .await;
    assert!(matches!(refused, Err(SourceError::OtherTopicId { .. })), "{refused:?}");
    assert_eq!(values(&mut broker.open(second, 0).await, 3).await, ["0", "1", "2"]);
    broker.delete().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_topic_ends_its_stream_without_anyone_asking() {
    let Some(broker) = Broker::named("deleted") else { return };
    broker.create(1).await;
    let id = broker.id(None).await;
    broker.produce(10).await;
    let mut stream = broker.open(id, 0).await;
    assert_eq!(values(&mut stream, 10).await.len(), 10);
    broker.delete().await;
    let ended = item(&mut stream).await;
    let Fetched::Failed(SourceError::UnknownPartition { index: 0, .. }) = ended else {
        panic!("{ended:?}");
    };
}

#[tokio::test(flavor = "multi_thread")]
async fn topic_that_is_created_again_ends_its_old_stream_without_anyone_asking() {
    let Some(broker) = Broker::named("silently-recreated") else { return };
    broker.create(1).await;
    let id = broker.id(None).await;
    // Offset 0 is in range in both lives, so nothing but the id tells them apart.
    let mut stream = broker.open(id, 0).await;
    broker.delete().await;
    broker.create(1).await;
    let ended = item(&mut stream).await;
    assert!(
        matches!(&ended, Fetched::Failed(SourceError::OtherTopicId { wanted, .. }) if *wanted == id),
        "{ended:?}"
    );
    broker.delete().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn absent_topic_is_left_out() {
    let Some(broker) = Broker::named("absent") else { return };
    assert_eq!(broker.look_up().await, []);
    let partition = partition(TopicId::from_bits(1));
    let start = broker.source.start(&broker.topic, partition, ResetPolicy::Latest).await;
    assert!(matches!(start, Err(SourceError::UnknownPartition { .. })), "{start:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn aborted_records_are_skipped_and_the_gap_is_no_loss() {
    let Some(broker) = Broker::named("transactions") else { return };
    broker.create(1).await;
    let id = broker.id(None).await;
    let transactions = broker.transactions();
    transactions.write(&[("a", true), ("lost", false), ("b", true)]).await;
    let mut stream = broker.open(id, 0).await;
    assert_eq!(values(&mut stream, 2).await, ["a", "b"]);
    // Each transaction ends with a marker, which takes an offset.
    assert!(matches!(item(&mut stream).await, Fetched::Passed(next) if next.get() == 6));
    broker.ends_at(id, 6).await;
    transactions.write(&[("lost", false)]).await;
    assert!(matches!(item(&mut stream).await, Fetched::Passed(next) if next.get() == 8));
    broker.ends_at(id, 8).await;
    transactions.write(&[("c", true)]).await;
    assert_eq!(values(&mut stream, 1).await, ["c"]);
    assert!(matches!(item(&mut stream).await, Fetched::Passed(next) if next.get() == 10));
    broker.delete().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_an_open_transaction_are_not_the_end_until_it_is_closed() {
    let Some(broker) = Broker::named("open-transaction") else { return };
    broker.create(1).await;
    let id = broker.id(None).await;
    let transactions = broker.transactions();
    transactions.write(&[("a", true)]).await;
    let mut stream = broker.open(id, 0).await;
    assert_eq!(values(&mut stream, 1).await, ["a"]);
    assert!(matches!(item(&mut stream).await, Fetched::Passed(next) if next.get() == 2));
    transactions.begin("b").await;
    broker.ends_at(id, 2).await;
    // Written by somebody else after the open transaction began: it waits for that as well.
    broker.produce(1).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    broker.ends_at(id, 2).await;
    transactions.end(true).await;
    assert_eq!(values(&mut stream, 2).await, ["b", "0"]);
    broker.ends_at(id, 5).await;
    broker.delete().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn committed_offset_reaches_the_end_past_markers_and_aborted_records() {
    let Some(broker) = Broker::named("committed-to-the-end") else { return };
    broker.create(1).await;
    let id = broker.id(None).await;
    let transactions = broker.transactions();
    transactions.write(&[("a", true), ("b", true)]).await;
    let group = GroupId::new("g").unwrap();
    let clock = Arc::new(RuntimeClock::new());
    let coordinator = MemoryCoordinator::new(group.clone(), clock.clone(), LeaseCheck::On);
    let source = KafkaSource::new(KafkaSettings::new(&broker.bootstrap)).unwrap();
    let (topics, nodes) = (vec![broker.topic.clone()], vec!["nowhere:1".to_owned()]);
    let consumer =
        Consumer::builder(group, topics, Arc::new(source), nodes).clock(clock).build().unwrap();
    let (stopper, ann) = (consumer.stopper(), MemberId::new("ann").unwrap());
    let (running, member) = (coordinator.clone(), ann.clone());
    let (lags, lag) = tokio::sync::watch::channel(None);
    let run = tokio::spawn(async move {
        let handler = move |owned: Owned<CoordinatorOffsets>| {
            let lags = lags.clone();
            async move {
                let (mut input, mut offsets) = owned.split();
                loop {
                    let next = tokio::time::timeout(Duration::from_millis(50), input.next_record());
                    match next.await {
                        Ok(Some(record)) => offsets.done(&record),
                        Ok(None) => return Ok(()),
                        Err(_idle) => drop(lags.send_replace(input.lag())),
                    }
                }
            }
        };
        running.run(&member, consumer, handler).await
    });
    coordinator.logged("ann joined").await;
    coordinator.grant(&broker.topic, partition(id), &ann);
    let reaches = async |wanted: u64| {
        let started = Instant::now();
        let now = || (coordinator.committed(partition(id)).map(NextOffset::get), *lag.borrow());
        while now() != (Some(wanted), Some(0)) {
            assert!(started.elapsed() < PATIENCE, "committed and lag are {:?}", now());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    reaches(4).await;
    transactions.write(&[("lost", false)]).await;
    reaches(6).await;
    transactions.write(&[("c", true), ("lost", false)]).await;
    reaches(10).await;
    stopper.stop(PATIENCE);
    assert!(run.await.unwrap().unwrap().clean);
    broker.delete().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn partition_opened_again_and_again_delivers_exactly_from_each_offset() {
    let Some(broker) = Broker::named("again") else { return };
    broker.create(1).await;
    let id = broker.id(None).await;
    broker.produce(20_000).await;
    for round in 0..50_u64 {
        let from = round * 397 % 20_000;
        let mut stream = broker.open(id, from).await;
        let count = if round % 10 == 0 { 20_000 - from } else { 1 };
        let values = values(&mut stream, usize::try_from(count).unwrap()).await;
        for (wanted, value) in (from..).zip(values) {
            assert_eq!(value, wanted.to_string(), "round {round}");
        }
        if round % 2 == 0 {
            broker.source.close(partition(id)).await;
        }
    }
    broker.delete().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_started_and_opened_together_are_each_at_their_own_offset_and_bad_ones_fail_alone()
 {
    let Some(broker) = Broker::named("together") else { return };
    broker.create(8).await;
    let topic_id = broker.id(None).await;
    let at = |index: u32| Partition { topic_id, index: PartitionIndex::new(index).unwrap() };
    let (bootstrap, topic) = (broker.bootstrap.clone(), broker.topic.clone());
    let write = move || {
        // As many in each partition as its index says.
        let indexes = (0..8).map(|index| PartitionIndex::new(index).unwrap());
        let records =
            indexes.flat_map(|at| (0..at.get()).map(move |_| NewRecord::new(at, "k", "v")));
        Producer::new(&bootstrap).unwrap().produce(&topic, records).unwrap()
    };
    assert_eq!(tokio::task::spawn_blocking(write).await.unwrap(), 28);

    let (source, topic) = (&broker.source, &broker.topic);
    let ask = |index, policy| source.start(topic, at(index), policy);
    let policies = [ResetPolicy::Latest, ResetPolicy::Earliest];
    let asked = policies.into_iter().flat_map(|policy| (0..9).map(move |index| (index, policy)));
    let starts = join_all(asked.clone().map(|(index, policy)| ask(index, policy))).await;
    for ((index, policy), start) in asked.zip(starts) {
        let wanted = if policy == ResetPolicy::Latest { u64::from(index) } else { 0 };
        match start {
            Ok(start) => assert_eq!((start.get(), index < 8), (wanted, true), "{index} {policy:?}"),
            Err(error) => assert!(is_unknown(&error, index, 8), "{index} {policy:?}: {error}"),
        }
    }

    let ahead = ReadAhead::default();
    let open = |index: u32| {
        // The last record; past the end in the partition without any.
        let from =
            NextOffset::new(u64::from(index).saturating_sub(1).max(u64::from(index == 0))).unwrap();
        async move { (index, from, source.open(topic, at(index), from, ahead).await) }
    };
    for (index, from, opened) in join_all((0..9).map(open)).await {
        let mut stream = match opened {
            Ok(stream) => stream,
            Err(error) => {
                assert!(is_unknown(&error, index, 8), "{index}: {error}");
                continue;
            }
        };
        match item(&mut stream).await.into_records() {
            Ok(records) => assert_eq!((records.len(), records[0].offset), (1, from), "{index}"),
            Err(error) => {
                assert!(index == 0 && matches!(error, SourceError::OutOfRange { .. }), "{error}");
            }
        }
    }
    source.shutdown(PATIENCE).await;
    broker.delete().await;
}

/// Whether the error says that a partition is not there, of a topic with `count`.
fn is_unknown(error: &SourceError, partition: u32, count: u32) -> bool {
    matches!(error, SourceError::UnknownPartition { index, .. } if *index == partition && partition >= count)
}

#[tokio::test(flavor = "multi_thread")]
async fn offset_out_of_range_is_said_and_watermarks_are_the_start() {
    let Some(broker) = Broker::named("range") else { return };
    broker.create(1).await;
    let id = broker.id(None).await;
    broker.produce(7).await;
    for (policy, wanted) in [(ResetPolicy::Earliest, 0), (ResetPolicy::Latest, 7)] {
        let start = broker.source.start(&broker.topic, partition(id), policy).await.unwrap();
        assert_eq!(start.get(), wanted);
    }
    for (from_ms, wanted) in [(0, 0), (i64::MAX / 2, 7)] {
        let policy = ResetPolicy::Timestamp(from_ms);
        let start = broker.source.start(&broker.topic, partition(id), policy).await.unwrap();
        assert_eq!(start.get(), wanted, "the first record that is not before {from_ms}");
    }
    assert!(broker.source.topic_names().await.unwrap().contains(&broker.topic));
    let ended = item(&mut broker.open(id, 500).await).await;
    assert!(
        matches!(&ended, Fetched::Failed(SourceError::OutOfRange { wanted, .. }) if wanted.get() == 500),
        "{ended:?}"
    );
    broker.source.shutdown(PATIENCE).await;
    broker.delete().await;
}
