//! What is remembered of the past, and what is forgotten.

use std::fmt::Write as _;

use tenure_model::limits::{CHANGE_HISTORY_MAX, GRANT_HISTORY_MAX, GROUP_PARTITIONS_MAX};
use tenure_model::{Index, Timestamp};

use super::{Run, epoch, group, member, partition, readable};
use crate::Event;
use crate::history::{Changes, Forgotten, Grant, Moment, Past, What};
use crate::state::PartitionState;

fn moment(revision: u64) -> Moment {
    Moment { revision: Index(revision), time: Timestamp(revision * 1_000) }
}

fn run(script: &str) -> Run {
    let mut run = Run::default();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let answer = run.line(line);
        assert!(!answer.starts_with("no: "), "{line} -> {answer}");
    }
    run
}

fn state_of<'a>(run: &'a Run, at: &str) -> &'a PartitionState {
    run.state.partition(&group(), partition(at)).unwrap()
}

fn text(grant: &Grant) -> String {
    let Grant { epoch, member, granted, end } = grant;
    let end = end
        .map_or_else(|| "on".to_owned(), |(ended, cause)| format!("{} {cause:?}", ended.revision));
    format!("{member} {epoch} {}..{end}", granted.revision)
}

fn owner_at(state: &PartitionState, past: Past) -> String {
    match state.grant_at(past) {
        Ok(grant) => grant.map_or_else(|| "nobody".to_owned(), |grant| grant.member.to_string()),
        Err(Forgotten { before }) => format!("forgotten before {}", before.revision),
    }
}

/// Three owners; the hand-over from ann to bob is one entry, that from bob to cat has a gap.
const SCRIPT: &str = "
    join ann sees t=1
    join bob
    join cat
    target 0=ann
    acquired ann 0 e1
    move r1 0 bob
    release ann 0@e1
    leave bob
    target 0=cat
";

#[test]
fn grants_are_remembered_with_moments_and_causes() {
    let run = run(SCRIPT);
    let grants: Vec<String> = state_of(&run, "0").grants().map(|grant| text(&grant)).collect();
    assert_eq!(grants, ["ann e1 4..7 Released(Revoked)", "bob e2 7..8 Left", "cat e3 9..on"]);
}

#[test]
fn owner_at_a_revision_and_at_a_time_is_the_one_after_that_entry() {
    let run = run(SCRIPT);
    let state = state_of(&run, "0");
    let at = |revision| owner_at(state, Past::Revision(Index(revision)));
    let owners: Vec<String> = (3..=10).map(at).collect();
    assert_eq!(owners, ["nobody", "ann", "ann", "ann", "bob", "nobody", "cat", "cat"]);
    for (time, owner) in [(3_999, "nobody"), (4_000, "ann"), (6_999, "ann"), (8_500, "nobody")] {
        assert_eq!(owner_at(state, Past::Time(Timestamp(time))), owner, "at {time}");
    }
}

#[test]
fn changes_are_told_by_revision_and_position() {
    let mut run = run(SCRIPT);
    // A home that is noted later is not a second acquisition.
    run.line("acquired cat 0 e3");
    run.line("acquired cat 0 e3 home");
    let mut lines = String::new();
    for change in run.state.changes.since(Index(4)).unwrap() {
        write!(lines, "{}.{} ", change.at.revision, change.position).unwrap();
        writeln!(lines, "{}", brief(&change.what)).unwrap();
    }
    let wanted = "\
4.0 0 to ann
5.0 0 runs
6.0 operated r1
6.1 0 asked back
7.0 0 from ann: Released(Revoked)
7.1 0 to bob
8.0 0 from bob: Left
8.1 left bob
9.0 0 to cat
10.0 0 runs
";
    assert_eq!(lines, wanted);
}

fn brief(what: &What) -> String {
    readable(&match what {
        What::Granted { partition, member, .. } => format!("{partition} to {member}"),
        What::Acquired { partition, .. } => format!("{partition} runs"),
        What::Revoked { partition, .. } => format!("{partition} asked back"),
        What::Released { partition, member, cause, .. } => {
            format!("{partition} from {member}: {cause:?}")
        }
        What::MemberJoined { member } => format!("joined {member}"),
        What::MemberLeft { member } => format!("left {member}"),
        What::MemberExpired { member } => format!("expired {member}"),
        What::MemberDrained { member, .. } => format!("drained {member}"),
        What::Operated { request, .. } => format!("operated {request}"),
    })
}

#[test]
fn only_the_last_hundred_past_grants_are_remembered_and_older_ones_are_said_to_be_forgotten() {
    let mut run = run("join ann sees t=1\n target 0=ann");
    let handoffs = GRANT_HISTORY_MAX as u64 + 20;
    for at in 1..=handoffs {
        let answer = run.line(&format!("release ann 0@e{at}"));
        assert!(answer.contains("free: released"), "{answer}");
    }
    let state = state_of(&run, "0");
    // Grant n is made by entry n + 1 and ended by entry n + 2.
    assert_eq!(state.grants().count(), GRANT_HISTORY_MAX + 1);
    assert_eq!(state.forgotten(), moment(22));
    assert_eq!(owner_at(state, Past::Revision(Index(21))), "forgotten before 22");
    assert_eq!(owner_at(state, Past::Time(Timestamp(21_999))), "forgotten before 22");
    assert_eq!(owner_at(state, Past::Revision(Index(22))), "ann");
    assert_eq!(state.grant_at(Past::Revision(Index(22))).unwrap().unwrap().epoch, epoch("e21"));
}

#[test]
fn partitions_of_a_large_group_remember_fewer_grants() {
    let kept = [1, 10_000, 20_000, GROUP_PARTITIONS_MAX].map(crate::history::past_grants_max);
    assert_eq!(kept, [100, 100, 50, 1]);
}

fn joined(changes: &mut Changes, revision: u64) {
    let event = Event::MemberExpired { group: group(), member: member("ann") };
    changes.record(moment(revision), &event);
}

#[test]
fn changes_are_forgotten_by_whole_revisions() {
    let mut changes = Changes::default();
    for revision in 1..=CHANGE_HISTORY_MAX as u64 / 2 {
        joined(&mut changes, revision);
        joined(&mut changes, revision);
    }
    assert_eq!((changes.newest.len(), changes.compacted), (CHANGE_HISTORY_MAX, Index(0)));
    joined(&mut changes, 90_000);
    assert_eq!((changes.newest.len(), changes.compacted), (CHANGE_HISTORY_MAX - 1, Index(1)));
    let before = Moment { revision: Index(1), time: Timestamp(0) };
    assert_eq!(changes.since(Index(1)).map(Iterator::count), Err(Forgotten { before }));
    assert_eq!(changes.since(Index(2)).map(Iterator::count), Ok(CHANGE_HISTORY_MAX - 1));
    assert_eq!(changes.since(Index(90_000)).map(Iterator::count), Ok(1));
    assert_eq!(changes.since(Index(90_001)).map(Iterator::count), Ok(0));
    assert_eq!(changes.check(Index(90_000)), Ok(()));
}

#[test]
fn entry_with_more_changes_than_are_remembered_leaves_none_of_them() {
    let mut changes = Changes::default();
    joined(&mut changes, 1);
    for _ in 0..CHANGE_HISTORY_MAX + 10 {
        joined(&mut changes, 2);
    }
    assert_eq!((changes.newest.len(), changes.compacted), (0, Index(2)));
    joined(&mut changes, 3);
    assert_eq!((changes.newest.len(), changes.newest[0].position), (1, 0));
    assert_eq!(changes.check(Index(3)), Ok(()));
}
