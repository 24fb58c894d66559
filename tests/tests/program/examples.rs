//! The services in `examples/`, as their page tells to run them: side by side, on a real Kafka.

use std::path::Path;
use std::process::Command;

use rusqlite::Connection;
use tenure_tests::process::{Process, tenure_bin};
use tenure_tests::servers::{Kafka, require};

use super::{Dev, LONGEST, said, until};

const PARTITIONS: u16 = 3;
const RECORDS: i64 = 300;

fn start(example: &str, name: &str, dev: &Dev, kafka: &Kafka, topic: &str, data: &Path) -> Process {
    let mut command = Command::new(tenure_bin().with_file_name(example));
    command
        .env("TENURE_COORDINATORS", &dev.address)
        .env("KAFKA_BOOTSTRAP", kafka.bootstrap())
        .env("TOPIC", topic)
        .env("DATA", data);
    Process::spawn(name, &mut command)
}

/// Runs two processes of an example until `done`, asks both to end, and holds that both do so cleanly.
fn run_two(example: &str, done: impl Fn(&Dev, &str, &Path) -> bool) {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let (dev, topic) = (Dev::start(), kafka.new_topic("example", PARTITIONS));
    let values: Vec<String> = (0..RECORDS).map(|number| format!("order {number}")).collect();
    for (partition, share) in (0..).zip(values.chunks(values.len() / usize::from(PARTITIONS))) {
        kafka.produce(&topic, partition, share);
    }
    let folder = tempfile::tempdir().unwrap();
    let start = |name| start(example, name, &dev, kafka, &topic, folder.path());
    let mut processes = [start("one"), start("other")];
    until(&format!("end of {example}"), || done(&dev, &topic, folder.path()));
    for process in &processes {
        process.terminate();
    }
    for process in &mut processes {
        let status = process.wait(LONGEST);
        assert!(status.is_some_and(|status| status.success()), "{}", process.tail());
    }
    assert!(done(&dev, &topic, folder.path()), "the end of the processes changed something");
    let groups = said(&dev.run(&["groups"]));
    let members: Vec<&str> = groups.lines().skip(1).collect();
    assert!(members.iter().all(|line| line.split_whitespace().nth(2) == Some("0")), "{groups}");
}

/// A number out of a database that a process may just be making.
fn number(file: &Path, query: &str) -> Option<i64> {
    let database = Connection::open(file).ok()?;
    database.query_row(query, [], |row| row.get(0)).ok()
}

#[test]
fn rows_and_offset_writes_every_record_once() {
    run_two("rows-and-offset", |_, _, data| {
        let rows = number(&data.join("orders.db"), "SELECT count(*) FROM orders");
        rows == Some(RECORDS)
    });
}

#[test]
fn aggregator_counts_every_record_once() {
    run_two("aggregator-warm", |_, _, data| {
        let counted = number(&data.join("counts.db"), "SELECT sum(count) FROM counts");
        counted == Some(RECORDS)
    });
}

#[test]
fn effects_of_offsets_only_are_there_and_their_offsets_are_committed() {
    run_two("offsets-only", |dev, _, data| {
        let effects = std::fs::read_dir(data.join("effects")).map_or(0, Iterator::count);
        let partitions = dev.run(&["partitions", "offsets-only", "--output", "json"]);
        let Ok(partitions) = serde_json::from_slice::<serde_json::Value>(&partitions.stdout) else {
            return false;
        };
        let committed = partitions["partitions"].as_array().into_iter().flatten();
        let committed: i64 = committed.filter_map(|line| line["committed"].as_i64()).sum();
        effects == usize::try_from(RECORDS).unwrap() && committed == RECORDS
    });
}

#[test]
fn published_files_hold_every_record_once() {
    run_two("files-to-object-store", |dev, topic, data| {
        let store = format!("file://{}", data.join("store").display());
        let partitions = dev.run(&["partitions", "files", "--output", "json"]);
        let Ok(partitions) = serde_json::from_slice::<serde_json::Value>(&partitions.stdout) else {
            return false;
        };
        let partitions = partitions["partitions"].as_array().cloned().unwrap_or_default();
        let published = partitions.iter().filter_map(|line| {
            let id = line["topic_id"].as_str()?;
            assert_eq!(line["topic"], topic);
            let resource = format!("files/{id}/{}", line["index"]);
            let files = Command::new(tenure_bin())
                .args(["sink", "files", &store, &resource, "--output", "json"])
                .output()
                .unwrap();
            serde_json::from_slice::<serde_json::Value>(&files.stdout).ok()?["next_offset"].as_i64()
        });
        published.sum::<i64>() == RECORDS
    });
}
