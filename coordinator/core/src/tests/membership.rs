//! Join, leave, silence, expiry and topics.

use tenure_model::limits::{MEMBERS_MAX, SUBSCRIPTION_TOPICS_MAX, TOMBSTONES_MAX};
use tenure_model::{Index, Term, Timestamp};

use super::{Run, check, group, join, member, topic};
use crate::command::LeaveGroup;
use crate::{Command, Context, Rejection, State};

#[test]
fn repeated_join_is_the_same_membership() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        join ann sees t=1 -> member epoch 1, ttl 10000
        join ann rejoin 1 -> member epoch 1, ttl 10000
        join ann rejoin 2 -> no: member ann is at member epoch 1, given 2: this membership has ended
        join bob rejoin 1 -> no: membership of bob in group g has ended: join under a new member id
        ",
    );
}

#[test]
fn repeated_join_with_other_wishes_updates_and_replans_only_for_what_plans_use() {
    check(
        "
        join ann -> group g created; ann joined; group epoch 1; member epoch 1, ttl 10000
        join ann client host-1 -> ann updated; member epoch 1, ttl 10000
        join ann client host-1 cap 5 -> ann updated; group epoch 2; member epoch 1, ttl 10000
        join ann client host-1 cap 5 wants t,u -> ann updated; group epoch 3; member epoch 1, ttl 10000
        join ann client host-1 cap 5 wants u,t,u -> member epoch 1, ttl 10000
        ",
    );
}

#[test]
fn lengths_never_shrink_while_the_member_lives() {
    check(
        "
        join ann ttl 10000 -> group g created; ann joined; group epoch 1; member epoch 1, ttl 10000
        join ann ttl 6000 heartbeat 1000 -> member epoch 1, ttl 10000
        join ann ttl 20000 -> ann updated; member epoch 1, ttl 20000
        ",
    );
}

#[test]
fn joins_that_contradict_the_group_name_the_setting() {
    check(
        "
        join ann -> group g created; ann joined; group epoch 1; member epoch 1, ttl 10000
        join bob home sink -> no: home of group g is coordinator, the join says sink: use the same setting in every member
        join bob sinks pg,s3 -> no: sinks of group g is [], the join says [pg (fenced), s3 (fenced)]: use the same setting in every member
        join bob -> bob joined; group epoch 2; member epoch 4, ttl 10000
        ",
    );
}

#[test]
fn joins_out_of_range_are_refused() {
    check(
        "
        join ann wants nothing -> no: topics is empty: name at least one
        join ann ttl 299 heartbeat 1 -> no: ttl_ms is 299: use 300 to 3600000
        join ann ttl 900 heartbeat 301 -> no: heartbeat_interval_ms is 301: use 1 to 300, a third of ttl_ms
        join ann heartbeat 0 -> no: heartbeat_interval_ms is 0: use 1 to 3333, a third of ttl_ms
        join ann cap 0 -> no: partitions_max is 0: leave it out, or give at least 1
        join ann sinks pg,pg -> no: sink \"pg\": is named twice
        join ann sees t=0 -> no: partition count of topic t is 0: use 1 to 100000
        join ann sees t=100001 -> no: partition count of topic t is 100001: use 1 to 100000
        join ann -> group g created; ann joined; group epoch 1; member epoch 9, ttl 10000
        ",
    );
}

#[test]
fn instance_id_has_one_live_member_m05() {
    check(
        "
        join ann instance x sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        join bob instance x -> no: instance id x is used by the live member ann: stop it, or wait until its lease ends
        join ann instance x -> member epoch 1, ttl 10000
        join ann instance y -> no: instance id of the live member ann cannot change
        join ann -> no: instance id of the live member ann cannot change
        leave ann -> ann left; group epoch 2
        join bob instance x -> bob joined; group epoch 3; member epoch 7, ttl 10000
        ",
    );
}

