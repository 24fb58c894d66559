//! Rows of the tables at `Ownership` and in `reconcile`, and each refusal.

use std::collections::BTreeSet;

use tenure_model::{Index, Term, Timestamp};

use super::{Run, TERM, check, describe, group, member, readable};
use crate::{Command, Context, State};

#[test]
fn free_partition_is_granted_to_its_target_at_the_next_epoch() {
    check(
        "
        join ann sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        due -> plan for 1
        target 0=ann 1=ann -> target for 1; 0 to ann at e1; 1 to ann at e2
        show ann -> version 2; 0 e1; 1 e2
        due -> ann acquires 0 e1 since 2; ann acquires 1 e2 since 2
        ",
    );
}

#[test]
fn held_partition_that_is_acquired_runs() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        acquired ann 0 e1 -> 0 runs at ann
        acquired ann 0 e1 -> ok
        acquired ann 0 e1 home -> 0 runs at ann
        acquired ann 0 e1 home -> ok
        due -> nothing
        ",
    );
}

#[test]
fn acquired_is_refused_for_another_member_or_epoch() {
    check(
        "
        join ann sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann -> target for 2; 0 to ann at e1
        acquired bob 0 e1 -> no: partition 0 is not owned by bob: wait for a grant
        acquired ann 0 e2 -> no: partition 0 is not owned by ann: wait for a grant
        acquired ann 1 e1 -> no: partition 1 is not owned by ann: wait for a grant
        acquired ann 7 e1 -> no: partition 7 is not known to group g: a member that reads its topic reports it
        ",
    );
}

#[test]
fn release_by_one_and_grant_to_the_next_are_one_entry() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        acquired ann 0 e1 -> 0 runs at ann
        join bob -> bob joined; group epoch 2; member epoch 4, ttl 10000
        target 0=bob -> target for 2; 0 asked back from ann
        show ann -> version 5; 0 e1 revoking
        due -> ann releases 0 e1 since 5
        release ann 0@e1:42 -> 0 = 42; 0 e1 of ann free: released; 0 to bob at e2
        show ann -> version 6
        show bob -> version 6; 0 e2 initialised
        ",
    );
}

#[test]
fn partition_without_a_target_is_asked_back_and_stays_free() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        join bob -> bob joined; group epoch 2; member epoch 3, ttl 10000
        target -> target for 2; 0 asked back from ann
        release ann 0@e1 -> 0 e1 of ann free: released
        ",
    );
}

#[test]
fn revoking_partition_never_returns_to_held_though_the_target_does_e01() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        join bob -> bob joined; group epoch 2; member epoch 3, ttl 10000
        target 0=bob -> target for 2; 0 asked back from ann
        join cat -> cat joined; group epoch 3; member epoch 5, ttl 10000
        target 0=ann -> target for 3
        show ann -> version 4; 0 e1 revoking
        acquired ann 0 e1 -> ok
        show ann -> version 4; 0 e1 revoking
        release ann 0@e1 -> 0 e1 of ann free: released; 0 to ann at e2
        show ann -> version 8; 0 e2
        ",
    );
}

#[test]
fn revoking_partition_keeps_its_owner_through_any_later_target_e01() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        join bob -> bob joined; group epoch 2; member epoch 3, ttl 10000
        target 0=bob -> target for 2; 0 asked back from ann
        join cat -> cat joined; group epoch 3; member epoch 5, ttl 10000
        target 0=cat -> target for 3
        verify ann 0 e1 -> owner
        release ann 0@e1 -> 0 e1 of ann free: released; 0 to cat at e2
        verify ann 0 e1 -> no: partition 0 is fenced: given e1, current is e2: stop writing to it
        verify bob 0 e1 -> no: partition 0 is fenced: given e1, current is e2: stop writing to it
        verify cat 0 e2 -> owner
        ",
    );
}

