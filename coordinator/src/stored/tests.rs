use bytes::Bytes;
use tenure_core::command::{
    AcknowledgeAcquired, CommitOffsets, Context, DrainMember, GrantRef, InstallTarget, JoinGroup,
    LeaveGroup, MemberRef, MovePartition, OffsetCommit, OperatorContext, RebalanceGroup, Release,
    ReleasePartitions, ReleaseReason, ReportTopics, SilentMember, TopicReport,
};
use tenure_core::{Command, State};
use tenure_model::{
    CommitSequence, Epoch, GroupEpoch, GroupSettings, Home, Index, MemberEpoch, NextOffset,
    Partition, PartitionIndex, SinkSetting, Takeover, Term, Timestamp, TopicId,
};

use super::*;

fn partition() -> Partition {
    Partition { topic_id: TopicId::from_bits(7), index: PartitionIndex::new(3).unwrap() }
}

fn report() -> TopicReport {
    TopicReport {
        topic: "orders".parse().unwrap(),
        topic_id: TopicId::from_bits(7),
        partition_count: 12,
    }
}

fn operator() -> OperatorContext {
    OperatorContext { request: "r-1".parse().unwrap(), reason: "try".into(), actor: "ann".into() }
}

fn release() -> Release {
    Release {
        partition: partition(),
        epoch: Epoch::FIRST,
        next_offset: Some(NextOffset::new(42).unwrap()),
        reason: ReleaseReason::HandlerFailed,
        error: "broke".into(),
    }
}

