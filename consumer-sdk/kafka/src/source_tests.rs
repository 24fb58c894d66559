//! What cannot be provoked from outside.

use tenure_model::PartitionIndex;
use tenure_sdk::source::{Fetched, Payload, Record};

use super::*;
use crate::command::Counts;
use crate::mock::MockKafka;
use crate::producer::{NewRecord, Producer};

async fn counts(source: &KafkaSource) -> Counts {
    let (reply, counts) = oneshot::channel();
    assert!(source.send(Command::Count { reply }));
    counts.await.unwrap()
}

/// Makes the client fail for good, and waits for the next one.
async fn break_client(source: &KafkaSource) {
    let before = counts(source).await.clients;
    assert!(source.send(Command::Break));
    let limit = std::time::Instant::now() + Duration::from_secs(10);
    while counts(source).await.clients != before + 1 {
        assert!(std::time::Instant::now() < limit, "no new client after {before}");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_go_on_without_gap_or_repeat_after_the_client_failed_for_good() {
    let kafka = MockKafka::start(1).unwrap();
    let topic = TopicName::new("rebuilt").unwrap();
    kafka.create_topic(topic.as_str(), 2).unwrap();
    let source = KafkaSource::new(KafkaSettings::new(kafka.bootstrap())).unwrap();
    let topic_id = source.topics(std::slice::from_ref(&topic)).await.unwrap()[0].topic_id;
    let index = |index| PartitionIndex::new(index).unwrap();
    let produce = |count: u64| {
        let (bootstrap, topic) = (kafka.bootstrap(), topic.clone());
        tokio::task::spawn_blocking(move || {
            let records = (0..count).flat_map(|number| {
                [0, 1].map(|at| NewRecord::new(index(at), "k", &number.to_string()))
            });
            Producer::new(&bootstrap).unwrap().produce(&topic, records).unwrap()
        })
    };
    produce(5000).await.unwrap();
    let mut streams = Vec::new();
    for at in [0, 1] {
        let partition = Partition { topic_id, index: index(at) };
        let read_ahead = ReadAhead { records: 100, bytes: 1 << 20 };
        streams.push(source.open(&topic, partition, NextOffset::ZERO, read_ahead).await.unwrap());
    }
    for _ in 0..3 {
        break_client(&source).await;
        assert_eq!(counts(&source).await.assign_calls, 1, "both partitions at once");
    }
    produce(1000).await.unwrap();
    for stream in &mut streams {
        let mut next = 0;
        while next < 6000 {
            let item = tokio::time::timeout(Duration::from_secs(20), stream.recv()).await;
            let fetched = item.expect("records in time").expect("the stream goes on");
            for record in fetched.into_records().unwrap() {
                assert_eq!(record.offset.get(), next);
                next += 1;
            }
        }
    }
    source.shutdown(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_are_kept_outlast_their_client_and_keep_nothing_from_its_end() {
    let kafka = MockKafka::start(1).unwrap();
    let topic = TopicName::new("kept").unwrap();
    kafka.create_topic(topic.as_str(), 1).unwrap();
    let source = KafkaSource::new(KafkaSettings::new(kafka.bootstrap())).unwrap();
    let topic_id = source.topics(std::slice::from_ref(&topic)).await.unwrap()[0].topic_id;
    let partition = Partition { topic_id, index: PartitionIndex::new(0).unwrap() };
    let (bootstrap, name) = (kafka.bootstrap(), topic.clone());
    let produced = tokio::task::spawn_blocking(move || {
        let records = (0..900).map(|number: u64| {
            NewRecord::new(partition.index, &format!("k{number}"), &format!("v{number}"))
        });
        Producer::new(&bootstrap).unwrap().produce(&name, records).unwrap();
    });
    produced.await.unwrap();
    let ahead = ReadAhead { records: 100, bytes: 1 << 20 };
    let mut stream = source.open(&topic, partition, NextOffset::ZERO, ahead).await.unwrap();
    let mut kept: Vec<Record> = Vec::new();
    for round in 1..=3 {
        while kept.len() < round * 300 {
            let item = tokio::time::timeout(Duration::from_secs(20), stream.recv()).await;
            let fetched = item.expect("records in time").expect("the stream goes on");
            kept.extend(fetched.into_records().unwrap());
        }
        if round < 3 {
            break_client(&source).await;
        }
    }
    let begun = std::time::Instant::now();
    source.shutdown(Duration::from_secs(20)).await;
    drop((source, stream));
    assert!(begun.elapsed() < Duration::from_secs(5), "the shutdown waited for kept records");
    for (number, record) in kept.iter().enumerate() {
        assert_eq!(record.offset.get(), u64::try_from(number).unwrap());
        assert_eq!(record.key.as_deref(), Some(format!("k{number}").as_bytes()));
        assert_eq!(record.value.as_deref(), Some(format!("v{number}").as_bytes()));
    }
    let is_lent = |record: &Record| record.value.as_ref().is_some_and(Payload::is_lent);
    assert!(kept.iter().any(is_lent), "nothing was lent");
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_went_astray_are_read_before_later_ones() {
    for has_later in [true, false] {
        let kafka = MockKafka::start(1).unwrap();
        let topic = TopicName::new("astray").unwrap();
        kafka.create_topic(topic.as_str(), 1).unwrap();
        let source = KafkaSource::new(KafkaSettings::new(kafka.bootstrap())).unwrap();
        let topic_id = source.topics(std::slice::from_ref(&topic)).await.unwrap()[0].topic_id;
        let partition = Partition { topic_id, index: PartitionIndex::new(0).unwrap() };
        let produce = async || {
            let (bootstrap, topic) = (kafka.bootstrap(), topic.clone());
            let produced = tokio::task::spawn_blocking(move || {
                let records = (0..10).map(|_| NewRecord::new(partition.index, "k", "v"));
                Producer::new(&bootstrap).unwrap().produce(&topic, records).unwrap();
            });
            produced.await.unwrap();
            // The client fetches them without being asked; nothing here can see it.
            tokio::time::sleep(Duration::from_secs(1)).await;
        };
        let ahead = ReadAhead { records: 1000, bytes: 1 << 20 };
        let mut stream = source.open(&topic, partition, NextOffset::ZERO, ahead).await.unwrap();
        let mut next = 0;
        let mut read_to = async |end: u64| {
            while next < end {
                let item = tokio::time::timeout(Duration::from_secs(20), stream.recv()).await;
                let fetched = item.expect("records in time").expect("the stream goes on");
                assert!(!matches!(fetched, Fetched::Passed(_)), "{next} is said to be empty");
                for record in fetched.into_records().unwrap() {
                    assert_eq!(record.offset.get(), next, "later records first: {has_later}");
                    next += 1;
                }
            }
        };
        produce().await;
        read_to(10).await;
        let (begun, begins) = oneshot::channel();
        let (tell_end, end) = std::sync::mpsc::channel();
        let (tell_on, on) = std::sync::mpsc::channel();
        assert!(source.send(Command::Mislead { partition, begun, end, on }));
        begins.await.unwrap();
        produce().await;
        tell_end.send(()).unwrap();
        if has_later {
            produce().await;
        }
        tell_on.send(()).unwrap();
        read_to(if has_later { 30 } else { 20 }).await;
        source.shutdown(Duration::from_secs(10)).await;
    }
}

/// Id of a topic, once the brokers answer.
async fn until_found(source: &KafkaSource, topic: &TopicName) -> tenure_model::TopicId {
    let limit = std::time::Instant::now() + Duration::from_secs(20);
    loop {
        assert!(std::time::Instant::now() < limit, "the topic is not found");
        match source.topics(std::slice::from_ref(topic)).await.as_deref() {
            Ok([info]) => return info.topic_id,
            Ok(_) | Err(SourceError::Transient(_)) => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    }
}

/// What a stream brings next: the offset of the next record, or the error that ends it.
async fn next_of(stream: &mut RecordStream) -> Result<u64, String> {
    loop {
        let item = tokio::time::timeout(Duration::from_secs(20), stream.recv()).await;
        let fetched = item.expect("something in time").expect("the stream goes on");
        if matches!(fetched, Fetched::Passed(_)) {
            continue;
        }
        let records = fetched.into_records().map_err(|error| error.to_string())?;
        return Ok(records[0].offset.get());
    }
}

/// The log has ten records of leader epoch 0 and then ten of epoch 1. A reader that had read fifteen of epoch 0 has read
/// five that are gone.
#[tokio::test(flavor = "multi_thread")]
async fn log_that_was_cut_back_is_told_by_name_and_not_read_on() {
    const CUT: &str = "the log of cut/0 was cut back: records before offset 15, which were read, are gone; look at what \
                       they did, then reset the offset by name";
    let at = |offset: u64| NextOffset::new(offset).unwrap();
    // How far was read, under which epoch, and what comes then.
    let cases = [(15, 0, Err(CUT)), (15, 1, Ok(15)), (10, 0, Ok(10))];
    for (next, leader_epoch, want) in cases {
        let kafka = MockKafka::start(2).unwrap();
        kafka.create_topic("cut", 1).unwrap();
        let topic = TopicName::new("cut").unwrap();
        let source = KafkaSource::new(KafkaSettings::new(kafka.bootstrap())).unwrap();
        let index = PartitionIndex::new(0).unwrap();
        let produce = async || {
            let (bootstrap, topic) = (kafka.bootstrap(), topic.clone());
            let produced = tokio::task::spawn_blocking(move || {
                let records = (0..10).map(|_| NewRecord::new(index, "k", "v"));
                Producer::new(&bootstrap).unwrap().produce(&topic, records).unwrap();
            });
            produced.await.unwrap();
        };
        produce().await;
        kafka.elect_leader("cut", 0, 2).unwrap();
        produce().await;
        let topic_id = until_found(&source, &topic).await;
        let partition = Partition { topic_id, index };
        let ahead = ReadAhead { records: 1000, bytes: 1 << 20 };
        let mut stream = source.open(&topic, partition, at(19), ahead).await.unwrap();
        assert_eq!(next_of(&mut stream).await, Ok(19));
        let next = at(next);
        assert!(source.send(Command::Pretend { partition, next, leader_epoch }));
        let found = next_of(&mut stream).await;
        assert_eq!(found, want.map_err(str::to_owned), "read to {next} under epoch {leader_epoch}");
        source.shutdown(Duration::from_secs(10)).await;
    }
}

/// A source with a topic of ten records in each partition, and what its thread is asked to do.
struct Asked {
    source: KafkaSource,
    topic: TopicName,
    topic_id: tenure_model::TopicId,
    _kafka: MockKafka,
}

/// Ends the wait of a thread.
struct Held(std::sync::mpsc::Sender<()>);

impl Held {
    fn go_on(self) {
        self.0.send(()).unwrap();
    }
}

impl Asked {
    async fn of(partitions: u16) -> Self {
        let kafka = MockKafka::start(1).unwrap();
        let topic = TopicName::new("together").unwrap();
        kafka.create_topic(topic.as_str(), partitions).unwrap();
        let (bootstrap, name) = (kafka.bootstrap(), topic.clone());
        let produced = tokio::task::spawn_blocking(move || {
            let indexes = (0..u32::from(partitions)).map(|at| PartitionIndex::new(at).unwrap());
            let records = indexes.flat_map(|at| (0..10).map(move |_| NewRecord::new(at, "k", "v")));
            Producer::new(&bootstrap).unwrap().produce(&name, records).unwrap();
        });
        produced.await.unwrap();
        let source = KafkaSource::new(KafkaSettings::new(kafka.bootstrap())).unwrap();
        let topic_id = until_found(&source, &topic).await;
        Self { source, topic, topic_id, _kafka: kafka }
    }

    fn partition(&self, index: u32) -> Partition {
        Partition { topic_id: self.topic_id, index: PartitionIndex::new(index).unwrap() }
    }

    /// Holds the thread, so that what it is asked meanwhile waits together.
    async fn hold(&self) -> Held {
        let (begun, begins) = oneshot::channel();
        let (go_on, on) = std::sync::mpsc::channel();
        assert!(self.source.send(Command::Wait { begun, on }));
        begins.await.unwrap();
        Held(go_on)
    }

    fn open(&self, index: u32, from: u64) -> oneshot::Receiver<Result<RecordStream, SourceError>> {
        let (reply, opened) = oneshot::channel();
        let (topic, partition) = (self.topic.clone(), self.partition(index));
        let from = NextOffset::new(from).unwrap();
        let read_ahead = ReadAhead::default();
        assert!(self.source.send(Command::Open { topic, partition, from, read_ahead, reply }));
        opened
    }

    fn count(&self) -> oneshot::Receiver<Counts> {
        let (reply, counts) = oneshot::channel();
        assert!(self.source.send(Command::Count { reply }));
        counts
    }

    fn close(&self, index: u32) -> oneshot::Receiver<()> {
        let (reply, closed) = oneshot::channel();
        assert!(self.source.send(Command::Close { partition: self.partition(index), reply }));
        closed
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_opened_together_are_assigned_at_once_each_at_its_own_offset() {
    let asked = Asked::of(8).await;
    let before = counts(&asked.source).await;
    let held = asked.hold().await;
    let opened: Vec<_> = (0..8).map(|index| asked.open(index, u64::from(index) + 1)).collect();
    held.go_on();
    for (from, opened) in (1..).zip(opened) {
        let mut stream = opened.await.unwrap().unwrap();
        assert_eq!(next_of(&mut stream).await, Ok(from));
    }
    let after = counts(&asked.source).await;
    assert_eq!(after.assign_calls - before.assign_calls, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn partition_that_is_refused_fails_alone_among_those_opened_with_it() {
    let asked = Asked::of(3).await;
    let (topic, partition) = (asked.topic.clone(), asked.partition(1));
    assert!(asked.source.send(Command::Occupy { topic, partition }));
    let held = asked.hold().await;
    let [first, refused, last] = [0, 1, 2].map(|index| asked.open(index, u64::from(index) + 4));
    let counted = asked.count();
    held.go_on();
    assert_eq!(counted.await.unwrap().open, 2, "what was refused is not open");
    // The client had it already.
    assert!(matches!(refused.await.unwrap(), Err(SourceError::Transient(_))));
    for (opened, from) in [(first, 4), (last, 6)] {
        assert_eq!(next_of(&mut opened.await.unwrap().unwrap()).await, Ok(from));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partition_is_closed_again_when_nobody_waits_for_its_open_any_more() {
    let asked = Asked::of(3).await;
    let held = asked.hold().await;
    let [first, left, last] = [0, 1, 2].map(|index| asked.open(index, 2));
    drop(left);
    let counted = asked.count();
    held.go_on();
    assert_eq!(counted.await.unwrap().open, 2, "at once, before anything was fetched");
    for opened in [first, last] {
        assert_eq!(next_of(&mut opened.await.unwrap().unwrap()).await, Ok(2));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn close_that_was_asked_for_between_two_opens_comes_between_them() {
    let asked = Asked::of(2).await;
    let held = asked.hold().await;
    let (first, neighbour) = (asked.open(0, 2), asked.open(1, 3));
    let closed = asked.close(0);
    let second = asked.open(0, 7);
    held.go_on();
    let mut first = first.await.unwrap().unwrap();
    closed.await.unwrap();
    assert!(first.recv().await.is_none(), "nothing comes after the close");
    for (opened, from) in [(neighbour, 3), (second, 7)] {
        assert_eq!(next_of(&mut opened.await.unwrap().unwrap()).await, Ok(from));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn second_open_finds_the_first_one_open_unless_its_reader_has_left() {
    let asked = Asked::of(1).await;
    let held = asked.hold().await;
    let (stays, refused) = (asked.open(0, 2), asked.open(0, 7));
    held.go_on();
    let stays = stays.await.unwrap().unwrap();
    assert!(matches!(refused.await.unwrap(), Err(SourceError::Fatal(_))));
    drop(stays);
    let held = asked.hold().await;
    let (left, second) = (asked.open(0, 2), asked.open(0, 7));
    drop(left);
    held.go_on();
    assert_eq!(next_of(&mut second.await.unwrap().unwrap()).await, Ok(7));
}