#[test]
fn drain_deadline_takes_a_revoking_partition_back() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        join bob -> bob joined; group epoch 2; member epoch 3, ttl 10000
        drained 0@e1 -> no: nothing to do: partition 0 at e1 does not wait for this deadline
        target 0=bob -> target for 2; 0 asked back from ann
        drained 0@e9 -> no: nothing to do: partition 0 at e9 does not wait for this deadline
        drained 0@e1 0@e1 -> 0 e1 of ann free: drain deadline; 0 to bob at e2; no: nothing to do: partition 0 at e1 does not wait for this deadline
        drained 0@e1 -> no: nothing to do: partition 0 at e1 does not wait for this deadline
        ",
    );
}

#[test]
fn acquire_deadline_asks_for_a_held_partition_and_avoids_the_member() {
    check(
        "
        join ann sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        target 0=ann 1=ann -> target for 1; 0 to ann at e1; 1 to ann at e2
        acquired ann 1 e2 -> 1 runs at ann
        unacquired 0@e1 1@e2 -> 0 asked back from ann; 0 held back: not acquired before the deadline; group epoch 2; no: nothing to do: partition 1 at e2 does not wait for this deadline
        due -> plan for 2; ann releases 0 e1 since 4; hold 0 after 1 since 4
        unacquired 0@e1 -> no: nothing to do: partition 0 at e1 does not wait for this deadline
        drained 0@e1 -> 0 e1 of ann free: drain deadline
        ",
    );
}

#[test]
fn deadlines_of_an_earlier_term_are_ignored() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        in 4 -> so be it
        unacquired 0@e1 -> no: command of term 4 in an entry of term 5
        drained 0@e1 -> no: command of term 4 in an entry of term 5
        lift 0 -> no: command of term 4 in an entry of term 5
        expire ann -> no: command of term 4 in an entry of term 5
        silent ann 1 -> no: command of term 4 in an entry of term 5
        heard ann -> no: command of term 4 in an entry of term 5
        in 5 -> so be it
        unacquired 0@e1 -> 0 asked back from ann; 0 held back: not acquired before the deadline; group epoch 2
        ",
    );
}

#[test]
fn failed_acquire_is_held_back_until_the_hold_is_lifted() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann -> target for 2; 0 to ann at e1
        release ann 0@e1 acquire-failed -> 0 e1 of ann free: released; 0 held back: sink is away; group epoch 3
        due -> plan for 3; hold 0 after 1 since 4
        target 0=bob -> target for 3
        lift 0 -> 0 lifted; 0 to bob at e2
        lift 0 -> no: nothing to do: partition 0 is not held back
        acquired bob 0 e2 -> 0 runs at bob
        release bob 0@e2 handler-failed -> 0 e2 of bob free: released; 0 held back: sink is away; group epoch 4
        due -> plan for 4; hold 0 after 1 since 9
        ",
    );
}

#[test]
fn partition_that_all_members_failed_is_tried_again_after_each_hold() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        release ann 0@e1 acquire-failed -> 0 e1 of ann free: released; 0 held back: sink is away; group epoch 2
        target 0=ann -> target for 2
        lift 0 -> 0 lifted; group epoch 3; 0 to ann at e2
        release ann 0@e2 fenced -> 0 e2 of ann free: released; 0 held back: sink is away; group epoch 4
        due -> plan for 4; hold 0 after 2 since 6
        ",
    );
}

#[test]
fn fenced_after_it_ran_is_no_trouble_and_gets_a_new_epoch_at_once() {
    check(
        "
        join ann sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        target 0=ann 1=ann -> target for 1; 0 to ann at e1; 1 to ann at e2
        acquired ann 0 e1 -> 0 runs at ann
        release ann 0@e1 fenced -> 0 e1 of ann free: released; 0 to ann at e3
        release ann 1@e2 lost -> 1 e2 of ann free: released; 1 to ann at e4
        ",
    );
}

#[test]
fn release_for_shutdown_gives_nothing_back_to_that_member() {
    check(
        "
        join ann sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=ann -> target for 2; 0 to ann at e1; 1 to ann at e2
        release ann 0@e1 shutdown -> 0 e1 of ann free: released; ann draining; group epoch 3
        target 0=bob 1=bob -> target for 3; 0 to bob at e3; 1 asked back from ann
        release ann 1@e2 shutdown -> 1 e2 of ann free: released; 1 to bob at e4
        ",
    );
}

