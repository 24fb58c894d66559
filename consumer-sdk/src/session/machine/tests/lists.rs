//! Lists of what is held, told in full or left out.

use super::*;

#[test]
fn answer_without_a_list_extends_what_its_heartbeat_named_and_the_next_one_is_short() {
    check_holding(
        "0:e1 1:e2",
        "
        10 acquired 0:e1 40
        11 done 1
        20 acquired 1:e2 50
        21 done 2
        1010 as-held 1 v5
        2010 as-held 2 v5
        3000 tick
        3001 broken
        ",
        "
        10 acquired 0:e1 40 -> acquired #1 0:e1
        20 acquired 1:e2 50 -> acquired #2 1:e2
        wake -> heartbeat 1 v5 0:e1@40 running 990ms 1:e2@50 running 980ms
        1010 as-held 1 v5 -> lease to 3900
        1010 as-held 1 v5 -> 0:e1 extended to 3900
        1010 as-held 1 v5 -> 1:e2 extended to 3900
        wake -> heartbeat 2 as listed v5@[40, 50]
        2010 as-held 2 v5 -> lease to 4900
        2010 as-held 2 v5 -> 0:e1 extended to 4900
        2010 as-held 2 v5 -> 1:e2 extended to 4900
        3000 tick -> heartbeat 3 as listed v5@[40, 50]
        ",
    );
}

#[test]
fn heartbeat_is_spelled_out_again_once_the_list_is_not_what_is_held_or_the_stream_is_new() {
    check_holding(
        "0:e1 1:e2",
        "
        10 acquired 0:e1 40
        11 done 1
        20 acquired 1:e2 50
        21 done 2
        1010 as-held 1 v5
        1500 release 0:e1 41
        2010 answer 2 v6 1:e2
        3010 answer 3 v6 1:e2
        3500 draining 1:e2 51
        4001 broken
        5001 connected
        5002 joined 7 v6 1:e2
        6010 answer 1 v6 1:e2
        ",
        "
        10 acquired 0:e1 40 -> acquired #1 0:e1
        20 acquired 1:e2 50 -> acquired #2 1:e2
        wake -> heartbeat 1 v5 0:e1@40 running 990ms 1:e2@50 running 980ms
        1010 as-held 1 v5 -> lease to 3900
        1010 as-held 1 v5 -> 0:e1 extended to 3900
        1010 as-held 1 v5 -> 1:e2 extended to 3900
        1500 release 0:e1 41 -> 0:e1 stopped
        1500 release 0:e1 41 -> release #3 0:e1@41 revoked
        wake -> heartbeat 2 v5 1:e2@50 running 1980ms
        2010 answer 2 v6 1:e2 -> lease to 4900
        2010 answer 2 v6 1:e2 -> 1:e2 extended to 4900
        wake -> heartbeat 3 as listed v6@[50]
        3010 answer 3 v6 1:e2 -> lease to 5900
        3010 answer 3 v6 1:e2 -> 1:e2 extended to 5900
        wake -> heartbeat 4 v6 1:e2@51 draining 500ms
        wake -> connect b:1
        wake -> AT RISK until 5900
        5001 connected -> join m epoch 7
        5002 joined 7 v6 1:e2 -> lease to 7901
        5002 joined 7 v6 1:e2 -> 1:e2 extended to 7901
        5002 joined 7 v6 1:e2 -> RENEWED
        5002 joined 7 v6 1:e2 -> release #3 0:e1@41 revoked
        wake -> heartbeat 1 v6 1:e2@51 draining 2501ms
        6010 answer 1 v6 1:e2 -> lease to 8901
        6010 answer 1 v6 1:e2 -> 1:e2 extended to 8901
        ",
    );
}

#[test]
fn answer_without_a_list_ends_what_came_and_went_meanwhile() {
    check_holding(
        "0:e1",
        "
        1005 assign v6 0:e1 1:e2
        1010 as-held 1 v7
        2005 as-held 9 v8
        ",
        "
        wake -> heartbeat 1 v5 0:e1@0 registering 999ms
        1005 assign v6 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        1010 as-held 1 v7 -> lease to 3900
        1010 as-held 1 v7 -> 1:e2 stopped
        1010 as-held 1 v7 -> LOST 1:e2 Gone
        1010 as-held 1 v7 -> 0:e1 extended to 3900
        wake -> heartbeat 2 v7 0:e1@0 registering 1999ms
        ",
    );
}

#[test]
fn answer_without_a_list_of_an_old_version_moves_nothing() {
    check_holding(
        "0:e1",
        "
        1005 assign v6 0:e1 1:e2
        1010 as-held 1 v5
        ",
        "
        wake -> heartbeat 1 v5 0:e1@0 registering 999ms
        1005 assign v6 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        ",
    );
}

#[test]
fn answer_with_an_old_version_extends_nothing_and_grants_nothing() {
    check_holding(
        "0:e1",
        "
        500 assign v6 0:e1
        1100 answer 1 v5 0:e1 1:e2
        ",
        "
        wake -> heartbeat 1 v6 0:e1@0 registering 999ms
        ",
    );
}
