//! What the two sides say in their logs: the id of each handoff, and little while something is out of reach.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use tenure_tests::cluster::{Cluster, SHORT_LENGTHS};
use tenure_tests::figures::tell;
use tenure_tests::process::Process;
use tenure_tests::servers::{Kafka, require, unique_name, wait_until};
use tenure_tests::tier;

use crate::apart;
use crate::member::Member;

const TTL_MS: u64 = 6_000;
const PARTITIONS: u16 = 4;
const STEP_MAX: Duration = Duration::from_secs(60);

/// How long something is out of reach.
const OUTAGE: Duration = Duration::from_secs(8);

/// Most lines that a process may write about such an outage.
const LINES_MAX: usize = 40;

const ENTRY: &str = "logs::member_in_a_process_of_its_own";
const COORDINATOR: &str = "TENURE_CHAOS_COORDINATOR";
const TOPIC: &str = "TENURE_CHAOS_TOPIC";
const GROUP: &str = "TENURE_CHAOS_GROUP";

/// Does nothing by itself: it is a member that logs, until it is killed.
#[test]
fn member_in_a_process_of_its_own() {
    if !apart::is_for(ENTRY) {
        return;
    }
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let (group, topic) = (apart::told(GROUP), apart::told(TOPIC));
    let address = apart::told(COORDINATOR);
    let kafka = apart::told("KAFKA_BOOTSTRAP");
    let _member = Member::join(&kafka, &address, &group, &topic, TTL_MS, || {});
    thread::sleep(Duration::from_secs(300));
}

struct Rig {
    cluster: Cluster,
    topic: String,
    group: String,
}

impl Rig {
    fn new(kafka: &Kafka) -> Self {
        let cluster = Cluster::start_with(1, SHORT_LENGTHS);
        let topic = kafka.new_topic("logs", PARTITIONS);
        Self { cluster, topic, group: unique_name("logs") }
    }

    fn member(&self, kafka: &Kafka, name: &str) -> Process {
        let told = [
            ("KAFKA_BOOTSTRAP", kafka.bootstrap()),
            (COORDINATOR, &self.cluster.addresses()[0]),
            (TOPIC, &self.topic),
            (GROUP, &self.group),
        ];
        apart::start(name, ENTRY, &told)
    }

    fn wait_for(&self, member: &Process, what: &str, count: usize) {
        let said = wait_until(STEP_MAX, || with(member, what).len() >= count);
        assert!(said, "{}\n{}", member.tail(), self.cluster.output());
    }
}

/// Partition, epoch and handoff of each line that says `what`.
fn with(process: &Process, what: &str) -> BTreeSet<[String; 3]> {
    let field = |line: &str, name: &str| {
        let words = line.split(' ');
        words.filter_map(|word| word.strip_prefix(name)).next_back().map(str::to_owned)
    };
    let lines = process.lines().into_iter().filter(|line| line.contains(what));
    lines
        .filter_map(|line| {
            let part = field(&line, "partition=")?;
            // The member names a partition by its index, the coordinator with its topic.
            let index = part.rsplit(['/', ':']).next()?.to_owned();
            Some([index, field(&line, "epoch=")?, field(&line, "handoff=")?])
        })
        .collect()
}

#[test]
fn each_handoff_has_one_id_in_the_logs_of_the_coordinator_and_of_its_member() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let rig = Rig::new(kafka);
    let all = usize::from(PARTITIONS);
    let ann = rig.member(kafka, "ann");
    rig.wait_for(&ann, "partition acquired", all);
    let bob = rig.member(kafka, "bob");
    rig.wait_for(&bob, "partition acquired", all / 2);
    rig.wait_for(&ann, "partition given back", all / 2);
    let granted = with(rig.cluster.node(1), "partition granted");
    let acquired: BTreeSet<_> =
        [&ann, &bob].into_iter().flat_map(|member| with(member, "partition acquired")).collect();
    assert_eq!(granted, acquired, "{}\n{}\n{}", ann.tail(), bob.tail(), rig.cluster.output());
    // A move is two handoffs: what ann gives back bears the id under which she had got it.
    let given_back = with(&ann, "partition given back");
    assert!(given_back.is_subset(&with(&ann, "partition acquired")), "{given_back:?}");
}

/// Lets the outage last and ends it; `process` must have written little meanwhile.
fn lines_during(process: &Process, what: &str, end: impl FnOnce()) {
    let before = process.lines().len();
    thread::sleep(OUTAGE);
    let said = process.lines().split_off(before);
    tell(format_args!("{what}: {} lines in {OUTAGE:?}", said.len()));
    end();
    assert!(said.len() <= LINES_MAX, "{what}: {} lines:\n{}", said.len(), said.join("\n"));
}

#[test]
fn outage_of_the_coordinator_costs_a_member_few_lines_in_its_log() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let mut rig = Rig::new(kafka);
    let all = usize::from(PARTITIONS);
    let member = rig.member(kafka, "ann");
    rig.wait_for(&member, "partition acquired", all);
    rig.cluster.kill(1);
    lines_during(&member, "without a coordinator", || rig.cluster.run(1));
    // It is back by itself.
    rig.wait_for(&member, "partition acquired", all + 1);
}

#[test]
fn outage_of_kafka_costs_a_member_few_lines_in_its_log() {
    let Some(mut kafka) = require(Kafka::start()) else { return };
    let rig = Rig::new(&kafka);
    let member = rig.member(&kafka, "ann");
    rig.wait_for(&member, "partition acquired", usize::from(PARTITIONS));
    kafka.end();
    lines_during(&member, "without Kafka", || ());
}

#[test]
fn node_without_a_majority_writes_few_lines_in_its_log() {
    if !tier::has_time() {
        return;
    }
    let mut cluster = Cluster::start(3);
    let (leader, _) = cluster.raft_leader();
    let others: Vec<u64> = (1..=3).filter(|node| *node != leader).collect();
    others.iter().for_each(|node| cluster.kill(*node));
    lines_during(cluster.node(leader), "without a majority", || ());
}
