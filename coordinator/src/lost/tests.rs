use std::sync::Arc;

use tenure_core::Command;
use tenure_core::command::{
    InstallTarget, JoinGroup, Release, ReleasePartitions, ReleaseReason, TopicReport,
};
use tenure_model::{GroupEpoch, GroupSettings, Index, ManualClock, PartitionIndex, Term, TopicId};

use super::*;
use crate::machine::GroupMachine;
use crate::raft::{EntryContext, Machine as _};
use crate::stored::encode_batch;

fn partition(index: u32) -> Partition {
    Partition { topic_id: TopicId::from_bits(1), index: PartitionIndex::new(index).unwrap() }
}

/// Ann was granted two partitions, as e1 and e2, and gives each back with what a sink said.
fn refused(errors: [&str; 2]) -> GroupMachine {
    let mut machine = GroupMachine::new(Arc::new(ManualClock::default()));
    let mut index = 0;
    let mut apply = |command| {
        index += 1;
        let at = EntryContext { term: Term(1), index: Index(index) };
        let batch = encode_batch(tenure_model::Timestamp(0), &[command]);
        let outcomes = machine.apply(at, &batch).unwrap();
        assert!(outcomes[0].result.is_ok(), "{:?}", outcomes[0].result);
    };
    let group: GroupId = "g".parse().unwrap();
    apply(Command::JoinGroup(JoinGroup {
        group: group.clone(),
        member: "ann".parse().unwrap(),
        instance: None,
        topics: vec!["t".parse().unwrap()],
        settings: GroupSettings::default(),
        ttl_ms: 10_000,
        heartbeat_interval_ms: 3_000,
        client: String::new(),
        partitions_max: None,
        report: vec![TopicReport {
            topic: "t".parse().unwrap(),
            topic_id: TopicId::from_bits(1),
            partition_count: 2,
        }],
        rejoin: None,
        prepares: false,
        weight: 1,
    }));
    apply(Command::InstallTarget(InstallTarget {
        group: group.clone(),
        group_epoch: GroupEpoch(1),
        target: (0..2).map(|index| (partition(index), "ann".parse().unwrap())).collect(),
        line_by_line: false,
    }));
    for (index, error) in (0..2).zip(errors) {
        apply(Command::ReleasePartitions(ReleasePartitions {
            group: group.clone(),
            member: "ann".parse().unwrap(),
            partitions: vec![Release {
                partition: partition(index),
                epoch: Epoch::new(u64::from(index) + 1).unwrap(),
                next_offset: None,
                reason: ReleaseReason::Fenced,
                error: error.to_owned(),
            }],
        }));
    }
    machine
}

#[test]
fn highest_epoch_that_a_sink_has_seen_is_named_with_the_next_step() {
    let machine = refused([
        "sink rows: fenced: given e1, current is e700: stop writing",
        "sink rows: fenced: given e2, current is e900: stop writing",
    ]);
    let (group, at, seen) = highest(machine.state()).unwrap();
    assert_eq!((group.as_str(), at, seen.get()), ("g", partition(1), 900));
    let text = advice(machine.state(), seen);
    assert!(text.ends_with("given none above e2: `tenure raise-epoch-floor 900`"), "{text}");
}

#[test]
fn refusal_by_an_epoch_that_was_given_or_is_not_told_is_no_lost_history() {
    let machine = refused([
        "sink rows: fenced: given e1, current is e2: stop writing",
        "sink rows: fenced: given e2, current is not known: stop writing",
    ]);
    assert_eq!(highest(machine.state()), None);
    let machine = refused(["handler failed: current is e900", "verify: current is e900"]);
    assert_eq!(highest(machine.state()), None, "what no sink said");
}
