//! Which node is tried next.

use super::super::link::Addresses;
use super::*;

fn tried(script: &str) -> Vec<String> {
    let connects = |line: &String| Some(line.split_once(" -> connect ")?.1.to_owned());
    run(script).iter().filter_map(connects).collect()
}

#[test]
fn node_that_went_silent_is_not_the_next_one_tried() {
    let after_a_redirect = "
        0 tick
        0 connected
        1 broken NOT_LEADER b:1
        1 connected
        2 joined 7 v5
        4000 tick
        ";
    assert_eq!(tried(after_a_redirect)[..3], ["a:1", "b:1", "c:1"]);
}

#[test]
fn node_that_does_not_answer_a_join_is_not_the_next_one_tried() {
    let after_a_redirect = "
        0 tick
        0 connected
        1 broken NOT_LEADER b:1
        1 connected
        4000 tick
        ";
    assert_eq!(tried(after_a_redirect)[..3], ["a:1", "b:1", "c:1"]);
}

#[test]
fn node_that_cannot_be_reached_is_not_the_next_one_tried() {
    let after_a_redirect = "
        0 tick
        0 connected
        1 broken NOT_LEADER b:1
        1 unreachable
        100 tick
        ";
    assert_eq!(tried(after_a_redirect)[..3], ["a:1", "b:1", "c:1"]);
}

#[test]
fn redirect_back_to_an_unreachable_node_costs_a_quarter_of_an_interval() {
    let stale = "
        0 tick
        0 connected
        1 broken NOT_LEADER b:1
        1 unreachable
        100 tick
        100 connected
        101 broken NOT_LEADER b:1
        351 tick
        500 tick
        ";
    assert_eq!(tried(stale), ["a:1", "b:1", "c:1", "b:1", "a:1"]);
}

#[test]
fn node_that_was_given_up_is_tried_again_in_the_next_round() {
    let silence = "
        0 tick
        0 connected
        20000 tick
        ";
    let tried = tried(silence);
    assert!(tried[1..].contains(&"a:1".to_owned()), "{tried:?}");
}

#[test]
fn redirect_back_to_a_silent_node_costs_half_an_interval_and_not_the_lease() {
    let stale = "
        0 tick
        0 connected
        1 joined 7 v5 0:e1
        1001 tick
        1600 connected
        1601 broken NOT_LEADER a:1
        1601 connected
        2250 connected
        2251 joined 7 v5 0:e1
        2900 tick
        ";
    let lines = run(stale);
    assert!(!lines.iter().any(|line| line.contains("LOST")), "{}", lines.join("\n"));
    assert_eq!(tried(stale), ["a:1", "b:1", "a:1", "c:1"]);
}

#[test]
fn slow_node_gets_its_time_after_two_short_waits() {
    let mut addresses = Addresses::new(vec!["a:1".into(), "b:1".into()]);
    let lengths = settings(1).lease;
    let usual = Duration::from_millis(INTERVAL_MS / 2 * 3);
    let mut waits = Vec::new();
    for _ in 0..4 {
        addresses.leader = Some("a:1".into());
        addresses.take();
        waits.push(addresses.join_wait(&lengths));
        addresses.give_up();
    }
    let short = Duration::from_millis(INTERVAL_MS / 2);
    assert_eq!(waits, [usual, short, short, usual]);
}
