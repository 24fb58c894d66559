//! The source against a mock cluster in this process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::{Duration, Instant};

use tenure_kafka::mock::MockKafka;
use tenure_kafka::producer::{NewRecord, Producer};
use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_model::{NextOffset, Partition, PartitionIndex, TopicId, TopicName};
use tenure_sdk::source::{
    Fetched, ReadAhead, Record, RecordSource, RecordStream, ResetPolicy, SourceError,
};

const PATIENCE: Duration = Duration::from_secs(30);

struct Setup {
    kafka: MockKafka,
    source: KafkaSource,
    topic: TopicName,
    topic_id: TopicId,
}

impl Setup {
    /// A topic with `count` records in each partition, each with its own offset as value.
    async fn new(partitions: u16, count: u64) -> Self {
        let kafka = MockKafka::start(1).unwrap();
        let topic = TopicName::new("orders").unwrap();
        kafka.create_topic(topic.as_str(), partitions).unwrap();
        let source = KafkaSource::new(KafkaSettings::new(kafka.bootstrap())).unwrap();
        let found = source.topics(std::slice::from_ref(&topic)).await.unwrap();
        assert_eq!(found[0].partition_count, u32::from(partitions));
        let setup = Self { kafka, source, topic, topic_id: found[0].topic_id };
        for index in 0..u32::from(partitions) {
            let partition = setup.partition(index).index;
            let record = |number: u64| NewRecord::new(partition, "k", &number.to_string());
            setup.produce((0..count).map(record).collect()).await;
        }
        setup
    }

    async fn produce(&self, records: Vec<NewRecord>) {
        let (bootstrap, topic) = (self.kafka.bootstrap(), self.topic.clone());
        let write = move || Producer::new(&bootstrap).unwrap().produce(&topic, records).unwrap();
        tokio::task::spawn_blocking(write).await.unwrap();
    }

    fn partition(&self, index: u32) -> Partition {
        Partition { topic_id: self.topic_id, index: PartitionIndex::new(index).unwrap() }
    }

