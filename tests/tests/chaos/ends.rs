//! Shutdowns while something is gone, and a broker that comes back.

use std::thread;
use std::time::{Duration, Instant};

use tenure_tests::cluster::Cluster;
use tenure_tests::figures::tell;
use tenure_tests::servers::{Kafka, require, unique_name, wait_until};
use tenure_tests::zombie::payload;

use crate::member::Member;

const TTL_MS: u64 = 2_000;
const PARTITIONS: u16 = 4;
const STEP_MAX: Duration = Duration::from_secs(60);
const DEADLINE: Duration = Duration::from_secs(3);
/// For the scheduler of a busy machine.
const SLACK: Duration = Duration::from_millis(500);

fn produce(kafka: &Kafka, topic: &str, from: u64, count: u64) {
    for partition in 0..PARTITIONS {
        let payloads: Vec<String> =
            (from..from + count).map(|offset| payload(partition.into(), offset)).collect();
        kafka.produce(topic, partition, &payloads);
    }
}

fn at_work(kafka: &Kafka, cluster: &Cluster) -> (Member, String, String) {
    let topic = kafka.new_topic("ends", PARTITIONS);
    produce(kafka, &topic, 0, 50);
    let group = unique_name("ends");
    let address = &cluster.addresses()[0];
    let member = Member::join(kafka.bootstrap(), address, &group, &topic, TTL_MS, || {});
    let all = usize::from(PARTITIONS) * 50;
    assert!(wait_until(STEP_MAX, || member.count() == all), "{}", cluster.output());
    (member, group, topic)
}

fn assert_ends_in_time(member: Member, what: &str) {
    let started = Instant::now();
    let stopped = member.stop(DEADLINE, STEP_MAX);
    let took = started.elapsed();
    tell(format_args!("shutdown with {what} took {took:?} of {DEADLINE:?}: {stopped:?}"));
    assert!(stopped.is_some() && took <= DEADLINE + SLACK, "{what}: {took:?}");
}

#[test]
fn shutdown_ends_within_its_deadline_while_the_broker_hangs_and_while_it_is_gone() {
    let Some(mut kafka) = require(Kafka::start()) else { return };
    let cluster = Cluster::start(1);
    let (hung, _, _) = at_work(&kafka, &cluster);
    let (gone, _, _) = at_work(&kafka, &cluster);
    kafka.pause();
    thread::sleep(Duration::from_millis(500));
    assert_ends_in_time(hung, "a broker that hangs");
    kafka.resume();
    kafka.end();
    thread::sleep(Duration::from_millis(500));
    assert_ends_in_time(gone, "no broker");
}

#[test]
fn shutdown_ends_within_its_deadline_while_the_coordinator_is_gone() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let mut cluster = Cluster::start(1);
    let (member, _, _) = at_work(kafka, &cluster);
    cluster.kill(1);
    assert_ends_in_time(member, "no coordinator");
}

#[test]
fn broker_that_is_killed_and_comes_back_costs_no_grant_and_no_record() {
    let Some(mut kafka) = require(Kafka::start()) else { return };
    let cluster = Cluster::start(1);
    let (member, group, topic) = at_work(&kafka, &cluster);
    let epochs = || {
        let partitions = cluster.describe(&group).unwrap().partitions;
        partitions.iter().map(|found| (found.member.clone(), found.epoch)).collect::<Vec<_>>()
    };
    let before = epochs();
    kafka.restart();
    produce(&kafka, &topic, 50, 50);
    let all = usize::from(PARTITIONS) * 100;
    assert!(wait_until(STEP_MAX, || member.count() >= all), "{} of {all}", member.count());
    assert_eq!(epochs(), before, "a partition was given up");
    for ((partition, epoch), offsets) in &*member.done.lock().unwrap() {
        assert_eq!(
            *offsets,
            (0..100).collect::<Vec<u64>>(),
            "partition {partition}, epoch {epoch}"
        );
    }
    assert_ends_in_time(member, "a broker that has come back");
}
