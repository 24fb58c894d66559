//! Preparations: the next owner is told first, and the present one goes on meanwhile.

use super::check;

#[test]
fn owner_is_asked_only_once_the_next_one_is_prepared() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        acquired ann 0 e1 home -> 0 runs at ann
        commit ann 0@e1#1:7 -> 0 = 7
        join bob prepares yes -> bob joined; group epoch 2; member epoch 5, ttl 10000
        target 0=bob -> target for 2; bob prepares for 0
        show ann -> version 2; 0 e1 initialised
        show bob -> version 6; prepares 0 of ann at 7
        due -> bob prepares for 0
        commit ann 0@e1#2:9 -> 0 = 9
        prepared bob 0 -> bob is ready for 0; 0 asked back from ann
        due -> ann releases 0 e1 since 8
        show bob -> version 6; prepares 0 of ann at 9
        release ann 0@e1:11 -> 0 = 11; 0 e1 of ann free: released; 0 to bob at e2
        show bob -> version 9; 0 e2 initialised
        ",
    );
}

#[test]
fn move_goes_on_without_the_preparation_once_its_deadline_has_passed() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        acquired ann 0 e1 -> 0 runs at ann
        join bob prepares yes -> bob joined; group epoch 2; member epoch 4, ttl 10000
        target 0=bob -> target for 2; bob prepares for 0
        unprepared bob 0 -> bob is ready for 0; 0 asked back from ann
        prepared bob 0 -> no: nothing to do: bob does not prepare for partition 0
        ",
    );
}

#[test]
fn partition_without_an_owner_that_runs_is_not_kept_waiting() {
    check(
        "
        join ann prepares yes sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        target 0=ann 1=ann -> target for 1; 0 to ann at e1; 1 to ann at e2
        acquired ann 1 e2 -> 1 runs at ann
        join bob prepares yes -> bob joined; group epoch 2; member epoch 4, ttl 10000
        target 0=bob 1=bob -> target for 2; 0 asked back from ann; bob prepares for 1
        release ann 1@e2 -> 1 e2 of ann free: released; 1 to bob at e3
        show bob -> version 6; 1 e3
        due -> bob acquires 1 e3 since 6; ann releases 0 e1 since 5
        ",
    );
}

#[test]
fn preparation_is_called_off_when_the_partition_goes_elsewhere() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        acquired ann 0 e1 -> 0 runs at ann
        join bob prepares yes -> bob joined; group epoch 2; member epoch 4, ttl 10000
        join cat prepares yes -> cat joined; group epoch 3; member epoch 5, ttl 10000
        target 0=bob -> target for 3; bob prepares for 0
        move r1 0 cat -> 0 pinned to cat; group epoch 4; target holds for 4; r1 logged; bob need not prepare for 0; cat prepares for 0; epoch 4 moves [0 ann>cat]
        show bob -> version 7
        prepared bob 0 -> no: nothing to do: bob does not prepare for partition 0
        leave cat -> cat left; group epoch 5
        target 0=ann -> target for 5; cat need not prepare for 0
        due -> nothing
        ",
    );
}
