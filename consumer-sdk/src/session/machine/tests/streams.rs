//! Streams that break, lead elsewhere or say things twice.

use super::*;

#[test]
fn acts_are_said_again_after_a_reconnect_until_they_are_answered() {
    check_holding(
        "0:e1 1:e2",
        "
        10 topics 4
        20 acquired 0:e1 7
        30 release 1:e2 41
        40 done 1
        50 broken
        150 connected
        160 joined 7 v6 0:e1
        170 refused 3 OVERLOADED
        250 done 2
        260 done 3
        300 broken
        500 connected
        510 joined 7 v6 0:e1
        ",
        "
        10 topics 4 -> topics #1 4
        20 acquired 0:e1 7 -> acquired #2 0:e1
        30 release 1:e2 41 -> 1:e2 stopped
        30 release 1:e2 41 -> release #3 1:e2@41 revoked
        wake -> connect b:1
        150 connected -> join m epoch 7 topics 4
        160 joined 7 v6 0:e1 -> lease to 3050
        160 joined 7 v6 0:e1 -> 0:e1 extended to 3050
        160 joined 7 v6 0:e1 -> acquired #2 0:e1
        160 joined 7 v6 0:e1 -> release #3 1:e2@41 revoked
        wake -> release #3 1:e2@41 revoked
        wake -> connect c:1
        500 connected -> join m epoch 7 topics 4
        510 joined 7 v6 0:e1 -> lease to 3400
        510 joined 7 v6 0:e1 -> 0:e1 extended to 3400
        ",
    );
}

#[test]
fn redirect_is_followed_at_once_and_only_a_few_times_between_pauses() {
    check(
        "
        0 tick
        1 connected
        2 broken NOT_LEADER b:1
        3 connected
        4 broken NOT_LEADER c:1
        5 connected
        6 broken NOT_LEADER b:1
        7 connected
        8 broken NOT_LEADER c:1
        100 connected
        101 broken NOT_LEADER b:1
        102 connected
        110 joined 7 v5
        ",
        "
        0 tick -> connect a:1
        1 connected -> join m epoch 0
        2 broken NOT_LEADER b:1 -> connect b:1
        3 connected -> join m epoch 0
        4 broken NOT_LEADER c:1 -> connect c:1
        5 connected -> join m epoch 0
        6 broken NOT_LEADER b:1 -> connect b:1
        7 connected -> join m epoch 0
        wake -> connect c:1
        100 connected -> join m epoch 0
        101 broken NOT_LEADER b:1 -> connect b:1
        102 connected -> join m epoch 0
        110 joined 7 v5 -> JOINED m 7
        110 joined 7 v5 -> lease to 3002
        ",
    );
}

#[test]
fn unreachable_nodes_are_tried_in_turn() {
    check(
        "
        0 tick
        1 unreachable
        100 unreachable
        300 unreachable
        700 unreachable
        1200 connected
        1210 broken NO_LEADER
        1520 tick
        ",
        "
        0 tick -> connect a:1
        wake -> connect b:1
        wake -> connect c:1
        wake -> connect a:1
        wake -> connect b:1
        1200 connected -> join m epoch 0
        wake -> connect c:1
        ",
    );
}

#[test]
fn dead_stream_is_given_up_after_one_and_a_half_intervals() {
    check_holding(
        "0:e1",
        "
        1600 tick
        ",
        "
        wake -> heartbeat 1 v5 0:e1@0 registering 999ms
        wake -> disconnect
        wake -> connect b:1
        ",
    );
}

#[test]
fn messages_that_come_twice_change_nothing() {
    check_holding(
        "0:e1",
        "
        2 joined 7 v5 0:e1
        10 assign v6 0:e1/9000
        11 assign v6 0:e1/9000
        20 release 0:e1 3
        30 done 1
        31 done 1
        40 release 0:e1 3
        ",
        "
        10 assign v6 0:e1/9000 -> REVOKED 0:e1 by 8910
        20 release 0:e1 3 -> 0:e1 stopped
        20 release 0:e1 3 -> release #1 0:e1@3 revoked
        ",
    );
}

#[test]
fn heartbeat_carries_phases_and_positions() {
    check_holding(
        "0:e1 1:e2",
        "
        10 acquired 0:e1 7
        400 draining 0:e1 9
        1001 tick
        ",
        "
        10 acquired 0:e1 7 -> acquired #1 0:e1
        wake -> heartbeat 1 v5 0:e1@9 draining 600ms 1:e2@0 registering 999ms
        ",
    );
}