#[test]
fn release_names_exactly_one_grant() {
    check(
        "
        join ann sees t=3 -> group g created; ann joined; t has 3; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=bob -> target for 2; 0 to ann at e1; 1 to bob at e2
        release bob 0@e1 -> no: partition 0 is not owned by bob: wait for a grant
        release ann 0@e2 1@e2 2@e1 7@e1 -> no: partition 0 is not owned by ann: wait for a grant; no: partition 1 is not owned by ann: wait for a grant; no: partition 2 is not owned by ann: wait for a grant; no: partition 7 is not known to group g: a member that reads its topic reports it
        release ann 0@e1 0@e1 -> 0 e1 of ann free: released; 0 to ann at e3; no: partition 0 is not owned by ann: wait for a grant
        release ann 0@e1 -> no: partition 0 is fenced: given e1, current is e3: stop writing to it
        ",
    );
}

#[test]
fn full_member_waits_for_room_before_the_owner_is_asked() {
    check(
        "
        join ann sees t=3 -> group g created; ann joined; t has 3; group epoch 1; member epoch 1, ttl 10000
        join bob cap 1 -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=bob 2=ann -> target for 2; 0 to ann at e1; 1 to bob at e2; 2 to ann at e3
        join cat -> cat joined; group epoch 3; member epoch 4, ttl 10000
        target 0=bob 1=cat 2=ann -> target for 3; 1 asked back from bob
        due -> ann acquires 0 e1 since 3; ann acquires 2 e3 since 3; bob releases 1 e2 since 5
        release bob 1@e2 -> 1 e2 of bob free: released; 0 asked back from ann; 1 to cat at e4
        due -> cat acquires 1 e4 since 6; ann acquires 2 e3 since 3; ann releases 0 e1 since 6
        release ann 0@e1 -> 0 e1 of ann free: released; 0 to bob at e5
        ",
    );
}

#[test]
fn ring_of_full_members_is_opened_at_one_place() {
    check(
        "
        join ann cap 1 sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        join bob cap 1 -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=bob -> target for 2; 0 to ann at e1; 1 to bob at e2
        join cat -> cat joined; group epoch 3; member epoch 4, ttl 10000
        target 0=bob 1=ann -> target for 3; 0 asked back from ann
        release ann 0@e1 -> 0 e1 of ann free: released; 1 asked back from bob
        release bob 1@e2 -> 1 e2 of bob free: released; 0 to bob at e3; 1 to ann at e4
        due -> bob acquires 0 e3 since 7; ann acquires 1 e4 since 7
        ",
    );
}

#[test]
fn raised_cap_lets_waiting_partitions_in() {
    check(
        "
        join ann cap 1 sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        join ann cap 2 -> ann updated; group epoch 2; member epoch 1, ttl 10000
        target 0=ann 1=ann -> target for 2; 1 to ann at e2
        join ann cap 1 -> ann updated; group epoch 3; member epoch 1, ttl 10000
        show ann -> version 4; 0 e1; 1 e2
        ",
    );
}

#[test]
fn epoch_is_compared_and_not_only_the_owner_a10() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        join bob -> bob joined; group epoch 2; member epoch 3, ttl 10000
        target 0=bob -> target for 2; 0 asked back from ann
        release ann 0@e1 -> 0 e1 of ann free: released; 0 to bob at e2
        join cat -> cat joined; group epoch 3; member epoch 6, ttl 10000
        target 0=ann -> target for 3; 0 asked back from bob
        release bob 0@e2 -> 0 e2 of bob free: released; 0 to ann at e3
        verify ann 0 e1 -> no: partition 0 is fenced: given e1, current is e3: stop writing to it
        verify ann 0 e3 -> owner
        commit ann 0@e1#9:9 -> no: partition 0 is fenced: given e1, current is e3: stop writing to it
        release ann 0@e1 -> no: partition 0 is fenced: given e1, current is e3: stop writing to it
        acquired ann 0 e1 -> no: partition 0 is fenced: given e1, current is e3: stop writing to it
        ",
    );
}

#[test]
fn target_of_an_earlier_group_epoch_is_refused() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target-for 1 0=ann -> no: target of group g was planned for group epoch 1, current is 2: plan again
        target-for 2 0=ann -> target for 2; 0 to ann at e1
        target-for 2 0=ann -> ok
        target-for 3 0=ann -> no: target of group g was planned for group epoch 3, current is 2: plan again
        ",
    );
}