/// One of each, with every field set.
fn commands() -> Vec<Command> {
    let group = || "g".parse().unwrap();
    let member = || "m".parse().unwrap();
    let member_ref =
        || MemberRef { group: group(), member: member(), member_epoch: MemberEpoch(5) };
    let grant = || GrantRef { group: group(), partition: partition(), epoch: Epoch::FIRST };
    let target = || vec![(partition(), member())];
    vec![
        Command::JoinGroup(JoinGroup {
            group: group(),
            member: member(),
            instance: Some("i".parse().unwrap()),
            topics: vec!["orders".parse().unwrap()],
            settings: GroupSettings {
                home: Home::Sink,
                takeover: Takeover::Fence,
                sinks: vec![SinkSetting { name: "pg".into(), enforces_epoch: true }],
            },
            ttl_ms: 10_000,
            heartbeat_interval_ms: 3_000,
            client: "host/1".into(),
            partitions_max: Some(4),
            report: vec![report()],
            rejoin: Some(MemberEpoch(5)),
        }),
        Command::LeaveGroup(LeaveGroup {
            group: group(),
            member: member(),
            partitions: vec![release()],
            reason: "stop".into(),
        }),
        Command::ReportTopics(ReportTopics {
            group: group(),
            member: member(),
            topics: vec![report()],
        }),
        Command::ExpireMembers { term: Term(2), members: vec![member_ref()] },
        Command::MarkMembersSilent {
            term: Term(2),
            members: vec![SilentMember { member: member_ref(), silent_for_ms: 4_000 }],
        },
        Command::MarkMembersHeard { term: Term(2), members: vec![member_ref()] },
        Command::InstallTarget(InstallTarget {
            group: group(),
            group_epoch: GroupEpoch(3),
            target: target(),
            line_by_line: true,
        }),
        Command::ReleasePartitions(ReleasePartitions {
            group: group(),
            member: member(),
            partitions: vec![release()],
        }),
        Command::AcknowledgeAcquired(AcknowledgeAcquired {
            group: group(),
            member: member(),
            partition: partition(),
            epoch: Epoch::FIRST,
            home_initialised: true,
        }),
        Command::CommitOffsets(CommitOffsets {
            group: group(),
            member: member(),
            commits: vec![OffsetCommit {
                partition: partition(),
                epoch: Epoch::FIRST,
                sequence: CommitSequence(9),
                next_offset: NextOffset::new(42).unwrap(),
                metadata: vec![1, 2],
            }],
        }),
        Command::ExpireRevocations { term: Term(2), grants: vec![grant()] },
        Command::ExpireAcquisitions { term: Term(2), grants: vec![grant()] },
        Command::LiftHolds { term: Term(2), partitions: vec![(group(), partition())] },
        Command::MovePartition(MovePartition {
            operator: operator(),
            group: group(),
            partition: partition(),
            to: member(),
        }),
        Command::RebalanceGroup(RebalanceGroup {
            operator: operator(),
            group: group(),
            group_epoch: GroupEpoch(3),
            target: target(),
        }),
        Command::DrainMember(DrainMember {
            operator: operator(),
            group: group(),
            member: member(),
            undrain: true,
        }),
        Command::RaiseEpochFloor { operator: operator(), floor: Epoch::new(99).unwrap() },
    ]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_command_reads_back_as_written() {
    let commands = commands();
    let bytes = encode_batch(Timestamp(123), &commands);
    assert_eq!(decode_batch(&bytes), Ok(Batch { proposed_at: Timestamp(123), commands }));
}

#[test]
fn bytes_of_every_command_are_frozen() {
    let lines: Vec<String> = commands()
        .iter()
        .map(|c| hex(&encode_batch(Timestamp(123), std::slice::from_ref(c))))
        .collect();
    let frozen: Vec<&str> = include_str!("frozen_commands.txt").lines().collect();
    assert_eq!(lines, frozen, "a stored form changed: old entries could not be read any more");
}

#[test]
fn unknown_command_and_newer_format_are_refused() {
    // Field 3 (commands) with one command of the unknown field 100.
    let unknown = Bytes::from_static(&[0x08, 1, 0x1a, 4, 0xa2, 0x06, 1, 0]);
    assert_eq!(decode_batch(&unknown), Err(StoredError::UnknownCommand { position: 0 }));
    let newer = Bytes::from_static(&[0x08, 2]);
    assert_eq!(decode_batch(&newer), Err(StoredError::Format { what: "raft entry", found: 2 }));
    assert!(matches!(decode_batch(&Bytes::from_static(&[0xff])), Err(StoredError::Damaged { .. })));
}

/// A state in which every kind of record occurs.
fn busy_state() -> State {
    let mut state = State::default();
    let mut index = 0;
    let mut apply = |command: Command| {
        index += 1;
        let context =
            Context { term: Term(2), index: Index(index), proposed_at: Timestamp(1_000 + index) };
        state.apply(context, &command)
    };
    for name in ["a", "b"] {
        let applied = apply(Command::JoinGroup(JoinGroup {
            group: "g".parse().unwrap(),
            member: name.parse().unwrap(),
            instance: None,
            topics: vec!["orders".parse().unwrap()],
            settings: GroupSettings::default(),
            ttl_ms: 10_000,
            heartbeat_interval_ms: 3_000,
            client: "host/1".into(),
            partitions_max: None,
            report: vec![report()],
            rejoin: None,
        }));
        assert!(applied.result.is_ok(), "{applied:?}");
    }
    let at = |index| Partition {
        topic_id: TopicId::from_bits(7),
        index: PartitionIndex::new(index).unwrap(),
    };
    let target: Vec<_> =
        (0..4).map(|i| (at(i), if i < 2 { "a" } else { "b" }.parse().unwrap())).collect();
    let applied = apply(Command::InstallTarget(InstallTarget {
        group: "g".parse().unwrap(),
        group_epoch: GroupEpoch(2),
        target: target.clone(),
        line_by_line: true,
    }));
    assert!(applied.result.is_ok(), "{applied:?}");
    let commit = |epoch| OffsetCommit {
        partition: at(0),
        epoch: Epoch::new(epoch).unwrap(),
        sequence: CommitSequence(1),
        next_offset: NextOffset::new(5).unwrap(),
        metadata: b"note".to_vec(),
    };
    apply(Command::CommitOffsets(CommitOffsets {
        group: "g".parse().unwrap(),
        member: "a".parse().unwrap(),
        commits: vec![commit(1)],
    }));
    apply(Command::MovePartition(MovePartition {
        operator: operator(),
        group: "g".parse().unwrap(),
        partition: at(0),
        to: "b".parse().unwrap(),
    }));
    apply(Command::MarkMembersSilent {
        term: Term(2),
        members: vec![SilentMember {
            member: MemberRef {
                group: "g".parse().unwrap(),
                member: "b".parse().unwrap(),
                member_epoch: MemberEpoch(2),
            },
            silent_for_ms: 4_000,
        }],
    });
    apply(Command::LeaveGroup(LeaveGroup {
        group: "g".parse().unwrap(),
        member: "a".parse().unwrap(),
        partitions: vec![],
        reason: "stop".into(),
    }));
    let group = &state.groups[&"g".parse().unwrap()];
    assert_eq!((group.members.len(), group.tombstones.len(), state.operations.len()), (1, 1, 1));
    state
}

#[test]
fn snapshot_reads_back_as_the_same_state() {
    let state = busy_state();
    let bytes = encode_snapshot(&state);
    let read = decode_snapshot(&bytes).unwrap();
    assert_eq!(read, state);
    assert_eq!(encode_snapshot(&read), bytes);
}

#[test]
fn snapshot_cut_anywhere_is_refused() {
    let bytes = encode_snapshot(&busy_state());
    for length in 0..bytes.len() {
        assert!(decode_snapshot(&bytes[..length]).is_err(), "cut at {length}");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(decode_snapshot(&longer).is_err());
}

/// A snapshot of the first version: it must be read for ever, and still be written like this.
#[test]
fn bytes_of_a_snapshot_are_frozen() {
    let frozen = include_str!("frozen_snapshot.txt").trim();
    let bytes: Vec<u8> = (0..frozen.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&frozen[at..at + 2], 16).unwrap())
        .collect();
    let state = decode_snapshot(&bytes).unwrap();
    assert_eq!(state.invariants(), Ok(()));
    assert_eq!(hex(&encode_snapshot(&state)), frozen, "old snapshots could not be read any more");
}