#[test]
fn member_that_left_or_expired_is_gone() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        leave ann -> ann left; group epoch 3
        expire bob -> bob expired; group epoch 4
        join ann -> no: membership of ann in group g has ended: join under a new member id
        join bob rejoin 2 -> no: membership of bob in group g has ended: join under a new member id
        leave ann -> no: membership of ann in group g has ended: join under a new member id
        sees bob t=9 -> no: membership of bob in group g has ended: join under a new member id
        leave cat -> no: member cat is not in group g: join first
        show ann -> no: membership of ann in group g has ended: join under a new member id
        ",
    );
}

#[test]
fn leave_releases_what_it_lists_and_frees_the_rest() {
    check(
        "
        join ann sees t=3 -> group g created; ann joined; t has 3; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=ann 2=bob -> target for 2; 0 to ann at e1; 1 to ann at e2; 2 to bob at e3
        leave ann 0@e1:42 2@e3 -> 0 = 42; 0 e1 of ann free: released; 1 e2 of ann free: left; ann left; group epoch 3; no: partition 2 is not owned by ann: wait for a grant
        target 0=bob 1=bob 2=bob -> target for 3; 0 to bob at e4; 1 to bob at e5
        ",
    );
}

#[test]
fn partition_of_an_expired_member_goes_on_at_a_higher_epoch() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann -> target for 2; 0 to ann at e1
        expire ann -> 0 e1 of ann free: expired; ann expired; group epoch 3
        target 0=bob -> target for 3; 0 to bob at e2
        verify ann 0 e1 -> no: partition 0 is fenced: given e1, current is e2: stop writing to it
        verify bob 0 e2 -> owner
        ",
    );
}

#[test]
fn expiry_of_another_membership_is_refused_one_by_one() {
    check(
        "
        join ann -> group g created; ann joined; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        expire ann@7 bob@2 cat@1 bob@2 -> bob expired; group epoch 3; no: member ann is at member epoch 1, given 7: this membership has ended; no: member cat is not in group g: join first; no: nothing to do: bob is expired already
        expire bob@2 -> no: membership of bob in group g has ended: join under a new member id
        ",
    );
}

#[test]
fn silence_is_logged_once_and_a_join_ends_it() {
    check(
        "
        join ann -> group g created; ann joined; group epoch 1; member epoch 1, ttl 10000
        heard ann -> no: nothing to do: ann is not silent
        silent ann 700 -> ann silent for 700ms
        silent ann 900 -> no: nothing to do: ann is silent already
        due -> plan for 1; ann silent for 700ms at 3
        heard ann -> ann heard
        silent ann@2 700 -> no: member ann is at member epoch 1, given 2: this membership has ended
        silent ann 800 -> ann silent for 800ms
        join ann -> ann heard; member epoch 1, ttl 10000
        due -> plan for 1
        ",
    );
}

#[test]
fn partition_counts_only_grow_and_a_failed_look_up_removes_nothing() {
    check(
        "
        join ann sees t=4 -> group g created; ann joined; t has 4; group epoch 1; member epoch 1, ttl 10000
        join bob sees t=3 -> bob joined; group epoch 2; member epoch 2, ttl 10000
        sees bob t=4 -> ok
        sees bob -> ok
        sees bob t=5 t=6 -> t has 6; group epoch 3
        sees cat t=7 -> no: member cat is not in group g: join first
        ",
    );
}

#[test]
fn partition_that_appears_later_starts_at_the_earliest_record_a18() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        sees ann t=2 -> t has 2; group epoch 2
        target 0=ann 1=ann -> target for 2; 0 to ann at e1; 1 to ann at e2
        show ann -> version 3; 0 e1; 1 e2 from earliest
        ",
    );
}

