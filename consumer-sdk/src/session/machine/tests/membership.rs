//! Memberships that begin anew, end or wait.

use super::*;

#[test]
fn membership_that_is_gone_is_followed_by_one_under_a_new_id() {
    check(
        "
        0 tick
        0 connected
        1 topics 4
        2 joined 7 v50 0:e1
        10 ended MEMBER_GONE
        100 connected
        110 joined 9 v40 0:e3
        120 broken
        300 connected
        310 broken STALE_MEMBER
        800 connected
        810 broken MEMBER_GONE
        2000 connected
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        2 joined 7 v50 0:e1 -> JOINED m 7
        2 joined 7 v50 0:e1 -> lease to 2900
        2 joined 7 v50 0:e1 -> GRANTED 0:e1 to 2900
        2 joined 7 v50 0:e1 -> topics #1 4
        10 ended MEMBER_GONE -> disconnect
        10 ended MEMBER_GONE -> 0:e1 stopped
        10 ended MEMBER_GONE -> LOST 0:e1 MembershipEnded
        10 ended MEMBER_GONE -> no lease
        wake -> connect b:1
        100 connected -> join m.1 epoch 0 topics 4
        110 joined 9 v40 0:e3 -> JOINED m.1 9
        110 joined 9 v40 0:e3 -> lease to 3000
        110 joined 9 v40 0:e3 -> GRANTED 0:e3 to 3000
        wake -> connect c:1
        300 connected -> join m.1 epoch 9 topics 4
        310 broken STALE_MEMBER -> 0:e3 stopped
        310 broken STALE_MEMBER -> LOST 0:e3 MembershipEnded
        310 broken STALE_MEMBER -> no lease
        wake -> connect a:1
        800 connected -> join m.2 epoch 0 topics 4
        810 broken MEMBER_GONE -> no lease
        wake -> connect b:1
        2000 connected -> join m.3 epoch 0 topics 4
        ",
    );
}

#[test]
fn refusal_for_good_ends_the_session() {
    check_holding(
        "0:e1",
        "
        10 broken
        100 connected
        110 broken SETTINGS_CONFLICT
        120 tick
        130 connected
        ",
        "
        wake -> connect b:1
        100 connected -> join m epoch 7
        110 broken SETTINGS_CONFLICT -> 0:e1 stopped
        110 broken SETTINGS_CONFLICT -> LOST 0:e1 MembershipEnded
        110 broken SETTINGS_CONFLICT -> no lease
        110 broken SETTINGS_CONFLICT -> ENDED SETTINGS_CONFLICT
        ",
    );
}

#[test]
fn leave_carries_what_is_unanswered_and_is_said_until_answered() {
    check_holding(
        "0:e1 1:e2",
        "
        10 release 0:e1 41
        20 leave
        21 leave
        30 broken
        100 connected
        110 joined 7 v5 0:e1 1:e2
        120 done 2
        130 tick
        ",
        "
        10 release 0:e1 41 -> 0:e1 stopped
        10 release 0:e1 41 -> release #1 0:e1@41 revoked
        20 leave -> 1:e2 stopped
        20 leave -> LOST 1:e2 MembershipEnded
        20 leave -> leave #2 0:e1@41 revoked 1:e2 shutdown
        wake -> connect b:1
        100 connected -> join m epoch 7
        110 joined 7 v5 0:e1 1:e2 -> lease to 3000
        110 joined 7 v5 0:e1 1:e2 -> leave #2 0:e1@41 revoked 1:e2 shutdown
        120 done 2 -> disconnect
        120 done 2 -> ENDED Left
        ",
    );
}

#[test]
fn leave_before_any_join_ends_at_once() {
    check(
        "
        0 tick
        5 leave
        ",
        "
        0 tick -> connect a:1
        5 leave -> disconnect
        5 leave -> ENDED Left
        ",
    );
}

#[test]
fn other_topics_are_said_by_joining_anew_and_cost_no_lease() {
    check(
        "
        0 tick
        10 connected
        20 joined 7 v5 0:e1
        30 subscribe t
        40 subscribe t u
        50 connected
        60 joined 7 v5 0:e1
        ",
        "
        0 tick -> connect a:1
        10 connected -> join m epoch 0
        20 joined 7 v5 0:e1 -> JOINED m 7
        20 joined 7 v5 0:e1 -> lease to 2910
        20 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2910
        40 subscribe t u -> disconnect
        40 subscribe t u -> connect b:1
        50 connected -> join m epoch 7
        60 joined 7 v5 0:e1 -> lease to 2950
        60 joined 7 v5 0:e1 -> 0:e1 extended to 2950
        ",
    );
}

#[test]
fn member_that_will_return_keeps_its_releases_for_the_leave() {
    let settings = Settings {
        instance: Some(InstanceId::new("x").unwrap()),
        returning_within: Some(Duration::from_secs(60)),
        ..settings(1)
    };
    let got = run_as(
        settings,
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1 1:e2
        10 shutdown 0:e1 41
        1001 tick
        1002 answer 1 v5 0:e1 1:e2
        1010 release 1:e2 9
        1020 leave
        1030 done 2
        ",
    );
    compare(
        &got,
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 1:e2 -> JOINED m 7
        1 joined 7 v5 0:e1 1:e2 -> lease to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 0:e1 to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        10 shutdown 0:e1 41 -> 0:e1 stopped
        wake -> heartbeat 1 v5 1:e2@0 registering 999ms 0:e1@41 draining 0ms
        1002 answer 1 v5 0:e1 1:e2 -> lease to 3900
        1002 answer 1 v5 0:e1 1:e2 -> 1:e2 extended to 3900
        1010 release 1:e2 9 -> 1:e2 stopped
        1010 release 1:e2 9 -> release #1 1:e2@9 revoked
        1020 leave -> leave #2 0:e1@41 shutdown 1:e2@9 revoked back within 60000ms
        1030 done 2 -> disconnect
        1030 done 2 -> ENDED Left
        ",
    );
}

#[test]
fn process_with_a_live_instance_id_waits_and_one_that_is_refused_ends() {
    check(
        "
        0 tick
        0 connected
        1 broken INSTANCE_WAITS
        60 connected
        61 broken INSTANCE_IN_USE
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        wake -> connect b:1
        60 connected -> join m epoch 0
        61 broken INSTANCE_IN_USE -> no lease
        61 broken INSTANCE_IN_USE -> ENDED INSTANCE_IN_USE
        ",
    );
}
