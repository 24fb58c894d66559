use std::sync::Arc;

use bytes::Bytes;
use tenure_core::command::{
    AcknowledgeAcquired, AcknowledgePrepared, CommitOffsets, Context, DrainMember, GrantRef,
    InstallTarget, JoinGroup, LeaveGroup, MemberRef, MovePartition, OffsetCommit, OperatorContext,
    RebalanceGroup, Release, ReleasePartitions, ReleaseReason, ReportTopics, RewindOffset,
    SilentMember, TopicReport,
};
use tenure_core::history::Past;
use tenure_core::{Command, State};
use tenure_model::{
    CommitSequence, Epoch, FeatureLevel, GroupEpoch, GroupSettings, Home, Index, MemberEpoch,
    NextOffset, Partition, PartitionIndex, SinkSetting, StateDigest, Takeover, Term, Timestamp,
    TopicId,
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
pub(super) fn commands() -> Vec<Command> {
    let group = || "g".parse().unwrap();
    let member = || "m".parse().unwrap();
    let member_ref =
        || MemberRef { group: group(), member: member(), member_epoch: MemberEpoch(5) };
    let grant = || GrantRef { group: group(), partition: partition(), epoch: Epoch::FIRST };
    let target = || vec![(partition(), member())];
    let prepared =
        || AcknowledgePrepared { group: group(), member: member(), partition: partition() };
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
            prepares: false,
            weight: 1,
        }),
        Command::LeaveGroup(LeaveGroup {
            group: group(),
            member: member(),
            partitions: vec![release()],
            reason: "stop".into(),
            returning_within_ms: None,
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
        Command::LeaveGroup(LeaveGroup {
            group: group(),
            member: member(),
            partitions: vec![release()],
            reason: "restart".into(),
            returning_within_ms: Some(60_000),
        }),
        Command::ReserveMembers {
            term: Term(2),
            members: vec![member_ref()],
            returning_within_ms: 10_000,
        },
        Command::TakeBackUnserved { term: Term(2), grants: vec![grant()] },
        Command::RaiseFeatureLevel { level: FeatureLevel(2) },
        Command::MarkDigest,
        Command::CompareDigest { index: Index(7), digest: StateDigest(0x0102_0304_0506_0708) },
        Command::JoinGroup(JoinGroup {
            group: group(),
            member: member(),
            instance: None,
            topics: vec!["orders".parse().unwrap()],
            settings: GroupSettings::default(),
            ttl_ms: 10_000,
            heartbeat_interval_ms: 3_000,
            client: String::new(),
            partitions_max: None,
            report: vec![],
            rejoin: None,
            prepares: true,
            weight: 3,
        }),
        Command::AcknowledgePrepared(prepared()),
        Command::ExpirePreparations { term: Term(2), preparations: vec![prepared()] },
        Command::RewindOffset(RewindOffset {
            group: group(),
            member: member(),
            commit: OffsetCommit {
                partition: partition(),
                epoch: Epoch::FIRST,
                sequence: CommitSequence(9),
                next_offset: NextOffset::new(42).unwrap(),
                metadata: vec![],
            },
            request: "r-1".parse().unwrap(),
        }),
    ]
}