    /// Waits until the source says that a partition ends there.
    async fn ends_at(&self, partition: Partition, wanted: u64) {
        let started = Instant::now();
        let end = || self.source.end_offset(partition).map(NextOffset::get);
        while end() != Some(wanted) {
            assert!(started.elapsed() < PATIENCE, "the end is {:?}, not {wanted}", end());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn open(&self, index: u32, from: u64, records: usize) -> RecordStream {
        let read_ahead = ReadAhead { records, bytes: 8 << 20 };
        let from = NextOffset::new(from).unwrap();
        self.source.open(&self.topic, self.partition(index), from, read_ahead).await.unwrap()
    }
}

async fn item(stream: &mut RecordStream) -> Option<Fetched> {
    tokio::time::timeout(PATIENCE, stream.recv()).await.expect("an item in time")
}

async fn records(stream: &mut RecordStream) -> Vec<Record> {
    let fetched = item(stream).await.expect("the stream goes on");
    fetched.into_records().expect("no records")
}

/// Reads `next..end` or a little further, and checks that each offset comes once, in order, with
/// its own value. Returns the next offset.
async fn read_through(stream: &mut RecordStream, mut next: u64, end: u64) -> u64 {
    while next < end {
        for record in records(stream).await {
            assert_eq!(record.offset.get(), next);
            assert_eq!(record.value.as_deref(), Some(next.to_string().as_bytes()));
            next += 1;
        }
    }
    next
}

#[tokio::test(flavor = "multi_thread")]
async fn records_come_in_order_from_the_offset_that_was_asked_for() {
    let setup = Setup::new(2, 3000).await;
    let mut stream = setup.open(1, 1234, 1000).await;
    read_through(&mut stream, 1234, 3000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn end_of_an_open_partition_is_known_and_follows_what_is_written() {
    let setup = Setup::new(2, 30).await;
    let (idle, partition) = (setup.partition(0), setup.partition(1));
    assert_eq!(setup.source.end_offset(partition), None, "it is not open");
    let _untouched = setup.open(0, 30, 1000).await;
    let mut stream = setup.open(1, 12, 1000).await;
    setup.ends_at(partition, 30).await;
    setup.ends_at(idle, 30).await;
    read_through(&mut stream, 12, 30).await;
    setup.produce(vec![NewRecord::new(partition.index, "k", "30")]).await;
    setup.ends_at(partition, 31).await;
    setup.source.close(partition).await;
    assert_eq!(setup.source.end_offset(partition), None, "it is closed");
    assert_eq!(setup.source.end_offset(idle).map(NextOffset::get), Some(30));
}

#[tokio::test(flavor = "multi_thread")]
async fn end_of_a_partition_that_is_written_to_all_the_time_is_never_far_behind() {
    const EACH: u64 = 50;
    const ROUNDS: u64 = 30;
    let setup = Setup::new(1, 0).await;
    let partition = setup.partition(0);
    let mut stream = setup.open(0, 0, 1000).await;
    let reader = tokio::spawn(async move {
        assert_eq!(read_through(&mut stream, 0, ROUNDS * EACH).await, ROUNDS * EACH);
        stream
    });
    let (mut told, mut least) = (Vec::new(), 0);
    for written in 1..=ROUNDS {
        let number = |number: u64| (EACH * (written - 1) + number).to_string();
        let record = |record: u64| NewRecord::new(partition.index, "k", &number(record));
        setup.produce((0..EACH).map(record).collect()).await;
        tokio::time::sleep(Duration::from_millis(40)).await;
        if let Some(end) = setup.source.end_offset(partition).map(NextOffset::get) {
            assert!(end <= written * EACH, "{end} of {written}");
            assert!(end >= least, "{end} after {least}");
            least = end;
            told.push(end);
        }
    }
    told.dedup();
    assert!(told.len() > 1 && told.first() < told.last(), "it moves meanwhile: {told:?}");
    let _open = reader.await.unwrap();
    setup.ends_at(partition, ROUNDS * EACH).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn key_value_headers_and_timestamp_arrive_as_they_were_written() {
    let setup = Setup::new(1, 0).await;
    let mut full = NewRecord::new(setup.partition(0).index, "key", "value");
    full.headers = vec![("a".into(), Some(b"1".to_vec())), ("b".into(), None)];
    full.timestamp_ms = Some(1_700_000_000_123);
    let mut tombstone = NewRecord::new(setup.partition(0).index, "key", "");
    tombstone.value = None;
    setup.produce(vec![full, tombstone]).await;
    let mut stream = setup.open(0, 0, 10).await;
    let mut found = records(&mut stream).await;
    while found.len() < 2 {
        found.extend(records(&mut stream).await);
    }
    assert_eq!(found[0].key.as_deref(), Some(&b"key"[..]));
    assert_eq!(found[0].value.as_deref(), Some(&b"value"[..]));
    assert_eq!(found[0].timestamp_ms, Some(1_700_000_000_123));
    let headers: Vec<_> =
        found[0].headers.iter().map(|(k, v)| (k.as_str(), v.as_deref())).collect();
    assert_eq!(headers, [("a", Some(&b"1"[..])), ("b", None)]);
    assert_eq!((found[1].value.as_ref(), found[1].partition), (None, setup.partition(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_put_into_a_stream_after_its_close_was_answered() {
    let setup = Setup::new(4, 20_000).await;
    let mut load = Vec::new();
    for index in 1..4 {
        load.push(setup.open(index, 0, 1000).await);
    }
    let readers: Vec<_> = load
        .into_iter()
        .map(|mut stream| tokio::spawn(async move { while stream.recv().await.is_some() {} }))
        .collect();
    let (mut late, mut seen) = (0, 0);
    for round in 0..200_u64 {
        let from = round * 97 % 20_000;
        let mut stream = setup.open(0, from, 100_000).await;
        if round % 3 > 0 {
            let first = records(&mut stream).await;
            assert_eq!(first[0].offset.get(), from, "round {round}");
            seen += first.len();
        }
        if round % 10 == 9 {
            // Keeps the other partitions busy.
            for index in 1..4 {
                setup.source.close(setup.partition(index)).await;
                let mut stream = setup.open(index, 0, 1000).await;
                tokio::spawn(async move { while stream.recv().await.is_some() {} });
            }
        }
        setup.source.close(setup.partition(0)).await;
        let inside = stream.len();
        tokio::time::sleep(Duration::from_millis(2)).await;
        late += stream.len() - inside;
        let mut next = None;
        while let Ok(fetched) = stream.try_recv() {
            for record in fetched.into_records().unwrap() {
                assert!(next.is_none_or(|next| next == record.offset), "round {round}");
                next = Some(record.next());
            }
        }
        assert!(stream.recv().await.is_none(), "a closed stream ends");
    }
    assert!(seen > 0);
    eprintln!("200 opens and closes under load: {late} late items, {seen} records read first");
    assert_eq!(late, 0);
    setup.source.shutdown(PATIENCE).await;
    for reader in readers {
        reader.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partition_that_is_opened_again_delivers_exactly_from_the_new_offset() {
    let setup = Setup::new(1, 5000).await;
    for from in [0, 4000, 17, 4999, 2500, 17] {
        let mut stream = setup.open(0, from, 1000).await;
        read_through(&mut stream, from, 5000).await;
        setup.source.close(setup.partition(0)).await;
        assert!(stream.recv().await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn open_partition_is_not_opened_twice_and_stays_open_when_that_is_tried() {
    let setup = Setup::new(1, 100).await;
    let mut stream = setup.open(0, 0, 10).await;
    let again = setup
        .source
        .open(&setup.topic, setup.partition(0), NextOffset::ZERO, ReadAhead::default())
        .await;
    assert!(matches!(again, Err(SourceError::Fatal(_))), "{again:?}");
    read_through(&mut stream, 0, 100).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_that_is_dropped_without_a_close_leaves_the_partition_free() {
    let setup = Setup::new(1, 1000).await;
    // Without a pause between the end of one assignment and the next: the partition once went mute by that.
    let begun = Instant::now();
    for from in 0..30 {
        let mut stream = setup.open(0, from, 10).await;
        read_through(&mut stream, from, from + 1).await;
    }
    eprintln!("30 times opened again at once: {:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_reader_holds_up_no_other_partition_and_misses_nothing() {
    let setup = Setup::new(4, 20_000).await;
    let mut slow = setup.open(0, 0, 100).await;
    let mut others = Vec::new();
    for index in 1..4 {
        others.push(setup.open(index, 0, 1000).await);
    }
    for stream in &mut others {
        read_through(stream, 0, 20_000).await;
    }
    assert!(slow.len() <= 100, "{} items in a stream of 100 records", slow.len());
    let begun = Instant::now();
    read_through(&mut slow, 0, 20_000).await;
    eprintln!("20000 records through a stream of 100: {:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn offset_out_of_range_is_said_and_never_reset() {
    let setup = Setup::new(1, 10).await;
    let mut stream = setup.open(0, 1_000_000, 100).await;
    match item(&mut stream).await {
        Some(Fetched::Failed(SourceError::OutOfRange { topic, index: 0, wanted })) => {
            assert_eq!((topic, wanted.get()), (setup.topic.clone(), 1_000_000));
        }
        other => panic!("{other:?}"),
    }
    assert!(item(&mut stream).await.is_none(), "a failure is the last item");
    read_through(&mut setup.open(0, 0, 100).await, 0, 10).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn absent_topic_is_left_out_and_its_partition_cannot_be_opened() {
    let setup = Setup::new(2, 0).await;
    let absent = TopicName::new("absent").unwrap();
    let found = setup.source.topics(&[absent.clone(), setup.topic.clone()]).await.unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].topic, setup.topic);
    let open = async |topic: &TopicName, partition| {
        setup.source.open(topic, partition, NextOffset::ZERO, ReadAhead::default()).await
    };
    let refused = open(&absent, setup.partition(0)).await;
    assert!(matches!(refused, Err(SourceError::UnknownPartition { .. })), "{refused:?}");
    let refused = open(&setup.topic, setup.partition(2)).await;
    assert!(matches!(refused, Err(SourceError::UnknownPartition { index: 2, .. })), "{refused:?}");
    let other = Partition { topic_id: TopicId::from_bits(7), ..setup.partition(0) };
    let refused = open(&setup.topic, other).await;
    assert!(matches!(refused, Err(SourceError::OtherTopicId { .. })), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn start_is_the_first_or_the_next_offset() {
    let setup = Setup::new(1, 42).await;
    let start = async |policy| {
        setup.source.start(&setup.topic, setup.partition(0), policy).await.unwrap().get()
    };
    assert_eq!(start(ResetPolicy::Earliest).await, 0);
    assert_eq!(start(ResetPolicy::Latest).await, 42);
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_goes_on_after_the_brokers_were_away_and_a_look_up_meanwhile_is_an_error() {
    let setup = Setup::new(1, 20_000).await;
    let mut stream = setup.open(0, 0, 100).await;
    let next = read_through(&mut stream, 0, 1).await;
    setup.kafka.take_brokers_down().unwrap();
    let asked = setup.source.topics(std::slice::from_ref(&setup.topic)).await;
    assert!(matches!(asked, Err(SourceError::Transient(_))), "{asked:?}");
    setup.kafka.bring_brokers_up().unwrap();
    read_through(&mut stream, next, 20_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_ends_the_streams_in_time_when_the_brokers_are_away() {
    let setup = Setup::new(2, 10_000).await;
    let mut streams = [setup.open(0, 0, 10).await, setup.open(1, 0, 10).await];
    read_through(&mut streams[0], 0, 1).await;
    setup.kafka.take_brokers_down().unwrap();
    let begun = Instant::now();
    setup.source.shutdown(Duration::from_secs(10)).await;
    eprintln!("shutdown with the brokers away: {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(11));
    for stream in &mut streams {
        while let Some(fetched) = item(stream).await {
            assert!(!fetched.into_records().unwrap().is_empty());
        }
    }
    let refused = setup.source.topics(std::slice::from_ref(&setup.topic)).await;
    assert!(matches!(refused, Err(SourceError::Fatal(_))), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn twelve_partitions_are_read_side_by_side() {
    let setup = Setup::new(12, 10_000).await;
    let begun = Instant::now();
    let mut readers = Vec::new();
    for index in 0..12 {
        let mut stream = setup.open(index, 0, 1000).await;
        readers.push(tokio::spawn(async move { read_through(&mut stream, 0, 10_000).await }));
    }
    for reader in readers {
        reader.await.unwrap();
    }
    let took = begun.elapsed();
    let rate = 120_000.0 / took.as_secs_f64();
    eprintln!("12 partitions x 10000 records: {took:?}, {rate:.0} records/s");
}
