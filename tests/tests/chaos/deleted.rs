//! Shutdowns after the topic was deleted, one after the other in a process of their own.

use std::time::{Duration, Instant};

use tenure_proto::v1;
use tenure_sdk::session::{CoordinatorClient, Repeat};
use tenure_tests::cluster::{Cluster, block_on};
use tenure_tests::figures::tell;
use tenure_tests::servers::{Kafka, require, unique_name, wait_until};
use tenure_tests::tier::Tier;

use crate::apart;
use crate::member::Member;

const ROUNDS: usize = 100;

/// Longer than any wait for a leave here: nobody is taken for gone because of it.
const TTL_MS: u64 = 30_000;
const DEADLINE: Duration = Duration::from_secs(5);
/// For the scheduler of a busy machine.
const SLACK: Duration = Duration::from_millis(500);
const STEP_MAX: Duration = Duration::from_secs(60);
const CALL_MAX: Duration = Duration::from_secs(5);
const PARTITIONS: u16 = 2;
const RECORDS: usize = 5;

const ENTRY: &str = "deleted::rounds_of_shutdowns_in_a_process_of_their_own";
const COORDINATOR: &str = "TENURE_CHAOS_COORDINATOR";

#[test]
fn shutdown_after_the_topic_was_deleted_ends_in_time_leaves_and_leaves_no_thread_s02() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let cluster = Cluster::start(1);
    let told = [("KAFKA_BOOTSTRAP", kafka.bootstrap()), (COORDINATOR, &cluster.addresses()[0])];
    let mut rounds = apart::start("rounds", ENTRY, &told);
    let status = rounds.wait(Duration::from_secs(600));
    assert!(status.is_some_and(|status| status.success()), "{}", rounds.tail());
    tell(format_args!("{}", rounds.lines().iter().rfind(|line| line.contains("of 5s")).unwrap()));
}

/// Does nothing by itself: see the test above.
#[test]
fn rounds_of_shutdowns_in_a_process_of_their_own() {
    if !apart::is_for(ENTRY) {
        return;
    }
    let kafka = Kafka::shared().unwrap();
    let address = apart::told(COORDINATOR);
    let client = CoordinatorClient::new(vec![address.clone()]);
    let mut longest = Duration::ZERO;
    // What the first round leaves belongs to the process: clients of the test, the runtime of its calls.
    longest = longest.max(round(kafka, &client, &address, 0));
    let left = |wanted: usize| wait_until(STEP_MAX, || apart::threads().len() <= wanted);
    assert!(left(BASE_THREADS_MAX), "{:?}", apart::threads());
    let before = apart::threads();
    let count = Tier::current().repetitions(ROUNDS);
    for number in 1..count {
        longest = longest.max(round(kafka, &client, &address, number));
    }
    assert!(left(before.len()), "{:?}\n{before:?}", apart::threads());
    println!("{count} rounds, the longest shutdown took {longest:?} of {DEADLINE:?}");
}

/// Threads of the process without any consumer: its own two, the runtime of calls, and room for a driver of it.
const BASE_THREADS_MAX: usize = 4;

/// Answers how long the shutdown took.
fn round(kafka: &Kafka, client: &CoordinatorClient, address: &str, number: usize) -> Duration {
    let topic = kafka.new_topic("deleted", PARTITIONS);
    let records: Vec<String> = (0..RECORDS).map(|record| record.to_string()).collect();
    (0..PARTITIONS).for_each(|partition| kafka.produce(&topic, partition, &records));
    let group = unique_name("deleted");
    let member = Member::join(kafka.bootstrap(), address, &group, &topic, TTL_MS, || {});
    let all = usize::from(PARTITIONS) * RECORDS;
    assert!(wait_until(STEP_MAX, || member.count() == all), "round {number}: {}", member.count());
    kafka.delete_topic(&topic);
    // At once, and ever later: while the client learns of it, and when it has.
    std::thread::sleep(Duration::from_millis(number as u64 % 8 * 60));
    let started = Instant::now();
    let stopped = member.stop(DEADLINE, STEP_MAX);
    let took = started.elapsed();
    assert!(stopped.is_some() && took <= DEADLINE + SLACK, "round {number}: {stopped:?} {took:?}");
    let described = block_on(client.call(Repeat::Safe, CALL_MAX, |channel| {
        let request = v1::DescribeGroupRequest { group: group.clone() };
        async move {
            let mut client = v1::ownership_client::OwnershipClient::new(channel);
            Ok(client.describe_group(request).await?.into_inner())
        }
    }));
    let members = described.unwrap().members;
    assert!(members.is_empty(), "round {number}: {members:?} has not left");
    took
}
