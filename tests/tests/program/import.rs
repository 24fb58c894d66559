//! Offsets of a Kafka consumer group, taken over; and copied back for tools that look there. On a real Kafka.

use std::collections::BTreeMap;
use std::sync::Arc;

use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::{Offset, TopicPartitionList};
use tenure_kafka::{KafkaMirror, KafkaSettings, KafkaSource, MIRROR_METADATA};
use tenure_model::{GroupId, LeaseSettings, TopicName};
use tenure_sdk::Consumer;
use tenure_sink_sqlite::{SqliteSettings, SqliteSink};
use tenure_tests::servers::{Kafka, require, unique_name, wait_until};

use super::{Dev, LONGEST, read_on, said};

/// A client of a consumer group that joins nothing unless it is told to.
fn client(kafka: &Kafka, group: &str) -> BaseConsumer {
    let mut config = kafka.client_config();
    config.set("group.id", group).set("enable.auto.commit", "false");
    config.set("session.timeout.ms", "6000");
    config.create().unwrap()
}

fn commit(kafka: &Kafka, group: &str, topic: &str, offsets: &[(i32, i64)]) {
    let mut list = TopicPartitionList::new();
    for (index, offset) in offsets {
        list.add_partition_offset(topic, *index, Offset::Offset(*offset)).unwrap();
    }
    client(kafka, group).commit(&list, CommitMode::Sync).unwrap();
}

/// Offset and metadata of each partition that has one.
fn committed(kafka: &Kafka, group: &str, topic: &str) -> BTreeMap<i32, (i64, String)> {
    let mut list = TopicPartitionList::new();
    list.add_partition_range(topic, 0, 2);
    // A group that is new has no coordinator for a moment.
    let Ok(found) = client(kafka, group).committed_offsets(list, LONGEST) else {
        return BTreeMap::new();
    };
    let lines = found.elements();
    let lines = lines.iter().filter_map(|line| {
        let Offset::Offset(offset) = line.offset() else { return None };
        Some((line.partition(), (offset, line.metadata().to_owned())))
    });
    lines.collect()
}

#[test]
fn kafka_group_is_taken_over_once_it_is_empty_and_its_readers_go_on_from_there() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let (dev, topic, group) = (Dev::start(), kafka.new_topic("import", 3), unique_name("old"));
    kafka.produce(&topic, 0, &["a", "b", "c", "d"]);
    kafka.produce(&topic, 1, &["e", "f"]);
    commit(kafka, &group, &topic, &[(0, 3), (1, 1)]);
    let import = ["import-kafka-group", &group, "--kafka", kafka.bootstrap(), "--topic", &topic];
    let apply = [&import[..], &["--apply"]].concat();

    let dry = dev.run(&import);
    assert!(dry.status.success(), "{}", said(&dry));
    assert!(said(&dry).contains("nothing was changed"), "{}", said(&dry));
    assert!(!said(&dev.run(&["groups"])).contains(&group), "a dry run makes no group");

    let member = client(kafka, &group);
    member.subscribe(&[&topic]).unwrap();
    let joined = wait_until(LONGEST, || {
        drop(member.poll(std::time::Duration::from_millis(50)));
        member.assignment().is_ok_and(|assigned| assigned.count() > 0)
    });
    assert!(joined, "the member of the Kafka group gets its partitions");
    let refused = dev.run(&apply);
    assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
    assert!(said(&refused).contains("has members"), "{}", said(&refused));
    member.unsubscribe();
    drop(member);

    let done = dev.run(&apply);
    assert!(done.status.success(), "{}", said(&done));
    let described = dev.json(&["partitions", &group]);
    let text = described.to_string();
    let again = dev.json(&[&apply[..], &[]].concat());
    let results: Vec<&str> = again["partitions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line["result"].as_str().unwrap())
        .collect();
    let want = ["imported", "imported", "no offset: left to the group's reset policy"];
    assert_eq!(results, want, "repeating it changes nothing: {text}");
}

