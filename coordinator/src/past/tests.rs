use tenure_core::history::Moment;
use tenure_core::state::Operation;
use tenure_model::{GroupEpoch, PartitionIndex, Timestamp, TopicId};

use super::*;

fn group(name: &str) -> GroupId {
    name.parse().unwrap()
}

fn granted(group: &str, revision: u64, position: u32) -> Change {
    let index = PartitionIndex::new(position).unwrap();
    let what = What::Granted {
        partition: Partition { topic_id: TopicId::from_bits(7), index },
        member: "m".parse().unwrap(),
        epoch: Epoch::FIRST,
    };
    change(Some(group), revision, position, what)
}

fn change(group: Option<&str>, revision: u64, position: u32, what: What) -> Change {
    let at = Moment { revision: Index(revision), time: Timestamp(revision) };
    Change { at, position, group: group.map(|name| name.parse().unwrap()), what }
}

fn state(changes: Vec<Change>, applied: u64) -> State {
    let mut state = State { applied: Index(applied), ..State::default() };
    state.changes.newest = changes.into();
    state
}

/// All pages from `from` on: revision, positions, whether it is the last part.
fn pages(state: &State, from: u64, wanted: Option<&str>) -> Vec<(u64, Vec<u32>, bool)> {
    let wanted = wanted.map(group);
    let mut cursor = Cursor { revision: Index(from), position: 0 };
    let mut parts = Vec::new();
    loop {
        let page = page(state, cursor, wanted.as_ref()).unwrap();
        let count: usize = page.revisions.iter().map(|part| part.changes.len()).sum();
        assert!(count <= WATCH_MESSAGE_CHANGES_MAX);
        parts.extend(page.revisions.iter().map(|part| {
            let positions = part.changes.iter().map(|change| change.position).collect();
            (part.revision, positions, part.last_of_revision)
        }));
        if page.is_last {
            assert_eq!(page.next, Cursor { revision: Index(state.applied.0 + 1), position: 0 });
            return parts;
        }
        assert_ne!(page.next, cursor, "a page moves on");
        cursor = page.next;
    }
}

#[test]
fn small_revisions_are_told_whole_and_only_from_the_first_one_wanted() {
    let changes = vec![granted("g", 3, 0), granted("g", 3, 1), granted("h", 7, 0)];
    let state = state(changes, 9);
    assert_eq!(pages(&state, 1, None), [(3, vec![0, 1], true), (7, vec![0], true)]);
    assert_eq!(pages(&state, 4, None), [(7, vec![0], true)]);
    assert_eq!(pages(&state, 4, Some("g")), []);
    assert_eq!(pages(&state, 8, None), []);
}

#[test]
fn large_revision_is_told_in_parts_that_say_whether_more_follows() {
    let count = u32::try_from(WATCH_MESSAGE_CHANGES_MAX).unwrap() * 2 + 10;
    let mut changes: Vec<Change> = (0..count).map(|at| granted("g", 5, at)).collect();
    changes.push(granted("g", 6, 0));
    let parts = pages(&state(changes, 6), 1, None);
    let last: Vec<(u64, bool)> =
        parts.iter().map(|(revision, _, last)| (*revision, *last)).collect();
    assert_eq!(last, [(5, false), (5, false), (5, true), (6, true)]);
    let told: Vec<u32> =
        parts.into_iter().take(3).flat_map(|(_, positions, _)| positions).collect();
    assert_eq!(told, (0..count).collect::<Vec<_>>(), "each once and in order");
}

#[test]
fn part_is_the_last_one_where_only_other_groups_follow_in_the_revision() {
    let full = u32::try_from(WATCH_MESSAGE_CHANGES_MAX).unwrap();
    let mut changes: Vec<Change> = (0..full).map(|at| granted("g", 5, at)).collect();
    changes.push(granted("h", 5, full));
    changes.push(granted("g", 6, 0));
    let parts = pages(&state(changes, 6), 1, Some("g"));
    let last: Vec<(u64, bool)> =
        parts.iter().map(|(revision, _, last)| (*revision, *last)).collect();
    assert_eq!(last, [(5, true), (6, true)]);
}

#[test]
fn watcher_of_one_group_is_not_held_up_by_the_changes_of_others() {
    let others = 20_000;
    let mut changes: Vec<Change> = (1..=others).map(|at| granted("h", at, 0)).collect();
    changes.push(granted("g", others + 1, 0));
    let state = state(changes, others + 1);
    let first =
        page(&state, Cursor { revision: Index(1), position: 0 }, Some(&group("g"))).unwrap();
    assert_eq!((first.revisions.len(), first.is_last), (0, false), "looks are bounded");
    assert_eq!(pages(&state, 1, Some("g")), [(others + 1, vec![0], true)]);
}

#[test]
fn change_that_is_forgotten_is_said_to_be() {
    let mut state = state(vec![granted("g", 5, 0)], 6);
    state.changes.compacted = Index(4);
    let at = |revision| Cursor { revision: Index(revision), position: 0 };
    assert_eq!(page(&state, at(4), None).unwrap_err().before.revision, Index(4));
    assert_eq!(page(&state, at(5), None).unwrap().revisions.len(), 1);
    let ahead = page(&state, at(100), None).unwrap();
    assert_eq!((ahead.next, ahead.is_last), (at(100), true), "what is not there yet is waited for");
}

#[test]
fn operation_is_told_to_every_watcher_with_its_actor_while_it_is_remembered() {
    let request: RequestId = "r-1".parse().unwrap();
    let what = What::Operated { request: request.clone(), action: OperatorAction::RaiseEpochFloor };
    let mut state = state(vec![change(None, 5, 0, what)], 6);
    state.operations.push_back(Operation {
        request,
        index: Index(5),
        time: Timestamp(5),
        actor: "ann".to_owned(),
        reason: "restored".to_owned(),
        action: OperatorAction::RaiseEpochFloor,
        group: None,
        group_epoch: GroupEpoch(0),
        moves: vec![],
    });
    let told = |state: &State| {
        let start = Cursor { revision: Index(1), position: 0 };
        let page = page(state, start, Some(&group("g"))).unwrap();
        page.revisions[0].changes[0].operated.clone().unwrap()
    };
    let operated = told(&state);
    assert_eq!((operated.action.as_str(), operated.actor.as_str()), ("raise-epoch-floor", "ann"));
    state.operations.clear();
    assert_eq!((told(&state).request_id.as_str(), told(&state).actor.as_str()), ("r-1", ""));
}