#[test]
fn second_life_of_a_topic_is_a_new_topic() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        commit ann 0@e1#1:42 -> 0 = 42
        sees ann t#2=1 -> t has 1; group epoch 2
        sees ann t=9 -> ok
        target t#2/0=ann 0=ann -> no: partition 0 is of an earlier life of topic t: name one of the present life
        lines-for 2 t#2/0=ann 0=ann -> no: partition 0 is of an earlier life of topic t: name one of the present life
        target t#2/0=ann -> target for 2; t#2/0 to ann at e2; 0 asked back from ann
        show ann -> version 8; t#2/0 e2 from earliest; 0 e1 revoking initialised
        release ann 0@e1 -> 0 e1 of ann free: released
        move r1 0 ann -> no: partition 0 is of an earlier life of topic t: name one of the present life
        commit ann t#2/0@e1#1:42 -> no: partition t#2/0 is fenced: given e1, current is e2: stop writing to it
        commit ann t#2/0@e2#1:7 -> t#2/0 = 7
        ",
    );
}

#[test]
fn all_members_may_stop_and_others_start_p05() {
    let mut run = Run::default();
    let mut names: Vec<String> = Vec::new();
    run.line("join first sees t=3");
    run.line("target 0=first 1=first 2=first");
    run.line("commit first 0@e1#1:42");
    names.push("first".to_owned());
    for round in 0..50 {
        let counter = run.state.epoch_counter;
        for name in names.drain(..) {
            run.line(&format!("expire {name}"));
        }
        for at in 0..3 {
            let name = format!("m{round}-{at}");
            run.line(&format!("join {name}"));
            names.push(name);
        }
        run.line(&format!("target 0=m{round}-0 1=m{round}-1 2=m{round}-2"));
        let group = &run.state.groups[&group()];
        assert!(group.partitions.values().all(|state| state.ownership.owner().is_some()));
        assert!(group.partitions.values().all(|state| state.epoch.unwrap().get() > counter));
    }
    assert_eq!(
        run.line("commit m49-0 0@e151#1:41"),
        "no: offset 41 of partition 0 is below the \
         committed 42: use an offset reset to go back"
    );
}

#[test]
fn limits_refuse_and_change_nothing() {
    let mut run = Run::default();
    let mut wish = join("ann", &[]);
    wish.topics = (0..=SUBSCRIPTION_TOPICS_MAX).map(|at| topic(&format!("t{at}"))).collect();
    let refused = run.apply(&Command::JoinGroup(wish));
    assert!(matches!(refused.result, Err(Rejection::LimitReached { .. })), "{refused:?}");
    let mut state = State::default();
    let mut index = 0;
    let mut apply = |state: &mut State, command: Command| {
        index += 1;
        let context = Context { term: Term(1), index: Index(index), proposed_at: Timestamp(0) };
        state.apply(context, &command).result
    };
    for at in 0..=TOMBSTONES_MAX {
        let name = format!("gone{at}");
        apply(&mut state, Command::JoinGroup(join(&name, &[]))).unwrap();
        let named = crate::command::MemberRef {
            group: group(),
            member: member(&name),
            member_epoch: state.groups[&group()].members[&member(&name)].epoch,
        };
        apply(&mut state, Command::ExpireMembers { term: Term(1), members: vec![named] }).unwrap();
    }
    assert_eq!(state.groups[&group()].tombstones.len(), TOMBSTONES_MAX);
    let record = {
        apply(&mut state, Command::JoinGroup(join("m", &[]))).unwrap();
        state.groups[&group()].members[&member("m")].clone()
    };
    let members = &mut std::sync::Arc::make_mut(state.groups.get_mut(&group()).unwrap()).members;
    for at in members.len()..MEMBERS_MAX {
        members.insert(member(&format!("m{at}")), record.clone());
    }
    let refused = apply(&mut state, Command::JoinGroup(join("one-more", &[])));
    assert!(matches!(refused, Err(Rejection::LimitReached { .. })), "{refused:?}");
}

#[test]
fn time_never_runs_backwards_and_refuses_nothing() {
    let mut state = State::default();
    for (index, proposed_at, now) in [(1, 500, 500), (2, 100, 500), (3, 900, 900)] {
        let context =
            Context { term: Term(1), index: Index(index), proposed_at: Timestamp(proposed_at) };
        let name = format!("m{index}");
        state.apply(context, &Command::JoinGroup(join(&name, &[]))).result.unwrap();
        assert_eq!(state.now, Timestamp(now));
        assert_eq!(state.groups[&group()].members[&member(&name)].joined_at, Timestamp(now));
    }
}

