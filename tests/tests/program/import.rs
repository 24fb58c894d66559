//! Offsets of a Kafka consumer group, taken over; and copied back for tools that look there. On a real Kafka.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;

use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::{Offset, TopicPartitionList};
use tenure_kafka::{KafkaMirror, KafkaSettings, KafkaSource, MIRROR_METADATA};
use tenure_model::{GroupId, LeaseSettings, TopicName};
use tenure_sdk::Consumer;
use tenure_sink_sqlite::{SqliteSettings, SqliteSink};
use tenure_tests::process::tenure_bin;
use tenure_tests::servers::{Kafka, Postgres, free_port, require, unique_name, wait_until};

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

    let busy = Busy::start(kafka, &group, &topic);
    let refused = dev.run(&apply);
    assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
    assert!(said(&refused).contains("has members"), "{}", said(&refused));
    drop(busy);

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

/// A member of the Kafka group, at work until it is dropped.
struct Busy(BaseConsumer);

impl Busy {
    fn start(kafka: &Kafka, group: &str, topic: &str) -> Self {
        let member = client(kafka, group);
        member.subscribe(&[topic]).unwrap();
        let joined = wait_until(LONGEST, || {
            drop(member.poll(std::time::Duration::from_millis(50)));
            member.assignment().is_ok_and(|assigned| assigned.count() > 0)
        });
        assert!(joined, "the member of the Kafka group gets its partitions");
        Self(member)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.unsubscribe();
    }
}

/// A sink that keeps the offsets, as the import meets it and as its own tools see it.
struct Home<'h> {
    url: &'h str,
    /// What is said while the fence table is not there.
    without_table: &'h str,
    migrate: &'h dyn Fn(),
    /// Index and offset of every row.
    offsets: &'h dyn Fn() -> Vec<(String, Option<i64>)>,
    /// Moves the offset of partition 0 on, as its owner would.
    move_on: &'h dyn Fn(i64),
}

/// Takes a Kafka group over into `home`, with all that has to be refused on the way.
fn check_home(kafka: &Kafka, home: &Home<'_>) {
    let (dev, topic, group) = (Dev::start(), kafka.new_topic("home", 2), unique_name("old"));
    kafka.produce(&topic, 0, &["a", "b", "c", "d", "e"]);
    kafka.produce(&topic, 1, &["f"]);
    commit(kafka, &group, &topic, &[(0, 3)]);
    let import = ["import-kafka-group", &group, "--kafka", kafka.bootstrap(), "--topic", &topic];
    let at_home = [&import[..], &["--home", home.url]].concat();
    let apply = [&at_home[..], &["--apply"]].concat();
    let refused = |arguments: &[&str], code: i32, text: &str| {
        let output = dev.run(arguments);
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        assert!(said(&output).contains(text), "lacks {text:?}: {}", said(&output));
    };
    refused(&apply, 1, home.without_table);
    (home.migrate)();

    let dry = dev.run(&at_home);
    assert!(dry.status.success() && said(&dry).contains("nothing was changed"), "{}", said(&dry));
    assert_eq!((home.offsets)(), [], "a dry run registers nothing");

    let busy = Busy::start(kafka, &group, &topic);
    refused(&apply, 1, "has members");
    assert_eq!((home.offsets)(), [], "a refusal registers nothing");
    drop(busy);

    let done = dev.run(&apply);
    assert!(done.status.success(), "{}", said(&done));
    let want = [("0".to_owned(), Some(3)), ("1".to_owned(), None)];
    assert_eq!((home.offsets)(), want, "what Kafka has, and nothing made up");
    assert_eq!(dev.json(&["describe", &group])["group"]["home"], "sink");
    let result = |arguments: &[&str]| {
        let again = dev.json(arguments);
        again["partitions"][0]["result"].as_str().unwrap().to_owned()
    };
    assert_eq!(result(&apply), "imported", "repeating it changes nothing");
    assert_eq!((home.offsets)(), want);
    (home.move_on)(4);
    assert_eq!(result(&apply), "kept: has 4 already", "what went on is not set back");
    assert_eq!((home.offsets)()[0].1, Some(4));
    refused(&[&import[..], &["--apply"]].concat(), 1, "home");
}

/// The last part of a fence's name is the partition's index.
fn index_of(resource: &str) -> String {
    resource.rsplit('/').next().unwrap().to_owned()
}

#[test]
fn kafka_group_is_taken_over_into_the_sqlite_file_that_keeps_the_offsets() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("data.db");
    let url = format!("sqlite:{}", file.display());
    let import = ["import-kafka-group", "g", "--kafka", kafka.bootstrap(), "--topic"];
    let topic = kafka.new_topic("home", 1);
    let missing = [&import[..], &[&topic, "--home", &url]].concat();
    let output = Dev::start().run(&missing);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("start the group's service once"), "{}", said(&output));

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let sink = runtime.block_on(SqliteSink::open(&file, SqliteSettings::default())).unwrap();
    let table = rusqlite::Connection::open(&file).unwrap();
    let offsets = || {
        let query = "SELECT resource, next_offset FROM tenure_fence ORDER BY resource";
        let mut rows = table.prepare(query).unwrap();
        let read = rows.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get(1)?)));
        read.unwrap().map(Result::unwrap).map(|(name, next)| (index_of(&name), next)).collect()
    };
    let home = Home {
        url: &url,
        without_table: "no such table",
        migrate: &|| runtime.block_on(sink.migrate()).unwrap(),
        offsets: &offsets,
        move_on: &|next| {
            let update = "UPDATE tenure_fence SET next_offset = ?1 WHERE resource LIKE '%/0'";
            assert_eq!(table.execute(update, [next]).unwrap(), 1);
        },
    };
    check_home(kafka, &home);
}

