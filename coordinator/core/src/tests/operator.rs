//! What operators ask for.

use tenure_model::Epoch;

use super::{Run, check, epoch};

#[test]
fn moved_partition_goes_at_once_and_stays_pinned() {
    check(
        "
        join ann sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=bob -> target for 2; 0 to ann at e1; 1 to bob at e2
        move r1 0 bob -> 0 pinned to bob; group epoch 3; target holds for 3; r1 logged; 0 asked back from ann; epoch 3 moves [0 ann>bob]
        due -> bob acquires 1 e2 since 3; ann releases 0 e1 since 4
        release ann 0@e1:7 -> 0 = 7; 0 e1 of ann free: released; 0 to bob at e3
        move r2 0 bob -> no: nothing to do: bob owns 0 already
        ",
    );
}

#[test]
fn move_while_a_plan_is_due_leaves_it_due() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        join bob -> bob joined; group epoch 2; member epoch 3, ttl 10000
        move r1 0 bob -> 0 pinned to bob; group epoch 3; r1 logged; 0 asked back from ann; epoch 3 moves [0 ann>bob]
        due -> plan for 3; ann releases 0 e1 since 4
        ",
    );
}

#[test]
fn same_request_id_is_the_same_request_p02() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann -> target for 2; 0 to ann at e1
        move r1 0 bob -> 0 pinned to bob; group epoch 3; target holds for 3; r1 logged; 0 asked back from ann; epoch 3 moves [0 ann>bob]
        release ann 0@e1 -> 0 e1 of ann free: released; 0 to bob at e2
        move r1 0 bob -> epoch 3 moves [0 ann>bob]
        move r1 0 ann -> epoch 3 moves [0 ann>bob]
        drain r1 ann -> no: request id r1 was used for another request
        drain r2 bob -> bob draining; group epoch 4; r2 logged; epoch 4 moves [0 bob>-]
        drain r2 bob -> epoch 4 moves [0 bob>-]
        drain r3 bob -> no: nothing to do: bob is draining already
        undrain r4 bob -> bob undrained; group epoch 5; r4 logged; epoch 5 moves []
        undrain r4 bob -> epoch 5 moves []
        undrain r5 bob -> no: nothing to do: bob is not draining
        drain r2 bob -> epoch 4 moves [0 bob>-]
        floor r6 e100 -> floor e100; r6 logged; epoch 0 moves []
        floor r6 e200 -> epoch 0 moves []
        rebalance r7 0=bob -> pins lifted; group epoch 6; target for 6; r7 logged; epoch 6 moves []
        rebalance r7 0=ann -> epoch 6 moves []
        ",
    );
}

#[test]
fn move_to_a_member_that_cannot_take_it_is_refused_p04() {
    check(
        "
        join ann sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        join bob wants u -> bob joined; group epoch 2; member epoch 2, ttl 10000
        join cat -> cat joined; group epoch 3; member epoch 3, ttl 10000
        join dan cap 1 -> dan joined; group epoch 4; member epoch 4, ttl 10000
        drain r1 cat -> cat draining; group epoch 5; r1 logged; epoch 5 moves []
        target 0=ann 1=dan -> target for 5; 0 to ann at e1; 1 to dan at e2
        move r2 0 bob -> no: member bob does not subscribe to topic t
        move r2 0 cat -> no: member cat is draining: undrain it, or name another
        move r2 0 eve -> no: member eve is not in group g: join first
        move r2 0 dan -> no: partitions of member dan: 2: the limit is 1
        move r2 9 ann -> no: partition 9 is not known to group g: a member that reads its topic reports it
        move r2 0 ann -> no: nothing to do: ann owns 0 already
        drain r3 ann -> ann draining; group epoch 6; r3 logged; epoch 6 moves [0 ann>-]
        move r4 1 ann -> no: member ann is draining: undrain it, or name another
        ",
    );
}

#[test]
fn partition_moves_off_a_draining_member_p04() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann -> target for 2; 0 to ann at e1
        drain r1 ann -> ann draining; group epoch 3; r1 logged; epoch 3 moves [0 ann>-]
        move r2 0 bob -> 0 pinned to bob; group epoch 4; r2 logged; 0 asked back from ann; epoch 4 moves [0 ann>bob]
        ",
    );
}

#[test]
fn drained_member_gets_nothing_and_keeps_until_the_plan_p03() {
    check(
        "
        join ann sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=bob -> target for 2; 0 to ann at e1; 1 to bob at e2
        drain r1 ann -> ann draining; group epoch 3; r1 logged; epoch 3 moves [0 ann>-]
        show ann -> version 3; 0 e1
        release ann 0@e1 lost -> 0 e1 of ann free: released
        target 0=bob 1=bob -> target for 3; 0 to bob at e3
        leave ann -> ann left; group epoch 4
        target 0=bob 1=bob -> target for 4
        drain r2 ann -> no: membership of ann in group g has ended: join under a new member id
        ",
    );
}

#[test]
fn rebalance_lifts_pins_and_installs_its_target() {
    check(
        "
        join ann sees t=3 -> group g created; ann joined; t has 3; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=ann -> target for 2; 0 to ann at e1; 1 to ann at e2
        move r1 0 bob -> 0 pinned to bob; group epoch 3; target holds for 3; r1 logged; 0 asked back from ann; epoch 3 moves [0 ann>bob]
        rebalance r2 0=ann 1=bob 2=bob -> pins lifted; group epoch 4; target for 4; r2 logged; 1 asked back from ann; 2 to bob at e3; epoch 4 moves [1 ann>bob, 2 ->bob]
        due -> bob acquires 2 e3 since 5; ann releases 0 e1 since 4; ann releases 1 e2 since 5
        ",
    );
}

#[test]
fn pin_ends_with_its_member() {
    let mut run = Run::default();
    for line in ["join ann sees t=1", "join bob", "target 0=ann", "move r1 0 bob", "expire bob"] {
        run.line(line);
    }
    assert!(run.state.groups[&super::group()].pins.is_empty());
}

#[test]
fn floor_lifts_the_next_epoch_and_never_lowers_it() {
    check(
        "
        floor r1 e100 -> floor e100; r1 logged; epoch 0 moves []
        join ann sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 2, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e101
        floor r2 e50 -> r2 logged; epoch 0 moves []
        release ann 0@e101 lost -> 0 e101 of ann free: released; 0 to ann at e102
        ",
    );
}

#[test]
fn no_epoch_left_means_no_grant_and_no_panic() {
    let mut run = Run::default();
    let last = Epoch::MAX;
    run.line(&format!("floor r1 e{}", last - 1));
    run.line("join ann sees t=2");
    assert!(!run.state.epochs_exhausted());
    let answer = run.line("target 0=ann 1=ann");
    assert_eq!(answer, format!("target for 1; 0 to ann at e{last}"));
    assert!(run.state.epochs_exhausted());
    assert_eq!(run.state.epoch_counter, epoch(&last.to_string()).get());
    let answer = run.line(&format!("release ann 0@e{last} lost"));
    assert_eq!(answer, format!("0 e{last} of ann free: released"));
}
