//! Grants from their coming to their end, and preparations for them.

use super::*;

#[test]
fn revoke_shortens_and_the_drain_is_counted_from_the_send() {
    check_holding(
        "0:e1 1:e2",
        "
        100 assign v6 0:e1/1500 1:e2
        1200 answer 1 v6 0:e1/500 1:e2
        1300 draining 0:e1 40
        1310 release 0:e1 41
        1320 done 1
        ",
        "
        100 assign v6 0:e1/1500 1:e2 -> REVOKED 0:e1 by 1500
        100 assign v6 0:e1/1500 1:e2 -> 0:e1 shortened to 1500
        wake -> heartbeat 1 v6 0:e1@0 registering 999ms 1:e2@0 registering 999ms
        1200 answer 1 v6 0:e1/500 1:e2 -> lease to 3900
        1200 answer 1 v6 0:e1/500 1:e2 -> 0:e1 shortened to 1400
        1200 answer 1 v6 0:e1/500 1:e2 -> 1:e2 extended to 3900
        1310 release 0:e1 41 -> 0:e1 stopped
        1310 release 0:e1 41 -> release #1 0:e1@41 revoked
        ",
    );
}

#[test]
fn long_drain_is_extended_by_answers_but_not_by_a_bare_assignment() {
    check_holding(
        "0:e1",
        "
        900 assign v6 0:e1/30000
        1100 answer 1 v6 0:e1/29000
        1200 assign v7
        ",
        "
        900 assign v6 0:e1/30000 -> REVOKED 0:e1 by 30800
        wake -> heartbeat 1 v6 0:e1@0 registering 999ms
        1100 answer 1 v6 0:e1/29000 -> lease to 3900
        1100 answer 1 v6 0:e1/29000 -> 0:e1 extended to 3900
        1200 assign v7 -> 0:e1 stopped
        1200 assign v7 -> LOST 0:e1 Gone
        ",
    );
}

#[test]
fn drain_that_runs_out_ends_the_grant() {
    check_holding(
        "0:e1",
        "
        100 assign v6 0:e1/500
        600 tick
        ",
        "
        100 assign v6 0:e1/500 -> REVOKED 0:e1 by 500
        100 assign v6 0:e1/500 -> 0:e1 shortened to 500
        wake -> 0:e1 stopped
        wake -> LOST 0:e1 LeaseEnded
        wake -> release #1 0:e1 lease_lost
        ",
    );
}

#[test]
fn epoch_that_ended_here_is_never_resumed_and_is_released_again() {
    check_holding(
        "0:e4",
        "
        10 release 0:e4 41
        20 assign v6 0:e4
        30 done 1
        40 assign v7 0:e4
        50 assign v8 0:e3
        60 refused 2 NOT_OWNED
        70 assign v9 0:e9
        ",
        "
        10 release 0:e4 41 -> 0:e4 stopped
        10 release 0:e4 41 -> release #1 0:e4@41 revoked
        40 assign v7 0:e4 -> release #2 0:e4 lease_lost
        50 assign v8 0:e3 -> release #3 0:e3 lease_lost
        70 assign v9 0:e9 -> GRANTED 0:e9 to 2900
        ",
    );
}

#[test]
fn higher_epoch_of_the_same_partition_ends_the_old_grant_first() {
    check_holding(
        "0:e1",
        "
        20 assign v6 0:e2
        ",
        "
        20 assign v6 0:e2 -> 0:e1 stopped
        20 assign v6 0:e2 -> LOST 0:e1 Gone
        20 assign v6 0:e2 -> GRANTED 0:e2 to 2900
        ",
    );
}

#[test]
fn refused_acquire_ends_the_grant() {
    check_holding(
        "0:e1 1:e2",
        "
        10 acquired 0:e1 7
        11 acquired 1:e2 7
        20 refused 1 FENCED
        30 refused 2 NOTHING_TO_DO
        ",
        "
        10 acquired 0:e1 7 -> acquired #1 0:e1
        11 acquired 1:e2 7 -> acquired #2 1:e2
        20 refused 1 FENCED -> 0:e1 stopped
        20 refused 1 FENCED -> LOST 0:e1 Fenced { current: None }
        ",
    );
}

#[test]
fn what_is_to_come_is_told_once_and_its_preparation_said_once_until_it_comes() {
    check(
        "
        0 tick
        10 connected
        20 joined 7 v5 prepare:0@40/500 prepare:1@7/900
        30 assign v5 prepare:0@41/400 prepare:1@7/800
        40 prepared 0
        50 prepared 0
        60 prepared 2
        70 done 1
        80 assign v6 0:e3 prepare:1@7/700
        90 prepared 0
        100 assign v7 0:e3
        110 prepared 1
        ",
        "
        0 tick -> connect a:1
        10 connected -> join m epoch 0
        20 joined 7 v5 prepare:0@40/500 prepare:1@7/900 -> JOINED m 7
        20 joined 7 v5 prepare:0@40/500 prepare:1@7/900 -> lease to 2910
        20 joined 7 v5 prepare:0@40/500 prepare:1@7/900 -> PREPARE 0 from 40 by 510
        20 joined 7 v5 prepare:0@40/500 prepare:1@7/900 -> PREPARE 1 from 7 by 910
        40 prepared 0 -> prepared #1 0
        80 assign v6 0:e3 prepare:1@7/700 -> GRANTED 0:e3 to 2910
        100 assign v7 0:e3 -> CALLED OFF 1
        ",
    );
}

#[test]
fn preparation_that_is_not_answered_is_said_again_and_ends_with_the_membership() {
    check(
        "
        0 tick
        10 connected
        20 joined 7 v5 prepare:0@40/500
        40 prepared 0 cold
        50 broken
        60 tick
        260 connected
        270 joined 7 v5 prepare:0@40/300
        280 ended MEMBER_GONE
        ",
        "
        0 tick -> connect a:1
        10 connected -> join m epoch 0
        20 joined 7 v5 prepare:0@40/500 -> JOINED m 7
        20 joined 7 v5 prepare:0@40/500 -> lease to 2910
        20 joined 7 v5 prepare:0@40/500 -> PREPARE 0 from 40 by 510
        40 prepared 0 cold -> prepared #1 0cold
        wake -> connect b:1
        260 connected -> join m epoch 7
        270 joined 7 v5 prepare:0@40/300 -> lease to 3160
        270 joined 7 v5 prepare:0@40/300 -> prepared #1 0cold
        280 ended MEMBER_GONE -> disconnect
        280 ended MEMBER_GONE -> CALLED OFF 0
        280 ended MEMBER_GONE -> no lease
        ",
    );
}