pub(super) fn hex(bytes: &[u8]) -> String {
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

/// Commands after which every kind of record occurs in the state.
pub(super) fn busy_commands() -> Vec<Command> {
    let group = || "g".parse().unwrap();
    let name = |name: &str| name.parse().unwrap();
    let at = |index| Partition {
        topic_id: TopicId::from_bits(7),
        index: PartitionIndex::new(index).unwrap(),
    };
    let join = |member: &str| {
        Command::JoinGroup(JoinGroup {
            group: group(),
            member: name(member),
            instance: None,
            topics: vec!["orders".parse().unwrap()],
            settings: GroupSettings::default(),
            ttl_ms: 10_000,
            heartbeat_interval_ms: 3_000,
            client: "host/1".into(),
            partitions_max: None,
            report: vec![report()],
            rejoin: None,
            prepares: false,
            weight: 1,
        })
    };
    let target = |group_epoch, owner: fn(u32) -> &'static str| {
        Command::InstallTarget(InstallTarget {
            group: group(),
            group_epoch: GroupEpoch(group_epoch),
            target: (0..4).map(|index| (at(index), owner(index).parse().unwrap())).collect(),
            line_by_line: true,
        })
    };
    let let_go = |index, epoch| {
        let partition = at(index);
        let release = Release { partition, epoch: Epoch::new(epoch).unwrap(), ..release() };
        Command::ReleasePartitions(ReleasePartitions {
            group: group(),
            member: name("a"),
            partitions: vec![Release { reason: ReleaseReason::Revoked, ..release }],
        })
    };
    let drain = |request: &str, undrain| {
        Command::DrainMember(DrainMember {
            operator: OperatorContext { request: request.parse().unwrap(), ..operator() },
            group: group(),
            member: name("b"),
            undrain,
        })
    };
    vec![
        join("a"),
        join("b"),
        target(2, |index| if index < 2 { "a" } else { "b" }),
        Command::AcknowledgeAcquired(AcknowledgeAcquired {
            group: group(),
            member: name("a"),
            partition: at(0),
            epoch: Epoch::FIRST,
            home_initialised: true,
        }),
        Command::CommitOffsets(CommitOffsets {
            group: group(),
            member: name("a"),
            commits: vec![OffsetCommit {
                partition: at(0),
                epoch: Epoch::FIRST,
                sequence: CommitSequence(1),
                next_offset: NextOffset::new(5).unwrap(),
                metadata: b"note".to_vec(),
            }],
        }),
        Command::MovePartition(MovePartition {
            operator: operator(),
            group: group(),
            partition: at(0),
            to: name("b"),
        }),
        let_go(0, 1),
        let_go(1, 2),
        Command::MarkMembersSilent {
            term: Term(2),
            members: vec![SilentMember {
                member: MemberRef {
                    group: group(),
                    member: name("b"),
                    member_epoch: MemberEpoch(2),
                },
                silent_for_ms: 4_000,
            }],
        },
        drain("r-2", false),
        drain("r-3", true),
        Command::LeaveGroup(LeaveGroup {
            group: group(),
            member: name("a"),
            partitions: vec![],
            reason: "stop".into(),
            returning_within_ms: None,
        }),
        join("c"),
        Command::ExpireMembers {
            term: Term(2),
            members: vec![MemberRef {
                group: group(),
                member: name("c"),
                member_epoch: MemberEpoch(13),
            }],
        },
    ]
}

fn apply(state: &mut State, command: &Command) {
    let index = state.applied.0 + 1;
    let context =
        Context { term: Term(2), index: Index(index), proposed_at: Timestamp(1_000 + index) };
    let applied = state.apply(context, command);
    assert!(applied.result.is_ok(), "{command:?}: {applied:?}");
}

/// A state in which every kind of record occurs.
fn busy_state() -> State {
    let mut state = State::default();
    for command in busy_commands() {
        apply(&mut state, &command);
    }
    let group = &state.groups[&"g".parse().unwrap()];
    assert_eq!((group.members.len(), group.tombstones.len(), state.operations.len()), (1, 2, 3));
    let kinds: std::collections::BTreeSet<_> =
        state.changes.newest.iter().map(|change| history::write_change(change).kind).collect();
    assert_eq!(kinds, (1..=10).collect(), "every kind of change");
    assert!(group.partitions.values().any(|partition| partition.past.is_some()));
    state
}

#[test]
fn state_written_and_read_after_any_command_goes_on_like_a_straight_replay() {
    let straight = busy_state();
    let commands = busy_commands();
    for cut in 0..=commands.len() {
        let mut state = State::default();
        for (at, command) in commands.iter().enumerate() {
            if at == cut {
                state = decode_snapshot(&encode_snapshot(&state)).unwrap();
            }
            apply(&mut state, command);
        }
        assert_eq!(state, straight, "cut after {cut} commands");
        assert_eq!(encode_snapshot(&state), encode_snapshot(&straight));
    }
}

#[test]
fn snapshot_reads_back_as_the_same_state() {
    let state = busy_state();
    let bytes = encode_snapshot(&state);
    let read = decode_snapshot(&bytes).unwrap();
    assert_eq!(read, state);
    assert_eq!(encode_snapshot(&read), bytes);
}

