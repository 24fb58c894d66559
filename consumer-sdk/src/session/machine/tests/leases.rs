//! What a lease is counted from, and how it ends.

use super::*;

#[test]
fn lease_counts_from_the_send_and_not_from_the_receipt() {
    check(
        "
        0 tick
        10 connected
        900 joined 7 v5 0:e1
        1500 tick
        1900 answer 1 v5 0:e1
        ",
        "
        0 tick -> connect a:1
        10 connected -> join m epoch 0
        900 joined 7 v5 0:e1 -> JOINED m 7
        900 joined 7 v5 0:e1 -> lease to 2910
        900 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2910
        wake -> heartbeat 1 v5 0:e1@0 registering 110ms
        1900 answer 1 v5 0:e1 -> lease to 3910
        1900 answer 1 v5 0:e1 -> 0:e1 extended to 3910
        ",
    );
}

#[test]
fn token_that_came_before_the_lease_was_live_stays_with_the_grant() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1+first
        3000! assign v6 1:e2+second
        3000! answer 1 v6 1:e2
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1+first -> JOINED m 7
        1 joined 7 v5 0:e1+first -> lease to 2900
        1 joined 7 v5 0:e1+first -> GRANTED 0:e1 to 2900 with first
        3000! assign v6 1:e2+second -> 0:e1 stopped
        3000! assign v6 1:e2+second -> LOST 0:e1 LeaseEnded
        3000! assign v6 1:e2+second -> release #1 0:e1 lease_lost
        3000! assign v6 1:e2+second -> heartbeat 1 v6
        3000! answer 1 v6 1:e2 -> lease to 5900
        3000! answer 1 v6 1:e2 -> GRANTED 1:e2 to 5900 with second
        ",
    );
}

#[test]
fn late_wake_up_sends_at_once() {
    check_holding(
        "0:e1",
        "
        2500! tick
        2510 answer 1 v5 0:e1
        3000 tick
        ",
        "
        2500! tick -> AT RISK until 2900
        2500! tick -> heartbeat 1 v5 0:e1@0 registering 2499ms
        2510 answer 1 v5 0:e1 -> lease to 5400
        2510 answer 1 v5 0:e1 -> 0:e1 extended to 5400
        2510 answer 1 v5 0:e1 -> RENEWED
        ",
    );
}

#[test]
fn answer_to_an_older_heartbeat_after_a_newer_one_moves_nothing() {
    check_holding(
        "0:e1",
        "
        1001 answer 9 v5 0:e1
        1002 tick
        1400! answer 1 v5 0:e1
        2400! tick
        2401 answer 2 v5 0:e1
        2402 answer 1 v5 0:e1
        2403 answer 2 v5 0:e1
        ",
        "
        wake -> heartbeat 1 v5 0:e1@0 registering 999ms
        1400! answer 1 v5 0:e1 -> lease to 3900
        1400! answer 1 v5 0:e1 -> 0:e1 extended to 3900
        2400! tick -> heartbeat 2 v5 0:e1@0 registering 2399ms
        2401 answer 2 v5 0:e1 -> lease to 5300
        2401 answer 2 v5 0:e1 -> 0:e1 extended to 5300
        ",
    );
}

#[test]
fn lease_that_ran_out_loses_every_grant_and_releases_it_once_connected() {
    check_holding(
        "0:e1 1:e2",
        "
        10 acquired 0:e1 7
        20 broken
        120 unreachable
        3000! tick
        3001 connected
        3002 joined 7 v5 0:e1 1:e2
        3010 done 2
        3020 assign v6 0:e5
        ",
        "
        10 acquired 0:e1 7 -> acquired #1 0:e1
        wake -> connect b:1
        3000! tick -> 0:e1 stopped
        3000! tick -> LOST 0:e1 LeaseEnded
        3000! tick -> 1:e2 stopped
        3000! tick -> LOST 1:e2 LeaseEnded
        3000! tick -> connect c:1
        3001 connected -> join m epoch 7
        3002 joined 7 v5 0:e1 1:e2 -> lease to 5901
        3002 joined 7 v5 0:e1 1:e2 -> release #2 0:e1 lease_lost 1:e2 lease_lost
        3020 assign v6 0:e5 -> GRANTED 0:e5 to 5901
        ",
    );
}

#[test]
fn lease_is_at_risk_once_two_heartbeats_have_no_answer_and_that_is_said_once() {
    check(
        "
        0 tick
        10 connected
        100 joined 7 v5 0:e1
        1200 broken
        2200 unreachable
        2300 tick
        2500 connected
        2600 joined 7 v5 0:e1
        ",
        "
        0 tick -> connect a:1
        10 connected -> join m epoch 0
        100 joined 7 v5 0:e1 -> JOINED m 7
        100 joined 7 v5 0:e1 -> lease to 2910
        100 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2910
        wake -> heartbeat 1 v5 0:e1@0 registering 910ms
        wake -> connect b:1
        wake -> AT RISK until 2910
        wake -> connect c:1
        2500 connected -> join m epoch 7
        2600 joined 7 v5 0:e1 -> lease to 5400
        2600 joined 7 v5 0:e1 -> 0:e1 extended to 5400
        2600 joined 7 v5 0:e1 -> RENEWED
        ",
    );
}

#[test]
fn lease_that_is_renewed_in_time_is_never_at_risk() {
    check(
        "
        0 tick
        10 connected
        900 joined 7 v5 0:e1
        1009 answer 1 v5 0:e1
        2005 answer 1 v5 0:e1
        2009 tick
        ",
        "
        0 tick -> connect a:1
        10 connected -> join m epoch 0
        900 joined 7 v5 0:e1 -> JOINED m 7
        900 joined 7 v5 0:e1 -> lease to 2910
        900 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2910
        wake -> heartbeat 1 v5 0:e1@0 registering 110ms
        2005 answer 1 v5 0:e1 -> lease to 3910
        2005 answer 1 v5 0:e1 -> 0:e1 extended to 3910
        ",
    );
}