#[test]
fn kafka_group_is_taken_over_into_the_postgres_that_keeps_the_offsets() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let Some(server) = require(Postgres::shared()) else { return };
    let database = server.new_database();
    let url = server.url_of(&database, server.port());
    let offsets = || {
        let query = "SELECT resource, next_offset FROM tenure_fence ORDER BY resource";
        let rows = server.sql(&database, query);
        let rows = rows.lines().map(|row| row.split_once('|').unwrap());
        rows.map(|(name, next)| (index_of(name), next.parse().ok())).collect()
    };
    let home = Home {
        url: &url,
        without_table: "relation \"tenure_fence\" does not exist",
        migrate: &|| {
            assert_eq!(server.sql(&database, tenure_sink_postgres::sql::MIGRATE), "");
        },
        offsets: &offsets,
        move_on: &|next| {
            let update = format!(
                "UPDATE tenure_fence SET next_offset = {next} WHERE resource LIKE '%/0' RETURNING 1"
            );
            assert_eq!(server.sql(&database, &update), "1");
        },
    };
    check_home(kafka, &home);
}

/// In every output, at every level of the log, and whatever goes wrong.
#[test]
fn password_of_a_home_is_nowhere_to_be_read_and_a_warning_tells_where_it_belongs() {
    const SECRET: &str = "s3cret-that-nobody-sees";
    let Some(kafka) = require(Kafka::shared()) else { return };
    let Some(server) = require(Postgres::shared()) else { return };
    let (dev, topic, group) = (Dev::start(), kafka.new_topic("secret", 1), unique_name("old"));
    kafka.produce(&topic, 0, &["a", "b"]);
    commit(kafka, &group, &topic, &[(0, 1)]);
    let database = server.new_database();
    server.sql(&database, tenure_sink_postgres::sql::MIGRATE);
    let address = |port: u16| format!("postgres://tenure:{SECRET}@127.0.0.1:{port}/{database}");
    let right = address(server.port());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("home");
    let write = |text: &str| std::fs::write(&file, text).unwrap();

    let run = |flags: &[&str], variable: Option<&str>, code: i32| {
        let mut command = Command::new(tenure_bin());
        command.args(["import-kafka-group", &group, "--kafka", kafka.bootstrap(), "--topic"]);
        command.arg(&topic).args(flags).args(["--coordinators", &dev.address]);
        command.env("TENURE_LOG", "trace").env_remove("TENURE_IMPORT_HOME");
        if let Some(address) = variable {
            command.env("TENURE_IMPORT_HOME", address);
        }
        let output = command.output().unwrap();
        let text = said(&output);
        assert!(!text.contains(SECRET), "{flags:?}: {text}");
        assert_eq!(output.status.code(), Some(code), "{flags:?}: {text}");
        text
    };
    let path = file.to_str().unwrap();
    let from_file = ["--home-file", path];

    let warned = run(&["--home", &right], None, 0);
    for way in ["--home-file", "TENURE_IMPORT_HOME", "`ps`"] {
        assert!(warned.contains(way), "the warning lacks {way}: {warned}");
    }
    let without = server.url_of(&database, server.port());
    assert!(!run(&["--home", &without], None, 0).contains("`ps`"), "there is no password");
    write(&format!("{right}\n"));
    assert!(!run(&from_file, None, 0).contains("`ps`"));
    assert!(!run(&[], Some(&right), 0).contains("`ps`"));
    let home_of = |database: &str| server.sql(database, "SELECT next_offset FROM tenure_fence");
    // The file counts, and not the variable beside it.
    run(&[&from_file[..], &["--apply"]].concat(), Some("sqlite:/nowhere"), 0);
    assert_eq!(home_of(&database), "1");
    run(&["--apply"], Some(&right), 0);
    assert_eq!(home_of(&database), "1");

    run(&["--home", &right, "--home-file", path], None, 2);
    assert!(run(&[], Some(" "), 2).contains("TENURE_IMPORT_HOME is empty"));
    assert!(run(&["--home-name", "bills"], None, 2).contains("--home-file FILE"));
    assert!(run(&["--help"], Some(&right), 0).contains("TENURE_IMPORT_HOME"));
    for (text, code, says) in [
        ("", 2, "on one line"),
        (&format!("{right}\n{right}\n"), 2, "on one line"),
        (&"x".repeat(10_000), 2, "on one line"),
        (&format!("mysql://tenure:{SECRET}@127.0.0.1/d"), 2, "home: give postgres://"),
        (&format!("postgres://tenure:{SECRET}@127.0.0.1:port/d"), 2, "home: "),
        (&format!("postgres://tenure:{SECRET}%zz@127.0.0.1:1/d?{SECRET}=1"), 2, "home: "),
        (&address(free_port()), 1, "home: "),
    ] {
        write(text);
        let said = run(&from_file, None, code);
        assert!(said.contains(says), "{text:?} lacks {says:?}: {said}");
    }
    std::fs::remove_file(&file).unwrap();
    assert!(run(&from_file, None, 2).contains(path));
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