/// It must be read for ever, and still be written like this.
#[test]
fn bytes_of_a_snapshot_with_a_member_that_is_away_are_frozen() {
    let mut state = State::default();
    let mut commands = busy_commands();
    commands.truncate(1);
    if let Some(Command::JoinGroup(join)) = commands.first_mut() {
        join.instance = Some("i".parse().unwrap());
    }
    let member = MemberRef {
        group: "g".parse().unwrap(),
        member: "a".parse().unwrap(),
        member_epoch: MemberEpoch(1),
    };
    commands.push(Command::ReserveMembers {
        term: Term(2),
        members: vec![member],
        returning_within_ms: 10_000,
    });
    for command in commands {
        apply(&mut state, &command);
    }
    assert_eq!(state.members_away().count(), 1);
    let frozen = include_str!("frozen_snapshot_with_away.txt").trim();
    assert_eq!(hex(&encode_snapshot(&state)), frozen, "old snapshots could not be read any more");
    assert_eq!(decode_snapshot(&bytes_of(frozen)).unwrap(), state);
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

pub(super) fn bytes_of(hex: &str) -> Vec<u8> {
    let hex = hex.trim();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// It must be read for ever, and still be written like this.
#[test]
fn bytes_of_a_snapshot_are_frozen() {
    let frozen = include_str!("frozen_snapshot_with_history.txt").trim();
    let state = busy_state();
    assert_eq!(hex(&encode_snapshot(&state)), frozen, "old snapshots could not be read any more");
    let read = decode_snapshot(&bytes_of(frozen)).unwrap();
    assert_eq!(read.invariants(), Ok(()));
    assert_eq!(read, state);
}

/// It must be read for ever.
#[test]
fn snapshot_from_before_there_was_a_history_is_read_and_says_what_is_not_known() {
    let mut state = decode_snapshot(&bytes_of(include_str!("frozen_snapshot.txt"))).unwrap();
    assert_eq!(state.invariants(), Ok(()));
    let applied = state.applied;
    assert!(state.changes.since(applied).is_err(), "changes up to {applied} are not known");
    assert_eq!(state.changes.since(Index(applied.0 + 1)).map(Iterator::count), Ok(0));
    let group = &state.groups[&"g".parse().unwrap()];
    let mut owned = 0;
    for found in group.partitions.values().filter(|found| found.epoch.is_some()) {
        let since = found.changed_at;
        assert_eq!(found.forgotten().revision, since);
        assert!(found.grant_at(Past::Revision(Index(since.0 - 1))).is_err());
        let grant = found.grant_at(Past::Revision(since)).unwrap();
        assert_eq!(grant.as_ref().map(|grant| &grant.member), found.ownership.owner());
        owned += usize::from(grant.is_some());
    }
    assert!(owned > 0);
    let again = decode_snapshot(&encode_snapshot(&state)).unwrap();
    assert_eq!(again, state);
    let b = MemberRef {
        group: "g".parse().unwrap(),
        member: "b".parse().unwrap(),
        member_epoch: MemberEpoch(2),
    };
    apply(&mut state, &Command::ExpireMembers { term: Term(2), members: vec![b] });
    assert_eq!(state.invariants(), Ok(()));
    assert!(state.changes.newest.len() > owned, "each release and the expiry are told");
}

#[test]
fn equal_states_have_equal_digests_and_one_changed_field_another() {
    let state = busy_state();
    assert_eq!(digest_of(&decode_snapshot(&encode_snapshot(&state)).unwrap()), digest_of(&state));
    let changes: [fn(&mut State); 6] = [
        |state| state.epoch_counter ^= 1,
        |state| state.now = Timestamp(state.now.0 ^ 1),
        |state| state.level = FeatureLevel(2),
        |state| state.changes.compacted = Index(1),
        |state| state.operations[0].time = Timestamp(0),
        |state| {
            let group = Arc::make_mut(state.groups.values_mut().next().unwrap());
            let at = group.partitions.values_mut().find(|at| at.committed.is_some()).unwrap();
            at.committed.as_mut().unwrap().metadata[0] ^= 1;
        },
    ];
    let mut digests = std::collections::BTreeSet::from([digest_of(&state)]);
    for change in changes {
        let mut changed = state.clone();
        change(&mut changed);
        assert!(digests.insert(digest_of(&changed)));
    }
}

#[test]
fn snapshot_of_a_higher_feature_level_is_refused_and_says_what_to_run() {
    let above = FeatureLevel(NEWEST.0 + 1);
    let state = State { level: above, ..State::default() };
    let refused = decode_snapshot(&encode_snapshot(&state)).unwrap_err();
    assert_eq!(refused, StoredError::Level { what: "snapshot", found: above });
    assert!(refused.to_string().ends_with("run the newer version on this node"), "{refused}");
}