#[test]
fn target_with_a_line_that_does_not_hold_is_refused_whole() {
    check(
        "
        join ann cap 1 sees t=2 sees u=1 -> group g created; ann joined; u has 1; t has 2; group epoch 1; member epoch 1, ttl 10000
        join bob wants u -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=ann -> no: partitions of member ann: 2: the limit is 1
        target 0=cat -> no: member cat is not in group g: join first
        target 0=bob -> no: member bob does not subscribe to topic t
        target 7=ann -> no: partition 7 is not known to group g: a member that reads its topic reports it
        target 1=ann 0=ann -> no: target is not sorted, or has a partition twice
        drain r1 bob -> bob draining; group epoch 3; r1 logged; epoch 3 moves []
        target u/0=bob -> no: member bob is draining: undrain it, or name another
        ",
    );
}

#[test]
fn late_target_line_by_line_keeps_what_holds_and_a_plan_stays_due() {
    check(
        "
        join ann sees t=3 -> group g created; ann joined; t has 3; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=bob -> target for 2; 0 to ann at e1; 1 to bob at e2
        join cat -> cat joined; group epoch 3; member epoch 4, ttl 10000
        join dan -> dan joined; group epoch 4; member epoch 5, ttl 10000
        leave cat -> cat left; group epoch 5
        lines-for 3 0=dan 1=cat 2=cat -> target for 3; 0 asked back from ann
        due -> plan for 5; bob acquires 1 e2 since 3; ann releases 0 e1 since 7
        lines-for 2 0=ann -> no: target of group g was planned for group epoch 2, current is 5: plan again
        lines-for 3 0=dan 1=bob 2=bob -> target for 3; 2 to bob at e3
        due -> plan for 5; bob acquires 1 e2 since 3; bob acquires 2 e3 since 9; ann releases 0 e1 since 7
        ",
    );
}

#[test]
fn commands_of_one_entry_are_decided_in_order_each_with_its_own_verdict() {
    let mut run = Run::default();
    for line in ["join ann sees t=1", "join bob", "target 0=ann", "move r1 0 bob"] {
        run.line(line);
    }
    let commands: Vec<Command> =
        ["commit ann 0@e1#1:41", "release ann 0@e1", "commit ann 0@e1#2:42"]
            .iter()
            .map(|line| run.command(&line.split_whitespace().collect::<Vec<_>>()))
            .collect();
    let context = Context { term: Term(TERM), index: Index(5), proposed_at: Timestamp(0) };
    let applied = run.state.apply_batch(context, &commands);
    let told: Vec<String> = applied.iter().map(|one| readable(&describe(one))).collect();
    assert_eq!(
        told,
        [
            "0 = 41",
            "0 e1 of ann free: released; 0 to bob at e2",
            "no: partition 0 is fenced: given e1, current is e2: stop writing to it",
        ]
    );
    let touched = State::touched(&applied[1].events);
    assert_eq!(touched, BTreeSet::from([(group(), member("ann")), (group(), member("bob"))]));
    assert_eq!(run.line("show ann"), "version 5");
    assert_eq!(run.line("show bob"), "version 5; 0 e2 initialised");
}

#[test]
fn grant_that_runs_and_is_not_served_is_asked_for_and_goes_to_another() {
    check(
        "
        join ann sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=ann -> target for 2; 0 to ann at e1; 1 to ann at e2
        unserved 0@e1 -> no: nothing to do: partition 0 does not run under e1
        acquired ann 0 e1 -> 0 runs at ann
        unserved 0@e9 -> no: nothing to do: partition 0 does not run under e9
        unserved 0@e1 0@e1 -> 0 asked back from ann; 0 held back: held, but not served by its owner; group epoch 3; no: nothing to do: partition 0 does not run under e1
        unserved 0@e1 -> no: nothing to do: partition 0 does not run under e1
        release ann 0@e1 lost -> 0 e1 of ann free: released
        target 0=bob 1=ann -> target for 3
        lift 0 -> 0 lifted; 0 to bob at e3
        ",
    );
}
