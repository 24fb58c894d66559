//! Names in brackets are those of the cases that the project collected from other systems.

mod cases;
mod property;
mod wishes;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use proptest::prelude::*;
use tenure_model::{MemberId, Partition, PartitionIndex, TopicId, TopicName};

use crate::{Input, Member, Topic, moves, plan};

fn member(name: &str) -> MemberId {
    MemberId::new(name).unwrap()
}

fn topic_id(name: &str) -> TopicId {
    TopicId::of_name(&TopicName::new(name).unwrap())
}

fn partition(topic: &str, index: u32) -> Partition {
    Partition { topic_id: topic_id(topic), index: PartitionIndex::new(index).unwrap() }
}

fn partition_of(text: &str) -> Partition {
    let (topic, index) = text.split_once('/').unwrap();
    partition(topic, index.parse().unwrap())
}

/// Reads an input: `topic NAME COUNT`, `member NAME TOPICS [cap N] [weight N] [draining]`, `owns NAME PARTITIONS`,
/// `pin PARTITION NAME`, `avoid PARTITION NAMES`. `a/0..3` are the partitions 0 to 2 of a.
fn input(script: &str) -> Input {
    let mut input = Input::default();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["topic", name, count] => {
                let topic = Topic {
                    name: TopicName::new(name).unwrap(),
                    partition_count: count.parse().unwrap(),
                };
                input.topics.insert(topic_id(name), topic);
            }
            ["member", name, topics, rest @ ..] => {
                let topics = topics.split(',').map(|name| TopicName::new(name).unwrap()).collect();
                let cap = rest.iter().position(|word| *word == "cap");
                let partitions_max = cap.map(|at| rest[at + 1].parse().unwrap());
                let draining = rest.contains(&"draining");
                let weight = rest.iter().position(|word| *word == "weight");
                let weight = weight.map_or(1, |at| rest[at + 1].parse().unwrap());
                input
                    .members
                    .insert(member(name), Member { topics, partitions_max, weight, draining });
            }
            ["owns", name, partitions @ ..] => {
                for text in partitions {
                    let (topic, range) = text.split_once('/').unwrap();
                    let (first, end) = match range.split_once("..") {
                        Some((first, end)) => (first.parse().unwrap(), end.parse().unwrap()),
                        None => (range.parse().unwrap(), range.parse::<u32>().unwrap() + 1),
                    };
                    for index in first..end {
                        input.current.insert(partition(topic, index), member(name));
                    }
                }
            }
            ["pin", partition, name] => {
                input.pins.insert(partition_of(partition), member(name));
            }
            ["avoid", partition, names @ ..] => {
                let names = names.iter().map(|name| member(name)).collect();
                input.avoid.insert(partition_of(partition), names);
            }
            _ => panic!("no such line: {line}"),
        }
    }
    input
}

fn loads(input: &Input, target: &BTreeMap<Partition, MemberId>) -> Vec<usize> {
    input.members.keys().map(|id| target.values().filter(|owner| *owner == id).count()).collect()
}

/// Plans, checks what every plan promises, and compares `loads; moves of owned partitions; without an owner`.
fn check(script: &str, want: &str) -> BTreeMap<Partition, MemberId> {
    let input = input(script);
    let target = plan(&input);
    promises(&input, &target).unwrap();
    let loads: Vec<String> = loads(&input, &target).iter().map(ToString::to_string).collect();
    let partition_count: u32 = input.topics.values().map(|topic| topic.partition_count).sum();
    let moved = moved(&input, &target);
    let unowned = partition_count as usize - target.len();
    let mut found = format!("loads {}; moved {moved}", loads.join(" "));
    if unowned > 0 {
        write!(found, "; unowned {unowned}").unwrap();
    }
    assert_eq!(found, want);
    target
}

fn moved(input: &Input, target: &BTreeMap<Partition, MemberId>) -> usize {
    moves(&input.current, target).iter().filter(|change| change.from.is_some()).count()
}

/// Who may take a partition by subscription.
fn candidates(input: &Input, partition: Partition) -> Vec<&MemberId> {
    let Some(topic) = input.topics.get(&partition.topic_id) else { return Vec::new() };
    input
        .members
        .iter()
        .filter(|(_, member)| !member.draining && member.topics.contains(&topic.name))
        .map(|(id, _)| id)
        .collect()
}

fn cap(input: &Input, id: &MemberId) -> usize {
    input.members[id].partitions_max.map_or(usize::MAX, |max| max as usize)
}

/// What holds for every plan: legal lines, nothing left out that somebody has room for, idempotence.
fn promises(input: &Input, target: &BTreeMap<Partition, MemberId>) -> Result<(), TestCaseError> {
    for (partition, owner) in target {
        prop_assert!(candidates(input, *partition).contains(&owner), "{owner} has {partition}");
        prop_assert!(partition.index.get() < input.topics[&partition.topic_id].partition_count);
    }
    let counts: BTreeMap<&MemberId, usize> =
        input.members.keys().zip(loads(input, target)).collect();
    for (id, count) in &counts {
        prop_assert!(*count <= cap(input, id), "{id} is over its cap with {count}");
    }
    for (topic_id, topic) in &input.topics {
        for index in (0..topic.partition_count).filter_map(PartitionIndex::new) {
            let partition = Partition { topic_id: *topic_id, index };
            if !target.contains_key(&partition) {
                for id in candidates(input, partition) {
                    prop_assert_eq!(counts[id], cap(input, id), "{} has room", id);
                }
            }
        }
    }
    let again = Input { current: target.clone(), ..input.clone() };
    prop_assert_eq!(&plan(&again), target, "planning again moves something");
    Ok(())
}
