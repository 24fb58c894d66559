//! The program `tenure` as people use it: serve, look, operate, and what it says when something is wrong.

#![allow(clippy::unwrap_used, reason = "helpers of tests are outside test functions")]

use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tenure_model::{GroupId, LeaseSettings, MemberId, TopicName};
use tenure_sdk::offsets::CoordinatorOffsets;
use tenure_sdk::sink::BoxError;
use tenure_sdk::testing::MemorySource;
use tenure_sdk::{Consumer, Limits, Owned, Stopper};
use tenure_tests::process::{Process, tenure_bin};

const LONGEST: Duration = Duration::from_secs(30);

#[path = "program/bench.rs"]
mod bench;
#[path = "program/compacted.rs"]
mod compacted;
#[path = "program/examples.rs"]
mod examples;
#[path = "program/import.rs"]
mod import;
#[path = "program/lock.rs"]
mod lock;
#[path = "program/metadata.rs"]
mod metadata;
#[path = "program/retention.rs"]
mod retention;

struct Dev {
    node: Process,
    address: String,
}

impl Dev {
    fn start() -> Self {
        let mut command = Command::new(tenure_bin());
        command.args(["serve", "--dev", "--listen", "127.0.0.1:0", "--raft-listen", "127.0.0.1:0"]);
        let node = Process::spawn("node", &mut command);
        let line =
            node.wait_for_line(|line| line.contains("serving clients at "), LONGEST).unwrap();
        let address = line.rsplit(' ').next().unwrap().to_owned();
        Self { node, address }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(tenure_bin())
            .args(arguments)
            .args(["--coordinators", &self.address])
            .env("TENURE_ACTOR", "ann")
            .output()
            .unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--output", "json"]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

async fn read_on(owned: Owned<CoordinatorOffsets>) -> Result<(), BoxError> {
    let (mut input, mut offsets) = owned.split();
    while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
        offsets.commit(batch.next()).await?;
    }
    Ok(())
}

/// A member with records in memory; runs until the stopper is used or dropped with the runtime.
fn member(
    runtime: &tokio::runtime::Runtime,
    dev: &Dev,
    name: &str,
    source: &MemorySource,
) -> Stopper {
    let consumer = Consumer::builder(
        GroupId::new("billing").unwrap(),
        vec![TopicName::new("orders").unwrap()],
        Arc::new(source.reader()),
        vec![dev.address.clone()],
    )
    .member(MemberId::new(name).unwrap())
    .lease(LeaseSettings::for_ttl(3_000))
    .build()
    .unwrap();
    let stopper = consumer.stopper();
    drop(runtime.spawn(consumer.run(read_on)));
    stopper
}

fn until(what: &str, mut met: impl FnMut() -> bool) {
    let started = Instant::now();
    while !met() {
        assert!(started.elapsed() < LONGEST, "no {what} within {LONGEST:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn owner(dev: &Dev, index: u64) -> String {
    let partitions = dev.json(&["partitions", "billing"]);
    let found = partitions["partitions"].as_array().unwrap().iter().find(|p| p["index"] == index);
    found.unwrap()["member"].as_str().unwrap().to_owned()
}

#[test]
fn groups_are_looked_at_and_operated_from_the_command_line() {
    let dev = Dev::start();
    let empty = dev.run(&["groups"]);
    assert!(said(&empty).contains("no groups: a group is made by its first member"));

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let source = MemorySource::new();
    let topic = TopicName::new("orders").unwrap();
    source.create_topic(&topic, 4);
    for index in 0..4 {
        source.append(&topic, index, "x").unwrap();
    }
    let _ann = member(&runtime, &dev, "ann", &source);
    let bob = member(&runtime, &dev, "bob", &source);
    let owned = |name: &str| {
        let members = dev.json(&["members", "billing"]);
        let found = members["members"].as_array().unwrap().iter().find(|m| m["member"] == name);
        found.map_or(0, |member| member["owned"].as_u64().unwrap())
    };
    until("shares of two", || {
        let groups = dev.json(&["groups"]);
        groups["groups"][0]["members"] == 2 && owned("ann") == 2 && owned("bob") == 2
    });
    until("committed offsets", || {
        let described = dev.json(&["describe", "billing"]);
        described["partitions"].as_array().unwrap().iter().all(|p| p["committed"] == 1)
    });

    // A dry run tells what would move and changes nothing.
    let (from, to) = if owner(&dev, 0) == "ann" { ("ann", "bob") } else { ("bob", "ann") };
    let wanted = ["move", "billing", "orders/0", "--to", to, "--reason", "try"];
    let dry = dev.json(&[&wanted[..], &["--dry-run"]].concat());
    assert_eq!((&dry["moves"][0]["from"], &dry["moves"][0]["to"]), (&from.into(), &to.into()));
    assert_eq!(owner(&dev, 0), from);

    // The same request id is the same request.
    let named = [&wanted[..], &["--request-id", "move-1"]].concat();
    let done = dev.json(&named);
    until("moved partition", || owner(&dev, 0) == to);
    assert_eq!(dev.json(&named)["group_epoch"], done["group_epoch"]);

    // A drained member owns nothing until it is undrained and the group is rebalanced.
    dev.json(&["drain", "billing", "bob", "--reason", "old host"]);
    until("drained member", || owned("bob") == 0 && owned("ann") == 4);
    dev.json(&["undrain", "billing", "bob", "--reason", "new host"]);
    dev.json(&["rebalance", "billing", "--reason", "spread again"]);
    until("shares again", || owned("ann") == 2 && owned("bob") == 2);

    bob.stop(Duration::from_secs(5));
    until("member that left", || dev.json(&["groups"])["groups"][0]["members"] == 1);
    let table = said(&dev.run(&["partitions", "billing"]));
    assert!(table.starts_with("PARTITION") && table.contains("orders/3"), "{table}");
    assert!(!table.contains("METADATA"), "no column for nothing: {table}");
    let cluster = dev.json(&["cluster"]);
    assert_eq!(cluster["raft_leader"], 1);
    let status = dev.json(&["cluster", "status"]);
    assert_eq!(status["nodes"][0]["lag"], 0);
    assert_eq!((&status["feature_level"], &status["digest_agreed"]), (&1.into(), &0.into()));
    until("node that says what it knows", || {
        let node = &dev.json(&["cluster", "status"])["nodes"][0];
        node["supported_level"] == 1 && node["version"].is_string()
    });
    assert_eq!(status["changing"], false);
    // A repetition of what is so already is done; the only voter stays.
    dev.json(&["cluster", "promote", "1", "--reason", "it votes already"]);
    dev.json(&["cluster", "transfer", "--to", "1", "--reason", "it leads already"]);
    dev.json(&["cluster", "remove", "2", "--reason", "it is not there"]);
    let refused = dev.run(&["cluster", "remove", "1", "--reason", "all must go"]);
    assert_eq!(refused.status.code(), Some(1));
    let complaint = String::from_utf8_lossy(&refused.stderr);
    assert!(complaint.contains("INVALID_ARGUMENT: node 1 is the only voter"), "{complaint}");
}

#[test]
fn changes_are_followed_and_read_back_from_the_command_line() {
    let dev = Dev::start();
    // The first of the nodes is not there: the watch goes on at the next.
    let mut command = Command::new(tenure_bin());
    command.args(["watch", "billing", "--from", "1", "--output", "json", "--coordinators"]);
    command.arg(format!("127.0.0.1:1,{}", dev.address));
    let watch = Process::spawn("watch", &mut command);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let source = MemorySource::new();
    source.create_topic(&TopicName::new("orders").unwrap(), 1);
    let ann = member(&runtime, &dev, "ann", &source);
    watch.wait_for_line(|line| line.contains("\"acquired\""), LONGEST).unwrap();
    ann.stop(Duration::from_secs(5));
    watch.wait_for_line(|line| line.contains("\"member-left\""), LONGEST).unwrap();

    let lines = watch.lines();
    let changes: Vec<Value> = lines
        .iter()
        .filter(|line| line.contains("\"change\""))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let told: Vec<&str> = changes.iter().map(|line| line["change"].as_str().unwrap()).collect();
    let of_grant = |change: &&&str| !change.starts_with("member") && **change != "revoked";
    let of_grant: Vec<&str> = told.iter().filter(of_grant).copied().collect();
    assert_eq!(of_grant, ["granted", "acquired", "released"], "{lines:?}");
    assert_eq!((told[0], told.last()), ("member-joined", Some(&"member-left")));

    let granted = changes.iter().find(|line| line["change"] == "granted").unwrap();
    let history = dev.json(&["history", "billing", "orders/0"]);
    let grant = &history["grants"][0];
    assert_eq!((&grant["member"], &grant["epoch"]), (&"ann".into(), &granted["epoch"]));
    assert_eq!(grant["granted_revision"], granted["revision"]);
    assert!(grant["end"]["cause"].is_string(), "{history}");
    let at = |revision: u64| {
        let revision = revision.to_string();
        let asked = ["history", "billing", "orders/0", "--at-revision", &revision];
        dev.json(&asked)["grants"].clone()
    };
    let revision = granted["revision"].as_u64().unwrap();
    assert_eq!((at(revision)[0].clone(), at(revision - 1)), (grant.clone(), Value::Array(vec![])));
    let table = said(&dev.run(&["history", "billing", "orders/0"]));
    assert!(table.starts_with("OWNER") && table.contains("ann"), "{table}");
}

#[test]
fn what_is_wrong_is_said_with_a_code_and_the_next_step() {
    let dev = Dev::start();
    let check = |arguments: &[&str], exit: i32, says: &[&str]| {
        let output = dev.run(arguments);
        assert_eq!(output.status.code(), Some(exit), "{arguments:?}: {}", said(&output));
        for text in says {
            assert!(
                said(&output).contains(text),
                "{arguments:?} lacks {text:?}: {}",
                said(&output)
            );
        }
    };
    check(&["describe", "none"], 1, &["UNKNOWN_GROUP", "next: `tenure groups`"]);
    check(&["members", "a b"], 1, &["INVALID_ARGUMENT", "' '"]);
    check(&["rebalance", "none", "--reason", ""], 1, &["INVALID_ARGUMENT", "reason"]);
    check(&["rebalance", "none"], 2, &["--reason"]);
    check(&["drain", "none", "x", "--reason", "r"], 1, &["UNKNOWN_GROUP"]);
    check(&["describe"], 2, &["<GROUP>"]);
    check(&["nonsense"], 2, &["unrecognized subcommand"]);

    let gone = Command::new(tenure_bin())
        .args(["groups", "--coordinators", "127.0.0.1:1", "--timeout-ms", "500"])
        .output()
        .unwrap();
    assert_eq!(gone.status.code(), Some(1), "{}", said(&gone));
    for text in ["127.0.0.1:1", "next: check that", "tenure serve --dev"] {
        assert!(said(&gone).contains(text), "lacks {text:?}: {}", said(&gone));
    }
}

#[test]
fn settings_that_contradict_each_other_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let check = |text: &str, says: &str| {
        let file = folder.path().join("node.toml");
        std::fs::write(&file, text).unwrap();
        let output =
            Command::new(tenure_bin()).args(["serve", "--config"]).arg(&file).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}: {}", said(&output));
        assert!(said(&output).contains(says), "{text} lacks {says:?}: {}", said(&output));
    };
    check("nonsense = 1", "nonsense");
    check("[lease]\nttl_ms = 900\nheartbeat_interval_ms = 301", "heartbeat_interval_ms is 301");
    check("[lease]\nttl_ms = 40000", "drain_deadline_ms");
    check("[lease]\nttl_ms = 0", "ttl_ms is 0");
    let missing = Command::new(tenure_bin()).args(["serve"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(2), "{}", said(&missing));
    assert!(said(&missing).contains("--config"), "{}", said(&missing));
}