#[test]
fn static_member_that_returns_takes_its_place_and_moves_nobody() {
    check(
        "
        join ann instance x sees t=3 -> group g created; ann joined; t has 3; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=ann 2=bob -> target for 2; 0 to ann at e1; 1 to ann at e2; 2 to bob at e3
        leave-for 60000 ann 0@e1:42 -> 0 = 42; 0 e1 of ann free: released; 1 e2 of ann free: left; ann away for 60000ms
        due -> bob acquires 2 e3 since 3; ann away for 60000ms at 4
        leave-for 60000 ann -> no: membership of ann in group g has ended: join under a new member id
        join ann instance x -> no: membership of ann in group g has ended: join under a new member id
        join ann instance x rejoin 1 -> no: membership of ann in group g has ended: join under a new member id
        move r1 2 ann -> no: membership of ann in group g has ended: join under a new member id
        join cat instance x -> cat joined; cat takes the place of ann; ann left; group epoch 3; 0 to cat at e4; 1 to cat at e5; member epoch 9, ttl 10000
        join cat instance x -> member epoch 9, ttl 10000
        target 0=cat 1=cat 2=bob -> target for 3
        show bob -> version 3; 2 e3
        ",
    );
}

#[test]
fn place_of_a_static_member_that_does_not_return_goes_to_others() {
    check(
        "
        join ann instance x sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=bob -> target for 2; 0 to ann at e1; 1 to bob at e2
        leave-for 60000 ann -> 0 e1 of ann free: left; ann away for 60000ms
        join eve -> eve joined; group epoch 3; member epoch 5, ttl 10000
        target 0=ann 1=eve -> target for 3; 1 asked back from bob
        in 4 -> so be it
        expire ann -> no: command of term 4 in an entry of term 5
        in 5 -> so be it
        expire ann@9 -> no: member ann is at member epoch 1, given 9: this membership has ended
        expire ann -> ann expired; group epoch 4
        target 0=bob 1=eve -> target for 4; 0 to bob at e3
        join dan instance x -> dan joined; group epoch 5; member epoch 11, ttl 10000
        ",
    );
}

#[test]
fn place_of_an_expired_member_is_kept_for_the_process_that_waits() {
    check(
        "
        join ann instance x sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=bob -> target for 2; 0 to ann at e1; 1 to bob at e2
        join cat instance x -> no: instance id x is used by the live member ann: stop it, or wait until its lease ends
        silent ann 4000 -> ann silent for 4000ms
        reserve 10000 ann bob -> 0 e1 of ann free: expired; ann away for 10000ms; no: bob has no instance id: no place is kept
        reserve 10000 ann -> no: membership of ann in group g has ended: join under a new member id
        heard ann -> no: membership of ann in group g has ended: join under a new member id
        join cat instance x -> cat joined; cat takes the place of ann; ann left; group epoch 3; 0 to cat at e3; member epoch 9, ttl 10000
        ",
    );
}

#[test]
fn return_needs_an_instance_id_and_a_length() {
    check(
        "
        join ann -> group g created; ann joined; group epoch 1; member epoch 1, ttl 10000
        leave-for 1000 ann -> no: member ann has no instance id to return by: leave for good, or join with one
        join bob instance x -> bob joined; group epoch 2; member epoch 3, ttl 10000
        leave-for 0 bob -> no: returning_within_ms is 0: use 1 to 3600000
        leave-for 3600001 bob -> no: returning_within_ms is 3600001: use 1 to 3600000
        reserve 0 bob -> no: returning_within_ms is 0: use 1 to 3600000
        ",
    );
}