#[test]
fn kafka_group_is_taken_over_into_the_sink_that_keeps_the_offsets() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let (dev, topic, group) = (Dev::start(), kafka.new_topic("home", 2), unique_name("old"));
    kafka.produce(&topic, 0, &["a", "b", "c", "d"]);
    kafka.produce(&topic, 1, &["e"]);
    commit(kafka, &group, &topic, &[(0, 3)]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("data.db");
    let home = format!("sqlite:{}", file.display());
    let import = ["import-kafka-group", &group, "--kafka", kafka.bootstrap(), "--topic", &topic];
    let at_home = [&import[..], &["--home", &home]].concat();
    let apply = [&at_home[..], &["--apply"]].concat();

    let refused = |arguments: &[&str], code: i32, text: &str| {
        let output = dev.run(arguments);
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        assert!(said(&output).contains(text), "{}", said(&output));
    };
    refused(&at_home, 1, "start the group's service once");
    refused(&[&import[..], &["--home", "mysql://x"]].concat(), 2, "--home: give postgres://");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let sink = runtime.block_on(SqliteSink::open(&file, SqliteSettings::default())).unwrap();
    refused(&apply, 1, "no such table");
    runtime.block_on(sink.migrate()).unwrap();

    let dry = dev.run(&at_home);
    assert!(dry.status.success() && said(&dry).contains("nothing was changed"), "{}", said(&dry));
    let table = rusqlite::Connection::open(&file).unwrap();
    let offsets = || {
        let query = "SELECT resource, next_offset FROM tenure_fence";
        let mut rows = table.prepare(query).unwrap();
        let read = rows.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get(1)?)));
        let found: BTreeMap<String, Option<i64>> = read.unwrap().map(Result::unwrap).collect();
        found
            .into_iter()
            .map(|(name, next)| (name.rsplit('/').next().unwrap().to_owned(), next))
            .collect::<Vec<_>>()
    };
    assert_eq!(offsets(), [], "a dry run registers nothing");

    let member = client(kafka, &group);
    member.subscribe(&[&topic]).unwrap();
    let joined = wait_until(LONGEST, || {
        drop(member.poll(std::time::Duration::from_millis(50)));
        member.assignment().is_ok_and(|assigned| assigned.count() > 0)
    });
    assert!(joined, "the member of the Kafka group gets its partitions");
    refused(&apply, 1, "has members");
    member.unsubscribe();
    drop(member);

    let done = dev.run(&apply);
    assert!(done.status.success(), "{}", said(&done));
    let want = [("0".to_owned(), Some(3)), ("1".to_owned(), None)];
    assert_eq!(offsets(), want, "what Kafka has, and nothing made up");
    assert_eq!(dev.json(&["describe", &group])["group"]["home"], "sink");
    let again = dev.json(&apply);
    let result = &again["partitions"][0]["result"];
    assert_eq!(result, "imported", "repeating it changes nothing: {again}");
    refused(&[&import[..], &["--apply"]].concat(), 1, "home");
}

#[test]
fn committed_offsets_are_copied_to_kafka_with_their_epoch() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let (dev, topic, copies) = (Dev::start(), kafka.new_topic("mirror", 2), unique_name("lag"));
    kafka.produce(&topic, 0, &["a", "b", "c"]);
    kafka.produce(&topic, 1, &["d"]);
    let settings = KafkaSettings::new(kafka.bootstrap());
    let mirror = KafkaMirror::new(&settings, &copies).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _guard = runtime.enter();
    let consumer = Consumer::builder(
        GroupId::new("mirrored").unwrap(),
        vec![TopicName::new(&topic).unwrap()],
        Arc::new(KafkaSource::new(settings).unwrap()),
        vec![dev.address.clone()],
    )
    .lease(LeaseSettings::for_ttl(3_000))
    .mirror(Arc::new(mirror))
    .build()
    .unwrap();
    let stopper = consumer.stopper();
    let run = runtime.spawn(consumer.run(read_on));
    let ends = |committed: &BTreeMap<i32, (i64, String)>| {
        committed.values().map(|(offset, _)| *offset).collect::<Vec<_>>()
    };
    let copied = wait_until(LONGEST, || ends(&committed(kafka, &copies, &topic)) == [3, 1]);
    let found = committed(kafka, &copies, &topic);
    assert!(copied, "{found:?}");
    let lags = || {
        let listed = dev.json(&["partitions", "mirrored"]);
        let lines = listed["partitions"].as_array().unwrap().iter();
        lines.map(|line| line["lag"].as_u64()).collect::<Vec<_>>()
    };
    assert!(wait_until(LONGEST, || lags() == [Some(0), Some(0)]), "{:?}", lags());
    for (_, metadata) in found.values() {
        let epoch = metadata.strip_prefix(MIRROR_METADATA).unwrap_or_else(|| panic!("{found:?}"));
        assert!(epoch.parse::<u64>().unwrap() > 0);
    }
    // What was committed last is copied before the consumer has ended.
    kafka.produce(&topic, 1, &["e"]);
    let delivered = wait_until(LONGEST, || {
        dev.json(&["partitions", "mirrored"]).to_string().contains("\"committed\":2")
    });
    assert!(delivered);
    stopper.stop(LONGEST);
    assert!(runtime.block_on(run).unwrap().unwrap().clean);
    assert_eq!(ends(&committed(kafka, &copies, &topic)), [3, 2]);
}