#[test]
fn pin_of_a_static_member_is_that_of_the_one_that_returns() {
    check(
        "
        join ann instance x sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=bob 1=bob -> target for 2; 0 to bob at e1; 1 to bob at e2
        move r1 1 ann -> 1 pinned to ann; group epoch 3; target holds for 3; r1 logged; 1 asked back from bob; epoch 3 moves [1 bob>ann]
        leave-for 1000 ann -> ann away for 1000ms
        release bob 1@e2 -> 1 e2 of bob free: released
        join cat instance x cap 1 -> cat joined; cat takes the place of ann; ann left; group epoch 4; 1 to cat at e3; member epoch 7, ttl 10000
        ",
    );
}

#[test]
fn static_member_that_leaves_for_a_while_in_the_middle_of_a_revoke_has_nothing_left_to_release_m08()
{
    check(
        "
        join ann instance x sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        target 0=ann 1=ann -> target for 1; 0 to ann at e1; 1 to ann at e2
        join bob -> bob joined; group epoch 2; member epoch 3, ttl 10000
        target 0=ann 1=bob -> target for 2; 1 asked back from ann
        leave-for 60000 ann -> 0 e1 of ann free: left; 1 e2 of ann free: left; ann away for 60000ms; 1 to bob at e3
        due -> bob acquires 1 e3 since 5; ann away for 60000ms at 5
        release ann 1@e2:9 -> no: partition 1 is fenced: given e2, current is e3: stop writing to it
        show bob -> version 5; 1 e3
        join cat instance x -> cat joined; cat takes the place of ann; ann left; group epoch 3; 0 to cat at e4; member epoch 7, ttl 10000
        due -> plan for 3; cat acquires 0 e4 since 7; bob acquires 1 e3 since 5
        show cat -> version 7; 0 e4
        ",
    );
}

/// Any order in which a member's messages may arrive: its joins are repeated, its stream breaks, its last word is late.
#[test]
fn messages_of_a_member_that_leaves_end_without_it_in_any_order_m09() {
    let mut state = 9_u64;
    let mut draw = |count: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % count
    };
    for order in 0..1_000 {
        let mut run = Run::default();
        run.line("join bob sees t=2");
        run.line("join ann");
        let mut messages =
            vec!["join ann", "sees ann t=2", "leave ann", "join ann", "sees ann t=3"];
        let mut said = Vec::new();
        while !messages.is_empty() {
            let message = messages.remove(draw(messages.len()));
            said.push(format!("{message} -> {}", run.line(message)));
        }
        let members: Vec<_> = run.state.groups[&group()].members.keys().collect();
        assert_eq!(members, [&member("bob")], "order {order}: {said:#?}");
    }
}

#[test]
fn full_group_takes_its_own_static_member_back_m2() {
    let mut state = State::default();
    let mut index = 0;
    let mut apply = |state: &mut State, command: Command| {
        index += 1;
        let context = Context { term: Term(1), index: Index(index), proposed_at: Timestamp(0) };
        state.apply(context, &command).result
    };
    apply(&mut state, Command::JoinGroup(join("ann", &["instance", "x"]))).unwrap();
    let leave = LeaveGroup {
        group: group(),
        member: member("ann"),
        partitions: Vec::new(),
        reason: "restarts".to_owned(),
        returning_within_ms: Some(60_000),
    };
    apply(&mut state, Command::LeaveGroup(leave)).unwrap();
    apply(&mut state, Command::JoinGroup(join("m", &[]))).unwrap();
    let record = state.groups[&group()].members[&member("m")].clone();
    let members = &mut std::sync::Arc::make_mut(state.groups.get_mut(&group()).unwrap()).members;
    for at in members.len()..MEMBERS_MAX {
        members.insert(member(&format!("m{at}")), record.clone());
    }
    let refused = apply(&mut state, Command::JoinGroup(join("stranger", &["instance", "y"])));
    assert!(matches!(refused, Err(Rejection::LimitReached { .. })), "{refused:?}");
    apply(&mut state, Command::JoinGroup(join("ann2", &["instance", "x"]))).unwrap();
    assert_eq!(state.groups[&group()].members.len(), MEMBERS_MAX);
}
